"""The plan of an update: what stays on the card, how large the pieces of work are, and the bytes of every buffer.

Everything is computed from a model's shape, the size of a batch and a budget, and nothing is allocated. The engine then
allocates what the plan says, so the ledger of the plan is a prediction that can be wrong only in the temporaries of
torch's own kernels. Those were measured on an NVIDIA H200 (`runs/plan-calibration/`), and are written down here as
formulas. This file imports neither torch nor transformers: it is quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from a5lib.config import EngineName, HeadName, OptimizerState
from a5lib.errors import UserError
from a5lib.memory import ModelShape, state_bytes, update_ledger

GIB, MIB = 2**30, 2**20

PHASES = ("load", "generate", "score", "update", "step", "save")
TRIPS = ("score", "pass", "step")  # the parts of an update in which bytes travel
# What CUDA and the kernels of torch and Triton take of a card beside all tensors: 1.33 to 1.45 GiB on an NVIDIA H200
# with a model of 1.5 billion parameters (`runs/bench-update-h200/`, use of the card less what torch has reserved).
# Cards with fewer multiprocessors take less. It grows by 2 MiB for each GiB of pinned host memory: to 1.60 GiB with
# 101 GiB pinned. What is missing here then is less than `SLACK` leaves of 8 GiB or more.
CONTEXT = 1470 * MIB
WORKSPACE = 64 * MIB  # cuBLAS
# What vLLM takes of a card while it sleeps, at most: CUDA's context, kernels and recorded graphs. 1.43 GiB were seen on
# an NVIDIA H200 with a model of 1.5 billion parameters.
VLLM_ASLEEP = 1536 * MIB
VLLM_TOKENS = 4096  # that vLLM works on at one time
VLLM_BLOCK = 128  # tokens; it keeps keys and values in blocks of at most so many
VLLM_ROWS = 8  # longest responses whose keys and values there is room for at least; the others wait
SLACK = 0.03  # share of a budget that is left for gaps between allocations

# Tokens that go through a layer together, from the fastest that was measured downward.
MICROBATCH_TOKENS = (6144, 4096, 3072, 2048, 1024, 512, 256, 128)
ALIGNED = 64  # compiled code has microbatches of a multiple of so many tokens: torch's compiler pads and cuts others
HEAD_BLOCK = {True: 512, False: 128}  # tokens whose logits exist at one time: compiled, plain
BUCKET = 1 << 23  # parameters of one bucket of the step
# Gradients of the head's matrix besides the one that is kept: in "blocks" autograd adds one block's to those before.
HEAD_GRADIENTS: Mapping[HeadName, int] = {"full": 1, "blocks": 3, "fused": 0}
ADAMW_BLOCK = 1 << 21  # parameters that the resident engine's AdamW updates at one time
# Temporaries of an update that is not compiled, in float32 numbers for each parameter that is updated at one time.
ADAMW_NUMBERS: Mapping[OptimizerState, int] = {"fp32": 3, "bf16": 6, "bf16_stochastic": 9, "bf16_kahan": 6}
STEP_BUFFERS = 3  # buckets on the card: one coming, one at work, one going
# Slots of the ring of hidden states (see `hidden.py`). Going down, a microbatch whose travelling state waits on the
# host takes three, and two microbatches are on their way at a time; one whose state stays on the card takes one.
RING, RING_WHEN_KEPT = 6, 2
EMBEDDING_COLUMNS = 256  # columns of the embedding's gradient that are summed at one time
FLASH_ROWS = 128  # rows that the attention's backward pass adds for each segment
SEGMENTS, SEGMENT_TOKENS = 32, 96  # a microbatch has a multiple of so many segments, of so many tokens on average
TUNING = 60 * MIB  # torch's compiler clears the card's cache with so much (60 MB on an H200) when it tries kernels out
BATCH_BYTES = 48  # of a place in a batch: ids, labels, mask, old log-probabilities, scores and their derivative
HEAD_ENTRY, HEAD_LOGIT = 184, 0.633  # bytes that the head takes for each entry of the vocabulary, and for each logit


@dataclass(frozen=True)
class UpdateSize:
    """How large a batch is at most.

    Args:
        sequences: rows of one optimizer step.
        longest: tokens of the longest row, prompt and response.
        response: response tokens of a row at most.
        scored: rows that are scored together before the updates; 0 where nothing is scored.
        decoded: rows that transformers decodes side by side on this card; 0 where generation has its own memory.
        served: rows that vLLM decodes side by side on this card, in turns with the trainer; 0 without it.
        eight_bits: whether vLLM keeps the matrices of its layers in eight bits.
        sent: whether the weights go to a vLLM that is not on this card.
        group: rows that share a prompt.
    """

    sequences: int
    longest: int
    response: int
    scored: int = 0
    decoded: int = 0
    group: int = 1
    served: int = 0
    eight_bits: bool = False
    sent: bool = False


@dataclass(frozen=True)
class Plan:
    """What an engine keeps where, in which pieces it works, and what that costs. Made by `plan_update`.

    `resident` names the units (see `parts.py`) whose weights, gradients and optimizer state live on the card; `kept`
    and `kept_when_scoring` count microbatches whose hidden state stays there, `card_levels` layers whose inputs do.
    `card` holds bytes by phase and name, `host` by name; `traffic` the bytes that travel in one update, by name, with
    one update's share of scoring.
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

    def budget_needed(self) -> int:
        """The smallest budget in bytes that this plan keeps: its peak, `CONTEXT` on a card, and the slack for gaps."""
        return math.ceil((self.peak() + 1) / (1 - SLACK)) + self.on_card * CONTEXT

    def transfer_seconds(self, inward: float, outward: float) -> float:
        """Seconds that the copies of one update need at two speeds in bytes a second; both directions run at once."""
        return sum(
            max(self.traffic[f"{phase}, in"] / inward, self.traffic[f"{phase}, out"] / outward) for phase in TRIPS
        )

    def to_json(self) -> dict[str, Any]:
        """For `plan.json` in the run folder."""
        values = dataclasses.asdict(self) | {"resident": sorted(self.resident)}
        return {"engine": self.engine, "budget_bytes": values.pop("budget"), **values}


