"""The mismatch of two engines' log-probabilities, against sums by hand."""

import math

import pytest
import torch

from a5lib.rollouts.mismatch import MismatchWatch, mismatch, truncated_importance_weights

MASK = torch.tensor([[False, True, True], [True, False, False]])
ENGINE = torch.tensor([[9.0, -1.0, -2.0], [-0.5, 0.0, 9.0]])
TRAINER = torch.tensor([[-9.0, -1.0, -2.0 + math.log(2)], [-0.5 - math.log(4), 0.0, -9.0]])


def test_mean_max_and_effective_sample_size_by_hand():
    """Three tokens with differences 0, log 2 and -log 4, so weights 1, 2 and 1/4."""
    values = mismatch(ENGINE, TRAINER, MASK)
    assert values["mismatch_mean"] == pytest.approx(math.log(8) / 3)
    assert values["mismatch_max"] == pytest.approx(math.log(4))
    assert values["mismatch_ess"] == pytest.approx(3.25**2 / (1 + 4 + 1 / 16) / 3)
    assert mismatch(ENGINE + 0.01, TRAINER, MASK)["mismatch_capped"] == 0.0
    assert mismatch(ENGINE - 0.01, TRAINER, MASK)["mismatch_capped"] == pytest.approx(1 / 3)


def test_equal_engines_and_empty_batches():
    agree = {"mismatch_mean": 0.0, "mismatch_max": 0.0, "mismatch_ess": 1.0, "mismatch_capped": 0.0}
    assert mismatch(ENGINE, ENGINE, MASK) == agree
    assert mismatch(ENGINE, TRAINER, torch.zeros_like(MASK)) == {}, "nothing was compared"


def test_masked_positions_count_for_nothing_even_where_they_are_not_finite():
    broken = torch.where(MASK, TRAINER, torch.nan)
    assert mismatch(ENGINE, broken, MASK) == mismatch(ENGINE, TRAINER, MASK)
    weights = truncated_importance_weights(ENGINE, broken, MASK)
    assert weights.isfinite().all()


def test_one_token_that_is_far_off_shows_in_the_effective_sample_size():
    engine = torch.full((1, 100), -1.0)
    trainer = engine.clone()
    trainer[0, 7] += 500.0  # clamped, so that exp does not overflow
    values = mismatch(engine, trainer, torch.ones(1, 100, dtype=torch.bool))
    assert values["mismatch_max"] == 500
    assert values["mismatch_ess"] == pytest.approx(0.01, abs=1e-4)


def test_truncated_weights_are_capped_and_carry_no_gradient():
    trainer = TRAINER.clone().requires_grad_()
    weights = truncated_importance_weights(ENGINE, trainer, MASK, cap=1.5)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0, 1.5], [0.25, 1.0, 1.0]]))
    assert not weights.requires_grad


def test_a_jump_is_measured_against_what_is_usual():
    watch = MismatchWatch(torch.bfloat16)
    assert watch.jump(0.15) is None, "rounding in bfloat16 is no fault"
    assert "differ by 0.8 nats a token in the mean, more than 5 times what is usual here (0.15)" in watch.jump(0.8)
    for mean in (0.03, 0.03, 0.03):
        assert watch.jump(mean) is None
    assert watch.jump(0.16) is not None, "the median of the run is 0.03"
    assert MismatchWatch(torch.bfloat16).jump(0.156) is not None, "the first batch is judged too"
    assert MismatchWatch(torch.float32).jump(0.0051) is not None and MismatchWatch(torch.float32).jump(5e-3) is None


def test_a_mismatch_that_is_always_high_is_said_once():
    watch = MismatchWatch(torch.float32)
    assert [watch.jump(0.1) is not None for _ in range(4)] == [True, False, False, False]
