"""Checks of `advantages.py`: groups, baseline, normaliser, and groups whose rewards are all equal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from a5lib.course.checking import checks, expect, expect_keys, expect_pair
from a5lib.course.exercises import Algo

FUNCTION = "compute_group_normalized_rewards"


def _advantages(algo: Algo, rewards: list[float], group_size: int, **options: Any) -> Tensor:
    pair = expect_pair(f"{FUNCTION}(...)", algo.compute_group_normalized_rewards(
        torch.tensor(rewards), group_size, **options))  # fmt: skip
    advantages: Tensor = pair[0]
    return advantages


def _as_tensors(mistakes: dict[str, list[float]]) -> dict[str, Tensor]:
    return {sentence: torch.tensor(values) for sentence, values in mistakes.items()}


@checks(FUNCTION)
def mean_and_standard_deviation(algo: Algo) -> None:
    """With the defaults, the group's mean is subtracted and its sample standard deviation is divided by."""
    # mean 1/4; squared deviations 9/16 + 3 * 1/16 = 3/4; over G - 1 = 3: 1/4; its root: 1/2
    biased = math.sqrt(3) / 4  # over G = 4: 3/16
    expect(
        "advantages",
        _advantages(algo, [1.0, 0.0, 0.0, 0.0], 4),
        torch.tensor([1.5, -0.5, -0.5, -0.5]),
        given="rewards [1, 0, 0, 0], one group of 4",
        likely="Subtract the mean 0.25, then divide by the sample standard deviation 0.5.",
        mistakes=_as_tensors(
            {
                "The standard deviation is the biased one: the squares are divided by G and not by G - 1.": [
                    0.75 / biased, -0.25 / biased, -0.25 / biased, -0.25 / biased
                ],
                "The mean was not subtracted.": [2.0, 0.0, 0.0, 0.0],
                "Nothing was divided by: the normaliser is missing.": [0.75, -0.25, -0.25, -0.25],
                "The variance was divided by, and not its root.": [3.0, -1.0, -1.0, -1.0],
                "The sign is wrong: a response that is better than its group has a positive advantage.": [
                    -1.5, 0.5, 0.5, 0.5
                ],
                "The result holds the rewards, unchanged.": [1.0, 0.0, 0.0, 0.0],
            }
        ),
    )  # fmt: skip
    expect(
        "the type of the advantages", str(_advantages(algo, [1.0, 0.0], 2).dtype), "torch.float32", given="[1.0, 0.0]",
        likely="The arithmetic has left float32; the loss expects it.",
    )  # fmt: skip


@checks(FUNCTION)
def groups_lie_side_by_side(algo: Algo) -> None:
    """Each mean is taken over one group, and a group is G rewards side by side."""
    # means of the pairs: 0.5, 3, 3
    batch_mean = 13 / 6
    columns = (5 / 3, 8 / 3)
    expect(
        "advantages",
        _advantages(algo, [1.0, 0.0, 4.0, 2.0, 0.0, 6.0], 2, advantage_normalizer="none"),
        torch.tensor([0.5, -0.5, 1.0, -1.0, -3.0, 3.0]),
        given='rewards [1, 0, 4, 2, 0, 6], groups of 2: [1, 0], [4, 2], [0, 6]; normaliser "none"',
        likely="Reshape to one row a group, take the mean of each row, and give a flat tensor back.",
        mistakes=_as_tensors(
            {
                "The mean is over the whole batch and not over each group.": [
                    r - batch_mean for r in (1, 0, 4, 2, 0, 6)
                ],
                # as [[1, 0, 4], [2, 0, 6]] with the mean of each column: 1.5, 0, 5
                "The groups are interleaved: reshape to (groups, G), not (G, groups).": [
                    -0.5, 0.0, -1.0, 0.5, 0.0, 1.0
                ],
                "The groups are interleaved and come back in that order: reshape to (groups, G), not (G, groups).": [
                    -0.5, 0.5, 0.0, 0.0, -1.0, 1.0
                ],
                # rows 1, 0, 4 and 2, 0, 6
                "The rows have the wrong length: reshape to (groups, G), not (G, groups).": [
                    1 - 5 / 3, -5 / 3, 4 - 5 / 3, 2 - 8 / 3, -8 / 3, 6 - 8 / 3
                ],
                "The mean is taken across groups: of [groups, G] take the mean of each row, dim=1.": [
                    1 - columns[0], -columns[1], 4 - columns[0], 2 - columns[1], -columns[0], 6 - columns[1]
                ],
            }
        ),
    )  # fmt: skip


