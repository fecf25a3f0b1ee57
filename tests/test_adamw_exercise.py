"""The AdamW exercise against torch and the library's optimizer, and its rounding against statistics.

The reference is held to the same bits. Another right order of operations may differ in the last ones.
"""

import math

import pytest
import torch

from a5lib.optimizers import STATE_PRECISIONS, AdamW
from tests.conftest import IMPL

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def same(actual, expected, message):
    """The same bits, or for a student's code the same to rounding: some float32 digits, or two bfloat16 numbers."""
    tolerance = 0.0 if IMPL == "solutions" else {torch.float32: 1e-5, torch.bfloat16: 2**-7}[expected.dtype]
    assert actual.dtype == expected.dtype, message
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=message)


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
def test_a_step_is_that_of_the_library(impl, precision, grad_dtype):
    if precision == "bf16_stochastic" and IMPL != "solutions":
        pytest.skip("other random bits are as good")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 3, generator=generator).bfloat16()
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = AdamW([theirs], **SETTINGS, state_precision=precision, seed=0)
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
