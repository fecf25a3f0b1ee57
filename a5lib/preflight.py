"""Before anything is allocated: does the plan of a run fit this machine, and if not, which setting does?

A refusal is one sentence: what is needed, what is there, and the nearest setting that fits, which has been planned to
be sure. Facts come in as numbers, so that a plan can be checked for any machine. `measure_link` times the copies that a
plan counts. This file imports torch only where it asks for a card.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from a5lib import machine
from a5lib.config import OptimizerState
from a5lib.engines.plan import GIB, DoesNotFit, Plan, UpdateSize, gib, plan_update
from a5lib.errors import UserError
from a5lib.memory import ModelShape, state_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HOST_RESERVE = GIB  # of host memory, for Python, torch and CUDA's libraries
SMALLER_STATES: tuple[OptimizerState, ...] = ("fp32", "bf16_kahan", "bf16_stochastic")  # plain bf16 loses updates
PINNED_BYTES, PAGEABLE_BYTES, COPIES = 256 << 20, 64 << 20, 5


@dataclass(frozen=True)
class Facts:
    """Bytes that a run may take; None: without limit, or unknown.

    Args:
        host_free: of host memory.
        card_free: of the card, before this program has used it.
        pinned_limit: of host memory, pinned.
    """

    host_free: int | None = None
    card_free: int | None = None
    pinned_limit: int | None = None


def this_machine(device: torch.device) -> Facts:
    """The facts of this machine for a run on `device`. Memory that torch keeps for later counts as free."""
    if device.type != "cuda":
        return Facts(host_free=machine.host_memory()[0])
    import torch

    torch.cuda.empty_cache()
    return Facts(machine.host_memory()[0], torch.cuda.mem_get_info(device)[0], machine.pinned_limit())


def let_go_of_a_failed_run() -> None:
    """Free what a run that ended in an exception has held: a notebook keeps its last exception, and that keeps the
    local variables of every function it came through, and so the model, on card and host.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _ = frame.f_locals  # brings the copy up to date that IPython has had made of it
        error = error.__cause__ or error.__context__
    gc.collect()


def checked_plan(
    shape: ModelShape,
    size: UpdateSize,
    facts: Facts,
    *,
    batch_flag: str = "--train-batch-size",
    budget_flag: str = "--vram-budget",
    **options: Any,
) -> Plan:
    """`plan_update`, and the certainty that its plan fits the machine. Taught in notebook 09.

    Args:
        shape, size: the model and the largest batch.
        facts: see `this_machine`.
        batch_flag: the flag that sets `size.sequences`.
        budget_flag: the flag that sets the budget.
        options: of `plan_update`.

    Raises:
        UserError: card or host memory is short; says by how much, and names the nearest setting that fits.
    """
    plan, short = _attempt(shape, size, facts, options)
    if plan is None or short is not None:
        raise UserError(f"{short}; {advice(shape, size, facts, batch_flag, budget_flag, options)}.")
    return plan


def check(plan: Plan, facts: Facts) -> None:
    """Refuse a plan that does not fit the machine; `checked_plan` names a setting that does. Taught in notebook 09.

    Raises:
        UserError: card or host memory is short.
    """
    short = shortage(plan, facts)
    if short is not None:
        raise UserError(f"{short}; close other programs, or choose less.")


def shortage(plan: Plan, facts: Facts) -> str | None:
    """What a plan needs and the machine does not have, in words, or None."""
    card, host = plan.budget_needed(), host_needed(plan)
    if plan.on_card and facts.card_free is not None and card > facts.card_free:
        return f"The plan takes {gib(card)} of the card, but {gib(facts.card_free, there=True)} are free"
    if facts.host_free is not None and host > facts.host_free:
        return (
            f"The {plan.engine.replace('_', '-')} engine needs {gib(host)} of host memory, but "
            f"{gib(facts.host_free, there=True)} are free"
        )
    return None


