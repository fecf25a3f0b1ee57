"""Packing: sequences of a batch laid end to end in microbatches of a fixed number of tokens, so that padding between
sequences is not computed, and a prompt that several responses share is computed once. This file knows token ids and
masks; it does not know the model.

The work is numpy's, whose operations take one thread. Many of torch's on the CPU take all of them, however small: then
the card would wait whenever another program has taken one core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from a5lib.engines import Batch
from a5lib.engines.attention import Packing
from a5lib.engines.plan import SEGMENTS, most_pieces, segments


@dataclass(frozen=True)
class Microbatch:
    """Sequences laid end to end: n tokens in segments, and which of them are trained.

    A row of the batch is one segment, or two where it shares its prompt with others: the prompt's, which they have in
    common, and its own.

    `ids` and `positions` are int64 [n]; `packing` says where the segments lie. `answers` int64 [r] are the places of
    the tokens whose next token is a trained response token, `labels` int64 [r] these next tokens, and `cells` int64 [r]
    their places in the flat [B * T] batch. The last token of a shared prompt is in `answers` once for each response.
    """

    ids: Tensor
    positions: Tensor
    answers: Tensor
    labels: Tensor
    cells: Tensor
    packing: Packing

    def shifted(self, cells: int) -> Microbatch:
        """The same in a larger batch, whose cells before this part of it number `cells`."""
        return replace(self, cells=self.cells + cells)

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device."""
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved, packing=self.packing.to(device))


@dataclass(frozen=True)
class Row:
    """A row of the batch: its number, the tokens of its prompt, and its tokens up to the last that predicts."""

    number: int
    prompt: int
    length: int


def trained_rows(batch: Batch) -> NDArray[np.intp]:
    """Numbers of the rows that an update runs: those with a non-zero advantage and a response token. [kept]."""
    return np.flatnonzero((batch["advantages"].numpy() != 0) & batch["response_mask"].numpy().any(axis=1))


def pack(batch: Batch, tokens: int, *, fixed: bool = False, longest: int = 0) -> list[Microbatch]:
    """Cut every trained row after its last response token and fill microbatches, rows with the same prompt together.

    A microbatch holds at most `tokens` tokens, or one row where that is longer. Groups come in the order of their
    longest row, the longest first, and so do the rows of a group.

    Args:
        batch: see `Engine.accumulate`.
        tokens: tokens in a microbatch.
        fixed: fill every microbatch up to `tokens`, with segments that count for nothing, so that all have one shape
            (which compiled code wants), and leave out the lengths of segments, which one kernel does not need. Every
            segment costs that kernel memory, so their number is bounded: see `plan.segments`.
        longest: tokens of a segment that the attention must be ready for; 0: those of this batch.

    >>> batch = {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 8], [9, 4, 0]]),
    ...          "labels": torch.tensor([[6, 7, 1], [6, 8, 2], [4, 3, 0]]),
    ...          "advantages": torch.tensor([1.0, -1.0, 2.0]),
    ...          "response_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 0]])}
    >>> only = pack(batch, 8)[0]
    >>> only.ids.tolist()  # the prompt 5, 6, its answers, and the row that shares with none
    [5, 6, 7, 8, 9, 4]
    >>> only.positions.tolist(), only.answers.tolist(), only.labels.tolist()
    ([0, 1, 2, 2, 0, 1], [1, 2, 1, 3, 5], [7, 1, 8, 2, 3])
    """
    ids = batch["input_ids"].numpy()  # [B, T]
    mask = batch["response_mask"].numpy().astype(bool)
    numbers = trained_rows(batch)
    prompts = mask[numbers].argmax(axis=1) + 1  # [kept], up to the token that predicts the first response token
    lengths = mask.shape[1] - mask[numbers, ::-1].argmax(axis=1)  # [kept], up to the last response token
    groups: dict[bytes, list[Row]] = {}
    for row in map(Row, numbers.tolist(), prompts.tolist(), lengths.tolist()):
        groups.setdefault(ids[row.number, : row.prompt].tobytes(), []).append(row)
    ordered = [sorted(rows, key=lambda row: -row.length) for rows in groups.values()]
    ordered.sort(key=lambda rows: -rows[0].length)

    most = most_pieces(tokens) if fixed else 2 * len(numbers)
    microbatches: list[list[list[Row]]] = []
    room = left = 0
    for rows in ordered:
        here = 0  # rows of this group in this microbatch: the first brings the prompt, the second makes it shared
        for row in rows:
            needed = row.length if here == 0 else row.length - row.prompt
            pieces = 2 if here == 1 else 1
            if needed > room or pieces > left or not microbatches:
                microbatches.append([])
                room, left, needed, pieces, here = max(tokens, row.length), most, row.length, 1, 0
            if here == 0:
                microbatches[-1].append([])
            microbatches[-1][-1].append(row)
            room, left, here = room - needed, left - pieces, here + 1
    return [_lay_out(batch, mask, part, tokens if fixed else 0, longest) for part in microbatches]


