"""A real vLLM on the CPU, as a worker under its own Python, against transformers with the same weights in float32."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from a5lib.models import TOY_MODEL_DIR, encode_prompt, load_policy, load_tokenizer
from a5lib.prompts import load_prompt
from a5lib.records import Completion
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.rollouts.vllm_backend import VllmColocated
from a5lib.rollouts.worker_process import WorkerError
from a5lib.toy_problems import toy_problems
from tests.helpers import tiny_tokenizer

PYTHON = os.environ.get("A5_VLLM_PYTHON")
ENGINES = Path(__file__).with_name("engines.py")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="run by `make test-vllm`"),
    pytest.mark.timeout(300),  # an engine starts in half a minute, or in two on a busy machine
]


def settings(model: str | Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model), "dtype": "float32", "max_model_len": 160, "max_num_seqs": 64,
        "max_num_batched_tokens": 4096, "top_p": 1.0,
        "kv_cache_bytes": 2**28, "memory_share": 0.5, "trust_remote_code": False,
        "quantization": "none",
    } | changes  # fmt: skip


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int, size: float) -> None:
    """Change every tensor, norms included, by noise of a share of its mean size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(size * parameter.abs().mean() * noise)


@torch.no_grad()
def reference_log_probs(
    model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float
) -> list[float]:
    """Log-probabilities of the completion's tokens, from one pass over prompt and completion."""
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].double()
    rows = torch.log_softmax(logits / temperature, -1)
    return rows[torch.arange(len(rows)), torch.tensor(completion.token_ids)].tolist()


