"""The estimator's checks accept every fair estimator: those of the presets, and others that people use."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from a5lib.course.checking import run_checks
from a5lib.course.exercises import has_reference, load_algo

pytestmark = pytest.mark.skipif(not has_reference(), reason="solutions/ is not here")


def by_group(function):
    """An estimator from a function of the groups, [groups, G]."""
    return lambda rewards, size: function(rewards.float().reshape(-1, size)).reshape(-1)


def centred(groups):
    return groups - groups.mean(dim=1, keepdim=True)


def best_of_the_others(groups):
    size = groups.shape[1]
    return torch.stack([groups[:, [j for j in range(size) if j != i]].amax(dim=1) for i in range(size)], dim=1)


def pass_at_2(groups):
    """A right response counts as far as a pair with it would have failed without it."""
    size = groups.shape[1]
    wrong = (groups == 0).sum(dim=1, keepdim=True)
    return groups * wrong / (size - 1)


FAIR = {
    "raw rewards": lambda g: g,
    "constant baseline": lambda g: g - 0.5,
    "mean": centred,
    "standard deviation": lambda g: centred(g) / (g.std(dim=1, keepdim=True) + 1e-6),
    "divided by the mean": lambda g: centred(g) / (g.mean(dim=1, keepdim=True) + 1e-6),
    "median": lambda g: g - g.quantile(0.5, dim=1, keepdim=True),
    "only what is better": lambda g: centred(g).clamp(min=0),
    "signs": lambda g: centred(g).sign(),
    "ranks": lambda g: (g[:, :, None] > g[:, None, :]).float().sum(2) - (g[:, :, None] < g[:, None, :]).float().sum(2),
    "softmax of rewards": lambda g: g.softmax(dim=1) - 1 / g.shape[1],
    "best of the others": lambda g: g - best_of_the_others(g),
    "sum of the others": lambda g: g - (g.sum(dim=1, keepdim=True) - g),
    # 0 for a right response and -1 for a wrong one, if there is a right one: it learns from wrong responses only
    "best of the group": lambda g: g - g.amax(dim=1, keepdim=True),
    "worst of the group": lambda g: g - g.amin(dim=1, keepdim=True),
    "pass at 2": pass_at_2,
    "float64": lambda g: centred(g).double(),
}


@pytest.mark.parametrize("name", FAIR)
def test_a_fair_estimator_passes(name):
    functions = dataclasses.replace(load_algo("solutions"), estimate_advantages=by_group(FAIR[name]))
    assert [r.words for r in run_checks("estimator", functions) if r.status != "passed"] == []


def test_a_run_takes_an_estimator_in_place_of_the_advantages():
    """As notebook 12 does it: a copy of the functions with another one in its place."""
    functions = load_algo("solutions")
    other = dataclasses.replace(functions, compute_group_normalized_rewards=lambda *_: "mine")
    assert other.compute_group_normalized_rewards(None) == "mine"
    assert other.accumulate_gradients.keywords["algo"] is other, "exercises would still call the replaced function"
