"""Packing: sequences of a batch laid end to end in microbatches of a fixed number of tokens, so that padding between
sequences is not computed. This file knows token ids and masks; it does not know the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from a5lib.engines import Batch

ATTENTION = "a5_packed"


@dataclass(frozen=True)
class Microbatch:
    """Sequences laid end to end: n tokens of `len(lengths)` sequences, and which of them are trained.

    `ids` and `positions` are int64 [n]; `starts` int32 [s + 1] holds where each sequence begins, and n at the end.
    `answers` int64 [r] are the places of the trained response tokens among the n, `labels` int64 [r] their labels, and
    `cells` int64 [r] their places in the flat [B * T] batch.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    answers: Tensor
    labels: Tensor
    cells: Tensor
    lengths: tuple[int, ...] = field(default=())

    def shifted(self, cells: int) -> Microbatch:
        """The same in a larger batch, whose cells before this part of it number `cells`."""
        return replace(self, cells=self.cells + cells)

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device."""
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def trained_rows(batch: Batch) -> Tensor:
    """Numbers of the rows that an update runs: those with a non-zero advantage and a response token. int64 [kept]."""
    return ((batch["advantages"] != 0) & batch["response_mask"].bool().any(dim=1)).nonzero().flatten()


def pack(batch: Batch, tokens: int, *, pad_to: int | None = None, sequences: int | None = None) -> list[Microbatch]:
    """Cut every trained row after its last response token and fill microbatches, the longest rows first.

    A microbatch holds at most `tokens` tokens, or one row where that is longer.

    Args:
        batch: see `Engine.accumulate`.
        tokens: tokens in a microbatch.
        pad_to: fill every microbatch up to this many tokens with sequences that count for nothing, so that all have one
            shape (which compiled code wants). None: no filling.
        sequences: fill `starts` up to this many sequences with empty ones; what fills the tokens is cut into no more
            than these leave. None: no filling.

    >>> mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "labels": torch.tensor([[6, 7, 1], [9, 1, 0]]),
    ...          "response_mask": mask, "advantages": torch.tensor([1.0, -1.0])}
    >>> only = pack(batch, 8)[0]
    >>> only.ids.tolist(), only.positions.tolist(), only.answers.tolist(), only.labels.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 0, 1], [1, 2, 4], [7, 1, 1])
    """
    mask = batch["response_mask"].bool()
    width = mask.shape[1]
    rows = trained_rows(batch)
    lengths = width - mask[rows].flip(1).int().argmax(dim=1)  # [kept], up to the last response token
    order = lengths.argsort(descending=True, stable=True)
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for row, length in zip(rows[order].tolist(), lengths[order].tolist(), strict=True):
        if length > room or not groups:
            groups.append([])
            room = max(tokens, length)
        groups[-1].append((row, length))
        room -= length
    return [_lay_out(batch, mask, group, pad_to, sequences) for group in groups]


def _lay_out(batch: Batch, mask: Tensor, group: list[tuple[int, int]], pad_to: int | None,
             sequences: int | None) -> Microbatch:  # fmt: skip
    width = mask.shape[1]
    cells = torch.cat([torch.arange(row * width, row * width + length) for row, length in group])
    lengths = [length for _, length in group]
    ids = batch["input_ids"].reshape(-1)[cells]
    counted = mask.reshape(-1)[cells]
    filling = max(0, (pad_to or 0) - len(ids))
    piece = max(lengths) if sequences is None else max(*lengths, -(-filling // max(1, sequences - len(group))))
    lengths += [min(piece, filling - start) for start in range(0, filling, piece)]
    starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()
    if sequences is not None:
        starts = torch.cat([starts, starts[-1:].expand(max(0, sequences + 1 - len(starts)))])
    return Microbatch(
        ids=torch.cat([ids, ids.new_zeros(filling)]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        starts=starts,
        answers=counted.nonzero().flatten(),
        labels=batch["labels"].reshape(-1)[cells][counted],
        cells=cells[counted],
        lengths=tuple(lengths),
    )


def flash_fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention runs there: bfloat16 on a card of compute capability 8.0 or newer."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     dropout: float = 0.0, scaling: float | None = None, *, starts: Tensor, longest: int,
                     lengths: tuple[int, ...] | None = None, **unused: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within each packed sequence, as a transformers attention function.

    `query` is [1, heads, n, D], `key` and `value` [1, kv heads, n, D]; the result is [1, n, heads, D]. With `lengths`
    each sequence goes through transformers' own sdpa function, which runs everywhere; without, one
    variable-length kernel takes them all.
    """
    if lengths is not None:
        parts = zip(*(tensor.split(list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
        return torch.cat(
            [sdpa_attention_forward(module, q, k, v, None, scaling=scaling)[0] for q, k, v in parts], 1
        ), None
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [n, heads, D]
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0))
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, packed_attention)