def same_greedy(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [(c.prompt_index, c.text, c.finish_reason) for c in ours] == [
        (c.prompt_index, c.text, c.finish_reason) for c in theirs
    ]


class Pair:
    """vLLM and transformers with one model, whose present weights each of them gets at a sync."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vllm: VllmColocated) -> None:
        self.model, self.tokenizer, self.vllm = model, tokenizer, vllm
        self.transformers = TransformersRollouts(model, tokenizer)
        self.step = 0

    def sync(self) -> None:
        """Once more, as after an update."""
        self.vllm.release()
        self.step += 1
        for backend in (self.vllm, self.transformers):
            backend.sync(self.model.named_parameters(), self.step)

    def greedy(self, prompts: list[list[int]], max_tokens: int, stop: Sequence[str] = ()) -> list[list[Completion]]:
        """Those of vLLM and those of transformers."""
        return [
            backend.generate(prompts, n=1, max_tokens=max_tokens, temperature=0.0, stop=stop, seed=0)
            for backend in (self.vllm, self.transformers)
        ]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The toy model: OLMo-2, which vLLM 0.32 runs through transformers' own modules."""
    model, _ = load_policy("toy", device="cpu", dtype="float32")
    tokenizer = load_tokenizer("toy")
    run_dir = tmp_path_factory.mktemp("toy")
    with VllmColocated(
        model.named_parameters(), settings(TOY_MODEL_DIR, max_model_len=256), run_dir, python=PYTHON
    ) as vllm:
        yield Pair(model.eval(), tokenizer, vllm)


@pytest.fixture(scope="module")
def prompts(toy: Pair) -> list[list[int]]:
    template = load_prompt("r1_zero")
    return [encode_prompt(toy.tokenizer, template.render(p.question)) for p in toy_problems("validation", 12)]


STOP = ("</answer>",)


def test_greedy_generations_equal_transformers_after_every_update(toy: Pair, prompts: list[list[int]]) -> None:
    before: list[list[int]] = []
    for update in range(4):
        toy.sync()
        ours, theirs = toy.greedy(prompts, 40, STOP)
        same_greedy(ours, theirs)
        tokens = [c.token_ids for c in ours]
        assert tokens != before, "the update was too small to be seen"
        before = tokens
        perturb(toy.model, seed=update, size=0.1)
    assert [e.call for e in toy.vllm.events][-7:] == [
        "sleep 2", "memory", "wake weights", "load", "wake kv_cache", "reset_prefix_cache", "generate",
    ]  # fmt: skip


def test_V08_vllm_takes_no_port_that_another_program_could_have_and_leaves_no_file(toy: Pair) -> None:
    """What listens has its port from the system, on the loopback alone. vLLM 0.32 itself would leave a file of each
    engine in the temporary folder, and 0.24 would ask for a port first and take it later.
    """
    toy.sync()
    listening = [c for c in psutil.Process(toy.vllm.facts["pid"]).net_connections("inet") if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}
    assert "distributed_init_method" not in toy.vllm.log.read_text(), "vLLM made a process group of its own"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_sampled_tokens_are_those_of_float32(
    toy: Pair, prompts: list[list[int]], temperature: float
) -> None:
    toy.sync()
    completions = toy.vllm.generate(prompts, n=4, max_tokens=40, temperature=temperature, stop=STOP, seed=7)
    differences = [
        abs(ours - theirs)
        for c in completions
        for ours, theirs in zip(
            c.log_probs, reference_log_probs(toy.model, prompts[c.prompt_index], c, temperature), strict=True
        )
    ]
    assert len(differences) > 500
    assert max(differences) < 1e-3, "before the temperature? of another token? of other weights?"
    assert sum(differences) / len(differences) < 1e-4


def test_each_completion_has_a_seed_of_its_own(toy: Pair, prompts: list[list[int]]) -> None:
    toy.sync()

    def sample(prompts: list[list[int]], seed: int) -> list[list[int]]:
        completions = toy.vllm.generate(prompts, n=4, max_tokens=30, temperature=1.5, seed=seed)
        return [c.token_ids for c in completions]

    first = sample(prompts[:6], 1)
    assert len({tuple(ids) for ids in first}) == 24, "completions of a group, or of neighbouring groups, are the same"
    assert sample(prompts[:6], 1) == first, "a run cannot be repeated"
    assert sample(prompts[:3], 1) == first[:12], "a completion depends on the other prompts of the call"
    assert not any(a == b for a, b in zip(sample(prompts[:6], 2), first, strict=True)), "the seed makes no difference"


def test_first_tokens_are_as_frequent_as_they_are_likely(toy: Pair, prompts: list[list[int]]) -> None:
    """Seeds that resemble each other would show here."""
    toy.sync()
    count = 1000
    completions = toy.vllm.generate(prompts[:1], n=count, max_tokens=1, temperature=1.5, seed=3)
    with torch.no_grad():
        expected = count * torch.softmax(toy.model(torch.tensor(prompts[:1])).logits[0, -1].double() / 1.5, -1)
    seen = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=len(expected)).double()
    often = expected >= 5
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    chi_square, degrees = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
    assert degrees > 5
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # mean and standard deviation of its distribution


def test_a_stop_string_is_kept_and_may_begin_within_a_token(toy: Pair, prompts: list[list[int]]) -> None:
    toy.sync()
    ours, theirs = toy.greedy(prompts, 60)
    same_greedy(ours, theirs)
    ended = [c for c in ours if c.finish_reason == "stop"]
    assert ended and all(c.token_ids[-1] == toy.tokenizer.eos_token_id for c in ended)

    pieces = [toy.tokenizer.decode([i]) for i in ended[0].token_ids]
    across = next(a[-2:] + b[:2] for a, b in pairwise(pieces[2:]) if len(a) > 2 and len(b) > 2)
    ours, theirs = toy.greedy(prompts, 60, [across, "</answer>"])
    same_greedy(ours, theirs)
    assert ours[prompts.index(prompts[ended[0].prompt_index])].text.endswith(across)
    assert any(c.text.endswith("</answer>") for c in ours), "the stop string was cut off"

    ours, theirs = toy.greedy(prompts, 5, STOP)
    same_greedy(ours, theirs)
    assert {c.finish_reason for c in ours} == {"length"}


