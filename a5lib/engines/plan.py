"""The plan of an update: what stays on the card, how large the pieces of work are, and the bytes of every buffer.

Everything is computed from a model's shape, the size of a batch and a budget, and nothing is allocated. The engine then
allocates what the plan says, so the ledger of the plan is a prediction that can be wrong only in the temporaries of
torch's own kernels. Those were measured on an NVIDIA H200 (`runs/`), and are written down here as formulas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from a5lib.config import EngineName, HeadName, OptimizerState
from a5lib.errors import UserError
from a5lib.memory import ModelShape, state_bytes, update_ledger

GIB, MIB = 2**30, 2**20

PHASES = ("load", "generate", "score", "update", "step", "save")
CONTEXT = 560 * MIB  # what CUDA and torch's kernels take of a card before the first tensor; smaller on small cards
WORKSPACE = 64 * MIB  # cuBLAS
SLACK = 0.03  # share of a budget that is left for gaps between allocations

# Tokens that go through a layer together, from the fastest that was measured downward.
MICROBATCH_TOKENS = (6144, 4096, 3072, 2048, 1024, 512, 256, 128)
HEAD_BLOCK = {True: 1024, False: 128}  # tokens whose logits exist at one time: compiled, plain
BUCKET = 1 << 23  # parameters of one bucket of the step
STEP_BUFFERS = 3  # buckets on the card: one coming, one at work, one going
RING, RING_WHEN_KEPT = 6, 2  # hidden states on their way (see `hidden.py`)
EMBEDDING_COLUMNS = 256  # columns of the embedding's gradient that are summed at one time
FLASH_ROWS = 128  # rows that the attention's backward pass adds for each sequence
NORM_WORK = 17  # hidden states, counted in bytes of the weights' type, that the final norm's backward pass holds


@dataclass(frozen=True)
class UpdateSize:
    """How large a batch is at most.

    Args:
        sequences: rows of one optimizer step.
        longest: tokens of the longest row, prompt and response.
        response: response tokens of a row at most.
        scored: rows that are scored together before the updates; 0 where nothing is scored.
        decoded: rows that transformers decodes side by side on this card; 0 where generation has its own memory.
    """

    sequences: int
    longest: int
    response: int
    scored: int = 0
    decoded: int = 0


@dataclass(frozen=True)
class Plan:
    """What an engine keeps where, in which pieces it works, and what that costs. Made by `plan_update`.

    `resident` names the units (see `parts.py`) whose weights, gradients and optimizer state live on the card; `kept`
    and `kept_when_scoring` count microbatches whose hidden state stays there, `card_levels` layers whose inputs do.
    `card` holds bytes by phase and name, `host` by name; `traffic` the bytes that travel in one update, by name.
    """

    longest: int
    microbatch_tokens: int
    engine: EngineName = "layer_major"
    microbatches: int = 1
    kept: int = 1
    kept_when_scoring: int = 1
    card_levels: int = 0
    resident: frozenset[str] = frozenset()
    head_block: int = HEAD_BLOCK[True]
    bucket: int = BUCKET
    compiled: bool = False
    on_card: bool = True
    budget: int | None = None
    card: dict[str, dict[str, int]] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)

    def peak(self, phase: str | None = None) -> int:
        """Predicted peak of a phase, or of the worst phase, in bytes allocated on the card, without `CONTEXT`."""
        phases = self.card if phase is None else [phase]
        return max(sum(self.card[name].values()) for name in phases)

    def transfer_seconds(self, inward: float, outward: float) -> float:
        """Seconds that the copies of one update need at two speeds in bytes a second; both directions run at once."""
        return sum(
            max(self.traffic[f"{phase}, in"] / inward, self.traffic[f"{phase}, out"] / outward)
            for phase in ("pass", "step")
        )

    def to_json(self) -> dict[str, Any]:
        """For `plan.json` in the run folder."""
        values = dataclasses.asdict(self) | {"resident": sorted(self.resident)}
        return {"engine": self.engine, "budget_bytes": values.pop("budget"), **values}


def usable(budget: int, *, on_card: bool = True) -> int:
    """Bytes of a budget that buffers may take: without CUDA's context, on a card, and the slack for gaps."""
    return int((budget - on_card * CONTEXT) * (1 - SLACK))