def host_needed(plan: Plan) -> int:
    """Host memory of a plan in bytes. On a card that includes what the program itself takes; without one it includes
    the weights, gradients and optimizer state that stand for the card's, and no temporaries.
    """
    if plan.on_card:
        return sum(plan.host.values()) + HOST_RESERVE
    certain = [n for name, n in plan.card["update"].items() if name.startswith(("weights", "gradients", "optimizer"))]
    return sum(plan.host.values()) + sum(certain)


def pinning_warning(plan: Plan, facts: Facts) -> str | None:
    """A sentence where more host memory would be pinned than the system allows: the run works, and is slower."""
    wanted = sum(plan.host.values())
    if plan.engine == "resident" or facts.pinned_limit is None or wanted <= facts.pinned_limit:
        return None
    return (
        f"The plan keeps {gib(wanted)} on the host, but this system pins about {gib(facts.pinned_limit, there=True)} "
        "(under WSL2 half of its memory): the rest is copied about half as fast and not beside the work; give WSL2 "
        "more in .wslconfig, or choose a smaller --optimizer-state."
    )


# --- the nearest setting


@dataclass(frozen=True)
class _Change:
    """Another setting: the flags in words, and what they change."""

    words: str
    size: UpdateSize
    options: dict[str, Any]

    def and_(self, words: str, size: UpdateSize | None = None, **options: Any) -> _Change:
        """This change and one more."""
        together = f"{self.words} and {words}" if self.words else words
        return _Change(together, size or self.size, self.options | options)


def advice(shape: ModelShape, size: UpdateSize, facts: Facts, batch_flag: str, budget_flag: str,
           options: dict[str, Any]) -> str:  # fmt: skip
    """What to do where a plan does not fit: the first of these changes that does, then two together, then all.

    Tried in this order: fewer rows decoded side by side, a smaller optimizer state, --low-memory of the resident
    engine, a smaller batch, fewer tokens, the other engine, another budget.
    """
    start = _Change("", size, options)
    kinds: list[Callable[[_Change], Iterator[_Change]]] = [
        _fewer_decoded, _smaller_state, _low_memory, partial(_smaller_batch, flag=batch_flag), _fewer_tokens,
    ]  # fmt: skip
    others = [_other_engine(start), _other_budget(shape, start, facts, budget_flag)]
    two = (second for one, other in itertools.combinations(kinds, 2) for first in one(start) for second in other(first))
    for change in itertools.chain(*(kind(start) for kind in kinds), *others, two, _all(start, kinds)):
        plan, short = _attempt(shape, change.size, facts, change.options)
        if plan is not None and short is None:
            return _use(change.words, plan)
    return "no smaller setting fits either: take a smaller model, or a machine with more"


def _all(start: _Change, kinds: Sequence[Callable[[_Change], Iterator[_Change]]]) -> Iterator[_Change]:
    """The strongest change of every kind, together."""
    for kind in kinds:
        *_, start = (start, *kind(start))
    yield start


def _use(words: str, plan: Plan) -> str:
    card = f"{gib(plan.budget_needed())} of the card and " if plan.on_card else ""
    return f"use {words}, which needs {card}{gib(host_needed(plan))} of host memory"


def _attempt(
    shape: ModelShape, size: UpdateSize, facts: Facts, options: dict[str, Any]
) -> tuple[Plan | None, str | None]:
    """The plan, if there is one, and what is short, if anything is."""
    try:
        plan = plan_update(shape, size, **options)
    except DoesNotFit as error:
        return None, error.shortage
    return plan, shortage(plan, facts)


def _fewer_decoded(c: _Change) -> Iterator[_Change]:
    decoded = (c.size.decoded or c.size.served) // 2
    while decoded >= 1:
        served = decoded if c.size.served else 0
        size = dataclasses.replace(c.size, served=served, decoded=decoded - served)
        yield c.and_(f"--generation-batch-size {decoded}", size)
        decoded //= 2


