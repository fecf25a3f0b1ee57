"""The static figures show what the exercises compute; the views of a rollout show its tokens and escape its text."""

import dataclasses
import html
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib.image import imread

from a5lib import figures
from a5lib.course import load_algo
from a5lib.engines.plan import CONTEXT, Plan
from a5lib.errors import UserError
from a5lib.figures import (
    advantage_figure,
    clip_figure,
    cycle_figure,
    ledger_figure,
    pass_figure,
    plan_figure,
    precision_figure,
    timeline_figure,
    what_stays,
)
from a5lib.records import Completion, Problem, Rollout
from a5lib.rollout_views import as_rollout, rollout_class, rollout_html, rollout_text
from tests.helpers import tiny_tokenizer

GIB = 2**30


@pytest.fixture
def algo():
    return load_algo("solutions")


def heights(ax):
    return [bar.get_height() for bar in ax.patches]


def lines(ax):
    """The curves by colour, without marks and rules of one or two points."""
    return {line.get_color(): np.array(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) > 2}


def texts(figure):
    return [t.get_text() for ax in figure.axes for t in ax.texts] + [
        t.get_text() for legend in figure.legends for t in [*legend.get_texts(), legend.get_title()]
    ]


def is_picture(figure, tmp_path):
    path = tmp_path / "figure.png"
    path.write_bytes(figure.png())
    return imread(path).std() > 0.01


# --- advantages


def test_the_bars_are_the_advantages_of_each_normaliser(algo, tmp_path):
    figure = advantage_figure(algo, [1, 0, 0, 0])  # mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 1/2
    grpo, dr_grpo, maxrl, rft = figure.axes
    assert heights(grpo) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert heights(dr_grpo) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert heights(maxrl) == pytest.approx([3, -1, -1, -1], abs=1e-4)
    assert heights(rft) == [1, 0, 0, 0]
    assert [t.get_text() for t in grpo.get_xticklabels()] == ["1", "0", "0", "0"]
    assert len({ax.patches[0].get_hatch() for ax in figure.axes}) == 4, "in grey the panels need their own hatches"
    assert grpo.get_ylabel() == "advantage"
    assert is_picture(figure, tmp_path)


def test_it_is_the_given_code_that_is_drawn(algo):
    doubled = SimpleNamespace(
        compute_group_normalized_rewards=lambda r, g, **options: (2 * r, {}),
    )
    assert heights(advantage_figure(doubled, torch.tensor([1.0, 3.0])).axes[0]) == [2, 6]


def test_a_group_of_one_says_what_is_wrong_with_it(algo):
    assert any("nothing" in text and "compare" in text for text in texts(advantage_figure(algo, [1.0])))


@pytest.mark.parametrize(
    ("rewards", "words"), [([], "got 0 rewards"), ([0.0] * 33, "got 33"), (["a"], "'a'"), ([float("nan")], "nan")]
)
def test_wrong_rewards(algo, rewards, words):
    with pytest.raises(UserError, match=words):
        advantage_figure(algo, rewards)


@pytest.mark.parametrize("wrong", [None, (torch.zeros(3), {}), ([0.0, 0.0], {})])
def test_code_that_gives_no_advantages_is_named(wrong):
    with pytest.raises(UserError, match=r"compute_group_normalized_rewards gave .*check\(\"advantages\"\)"):
        advantage_figure(SimpleNamespace(compute_group_normalized_rewards=lambda *a, **o: wrong), [1, 0])


def test_a_notebook_shows_the_figure_without_pyplot(algo):
    data, _ = DisplayFormatter().format(advantage_figure(algo, [1, 0]))
    assert data["image/png"].startswith(b"\x89PNG") and data["text/plain"] == "<Picture size 900x340 with 4 Axes>"


# --- clipping


