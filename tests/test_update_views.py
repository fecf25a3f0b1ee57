"""The benchmark's rows as the notebook shows them: made-up rows with figures that can be subtracted by head."""

from __future__ import annotations

from typing import Any

import pytest

from a5lib.bench_variants import PIECES, VARIANTS
from a5lib.update_views import NOTHING, ablation_table, of_group, update_figure, update_table

GIB = 2**30


def row(name: str, gib: float = 2.0, seconds: float = 1.0, what: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "variant": {"name": name, "group": "ablation" if name.startswith("ablation") else "engines", "what": what},
        "error": None,
        "peak_allocated": int(gib * GIB),
        "predicted_error": 0.0125,
        "seconds": {"total": [seconds - 0.5, seconds, seconds + 1]},
        "median_seconds": seconds,
        "tokens_per_second": 43_008 / seconds,
    } | fields


FAILED = {"variant": {"name": "peer", "group": "peers", "what": "a peer"}, "error": "no room"}


def test_the_table_has_a_line_for_each_row_and_the_reason_of_a_failure() -> None:
    lines = update_table([row("host", 1.95, 1.05, "ours"), row("x", 30, 12, "theirs", predicted_error=None), FAILED])
    assert [line.split() for line in lines.splitlines()] == [
        ["GiB", "predicted", "seconds", "tokens/s"],
        ["ours", "1.95", "+1.2", "%", "1.05", "40,960"],
        ["theirs", "30.00", "-", "12.00", "3,584"],
        ["a", "peer", "failed:", "no", "room"],
    ]
    header, ours, *_ = lines.splitlines()
    assert len(header) == len(ours), "the columns stand under their heads"


def test_a_group_keeps_its_order() -> None:
    rows = [row("host"), row("ablation-none"), FAILED, row("resident")]
    assert [r["variant"]["name"] for r in of_group(rows, "engines", "peers")] == ["host", "peer", "resident"]


def test_a_saving_is_measured_alone_and_on_top_of_the_others() -> None:
    table = ablation_table([
        row("ablation-none", 30, 2.0), row("ablation-only-head", 24, 2.5, "only head in blocks"),
        row("ablation-without-head", 13, 3.0), row("ablation-all", 12, 3.25, "all five"),
    ])  # fmt: skip
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["head", "in", "blocks", "-6.00", "+0.50", "-1.00", "+0.25"],
        ["all", "together", "-18.00", "+1.25"],
    ]
    assert len(set(map(len, table.splitlines()[:3]))) == 1, "the columns stand under their heads"


def test_a_saving_whose_row_failed_is_left_blank() -> None:
    rows = [row("ablation-none"), row("ablation-only-head", what="only head"), row("ablation-all")]
    broken = {"variant": {"name": "ablation-without-head", "group": "ablation", "what": ""}, "error": "no room"}
    assert ablation_table([*rows, broken]).splitlines()[2].split()[-2:] == ["-", "-"]


def test_rows_that_are_not_measured_yet_are_left_blank() -> None:
    table = ablation_table([row("ablation-none", 30), row("ablation-only-head", 24, what="only head")]).splitlines()
    assert [line.split() for line in table[2:]] == [["head", "-6.00", "+0.00", "-", "-"], ["all", "together", "-", "-"]]


@pytest.mark.parametrize("rows", [[], [row("ablation-none")], [row("ablation-without-head"), row("ablation-all")]])
def test_a_log_without_these_rows_says_so(rows: list[dict[str, Any]]) -> None:
    assert ablation_table(rows) == NOTHING
    assert update_table([]) == NOTHING


def test_the_benchmark_names_its_rows_as_the_table_expects() -> None:
    ours = [v for v in VARIANTS if v.group == "ablation"]
    table = ablation_table([row(v.name, what=v.what) for v in ours])
    assert len(table.splitlines()) == 2 + len(PIECES) + 1
    assert "only" not in table, "a piece stands there by its own name"
    assert all(line.count("+0.00") == 4 for line in table.splitlines()[2:-1]), "no row is missing"


def test_the_figure_has_a_bar_for_memory_and_one_for_time() -> None:
    figure = update_figure([row("host", 2, 1, "ours"), FAILED, row("x", 30, 12, "theirs")], "sixteen rows")
    memory, seconds = figure.axes
    assert [(round(b.get_y() + b.get_height() / 2), b.get_width()) for b in memory.patches] == [(0, 2), (2, 30)]
    assert [(round(b.get_y() + b.get_height() / 2), b.get_width()) for b in seconds.patches] == [(0, 1), (2, 12)]
    assert [list(line.get_xdata()) for line in seconds.lines] == [[0.5, 2], [11.5, 13]], "the spread"
    assert [t.get_text() for t in memory.get_yticklabels()] == ["ours", "a peer", "theirs"]
    assert [t.get_text().strip() for t in memory.texts] == ["2.00", "failed", "30.00"]
    assert figure.get_suptitle() == "sixteen rows" and figure.png().startswith(b"\x89PNG")


def test_the_figure_of_no_rows_says_so() -> None:
    assert [t.get_text() for t in update_figure([]).axes[0].texts] == ["not logged"]