def what_stays(plan: Plan) -> str:
    """What a plan keeps on the card, in words; of a layer that is weights, gradient and optimizer state.

    >>> what_stays(Plan(longest=8, microbatch_tokens=16, microbatches=4, kept=2, resident=frozenset({"layer 0"})))
    '1 layer, hidden states of 2 of 4 microbatches'
    """
    if plan.engine == "resident":
        return "everything"
    layers = sum(name.startswith("layer") for name in plan.resident)
    kept = min(plan.kept, plan.microbatches)
    parts = [
        f"{layers} layer{'s' * (layers != 1)}" if layers else "",
        "embedding and head" if "head" in plan.resident else "",
        f"hidden states of {'all' if kept == plan.microbatches else f'{kept} of'} {plan.microbatches} microbatches",
        f"inputs of {plan.card_levels} layer{'s' * (plan.card_levels != 1)}" if plan.card_levels else "",
    ]
    return ", ".join(part for part in parts if part)


class DoesNotFit(UserError):
    """The smallest plan of an engine is larger than the budget; `shortage` is the sentence without the advice."""

    def __init__(self, plan: Plan, budget: int, advice: str) -> None:
        phase = max(plan.card, key=plan.peak)
        self.plan = plan
        self.shortage = (
            f"The {plan.engine.replace('_', '-')} engine needs {gib(plan.budget_needed())} in the phase {phase!r}, but "
            f"the budget is {gib(budget, there=True)}"
        )
        super().__init__(f"{self.shortage}; {advice}.")