def _lay_out(batch: Batch, mask: NDArray[np.bool_], groups: list[list[Row]], fill: int, longest: int) -> Microbatch:
    """Shared prompts first, then their answers, then whole rows, then what fills."""
    shared = [rows for rows in groups if len(rows) > 1]
    pieces = [(rows[0], 0, rows[0].prompt) for rows in shared]  # (row, first and last column) of each segment
    pieces += [(row, row.prompt, row.length) for rows in shared for row in rows]
    pieces += [(rows[0], 0, rows[0].length) for rows in groups if len(rows) == 1]
    sizes = [end - start for _, start, end in pieces]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    used = sum(sizes)
    flat = np.concatenate([mask.shape[1] * row.number + np.arange(start, end) for row, start, end in pieces])

    place = np.full(mask.shape, -1)  # of each cell of the batch among the tokens
    for (row, start, end), at in zip(pieces, starts, strict=True):
        place[row.number, start:end] = np.arange(at, at + end - start)
    for rows, at in zip(shared, starts, strict=False):
        for row in rows:
            place[row.number, : row.prompt] = np.arange(at, at + row.prompt)
    rows_here = [row for rows in groups for row in rows]
    cells = np.concatenate([mask.shape[1] * row.number + np.flatnonzero(mask[row.number]) for row in rows_here])

    filling = max(0, fill - used)
    piece = max(longest, *sizes)
    fillers = [min(piece, filling - start) for start in range(0, filling, piece)]
    positions = [np.arange(start, end) for _, start, end in pieces] + [np.arange(size) for size in fillers]
    ids, labels = (batch[name].numpy().reshape(-1) for name in ("input_ids", "labels"))
    return Microbatch(
        ids=torch.from_numpy(np.concatenate([ids[flat], np.zeros(filling, dtype=ids.dtype)])),
        positions=torch.from_numpy(np.concatenate(positions)),
        answers=torch.from_numpy(place.reshape(-1)[cells]),
        labels=torch.from_numpy(labels[cells]),
        cells=torch.from_numpy(cells),
        packing=_packing(sizes + fillers, [len(rows) for rows in shared], piece, fill),
    )


def _packing(sizes: list[int], answers: list[int], longest: int, fill: int) -> Packing:
    """Where the segments lie, from their sizes and the number of answers to each shared prompt."""
    begin = np.cumsum([0, *sizes], dtype=np.int32)
    first = [len(answers) + sum(answers[:i]) for i in range(len(answers) + 1)]  # segment of the first answer
    prompts, follows = begin[: len(answers) + 1], begin[first]
    if not fill:
        shared = tuple((i, range(first[i], first[i + 1])) for i in range(len(answers)))
        starts = torch.from_numpy(begin)
        if not shared:
            return Packing(starts, None, None, longest, tuple(sizes))
        return Packing(starts, torch.from_numpy(prompts), torch.from_numpy(follows), longest, tuple(sizes), shared)

    def whole(cut: NDArray[np.int32], count: int) -> Tensor:
        """With empty segments at the end, so that there are `count`."""
        return torch.from_numpy(np.pad(cut, (0, count + 1 - len(cut)), mode="edge"))

    groups = -(-most_pieces(fill) // (3 * SEGMENTS)) * SEGMENTS  # a shared prompt has two answers at least
    starts = whole(begin, segments(fill, longest))
    return Packing(starts, whole(prompts, groups), whole(follows, groups), longest, None)
