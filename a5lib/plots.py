"""The curves of one or several runs, drawn from their records alone: no model, no card, no run in progress.

Every function returns a matplotlib `Figure` or draws on given axes; pyplot's global state is not used, so the same
figure works in a terminal, a notebook and a test. Colours are petroff10, which colour-blind readers can tell apart;
every run also has its own marker and every quantity its own line style, so that a print in grey can be read.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from a5lib.errors import UserError
from a5lib.runlog import EVALUATIONS_FILE, MEMORY_FILE, METRICS_FILE, PLAN_FILE, read_jsonl

COLORS: list[str] = matplotlib.style.library["petroff10"]["axes.prop_cycle"].by_key()["color"]
MARKERS = "osD^vPX*<>"
LineStyle = Literal["-", "--", ":"]
SOLID: LineStyle = "-"
DASHED: LineStyle = "--"
DOTTED: LineStyle = ":"
SECONDS = {
    "seconds_generate": "generate",
    "seconds_score": "score",
    "seconds_update": "update",
    "seconds_reward": "reward",
    "seconds_eval": "validate",
    "seconds_save": "save",
}
PHASE_COLORS = dict(zip(SECONDS.values(), COLORS[4:], strict=True))  # other colours than the first runs have
PHASE_HATCHES = dict(zip(SECONDS.values(), ("", "///", "...", "xx", "\\\\\\", "++"), strict=True))
MEMORY = {"memory_generate": "generate", "memory_score": "score", "memory_update": "update"}
_drawing = threading.RLock()
FONT_SIZES: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 8}


@contextmanager
def look() -> Iterator[None]:
    """The font sizes of all figures. One thread draws at a time, because matplotlib's settings are global."""
    with _drawing, matplotlib.rc_context(FONT_SIZES):
        yield


class Picture(Figure):
    """A Figure that a notebook shows as a picture by itself, without pyplot: `display(figure)`, or the cell's last
    line."""

    def png(self) -> bytes:
        """The picture as the bytes of a PNG file."""
        file = io.BytesIO()
        with look():
            FigureCanvasAgg(self).print_png(file)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


@dataclass(frozen=True)
class Run:
    """The records of a run and how it is drawn. Of several lines with one step the last counts."""

    label: str
    color: str
    marker: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def series(self, name: str, scale: float = 1.0) -> tuple[list[int], list[float]]:
        """Steps and scaled values of a metric; empty where it was not logged."""
        points = [(r["step"], r[name] * scale) for r in self.metrics if name in r]
        return [x for x, _ in points], [y for _, y in points]

    def line(self, ax: Axes, xs: Sequence[float], ys: Sequence[float], style: LineStyle = SOLID) -> None:
        """A line in the run's colour, with about eight of its markers."""
        every = max(1, len(xs) // 8)
        ax.plot(xs, ys, style, color=self.color, marker=self.marker, markevery=every, markersize=4, linewidth=1.4,
                label=self.label)  # fmt: skip


def plot_runs(run_dirs: Sequence[Path]) -> Picture:
    """Draw the curves of the runs side by side, one colour and marker each. Taught in notebook 11.

    Panels: reward and format on the training batches; validation accuracy with its 95 % interval; response length;
    shares of truncated responses and of groups without a signal; entropy; KL to the rollout policy with the clip
    fraction; seconds by phase; memory by phase.

    Args:
        run_dirs: run folders; metrics.jsonl and evaluations.jsonl in them are all that is read.

    Raises:
        UserError: a folder holds neither, or a line of them is damaged.
    """
    runs = [load_run(Path(run_dir), index) for index, run_dir in enumerate(run_dirs)]
    panels: tuple[Callable[[Axes, list[Run]], None], ...] = (
        draw_rewards, draw_validation, draw_length, draw_shares, draw_entropy, draw_kl, draw_seconds, draw_memory,
    )  # fmt: skip
    with look():
        figure = Picture(figsize=(9, 12), layout="constrained")
        axes = figure.subplots(4, 2)
        for ax, draw in zip(axes.flat, panels, strict=True):
            draw(ax, runs)
        if len(runs) == 1:
            figure.suptitle(runs[0].label)
        else:
            handles = [Line2D([], [], color=r.color, marker=r.marker, markersize=5, label=r.label) for r in runs]
            figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(runs)))
    return figure


