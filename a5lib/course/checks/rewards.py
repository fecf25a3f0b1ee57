"""Checks of `rewards.py`: the answer in a response, and the rewards of a rollout batch with their statistics."""

from __future__ import annotations

import math
from typing import Any

import torch

from a5lib.course.checking import Mistake, checks, expect, expect_error, expect_keys, expect_pair, show_value
from a5lib.course.exercises import Algo

THROWN_AWAY = "The closing tag was found, but the text after it was thrown away: it must make the answer empty."
LAST_WINS = "One of several answers was taken. Several blocks are malformed, or a model could try many answers."


def expect_answer(
    algo: Algo, response: str, right: str | None, likely: str, mistakes: dict[str, Any] | None = None
) -> None:
    """`expect`, for a result that is text or None."""
    got = algo.parse_answer(response)
    if got is not None and not isinstance(got, str):
        kind = f"parse_answer gives text or None, not {type(got).__name__}."
        came = show_value(got) if isinstance(got, int | float | list | tuple) else kind
        raise Mistake("parse_answer(response)", repr(response), show_value(right), came, kind)
    expect("parse_answer(response)", got, right, given=repr(response), likely=likely, mistakes=mistakes)


@checks("parse_answer")
def finds_the_answer(algo: Algo) -> None:
    """The text between the tags is the answer, without white space at its ends."""
    response = "2 plus 2.</think> <answer>4</answer>"
    expect_answer(
        algo,
        response,
        "4",
        "The answer is what stands between `<answer>` and `</answer>`.",
        {
            "The tags are still in it.": "<answer>4</answer>",
            "The closing tag is still in it.": "4</answer>",
            "The opening tag is still in it.": "<answer>4",
            "The whole response came back.": response,
            "The function gives None for a well-formed response: is there a `return`, and do you ask for a `<think>`? "
            "The prompt has already written that.": None,
        },
    )
    expect_answer(
        algo,
        "t </think> <answer>\n 4 apples </answer>",
        "4 apples",
        "White space at the ends goes, white space inside stays.",
        {
            "White space at the ends of the answer was kept.": "\n 4 apples ",
            "Only the number was kept: that is the grader's work.": "4",
            "A line break in the answer is allowed; in a regular expression `.` does not match it.": None,
        },
    )


@checks("parse_answer")
def empty_answer_is_an_answer(algo: Algo) -> None:
    """An empty block is well formed: the answer is "", not None."""
    expect_answer(
        algo,
        "t </think> <answer></answer>",
        "",
        "An empty answer is text of length 0.",
        {'An empty answer was taken for none: compare with `is None`, because "" counts as false.': None},
    )


@checks("parse_answer")
def opening_needs_one_space(algo: Algo) -> None:
    """The opening is `</think> <answer>` with exactly one space."""
    expect_answer(
        algo,
        "t <answer>4</answer>",
        None,
        "`</think>` is missing, so this is malformed.",
        {"`</think>` was not asked for.": "4"},
    )
    for between, words in (("", "no space"), ("\n", "a line break"), ("  ", "two spaces")):
        expect_answer(
            algo,
            f"t </think>{between}<answer>4</answer>",
            None,
            "Only one space between `</think>` and `<answer>` is allowed.",
            {f"The strict format was not asked for: {words} stood between `</think>` and `<answer>`.": "4"},
        )
    for response in ("an <answer> is due </think> <answer>4</answer>", "so </think> t </think> <answer>4</answer>"):
        expect_answer(
            algo,
            response,
            "4",
            "Half of the opening is text like any other.",
            {"Half of the opening was counted as an opening: look for `</think> <answer>` as a whole.": None},
        )


@checks("parse_answer")
def missing_closing_tag(algo: Algo) -> None:
    """A block that is not closed is malformed."""
    expect_answer(
        algo,
        "t </think> <answer>42",
        None,
        "`</answer>` is missing, so this is malformed.",
        {
            "A response that was cut off was taken as an answer: `</answer>` is missing.": "42",
            "The last character was cut off: `find` gives -1 where there is no closing tag.": "4",
        },
    )
    expect_answer(algo, "", None, "An empty response has no answer.", {"An empty response has no block.": ""})


