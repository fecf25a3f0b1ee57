"""The figures: they show the records' numbers, and stay legible with one step, several runs or missing metrics."""

import json
import subprocess
import sys

import pytest

from a5lib import plots
from a5lib.errors import UserError
from a5lib.plots import plot_runs, save_curves

GIB = 2**30


def metrics(step, **changes):
    return {
        "step": step, "reward_mean": 0.1 * step, "format_reward_mean": 0.9, "response_length_mean": 40.0 + step,
        "response_length_max": 96, "truncated_share": 0.05, "zero_variance_groups": 0.25, "entropy": 0.5 / step,
        "kl_rollout": 1e-5 * step, "clip_fraction": 0.0, "seconds_generate": 1.0, "seconds_score": 0.0,
        "seconds_update": 2.0 * step, "seconds_reward": 0.25, "seconds_eval": 0.0, "seconds_save": 0.0,
        "memory_generate": 1 * GIB, "memory_score": 0, "memory_update": 2 * GIB, **changes,
    }  # fmt: skip


def evaluation(step, accuracy, kind="sampled"):
    return {"step": step, "kind": kind, "accuracy": accuracy, "interval": [accuracy - 0.1, accuracy + 0.05]}


@pytest.fixture
def make_run(tmp_path):
    def make(name, metric_records, evaluation_records=()):
        run_dir = tmp_path / name
        run_dir.mkdir()
        for file, records in (("metrics.jsonl", metric_records), ("evaluations.jsonl", evaluation_records)):
            (run_dir / file).write_text("".join(json.dumps(r) + "\n" for r in records))
        return run_dir

    return make


def panels(figure):
    return {ax.get_title(): ax for ax in figure.axes if ax.get_title()}


def drawn(ax):
    return [([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]) for line in ax.lines]


def test_one_run_shows_its_numbers_in_their_units(make_run):
    evaluations = [evaluation(0, 0.3), evaluation(0, 0.5, "greedy"), evaluation(3, 0.6), evaluation(3, 0.7, "greedy")]
    figure = plot_runs([make_run("grpo-seed0", [metrics(s) for s in (1, 2, 3)], evaluations)])
    axes = panels(figure)
    assert len(axes) == 8
    assert all(ax.get_ylabel() and ax.get_xlabel() for ax in axes.values()), "an axis without a unit"
    assert figure.get_suptitle() == "grpo-seed0"

    reward, form = drawn(axes["Training batches"])
    assert reward == ([1, 2, 3], pytest.approx([10, 20, 30])) and form[1] == pytest.approx([90] * 3)
    assert axes["Training batches"].get_ylabel() == "responses (%)"
    styles = [line.get_linestyle() for line in axes["Training batches"].lines]
    assert len(set(styles)) == 2, "two quantities in one colour need two line styles"

    (bars,) = axes["Validation"].containers
    assert list(bars.lines[0].get_xdata()) == [0, 3] and list(bars.lines[0].get_ydata()) == pytest.approx([30, 60])
    ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    assert ends == [pytest.approx([20, 35]), pytest.approx([50, 65])], "the interval is not the one that was logged"
    assert ([0.0, 3.0], pytest.approx([50.0, 70.0])) in drawn(axes["Validation"])

    assert drawn(axes["Response length"])[0][1] == [41, 42, 43]
    heights = [[bar.get_height() for bar in c] for c in axes["Seconds by phase"].containers]
    assert heights == [[1, 1, 1], [2, 4, 6], [0.25] * 3], "phases that took no time are left out"
    assert [bar.get_y() for bar in axes["Seconds by phase"].containers[2]] == [3, 5, 7], "not stacked"
    assert [ys for _, ys in drawn(axes["Memory by phase"])] == [[1, 1, 1], [2, 2, 2]]
    assert len(figure.axes) == 8, "nothing was clipped, so there is no second axis"


def test_several_runs_differ_in_colour_and_marker_and_are_named(make_run):
    runs = [
        make_run(f"run{i}", [metrics(s, clip_fraction=0.01 * i) for s in (1, 2)], [evaluation(0, 0.3)])
        for i in range(3)
    ]
    figure = plot_runs(runs)
    axes = panels(figure)
    looks = {(line.get_color(), line.get_marker()) for line in axes["Entropy"].lines}
    assert len(looks) == len({c for c, _ in looks}) == len({m for _, m in looks}) == 3
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["run0", "run1", "run2"]
    seconds = axes["Seconds by phase, mean of the steps"].containers
    assert [bar.get_height() for bar in seconds[1]] == [3, 3, 3]
    (right,) = [ax for ax in figure.axes if not ax.get_title()]
    assert right.get_ylabel() == "clipped tokens (%)"
    assert [ys for _, ys in drawn(right)] == [pytest.approx([1, 1]), pytest.approx([2, 2])]


