"""The rows of `a5 diagnose-backend` as tables and checks, from its log alone: they are drawn again without a card.

steady state   all cycles but the first, which compiles and fills caches; figures are medians over it
hand-over      the seconds of a cycle in which the card changes hands: neither generation, scoring, update nor rest
tokens/s       sampled response tokens over the seconds of generation
GB/s           bytes of all weights over the seconds in which vLLM took them
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from a5lib.bench_update import Sheet
from a5lib.engines.plan import GIB

Backend = Literal["transformers", "vllm-colocated", "vllm-alone"]
Row = dict[str, Any]

# A cycle of the published project's diagnostic with transformers and with colocated vLLM, on an RTX 5070 Ti.
PUBLISHED_SECONDS, PUBLISHED_RATIO = (171.9, 20.6), 8.33

PHASES = {
    "leave": "trainer frees the card",
    "write": "weights into shared memory",
    "wake weights": "vLLM wakes for weights",
    "load": "weights in",
    "verify": "every tensor verified",
    "wake kv_cache": "vLLM wakes for keys and values",
    "reset_prefix_cache": "prefix cache reset",
    "generate": "generation",
    "sleep": "generation frees the card",
    "return": "trainer takes the card back",
    "score": "scoring",
    "update": "update",
    "rest": "rest",
}
WORK = ("generate", "score", "update", "rest")  # what is not hand-over

MOST_HAND_OVER = 0.5  # seconds, for a model of about 1 billion parameters on a card
LEAST_SHARE = 0.6  # of the tokens/s of vLLM alone on the same memory
GROWTH_FROM, GROWTH_TO, MOST_GROWTH = 3, 10, 0.01
ABOUT_1B = range(10**9, 2 * 10**9)


@dataclass
class Run:
    """The rows of one backend: how it began, its cycles, and its end (None: it did not come so far)."""

    start: Row
    cycles: list[Row] = field(default_factory=list)
    end: Row | None = None

    @property
    def steady(self) -> list[Row]:
        """The cycles that count."""
        return self.cycles[1:]

    def median(self, name: str) -> float:
        """Of a figure of the steady cycles."""
        return statistics.median(row[name] for row in self.steady)

    def phase(self, name: str) -> list[float]:
        """Seconds of a phase in each steady cycle that has it."""
        return [row["seconds"][name] for row in self.steady if name in row["seconds"]]

    def hand_overs(self) -> list[float]:
        """Seconds of hand-over in each steady cycle."""
        return [sum(s for name, s in row["seconds"].items() if name not in WORK) for row in self.steady]

    def peak(self) -> int | None:
        """Bytes of the whole card in use, the most at any time, start and first cycle included."""
        cards = [row["memory"]["card"] for row in (self.start, *self.cycles)]
        return max((card for card in cards if card is not None), default=None)


Group = Mapping[str, Run]


class Check(NamedTuple):
    """Something that should be so: whether it is (None: it cannot be said here), and in which words."""

    passed: bool | None
    words: str


def newest(rows: Iterable[Row]) -> list[Group]:
    """The newest run of each backend that has steady cycles, backends of the same setting together, by name."""
    runs: dict[tuple[str, str], Run] = {}
    for row in rows:
        key = row["backend"], row["began"]
        if row["row"] == "start":
            runs[key] = Run(row)
        elif row["row"] == "cycle":
            runs[key].cycles.append(row)
        else:
            runs[key].end = row
    groups: dict[str, dict[str, Run]] = {}
    for (backend, _), run in runs.items():
        if run.steady:
            groups.setdefault(json.dumps(run.start["setting"]), {})[backend] = run
    return list(groups.values())


def growth(run: Run, name: str) -> float | None:
    """How much more of a kind of memory the last cycle has than the third, as a share; None where it is not known.

    Args:
        run: of at least 10 cycles.
        name: a key of a row's `memory`.
    """
    if len(run.cycles) < GROWTH_TO:
        return None
    before, after = (run.cycles[i]["memory"][name] for i in (GROWTH_FROM - 1, -1))
    return after / before - 1 if before and after is not None else None


def checks(group: Group) -> list[Check]:
    """What is asked of colocated vLLM, from the runs of one setting; nothing where it was not measured."""
    run = group.get("vllm-colocated")
    if run is None:
        return []
    made = [_hand_over(run)]
    if "vllm-alone" in group:
        made.append(_share(run, group["vllm-alone"]))
    return [*made, _budget(run), *_growths(run), _orphans(run)]


def _hand_over(run: Run) -> Check:
    seconds, setting = statistics.median(run.hand_overs()), run.start["setting"]
    words = f"hand-over takes {seconds:.3f} s"
    if setting["device"] == "cpu" or setting["parameters"] not in ABOUT_1B:
        return Check(None, f"{words}; {MOST_HAND_OVER:g} s at most are wanted for 1 billion parameters on a card")
    return Check(seconds <= MOST_HAND_OVER, f"{words}, and {MOST_HAND_OVER:g} s at most are wanted")


def _share(run: Run, alone: Run) -> Check:
    share = run.median("tokens_per_second") / alone.median("tokens_per_second")
    words = f"generation reaches {100 * share:.0f} % of the tokens/s of vLLM alone"
    if run.start["setting"]["device"] == "cpu":
        return Check(None, f"{words}; on a card {100 * LEAST_SHARE:.0f} % at least are wanted")
    return Check(share >= LEAST_SHARE, f"{words}, and {100 * LEAST_SHARE:.0f} % at least are wanted")


def _budget(run: Run) -> Check:
    peak, budget = run.peak(), run.start["setting"]["vram_budget"]
    if peak is None:
        return Check(None, "there is no card whose use could be measured")
    words = f"both tenants took {peak / GIB:.2f} GiB of the card at most"
    if budget is None:
        return Check(None, f"{words}; there was no budget")
    left = budget - peak / GIB
    return Check(left >= 0, f"{words}, {abs(left):.2f} {'less' if left >= 0 else 'more'} than the {budget:g} allowed")


def _growths(run: Run) -> list[Check]:
    if len(run.cycles) < GROWTH_TO:
        return [Check(None, f"growth is judged from {GROWTH_TO} cycles on, and there are {len(run.cycles)}")]
    made = []
    for name, words in (("card", "the card"), ("trainer", "the trainer's host memory"),
                        ("worker", "the worker's host memory"), ("shared", "shared memory")):  # fmt: skip
        share = growth(run, name)
        if share is not None:
            from_to = f"from cycle {GROWTH_FROM} to {len(run.cycles)}"
            made.append(
                Check(share < MOST_GROWTH, f"{words}: {100 * share:+.2f} % {from_to}, and less than 1 % is wanted")
            )
    return made


def _orphans(run: Run) -> Check:
    if run.end is None:
        return Check(None, "the run did not come to its end, so what the worker left is not known")
    left = run.end["orphans"]
    if left:
        return Check(False, f"the worker left {len(left)} process(es): {', '.join(map(str, left))}")
    return Check(True, "the worker left no process")


def sheets(groups: Sequence[Group]) -> list[Sheet]:
    """For each setting the phases and the memory of every backend, with the ratio and the checks below."""
    return [sheet for group in groups for sheet in (_times(group), _memory(group))]


def _title(group: Group) -> str:
    setting = next(iter(group.values())).start["setting"]
    budget = "" if setting["vram_budget"] is None else f", {setting['vram_budget']:g} GiB"
    return (
        f"{setting['model']} on {setting['device']}{budget}: {setting['responses']} responses of up to "
        f"{setting['max_tokens']} tokens"
    )


def _times(group: Group) -> Sheet:
    lines = {
        words: [f"{statistics.median(seconds):.3f}" if (seconds := run.phase(name)) else "-" for run in group.values()]
        for name, words in PHASES.items()
        if any(run.phase(name) for run in group.values())
    }
    lines |= {
        "hand-over": ["-" if name == "vllm-alone" else _spread(run.hand_overs()) for name, run in group.items()],
        "whole cycle": [_spread([row["cycle_seconds"] for row in run.steady]) for run in group.values()],
        "tokens/s of generation": [f"{run.median('tokens_per_second'):,.0f}" for run in group.values()],
        "GB/s of weights in": [_gb_per_s(run) for run in group.values()],
    }
    cells = [[words, *figures] for words, figures in lines.items()]
    return Sheet(_title(group), ("seconds", *group), cells, _notes(group))


def _memory(group: Group) -> Sheet:
    kinds = {
        "the card, most": [run.peak() for run in group.values()],
        "trainer's torch on the card, most": [_most(run, "reserved") for run in group.values()],
        "trainer, resident": [_most(run, "trainer") for run in group.values()],
        "worker, resident": [_most(run, "worker") for run in group.values()],
        "shared memory": [_most(run, "shared") for run in group.values()],
    }
    cells = [
        [words, *("-" if not size else f"{size / GIB:.3f}" for size in sizes)]
        for words, sizes in kinds.items()
        if any(sizes)
    ]
    signs = {True: "ok", False: "FAIL", None: "not judged"}
    return Sheet(
        f"memory of {_title(group)}", ("GiB", *group), cells,
        [f"{signs[check.passed]}: {check.words}." for check in checks(group)],
    )  # fmt: skip


def _notes(group: Group) -> list[str]:
    notes = []
    if {"transformers", "vllm-colocated"} <= group.keys():
        ratio = group["transformers"].median("cycle_seconds") / group["vllm-colocated"].median("cycle_seconds")
        with_transformers, with_vllm = PUBLISHED_SECONDS
        on_cpu = group["transformers"].start["setting"]["device"] == "cpu"
        notes.append(
            f"A cycle with transformers takes {ratio:.2f} times as long as one with colocated vLLM; published: "
            f"{PUBLISHED_RATIO} times ({with_transformers} s and {with_vllm} s, RTX 5070 Ti)."
            + (" On a CPU this says nothing about a card." if on_cpu else "")
        )
    for name, run in group.items():
        start, counted = run.start, len(run.steady)
        versions = {key: start["environment"][key] for key in ("a5lib", "python", "torch", "transformers")}
        if (facts := start["environment"]["vllm"]) is not None:
            versions["vLLM"] = f"{facts['vllm']} on torch {facts['torch']}"
        link = start["link_gb_per_s"]
        notes.append(
            f"{name}: medians (sums: smallest-largest) of {counted} cycle{'s' * (counted != 1)} after the first; "
            f"started in {start['seconds']:.0f} s; {start['side_by_side']} responses side by side; "
            + (f"log-probabilities differ by {run.median('mismatch_mean'):.2g} nats in the mean; "
               if "mismatch_mean" in run.steady[0] else "")
            + (f"link {link['to_card']:g} GB/s; " if link else "")
            + ", ".join(f"{key} {version}" for key, version in versions.items())
            + "."
        )  # fmt: skip
    return notes


def _gb_per_s(run: Run) -> str:
    if not run.phase("verify"):
        return "-"
    return f"{run.start['weight_bytes'] / statistics.median(run.phase('load')) / 1e9:.2f}"


def _most(run: Run, name: str) -> int | None:
    return max((size for row in run.cycles if (size := row["memory"][name]) is not None), default=None)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