def save_curves(run_dir: Path) -> Path:
    """Draw one run into RUN/curves.png and return that path.

    Raises:
        UserError: the run has no records, or the picture cannot be written.
    """
    path = Path(run_dir) / "curves.png"
    figure = plot_runs([Path(run_dir)])
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(
            f"The curves cannot be written to {path} ({error.strerror}); make room or grant access."
        ) from error
    return path


def load_run(run_dir: Path, index: int) -> Run:
    """Read a run's records; `index` chooses its colour and marker."""
    metrics = {r["step"]: r for r in read_jsonl(run_dir / METRICS_FILE)}
    evaluations = {(r["step"], r["kind"]): r for r in read_jsonl(run_dir / EVALUATIONS_FILE)}
    if not metrics and not evaluations:
        raise UserError(f"{run_dir} has no {METRICS_FILE} with a finished step; name the folder of a run.")
    return Run(
        label=run_dir.resolve().name,
        color=COLORS[index % len(COLORS)],
        marker=MARKERS[index % len(MARKERS)],
        metrics=[metrics[step] for step in sorted(metrics)],
        evaluations=[evaluations[key] for key in sorted(evaluations)],
    )


# --- several seeds of several methods


def plot_seeds(accuracies: Mapping[str, Sequence[float]], title: str = "") -> Picture:
    """A row for each method: a dot for each seed, the range as a line, the mean as a bar. Taught in notebook 12.

    Args:
        accuracies: method -> accuracy of each seed, as shares. The first method stands at the top.
        title: over the figure.

    Raises:
        UserError: there are no methods, or one has no seeds.
    """
    _check_rows(accuracies)
    with look():
        figure = Picture(figsize=(7, 0.9 + 0.32 * len(accuracies)), layout="constrained")
        ax = figure.subplots()
        for row, values in enumerate(accuracies.values()):
            percent = [100 * value for value in values]
            ax.plot([min(percent), max(percent)], [row, row], SOLID, color=COLORS[0], linewidth=1.2, zorder=1)
            ax.plot(percent, [row] * len(percent), "o", color=COLORS[0], fillstyle="none", markersize=6, zorder=2)
            ax.plot(
                [statistics.fmean(percent)], [row], "|", color=COLORS[1], markersize=16, markeredgewidth=3, zorder=3
            )
        _rows(ax, accuracies, title, "accuracy (%)")
        ax.legend(
            handles=[
                Line2D([], [], color=COLORS[0], marker="o", fillstyle="none", label="one seed, and their range"),
                Line2D([], [], color=COLORS[1], marker="|", markersize=12, markeredgewidth=3, ls="", label="mean"),
            ],
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False,
        )  # fmt: skip
    return figure


def plot_differences(differences: Mapping[str, tuple[float, float, float]], than: str, title: str = "") -> Picture:
    """A row for each method: its difference from another, with an interval, and a line at 0. Taught in notebook 12.

    Args:
        differences: method -> (difference, lower end, upper end), as shares: what `paired_bootstrap` gives. A filled
            mark means that the interval leaves out 0.
        than: the method that all are compared with.
        title: over the figure.

    Raises:
        UserError: there are no methods.
    """
    _check_rows(differences)
    with look():
        figure = Picture(figsize=(7, 0.9 + 0.32 * len(differences)), layout="constrained")
        ax = figure.subplots()
        ax.axvline(0, color="0.4", linestyle=DASHED, linewidth=1.2)
        for row, (middle, low, high) in enumerate(differences.values()):
            fill = "full" if low > 0 or high < 0 else "none"
            ax.errorbar([100 * middle], [row], xerr=[[100 * (middle - low)], [100 * (high - middle)]], fmt="o",
                        color=COLORS[0], fillstyle=fill, markersize=6, capsize=4, linewidth=1.4)  # fmt: skip
        _rows(ax, differences, title, f"accuracy minus that of {than} (percentage points)")
    return figure