def test_text_is_decoded_as_with_transformers_whatever_was_sampled(toy: Pair, prompts: list[list[int]]) -> None:
    """Broken characters, and special tokens in the middle."""
    head = toy.model.get_output_embeddings().weight
    trained = head.detach().clone()
    with torch.no_grad():
        head.mul_(0.01)  # now all tokens are about as likely
    toy.sync()
    completions = toy.vllm.generate(prompts, n=8, max_tokens=20, temperature=1.0, stop=["zzzz"], seed=5)
    with torch.no_grad():
        head.copy_(trained)
    assert any("\N{REPLACEMENT CHARACTER}" in c.text for c in completions)
    assert any(toy.tokenizer.pad_token_id in c.token_ids[:-1] for c in completions)
    for c in completions:
        assert c.text == toy.transformers.text(c.token_ids)


@pytest.mark.parametrize(
    ("temperature", "top_p", "sentence"),
    [
        (1.0, 0.9, r"made for top-p 1 and cannot serve 0\.9"),
        (2.5, 1.0, r"does not sample at temperature 2\.5"),
        (0.001, 1.0, r"does not sample at temperature 0\.001"),
    ],
)
def test_what_vllm_does_not_have_is_refused_and_nothing_is_lost(
    toy: Pair, prompts: list[list[int]], temperature: float, top_p: float, sentence: str
) -> None:
    toy.sync()
    with pytest.raises(RuntimeError, match=sentence):
        toy.vllm.generate(prompts, n=1, max_tokens=5, temperature=temperature, top_p=top_p, seed=0)
    same_greedy(*toy.greedy(prompts, 5))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, which vLLM has a model of its own for: a tied head that is filled up to 320 rows, more heads than key
    heads, and biases.
    """
    folder = tmp_path_factory.mktemp("llama")
    tiny_tokenizer().save_pretrained(folder)
    LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def new_llama(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_a_tied_model_is_updated_and_each_guard_is_needed(llama_folder: Path) -> None:
    model, tokenizer = new_llama(llama_folder), tiny_tokenizer()
    forget, spoil = llama_folder / "forget", llama_folder / "spoil"
    prompts = [[3 + (7 * i + j) % 250 for j in range(40)] for i in range(6)]
    with VllmColocated(
        model.named_parameters(), settings(llama_folder, forget=str(forget), spoil=str(spoil)), llama_folder,
        python=PYTHON, engine=f"{ENGINES}:ForgetfulEngine",
    ) as vllm:  # fmt: skip
        pair = Pair(model, tokenizer, vllm)
        for update in range(3):
            pair.sync()
            same_greedy(*pair.greedy(prompts, 20))
            perturb(model, seed=update, size=0.2)

        forget.touch()
        pair.sync()
        ours, theirs = pair.greedy(prompts, 20)
        assert ours != theirs, "keys and values of old weights make no difference: the prefix cache is not in use"
        forget.unlink()
        spoil.touch()
        with pytest.raises(RuntimeError, match=r"vLLM changed or lost model\.layers\.0\.self_attn\.rotary_emb\.cos"):
            pair.sync()
        spoil.unlink()
        pair.sync()
        same_greedy(*pair.greedy(prompts, 20))

        name, write = "model.layers.1.self_attn.k_proj.bias", vllm.channel.write
        vllm.channel.write = lambda *given: (sums := write(*given)) | {name: sums[name] + 1}  # type: ignore[method-assign]
        with pytest.raises(WorkerError, match=r"k_proj\.bias has other values \(held as .*qkv_proj\.bias\[128:192\]\)"):
            pair.sync()


def test_a_packed_head_is_found_before_anything_is_generated(llama_folder: Path) -> None:
    with (
        VllmColocated(
            new_llama(llama_folder).named_parameters(), settings(llama_folder), llama_folder, python=PYTHON,
            engine=f"{ENGINES}:PackedHeadEngine",
        ) as vllm,
        pytest.raises(WorkerError, match=r"vLLM computes .* with packed copies of weights"),
    ):  # fmt: skip
        vllm.sync([], 0)