def plan_update(
    shape: ModelShape,
    size: UpdateSize,
    *,
    budget: int | None = None,
    engine: EngineName | None = None,
    optimizer_state: OptimizerState = "fp32",
    bytes_per_weight: int = 2,
    compiled: bool = True,
    microbatch: int = 1,
    recompute_layers: bool = True,
    head: HeadName = "blocks",
    head_block: int | None = None,
    on_card: bool = True,
) -> Plan:
    """Choose an engine and what it keeps on the card. Taught in notebook 09.

    With a budget, the resident engine is chosen where it fits: the student's own scoring and accumulation run in it.
    Otherwise the layer-major engine keeps on the card what saves most traffic a byte: first the hidden states of the
    microbatches, then whole layers, then embedding and head, then layer inputs. Without a budget it keeps nothing.

    Args:
        shape: the model.
        size: the largest batch.
        budget: bytes of the whole card that the run may use; None: as much as it takes.
        engine: a name, or None to choose.
        optimizer_state: how AdamW keeps its state.
        bytes_per_weight: 2 for bfloat16, 4 for float32.
        compiled: whether the layer-major engine compiles its layer.
        microbatch, recompute_layers, head: rows at a time and the switches of the resident engine.
        head_block: tokens whose logits exist at one time; None: `HEAD_BLOCK`, or 32 for the head in "blocks".
        on_card: False where the CPU's own memory stands for the card.

    Raises:
        UserError: nothing fits; says what the smallest setting needs.
    """
    resident = _resident(shape, size, budget, optimizer_state, bytes_per_weight, microbatch, recompute_layers, head,
                         head_block, on_card)  # fmt: skip
    fits = budget is None or resident.peak() <= usable(budget, on_card=on_card)
    if engine == "resident" or (engine is None and fits):
        if not fits:
            raise UserError(_too_small(resident, budget or 0, "choose --engine layer_major, or leave --engine out"))
        return resident
    return _layer_major(shape, size, budget, optimizer_state, bytes_per_weight, compiled, head_block, on_card)


def _too_small(plan: Plan, budget: int, advice: str) -> str:
    phase = max(plan.card, key=lambda name: sum(plan.card[name].values()))
    needs = plan.peak() / (1 - SLACK) + plan.on_card * CONTEXT
    return (
        f"The {plan.engine.replace('_', '-')} engine needs {_gib(needs)} in the phase {phase!r}, but the budget is "
        f"{_gib(budget)}; {advice}."
    )


def _gib(size: float) -> str:
    """A size in GiB, rounded up at the third digit."""
    digits = 1 if size >= GIB else 3
    return f"{math.ceil(size / GIB * 10**digits) / 10**digits:.{digits}f} GiB"


# --- the resident engine


