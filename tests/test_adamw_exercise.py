"""The AdamW exercise against torch and the library's optimizer, and its rounding against statistics.

The reference is held to the same bits. Another right order of operations may differ in the last ones.
"""

import math

import pytest
import torch

from a5lib import optimizers
from a5lib.optimizers import STATE_PRECISIONS, AdamW, stochastic_round
from tests.conftest import IMPL

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def same(actual, expected, message):
    """The same bits, or for a student's code the same to rounding: some float32 digits, or two bfloat16 numbers."""
    tolerance = 0.0 if IMPL == "solutions" else {torch.float32: 1e-5, torch.bfloat16: 2**-7}[expected.dtype]
    assert actual.dtype == expected.dtype, message
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=message)


def sixteen_bits(shape, generator):
    """Drawn as hint 2 of the exercise says."""
    return torch.randint(0, 1 << 16, shape, dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_update_is_that_of_torch(impl, weight_decay):
    settings = SETTINGS | {"weight_decay": weight_decay}
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 5, generator=generator)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], **settings, foreach=False)
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 9):
        theirs.grad = torch.randn(weight.shape, generator=generator)
        before = theirs.grad.clone()
        impl.adamw_update(weight, theirs.grad, exp_avg, exp_avg_sq, step, **settings)
        assert torch.equal(theirs.grad, before), "the gradient was changed"
        optimizer.step()
        same(weight, theirs.detach(), f"weight after step {step}")
    same(exp_avg, optimizer.state[theirs]["exp_avg"], "first moment")
    same(exp_avg_sq, optimizer.state[theirs]["exp_avg_sq"], "second moment")


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_that_of_the_library(impl, monkeypatch, precision, grad_dtype):
    if precision == "bf16_stochastic" and IMPL != "solutions":
        pytest.skip("other random bits are as good")
    # The library's bits come from a counter, the exercise's from a generator: here the library gets the exercise's.
    source = torch.Generator().manual_seed(0)
    monkeypatch.setattr(optimizers, "random_bits", lambda key, n, stream: sixteen_bits((n,), source))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 3, generator=generator).bfloat16()
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = AdamW([theirs], **SETTINGS, state_precision=precision)
    state = {}
    for step in range(1, 21):
        grad = torch.randn(weight.shape, generator=generator).bfloat16()
        theirs.grad = grad.clone()
        optimizer.step()
        impl.adamw_step(weight, grad.to(grad_dtype), state, precision, **SETTINGS)
        same(weight, theirs.detach(), f"weight after step {step}")
    for name, tensor in optimizer.state[theirs].items():
        if name != "step":
            same(state[name], tensor, name)
    assert state["step"] == 20


def test_stochastic_steps_are_those_of_the_library_on_average(impl):
    """Each with random bits of its own: after 50 steps of -0.001 the mean and the spread of 1 are the same."""
    n, settings = 20_000, {"lr": 1e-3}
    weight, grad, state = torch.ones(n).bfloat16(), torch.ones(n).bfloat16(), {}
    theirs = torch.nn.Parameter(weight.clone())
    theirs.grad = grad.clone()
    optimizer = AdamW([theirs], state_precision="bf16_stochastic", **settings)
    for _ in range(50):
        impl.adamw_step(weight, grad, state, "bf16_stochastic", **settings)
        optimizer.step()
    mine, other = weight.double(), theirs.detach().double()
    # A step goes down by 2^-8 with probability 0.256: a variance of 0.19 * 2^-16, 50 times.
    spread = 2**-8 * math.sqrt(50 * 0.256 * 0.744)
    for values in (mine, other):
        assert values.mean().item() == pytest.approx(0.95, abs=5 * spread / math.sqrt(n))
        assert values.std().item() == pytest.approx(spread, rel=0.05)
    assert not torch.equal(mine, other)


def test_stochastic_rounding_has_the_right_mean_and_two_values(impl):
    """x = 1 + f/128 for a fraction f: up with probability f; 4 standard errors of the share are allowed."""
    n = 40_000
    generator = torch.Generator().manual_seed(0)
    for fraction in (0.1, 0.5, 0.9):
        for sign in (1.0, -1.0):
            values = torch.full((n,), sign * (1 + fraction / 128))
            rounded = impl.round_stochastically(values, generator)
            assert rounded.dtype == torch.bfloat16
            assert set(rounded.abs().tolist()) == {1.0, 1.0 + 1 / 128}
            share = (rounded.abs() > 1).double().mean().item()
            assert share == pytest.approx(fraction, abs=4 * math.sqrt(fraction * (1 - fraction) / n))


def test_rounding_is_that_of_the_library_with_the_same_bits(impl):
    if IMPL != "solutions":
        pytest.skip("other random bits are as good")
    values = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    expected = stochastic_round(values, sixteen_bits((50, 40), torch.Generator().manual_seed(1)))
    assert torch.equal(impl.round_stochastically(values, torch.Generator().manual_seed(1)), expected)


def test_values_that_bfloat16_holds_do_not_change(impl):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    values[0] = 0.0
    assert torch.equal(impl.round_stochastically(values, torch.Generator().manual_seed(1)), values.bfloat16())
    column = values.reshape(-1, 2)[:, 1] + 1e-4  # not contiguous
    assert impl.round_stochastically(column, torch.Generator().manual_seed(1)).shape == (500,)


def test_bad_arguments(impl):
    half, zero = torch.ones(2).bfloat16(), torch.zeros(2)
    with pytest.raises(ValueError, match="widen it"):
        impl.adamw_update(half, zero, zero, zero, 1, 1e-3)
    with pytest.raises(ValueError, match="counted from 1"):
        impl.adamw_update(zero, zero, zero, zero, 0, 1e-3)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        impl.round_stochastically(half, torch.Generator())
    with pytest.raises(ValueError, match="expected one of fp32"):
        impl.adamw_step(half, half, {}, "fp16", 1e-3)
    with pytest.raises(ValueError, match=r"expected torch\.bfloat16"):
        impl.adamw_step(zero, zero, {}, "bf16", 1e-3)