def plot_learning_rates(panels: Mapping[str, Mapping[str, Mapping[float, float]]]) -> Picture:
    """Accuracy against the learning rate, a line for each method; its best rate is ringed. Taught in notebook 12.

    Args:
        panels: title -> method -> learning rate -> accuracy, as a share.

    Raises:
        UserError: there are no panels, or one has no methods.
    """
    _check_rows(panels)
    with look():
        figure = Picture(figsize=(4.4 * len(panels), 3.8), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for ax, (title, methods) in zip(axes.flat, panels.items(), strict=True):
            _check_rows(methods)
            for i, (name, points) in enumerate(methods.items()):
                xs, best = sorted(points), max(points, key=lambda x: points[x])
                color, style = COLORS[i % len(COLORS)], (SOLID, DASHED, DOTTED)[i % 3]
                ax.plot(xs, [100 * points[x] for x in xs], style, color=color, marker=MARKERS[i % len(MARKERS)],
                        markersize=5, linewidth=1.4, label=name)  # fmt: skip
                ax.plot([best], [100 * points[best]], "o", color=color, fillstyle="none", markersize=12)
            ax.set_xscale("log")
            ticks = sorted({x for points in methods.values() for x in points})
            ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
            ax.minorticks_off()
            label(ax, title, "learning rate", "accuracy (%)")
            _percent(ax)
            ax.legend(loc="lower left")
    return figure


def plot_groups(groups: Mapping[str, Sequence[Path]], metrics: Mapping[str, str], log_scale: bool = False) -> Picture:
    """A panel for each metric: the mean over the runs of each group, and their range as a band. Taught in notebook 12.

    Args:
        groups: name -> the folders of its runs, such as one for each seed.
        metrics: name of a metric -> label of its axis, with the unit.
        log_scale: logarithmic axes for the metrics; only values above 0 are drawn then.

    Raises:
        UserError: a run has no records, or there is nothing to draw.
    """
    _check_rows(groups)
    _check_rows(metrics)
    runs = {name: [load_run(Path(folder), i) for folder in folders] for i, (name, folders) in enumerate(groups.items())}
    with look():
        figure = Picture(figsize=(4.2 * len(metrics), 3.6), layout="constrained")
        axes = figure.subplots(1, len(metrics), squeeze=False)
        for ax, (metric, words) in zip(axes.flat, metrics.items(), strict=True):
            for i, group in enumerate(runs.values()):
                by_step: dict[int, list[float]] = {}
                for run in group:
                    for step, value in zip(*run.series(metric), strict=True):
                        by_step.setdefault(step, []).append(value)
                steps = [step for step in sorted(by_step) if not log_scale or min(by_step[step]) > 0]
                color = group[0].color
                ax.plot(steps, [statistics.fmean(by_step[s]) for s in steps], (SOLID, DASHED, DOTTED)[i % 3],
                        color=color, marker=group[0].marker, markevery=5, markersize=4, linewidth=1.4)  # fmt: skip
                ax.fill_between(steps, [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps], color=color,
                                alpha=0.15, linewidth=0)  # fmt: skip
            if log_scale:
                ax.set_yscale("log")
            _finish(ax, "", words)
        handles = [
            Line2D([], [], color=group[0].color, marker=group[0].marker, linestyle=(SOLID, DASHED, DOTTED)[i % 3],
                   markersize=4, label=name)
            for i, (name, group) in enumerate(runs.items())
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)))
    return figure


def _check_rows(rows: Mapping[str, Any]) -> None:
    if not rows or not all(len(row) for row in rows.values()):
        raise UserError("There is nothing to draw; give at least one name with at least one value.")


def _rows(ax: Axes, names: Iterable[str], title: str, xlabel: str) -> None:
    names = list(names)
    label(ax, title, xlabel, "")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)  # the first one at the top


# --- the memory of one run

MEMORY_LINES: dict[str, dict[str, Any]] = {  # field of a MemorySample -> how it is drawn
    "card": {"label": "whole card, all programs", "color": "0.3", "marker": "v", "linestyle": DOTTED},
    "reserved": {"label": "reserved by torch", "color": COLORS[1], "marker": "s", "linestyle": DASHED},
    "allocated": {"label": "allocated by torch", "color": COLORS[0], "marker": "o", "linestyle": SOLID},
    "host": {"label": "process, on the host", "color": COLORS[2], "marker": "D", "linestyle": SOLID},
}
COVERS = {"update": ("update", "step")}  # a phase of the loop that is several phases of the plan
BUFFER_HATCHES = ("", "///", "...", "\\\\\\", "xx", "++", "", "///", "...", "\\\\\\")
GIB = 2**30
SHADE = 0.25  # opacity of a phase
NAMED_FROM = 0.1  # a phase that takes this share of the width has its name in it; the legend has all
FAR = 2.0  # a budget beyond this times the highest use would press all else flat


