"""Checks of `estimator.py`: any fair estimator passes.

There is no right value to compare with, so the checks ask for what every fair estimator has. Rewards are 0 and 1, as
in the course. Then the gradient of one prompt can only be long or short, forwards or backwards: every estimator that
looks at its own group alone gives, on average, a multiple of the true gradient. What is asked is that the multiple is
nowhere negative, and not zero everywhere. How it depends on the policy is the student's choice. With graded rewards
even GRPO's standard deviation turns the gradient, so those are not asked for.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from a5lib.course.checking import Mistake, checks, expect, show_value
from a5lib.course.exercises import Algo

FUNCTION = "estimate_advantages"
HUGE = 1000.0  # no sensible advantage of a reward of 0 or 1; 1 / 1e-6 is a million
POLICIES = (
    [0.3, 0.5, 0.2],
    [0.8, 0.1, 0.1],
    [0.05, 0.15, 0.8],
)  # probability of a right, a wrong, a malformed response
REWARDS = [1.0, 0.0, 0.0]
GROUP_SIZE = 4
NOTHING = 1e-6  # shorter than this, a mean gradient is rounding


def _advantages(algo: Algo, rewards: list[float], group_size: int) -> Tensor:
    """The advantages, float64 [B], if they can be used at all."""
    given = torch.tensor(rewards)
    got = algo.estimate_advantages(given, group_size)
    _usable(got, len(rewards), group_size, f"rewards {show_value(rewards)}, groups of {group_size}")
    return got.detach().double()  # type: ignore[no-any-return]


def _usable(got: Any, count: int, group_size: int, given: str) -> None:
    expected = f"a float tensor with the shape ({count},)"
    if got is None:
        raise Mistake("advantages", given, expected, "None", "The function gives None: is there a `return`?")
    if not isinstance(got, Tensor):
        raise Mistake("advantages", given, expected, show_value(got),
                      f"advantages must be a tensor, not {type(got).__name__}.")  # fmt: skip
    if got.shape != (count,):
        likely = f"advantages has the shape {tuple(got.shape)} and not ({count},)."
        if got.shape == (count // group_size, group_size):
            likely += " Make it flat again with .reshape(-1)."
        elif got.numel() == count // group_size:
            likely += " Each response needs an advantage, not each group."
        raise Mistake("advantages", given, expected, show_value(got), likely)
    if not got.is_floating_point():
        raise Mistake("advantages", given, expected, f"{show_value(got)} of type {got.dtype}",
                      f"advantages has the type {got.dtype} and not float.")  # fmt: skip


@checks(FUNCTION)
def one_number_for_each_response(algo: Algo) -> None:
    """There is one advantage for each response, in a flat float tensor."""
    _advantages(algo, [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], 3)
    for rewards in (torch.tensor([[1], [0]]), torch.tensor([[1.0], [0.0]])):
        kind = "whole numbers" if rewards.dtype == torch.int64 else "floats"
        given = f"rewards [[1], [0]], {kind}, one group of 2; `rewards` is already flat and float"
        _usable(algo.estimate_advantages(rewards, 2), 2, 2, given)


@checks(FUNCTION)
def rewards_stay(algo: Algo) -> None:
    """The rewards that come in are not changed, and the same rewards give the same advantages."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    first = algo.estimate_advantages(rewards, 4)
    expect(
        "raw_rewards after the call",
        rewards,
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
        given="rewards [1, 0, 0, 0], one group of 4",
        likely="A line such as `rewards -= ...` changes the tensor of the caller in place; make a new tensor.",
    )
    _usable(first, 4, 4, "rewards [1, 0, 0, 0], one group of 4")
    before, again = first.detach().double(), _advantages(algo, [1.0, 0.0, 0.0, 0.0], 4)
    if not torch.allclose(before, again, equal_nan=True):
        raise Mistake("advantages of the second call", "rewards [1, 0, 0, 0], one group of 4, twice",
                      show_value(before), show_value(again),
                      "The result is random, or remembers earlier calls; it must follow from the rewards.")  # fmt: skip


@checks(FUNCTION)
def finite_numbers(algo: Algo) -> None:
    """Every group gives finite advantages of a sensible size, also one whose rewards are all equal."""
    for right in (0, 4, 1, 2, 3):
        rewards = [1.0] * right + [0.0] * (4 - right)
        got = _advantages(algo, rewards, 4)
        given = f"rewards {show_value(rewards)}, one group of 4"
        if not got.isfinite().all():
            raise Mistake("advantages", given, "finite numbers", show_value(got),
                          "The result is NaN or infinite, from a division by 0: the spread of equal rewards is 0, and "
                          "so can their mean be.")  # fmt: skip
        if got.abs().max() > HUGE:
            raise Mistake("advantages", given, f"numbers between -{HUGE:g} and {HUGE:g}", show_value(got),
                          "A reward was divided by a spread of almost 0; one step with such advantages ruins the "
                          "policy.")  # fmt: skip