@checks("parse_answer")
def several_blocks(algo: Algo) -> None:
    """Several answer blocks are malformed."""
    expect_answer(
        algo,
        "t </think> <answer>4</answer> <answer>5</answer>",
        None,
        LAST_WINS,
        {
            LAST_WINS: "4",
            "The last of several answers was taken; several are malformed.": "5",
            "Everything from the first tag to the last was taken; several are malformed.": "4</answer> <answer>5",
            "Only openings were counted. Count `</answer>` too: it must occur once.": "",
        },
    )
    expect_answer(
        algo,
        "t </think> <answer>4 </think> <answer>5</answer>",
        None,
        "`</think> <answer>` must occur once.",
        {
            "Two openings were accepted; `</think> <answer>` must occur once.": "5",
            "Two openings were accepted; count `</think> <answer>`: it must occur once.": "4 </think> <answer>5",
        },
    )


@checks("parse_answer")
def closing_comes_after_opening(algo: Algo) -> None:
    """A closing tag before the block does not close it."""
    expect_answer(
        algo,
        "4</answer> t </think> <answer>5",
        None,
        "The order of the tags matters: the only `</answer>` stands before the opening.",
        {
            "The order of the tags was not looked at: the only `</answer>` stands before the opening.": "5",
            "The order of the tags was not looked at: the closing tag comes first.": "",
            "The order of the tags was not looked at; the text before the closing tag is no answer.": "4",
        },
    )


@checks("parse_answer")
def text_after_the_block(algo: Algo) -> None:
    """Text after the block keeps the format and empties the answer."""
    expect_answer(
        algo,
        "t </think> <answer>4</answer> or 5",
        "",
        THROWN_AWAY,
        {
            THROWN_AWAY: "4",
            'Text after the block was treated as malformed. The format is kept; the answer is "".': None,
        },
    )
    expect_answer(
        algo,
        "t </think> <answer>4</answer>\n",
        "4",
        "White space after the block is no text.",
        {
            "A line break after the block was taken for text.": "",
            "A line break after the block was taken for a wrong format.": None,
        },
    )


def grade(response: str, truth: str) -> dict[str, float]:
    """A small reward function: the format is always 1, so paying it is noticed, and of three names."""
    right = float(response == truth)
    return {"format_reward": 1.0, "reward": right, "length_reward": len(response) / 10}


def statistics(algo: Algo, grades: list[dict[str, float]], *keys: str) -> dict[str, Any]:
    """The metadata of responses that earn these grades; raises `Mistake` where a key is missing."""
    numbers = [str(i) for i in range(len(grades))]
    returned = algo.compute_rollout_rewards(lambda response, truth: grades[int(response)], numbers, numbers)
    _, metadata = expect_pair("compute_rollout_rewards(...)", returned)
    expect_keys("metadata", metadata, keys)
    return metadata


ONE_OF_FOUR = [{"format_reward": 1.0, "reward": value} for value in (1.0, 0.0, 0.0, 0.0)]
GIVEN = 'rewards of two responses: {"format_reward": 1, "reward": 1, ...} and {"format_reward": 1, "reward": 0, ...}'
FORMAT_PAID = 'The format was paid. Only the value named "reward" is paid.'


@checks("compute_rollout_rewards")
def pays_the_reward(algo: Algo) -> None:
    """The first result holds the value named "reward" of each response, in order, as float32."""
    rewards, _ = expect_pair(
        "compute_rollout_rewards(...)", algo.compute_rollout_rewards(grade, ["4", "5"], ["4", "4"])
    )
    expect(
        "rewards",
        rewards,
        torch.tensor([1.0, 0.0]),
        given=GIVEN,
        likely='One number for each response: the value named "reward".',
        mistakes={
            FORMAT_PAID: torch.tensor([1.0, 1.0]),
            'All the rewards of a response were added. Only the value named "reward" is paid.': torch.tensor(
                [2.1, 1.1]
            ),
            'The format was added to the reward. Only the value named "reward" is paid.': torch.tensor([2.0, 1.0]),
            "The responses came back in another order.": torch.tensor([0.0, 1.0]),
            "A list came back; make a tensor of it.": [1.0, 0.0],
        },
    )
    expect(
        "rewards.dtype",
        str(rewards.dtype),
        "torch.float32",
        given=GIVEN,
        likely="Give `dtype=torch.float32` when you make the tensor.",
    )