@dataclass(frozen=True)
class Place:
    """The card or the host: which fields of a sample are measured there, and which bytes are predicted in a phase."""

    name: str
    fields: tuple[str, ...]
    ledgers: Mapping[str, Mapping[str, int]]  # phase of the plan -> buffer -> bytes
    budget: int | None = None


def plot_memory(run_dir: Path) -> Picture:
    """Memory in use while a run's phases ran, and beside it the bytes that its plan predicts. Taught in notebook 11.

    Left the use of card and host in GiB over seconds, with the phases shaded: of the rollout batch with the highest
    use, the one before and the one after it. Right the predicted buffers of each phase as a stack; the marks are the
    highest use that was measured in this phase, in any rollout batch. A dashed line is the card's budget.

    Args:
        run_dir: a run folder; memory.jsonl in it is read, and plan.json where there is one.

    Raises:
        UserError: the folder has no samples of memory, or one of the files is damaged.
    """
    samples = read_jsonl(Path(run_dir) / MEMORY_FILE)
    if not samples:
        raise UserError(f"{run_dir} has no {MEMORY_FILE} with a finished phase; name the folder of a run.")
    places = _places(Path(run_dir), on_card=any(s["reserved"] for s in samples))
    highest = max(samples, key=lambda s: s[places[0].fields[-1]])["step"]
    shown = [s for s in samples if abs(s["step"] - highest) <= 1]
    buffers = list(dict.fromkeys(b for place in places for ledger in place.ledgers.values() for b in ledger))
    with look():
        figure = Picture(figsize=(11 if buffers else 8, 1.6 + 2.6 * len(places)), layout="constrained")
        rows = figure.subplots(len(places), 2 if buffers else 1, sharey="row", squeeze=False,
                               width_ratios=(3, 2) if buffers else None)  # fmt: skip
        for place, (timeline, *stacks) in zip(places, rows, strict=True):
            _draw_timeline(timeline, shown, place)
            for ax in stacks:
                _draw_ledgers(ax, samples, place, buffers)
            _fit(place, samples, (timeline, *stacks))
        rows[-1, 0].set_xlabel("seconds since the run began")
        if buffers:
            rows[-1, 1].set_xlabel("phase, and the sum of its buffers (GiB)")
        _memory_legends(figure, places, samples, shown, buffers)
        figure.suptitle(Path(run_dir).resolve().name)
    return figure


