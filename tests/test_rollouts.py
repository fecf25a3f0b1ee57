"""The lean generation loop against `model.generate` and against an independent plain loop, on a real OLMo-2 model."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from a5lib.rollouts.transformers_backend import TransformersRollouts, sample
from tests.helpers import tiny_olmo2, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_olmo2(seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def backend(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TransformersRollouts:
    backend = TransformersRollouts(model, tokenizer, batch_size=64)
    backend.sync(model.named_parameters(), 0)
    return backend


def ragged_prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 250) for _ in range(draw.randint(1, 9))] for _ in range(count)]


def library_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         do_sample=False, max_new_tokens=max_tokens)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_generate_on_ragged_prompts(model, backend) -> None:
    prompts = ragged_prompts(7)
    completions = backend.generate(prompts, n=2, max_tokens=12, temperature=0.0, seed=0)
    assert [c.prompt_index for c in completions] == [i for i in range(7) for _ in range(2)], "prompt-major order"
    for completion in completions:
        expected = library_greedy(model, prompts[completion.prompt_index], 12)
        assert completion.token_ids == expected, "a padded prompt changed its neighbour's positions or attention"


def test_log_probs_are_those_of_the_full_sequence_in_float64(model, backend) -> None:
    prompts = ragged_prompts(5, seed=1)
    reference = tiny_olmo2(seed=3).double()
    for completion in backend.generate(prompts, n=3, max_tokens=10, temperature=0.7, seed=5):
        prompt = prompts[completion.prompt_index]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0] / 0.7
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        expected = rows.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, rtol=0, atol=2e-5)


def test_a_completion_does_not_depend_on_how_the_batch_is_cut(model, tokenizer) -> None:
    prompts = ragged_prompts(6, seed=2)
    results = []
    for size in (3, 7, 64):
        backend = TransformersRollouts(model, tokenizer, batch_size=size)
        backend.sync(model.named_parameters(), 0)
        results.append([c.token_ids for c in backend.generate(prompts, n=4, max_tokens=10, temperature=1.0, seed=9)])
    assert results[0] == results[1] == results[2]


def test_a_stop_string_ends_the_response_and_stays_in_the_text(model, tokenizer, monkeypatch) -> None:
    response = tokenizer.encode("so 7 </answer> more", add_special_tokens=False)
    completion = scripted(model, tokenizer, monkeypatch, response, stop=["</answer>"])
    assert completion.text.endswith("</answer>"), "the stop string belongs to the response: the format reward needs it"
    assert completion.finish_reason == "stop"
    assert completion.token_ids == response[: len(completion.token_ids)]
    assert "more" not in tokenizer.decode(completion.token_ids)


def test_the_end_token_is_kept_in_the_ids_and_not_in_the_text(model, tokenizer, monkeypatch) -> None:
    response = [*tokenizer.encode("7", add_special_tokens=False), tokenizer.eos_token_id, 5]
    completion = scripted(model, tokenizer, monkeypatch, response)
    assert completion.token_ids == response[:-1], "the policy must be trained to stop"
    assert (completion.text, completion.finish_reason) == ("7", "stop")


def test_a_response_cut_off_says_length(model, tokenizer, monkeypatch) -> None:
    response = tokenizer.encode("so so so so", add_special_tokens=False)
    completion = scripted(model, tokenizer, monkeypatch, response, max_tokens=3)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


def test_M10_ids_beyond_the_tokenizer_are_kept_and_have_no_text(model, tokenizer, monkeypatch) -> None:
    phantom = model.config.vocab_size - 1
    assert phantom >= len(tokenizer), "the fixture must have more embedding rows than tokens"
    seven = tokenizer.encode("7", add_special_tokens=False)
    completion = scripted(model, tokenizer, monkeypatch, [*seven, phantom, *seven, tokenizer.eos_token_id])
    assert completion.token_ids == [*seven, phantom, *seven, tokenizer.eos_token_id]
    assert completion.text == "77"


def scripted(model, tokenizer, monkeypatch, response: list[int], *, stop=(), max_tokens: int = 40):
    """One greedy completion of a real model whose next-token choice is replaced by a script."""
    import a5lib.rollouts.transformers_backend as module

    script = iter(response + [tokenizer.eos_token_id] * max_tokens)
    monkeypatch.setattr(module, "sample", lambda logits, *_: (torch.tensor([next(script)]), torch.zeros(1)))
    backend = TransformersRollouts(model, tokenizer)
    backend.sync([], 0)
    return backend.generate([[3, 4]], n=1, max_tokens=max_tokens, temperature=0.0, stop=stop, seed=0)[0]


def test_sampling_frequencies_are_the_probabilities() -> None:
    probs = torch.tensor([0.05, 0.6, 0.25, 0.1])
    draws = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = sample(probs.log().expand(len(draws), 4), draws, 1.0)
    frequencies = torch.bincount(tokens, minlength=4) / len(draws)
    torch.testing.assert_close(frequencies, probs, rtol=0, atol=0.01)  # four standard errors
    torch.testing.assert_close(log_probs, probs.log()[tokens])


def test_temperature_sharpens_by_the_power_law() -> None:
    probs = torch.tensor([0.2, 0.8])
    _, log_probs = sample(probs.log()[None], torch.tensor([0.0]), 0.5)
    assert log_probs.exp().item() == pytest.approx(0.04 / 0.68)  # p^2 normalised; u = 0 takes the first token


def test_an_impossible_token_is_never_sampled() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf, 0.0, -torch.inf]])
    top = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    grid = torch.cat([torch.linspace(0, 1, 1001)[:-1], top[None]])
    tokens, _ = sample(logits.expand(len(grid), 5), grid, 1.0)
    assert set(tokens.tolist()) == {0, 1, 3}
    kept, _ = sample(torch.tensor([[0.5, 0.3, 0.2]]).log().expand(len(grid), 3), grid, 1.0, top_p=0.6)
    assert set(kept.tolist()) == {0, 1}, "top-p keeps the likeliest tokens that reach the mass"
