"""What the layer-major engine does, in order: what is sent for, what is computed, and what is sent home.

The engine is watched from outside: a copy is told by the memory on the host that it comes from or goes to, and a
computation by the weights that the layer wears. On a CPU the events come in the order in which a card would be asked
for them; a card then does those of different lanes at the same time. Used in notebook 09.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.parts import Unit

EMBEDDING = (torch.ops.aten.embedding.default, torch.ops.aten.embedding_dense_backward.default)


class Event(NamedTuple):
    """One thing that the engine did.

    `lane` is "in", "work" or "out"; `part` is "embedding", "layer 0" and so on, or "head"; `what` is "weight", "grad"
    or a name of the optimizer state, or the number of a microbatch.
    """

    lane: Literal["in", "work", "out"]
    part: str
    what: str


def engine_events(engine: LayerMajorEngine, run: Callable[[], Any]) -> list[Event]:
    """The events of `run`, which calls the engine.

    Copies of hidden states have the part whose input they are.

    Args:
        engine: on the CPU.
        run: such as `lambda: engine.accumulate(batch)`.
    """
    watch = _Watch(engine)
    hooks = [m.register_forward_pre_hook(watch.module) for m in (engine.parts.layer, engine.parts.norm)]
    try:
        with watch:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return watch.events()


class _Watch(TorchDispatchMode):
    """Notes the addresses of every copy, and the address of the weights at every computation."""

    def __init__(self, engine: LayerMajorEngine) -> None:
        super().__init__()
        self.engine = engine
        self.noted: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.noted.append(("copy", args[0].data_ptr(), args[1].data_ptr()))
        elif function in EMBEDDING:
            self.noted.append(("embedding", 0, 0 if function is EMBEDDING[0] else 1))
        return function(*args, **(kwargs or {}))

    def module(self, module: nn.Module, inputs: Any) -> None:
        """Called before a layer or the final norm runs."""
        kind = "layer" if module is self.engine.parts.layer else "head"
        self.noted.append((kind, next(module.parameters()).data_ptr(), int(torch.is_grad_enabled())))

    def events(self) -> list[Event]:
        """The notes in words, now that every buffer on the host has its place."""
        homes = _Homes(self.engine)
        found: list[Event] = []
        # Address on the card -> the layer whose weights are there, or were last copied there.
        wears = {u.flat["weight"].data_ptr(): u.name for u in self.engine.parts.units if homes.stays(u)}
        turn: tuple[Any, ...] = ()
        microbatch = 0
        for kind, first, second in self.noted:
            if kind == "copy":
                source, target = homes.find(second), homes.find(first)
                if source:
                    found.append(Event("in", *source))
                    if source[1] == "weight":
                        wears[first] = source[0]
                elif target:
                    found.append(Event("out", *target))
                continue
            part = wears[first] if kind == "layer" else kind
            microbatch = microbatch + 1 if turn == (part, second) else 0
            turn = (part, second)
            found.append(Event("work", part, str(microbatch)))
        return found


class _Homes:
    """What lies at an address of the host: numbers of a unit, or a microbatch's input of a layer."""

    def __init__(self, engine: LayerMajorEngine) -> None:
        parts, self.resident = engine.parts, engine.plan.resident
        tensors: list[tuple[Tensor, str, str]] = [
            (flat, unit.name, name) for unit in parts.units if not self.stays(unit) for name, flat in unit.flat.items()
        ]
        names = [*(unit.name for unit in parts.layers), parts.head.name]
        for level, microbatches in zip(names, engine.levels.levels, strict=False):
            tensors += [(tensor, level, str(m)) for m, tensor in enumerate(microbatches)]
        self.entries = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, part, what) for t, part, what in tensors)
        self.starts = [entry[0] for entry in self.entries]

    def stays(self, unit: Unit) -> bool:
        """Whether the unit lives on the card."""
        return unit.name in self.resident

    def find(self, address: int) -> tuple[str, str] | None:
        """Part and what, or None for an address that is not of the host."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0 or address >= self.entries[at][1]:
            return None
        return self.entries[at][2:]