@checks("compute_rollout_rewards")
def calls_with_response_then_truth(algo: Algo) -> None:
    """The reward function gets a response, then its ground truth."""
    calls: list[tuple[str, str]] = []

    def note(response: str, truth: str) -> dict[str, float]:
        calls.append((response, truth))
        return {"reward": 0.0}

    algo.compute_rollout_rewards(note, ["a", "b"], ["c", "d"])
    expect(
        "the calls of reward_fn",
        calls,
        [("a", "c"), ("b", "d")],
        given="responses a, b with ground truths c, d",
        likely="Call it once for each response, with the response and its own ground truth.",
        mistakes={
            "The arguments are in the wrong order: the response comes first.": [("c", "a"), ("d", "b")],
            "Every response was graded against the first ground truth.": [("a", "c"), ("b", "c")],
            "Each response was graded more than once; keep the results and reuse them.":
            [("a", "c"), ("b", "d"), ("a", "c"), ("b", "d")],
        },
    )  # fmt: skip


@checks("compute_rollout_rewards")
def logs_every_name(algo: Algo) -> None:
    """Every named reward has a mean, a standard deviation and a histogram in the metadata."""
    _, metadata = expect_pair(
        "compute_rollout_rewards(...)", algo.compute_rollout_rewards(grade, ["4", "5"], ["4", "4"])
    )
    expect_keys("metadata", metadata, ["reward_mean", "reward_std", "reward_histogram"])
    names = sorted(f"{name}_{what}" for name in grade("", "") for what in ("mean", "std", "histogram"))
    expect(
        "sorted(metadata)",
        sorted(metadata),
        names,
        given="a reward function that names reward, format_reward and length_reward",
        likely="Three entries for each name that the reward function returns, and no others.",
        mistakes={
            "Only \"reward\" was summarised; every name that the reward function returns is logged.":
            ["reward_histogram", "reward_mean", "reward_std"],
            "The names are fixed in your code; take them from what the reward function returned.": sorted(
                f"{name}_{what}"
                for name in ("reward", "format_reward", "answer_reward")
                for what in ("mean", "std", "histogram")
            ),
        },
    )  # fmt: skip


@checks("compute_rollout_rewards")
def means(algo: Algo) -> None:
    """The mean is over all responses, as a Python float."""
    metadata = statistics(algo, ONE_OF_FOUR, "reward_mean", "reward_std", "format_reward_mean")
    expect(
        'metadata["reward_mean"]',
        metadata["reward_mean"],
        0.25,  # one of four is right
        given="rewards 1, 0, 0, 0",
        likely="Add the four values and divide by four.",
        mistakes={"This is the sum; divide by the number of responses.": 1.0},
    )
    expect(
        'metadata["format_reward_mean"]',
        metadata["format_reward_mean"],
        1.0,
        given="format rewards 1, 1, 1, 1",
        likely="Each name has its own statistics.",
        mistakes={'The statistics of "reward" were stored under another name.': 0.25},
    )
    for name in ("reward_mean", "reward_std"):
        expect(
            f'type of metadata["{name}"]',
            "float" if isinstance(metadata[name], float) else type(metadata[name]).__name__,
            "float",
            given="any input",
            likely="The log is written as JSON, which knows no tensors: `.item()` gives a Python number.",
        )