def test_losses_and_gradients_at_the_chosen_ratio(algo, tmp_path):
    """A = 1, ratio 1.5, eps 0.2, old probability 1/4: log p = log(3/8) = -0.9808."""
    figure = clip_figure(algo, 1.5, 1.0, 0.2)
    words = " ".join(texts(figure))
    assert "noclip: loss -1.500, gradient -1.500" in words  # -A w, and d(-A w) / d log p = -A w
    assert "grpo: loss -1.200, gradient 0.000" in words  # clipped
    assert "cispo: loss 1.177, gradient -1.200" in words  # -1.2 * -0.9808, and -min(w, 1.2) A
    left, right = figure.axes
    assert "probability" in right.get_ylabel() and left.get_ylabel() == "loss"
    assert "0.8 to 1.2" in figure.get_suptitle()
    assert len({line.get_linestyle() for line in left.lines if len(line.get_xdata()) > 2}) == 3
    assert is_picture(figure, tmp_path)


def test_a_negative_advantage_is_clipped_below(algo):
    words = " ".join(texts(clip_figure(algo, 0.5, -1.0, 0.2)))
    assert "grpo: loss 0.800, gradient 0.000" in words and "cispo: loss -1.040, gradient 0.500" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0.0,), "ratio is 0"), ((5.0,), "at most 4"), ((1.0, 1.0, 1.0), "cliprange is 1"), ((1.0, "x"), "advantage")],
)
def test_wrong_numbers_for_the_clip_figure(algo, arguments, words):
    with pytest.raises(UserError, match=words):
        clip_figure(algo, *arguments)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda new: (new.detach(), {}), "no gradient"),
        (lambda new: (new.sum(), {}), r"shape \[\], not a loss of shape \[1, 398\]"),
        (lambda new: None, "gave NoneType"),
    ],
)
def test_code_that_gives_no_loss_is_named(loss, words):
    wrong = SimpleNamespace(compute_policy_gradient_loss=lambda a, new, *rest: loss(new))
    with pytest.raises(UserError, match=words):
        clip_figure(wrong)


# --- precision


def test_bfloat16_does_not_move_and_the_others_follow():
    stored = figures.stored_weights(torch.tensor(1.0).bfloat16(), 1e-3, 200)
    assert all(len(values) == 201 and values[0] == 1.0 for values in stored.values())
    assert set(stored["bf16"]) == {1.0}, "half a gap above 1 is 0.0039, so an update of 0.001 rounds to nothing"
    assert stored["fp32 master copy"][-1] == pytest.approx(1.2, abs=1e-4)
    assert stored["bf16, Kahan"][-1] == pytest.approx(1.2, abs=0.0079 / 2)  # within half a gap
    assert stored["bf16, stochastic"][-1] == pytest.approx(1.2, abs=0.08)
    gaps = np.array(stored["bf16, stochastic"]) * 128
    assert np.array_equal(gaps, gaps.round()), "what is stored must be a bfloat16 number"


def test_the_precision_figure_says_its_numbers(tmp_path):
    figure = precision_figure(1.0, -1e-3, 50)
    assert "0.00391 away" in figure.get_suptitle(), "below 1 the gap is half of that above"
    assert "exact: 0.95" in texts(figure) and "bf16: 1" in texts(figure)
    assert is_picture(figure, tmp_path)
    assert is_picture(precision_figure(0.0, 0.0, 1), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"), [((1.0, 1e-3, 0), "steps is 0"), ((float("inf"),), "weight"), ((1.0, None), "update")]
)
def test_wrong_numbers_for_the_precision_figure(arguments, words):
    with pytest.raises(UserError, match=words):
        precision_figure(*arguments)


# --- memory


def test_the_ledger_stacks_up_to_its_total(tmp_path):
    figure = ledger_figure({"weights": 3 * GIB, "gradients": GIB, "logits": 0}, budget=5 * GIB)
    (ax,) = figure.axes
    assert bars(ax) == [(0, 3, 0), (0, 3, 3), (3, 1, 1), (3, 1, 3), (4, 0, 2), (4, 0, 3)]
    assert "4.00 GiB" in ax.get_title() and "it fits into 5.00 GiB" in ax.get_title() and ax.get_xlabel() == "GiB"
    assert " 3.00 GiB (75%) " in texts(figure)
    assert ax.lines[0].get_xdata()[0] == 5
    assert [t.get_text() for t in ax.get_yticklabels()] == ["weights", "gradients", "logits", "all together"]
    assert is_picture(figure, tmp_path)
    far = ledger_figure({"weights": 3 * 2**20}, budget=16 * GIB).axes[0]
    assert not far.lines and far.get_xlabel() == "MiB" and far.get_xlim()[1] < 4, "the bars must be wide enough to see"
    assert "does not fit" in ledger_figure({"weights": 3 * GIB}, budget=2 * GIB).axes[0].get_title()