@checks(FUNCTION)
def standard_deviation_of_each_group(algo: Algo) -> None:
    """Each group is divided by its own standard deviation."""
    # a pair's sample standard deviation is its distance over the root of 2, so both groups give +-0.7071
    half = math.sqrt(0.5)
    batch = math.sqrt(4.75 / 3)  # deviations from 1.25: -0.25, -1.25, 1.75, -0.25
    expect(
        "advantages",
        _advantages(algo, [1.0, 0.0, 3.0, 1.0], 2),
        torch.tensor([half, -half, half, -half]),
        given="rewards [1, 0, 3, 1], groups of 2: [1, 0] and [3, 1]",
        likely="Take mean and standard deviation of each row of [groups, G].",
        mistakes=_as_tensors(
            {
                "The standard deviation is over the whole batch and not over each group.": [
                    0.5 / batch, -0.5 / batch, 1 / batch, -1 / batch
                ],
                "Mean and standard deviation are over the whole batch and not over each group.": [
                    -0.25 / batch, -1.25 / batch, 1.75 / batch, -0.25 / batch
                ],
            }
        ),
    )  # fmt: skip


@checks(FUNCTION)
def normalizer_none(algo: Algo) -> None:
    """The normaliser "none" divides by nothing."""
    expect(
        "advantages",
        _advantages(algo, [1.0, 0.0, 0.0, 0.0], 4, advantage_normalizer="none"),
        torch.tensor([0.75, -0.25, -0.25, -0.25]),
        given='rewards [1, 0, 0, 0], one group of 4, normaliser "none"',
        likely="Only the mean is subtracted.",
        mistakes=_as_tensors(
            {'The normaliser "none" still divides by the standard deviation.': [1.5, -0.5, -0.5, -0.5]}
        ),
    )


@checks(FUNCTION)
def normalizer_mean(algo: Algo) -> None:
    """The normaliser "mean" divides by the mean of the group."""
    # mean 0.5; sample standard deviation: the root of 4 * 0.25 / 3
    by_std = 0.5 / math.sqrt(1 / 3)
    expect(
        "advantages",
        _advantages(algo, [1.0, 1.0, 0.0, 0.0], 4, advantage_normalizer="mean"),
        torch.tensor([1.0, 1.0, -1.0, -1.0]),
        given='rewards [1, 1, 0, 0], one group of 4, normaliser "mean"',
        likely="Subtract the mean 0.5, then divide by the mean 0.5.",
        mistakes=_as_tensors(
            {
                'The normaliser "mean" divides by the standard deviation.': [by_std, by_std, -by_std, -by_std],
                'The normaliser "mean" divides by nothing.': [0.5, 0.5, -0.5, -0.5],
                "The mean was not subtracted.": [2.0, 2.0, 0.0, 0.0],
            }
        ),
    )


@checks(FUNCTION)
def baseline_none(algo: Algo) -> None:
    """The baseline "none" subtracts nothing, under each normaliser."""
    # mean 0.25, standard deviation 0.5, as above
    for normalizer, right, subtracted in (("none", 1.0, 0.75), ("std", 2.0, 1.5), ("mean", 4.0, 3.0)):
        wrong = -subtracted / 3
        expect(
            "advantages",
            _advantages(algo, [1.0, 0.0, 0.0, 0.0], 4, baseline="none", advantage_normalizer=normalizer),
            torch.tensor([right, 0.0, 0.0, 0.0]),
            given=f'rewards [1, 0, 0, 0], one group of 4, baseline "none", normaliser "{normalizer}"',
            likely="Divide the rewards themselves by the normaliser.",
            mistakes=_as_tensors(
                {'The baseline "none" still subtracts the mean.': [subtracted, wrong, wrong, wrong]}
            ),
        )  # fmt: skip


@checks(FUNCTION)
def eps_is_added_to_the_divisor(algo: Algo) -> None:
    """`advantage_eps` is added to the standard deviation or the mean, and then the division follows."""
    # standard deviation 0.5 + eps 1 = 1.5; mean 0.25 + eps 1 = 1.25
    inside = math.sqrt(0.25 + 1)
    given = 'rewards [1, 0, 0, 0], one group of 4, eps 1, normaliser "std"'
    ignored = "eps is missing: it is added to the divisor."
    expect(
        "advantages",
        _advantages(algo, [1.0, 0.0, 0.0, 0.0], 4, advantage_eps=1.0),
        torch.tensor([0.5, -1 / 6, -1 / 6, -1 / 6]),
        given=given,
        likely="Divide by (standard deviation + eps).",
        mistakes=_as_tensors(
            {
                ignored: [1.5, -0.5, -0.5, -0.5],
                "eps is inside the root, added to the variance; add it to the standard deviation.": [
                    0.75 / inside, -0.25 / inside, -0.25 / inside, -0.25 / inside
                ],
                "eps is added to the quotient: brackets are missing.": [2.5, 0.5, 0.5, 0.5],
                "eps is the smallest divisor allowed; add it instead.": [0.75, -0.25, -0.25, -0.25],
            }
        ),
    )  # fmt: skip
    expect(
        "advantages",
        _advantages(algo, [1.0, 0.0, 0.0, 0.0], 4, advantage_eps=1.0, advantage_normalizer="mean"),
        torch.tensor([0.6, -0.2, -0.2, -0.2]),
        given=given.replace("std", "mean"),
        likely="Divide by (mean + eps).",
        mistakes=_as_tensors({ignored: [3.0, -1.0, -1.0, -1.0]}),
    )


