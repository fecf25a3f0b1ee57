"""Advantages of groups: which axis, which standard deviation, exact zeros."""

import pytest
import torch

from a5lib.config import ALGORITHMS
from tests import fp64_reference


@pytest.mark.parametrize("normalizer", ["std", "none", "mean"])
def test_A01_zero_variance_groups(impl, normalizer):
    rewards = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    advantages, metadata = impl.compute_group_normalized_rewards(rewards, 4, advantage_normalizer=normalizer)
    assert advantages.tolist() == [0.0] * 8
    assert metadata["zero_variance_groups"] == 1.0


@pytest.mark.parametrize("normalizer", ["std", "none", "mean"])
def test_A01_equal_rewards_leave_no_rounding_noise(impl, normalizer):
    # In float32 the mean of three 0.9 is not 0.9; divided by eps = 1e-6 the difference is an advantage of 0.06.
    rewards = torch.tensor([0.9, 0.9, 0.9, 1.0, 0.0, 0.0, 0.1, 0.1, 0.1])
    groups = rewards.reshape(3, 3)
    assert (groups - groups.mean(dim=1, keepdim=True))[0].abs().max() > 0, "the input no longer shows the fault"
    advantages, metadata = impl.compute_group_normalized_rewards(rewards, 3, advantage_normalizer=normalizer)
    assert advantages[:3].tolist() == [0.0] * 3, "equal rewards give exactly 0, not rounding noise over eps"
    assert advantages[6:].tolist() == [0.0] * 3
    assert metadata["zero_variance_groups"] == pytest.approx(2 / 3)
    assert advantages[3] > 0 > advantages[4]


def test_A03_group_of_one(impl):
    one = torch.tensor([1.0])
    for normalizer in ("std", "mean"):
        with pytest.raises(ValueError, match="group_size 1"):
            impl.compute_group_normalized_rewards(one, 1, advantage_normalizer=normalizer)
    with pytest.raises(ValueError, match="group_size 1"):
        impl.compute_group_normalized_rewards(one, 1, baseline="none", advantage_normalizer="std")
    assert impl.compute_group_normalized_rewards(one, 1, "mean", advantage_normalizer="none")[0].tolist() == [0.0]
    assert impl.compute_group_normalized_rewards(one, 1, "none", advantage_normalizer="none")[0].tolist() == [1.0]
    ratio, _ = impl.compute_group_normalized_rewards(one, 1, "none", advantage_normalizer="mean")
    assert ratio.item() == pytest.approx(1.0, abs=2e-6)


def test_A04_sample_standard_deviation(impl):
    advantages, _ = impl.compute_group_normalized_rewards(torch.tensor([1.0, 0.0]), 2)
    assert advantages.tolist() == pytest.approx([0.70711, -0.70711], abs=1e-5), "did you divide by G instead of G - 1?"
    advantages, _ = impl.compute_group_normalized_rewards(torch.tensor([1.0, 0, 0, 0]), 4)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_A06_statistics_within_groups(impl):
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    for prompts in (None, ["a", "a", "b", "b"], ["a", "a", "a", "a"]):
        advantages, _ = impl.compute_group_normalized_rewards(
            rewards, 2, advantage_normalizer="none", prompt_ids=prompts
        )
        assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0], "did you average over the batch or along the wrong axis?"


def test_A06_interleaved_groups_are_refused(impl):
    with pytest.raises(ValueError, match="Group 0 mixes prompts"):
        impl.compute_group_normalized_rewards(torch.tensor([1.0, 0, 1, 1]), 2, prompt_ids=["a", "b", "a", "b"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_presets_against_the_formula(impl, name):
    preset = ALGORITHMS[name]
    rewards = [1.0, 0.0, 0.0, 0.0, 0.2, 0.9, 0.9, 0.4, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    advantages, metadata = impl.compute_group_normalized_rewards(
        torch.tensor(rewards), 4, preset.baseline, 1e-6, preset.advantage_normalizer
    )
    expected = fp64_reference.advantages(rewards, 4, preset.baseline, preset.advantage_normalizer)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert advantages.dtype == torch.float32
    assert metadata["zero_variance_groups"] == 0.5


def test_presets_by_hand(impl):
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    by_hand = {
        ("mean", "std"): [1.5, -0.5, -0.5, -0.5],  # grpo: sigma = 0.5
        ("mean", "none"): [0.75, -0.25, -0.25, -0.25],  # dr_grpo
        ("mean", "mean"): [3.0, -1.0, -1.0, -1.0],  # maxrl: mu = 0.25
        ("none", "none"): [1.0, 0.0, 0.0, 0.0],  # rft
        ("none", "std"): [2.0, 0.0, 0.0, 0.0],
        ("none", "mean"): [4.0, 0.0, 0.0, 0.0],
    }
    for (baseline, normalizer), expected in by_hand.items():
        advantages, _ = impl.compute_group_normalized_rewards(
            rewards.unsqueeze(1), 4, baseline, advantage_normalizer=normalizer
        )
        assert advantages.tolist() == pytest.approx(expected, rel=2e-5), (baseline, normalizer)
        assert advantages.shape == (4,)


def test_advantage_eps_is_used(impl):
    advantages, _ = impl.compute_group_normalized_rewards(torch.tensor([1.0, 0.0]), 2, advantage_eps=1.0)
    assert advantages.tolist() == pytest.approx([0.5 / (0.5**0.5 + 1), -0.5 / (0.5**0.5 + 1)])
    advantages, _ = impl.compute_group_normalized_rewards(
        torch.tensor([1.0, 0.0]), 2, advantage_eps=1.0, advantage_normalizer="mean"
    )
    assert advantages.tolist() == pytest.approx([1 / 3, -1 / 3])  # mu = .5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "do not divide"),
        ((0,), "do not divide"),
        ((2, "median"), "baseline 'median'"),
        ((2, "mean", 1e-6, "var"), "advantage_normalizer 'var'"),
    ],
)
def test_bad_arguments(impl, arguments, words):
    with pytest.raises(ValueError, match=words):
        impl.compute_group_normalized_rewards(torch.ones(4), *arguments)