PLAN = Plan(
    longest=8, microbatch_tokens=16, microbatches=4, kept=2, budget=4 * GIB, on_card=False,
    card={"update": {"token ids": GIB // 64, "weights that stay": GIB, "layer inputs": GIB // 2},
          "step": {"weights that stay": GIB, "buckets": 2 * GIB}},
    host={"weights": 3 * GIB, "layer inputs": GIB},
)  # fmt: skip


def bars(ax):
    """Left end, width and row of each bar."""
    return [(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in ax.patches]


def test_a_plan_is_stacked_by_phase_and_place(tmp_path):
    figure = plan_figure(PLAN)
    card, host = figure.axes
    assert bars(card) == [(0, 1, 0), (1, 0.5, 0), (1.5, 1 / 64, 0), (0, 1, 1), (1, 2, 1)]
    assert [t.get_text() for t in card.get_yticklabels()] == ["update", "step"]
    assert [t.get_text().strip() for t in card.texts] == ["1.52 GiB", "3.00 GiB"]
    assert card.lines[0].get_xdata()[0] == 4 and "at most 3.00 GiB; the budget is 4.00 GiB" in card.get_title()
    assert bars(host) == [(0, 3, 0), (3, 1, 0)] and "4.00 GiB" in host.get_title()
    assert texts(figure)[-5:] == ["weights", "layer inputs", "buckets", "smaller buffers", ""], "one name, both places"
    same = [card.patches[0], card.patches[3], host.patches[0]]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in same}) == 1, "a buffer has one look everywhere"
    assert "layer-major engine; on the card: hidden states of 2 of 4" in figure.get_suptitle()
    assert is_picture(figure, tmp_path)


def test_a_plan_for_a_card_begins_with_cuda_itself():
    (ax, _) = plan_figure(dataclasses.replace(PLAN, on_card=True)).axes
    assert bars(ax)[0] == (0, CONTEXT / GIB, 0) and f"at most {3 + CONTEXT / GIB:.2f} GiB" in ax.get_title()


def test_a_plan_far_below_its_budget_can_still_be_seen():
    (ax,) = plan_figure(dataclasses.replace(PLAN, engine="resident", host={}, budget=100 * GIB)).axes
    assert not ax.lines and "the budget is 100 GiB" in ax.get_title() and ax.get_xlim()[1] < 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "resident"}, "everything"),
        ({"kept": 9}, "hidden states of all 4 microbatches"),
        ({"resident": frozenset({"layer 0", "layer 1"})}, "2 layers, hidden states"),
        ({"resident": frozenset({"layer 0", "head", "embedding"})}, "1 layer, embedding and head, hidden states"),
        ({"card_levels": 3}, "hidden states of 2 of 4 microbatches, inputs of 3 layers"),
    ],
)
def test_what_stays_on_the_card(changes, words):
    assert words in what_stays(dataclasses.replace(PLAN, **changes))


def test_the_cycle_steps_through_its_phases(tmp_path):
    figure = cycle_figure([("train", 4 * GIB, 0), ("wake", 2 * GIB, 1 * GIB), ("generate", 0, 6 * GIB)], 8 * GIB)
    (ax,) = figure.axes
    assert [patch.get_data().values.tolist() for patch in ax.patches] == [[4, 2, 0], [4, 3, 6], [4, 3, 6]]
    assert {"4.00 GiB", "3.00 GiB", "6.00 GiB"} <= set(texts(figure))
    assert ax.get_ylabel() == "on the card (GiB)"
    assert is_picture(figure, tmp_path)


CYCLE = {"update": 2.0, "load": 0.5, "generate": 3.0, "leave": 0.25}  # a made-up log, in no order
USE = [{"t": t, "reserved": r * GIB, "card": c * GIB} for t, r, c in ((0.0, 0, 5), (3.75, 4, 6), (5.75, 1, 2))]


