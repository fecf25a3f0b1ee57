"""Attention over packed sequences, as functions that a transformers layer calls.

Each packed segment attends to itself, causally. Where responses share a prompt, the prompt is one segment and its
answers are others; an answer then attends to all of the prompt as well. The two parts of its attention are computed
apart and merged: with s the sum of exponentials that a part's softmax divides by, the whole is the parts' mean weighed
by s (Dao et al. 2022, arXiv 2205.14135, merge blocks in this way). Going back, each part takes the merged sum, and
gradients add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "a5_packed"


@dataclass(frozen=True)
class Packing:
    """How a microbatch of n tokens is cut.

    `starts` int32 [s + 1] says where each segment begins, and n at the end. `prompts` int32 [g + 1] says where each
    shared prompt begins, which lie at the front, and `follows` int32 [g + 1] where the answers to each begin, which lie
    side by side (both None: no prompt is shared). No segment has more than `longest` tokens.

    Where segments are run one by one, `lengths` are their tokens, and `shared` holds the number of each shared prompt's
    segment with those of its answers; where one kernel takes all, `lengths` is None.
    """

    starts: Tensor
    prompts: Tensor | None
    follows: Tensor | None
    longest: int
    lengths: tuple[int, ...] | None
    shared: tuple[tuple[int, range], ...] = ()

    def to(self, device: torch.device) -> Packing:
        """The same on a device."""
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def flash_fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention runs there: bfloat16 on a card of compute capability 8.0 or newer."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     dropout: float = 0.0, scaling: float | None = None, *, packing: Packing,
                     **unused: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of packed sequences: `query` [1, heads, n, D], `key` and `value` [1, kv heads, n, D], to
    [1, n, heads, D].
    """
    if packing.lengths is not None:
        return segment_by_segment(module, query, key, value, scaling, packing), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [n, heads, D]
    out: Any = _PackedFlash.apply(q, k, v, packing.starts, packing.prompts, packing.follows, packing.longest, scaling)
    return out.unsqueeze(0), None


def segment_by_segment(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
                       packing: Packing) -> Tensor:  # fmt: skip
    """The plain way, which runs everywhere: transformers' own sdpa function for one segment after another."""
    assert packing.lengths is not None
    parts = [tensor.split(list(packing.lengths), dim=2) for tensor in (query, key, value)]
    before = {answer: prompt for prompt, answers in packing.shared for answer in answers}
    out = []
    for i, (q, k, v) in enumerate(zip(*parts, strict=True)):
        mask = None
        if i in before:
            k, v = (torch.cat([part[before[i]], own], dim=2) for part, own in zip(parts[1:], (k, v), strict=True))
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            mask = mask[None, None]
        out.append(sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)[0])
    return torch.cat(out, dim=1)


class _PackedFlash(torch.autograd.Function):
    """One flash kernel for all segments, and one for all answers over their shared prompts; [n, heads, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, prompts: Tensor | None,
                follows: Tensor | None, longest: int, scaling: float | None) -> Tensor:  # fmt: skip
        out, log_sum = _flash(q, k, v, starts, starts, longest, longest, True, scaling)
        if prompts is not None and follows is not None:
            over, over_sum = _flash(q, k, v, follows, prompts, len(q), longest, False, scaling)
            answers = _between(follows, len(q))
            over_sum = torch.where(answers, over_sum, -torch.inf)  # [heads, n]
            merged = torch.logaddexp(log_sum, over_sum)
            share = (over_sum - merged).exp().t()[:, :, None]  # of the prompt in an answer's attention
            mean = out + share * (over.float() - out)
            out = torch.where(answers[:, None, None], mean, out).to(q.dtype)
            log_sum = merged
        ctx.save_for_backward(q, k, v, out, log_sum, starts, prompts, follows)
        ctx.longest, ctx.scaling = longest, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, log_sum, starts, prompts, follows = ctx.saved_tensors
        grad = grad.contiguous()
        longest, scaling = ctx.longest, ctx.scaling
        dq, dk, dv = _flash_back(grad, q, k, v, out, log_sum, starts, starts, longest, longest, True, scaling)
        if prompts is not None:
            more = _flash_back(grad, q, k, v, out, log_sum, follows, prompts, len(q), longest, False, scaling)
            inside = [_between(cut, len(q))[:, None, None] for cut in (follows, prompts, prompts)]
            # What lies outside the kernel's segments was never written.
            dq, dk, dv = (a + torch.where(here, b, 0.0) for a, b, here in zip((dq, dk, dv), more, inside, strict=True))
        return dq, dk, dv, None, None, None, None, None


def _flash(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,
           causal: bool, scaling: float | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [n, heads, D] and the logarithm of the softmax's sum, float32 [heads, n]."""
    result = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False, scale=scaling
    )
    return result[0], result[1]


@torch.library.custom_op("a5lib::flash_back", mutates_args=())
def _flash_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, starts_q: Tensor,
                starts_k: Tensor, longest_q: int, longest_k: int, causal: bool,
                scaling: float | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v; where no segment lies they hold anything.

    The kernel takes `log_sum` for contiguous without looking. Compiled code may leave gaps between its rows, which only
    an operator of its own sees: the compiler believes in its own view of the tensor and drops a plain `contiguous()`.
    """
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.zeros((), dtype=torch.uint64, device=q.device),
    )
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, log_sum.contiguous(), starts_q, starts_k, longest_q, longest_k, 0.0, causal, *no_dropout,
        scale=scaling,
    )  # fmt: skip
    return dq, dk, dv


@_flash_back.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _between(starts: Tensor, n: int) -> Tensor:
    """Which of n places lie in the segments, bool [n]."""
    places = torch.arange(n, device=starts.device)
    return (places >= starts[0]) & (places < starts[-1])


AttentionInterface.register(ATTENTION, packed_attention)
