"""The hidden states between layers, wherever they are: on the card, or on the host with a ring of buffers to visit it.

This file knows microbatches of n tokens and levels: level i is the input of layer i, the last level that of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from a5lib.engines.host import HostMemory, Lanes
from a5lib.engines.plan import RING, RING_WHEN_KEPT


@dataclass
class Visitor:
    """A tensor on the card, the event of its arrival, and the ring's slot that it occupies (None: it lives here)."""

    tensor: Tensor
    arrived: Any = None
    slot: Slot | None = None


@dataclass
class Slot:
    """A buffer of the ring, and the event after which it may be filled again."""

    buffer: Tensor
    free: Any = None


class HiddenStates:
    """Hidden states [n, H] of each microbatch and level.

    Every microbatch has one travelling state: going up, the input of the layer at work; going down, the gradient with
    respect to it. For the first `kept` microbatches it stays on the card, for the others it waits on the host. Inputs
    that the way down needs are kept in `levels`, one list of tensors for each layer, on the host or on the card.

    Args:
        sizes: tokens of each microbatch.
        kept: microbatches whose travelling state stays on the card.
        levels: tensors [n, H] by layer and microbatch; the travelling states of the others wait there too, so there is
            one more level than layers where `kept` is less than all microbatches, and level 0 alone when only scoring.
        keep_inputs: whether there is a way down.
    """

    def __init__(self, lanes: Lanes, sizes: list[int], kept: int, levels: list[list[Tensor]], keep_inputs: bool,
                 empty: Any) -> None:  # fmt: skip
        self.lanes, self.sizes, self.kept, self.levels, self.keep_inputs = lanes, sizes, kept, levels, keep_inputs
        self.here = [empty(size) for size in sizes[:kept]]  # [n, H] each
        self.left: list[Any] = [None] * kept  # when the last copy of `here` had gone
        count = RING if kept < len(sizes) else RING_WHEN_KEPT
        self.ring = [Slot(empty(max(sizes))) for _ in range(count)]
        self.turn = 0
        self.home: dict[tuple[int, int], Any] = {}  # when a state had reached its level

    def travelling(self, level: int, m: int) -> Visitor:
        """Send for the travelling state of a microbatch at a level."""
        return Visitor(self.here[m]) if m < self.kept else self.input(level, m)

    def input(self, level: int, m: int) -> Visitor:
        """Send for a kept input."""
        source = self._place(level, m)
        arrived = self.home.get((level, m))
        if source.device == self.lanes.device and self.lanes.device.type == "cuda":
            return Visitor(source, arrived)
        slot = self._next()
        target = slot.buffer[: self.sizes[m]]
        with self.lanes.inward.after(slot.free, arrived):
            target.copy_(source, non_blocking=True)
        return Visitor(target, self.lanes.inward.mark(), slot)

    def use(self, visitor: Visitor) -> Tensor:
        """The tensor; what is computed from here on waits for its arrival."""
        self.lanes.wait(visitor.arrived)
        return visitor.tensor

    def done(self, *visitors: Visitor) -> None:
        """What has been computed so far was the last use of these visitors."""
        now = self.lanes.now()
        for visitor in visitors:
            if visitor.slot is not None:
                visitor.slot.free = now

    def set_travelling(self, level: int, m: int, value: Tensor, *, keep: bool = False) -> None:
        """Replace the travelling state; with `keep` it is also kept as the input of layer `level`."""
        if m < self.kept:
            self.lanes.wait(self.left[m])
            self.here[m].copy_(value)
            if keep:
                self.left[m] = self._send(self.here[m], level, m)
            return
        slot = self._next()
        self.lanes.wait(slot.free)
        buffer = slot.buffer[: self.sizes[m]]
        buffer.copy_(value)
        slot.free = self._send(buffer, level, m)

    def _send(self, source: Tensor, level: int, m: int) -> Any:
        with self.lanes.outward.after(self.lanes.now()):
            self._place(level, m).copy_(source, non_blocking=True)
        self.home[level, m] = self.lanes.outward.mark()
        return self.home[level, m]

    def _place(self, level: int, m: int) -> Tensor:
        return self.levels[level if self.keep_inputs else 0][m][: self.sizes[m]]

    def _next(self) -> Slot:
        self.turn = (self.turn + 1) % len(self.ring)
        return self.ring[self.turn]


class Levels:
    """Where inputs and waiting states are kept: tensors [tokens, H], allocated when first needed and then for good."""

    def __init__(self, host: HostMemory, tokens: int, width: int, dtype: torch.dtype) -> None:
        self.host, self.tokens, self.width, self.dtype = host, tokens, width, dtype
        self.levels: list[list[Tensor]] = []

    def get(self, levels: int, microbatches: int, tokens: int) -> list[list[Tensor]]:
        """At least so many levels of so many microbatches of so many tokens, on the host."""
        if tokens > self.tokens:
            self.levels, self.tokens = [], tokens
        while len(self.levels) < levels:
            self.levels.append([])
        for level in self.levels[:levels]:
            missing = microbatches - len(level)
            if missing > 0:
                slab = self.host.empty(missing * self.tokens * self.width, self.dtype)
                level += slab.view(missing, self.tokens, self.width).unbind()
        return self.levels