def test_a_timeline_has_a_lane_for_each_tenant_and_their_memory_under_the_budget(tmp_path):
    figure = timeline_figure(CYCLE, USE, budget=8 * GIB)
    lanes, memory = figure.axes
    assert bars(lanes) == [(0.0, 0.25, 0), (0.25, 0.5, 1), (0.75, 3.0, 1), (3.75, 2.0, 0)], "in the order of a cycle"
    assert [t.get_text() for t in lanes.get_yticklabels()] == ["trainer", "engine"]
    assert "5.75 s" in lanes.get_title()
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "leave: 0.25 s", "load: 0.5 s", "generate: 3 s", "update: 2 s"
    ]  # fmt: skip
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in lanes.patches}) == 4
    trainer, engine = (area.get_paths()[0].vertices[:, 1].tolist() for area in memory.collections)
    assert (min(trainer), max(trainer), max(engine)) == (0, 4, 6), "the engine stands on the trainer"
    assert "at most 6.00 GiB" in memory.get_title()
    assert [t.get_text() for t in memory.get_legend().get_texts()][-1] == "budget 8.00 GiB"
    assert max(memory.get_ylim()) > 8 and is_picture(figure, tmp_path)


def test_a_sum_just_below_the_budget_stands_inside_its_bar():
    figure = cycle_figure([("train", 11.651 * GIB, 0), ("generate", 1.5 * GIB, 14 * GIB)], 16 * GIB, "A plan")
    (ax,) = figure.axes
    low, high = ax.texts
    assert [low.get_text(), high.get_text()] == ["11.65 GiB", "15.50 GiB"]
    assert [low.get_va(), high.get_va()] == ["bottom", "top"], "the budget's line runs above 15.50"
    assert ax.get_title() == "A plan"


def test_a_timeline_without_memory_is_its_lanes():
    figure = timeline_figure(CYCLE | {"wake weights": 0.000296})
    (lanes,) = figure.axes
    assert "wake weights: < 0.01 s" in [t.get_text() for t in figure.legends[0].get_texts()]
    assert lanes.get_xlabel() == "seconds"
    for wrong, words in (({}, "not of none"), ({"load": 1.0, "lunch": 3600.0}, "not of lunch")):
        with pytest.raises(UserError, match=words):
            timeline_figure(wrong)


def test_a_pass_is_one_box_an_event_in_its_lane(tmp_path):
    events = [("in", "embedding", "weight"), ("work", "embedding", "0"), ("out", "layer 0", "0")]
    figure = pass_figure([*events, ("in", "layer 0", "exp_avg"), ("out", "layer 0", "grad")])
    (ax,) = figure.axes
    middles = [(bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2) for bar in ax.patches]
    assert middles == [pytest.approx(place) for place in ((1, 0), (2, 1), (3, 2), (4, 0), (5, 2))]
    assert [t.get_text() for t in ax.texts] == ["W", "0", "0", "S", "G"]
    looks = [(bar.get_facecolor(), bar.get_hatch()) for bar in ax.patches]
    assert looks[0] == looks[1] != looks[2] == looks[3] == looks[4], "a part has one colour and one hatch"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["embedding", "layer 0"]
    assert is_picture(figure, tmp_path)
    above, below = pass_figure(events * 11).axes
    assert [len(above.patches), len(below.patches)] == [17, 16], "a long pass takes two rows"
    with pytest.raises(UserError, match="no events"):
        pass_figure([])


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: ledger_figure({}), "nothing to draw"),
        (lambda: ledger_figure({"weights": -1}), "'weights' is -1"),
        (lambda: ledger_figure({"weights": 1}, budget="16 GB"), "'budget'"),
        (lambda: plan_figure(Plan(longest=8, microbatch_tokens=8)), "nothing to draw"),
        (lambda: cycle_figure([]), "nothing to draw"),
        (lambda: cycle_figure([("train", 1, -2)]), "'engine in phase 1' is -2"),
    ],
)
def test_wrong_bytes(draw, words):
    with pytest.raises(UserError, match=words):
        draw()


# --- rollouts

TEXT = "2<3 &\nso"


def rollout(rewards=None, text=TEXT, log_prob=-0.1):
    ids = tiny_tokenizer().encode(text)
    completion = Completion(0, ids, text, "stop", [log_prob] * len(ids))
    prompt = tiny_tokenizer().encode("Is <b> it?")
    return Rollout(Problem("Is <b> it?", "", "3"), prompt, completion, rewards or {}, 0.5)


