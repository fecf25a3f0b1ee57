"""Answers, rewards of a rollout batch and their statistics, with a small scripted grader and with that of a5lib."""

import random

import pytest
import torch

from a5lib.grading import answers_equal, r1_zero_reward_fn


def grade(response, truth):
    return {
        "reward": float(response == truth),
        "format_reward": 1.0,
        "answer_reward": float(response == truth),
        "length_reward": len(response) / 10,
    }


def test_rewards_and_statistics_by_hand(impl):
    rewards, metadata = impl.compute_rollout_rewards(grade, ["4", "5", "6", "7777"], ["4", "4", "6", "4"])
    assert rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert rewards.dtype == torch.float32
    assert metadata["reward_mean"] == 0.5
    assert metadata["reward_std"] == 0.5, "the logged standard deviation is that of the population (divide by B)"
    assert metadata["format_reward_mean"] == 1.0
    assert metadata["format_reward_std"] == 0.0
    assert metadata["reward_histogram"] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2], "1 belongs to the last bin"
    # lengths .1 .1 .1 .4: mean .175, squared deviations 3 * .005625 + .050625 = .0675, / 4 = .016875
    assert metadata["length_reward_mean"] == pytest.approx(0.175)
    assert metadata["length_reward_std"] == pytest.approx(0.016875**0.5)
    assert metadata["length_reward_histogram"] == [0, 3, 0, 0, 1, 0, 0, 0, 0, 0]


def test_every_name_is_logged_and_only_reward_is_paid(impl):
    rewards, metadata = impl.compute_rollout_rewards(lambda r, t: {"style": 1.0, "reward": 0.25}, ["x"], ["y"])
    assert rewards.tolist() == [0.25]
    expected = {f"{name}_{what}" for name in ("style", "reward") for what in ("mean", "std", "histogram")}
    assert set(metadata) == expected


def test_bin_edges_and_values_outside(impl):
    values = iter([-0.5, 0.0, 0.3, 0.7, 0.999, 1.0, 1.5])
    _, metadata = impl.compute_rollout_rewards(lambda r, t: {"reward": next(values)}, ["x"] * 7, ["y"] * 7)
    assert metadata["reward_histogram"] == [1, 0, 0, 1, 0, 0, 0, 1, 0, 2]


def test_order_of_responses_is_kept(impl):
    seen = []
    impl.compute_rollout_rewards(lambda r, t: seen.append((r, t)) or {"reward": 0.0}, ["a", "b"], ["c", "d"])
    assert seen == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(("responses", "truths"), [(["a"], ["b", "c"]), ([], [])])
def test_lists_that_do_not_fit(impl, responses, truths):
    with pytest.raises(ValueError, match="responses"):
        impl.compute_rollout_rewards(grade, responses, truths)


def test_reward_that_is_not_a_number(impl):
    with pytest.raises(ValueError, match="format_reward of response 1 is not finite"):
        impl.compute_rollout_rewards(
            lambda r, t: {"reward": 1.0, "format_reward": float(r)}, ["0", "nan", "1"], ["", "", ""]
        )


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("2 plus 2.</think> <answer>4</answer>", "4"),
        ("t </think> <answer>\n 4 apples </answer>\n", "4 apples"),
        ("t </think> <answer></answer>", ""),
        ("<think> t </think> <answer>4</answer>", "4"),
        ("<answer> t </think> <answer>4</answer>", "4"),
        ("t </think> <answer>4 <answer>5</answer>", "4 <answer>5"),
        ("t </think> <answer>4</answer> so 7", ""),
        ("t </think><answer>4</answer>", None),
        ("t </think>\n<answer>4</answer>", None),
        ("t </think>  <answer>4</answer>", None),
        ("t <answer>4</answer>", None),
        ("t </think> <answer>4", None),
        ("t </think> 4</answer>", None),
        ("t </think> <answer>4</answer> <answer>5</answer>", None),
        ("t </think> <answer>4</answer> t </think> <answer>5</answer>", None),
        ("t </think> <answer>4 </think> <answer>5</answer>", None),
        ("4</answer> t </think> <answer>5", None),
        ("4</answer> t </think> <answer>5</answer>", None),
        ("", None),
    ],
)
def test_answer_block(impl, response, answer):
    assert impl.parse_answer(response) == answer


def test_the_parser_and_the_grader_agree_on_many_texts(impl):
    pieces = ["</think> <answer>", "</answer>", "</think>", "<answer>", "<think>", " ", "\n", "4", "42", "1,080"]
    pieces += ["-", "$", "\\boxed{4}", "four", "\u00a0", "\ud800"]
    rng = random.Random(0)
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(4000)]
    opened = [f"t </think> <answer>{text}" for text in texts]
    texts += opened + [f"{text}</answer>" for text in opened]
    for text in texts:
        graded, answer = r1_zero_reward_fn(text, "4"), impl.parse_answer(text)
        assert (answer is not None) == graded["format_reward"], text
        assert answers_equal(answer, "4") == graded["answer_reward"], text
    assert {r1_zero_reward_fn(text, "4")["format_reward"] for text in texts} == {0.0, 1.0}