def gib(size: float, *, there: bool = False) -> str:
    """A size in GiB: rounded up, for what is needed, or rounded down, for what is there.

    >>> gib(2.501 * GIB), gib(2.599 * GIB, there=True), gib(5 * MIB)
    ('2.6 GiB', '2.5 GiB', '0.005 GiB')
    """
    digits = 1 if size >= GIB else 3
    rounded = (math.floor if there else math.ceil)(size / GIB * 10**digits) / 10**digits
    return f"{rounded:.{digits}f} GiB"


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
        compiled: whether the engine compiles its layers and AdamW; the resident engine only with layers recomputed and
            the head "fused".
        microbatch, recompute_layers, head: rows at a time and the switches of the resident engine.
        head_block: tokens whose logits exist at one time; None: `HEAD_BLOCK`, or 32 for the head in "blocks".
        on_card: False where the CPU's own memory stands for the card.

    Raises:
        UserError: nothing fits; says what the smallest setting needs.
    """
    resident = _resident(shape, size, budget, optimizer_state, bytes_per_weight, microbatch, recompute_layers, head,
                         head_block, on_card, compiled and recompute_layers and head == "fused")  # fmt: skip
    fits = budget is None or resident.peak() <= usable(budget, on_card=on_card)
    if engine == "resident" or (engine is None and fits):
        if not fits:
            raise DoesNotFit(resident, budget or 0, "choose --engine layer_major, or leave --engine out")
        return resident
    return _layer_major(shape, size, budget, optimizer_state, bytes_per_weight, compiled, head_block, on_card)


# --- the resident engine


def _resident(shape: ModelShape, size: UpdateSize, budget: int | None, optimizer_state: OptimizerState,
              bytes_per_weight: int, microbatch: int, recompute_layers: bool, head: HeadName,
              head_block: int | None, on_card: bool, compiled: bool) -> Plan:  # fmt: skip
    block = head_block or (HEAD_BLOCK[False] if head == "fused" else 32)
    ledger = update_ledger(
        shape, sequences=size.sequences, length=size.longest, microbatch=microbatch, optimizer_state=optimizer_state,
        recompute_layers=recompute_layers, head=head, head_block=block, bytes_per_weight=bytes_per_weight,
    )  # fmt: skip
    held = {name: ledger[name] for name in ("weights", "optimizer state")}
    gradients = {"gradients": ledger["gradients"]}
    one_layer = min(microbatch, size.sequences) * size.longest * shape.activation_bytes_per_token(bytes_per_weight)
    stored = {name: ledger[name] for name in ("weights", "gradients", "optimizer state", "layer inputs")}
    stored["the batch and its scores"] = size.sequences * size.longest * BATCH_BYTES
    if not recompute_layers:
        stored["layer at work"] = ledger["layer at work"]  # of all layers, all the way
    # The ledger adds up what is never there at one time. The worst moment is in the head, in a layer, or at the end.
    matrix = shape.vocabulary * shape.hidden * bytes_per_weight
    new = "gradient before it is added"
    moments = [
        {new: HEAD_GRADIENTS[head] * matrix, "logits": ledger["logits"]},
        {"layer at work": one_layer, new: 3 * shape.hidden * shape.intermediate * bytes_per_weight},
        {new: matrix},
    ]
    temporaries = 0 if compiled else 4 * ADAMW_NUMBERS[optimizer_state] * ADAMW_BLOCK
    scoring = {  # without a graph, which only compiled layers have, no layer keeps anything
        "layer at work": one_layer,
        "layer inputs": ledger["layer inputs"] * compiled,
        "logits": ledger["logits"],
        "the batch and its scores": size.scored * size.longest * BATCH_BYTES,
    }
    base = ({"libraries' workspace": WORKSPACE} if on_card else {}) | _asleep(size)
    card = {
        "load": held,
        "generate": held | _generation(shape, size, bytes_per_weight, _room(budget, held | base, on_card)),
        "score": held | (scoring if size.scored else {}),
        "update": max((moment | stored for moment in moments), key=lambda buffers: sum(buffers.values())),
        "step": held | gradients | {"AdamW's temporaries": temporaries},
        "save": held,
    }
    card = {phase: base | names for phase, names in card.items()}
    return Plan(
        longest=size.longest, microbatch_tokens=microbatch * size.longest, engine="resident",
        microbatches=-(-size.sequences // microbatch), head_block=block, compiled=compiled, on_card=on_card,
        budget=budget, card=card,
        host=({"weights while loading": ledger["weights"]} if on_card else {})
        | ({"weights for vLLM": ledger["weights"]} if size.served or size.sent else {}),
        traffic={f"{phase}, {way}": 0 for phase in TRIPS for way in ("in", "out")},
    )  # fmt: skip


def _asleep(size: UpdateSize) -> dict[str, int]:
    """What vLLM takes of the card all the time."""
    return {"vLLM, also asleep": VLLM_ASLEEP} if size.served else {}


def _room(budget: int | None, held: Mapping[str, int], on_card: bool) -> float:
    """Bytes of a budget that are left beside what is held."""
    return math.inf if budget is None else usable(budget, on_card=on_card) - sum(held.values())


def _generation(shape: ModelShape, size: UpdateSize, w: int, room: float) -> dict[str, int]:
    """What generation takes beside what is held, of so much room: of transformers besides the weights, of vLLM all.

    vLLM lets responses wait for room, so its keys and values take what is left: at least those of `VLLM_ROWS` of the
    longest rows, at most those of all that are decoded side by side.
    """
    if size.served:
        matrices = size.eight_bits * shape.layers * shape.layer_matrices()
        # counted as in any forward pass, with three float32 copies of the next tokens' logits; not measured
        work = VLLM_TOKENS * w * (3 * shape.intermediate + 4 * shape.hidden) + size.served * shape.vocabulary * 3 * 4
        # Where it rounds, a load makes one module's weights beside the engine's: the embedding, or gate and up with
        # their absolute values. Keys and values are not there yet.
        load = size.eight_bits * max(shape.vocabulary, 4 * shape.intermediate) * shape.hidden * w
        parts = {
            "vLLM's weights": shape.parameters() * w - matrices * (w - 1),
            "vLLM's layer and logits at work": max(work, load),
        }
        least, most = (vllm_cache(shape, size.longest, rows, w) for rows in (min(size.served, VLLM_ROWS), size.served))
        cache = max(least, min(most, int(min(room, 2**62)) - sum(parts.values())))
        return parts | {"vLLM's keys and values": cache}
    if not size.decoded:
        return {}
    cache = size.decoded * size.longest * shape.kv_bytes_per_token(w)
    prompt = max(1, size.longest - size.response + 1)
    prefill = size.decoded * prompt * w * (3 * shape.intermediate + 4 * shape.hidden)  # if no prompt is shared
    attention = 2 * size.decoded * size.longest * shape.heads * shape.head_size * w  # one layer's, for all its heads
    return {
        "keys and values": cache + cache // shape.layers,  # a layer's are copied when finished rows are dropped
        "layer at work": max(prefill, attention),
        "logits of the next tokens": size.decoded * shape.vocabulary * (w + 5 * 4),
    }


def vllm_cache(shape: ModelShape, longest: int, rows: int, w: int) -> int:
    """Bytes of keys and values of so many of the longest rows in vLLM: whole blocks, and one more."""
    blocks = -(-(longest + 1) // VLLM_BLOCK)
    return (rows * blocks + 1) * VLLM_BLOCK * shape.kv_bytes_per_token(w)


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

    # From the smallest pieces to the largest, nothing kept; larger pieces that would send more (they may end in a
    # microbatch that is half empty) are left out.
    ladder: list[tuple[dict[str, Any], Plan]] = []
    for tokens in reversed(MICROBATCH_TOKENS):
        n, count = _fullest(size, max(tokens, size.longest))
        n = -(-n // ALIGNED) * ALIGNED if compiled else n
        block = min(head_block or HEAD_BLOCK[compiled], max(32, tokens // 4))
        choice: dict[str, Any] = dict(microbatch_tokens=n, microbatches=count, head_block=block)
        plan = planned(**choice)
        if not ladder or _sent(plan) <= _sent(ladder[-1][1]):
            ladder.append((choice, plan))
    fitting = [i for i, (_, plan) in enumerate(ladder) if plan.peak() <= limit]
    if not fitting:
        smallest = min((plan for _, plan in ladder), key=Plan.peak)
        raise DoesNotFit(smallest, budget or 0, "give more, shorten --max-tokens, or lower --generation-batch-size")
    choice, plan = ladder[fitting[-1]]
    if budget is None or plan is not ladder[-1][1]:  # larger pieces come before anything that is kept
        return plan
    for more in _wishes(shape, size, plan, state_bytes(optimizer_state, bytes_per_weight), bytes_per_weight):
        richer = planned(**choice | more)
        if richer.peak() <= limit and _sent(richer) < _sent(plan):
            choice, plan = choice | more, richer
    return plan


def _fullest(size: UpdateSize, most: int) -> tuple[int, int]:
    """Tokens of a microbatch, 3/4 of `most` to `most`, and how many the largest batch makes, so that it computes the
    least padding: every microbatch runs as if it were full.
    """
    prompt = size.longest - size.response + 1 if size.group > 1 else 0
    own = size.longest - prompt
    groups = -(-size.sequences // size.group)
    most = max(size.longest, min(most, groups * prompt + size.sequences * own))  # no larger than the batch
    prompts = range(1, min(groups, most // prompt) + 1) if prompt else [0]
    rows = range(1, size.sequences + 1)
    sizes = {p * prompt + r * own for p in prompts for r in rows}
    sizes = {n for n in sizes if max(size.longest, most * 3 // 4) <= n <= most} or {size.longest}
    counts = {n: _microbatches(size, n, prompt) for n in sizes}
    best = min(sizes, key=lambda n: (counts[n] * n, -n))
    return best, counts[best]


def _microbatches(size: UpdateSize, n: int, prompt: int) -> int:
    """Microbatches of n tokens that `pack` makes of the largest batch, whose groups share `prompt` tokens."""
    count = room = 0
    for row in range(size.sequences):
        needed = size.longest if row % size.group == 0 else size.longest - prompt
        if needed > room:
            count, room, needed = count + 1, n, size.longest
        room -= needed
    return count


def _sent(plan: Plan) -> int:
    """All bytes that travel in one update."""
    return sum(plan.traffic.values())


def _wishes(shape: ModelShape, size: UpdateSize, plan: Plan, state: int, w: int) -> Iterator[dict[str, Any]]:
    """What to keep on the card besides, in order of traffic saved a byte."""
    layers = [f"layer {i}" for i in range(shape.layers)]
    updates = max(1, _updates(size))
    groups: list[tuple[float, list[dict[str, Any]]]] = [
        # a travelling state comes twice and goes once at every layer
        (3 * shape.layers, [{"kept": kept} for kept in range(2, plan.microbatches + 1)]),
        # while scoring it comes and goes once, for many updates together
        (2 * shape.layers / updates, [{"kept_when_scoring": k} for k in range(2, _rounds(size, plan) + 1)]),
        # a layer's weights come twice and its gradient goes; in the step weights and state come and go, gradients come
        ((6 * w + 2 * state) / (2 * w + state), [{"resident": frozenset(layers[: i + 1])} for i in range(len(layers))]),
        ((5 * w + 2 * state) / (2 * w + state), [{"resident": frozenset([*layers, "head", "embedding"])}]),
        (2, [{"card_levels": count} for count in range(1, shape.layers + 1)]),  # an input goes and comes
    ]
    for _, wishes in sorted(groups, key=lambda group: -group[0]):
        # What vLLM drives off the card once for each update saves no traffic; and nothing hides the hand-over.
        yield from (wish for wish in wishes if not ("resident" in wish and size.served and updates == 1))


def _updates(size: UpdateSize) -> int:
    """Updates that follow one scoring; 0 where nothing is scored."""
    return -(-size.scored // size.sequences)


def _rounds(size: UpdateSize, plan: Plan) -> int:
    """Microbatches of one scoring."""
    return _updates(size) * plan.microbatches


@dataclass(frozen=True)
class _Away:
    """Parameters whose home is the host: of all layers, of the embedding, and of norm and head; `tied`: the head reads
    the embedding.
    """

    layers: int
    embedding: int
    head: int
    one_layer: int
    tied: bool

    @classmethod
    def of(cls, plan: Plan, shape: ModelShape) -> _Away:
        one = shape.layer_parameters()
        count = sum(f"layer {i}" not in plan.resident for i in range(shape.layers))
        matrix = shape.vocabulary * shape.hidden
        return cls(
            layers=count * one,
            embedding=0 if "embedding" in plan.resident else matrix,
            head=0 if "head" in plan.resident else shape.hidden + (0 if shape.tied else matrix),
            one_layer=one if count else 0,
            tied=shape.tied,
        )

    def all(self) -> int:
        return self.layers + self.embedding + self.head

    def arena(self, copies: int) -> int:
        """Parameters that have room on the card: two layers, or embedding or head (a tied head needs both)."""
        end = self.embedding + self.head if self.tied else max(self.embedding, self.head)
        return copies * max(2 * self.one_layer, end)


def _card(plan: Plan, shape: ModelShape, size: UpdateSize, optimizer_state: OptimizerState,
          w: int) -> dict[str, dict[str, int]]:  # fmt: skip
    n, block = plan.microbatch_tokens, plan.head_block
    hidden = n * shape.hidden * w  # one hidden state
    away = _Away.of(plan, shape)
    state = state_bytes(optimizer_state, w)
    empty = ({"libraries' workspace": WORKSPACE} if plan.on_card else {}) | _asleep(size)
    held = dict(empty)
    lives = shape.parameters() - away.all()
    if lives:
        held |= {
            "weights that stay": lives * w,
            "gradients that stay": lives * w,
            "optimizer state that stays": lives * state,
        }

    def trip(copies: int, kept: int, count: int, levels: int, rows: int) -> dict[str, int]:
        ring = RING_WHEN_KEPT if kept >= count else RING
        parts = {
            "visiting weights and gradients" if copies == 2 else "visiting weights": away.arena(copies) * w,
            "hidden states": (min(kept, count) + ring) * hidden,
            "layer inputs": levels * count * hidden,
            "token ids and positions": count * n * 40 + 2 * size.longest * shape.head_size * w,
            "the batch and its scores": rows * size.longest * (BATCH_BYTES if copies == 2 else 2 * 4),
        }
        return {name: value for name, value in parts.items() if value}

    work = {
        "layer at work": _down(shape, n, w, plan.compiled, segments(n, size.longest), plan.compiled * TUNING),
        # Nearly all tokens answer, because prompts are shared.
        "head at work": _head(shape, n, n, block, w, plan.compiled) + plan.compiled * TUNING,
        "embedding's gradient": shape.vocabulary * min(EMBEDDING_COLUMNS, shape.hidden) * w + plan.on_card * 30 * MIB,
    }
    largest = max(work, key=lambda name: work[name])
    bucket = min(plan.bucket, max(away.one_layer, away.embedding, away.head))
    most = min(plan.bucket, max(shape.parts()))  # that are updated at one time, here or in a bucket
    temporaries = 0 if plan.compiled else 4 * ADAMW_NUMBERS[optimizer_state] * most
    step = {"buckets": STEP_BUFFERS * bucket * (2 * w + state), "AdamW's temporaries": temporaries}
    # The engine leaves the card to vLLM altogether; what lives on it waits on the host.
    staying = empty if size.served else held
    generation = _generation(shape, size, w, _room(plan.budget, staying, plan.on_card))
    if size.decoded and not size.served:
        generation = {"weights to generate with": shape.parameters() * w, **generation}
    score = {}
    if size.scored:
        forward = max(5 * hidden, 2 * hidden + block * shape.vocabulary * (w if plan.compiled else w + 16))
        score = trip(1, plan.kept_when_scoring, _rounds(size, plan), 0, size.scored) | {
            "layer or head at work": max(_up(shape, n, w, plan.compiled), forward)
        }
    return {
        "load": held,
        "generate": staying | generation,
        "score": held | score,
        "update": held
        | trip(2, plan.kept, plan.microbatches, plan.card_levels, size.sequences)
        | {largest: work[largest]},
        "step": held | {name: value for name, value in step.items() if value},
        "save": held,
    }


def most_pieces(n: int) -> int:
    """Rows, or prompts and their answers, that a filled microbatch of n tokens takes at most."""
    return max(SEGMENTS - 2, n // SEGMENT_TOKENS)


def segments(n: int, longest: int) -> int:
    """Segments that every filled microbatch of n tokens has: the most pieces, what fills, and empty ones.

    >>> segments(5376, 672), segments(20, 10)
    (96, 64)
    """
    return -(-(most_pieces(n) + n // longest + 1) // SEGMENTS) * SEGMENTS


def _up(shape: ModelShape, n: int, w: int, compiled: bool) -> int:
    """Bytes that a layer takes for n tokens without a graph."""
    hidden, inner = shape.hidden, shape.intermediate
    if compiled:
        return n * w * (2 * inner + (4 if shape.norm_first else 3) * hidden)
    return n * w * max(3 * inner + 4 * hidden, 13 * hidden) + 4 * n * shape.head_size * w


def _down(shape: ModelShape, n: int, w: int, compiled: bool, segments: int, tuning: int = 0) -> int:
    """Bytes that a layer takes for n tokens with a graph and its way back, the new gradients included.

    Two moments can be the worst: when everything is stored and the first matrix's gradient is made, the first time with
    `tuning` bytes besides, and later, in the attention's backward pass, when those of the feed-forward part are made
    already.
    """
    hidden, inner = shape.hidden, shape.intermediate
    padded = FLASH_ROWS * segments * shape.heads * shape.head_size * 4 if w == 2 else 0  # flash takes bfloat16 alone
    late = 3 * hidden * inner * w + int((12.5 if shape.norm_first else 17) * n * hidden * w) + padded
    if compiled:
        early = n * w * (4 * inner + (8 if shape.norm_first else 10) * hidden)
    else:
        repeated = 2 * (shape.heads - shape.kv_heads) * shape.head_size * w  # keys and values for all heads
        stored = shape.activation_bytes_per_token(w) + repeated
        early = n * (stored + w * (2 * inner + (1 if shape.norm_first else 4) * hidden))
    return max(early + hidden * inner * w + tuning, late)


def _head(shape: ModelShape, n: int, answers: int, block: int, w: int, compiled: bool) -> int:
    """Bytes that norm and head take for n tokens, of which so many are scored, with the way back.

    The worst moment is in the sweep over blocks or, with small blocks, in the norm's backward pass. Sweeping, the norm
    keeps its input and the normalised numbers, one or both in float32; there are the scored states, their gradient, and
    that of the microbatch before.
    """
    hidden, scored = n * shape.hidden * w, answers * shape.hidden * w
    logit = (2 * w if compiled else 16) + HEAD_LOGIT
    normed = (4 if shape.norm_first else 5) * hidden
    sweep = normed + 3 * scored + int(shape.vocabulary * (min(block, answers) * logit + HEAD_ENTRY))
    return max(sweep, (14 if shape.norm_first else 16) * hidden + scored)


def _host(plan: Plan, shape: ModelShape, size: UpdateSize, optimizer_state: OptimizerState,
          w: int) -> dict[str, int]:  # fmt: skip
    away = _Away.of(plan, shape).all()
    hidden = plan.microbatch_tokens * shape.hidden * w
    levels = shape.layers + (plan.kept < plan.microbatches) - plan.card_levels
    waiting = _rounds(size, plan) if plan.kept_when_scoring < _rounds(size, plan) else 0  # in the first level
    first = max(plan.microbatches if levels else 0, waiting)
    state = state_bytes(optimizer_state, w)
    lives = shape.parameters() - away  # on the card; while vLLM generates it waits, the weights in vLLM's sight
    return {
        "weights": away * w,
        "gradients": away * w,
        "optimizer state": away * state,
        "layer inputs": (first + max(0, levels - 1) * plan.microbatches) * hidden,
        **({"what waits for vLLM": lives * (w + state)} if size.served and lives else {}),
        **({"weights for vLLM": lives * w} if (size.served or size.sent) and lives else {}),
    }


def _traffic(plan: Plan, shape: ModelShape, size: UpdateSize, optimizer_state: OptimizerState,
             w: int) -> dict[str, int]:  # fmt: skip
    away = _Away.of(plan, shape)
    hidden = plan.microbatch_tokens * shape.hidden * w
    sweeps = 2 if size.scored else 1  # over the head: a loss of ratios needs the log-probabilities first
    levels = shape.layers - plan.card_levels  # layers whose inputs go to the host and come back
    inputs = levels * plan.microbatches * hidden
    waiting = max(0, plan.microbatches - plan.kept) * hidden  # come to every layer twice, to the head, the embedding
    state = state_bytes(optimizer_state, w)
    # A tied head reads the embedding too, and its share of the gradient goes home and comes back once.
    tied = away.embedding if shape.tied else 0
    scoring = away.all() + tied
    rounds = _rounds(size, plan)
    score_waiting = max(0, rounds - plan.kept_when_scoring) * (shape.layers + 1) * hidden
    updates = max(1, _updates(size))
    return {
        "score, in": (scoring * w + score_waiting) // updates if size.scored else 0,
        "score, out": score_waiting // updates,
        "pass, in": (2 * away.layers + away.embedding + sweeps * (away.head + tied) + tied) * w
        + inputs
        + (2 * levels + 1 + sweeps) * waiting,
        "pass, out": (away.all() + tied) * w + inputs + (levels + 2) * waiting,
        "step, in": away.all() * (2 * w + state),
        "step, out": away.all() * (w + state),
    }
