"""The figures: they show the records' numbers, and stay legible with one step, several runs or missing metrics."""

import json
import subprocess
import sys

import pytest

from a5lib import plots
from a5lib.errors import UserError
from a5lib.plots import plot_memory, plot_runs, save_curves

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


# --- memory


def samples(step, phase, start, allocated=None, host=20):
    """Three samples, a second apart; allocated, reserved and whole card in GiB, or a CPU's where none is given."""
    uses = [(0, 0, None)] * 3 if allocated is None else [(a, a + 1, a + 2) for a in allocated]
    return [
        {"t": start + i, "step": step, "phase": phase, "allocated": a * GIB, "reserved": r * GIB,
         "card": None if card is None else card * GIB, "host": (host + i) * GIB}
        for i, (a, r, card) in enumerate(uses)
    ]  # fmt: skip


PLAN = {
    "engine": "layer_major", "budget_bytes": 8 * GIB,
    "card": {"generate": {"weights": 2 * GIB}, "score": {"weights": GIB, "logits": GIB},
             "update": {"weights": GIB, "gradients": 3 * GIB, "logits": GIB}, "step": {"optimizer state": 2 * GIB}},
    "host": {"weights": 2 * GIB, "optimizer state": 10 * GIB},
}  # fmt: skip


@pytest.fixture
def measured(tmp_path):
    def make(records, plan=None, name="run"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        (run_dir / "memory.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        if plan is not None:
            (run_dir / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
        return run_dir

    return make


def lines_of(ax):
    """Label -> its points, without the breaks between phases."""
    shown = [line for line in ax.lines if not line.get_label().startswith("_")]
    return {line.get_label(): [(x, y) for x, y in zip(*line.get_data(), strict=True) if x == x] for line in shown}


def marks_of(ax):
    """(marker, where, GiB) of the marks at the highest use."""
    return {(line.get_marker(), line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines
            if line.get_linestyle() == "None"}  # fmt: skip


def bands_of(ax):
    """Beginning and end of each shaded phase, in seconds."""
    return [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in ax.patches]


CARD_RUN = [
    *samples(1, "generate", 0, (2, 3, 2)), *samples(1, "score", 3, (1, 1, 1)), *samples(1, "update", 6, (3, 4, 1)),
    *samples(2, "generate", 10, (2, 3, 2)), *samples(2, "update", 13, (3, 5, 1)),
]  # fmt: skip


def test_the_timeline_shows_the_samples_in_gib_with_the_phases_shaded(measured):
    figure = plot_memory(measured(CARD_RUN))
    card, host = figure.axes
    lines = lines_of(card)
    assert lines["allocated by torch"][:4] == [(0, 2), (1, 3), (2, 2), (3, 1)]
    assert lines["reserved by torch"][:2] == [(0, 3), (1, 4)]
    assert lines["whole card, all programs"][:2] == [(0, 4), (1, 5)]
    assert lines_of(host)["process, on the host"][:3] == [(0, 20), (1, 21), (2, 22)]
    assert bands_of(card) == bands_of(host) == [(0, 2), (3, 5), (6, 8), (10, 12), (13, 15)]
    colors = [patch.get_facecolor() for patch in card.patches]
    assert colors[0] == colors[3] and colors[2] == colors[4] and len(set(colors)) == 3
    looks = {
        (line.get_color(), line.get_marker(), line.get_linestyle()) for line in card.lines if line.get_label() in lines
    }
    assert all(len({look[i] for look in looks}) == 3 for i in range(3)), "to be told apart in grey, too"
    assert {"batch 1", "batch 2", "generate", "update"} <= {text.get_text() for text in card.texts}
    assert host.get_xlabel() == "seconds since the run began" and card.get_ylabel() == host.get_ylabel() == "GiB"
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [*lines, "process, on the host", "generate", "score", "update"]


def test_lines_are_broken_between_phases(measured):
    card = plot_memory(measured(CARD_RUN)).axes[0]
    xs = card.lines[0].get_xdata()
    assert [i for i, x in enumerate(xs) if x != x] == [3, 7, 11, 15, 19]


def test_beside_it_the_plan_as_stacks_with_the_highest_use_of_each_phase(measured):
    figure = plot_memory(measured(CARD_RUN, PLAN))
    timeline, stacks, host, host_stacks = figure.axes
    bars = [[(bar.get_y(), bar.get_height()) for bar in container] for container in stacks.containers]
    assert bars == [
        [(0, 2), (0, 1), (0, 1), (0, 0)],  # weights, in generate, score, update and step
        [(2, 0), (1, 1), (1, 1), (0, 0)],  # logits, named second in the plan
        [(2, 0), (2, 0), (2, 3), (0, 0)],  # gradients
        [(2, 0), (2, 0), (5, 0), (0, 2)],  # optimizer state
    ]
    assert [t.get_text() for t in stacks.get_xticklabels()] == ["generate\n2", "score\n2", "update\n5", "step\n2"]
    # the loop's update is the plan's update and step: its marks stand between them, at 2.5
    assert marks_of(stacks) == {
        ("o", 0, 3), ("s", 0, 4), ("v", 0, 5), ("o", 1, 1), ("s", 1, 2), ("v", 1, 3), ("o", 2.5, 5), ("s", 2.5, 6),
        ("v", 2.5, 7),
    }  # fmt: skip
    assert marks_of(host_stacks) == {("D", 0, 22), ("D", 1, 22), ("D", 2.5, 22)}
    assert [bar.get_height() for bar in host_stacks.containers[-1]] == [10] * 4
    assert [t.get_text() for t in figure.legends[1].get_texts()] == [
        "weights",
        "logits",
        "gradients",
        "optimizer state",
    ]
    for ax in (timeline, stacks):
        (budget,) = [line for line in ax.lines if line.get_linestyle() == "--" and set(line.get_ydata()) == {8}]
        assert budget.get_color() == "black" and ax.get_ylim()[1] > 8
    assert "budget 8 GiB" in [t.get_text() for t in figure.legends[0].get_texts()]
    assert not any(set(line.get_ydata()) == {8} for ax in (host, host_stacks) for line in ax.lines), "it is the card's"
    colors = {(bar.get_facecolor(), bar.get_hatch()) for container in stacks.containers for bar in container}
    assert len(colors) == len({color for color, _ in colors}) == 4


def test_a_budget_far_above_does_not_press_the_picture_flat(measured):
    figure = plot_memory(measured(CARD_RUN, PLAN | {"budget_bytes": 140 * GIB}))
    assert figure.axes[0].get_ylim()[1] < 9
    assert "budget 140 GiB, far above" in [t.get_text() for t in figure.legends[0].get_texts()]


def test_of_a_long_run_the_batch_with_the_highest_use_and_its_neighbours(measured):
    records = [s for step in range(1, 9) for s in samples(step, "update", 10 * step, (1, 9 if step == 5 else 2, 1))]
    figure = plot_memory(measured(records, PLAN))
    assert [band[0] for band in bands_of(figure.axes[0])] == [40, 50, 60]
    ends = plot_memory(measured([s for s in records if s["step"] <= 5], PLAN, "ends")).axes[0]
    assert [band[0] for band in bands_of(ends)] == [40, 50]


def test_on_the_cpu_there_is_the_process_alone(measured):
    records = [*samples(1, "generate", 0, host=1), *samples(1, "update", 3, host=4), *samples(1, "eval", 6, host=1)]
    (ax,) = plot_memory(measured(records)).axes
    assert lines_of(ax) == {"process, on the host": [(float(i), y) for i, y in enumerate([1, 2, 3, 4, 5, 6, 1, 2, 3])]}
    plan = {"engine": "resident", "budget_bytes": None, "card": {"update": {"weights": GIB}}, "host": {}}
    figure = plot_memory(measured(records, plan, "planned"))
    assert len(figure.axes) == 2, "what would be on a card is in the host's memory here"
    assert marks_of(figure.axes[1]) == {("D", 0, 6)}
    assert [t.get_text() for t in figure.legends[0].get_texts()][1:] == ["generate", "update", "validate"]


def test_samples_without_an_answer_of_the_card_are_holes(measured):
    records = [s | {"card": None} for s in CARD_RUN[:-1]] + [CARD_RUN[-1]]
    figure = plot_memory(measured(records, PLAN))
    assert ("v", 2.5, 3) in marks_of(figure.axes[1]), "only the last sample has one: 1 + 2 GiB"
    none = plot_memory(measured([s | {"card": None} for s in CARD_RUN], name="none"))
    assert set(lines_of(none.axes[0])) == {"allocated by torch", "reserved by torch"}
    assert "whole card, all programs" not in [t.get_text() for t in none.legends[0].get_texts()]


def test_no_text_of_the_memory_figure_runs_into_another(measured, tmp_path):
    figure = plot_memory(measured(CARD_RUN, PLAN))
    figure.savefig(tmp_path / "memory.png")
    texts = [
        t for ax in figure.axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *ax.get_xticklabels())
    ]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    boxes += [("legend", legend.get_window_extent()) for legend in figure.legends]
    for i, (name, box) in enumerate(boxes):
        assert not [other for other, b in boxes[i + 1 :] if box.overlaps(b)], f"{name!r} overlaps"


def test_a_run_without_samples_of_memory_is_a_sentence(tmp_path, measured):
    with pytest.raises(UserError, match=r"nothing has no memory\.jsonl"):
        plot_memory(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"empty has no memory\.jsonl with a finished phase"):
        plot_memory(measured([], name="empty"))


@pytest.mark.parametrize(
    "plan", ["{", "[]", "{}", '{"card": {"update": 3}, "host": {}}', '{"card": {"a": {"b": "c"}}, "host": {}}']
)
def test_a_damaged_plan_is_a_sentence(measured, plan):
    with pytest.raises(UserError, match=r"plan\.json is not a plan of memory .*; remove it"):
        plot_memory(measured(CARD_RUN, plan))