def spans(page):
    """Title, underline and visible text of each token."""
    found = re.findall(r'<span title="([^"]+)" style="([^"]+)">(.*?)</span>', page)
    return [(title, "border-bottom" in style, html.unescape(shown)) for title, style, shown in found]


def test_the_text_brackets_the_response_and_nothing_else():
    text = rollout_text(rollout(), tiny_tokenizer())
    assert "Is <b> it?" in text and "[2][<][3][ ][&][↵\n][s][o]" in text
    assert "Answer expected: 3. Class: not graded." in text and "-0.10" in text


def test_html_is_escaped_and_marks_the_mask_without_colour():
    page = rollout_html(rollout(), tiny_tokenizer())
    assert "<b>" not in page and "&lt;" in page and "&amp;" in page
    tokens = spans(page)
    assert [t for t in tokens if t[1]] == [t for t in tokens if "mask 1" in t[0]], "underlined where the mask is 1"
    assert "".join(shown for _, underlined, shown in tokens if underlined) == TEXT.replace("\n", "↵<br>")
    assert sum("mask 0" in title for title, _, _ in tokens) == len("Is <b> it?")


def test_html_by_log_probability_underlines_the_unlikely_tokens():
    sure, unsure = (spans(rollout_html(rollout(log_prob=x), tiny_tokenizer(), "log_prob")) for x in (-0.6, -0.8))
    assert not any(underlined for _, underlined, _ in sure), "exp(-0.6) = 0.55 is above one half"
    assert [underlined for title, underlined, _ in unsure if "mask 1" in title] == [True] * len(TEXT)
    assert "log-probability -0.80 nats (probability 44.9%)" in unsure[-1][0]


def test_html_by_entropy_needs_the_entropy_and_says_so():
    page = rollout_html(rollout(), tiny_tokenizer(), "entropy")
    assert "was not logged" in page and "Colour: log-probability" in page
    page = rollout_html(rollout(), tiny_tokenizer(), "entropy", [0.0, 1.0, *[2.0] * 6])
    assert "was not logged" not in page and "Colour: entropy" in page and "entropy 1.00 nats" in page
    opacity = re.findall(r"rgba\(131,45,182,([\d.]+)\)", page)[-8:]
    assert opacity == ["0.00", "0.35", *["0.70"] * 6]


def test_without_log_probabilities_the_mask_is_shown():
    written = dataclasses.replace(rollout(), completion=dataclasses.replace(rollout().completion, log_probs=[]))
    page = rollout_html(written, tiny_tokenizer(), "log_prob")
    assert "No log-probabilities are stored" in page and "Colour: response mask" in page
    assert "Least likely" not in rollout_text(written, tiny_tokenizer())


def test_a_line_of_the_run_log_is_a_rollout():
    line = json.loads(json.dumps(dataclasses.asdict(rollout())))
    assert as_rollout(line) == rollout()
    assert rollout_html(line, tiny_tokenizer()) == rollout_html(rollout(), tiny_tokenizer())


def test_ids_without_text_are_named_by_number():
    half = dataclasses.replace(
        rollout(), completion=Completion(0, [tiny_tokenizer().encode("é")[0], 9999], "", "stop", [])
    )
    first = half.completion.token_ids[0]
    assert f"[<{first}>][<9999>]" in rollout_text(half, tiny_tokenizer())


def test_classes():
    grade = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
    assert rollout_class(rollout(grade)) == "wrong"
    assert rollout_class(rollout(grade | {"answer_reward": 1.0})) == "right"
    assert rollout_class(rollout(grade | {"format_reward": 0.0})) == "malformed"


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: rollout_html(rollout(), tiny_tokenizer(), "logprob"), "did you mean 'log_prob'"),
        (lambda: rollout_html(rollout(), tiny_tokenizer(), "entropy", [1.0]), "1 values for 8 response tokens"),
        (lambda: rollout_text({"text": "x"}, tiny_tokenizer()), "not dict"),
        (lambda: rollout_text(None, tiny_tokenizer()), "not NoneType"),
    ],
)
def test_wrong_rollouts(draw, words):
    with pytest.raises(UserError, match=words):
        draw()
