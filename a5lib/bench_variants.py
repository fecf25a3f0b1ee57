"""The rows of `a5 bench update`: what each one runs. Facts only; how a row is run and measured is in `bench_update`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Settings = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row of the benchmark.

    Args:
        name: its name on the command line.
        group: the part of the table that it stands in.
        what: its name in the table.
        settings: fields of `TrainConfig` that differ from this benchmark's `SETTINGS`.
        peer: a name in `a5lib.peers.PEERS` to run that library's update; None: one of our engines.
        model: a name in `a5lib.synthetic.PUBLISHED`.
        sequences, tokens, response, group_size, ragged, zero_share: see `a5lib.synthetic.made_up_batch`.
        microbatch: rows of the resident engine's microbatches, as gradient accumulation; None: the plan's choice.
        padded: run every row at full width, also those whose advantage is 0, as a loop would that knows no lengths.
        scoring: score the batch in place of updating.
        adamw: "ours", or torch's own, parameter by parameter ("loop") or all at once with temporaries ("foreach").
        warmups, updates: how many are run, and how many of them are measured.
        minutes: after which the row is given up.
    """

    name: str
    group: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    peer: str | None = None
    model: str = "olmo2-1b"
    sequences: int = 64
    tokens: int = 672
    response: int = 512
    group_size: int = 8
    ragged: bool = False
    zero_share: float = 0.0
    microbatch: int | None = None
    padded: bool = False
    scoring: bool = False
    adamw: Literal["ours", "loop", "foreach"] = "ours"
    warmups: int = 2
    updates: int = 5
    minutes: float = 4.0


SETTINGS: Mapping[str, Any] = {"algorithm": "grpo", "optimizer_state": "bf16", "learning_rate": 1e-5}

RESIDENT: Settings = {"engine": "resident", "recompute_layers": True, "head": "fused"}
PUBLISHED: Settings = {"engine": "resident", "recompute_layers": True, "head": "blocks"}
USUAL: Settings = {"engine": "resident", "recompute_layers": False, "head": "full", "optimizer_state": "fp32"}
HOST: Settings = {"engine": "layer_major"}  # without a budget nothing stays on the card

SLOW: Settings = {"warmups": 1, "updates": 2}
FEW: Settings = {"warmups": 1, "updates": 3}
# 10 groups of 16, 3 of them without a signal; a prompt of 120 to 201 tokens and a response of 16 to 512.
RAGGED: Settings = {"sequences": 160, "tokens": 712, "group_size": 16, "ragged": True, "zero_share": 0.3}


def _budgets() -> list[Variant]:
    """The same update under hard caps, with a large and a small train batch."""
    rows = []
    for sequences, group in ((64, "budgets"), (8, "small-batches")):
        if sequences == 8:
            rows.append(Variant("batch-8", group, "8 sequences, everything on the host", HOST, sequences=8))
        for gib in (4.0, 6.0, 8.0, 12.0):
            name = f"budget-{gib:.0f}" if sequences == 64 else f"batch-8-budget-{gib:.0f}"
            settings = RESIDENT | {"engine": None, "vram_budget": gib}
            what = f"{sequences} sequences, {gib:.0f} GiB"
            few: Settings = FEW if sequences == 64 else {}
            rows.append(Variant(name, group, what, settings, sequences=sequences, microbatch=4, **few))
    return rows


# What the resident engine can leave out or put in, one by one: (name, settings, other fields).
PIECES: dict[str, tuple[Settings, Settings]] = {
    "microbatch": ({}, {"microbatch": 1}),
    "layers": ({"recompute_layers": True}, {}),
    "head": ({"head": "blocks"}, {}),
    "adamw": ({}, {"adamw": "ours"}),
    "state": ({"optimizer_state": "bf16"}, {}),
}
PIECE_WORDS = {
    "microbatch": "one sequence at a time",
    "layers": "layers recomputed",
    "head": "head in blocks",
    "adamw": "AdamW without temporaries",
    "state": "bf16 state",
}