def _places(run_dir: Path, on_card: bool) -> list[Place]:
    """What plan.json says of the card, if one was used, and of the host; no ledgers without that file."""
    path = run_dir / PLAN_FILE
    try:
        plan = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"card": {}, "host": {}}
        card = {str(phase): {str(n): int(size) for n, size in sizes.items()} for phase, sizes in plan["card"].items()}
        host = {str(name): int(size) for name, size in plan["host"].items()}
        budget = None if plan.get("budget_bytes") is None else int(plan["budget_bytes"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a plan of memory ({error!r}); remove it to draw the measured part.") from error
    if not on_card:
        return [Place("host", ("host",), {phase: {**host, **sizes} for phase, sizes in card.items()})]
    return [
        Place("card", ("card", "reserved", "allocated"), card, budget),
        Place("host", ("host",), dict.fromkeys(card, host)),
    ]


def _draw_timeline(ax: Axes, samples: Sequence[Mapping[str, Any]], place: Place) -> None:
    """The lines of the place, broken between phases, which are shaded."""
    phases = [list(group) for _, group in itertools.groupby(samples, key=lambda s: (s["step"], s["phase"]))]
    whole = samples[-1]["t"] - samples[0]["t"]
    for phase in phases:
        name = _phase_name(phase[0]["phase"])
        begin, end = phase[0]["t"], phase[-1]["t"]
        ax.axvspan(begin, end, facecolor=_phase_color(name), alpha=SHADE, linewidth=0)
        if end - begin > NAMED_FROM * whole:
            ax.annotate(name, ((begin + end) / 2, 1), (0, -3), xycoords=("data", "axes fraction"), ha="center",
                        va="top", fontsize=8, textcoords="offset points")  # fmt: skip
    for field in place.fields:
        xs = [x for phase in phases for x in (*(s["t"] for s in phase), math.nan)]
        ys = [y for phase in phases for y in (*(_gib(s[field]) for s in phase), math.nan)]
        if any(y == y for y in ys):
            ax.plot(xs, ys, **MEMORY_LINES[field], drawstyle="steps-pre", markevery=max(1, len(xs) // 12), markersize=4,
                    linewidth=1.4)  # fmt: skip
    for step, group in itertools.groupby(samples, key=lambda s: s["step"]):
        start = next(group)["t"]
        ax.axvline(start, color="0.4", linewidth=0.8)
        ax.annotate(f"batch {step}", (start, 0), (3, 3), xycoords=("data", "axes fraction"), fontsize=8,
                    textcoords="offset points")  # fmt: skip
    ax.margins(x=0.01)
    label(ax, f"Measured on the {place.name}", "", "GiB")


def _draw_ledgers(ax: Axes, samples: Sequence[Mapping[str, Any]], place: Place, buffers: Sequence[str]) -> None:
    """A stack of buffers for each phase of the plan, with marks at the highest use that was measured in it."""
    phases = list(place.ledgers)
    base = [0.0] * len(phases)
    for i, name in enumerate(buffers):
        heights = [_gib(place.ledgers[phase].get(name, 0)) for phase in phases]
        ax.bar(range(len(phases)), heights, 0.7, base, color=COLORS[i % len(COLORS)],
               hatch=BUFFER_HATCHES[i % len(BUFFER_HATCHES)], edgecolor="white", linewidth=0)  # fmt: skip
        base = [b + h for b, h in zip(base, heights, strict=True)]
    for phase in dict.fromkeys(s["phase"] for s in samples):
        columns = [phases.index(p) for p in COVERS.get(phase, (phase,)) if p in phases]
        for field in place.fields:
            sizes = [s[field] for s in samples if s["phase"] == phase and s[field] is not None]
            if columns and sizes:
                ends = min(columns) - 0.42, max(columns) + 0.42
                y = _gib(max(sizes))
                ax.plot(ends, [y, y], color="black", linewidth=1)
                ax.plot([sum(ends) / 2], [y], color=MEMORY_LINES[field]["color"], marker=MEMORY_LINES[field]["marker"],
                        markeredgecolor="black", markersize=6, linestyle="")  # fmt: skip
    ax.set_xticks(range(len(phases)), [f"{phase}\n{b:.3g}" for phase, b in zip(phases, base, strict=True)])
    label(ax, f"Predicted on the {place.name}, and the highest measured", "", "")
    ax.grid(visible=False, axis="x")


def _fit(place: Place, samples: Sequence[Mapping[str, Any]], axes: Sequence[Axes]) -> None:
    """Room for all that is drawn, from 0, and the budget unless it is far above."""
    top = _highest(place, samples)
    if place.budget is not None and place.budget <= FAR * top:
        top = max(top, place.budget)
        for ax in axes:
            ax.axhline(place.budget / GIB, color="black", linestyle=DASHED, linewidth=1.4)
    axes[0].set_ylim(0, 1.18 * top / GIB)


def _highest(place: Place, samples: Sequence[Mapping[str, Any]]) -> int:
    """Bytes, measured or predicted."""
    measured = max(s[field] or 0 for s in samples for field in place.fields)
    return max(measured, *(sum(ledger.values()) for ledger in place.ledgers.values()), 1)


def _memory_legends(
    figure: Figure,
    places: Sequence[Place],
    samples: Sequence[Mapping[str, Any]],
    shown: Sequence[Mapping[str, Any]],
    buffers: Sequence[str],
) -> None:
    phases = dict.fromkeys(_phase_name(s["phase"]) for s in shown)
    handles: list[Any] = [
        Line2D([], [], **MEMORY_LINES[field], markersize=4)
        for place in places
        for field in place.fields
        if any(s[field] is not None for s in samples)
    ]
    budget = places[0].budget
    if budget is not None:
        where = ", far above" if budget > FAR * _highest(places[0], samples) else ""
        handles.append(Line2D([], [], color="black", linestyle=DASHED, label=f"budget {_gib(budget):.3g} GiB{where}"))
    handles += [Patch(facecolor=_phase_color(phase), alpha=SHADE, label=phase) for phase in phases]
    figure.legend(handles=handles, loc="outside lower left", ncols=4)
    if buffers:
        handles = [
            Patch(facecolor=COLORS[i % len(COLORS)], hatch=BUFFER_HATCHES[i % len(BUFFER_HATCHES)], edgecolor="white",
                  label=name)
            for i, name in enumerate(buffers)
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower right", ncols=2)


def _phase_name(phase: str) -> str:
    """The name that a phase of the loop has in all figures; another phase keeps its own."""
    return SECONDS.get(f"seconds_{phase}", phase)


def _phase_color(name: str) -> str:
    return PHASE_COLORS.get(name, "0.5")


def _gib(size: int | None) -> float:
    return math.nan if size is None else size / GIB


# --- panels


def draw_rewards(ax: Axes, runs: list[Run]) -> None:
    """Reward and format reward of the training batches, in percent of the responses."""
    for run in runs:
        run.line(ax, *run.series("reward_mean", 100))
        run.line(ax, *run.series("format_reward_mean", 100), DASHED)
    _finish(ax, "Training batches", "responses (%)", {"right": SOLID, "well formed": DASHED})
    _percent(ax)


def draw_validation(ax: Axes, runs: list[Run]) -> None:
    """Validation accuracy: sampled with its 95 % interval, greedy as hollow marks."""
    steps = [r["step"] for run in runs for r in run.evaluations]
    width = (max(steps) - min(steps)) if steps else 0
    greedy_seen = False
    for i, run in enumerate(runs):
        shift = 0.008 * width * (i - (len(runs) - 1) / 2)  # so that the bars of different runs do not hide each other
        for kind, style in (("sampled", SOLID), ("greedy", DASHED)):
            records = [r for r in run.evaluations if r["kind"] == kind]
            if not records:
                continue
            xs = [r["step"] + shift for r in records]
            ys = [100 * r["accuracy"] for r in records]
            if kind == "greedy":
                greedy_seen = True
                ax.plot(xs, ys, style, color=run.color, marker=run.marker, markersize=6, fillstyle="none", linewidth=1)
                continue
            below = [y - 100 * r["interval"][0] for y, r in zip(ys, records, strict=True)]
            above = [100 * r["interval"][1] - y for y, r in zip(ys, records, strict=True)]
            ax.errorbar(
                xs, ys, yerr=[below, above], fmt=style, color=run.color, marker=run.marker, markersize=4,
                capsize=3, linewidth=1.4,
            )  # fmt: skip
    legend = {"sampled, 95 % interval": SOLID} | ({"greedy": DASHED} if greedy_seen else {})
    _finish(ax, "Validation", "accuracy (%)", legend)
    _percent(ax)


def draw_length(ax: Axes, runs: list[Run]) -> None:
    """Mean and longest response of each training batch, in tokens."""
    for run in runs:
        run.line(ax, *run.series("response_length_mean"))
        run.line(ax, *run.series("response_length_max"), DOTTED)
    _finish(ax, "Response length", "tokens", {"mean": SOLID, "longest": DOTTED})
    ax.set_ylim(bottom=0)


def draw_shares(ax: Axes, runs: list[Run]) -> None:
    """Truncated responses, and groups whose rewards are all equal, in percent."""
    for run in runs:
        run.line(ax, *run.series("truncated_share", 100))
        run.line(ax, *run.series("zero_variance_groups", 100), DASHED)
    legend = {"responses cut off": SOLID, "groups of equal rewards": DASHED}
    _finish(ax, "Truncated, and without a signal", "share (%)", legend)
    _percent(ax)


def draw_entropy(ax: Axes, runs: list[Run]) -> None:
    """Mean entropy of the next-token distribution, in nats."""
    for run in runs:
        run.line(ax, *run.series("entropy"))
    _finish(ax, "Entropy", "nats a token")
    ax.set_ylim(bottom=0)


ROUNDING_KL = 1e-6  # on-policy the KL is 0 up to float32 rounding; the axis must not blow that up


def draw_kl(ax: Axes, runs: list[Run]) -> None:
    """KL from the rollout policy in nats; where anything was clipped, its share on a second axis."""
    for run in runs:
        run.line(ax, *run.series("kl_rollout"))
    clipped = [run for run in runs if any(run.series("clip_fraction")[1])]
    _finish(
        ax, "Distance from the rollout policy", "KL (nats a token)", {"KL": SOLID, "clipped": DASHED} if clipped else {}
    )
    ax.ticklabel_format(axis="y", scilimits=(-3, 3))
    top = max(ax.get_ylim()[1], ROUNDING_KL)
    ax.set_ylim(0, 1.3 * top)  # room for the legend above the lines
    if clipped:
        right = ax.twinx()
        for run in clipped:
            run.line(right, *run.series("clip_fraction", 100), DASHED)
        right.set_ylabel("clipped tokens (%)")
        right.set_ylim(0, 1.3 * right.get_ylim()[1])


def draw_seconds(ax: Axes, runs: list[Run]) -> None:
    """Seconds of each phase, stacked: of every step for one run, the mean step for several."""
    shown = [name for name in SECONDS if any(any(run.series(name)[1]) for run in runs)]
    if len(runs) == 1:
        positions = [float(step) for step, _ in zip(*runs[0].series("step"), strict=True)]
        heights = {name: [r.get(name, 0.0) for r in runs[0].metrics] for name in shown}
        width = 1.0
    else:
        positions = [float(i) for i in range(len(runs))]
        heights = {name: [statistics.fmean(run.series(name)[1] or [0.0]) for run in runs] for name in shown}
        width = 0.6
    base = [0.0] * len(positions)
    for name in shown:
        ax.bar(positions, heights[name], width, base, **_phase_bar(SECONDS[name]))
        base = [b + h for b, h in zip(base, heights[name], strict=True)]
    title = "Seconds by phase" if len(runs) == 1 else "Seconds by phase, mean of the steps"
    _finish(ax, title, "seconds a step")
    ax.set_ylim(0, 1.45 * max(base, default=0) or 1)  # room for the legend above the bars
    if shown:
        ax.legend(ncols=3, loc="upper center")
    if len(runs) > 1:
        _name_runs(ax, runs)


def draw_memory(ax: Axes, runs: list[Run]) -> None:
    """Memory of each phase in GiB: of every step for one run, the highest step for several."""
    if len(runs) == 1:
        for i, (name, phase) in enumerate(MEMORY.items()):
            xs, ys = runs[0].series(name, 2**-30)
            if any(ys):
                style = (SOLID, DOTTED, DASHED)[i]
                drawn = dataclasses.replace(runs[0], label=phase, color=PHASE_COLORS[phase], marker=MARKERS[i])
                drawn.line(ax, xs, ys, style)
        _finish(ax, "Memory by phase", "GiB")
    else:
        width = 0.8 / len(MEMORY)
        for i, (name, phase) in enumerate(MEMORY.items()):
            heights = [max(run.series(name, 2**-30)[1], default=0.0) for run in runs]
            if any(heights):
                positions = [j + (i - 1) * width for j in range(len(runs))]
                ax.bar(positions, heights, width, **_phase_bar(phase))
        _finish(ax, "Memory by phase, highest step", "GiB")
        _name_runs(ax, runs)
    ax.set_ylim(0, 1.25 * max(ax.get_ylim()[1], 1e-3))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(ncols=3, loc="upper center")


def label(ax: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Title, labelled axes and a light grid."""
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.3, linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _finish(ax: Axes, title: str, ylabel: str, styles: dict[str, LineStyle] | None = None) -> None:
    """As `label`, over rollout batches, with a legend that says which line style is which quantity."""
    label(ax, title, "rollout batch", ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not ax.has_data():
        ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", va="center", color="0.4")
    elif styles:
        ax.legend(handles=[Line2D([], [], color="0.3", linestyle=s, label=name) for name, s in styles.items()])


def _percent(ax: Axes) -> None:
    ax.set_ylim(-3, 103)


def _phase_bar(phase: str) -> dict[str, Any]:
    return {
        "label": phase,
        "color": PHASE_COLORS[phase],
        "hatch": PHASE_HATCHES[phase],
        "edgecolor": "white",
        "linewidth": 0,
    }


def _name_runs(ax: Axes, runs: list[Run]) -> None:
    """Under bars: each run by its marker and colour, as in the legend of the figure."""
    ax.set_xlabel("run")
    ax.set_xticks(range(len(runs)), [""] * len(runs))
    for i, run in enumerate(runs):
        ax.plot([i], [0.0], marker=run.marker, color=run.color, markersize=7, clip_on=False, zorder=5)