def _smaller_state(c: _Change) -> Iterator[_Change]:
    w = c.options.get("bytes_per_weight", 2)
    now = state_bytes(c.options.get("optimizer_state", "fp32"), w)
    for state in SMALLER_STATES:
        if state_bytes(state, w) < now:
            yield c.and_(f"--optimizer-state {state}", optimizer_state=state)


def _low_memory(c: _Change) -> Iterator[_Change]:
    least: dict[str, Any] = {"microbatch": 1, "recompute_layers": True, "head": "blocks"}
    if c.options.get("engine") == "resident" and c.options | least != c.options:
        yield c.and_("--low-memory", **least)


def _smaller_batch(c: _Change, flag: str) -> Iterator[_Change]:
    for part in (2, 4):
        rows = c.size.sequences // part
        if rows and c.size.sequences % part == 0 and rows % c.size.group == 0:
            scored = rows if c.size.scored == c.size.sequences else c.size.scored
            size = dataclasses.replace(c.size, sequences=rows, scored=scored, decoded=min(c.size.decoded, rows))
            yield c.and_(f"{flag} {rows}", size)


def _fewer_tokens(c: _Change) -> Iterator[_Change]:
    for quarters in (3, 2):
        response = c.size.response * quarters // 4
        if response:
            longest = c.size.longest - c.size.response + response
            size = dataclasses.replace(c.size, longest=longest, response=response)
            yield c.and_(f"--max-tokens {response}", size)


def _other_engine(c: _Change) -> Iterator[_Change]:
    engine = c.options.get("engine")
    if engine is not None:
        other = "layer_major" if engine == "resident" else "resident"
        yield c.and_(f"--engine {other}", engine=other)


def _other_budget(shape: ModelShape, c: _Change, facts: Facts, flag: str) -> Iterator[_Change]:
    """What is free, if the budget is above it; otherwise ever larger budgets, up to what is free."""
    budget, free = c.options.get("budget"), facts.card_free
    if budget is None:
        return
    if free is not None and budget > free:
        larger = [math.floor(10 * free / GIB) / 10]
    else:
        try:
            plan_update(shape, c.size, **c.options)
            least = budget
        except DoesNotFit as error:
            least = max(budget, error.plan.budget_needed())
        # By a tenth of a GiB first: the least that the engine itself asks for.
        larger = [math.ceil(10 * least / GIB) / 10] + [math.ceil(least / GIB * 1.25**i) for i in range(1, 16)]
    for gibibytes in larger:
        if free is None or gibibytes * GIB <= free:
            yield c.and_(f"{flag} {gibibytes:g}", budget=int(gibibytes * GIB))


# --- the link


@dataclass(frozen=True)
class Link:
    """Speeds between host and card in bytes a second: of pinned copies in and out, and of a pageable copy in."""

    inward: float
    outward: float
    pageable: float


def measure_link(device: torch.device, seconds: Callable[[Tensor, Tensor], float] | None = None) -> Link | None:
    """The median speed of five copies of 256 MiB of pinned memory, each way, and of 64 MiB of pageable memory.

    Taught in notebook 09.

    Args:
        device: the card. On the CPU there is no link, and the result is None.
        seconds: times one copy to a target from a source (None: on the card, which waits for it).
    """
    if device.type == "cpu":
        return None
    import torch

    from a5lib.engines.host import HostMemory

    def on_card(target: Tensor, source: Tensor) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def speed(target: Tensor, source: Tensor) -> float:
        time_copy = seconds or on_card
        time_copy(target, source)  # the first one is slower
        return source.numel() / statistics.median(time_copy(target, source) for _ in range(COPIES))

    card = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=device)
    memory = HostMemory(device)  # it takes its pins with it when it goes
    pinned = memory.empty(PINNED_BYTES, torch.uint8)
    pageable = torch.ones(PAGEABLE_BYTES, dtype=torch.uint8)
    return Link(speed(card, pinned), speed(pinned, card), speed(card[:PAGEABLE_BYTES], pageable))