@checks("compute_rollout_rewards")
def standard_deviations(algo: Algo) -> None:
    """The standard deviation is that of the population: the mean of the squared deviations, and its root."""
    metadata = statistics(algo, ONE_OF_FOUR, "reward_std")
    # mean 1/4, squared deviations 9/16 + 3 * 1/16 = 12/16; divided by 4: 3/16, its root .4330; divided by 3: root .5
    expect(
        'metadata["reward_std"]',
        metadata["reward_std"],
        math.sqrt(3 / 16),
        given="rewards 1, 0, 0, 0",
        likely="The root of the mean squared deviation from the mean.",
        mistakes={
            "This is the sample standard deviation: it divides by B - 1. Here divide by B.": 0.5,
            "This is the variance; take its root.": 3 / 16,
        },
    )
    metadata = statistics(algo, [{"reward": 1.0}], "reward_std")
    expect(
        'metadata["reward_std"]',
        metadata["reward_std"],
        0.0,
        given="one response",
        likely="One value has the standard deviation 0.",
        mistakes={"B - 1 is 0 for one response: divide by B.": math.nan},
    )


@checks("compute_rollout_rewards")
def histograms(algo: Algo) -> None:
    """The histogram counts ten equal bins from 0 to 1, and 1 belongs to the last."""
    grades = [{"reward": value} for value in (0.0, 0.05, 0.38, 0.97, 1.0)]
    metadata = statistics(algo, grades, "reward_histogram")
    counts = [2, 0, 0, 1, 0, 0, 0, 0, 0, 2]
    expect(
        'metadata["reward_histogram"]',
        metadata["reward_histogram"],
        counts,
        given="rewards 0, 0.05, 0.38, 0.97, 1",
        likely="Bin i holds the values from i/10 up to, but not including, (i + 1)/10; the last bin holds 1 too.",
        mistakes={
            "The last bin must hold 1 too; the reward 1 was lost.": [2, 0, 0, 1, 0, 0, 0, 0, 0, 1],
            "There are eleven bins; 1 belongs to the tenth.": [2, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1],
            "The values were rounded to the nearest bin; round down.": [2, 0, 0, 0, 1, 0, 0, 0, 0, 2],
            "These are shares; the histogram holds counts.": [0.4, 0, 0, 0.2, 0, 0, 0, 0, 0, 0.4],
            "The counts must be whole numbers (int).": [float(count) for count in counts],
            "The log is written as JSON, which knows no tensors: give a list of ints.": torch.tensor(counts),
            "The log is JSON, which knows no tensors: give a list of ints.": torch.tensor(counts, dtype=torch.float32),
        },
    )
    grades = [{"reward": value} for value in (-0.5, -0.05, 0.5, 1.02, 3.0)]
    metadata = statistics(algo, grades, "reward_histogram")
    inside = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    expect(
        'metadata["reward_histogram"]',
        metadata["reward_histogram"],
        inside,
        given="rewards -0.5, -0.05, 0.5, 1.02, 3",
        likely="Values outside 0 to 1 are not counted.",
        mistakes={
            "Values outside 0 to 1 were put into the first and last bins; they are not counted.":
            [2, 0, 0, 0, 0, 1, 0, 0, 0, 2],
            "Values above 1 were put into the last bin; they are not counted.": [0, 0, 0, 0, 0, 1, 0, 0, 0, 2],
            "Values below 0 were counted. `int` rounds towards 0, and a negative index counts from the end.":
            [1, 0, 0, 0, 0, 2, 0, 0, 0, 0],
            "All values were counted. `int` rounds towards 0, and a negative index counts from the end.":
            [1, 0, 0, 0, 0, 2, 0, 0, 0, 2],
        },
    )  # fmt: skip


@checks("compute_rollout_rewards")
def refuses_what_is_not_finite(algo: Algo) -> None:
    """A reward that is not finite is an error that names the reward and the response."""
    for bad in (math.nan, math.inf):
        grades = [{"reward": 0.5, "style_reward": 1.0}, {"reward": 0.5, "style_reward": bad}]
        expect_error(
            lambda grades=grades: statistics(algo, grades),
            ValueError,
            given=f"style rewards 1 and {bad}",
            likely="A reward that is not finite was let through: it would spoil every mean, and the weights.",
            words="style_reward",
        )