def test_no_text_runs_into_another(make_run, tmp_path):
    runs = [make_run(f"offpolicy_clip-seed{i}", [metrics(s, clip_fraction=0.1) for s in range(1, 9)]) for i in range(2)]
    figure = plot_runs(runs)
    figure.savefig(tmp_path / "two.png")
    texts = [t for ax in figure.axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label) if t.get_text()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts] + [("legend", figure.legends[0].get_window_extent())]
    for i, (name, box) in enumerate(boxes):
        assert not [other for other, b in boxes[i + 1 :] if box.overlaps(b)], f"{name!r} overlaps"


def test_of_two_lines_for_one_step_the_last_counts(make_run):
    run = make_run("again", [metrics(1), metrics(2), metrics(2, entropy=9.0)], [evaluation(2, 0.1), evaluation(2, 0.4)])
    axes = panels(plot_runs([run]))
    assert drawn(axes["Entropy"]) == [([1, 2], [0.5, 9.0])]
    assert list(axes["Validation"].containers[0].lines[0].get_ydata()) == pytest.approx([40])


@pytest.mark.parametrize(
    ("metric_records", "evaluation_records"),
    [
        ([metrics(1)], []),
        ([], [evaluation(0, 0.3)]),
        ([{"step": 1, "loss": 0.5}], []),
        ([metrics(s) for s in range(1, 201)], [evaluation(0, 0.0), evaluation(200, 1.0)]),
    ],
)
def test_short_long_and_meagre_runs_are_drawn(make_run, metric_records, evaluation_records):
    path = save_curves(make_run("run", metric_records, evaluation_records))
    assert path.name == "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_records_is_a_sentence(tmp_path, make_run):
    with pytest.raises(UserError, match=r"nothing has no metrics\.jsonl"):
        plot_runs([tmp_path / "nothing"])
    run = make_run("run", [metrics(1)])
    (run / "curves.png").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        save_curves(run)


def test_every_phase_that_the_loop_logs_is_drawn():
    from a5lib.records import METRICS

    logged = {name for name in METRICS if name.startswith("seconds_")} - {"seconds_step"}
    assert logged == set(plots.SECONDS)
    assert {name for name in METRICS if name.startswith("memory_")} == set(plots.MEMORY)


def test_pyplot_is_not_touched():
    code = "import sys, a5lib.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_seeds_are_dots_in_percent_with_their_mean(make_run):
    figure = plots.plot_seeds({"grpo": [0.5, 0.75, 1.0], "rft": [0.25]})
    (ax,) = figure.axes
    lines = drawn(ax)
    assert lines[1] == ([50, 75, 100], [0, 0, 0]) and lines[2] == ([75], [0]), "dots and mean of the first method"
    assert lines[4] == ([25], [1])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["grpo", "rft"] and "%" in ax.get_xlabel()
    assert ax.yaxis_inverted(), "the first method stands at the top"


def test_differences_are_filled_where_the_interval_leaves_out_zero():
    figure = plots.plot_differences({"rft": (0.05, 0.03, 0.08), "maxrl": (-0.03, -0.07, 0.01)}, than="grpo")
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [m.get_fillstyle() for m in marks] == ["full", "none"]
    assert [m.get_xdata()[0] for m in marks] == pytest.approx([5, -3]) and "grpo" in figure.axes[0].get_xlabel()
    bars = figure.axes[0].collections[0].get_segments()[0][:, 0]
    assert list(bars) == pytest.approx([3, 8])


def test_learning_rates_are_sorted_and_the_best_is_ringed():
    figure = plots.plot_learning_rates({"on-policy": {"grpo": {1e-3: 0.5, 1e-4: 0.75}}, "off": {"cispo": {1e-4: 0.1}}})
    line, ring = drawn(figure.axes[0])
    assert line == ([1e-4, 1e-3], [75, 50]) and ring == ([1e-4], [75])
    assert len(figure.axes) == 2 and figure.axes[0].get_xscale() == "log"


def test_groups_show_mean_and_range_over_their_runs(make_run):
    seeds = [make_run(f"a{i}", [metrics(1, entropy=e), metrics(2, entropy=2 * e)]) for i, e in enumerate((0.1, 0.3))]
    figure = plots.plot_groups({"a": seeds, "b": seeds[:1]}, {"entropy": "nats a token", "loss": "not there"})
    ax = figure.axes[0]
    assert drawn(ax)[0] == ([1, 2], pytest.approx([0.2, 0.4])) and ax.get_ylabel() == "nats a token"
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.1, 0.6))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "b"]


def test_on_a_logarithmic_axis_zeros_are_left_out(make_run):
    run = make_run("a", [metrics(1, entropy=0.0), metrics(2, entropy=0.5)])
    assert drawn(plots.plot_groups({"a": [run]}, {"entropy": "nats"}, log_scale=True).axes[0])[0] == ([2], [0.5])


@pytest.mark.parametrize("draw", [
    lambda: plots.plot_seeds({"grpo": []}), lambda: plots.plot_differences({}, "grpo"),
    lambda: plots.plot_learning_rates({"on-policy": {}}), lambda: plots.plot_groups({}, {"entropy": "nats"}),
])  # fmt: skip
def test_nothing_to_draw_is_a_sentence(draw):
    with pytest.raises(UserError, match="nothing to draw"):
        draw()