def _ablation() -> list[Variant]:
    """No piece, each piece alone, all but one, and all: 16 sequences, since the peak does not depend on how many."""

    def row(name: str, what: str, pieces: list[str]) -> Variant:
        settings: Settings = dict(USUAL)
        fields: Settings = {"microbatch": 8, "adamw": "foreach"}
        for piece in pieces:
            settings |= PIECES[piece][0]
            fields |= PIECES[piece][1]
        return Variant(f"ablation-{name}", "ablation", what, settings, sequences=16, **FEW, **fields)

    return [
        row("none", "none of the five", []),
        *(row(f"only-{p}", f"only {PIECE_WORDS[p]}", [p]) for p in PIECES),
        *(row(f"without-{p}", f"all but {PIECE_WORDS[p]}", [q for q in PIECES if q != p]) for p in PIECES),
        row("all", "all five", list(PIECES)),
    ]


VARIANTS: tuple[Variant, ...] = (
    Variant("host", "engines", "layer-major, bf16 state, everything on the host", HOST),
    Variant("host-fp32", "engines", "layer-major, fp32 master, everything on the host",
            HOST | {"optimizer_state": "fp32"}),
    Variant("resident", "engines", "resident, our head, layers compiled", RESIDENT, microbatch=4),
    Variant("published", "engines", "resident as published", PUBLISHED, microbatch=1, adamw="loop", **SLOW),
    *_budgets(),
    Variant("ragged-host", "ragged", "ragged, layer-major, everything on the host", HOST, **RAGGED),
    Variant("ragged-resident", "ragged", "ragged, resident", RESIDENT, microbatch=4, **RAGGED, **FEW),
    Variant("ragged-padded", "ragged", "ragged, resident, padding computed", RESIDENT, microbatch=4, padded=True,
            **RAGGED, **SLOW),
    Variant("clip", "losses", "layer-major, off-policy loss with clipping", HOST | {"algorithm": "offpolicy_clip"}),
    Variant("scoring", "losses", "layer-major, scoring alone", HOST, scoring=True),
    Variant("peer-trl", "peers", "TRL: fused LM head, fused AdamW", peer="trl", microbatch=8, **FEW),
    Variant("peer-liger", "peers", "Liger: fused GRPO loss, layer kernels", peer="liger", microbatch=8, **FEW),
    Variant("peer-liger-loss", "peers", "Liger: fused GRPO loss alone", peer="liger-loss", microbatch=8, **FEW),
    Variant("peer-torchao", "peers", "torchao: state and gradients on the host", peer="torchao", **FEW),
    Variant("peer-torchao-state", "peers", "torchao: state on the host", peer="torchao-state", microbatch=8, **FEW),
    Variant("peer-bnb-8", "peers", "bitsandbytes: paged 8-bit AdamW", peer="bitsandbytes-8", microbatch=8, **FEW),
    Variant("peer-bnb-32", "peers", "bitsandbytes: paged 32-bit AdamW", peer="bitsandbytes-32", microbatch=8, **FEW),
    *_ablation(),
    Variant("olmo2-7b", "large", "OLMo-2-1124-7B, everything on the host", HOST, model="olmo2-7b", **SLOW, minutes=5),
    Variant("llama3.1-8b", "large", "Llama-3.1-8B, 8 sequences of 20,480 tokens", HOST,
            model="llama3.1-8b", sequences=8, tokens=20_480, response=20_320, warmups=1, updates=1, minutes=6),
)  # fmt: skip
"""Every row, in the order of the table."""

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(v.group for v in VARIANTS))


def shrunk(variant: Variant, model: str | None, sequences: int | None, tokens: int | None) -> Variant:
    """The same row on another model or batch: to try a row on a small card or on the CPU."""
    rows = variant.sequences if sequences is None else sequences
    width = variant.tokens if tokens is None else tokens
    return replace(
        variant,
        model=variant.model if model is None else model,
        sequences=rows,
        tokens=width,
        response=variant.response if tokens is None else max(1, width * variant.response // variant.tokens),
        group_size=min(variant.group_size, rows),
        microbatch=None if variant.microbatch is None else min(variant.microbatch, rows),
    )
