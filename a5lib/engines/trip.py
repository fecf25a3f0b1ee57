"""One pass over the layers: up without a graph, through the head, and down with one.

This is where the layer-major engine computes. A `Trip` knows microbatches, hidden states and the weights that visit the
card; it does not know losses or the optimizer. Events order the copies and the work, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from a5lib.engines.attention import Packing
from a5lib.engines.hidden import HiddenStates, Visitor
from a5lib.engines.packing import Microbatch
from a5lib.engines.parts import Unit, dress
from a5lib.engines.plan import EMBEDDING_COLUMNS
from a5lib.heads import head_sweep
from a5lib.optimizers import gradient_norms

if TYPE_CHECKING:
    from a5lib.engines.layer_major import LayerMajorEngine


@dataclass
class LayerSlot:
    """Room on the card for one visiting layer: its weights, its gradient, and the events that say both are free."""

    weight: Tensor
    grad: Tensor
    free: Any = None
    sent: Any = None


class Trip:
    """One pass over the layers with some microbatches: `up`, `head`, and `down` where inputs were kept."""

    def __init__(self, engine: LayerMajorEngine, microbatches: list[Microbatch], keep_inputs: bool) -> None:
        self.engine, self.parts, self.lanes = engine, engine.parts, engine.lanes
        self.microbatches, self.keep_inputs = microbatches, keep_inputs
        plan, layers = engine.plan, len(engine.parts.layers)
        self.depth = layers
        sizes = [len(m.ids) for m in microbatches]
        kept = min(plan.kept if keep_inputs else plan.kept_when_scoring, len(sizes))
        if len(sizes) == 1:  # sent for before it has been set, so it cannot wait on the host
            kept = 1
        waiting = kept < len(sizes)
        count = layers + waiting if keep_inputs else int(waiting)
        share = min(1.0, plan.microbatches / len(sizes))  # of levels, should more microbatches come than were planned
        on_card = min(int(plan.card_levels * share), count) if keep_inputs else 0
        levels = [[self._hidden(size) for size in sizes] for _ in range(on_card)]
        levels += engine.levels.get(count - on_card, len(sizes), max(sizes))
        self.hidden = HiddenStates(engine.lanes, sizes, kept, levels, keep_inputs, self._hidden)
        self._lay_out_arena()
        self.norms = torch.zeros(len(engine.names), dtype=torch.promote_types(engine.dtype, torch.float32),
                                 device=engine.device)  # fmt: skip
        longest = max(m.packing.longest for m in microbatches)
        places = torch.arange(longest, device=engine.device)[None]
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        self.cos, self.sin = (table[0] for table in self.parts.rotary(like, position_ids=places))  # [longest, D]

    def _hidden(self, tokens: int) -> Tensor:
        return self.engine.empty(tokens * self.engine.width, self.engine.dtype).view(tokens, self.engine.width)

    def _lay_out_arena(self) -> None:
        """One piece of the card serves in turn as room for the embedding, for two layers, and for the head."""
        resident, parts = self.engine.plan.resident, self.parts
        ends = [unit.numel for unit in (parts.embedding, parts.head) if unit.name not in resident]
        end = sum(ends) if parts.tied else max(ends, default=0)  # a tied head needs both at once
        layer = 0 if all(unit.name in resident for unit in parts.layers) else parts.layers[0].numel
        copies = 2 if self.keep_inputs else 1  # weights, and gradients where there is a way down
        arena = self.engine.empty(max(2 * copies * layer, copies * end), self.engine.dtype)
        self.end_weight, self.end_grad = arena[:end], arena[len(arena) - end :]
        self.slots = [
            LayerSlot(arena[k * layer : (k + 1) * layer], arena[(2 + k) * layer : (3 + k) * layer]) for k in range(2)
        ]

    # --- weights on the card

    def visiting(self, order: Sequence[int], *, with_gradient: bool) -> Iterator[int]:
        """Yield each layer's index when the layer wears its weights, while those of the next are on their way.

        With gradient it also wears room for its gradient, which leaves for home when the caller is done with the layer.
        """
        units, lanes = self.parts.layers, self.lanes
        guests = [i for i in order if units[i].name not in self.engine.plan.resident]
        arrived: dict[int, Any] = {}

        def invite(number: int) -> None:
            if number < len(guests):
                slot = self.slots[number % 2]
                with lanes.inward.after(slot.free):
                    slot.weight.copy_(units[guests[number]].flat["weight"], non_blocking=True)
                    arrived[guests[number]] = lanes.inward.mark()

        lanes.join()  # the arena has served another purpose
        invite(0)
        number = 0
        for i in order:
            unit, slot = units[i], None
            weight, grad = unit.flat["weight"], unit.flat["grad"]
            if i in guests:
                slot = self.slots[number % 2]
                number += 1
                invite(number)
                lanes.wait(arrived[i], slot.sent)
                weight, grad = slot.weight, slot.grad
            if with_gradient:
                grad.zero_()
            dress(self.parts.layer, unit.views(weight), unit.views(grad) if with_gradient else None)
            yield i
            if slot is not None:
                slot.free = lanes.now()
            if with_gradient:
                self.finish(unit, grad)
                if slot is not None:
                    slot.sent = lanes.outward.mark()

    def fetch(self, unit: Unit, room: Tensor) -> Tensor:
        """The flat weights of the embedding or the head on the card, in `room` unless they live there."""
        if unit.name in self.engine.plan.resident:
            return unit.flat["weight"]
        with self.lanes.inward.after():
            room[: unit.numel].copy_(unit.flat["weight"], non_blocking=True)
        self.lanes.wait(self.lanes.inward.mark())
        return room[: unit.numel]

    def finish(self, unit: Unit, grad: Tensor, *, complete: bool = True) -> None:
        """A unit's gradient goes home; once complete, its norms are taken."""
        if complete:
            first = self.engine.names.index(unit.names[0])
            self.norms[first : first + len(unit.names)] = gradient_norms(unit.views(grad))
        if unit.name not in self.engine.plan.resident:
            with self.lanes.outward.after(self.lanes.now()):
                unit.flat["grad"].copy_(grad, non_blocking=True)

    # --- the pass

    def arriving(
        self, order: list[tuple[int, int]], wanted: Callable[[int, int], list[Visitor]]
    ) -> Iterator[list[Visitor]]:
        """Yield the hidden states of one piece of work after those of the next have been sent for."""
        coming = wanted(*order[0])
        for following in order[1:]:
            here, coming = coming, wanted(*following)
            yield here
        yield coming

    def layer(self, hidden: Tensor, m: Microbatch) -> Tensor:
        """Run a microbatch [n, H] through the layer that is dressed."""
        return self.engine.run(self.parts.layer, hidden, self.cos, self.sin, m.positions, m.packing)

    @torch.no_grad()
    def up(self) -> None:
        """Embed every microbatch and run it through all layers, without a graph."""
        hidden, several = self.hidden, range(len(self.microbatches))
        table = self.fetch(self.parts.embedding, self.end_weight).view(-1, self.engine.width)
        for m in several:
            value = F.embedding(self.microbatches[m].ids, table)
            hidden.set_travelling(0, m, value, keep=self.keep_inputs)
        order = [(i, m) for i in range(self.depth) for m in several]
        coming = self.arriving(order, lambda i, m: [hidden.travelling(i, m)])
        for i in self.visiting(range(self.depth), with_gradient=False):
            for m in several:
                (x,) = next(coming)
                out = self.layer(hidden.use(x), self.microbatches[m])
                hidden.done(x)
                hidden.set_travelling(i + 1, m, out, keep=self.keep_inputs and i + 1 < self.depth)

    def head(self, scores: dict[str, Tensor] | None, coefficients: Tensor | None = None) -> None:
        """Score every microbatch into `scores`; with dL/dlogp [B * T] also go back through head and final norm."""
        engine, hidden, tied = self.engine, self.hidden, self.parts.tied
        unit = self.parts.head
        self.lanes.join()
        weight = unit.views(self.fetch(unit, self.end_weight))
        matrix = weight[-1]
        if tied:
            room = self.end_weight[unit.numel :] if unit.name not in engine.plan.resident else self.end_weight
            matrix = self.fetch(self.parts.embedding, room).view(-1, engine.width)
        grad = matrix_grad = None
        if coefficients is not None:
            grad = self._room_for_gradient(unit)
            matrix_grad = unit.views(grad)[-1]
            if tied:
                skip = 0 if unit.name in engine.plan.resident else unit.numel
                matrix_grad = self._room_for_gradient(self.parts.embedding, skip).view(-1, engine.width)
        dress(self.parts.norm, weight[:1], None if grad is None else unit.views(grad)[:1])
        order = [(self.depth, m) for m in range(len(self.microbatches))]
        for m, (x,) in enumerate(self.arriving(order, lambda i, m: [hidden.travelling(i, m)])):
            part = self.microbatches[m]
            value = hidden.use(x).detach().requires_grad_(coefficients is not None)
            normed = self.parts.norm(value)
            log_probs, entropy, back = head_sweep(
                normed.detach()[part.answers], matrix, part.labels, temperature=engine.config.temperature,
                block=engine.plan.head_block, kernels=engine.kernels, weight_grad=matrix_grad,
                coefficients=None if coefficients is None else coefficients[part.cells],
            )  # fmt: skip
            if scores is not None:
                scores["log_probs"][part.cells], scores["token_entropy"][part.cells] = log_probs, entropy
            if back is not None:
                normed.backward(torch.zeros_like(normed).index_add_(0, part.answers, back))
            hidden.done(x)
            if value.grad is not None:
                hidden.set_travelling(self.depth, m, value.grad)
        if grad is not None and matrix_grad is not None:
            self.finish(unit, grad)
            if tied:
                self.finish(self.parts.embedding, matrix_grad.view(-1), complete=False)

    def _room_for_gradient(self, unit: Unit, skip: int = 0) -> Tensor:
        resident = unit.name in self.engine.plan.resident
        return (unit.flat["grad"] if resident else self.end_grad[skip : skip + unit.numel]).zero_()

    def down(self) -> None:
        """Back through all layers, each run again with a graph, and into the embedding."""
        hidden, several = self.hidden, range(len(self.microbatches))
        downward = range(self.depth - 1, -1, -1)
        order = [(i, m) for i in downward for m in several]
        coming = self.arriving(order, lambda i, m: [hidden.input(i, m), hidden.travelling(i + 1, m)])
        for i in self.visiting(downward, with_gradient=True):
            for m in several:
                x, d = next(coming)
                value = hidden.use(x).detach().requires_grad_()
                self.layer(value, self.microbatches[m]).backward(hidden.use(d))
                assert value.grad is not None
                hidden.done(x, d)
                hidden.set_travelling(i, m, value.grad)
        self._embedding_gradient()

    @torch.no_grad()
    def _embedding_gradient(self) -> None:
        """Add up the last gradient by token id, some columns at a time: the sums are temporaries of the same size."""
        hidden, unit = self.hidden, self.parts.embedding
        self.lanes.join()
        if not self.parts.tied:
            grad = self._room_for_gradient(unit)
        elif unit.name in self.engine.plan.resident:
            grad = unit.flat["grad"]
        else:  # the head's share has gone home
            grad = self.end_grad[: unit.numel]
            with self.lanes.inward.after():
                grad.copy_(unit.flat["grad"], non_blocking=True)
            self.lanes.wait(self.lanes.inward.mark())
        rows = grad.view(-1, self.engine.width)
        order = [(0, m) for m in range(len(self.microbatches))]
        for m, (d,) in enumerate(self.arriving(order, lambda i, m: [hidden.travelling(i, m)])):
            for start in range(0, self.engine.width, EMBEDDING_COLUMNS):
                at = slice(start, start + EMBEDDING_COLUMNS)
                rows[:, at] += torch.ops.aten.embedding_dense_backward(
                    hidden.use(d)[:, at], self.microbatches[m].ids, len(rows), self.parts.padding_idx, False
                )
            hidden.done(d)
        self.finish(unit, grad)


def run_layer(
    layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, packing: Packing
) -> Tensor:
    """A decoder layer on packed sequences: [n, H] to [n, H]."""
    out: Tensor = layer(
        hidden[None], attention_mask=None, position_ids=positions[None],
        position_embeddings=(cos[positions][None], sin[positions][None]), packing=packing,
    )  # fmt: skip
    return out[0]
