"""The rows of `a5 bench update` as a figure and as short tables, from its log alone.

The whole table, with every column, is made by `a5lib.bench_update`; these are for the notebook's pages. This file does
not measure anything and knows no engine.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from a5lib.plots import COLORS, SOLID, Picture, label, look

GIB = 2**30
NAME_WIDTH = 48
NOTHING = "The log has no such rows yet; `a5 bench update` on a card with CUDA writes them."

Row = Mapping[str, Any]


def of_group(rows: Sequence[Row], *groups: str) -> list[Row]:
    """The rows of some groups, in their order."""
    return [row for row in rows if row["variant"]["group"] in groups]


def update_table(rows: Sequence[Row]) -> str:
    """Peak allocated, its prediction, seconds and tokens of each row, one line each. Taught in notebook 09.

    >>> print(update_table([]))
    The log has no such rows yet; `a5 bench update` on a card with CUDA writes them.
    """
    if not rows:
        return NOTHING
    lines = [f"{'':{NAME_WIDTH}} {'GiB':>6} {'predicted':>10} {'seconds':>8} {'tokens/s':>9}"]
    for row in rows:
        name = _name(row)
        if row["error"]:
            lines += [f"{name:{NAME_WIDTH}} failed: {row['error']}"]
            continue
        error = row["predicted_error"]
        predicted = "-" if error is None else f"{100 * error:+.1f} %"
        lines.append(
            f"{name:{NAME_WIDTH}} {row['peak_allocated'] / GIB:6.2f} {predicted:>10} {row['median_seconds']:8.2f} "
            f"{row['tokens_per_second']:9,.0f}"
        )
    return "\n".join(lines)


def ablation_table(rows: Sequence[Row]) -> str:
    """What each saving does alone, and on top of the others: peak allocated and seconds. Taught in notebook 09.

    Alone: the row with this one saving less the row with none. On top: the row with all savings less the row with all
    but this one. Below 0 is less memory, or less time. A dash stands where a row is missing or failed.

    Args:
        rows: of the group "ablation".
    """
    by_name = {row["variant"]["name"].removeprefix("ablation-"): row for row in rows if not row["error"]}
    pieces = [name.removeprefix("only-") for name in by_name if name.startswith("only-")]
    if not pieces:
        return NOTHING
    lines = [
        f"{'':26} {'alone':>18} {'on top of the others':>24}",
        f"{'':26} {'GiB':>8} {'seconds':>9} {'GiB':>14} {'seconds':>9}",
    ]
    for piece in pieces:
        words = by_name[f"only-{piece}"]["variant"]["what"].removeprefix("only ")
        alone = _difference(by_name.get("none"), by_name[f"only-{piece}"])
        on_top = _difference(by_name.get(f"without-{piece}"), by_name.get("all"))
        lines.append(f"{words:26} {alone[0]:>8} {alone[1]:>9} {on_top[0]:>14} {on_top[1]:>9}")
    total = _difference(by_name.get("none"), by_name.get("all"))
    return "\n".join([*lines, f"{'all together':26} {total[0]:>8} {total[1]:>9}"])


def _difference(before: Row | None, after: Row | None) -> tuple[str, str]:
    if before is None or after is None:
        return "-", "-"
    memory = (after["peak_allocated"] - before["peak_allocated"]) / GIB
    return f"{memory:+.2f}", f"{after['median_seconds'] - before['median_seconds']:+.2f}"


def update_figure(rows: Sequence[Row], title: str = "") -> Picture:
    """Peak allocated and seconds of each row as bars, the spread of the seconds as a line. Taught in notebook 09.

    A row that failed has its name and no bar.

    Args:
        rows: records of `a5 bench update`; the first stands at the top.
        title: over the figure.
    """
    with look():
        figure = Picture(figsize=(9, 1.1 + 0.34 * max(len(rows), 2)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        label(left, "Highest memory allocated by torch", "GiB", "")
        label(right, "One update", "seconds", "")
        for ax in (left, right):
            ax.grid(visible=False, axis="y")
        if not rows:
            left.text(0.5, 0.5, "not logged", transform=left.transAxes, ha="center", va="center", color="0.4")
        for y, row in enumerate(rows):
            if row["error"]:
                left.text(0, y, " failed", va="center", fontsize=8)
                continue
            times = row["seconds"]["total"]
            _bar(left, y, row["peak_allocated"] / GIB, 0)
            _bar(right, y, row["median_seconds"], 1, end=max(times))
            right.plot([min(times), max(times)], [y, y], SOLID, color="black", linewidth=1.4)
        left.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(_name(row), 40)) for row in rows], fontsize=8)
        left.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        for ax in (left, right):
            ax.set_xlim(0, 1.15 * ax.get_xlim()[1])
        if title:
            figure.suptitle(title)
    return figure


def _bar(ax: Axes, y: int, value: float, kind: int, end: float = 0.0) -> None:
    ax.barh(y, value, 0.68, color=COLORS[kind], hatch=("", "///")[kind], edgecolor="white", linewidth=0)
    ax.annotate(f"{value:.2f}", (max(value, end), y), (4, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _name(row: Row) -> str:
    return str(row["variant"]["what"])