def _resident(shape: ModelShape, size: UpdateSize, budget: int | None, optimizer_state: OptimizerState,
              bytes_per_weight: int, microbatch: int, recompute_layers: bool, head: HeadName,
              head_block: int | None, on_card: bool) -> Plan:  # fmt: skip
    block = head_block or (HEAD_BLOCK[False] if head == "fused" else 32)
    ledger = update_ledger(
        shape, sequences=size.sequences, length=size.longest, microbatch=microbatch, optimizer_state=optimizer_state,
        recompute_layers=recompute_layers, head=head, head_block=block, bytes_per_weight=bytes_per_weight,
    )  # fmt: skip
    held = {name: ledger[name] for name in ("weights", "optimizer state")}
    gradients = {"gradients": ledger["gradients"]}
    scoring = {name: ledger[name] for name in ("layer inputs", "layer at work", "logits")}
    card = {
        "load": held,
        "generate": held | _generation(shape, size, bytes_per_weight),
        "score": held | (scoring if size.scored else {}),
        "update": ledger,
        "step": held | gradients | {"AdamW's blocks": 8 * 4 * (1 << 22)},
        "save": held,
    }
    if on_card:
        card = {phase: {"libraries' workspace": WORKSPACE, **names} for phase, names in card.items()}
    return Plan(
        longest=size.longest, microbatch_tokens=microbatch * size.longest, engine="resident",
        microbatches=-(-size.sequences // microbatch), head_block=block, on_card=on_card, budget=budget, card=card,
        traffic=dict.fromkeys(("pass, in", "pass, out", "step, in", "step, out"), 0),
    )  # fmt: skip


def _generation(shape: ModelShape, size: UpdateSize, bytes_per_weight: int) -> dict[str, int]:
    if not size.decoded:
        return {}
    return {
        "keys and values": size.decoded * size.longest * shape.kv_bytes_per_token(bytes_per_weight),
        "logits of the next tokens": size.decoded * shape.vocabulary * (bytes_per_weight + 3 * 4),
    }


# --- the layer-major engine


def _layer_major(shape: ModelShape, size: UpdateSize, budget: int | None, optimizer_state: OptimizerState,
                 bytes_per_weight: int, compiled: bool, head_block: int | None,
                 on_card: bool) -> Plan:  # fmt: skip
    limit = math.inf if budget is None else usable(budget, on_card=on_card)

    def planned(**choice: Any) -> Plan:
        plan = Plan(longest=size.longest, compiled=compiled, on_card=on_card, budget=budget, **choice)
        card, host = (
            _card(plan, shape, size, optimizer_state, bytes_per_weight),
            _host(plan, shape, size, optimizer_state, bytes_per_weight),
        )
        traffic = _traffic(plan, shape, size, optimizer_state, bytes_per_weight)
        return dataclasses.replace(plan, card=card, host=host, traffic=traffic)

    for tokens in MICROBATCH_TOKENS:
        rows = max(1, tokens // size.longest)
        count = -(-size.sequences // rows)
        rows = -(-size.sequences // count)  # the same number of microbatches, filled evenly
        block = min(head_block or HEAD_BLOCK[compiled], max(32, tokens // 4))
        choice: dict[str, Any] = dict(microbatch_tokens=rows * size.longest, microbatches=count, head_block=block)
        plan = planned(**choice)
        if plan.peak() <= limit:
            break
    else:
        raise UserError(
            _too_small(plan, budget or 0, "give more, shorten --max-tokens, or lower --generation-batch-size")
        )
    if budget is None:
        return plan
    for more in _wishes(shape, size, plan):
        richer = planned(**choice | more)
        if richer.peak() <= limit:
            choice, plan = choice | more, richer
    return plan


def _wishes(shape: ModelShape, size: UpdateSize, plan: Plan) -> Iterator[dict[str, Any]]:
    """What to keep on the card besides, in order of traffic saved a byte; each one includes those before it."""
    rounds = -(-size.scored // size.sequences) * plan.microbatches
    for kept in range(2, plan.microbatches + 1):
        yield {"kept": kept}
    for kept in range(2, rounds + 1):
        yield {"kept_when_scoring": kept}
    layers = [f"layer {i}" for i in range(shape.layers)]
    for count in range(1, shape.layers + 1):
        yield {"resident": frozenset(layers[:count])}
    yield {"resident": frozenset([*layers, "head", "embedding"])}
    for count in range(1, shape.layers + 1):
        yield {"card_levels": count}


def _sizes(plan: Plan, shape: ModelShape) -> tuple[int, int, int]:
    """Parameters of one visiting layer (0 if none visits), of the larger visiting end or both if tied, and of all
    units that live on the card.
    """
    visiting = shape.layers - sum(name.startswith("layer") for name in plan.resident)
    embedding, head = (
        shape.vocabulary * shape.hidden,
        shape.hidden + (0 if shape.tied else shape.vocabulary * shape.hidden),
    )
    ends = 0 if "head" in plan.resident else (embedding + head if shape.tied else max(embedding, head))
    lives = (shape.layers - visiting) * shape.layer_parameters() + (embedding + head if "head" in plan.resident else 0)
    return shape.layer_parameters() if visiting else 0, ends, lives


def _card(plan: Plan, shape: ModelShape, size: UpdateSize, optimizer_state: OptimizerState,
          w: int) -> dict[str, dict[str, int]]:  # fmt: skip
    n, block = plan.microbatch_tokens, plan.head_block
    hidden = n * shape.hidden * w  # one hidden state
    layer, ends, lives = _sizes(plan, shape)
    state = state_bytes(optimizer_state, w)
    held = {"libraries' workspace": WORKSPACE} if plan.on_card else {}
    if lives:
        held |= {
            "weights that stay": lives * w,
            "gradients that stay": lives * w,
            "optimizer state that stays": lives * state,
        }
    rounds = -(-size.scored // size.sequences) * plan.microbatches

    def trip(copies: int, kept: int, count: int, levels: int) -> dict[str, int]:
        rings = RING_WHEN_KEPT if kept >= count else RING
        parts = {
            "visiting weights and gradients" if copies == 2 else "visiting weights": max(
                2 * copies * layer, copies * ends
            )
            * w,
            "hidden states": (min(kept, count) + rings) * hidden,
            "layer inputs": levels * count * hidden,
            "token ids and positions": count * n * 40 + 2 * size.longest * shape.head_size * w,
        }
        return {name: value for name, value in parts.items() if value}

    up = _up(shape, n, w, plan.compiled)
    head_forward = block * shape.vocabulary * (w if plan.compiled else w + 16) + 5 * hidden
    work = {
        "layer at work": _down(shape, n, w, plan.compiled, size.sequences + n // size.longest + 2),
        "head at work": max(
            block * shape.vocabulary * (2 * w if plan.compiled else 16) + int(6.5 * hidden) + plan.on_card * 100 * MIB,
            NORM_WORK * hidden,
        ),
    }
    largest = max(work, key=lambda name: work[name])
    bucket = min(plan.bucket, max(layer, ends)) if layer or ends else 0
    step = STEP_BUFFERS * bucket * (2 * w + state) + (0 if plan.compiled else 6 * 4 * bucket)
    generation = _generation(shape, size, w)
    if generation:
        generation = {"weights to generate with": shape.parameters() * w, **generation}
    score = {}
    if size.scored:
        score = trip(1, plan.kept_when_scoring, rounds, 0) | {"layer or head at work": max(up, head_forward)}
    return {
        "load": held,
        "generate": held | generation,
        "score": held | score,
        "update": held | trip(2, plan.kept, plan.microbatches, plan.card_levels) | {largest: work[largest]},
        "step": held | ({"buckets": step} if step else {}),
        "save": held,
    }


def _up(shape: ModelShape, n: int, w: int, compiled: bool) -> int:
    """Bytes that a layer takes for n tokens without a graph."""
    hidden, inner = shape.hidden, shape.intermediate
    if compiled:
        return n * w * (2 * inner + (4 if shape.norm_first else 3) * hidden)
    return n * w * max(3 * inner + 4 * hidden, 13 * hidden) + 4 * n * shape.head_size * w


def _down(shape: ModelShape, n: int, w: int, compiled: bool, sequences: int) -> int:
    """Bytes that a layer takes for n tokens with a graph and its way back, the new gradients included.

    Two moments can be the worst: when everything is stored and the first matrix's gradient is made, and later, in the
    attention's backward pass, when those of the feed-forward part are made already.
    """
    hidden, inner = shape.hidden, shape.intermediate
    if not compiled:
        return n * (shape.activation_bytes_per_token(w) + w * (2 * inner + 4 * hidden)) + hidden * inner * w
    early = n * w * (4 * inner + (8 if shape.norm_first else 10) * hidden) + hidden * inner * w
    padded = FLASH_ROWS * sequences * shape.heads * shape.head_size * 4
    late = 3 * hidden * inner * w + int((12.5 if shape.norm_first else 17) * n * hidden * w) + padded
    return max(early, late)


def _host(plan: Plan, shape: ModelShape, size: UpdateSize, optimizer_state: OptimizerState,
          w: int) -> dict[str, int]:  # fmt: skip
    away = shape.parameters() - _sizes(plan, shape)[2]
    hidden = plan.microbatch_tokens * shape.hidden * w
    rounds = -(-size.scored // size.sequences) * plan.microbatches
    levels = shape.layers + (plan.kept < plan.microbatches) - plan.card_levels
    scoring = rounds if plan.kept_when_scoring < rounds else 0
    return {
        "weights": away * w,
        "gradients": away * w,
        "optimizer state": away * state_bytes(optimizer_state, w),
        "layer inputs": (max(levels, 0) * plan.microbatches + max(0, scoring - plan.microbatches)) * hidden,
    }


def _traffic(plan: Plan, shape: ModelShape, size: UpdateSize, optimizer_state: OptimizerState,
             w: int) -> dict[str, int]:  # fmt: skip
    away = shape.parameters() - _sizes(plan, shape)[2]
    layers = shape.layers - sum(name.startswith("layer") for name in plan.resident)
    ends = away - layers * shape.layer_parameters()
    hidden = plan.microbatch_tokens * shape.hidden * w
    inputs = (shape.layers - plan.card_levels) * plan.microbatches * hidden
    waiting = shape.layers * max(0, plan.microbatches - plan.kept) * hidden
    state = state_bytes(optimizer_state, w)
    return {
        "pass, in": (2 * layers * shape.layer_parameters() + ends) * w + inputs + 2 * waiting,
        "pass, out": away * w + inputs + waiting,
        "step, in": away * (2 * w + state),
        "step, out": away * (w + state),
    }
