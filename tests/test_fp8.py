"""Whether eight bits are the rounding of what was sent: every number by itself, against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from a5lib.models import encode_prompt, load_policy, load_tokenizer
from a5lib.prompts import load_prompt
from a5lib.rollouts import fp8
from a5lib.rollouts.checksums import checksum
from a5lib.rollouts.fp8 import FP8, as_sent
from a5lib.rollouts.mismatch import ROUNDING
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.toy_problems import toy_problems


def rounded(weight):
    """As vLLM 0.32 rounds: a scale for each row, then a true division in float32."""
    scale = (weight.abs().amax(1, keepdim=True).float() / 448).clamp(min=1 / (448 * 512))
    return (weight / scale).clamp(-448, 448).to(FP8), scale


def random_weight(seed=0, rows=64, columns=96):
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(rows, columns, generator=generator)).bfloat16()


def found(held, scale, sent):
    """Whether the checksum is that of what was sent."""
    return bool(checksum(as_sent(held, scale, sent)) == checksum(sent))


def test_a_right_rounding_has_the_checksum_of_what_was_sent(monkeypatch) -> None:
    weight = random_weight()
    weight[3] = 0
    weight[4] *= 1e-3  # below the smallest scale
    weight[5] *= 1e6
    for part in (fp8.PART, 96 * 10):
        monkeypatch.setattr(fp8, "PART", part)
        back = as_sent(*rounded(weight), weight)
        assert back.dtype == torch.bfloat16 and torch.equal(back, weight)


def test_a_number_is_right_up_to_half_a_step_and_no_further() -> None:
    # the row's scale is 1; from 64 on the numbers of eight bits are 8 apart, from 256 on 32
    sent = torch.tensor([[448.0, 67.9, 68.0, 68.1, 272.0]])
    scale = torch.ones(1, 1)
    down = torch.tensor([[448.0, 64.0, 64.0, 64.0, 256.0]]).to(FP8)
    up = torch.tensor([[448.0, 72.0, 72.0, 72.0, 288.0]]).to(FP8)
    assert as_sent(down, scale, sent).tolist() == [[448.0, pytest.approx(67.9), 68.0, 64.0, 272.0]]
    assert as_sent(up, scale, sent).tolist() == [[448.0, 72.0, 68.0, pytest.approx(68.1), 272.0]], "midway: either"


@pytest.mark.parametrize("bits", [1, 2**30])
def test_every_single_number_of_another_value_shows(bits) -> None:
    weight = random_weight(rows=4, columns=8)
    held, scale = rounded(weight)
    assert found(held, scale, weight)
    for i in range(32):
        other = held.clone()
        other.view(torch.uint8).view(-1)[i] ^= bits % 127  # the next number, or one far off
        assert not found(other, scale, weight)


def test_an_old_weight_shows_however_small_the_update_was() -> None:
    old = random_weight(rows=256, columns=256)
    new = old.clone()
    new[7] *= 1.01  # one row, by less than a third of a step
    held, scale = rounded(old)
    assert not found(held, scale, new)
    assert found(*rounded(new), new)
    mixed = torch.where(torch.arange(256)[:, None] == 7, rounded(new)[0].float(), held.float()).to(FP8)
    assert not found(mixed, scale, new), "new numbers with the scale of the old ones"
    assert not found(held, rounded(new)[1], new), "old numbers with the new scale"


def test_rows_that_changed_places_show_and_so_does_what_is_no_number() -> None:
    weight = random_weight()
    held, scale = rounded(weight)
    swapped = [1, 0, *range(2, 64)]
    assert not found(held[swapped], scale[swapped], weight)
    for broken in (torch.full_like(scale, torch.nan), torch.zeros_like(scale), torch.full_like(scale, torch.inf)):
        assert not found(held, broken, weight)
    assert not found(torch.full(held.shape, torch.nan).to(FP8), scale, weight)


class Rounding(nn.Module):
    """A linear layer as vLLM computes it in eight bits: its weight by rows, its input by tokens."""

    def __init__(self, layer):
        super().__init__()
        held, scale = rounded(layer.weight)
        self.weight = (held.float() * scale).to(layer.weight.dtype)

    def forward(self, x):
        held, scale = rounded(x.flatten(0, -2))
        return ((held.float() * scale) @ self.weight.float().T).to(x.dtype).unflatten(0, x.shape[:-1])


def test_the_mismatch_that_eight_bits_alone_give_is_some_three_times_that_of_bfloat16() -> None:
    """`ROUNDING` knows bfloat16 from a larger model; how much more eight bits take is measured with the toy model."""
    model, _ = load_policy("toy", device="cpu", dtype="float32")
    tokenizer, prompt = load_tokenizer("toy"), load_prompt("r1_zero")
    prompts = [encode_prompt(tokenizer, prompt.render(p.question)) for p in toy_problems("validation", 12)]
    rollouts = TransformersRollouts(model, tokenizer)
    rollouts.sync(model.named_parameters(), 0)
    completions = rollouts.generate(prompts, n=4, max_tokens=60, temperature=1.0, stop=["</answer>"], seed=0)

    @torch.no_grad()
    def log_probs(model):
        values = []
        for c in completions:
            ids = torch.tensor([prompts[c.prompt_index] + c.token_ids])
            logits = model(ids).logits[0, -len(c.token_ids) - 1 : -1].double()
            values.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(c.token_ids)[:, None]))
        return torch.cat(values)

    exact, bfloat16 = log_probs(model), log_probs(model.bfloat16())
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, Rounding(child))
    eight = log_probs(model)
    of_bfloat16, of_eight = float((bfloat16 - exact).abs().mean()), float((eight - bfloat16).abs().mean())
    assert ROUNDING[FP8] / ROUNDING[torch.bfloat16] == pytest.approx(of_eight / of_bfloat16, rel=0.5)