@checks(FUNCTION)
def equal_rewards(algo: Algo) -> None:
    """A group whose rewards are all equal has advantage exactly 0."""
    nan = float("nan")
    zero_over_zero = "The result is NaN, from 0 / 0: replace it by 0. Multiplying by 0 leaves NaN."
    for normalizer in ("std", "mean"):
        expect(
            "advantages",
            _advantages(algo, [0.0, 0.0], 2, advantage_eps=0.0, advantage_normalizer=normalizer),
            torch.tensor([0.0, 0.0]),
            given=f'rewards [0, 0], one group of 2, eps 0, normaliser "{normalizer}"',
            likely="The rewards do not differ, so no response is better than the others.",
            mistakes=_as_tensors({zero_over_zero: [nan, nan]}),
            tolerance=0.0,
        )
    expect(
        "advantages",
        _advantages(algo, [0.9, 0.9, 0.9], 3),
        torch.tensor([0.0, 0.0, 0.0]),
        given="rewards [0.9, 0.9, 0.9], one group of 3; their float32 mean is not exactly 0.9",
        likely="Rounding noise of the mean was divided by eps: where all rewards of a group are equal, set 0.",
        tolerance=0.0,
    )
    expect(
        "advantages",
        _advantages(algo, [1.0, 1.0], 2, baseline="none"),
        torch.tensor([0.0, 0.0]),
        given='rewards [1, 1], one group of 2, baseline "none", normaliser "std"',
        likely="The standard deviation is 0, and 1 / eps is no advantage: set 0 here too.",
        mistakes=_as_tensors({"Reward over eps gives a million: set 0 where the divisor is 0.": [1e6, 1e6]}),
        tolerance=0.0,
    )


@checks(FUNCTION)
def equal_rewards_without_comparison(algo: Algo) -> None:
    """With baseline "none" and no standard deviation, equal rewards are kept: nothing is compared."""
    for normalizer in ("none", "mean"):
        expect(
            "advantages",
            _advantages(algo, [1.0, 1.0], 2, baseline="none", advantage_normalizer=normalizer),
            torch.tensor([1.0, 1.0]),
            given=f'rewards [1, 1], one group of 2, baseline "none", normaliser "{normalizer}"',
            likely="Set 0 only where a mean is subtracted or a standard deviation is divided by.",
            mistakes=_as_tensors({"The advantages were set to 0, though nothing is compared here.": [0.0, 0.0]}),
        )


@checks(FUNCTION)
def zero_variance_share(algo: Algo) -> None:
    """ "zero_variance_groups" is the share of groups whose rewards are all equal."""
    for rewards, group_size, right, mistakes in (
        (
            [1.0, 1.0, 0.0, 0.0, 1.0, 0.0],
            2,
            2 / 3,
            {
                "It counts groups; divide by the number of groups.": 2.0,
                "It counts responses; divide groups by groups.": 4.0,
                "Only the groups of zeros or only the groups of ones were counted; both have equal rewards.": 1 / 3,
                "It is the share of the other groups, or only part of the equal ones.": 1 - 2 / 3,
            },
        ),
        (
            [0.9, 0.9, 0.9],
            3,
            1.0,
            {"Rounding makes this standard deviation more than 0: compare the rewards with each other instead.": 0.0},
        ),
    ):
        result = algo.compute_group_normalized_rewards(torch.tensor(rewards), group_size)
        metadata = expect_pair(f"{FUNCTION}(...)", result)[1]
        expect_keys("the metadata", metadata, ("zero_variance_groups",))
        share = metadata["zero_variance_groups"]
        expect(
            "zero_variance_groups",
            share,
            right,
            given=f"rewards {rewards}, groups of {group_size}",
            likely="Count the groups with equal rewards and divide by the number of groups.",
            mistakes=mistakes,
        )
        expect(
            "the type of zero_variance_groups",
            "float" if isinstance(share, float) else type(share).__name__,
            "float",
            given=f"rewards {rewards}, groups of {group_size}",
            likely="It is written to a log, so make it a Python float, with `.item()`.",
        )


@checks(FUNCTION)
def column_and_whole_numbers(algo: Algo) -> None:
    """Rewards [B, 1] or whole numbers are taken too; the result is a float tensor [B]."""
    result = algo.compute_group_normalized_rewards(torch.tensor([[1], [0]]), 2, advantage_normalizer="none")
    expect(
        "advantages",
        expect_pair(f"{FUNCTION}(...)", result)[0],
        torch.tensor([0.5, -0.5]),
        given='rewards [[1], [0]], whole numbers, one group of 2, normaliser "none"',
        likely="Use `rewards`, which is already made flat and float above your code.",
    )
