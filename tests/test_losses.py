"""Per-token losses and their aggregation: values by hand, gradients against float64 loops, known faults."""

import math

import pytest
import torch

from a5lib.config import ALGORITHMS, TrainConfig, resolve
from a5lib.errors import UserError
from tests import fp64_reference

METHODS = ["none", "noclip", "grpo", "gspo", "cispo"]
WITH_RATIO = METHODS[1:]
ROW_LENGTHS = [4, 1, 7, 3, 0, 7]


def ragged(seed=0, dtype=torch.float32):
    """Six rows of 0 to 7 response tokens after a prompt position; half of the ratios lie outside the clip range."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(ROW_LENGTHS), 9
    new = (-3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)).to(dtype)
    old = new + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    positions = torch.arange(width)
    mask = (positions >= 1) & (positions <= torch.tensor(ROW_LENGTHS).unsqueeze(1))
    advantages = torch.tensor([1.5, -0.5, 0.0, 2.0, 1.0, -1.0], dtype=dtype)
    return advantages, new.requires_grad_(), old, mask


def test_L01_gspo_ratio_leaves_padding_out(impl):
    for z in (math.log(0.5), -6.0):
        new = torch.tensor([[math.log(2), z, math.log(4)]], requires_grad=True)
        mask = torch.tensor([[1, 0, 1]])
        loss, metadata = impl.compute_policy_gradient_loss(torch.ones(1), new, "gspo", torch.zeros(1, 3), 1e6, mask)
        # mean log-ratio (ln 2 + ln 4) / 2 = ln 8 / 2, so the ratio is the square root of 8
        assert metadata["ratio"][0, 0].item() == pytest.approx(2.828427, abs=1e-5), "did padding enter the mean?"
        impl.aggregate_loss_across_microbatch(loss, mask).backward()
        assert new.grad[0, 1].item() == 0.0
        # loss = -s, and each of the two tokens has half of d s / d(mean) = s
        assert new.grad[0, [0, 2]].tolist() == pytest.approx([-1.414214, -1.414214], abs=1e-5), (
            "the gradient flows through the sequence ratio"
        )


def test_L02_gspo_shapes_and_empty_row(impl):
    row = torch.tensor([1.0, 2.0, 3.0]).log().unsqueeze(1)
    new = (row + torch.tensor([[-0.3, 0.1, 0.2]])).requires_grad_()  # the means stay ln 1, ln 2, ln 3
    mask = torch.ones(3, 3, dtype=torch.bool)
    loss, _ = impl.compute_policy_gradient_loss(torch.ones(3), new, "gspo", torch.zeros(3, 3), 1e6, mask)
    expected = torch.tensor([-1.0, -2.0, -3.0]).unsqueeze(1).expand(3, 3)
    torch.testing.assert_close(loss, expected, msg="did a (B,) ratio broadcast along the tokens instead of the rows?")
    mask[2] = False
    loss, _ = impl.compute_policy_gradient_loss(torch.ones(3), new, "gspo", torch.zeros(3, 3), 1e6, mask)
    assert loss.isfinite().all()
    total = impl.aggregate_loss_across_microbatch(loss, mask)
    assert total.item() == pytest.approx(-1.0), "(-1 - 2 + 0) / 3: a row without tokens counts as 0"
    total.backward()
    assert new.grad.isfinite().all()
    assert new.grad[2].tolist() == [0.0] * 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("new", "old"), [([0.0, 0.0], [0.0, -200.0]), ([-1.0, -math.inf], [-0.9, -1.0])])
def test_L03_masked_infinities_do_not_leak(impl, method, new, old):
    def run(new, old):
        log_probs = torch.tensor([new], requires_grad=True)
        mask = torch.tensor([[1, 0]])
        loss, _ = impl.compute_policy_gradient_loss(torch.ones(1), log_probs, method, torch.tensor([old]), 0.2, mask)
        assert loss.isfinite().all(), "did you mask after exp? inf * 0 is NaN"
        impl.aggregate_loss_across_microbatch(loss, mask).backward()
        return loss[0, 0].item(), log_probs.grad[0].tolist()

    loss, gradient = run(new, old)
    assert (loss, gradient) == run([new[0], new[0]], [old[0], new[0]]), "the clean batch gives other values"
    assert all(math.isfinite(g) for g in gradient)
    assert gradient[1] == 0.0


@pytest.mark.parametrize("method", WITH_RATIO)
def test_unmasked_overflow_is_clamped(impl, method):
    new = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0]])
    loss, metadata = impl.compute_policy_gradient_loss(torch.ones(1), new, method, old, 0.2, torch.ones(1, 2))
    assert loss.isfinite().all()
    assert metadata["ratio"].max().item() == pytest.approx(math.exp(20), rel=1e-5)
    loss.sum().backward()
    assert new.grad.isfinite().all()


def test_L05_clip_direction_and_fraction(impl):
    new = torch.tensor([[2.0, 0.5]]).log()
    by_hand = {1.0: ([-1.1, -0.5], [True, False], 1.0), -1.0: ([2.0, 0.9], [False, True], 0.0)}
    for advantage, (losses, flags, fraction_of_first) in by_hand.items():
        arguments = torch.tensor([advantage]), new, "grpo", torch.zeros(1, 2), 0.1
        loss, metadata = impl.compute_policy_gradient_loss(*arguments, torch.tensor([[1, 1]]))
        assert loss[0].tolist() == pytest.approx(losses, abs=1e-6)
        assert metadata["clipped"][0].tolist() == flags, "did the flag follow the sign of the advantage?"
        assert metadata["clip_fraction"].item() == 0.5
        _, metadata = impl.compute_policy_gradient_loss(*arguments, torch.tensor([[1, 0]]))
        assert metadata["clip_fraction"].item() == fraction_of_first, "only response tokens count"


def test_cispo_by_hand(impl):
    ratios = torch.tensor([[2.0, 0.5], [2.0, 0.5], [2.0, 0.5]])
    new = torch.full((3, 2), -1.0, requires_grad=True)
    advantages = torch.tensor([[1.0], [-2.0], [0.0]])
    loss, metadata = impl.compute_policy_gradient_loss(advantages, new, "cispo", new.detach() - ratios.log(), 0.2)
    # weights min(2, 1.2) = 1.2 and .5, constant; loss = -weight * A * (-1)
    expected = torch.tensor([[1.2, 0.5], [-2.4, -1.0], [0.0, 0.0]])
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -expected, msg="the clipped weight is a constant without gradient")
    assert metadata["clipped"].tolist() == [[True, False], [True, False], [False, False]]


def test_L06_on_policy_first_step(impl):
    new = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask = torch.ones(2, 2)
    for method in WITH_RATIO:
        new.grad = None
        loss, metadata = impl.compute_policy_gradient_loss(
            torch.tensor([1.0, -1.0]), new, method, new.detach(), 0.2, mask
        )
        assert metadata["ratio"].unique().tolist() == [1.0]
        assert metadata["clip_fraction"].item() == 0.0
        total = impl.aggregate_loss_across_microbatch(loss, mask)
        if method != "cispo":  # its loss carries the log-probabilities, which do not cancel
            assert total.item() == pytest.approx(0.0, abs=1e-7)
        total.backward()
        # every token has weight A / (2 rows * 2 tokens): a loss of 0 is no sign of a broken run
        assert new.grad.tolist() == [[-0.25, -0.25], [0.25, 0.25]], method


def test_L07_aggregation_on_ragged_rows(impl):
    losses = torch.tensor([[1.0, 1, 1, 1], [3, 99, 99, 99]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert impl.aggregate_loss_across_microbatch(losses, mask).item() == 2.0
    assert impl.aggregate_loss_across_microbatch(losses, mask, "token").item() == pytest.approx(1.4)
    assert impl.aggregate_loss_across_microbatch(losses, mask, "constant", 8).item() == 0.875
    for constant in (None, 0):
        with pytest.raises(ValueError, match="normalization_constant"):
            impl.aggregate_loss_across_microbatch(losses, mask, "constant", constant)
    with pytest.raises(ValueError, match="'mean'"):
        impl.aggregate_loss_across_microbatch(losses, mask, "mean")


@pytest.mark.parametrize("normalization", ["sequence", "constant", "token"])
def test_aggregation_ignores_what_the_mask_excludes(impl, normalization):
    losses = torch.tensor([[1.0, math.nan], [math.inf, -math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    total = impl.aggregate_loss_across_microbatch(losses, mask, normalization, 2)
    assert total.item() == {"sequence": 0.5, "constant": 0.5, "token": 1.0}[normalization]
    total.backward()
    assert losses.grad.flatten()[1:].tolist() == [0.0] * 3


def test_L12_missing_arguments(impl):
    new, old, mask = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    for method in WITH_RATIO:
        with pytest.raises(ValueError, match="old_log_probs"):
            impl.compute_policy_gradient_loss(torch.ones(2), new, method, None, 0.2, mask)
    for method in ("grpo", "gspo", "cispo"):
        with pytest.raises(ValueError, match="cliprange"):
            impl.compute_policy_gradient_loss(torch.ones(2), new, method, old, None, mask)
    with pytest.raises(ValueError, match="response_mask"):
        impl.compute_policy_gradient_loss(torch.ones(2), new, "gspo", old, 0.2)
    with pytest.raises(ValueError, match="'maxr1'"):
        impl.compute_policy_gradient_loss(torch.ones(2), new, "maxr1", old, 0.2, mask)


def test_L12_the_preset_maxrl_is_maxrl():
    preset = resolve(TrainConfig(algorithm="maxrl")).preset
    assert (preset.baseline, preset.advantage_normalizer, preset.loss_normalization) == ("mean", "mean", "constant")
    with pytest.raises(UserError, match="'maxrl'"):
        resolve(TrainConfig(algorithm="maxr1"))


@pytest.mark.parametrize(
    ("advantages", "old", "mask", "words"),
    [
        (torch.ones(3), None, None, "3 values for 2 rows"),
        (torch.ones(2, 3), None, None, "6 values for 2 rows"),
        (torch.ones(2), torch.zeros(2, 4), None, "old_log_probs has shape"),
        (torch.ones(2), torch.zeros(3), None, "old_log_probs has shape"),
        (torch.ones(2), torch.zeros(2, 3), torch.ones(3), "response_mask has shape"),
    ],
)
def test_shapes_that_would_broadcast_silently(impl, advantages, old, mask, words):
    method = "none" if old is None else "noclip"
    with pytest.raises(ValueError, match=words):
        impl.compute_policy_gradient_loss(advantages, torch.zeros(2, 3), method, old, None, mask)


def test_without_a_mask_every_position_counts(impl):
    advantages, new, old, _ = ragged()
    everywhere = torch.ones_like(new)
    for method in ("none", "noclip", "grpo", "cispo"):
        loss, metadata = impl.compute_policy_gradient_loss(advantages.unsqueeze(1), new, method, old, 0.2)
        expected, expected_metadata = impl.compute_policy_gradient_loss(advantages, new, method, old, 0.2, everywhere)
        assert torch.equal(loss, expected)
        assert metadata["clip_fraction"] == expected_metadata["clip_fraction"]


def test_no_gradient_to_the_old_policy(impl):
    advantages, new, old, mask = ragged()
    old.requires_grad_()
    for method in WITH_RATIO:
        loss, metadata = impl.compute_policy_gradient_loss(advantages, new, method, old, 0.2, mask)
        impl.aggregate_loss_across_microbatch(loss, mask).backward()
        assert old.grad is None
        assert not metadata["ratio"].requires_grad


def test_ratios_in_float32_for_bf16_inputs(impl):
    new, old = torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.03125]], dtype=torch.bfloat16)
    loss, metadata = impl.compute_policy_gradient_loss(torch.ones(1, dtype=torch.bfloat16), new, "noclip", old)
    assert loss.dtype == metadata["ratio"].dtype == torch.float32
    assert metadata["ratio"].item() == pytest.approx(math.exp(0.03125), rel=1e-6), "bf16 would give 1.03125"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_presets_against_float64_loops(impl, name, dtype):
    preset = ALGORITHMS[name]
    advantages, new, old, mask = ragged(dtype=dtype)
    method, eps, normalization = preset.importance_reweighting_method, preset.cliprange, preset.loss_normalization
    loss, metadata = impl.compute_policy_gradient_loss(advantages, new, method, old, eps, mask)
    total = impl.aggregate_loss_across_microbatch(loss, mask, normalization, 54)
    total.backward()

    exact = new.detach().double().requires_grad_()
    expected = fp64_reference.batch_loss(
        exact, old.double().tolist(), mask.tolist(), advantages.tolist(), method, eps, normalization, 54
    )
    expected.backward()
    tolerance = dict(rtol=2e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(total.double(), expected, **tolerance)
    torch.testing.assert_close(new.grad.double(), exact.grad, **tolerance)
    assert loss.dtype == dtype
    if eps is not None:
        assert 0 < metadata["clip_fraction"].item() < 1, "the batch must have tokens on both sides of the clip range"