@checks(FUNCTION)
def own_group_alone(algo: Algo) -> None:
    """An advantage depends on the rewards of its own group alone, and a group is G rewards side by side."""
    first, second = [1.0, 0.0, 0.0], [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    alone = _advantages(algo, first, 3)
    for other in second:
        for rewards, ours in ((first + other, slice(0, 3)), (other + first, slice(3, 6))):
            got = _advantages(algo, rewards, 3)[ours]
            if torch.allclose(got, alone, rtol=1e-4, atol=1e-5, equal_nan=True):
                continue
            likely = ("Another group's rewards reach this one: take means and spreads of each row of [groups, G], and "
                      "not of the whole batch or of a column.")  # fmt: skip
            if _is_interleaved(algo):
                likely = "The groups are interleaved: reshape to (groups, G), not (G, groups)."
            raise Mistake("advantages of the group [1, 0, 0]", f"the group [1, 0, 0] in the batch {show_value(rewards)}"
                          ", groups of 3; expected is what it gets without the other group",
                          show_value(alone), show_value(got), likely)  # fmt: skip


def _is_interleaved(algo: Algo) -> bool:
    """Whether rewards 0, 2, 4 and 1, 3, 5 are taken as the groups of a batch of 2 x 3."""
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    got = _advantages(algo, rewards, 3)
    groups = [_advantages(algo, rewards[start::2], 3) for start in (0, 1)]
    in_place, as_rows = torch.stack(groups, dim=1).reshape(-1), torch.cat(groups)
    return any(torch.allclose(got, wrong, rtol=1e-4, atol=1e-5) for wrong in (in_place, as_rows))


@checks(FUNCTION)
def order_within_a_group(algo: Algo) -> None:
    """If the responses of a group change places, their advantages change places with them."""
    rewards = [1.0, 0.0, 0.0, 1.0]
    got = _advantages(algo, rewards, 4)
    for order in ([3, 2, 1, 0], [1, 0, 2, 3], [1, 3, 0, 2]):
        moved = _advantages(algo, [rewards[i] for i in order], 4)
        if not torch.allclose(moved, got[order], rtol=1e-4, atol=1e-5, equal_nan=True):
            likely = ("Which response comes first is chance, so an advantage may not depend on the place: look for a "
                      "sort that is not undone, a running mean, or one response that stands for all.")  # fmt: skip
            raise Mistake("advantages", f"rewards {show_value([rewards[i] for i in order])}, one group of 4; the order "
                          f"{show_value(rewards)} gave {show_value(got)}",
                          show_value(got[order]), show_value(moved), likely)  # fmt: skip


@checks(FUNCTION)
def points_along_the_gradient(algo: Algo) -> None:
    """On average, the gradient of a prompt points along the true one."""
    groups = torch.tensor(list(itertools.product(range(3), repeat=GROUP_SIZE)))  # [81, 4], which responses
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    advantages = torch.stack([_advantages(algo, rewards[group].tolist(), GROUP_SIZE) for group in groups])  # [81, 4]
    if not advantages.isfinite().all():
        raise Mistake("advantages", "all groups of 4", "finite numbers", "NaN or infinite ones",
                      "A mean over all groups needs a number from each; see the check of finite numbers.")  # fmt: skip
    lengths = []
    for policy in POLICIES:
        p = torch.tensor(policy, dtype=torch.float64)
        scores = (torch.eye(3, dtype=torch.float64) - p)[groups]  # [81, 4, 3], gradients of the log-probabilities
        mean = (p[groups].prod(dim=1)[:, None] * (advantages[:, :, None] * scores).mean(dim=1)).sum(dim=0)  # [3]
        truth = p * (rewards - (p * rewards).sum())  # the gradient of sum p r with respect to the logits
        given = f"a policy with p = {show_value(policy)} for a right, a wrong and a malformed response, all groups of 4"
        length = mean.norm().item()
        lengths.append(length)
        if length < NOTHING:
            continue
        cosine = (mean @ truth).item() / (length * truth.norm().item())
        if not cosine > 0.99:
            raise Mistake("cosine between mean gradient and true gradient", given, "1.0 (at least 0.99)",
                          show_value(cosine), _why_not(advantages, groups))  # fmt: skip
    if not max(lengths) > NOTHING:
        raise Mistake("length of the mean gradient", "each of three policies, all groups of 4", "a number above 0",
                      show_value(max(lengths)), _why_zero(advantages))  # fmt: skip


def _why_not(advantages: Tensor, groups: Tensor) -> str:
    right = groups == 0
    mixed = right.any(dim=1) & ~right.all(dim=1)
    if (advantages[mixed][right[mixed]].min() >= 0) and (advantages[mixed][~right[mixed]].min() >= 0):
        return ("Wrong responses get a positive advantage too, and where they are rare a larger one than right ones: a "
                "distance has lost its sign (abs, or a square).")  # fmt: skip
    if (advantages[mixed][right[mixed]].max() <= 0) and (advantages[mixed][~right[mixed]].min() >= 0):
        return "The sign is wrong: a response that is better than its group has a positive advantage."
    return (
        "The advantages favour wrong responses, on average: what is subtracted contains the response's own reward, and "
        "too much of it."
    )


def _why_zero(advantages: Tensor) -> str:
    if not advantages.abs().max() > 0:
        return "Every advantage is 0, so nothing is ever learned."
    return (
        "What is subtracted contains the response's own reward as a whole (a sum where a mean is meant, for example), "
        "so on average it takes the gradient away."
    )
