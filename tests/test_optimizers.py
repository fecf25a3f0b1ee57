"""AdamW in four precisions, gradient clipping and warm-up: against torch, float64 and numbers worked out by hand."""

import math

import pytest
import torch

from a5lib import optimizers
from a5lib.errors import UserError
from a5lib.optimizers import STATE_PRECISIONS, AdamW, clip_grad_norm, stochastic_round, warmup_lr


def parameter(values, dtype=torch.float32):
    return torch.nn.Parameter(torch.as_tensor(values, dtype=torch.float32).to(dtype))


def take_steps(params, optimizer, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def adamw_float64(w, grads, lr, betas, eps, weight_decay):
    """Loshchilov and Hutter 2019, algorithm 2, written out in Python floats."""
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        w -= lr * weight_decay * w
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        w -= lr * (m / (1 - betas[0] ** t)) / (math.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w


# --- warm-up


def test_R02_warmup_continues_where_an_uninterrupted_run_would_be():
    whole = [warmup_lr(1e-5, 10, s) for s in range(1, 15)]
    assert whole[:10] == pytest.approx([1e-6 * s for s in range(1, 11)], rel=1e-12)
    assert whole[10:] == [1e-5] * 4
    saved_after = 4  # index 3, counted from 0
    resumed = [warmup_lr(1e-5, 10, s) for s in range(saved_after + 1, 15)]
    assert resumed[0] == pytest.approx(5e-6, rel=1e-12), "one step behind or restarted?"
    assert whole[:saved_after] + resumed == whole
    assert warmup_lr(1e-5, 0, 1) == 1e-5
    with pytest.raises(ValueError, match="counted from 1"):
        warmup_lr(1e-5, 10, 0)


# --- clipping


def test_O03_clip_over_two_dtypes_reports_the_norm_before_clipping():
    a, b = parameter([0.0]), parameter([0.0], torch.bfloat16)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)
    assert clip_grad_norm([a, b, parameter([1.0])], max_norm=1.0) == 5.0, "the norm after clipping, or one per tensor?"
    torch.testing.assert_close(a.grad, torch.tensor([0.6]), rtol=1e-7, atol=0)
    assert b.grad.dtype == torch.bfloat16
    assert b.grad.item() == torch.tensor(0.8).bfloat16().item()


def test_clip_leaves_a_small_gradient_and_no_gradient_alone():
    a = parameter([0.0, 0.0])
    assert clip_grad_norm([a], 1.0) == 0.0
    a.grad = torch.tensor([0.3, 0.4])
    assert clip_grad_norm([a], 1.0) == pytest.approx(0.5)
    assert torch.equal(a.grad, torch.tensor([0.3, 0.4])), "scaled up to the limit?"


def test_clip_takes_the_norm_of_bfloat16_gradients_in_float32():
    a = parameter(torch.zeros(4096), torch.bfloat16)
    a.grad = torch.full((4096,), 0.1).bfloat16()
    exact = a.grad.double().norm().item()
    assert clip_grad_norm([a], 1e9) == pytest.approx(exact, rel=1e-5), "a bfloat16 sum loses its small terms"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_O03_clip_refuses_a_bad_gradient_before_anything_changes(bad):
    module = torch.nn.Linear(2, 1)
    optimizer = AdamW(module.parameters(), lr=0.1)
    module.weight.grad, module.bias.grad = torch.full((1, 2), 5.0), torch.ones(1)
    optimizer.step()
    before = [t.clone() for t in (module.weight.data, module.bias.data, *optimizer.tensors().values())]
    module.bias.grad = torch.tensor([bad])
    with pytest.raises(FloatingPointError, match="parameter bias"):
        clip_grad_norm(module.named_parameters(), 1.0)
    with pytest.raises(FloatingPointError, match="parameter number 1"):
        clip_grad_norm(module.parameters(), 1.0)
    after = [module.weight.data, module.bias.data, *optimizer.tensors().values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(module.weight.grad, torch.full((1, 2), 5.0)), "the good gradient was scaled"


# --- stochastic rounding


def test_stochastic_rounding_goes_to_the_two_neighbours_with_the_right_frequency():
    # Above 1 the gap of bfloat16 is 2^-7. 1 + 2^-9 lies a quarter of the way up.
    for sign in (1.0, -1.0):
        values = torch.full((100_000,), sign * (1 + 2**-9))
        rounded = stochastic_round(values, torch.Generator().manual_seed(0))
        assert rounded.dtype == torch.bfloat16
        up = (rounded == sign * (1 + 2**-7)).double().mean().item()
        assert set(rounded.unique().tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert abs(up - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 100_000), f"share rounded away from zero is {up}"


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2**-133, 3.3895e38, math.inf, -math.inf, 1.0078125]).bfloat16()
    for seed in range(20):
        rounded = stochastic_round(values.float(), torch.Generator().manual_seed(seed))
        assert torch.equal(rounded.view(torch.int16), values.view(torch.int16)), "an exact value changed"
    all_bits = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN as some cards write it
    assert stochastic_round(torch.cat([all_bits, torch.tensor([math.nan])]), torch.Generator()).isnan().all()


def test_stochastic_rounding_takes_views_that_are_not_contiguous():
    values = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(stochastic_round(values, torch.Generator()).float(), values)


# --- the update


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_parameters_equal_torch_in_every_precision(precision, weight_decay):
    start = [torch.randn(37, 5, generator=torch.Generator().manual_seed(1)), torch.randn(11)]
    ours, theirs = [parameter(t.clone()) for t in start], [parameter(t.clone()) for t in start]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    mine = AdamW(ours, state_precision=precision, **settings)
    take_steps(ours, mine, 20)
    take_steps(theirs, torch.optim.AdamW(theirs, foreach=False, **settings), 20)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), f"differs by {(a - b).abs().max().item()}"
        assert mine.state[a]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
def test_updates_equal_a_float64_reference_within_the_rounding(precision):
    grads = [0.5, -0.25, 1.0, 0.125, 0.75]
    settings = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    p = parameter([0.3, -0.3], torch.bfloat16)
    optimizer = AdamW([p], state_precision=precision, **settings)
    for g in grads:
        p.grad = torch.tensor([g, -g]).bfloat16()
        optimizer.step()
    exact = adamw_float64(torch.tensor(0.3).bfloat16().item(), grads, **settings)
    gap = 2.0**-10  # between bfloat16 neighbours in [1/8, 1/4)
    allowed = {"fp32": gap / 2, "bf16_kahan": gap, "bf16": 3 * gap, "bf16_stochastic": 6 * gap}[precision]
    assert abs(p[0].item() - exact) <= allowed
    assert abs(p[1].item() + exact) <= allowed, "wrong for negative weights"


def test_blocks_change_nothing(monkeypatch):
    def run(precision):
        p = parameter(torch.linspace(-1, 1, 1000).reshape(8, 125), torch.bfloat16)
        take_steps([p], optimizer := AdamW([p], lr=1e-2, state_precision=precision), 3)
        return [p.data, *optimizer.tensors().values()]

    whole = {name: run(name) for name in ("fp32", "bf16", "bf16_kahan")}
    monkeypatch.setattr(optimizers, "BLOCK", 64)
    for name, expected in whole.items():
        assert all(torch.equal(a, b) for a, b in zip(run(name), expected, strict=True)), name


def test_a_transposed_parameter_is_updated_as_a_whole(monkeypatch):
    monkeypatch.setattr(optimizers, "BLOCK", 4)
    start = torch.arange(12.0).reshape(3, 4)
    a, b = torch.nn.Parameter(start.clone().T), parameter(start)
    take_a, take_b = AdamW([a], lr=0.1), AdamW([b], lr=0.1)
    a.grad, b.grad = torch.ones(4, 3), torch.ones(3, 4)
    take_a.step()
    take_b.step()
    assert torch.equal(a, b.T)


# Weight 1, gradient 1, learning rate 1e-5: every intended update is 1e-5, so 1000 steps should reach 0.99. Below 1 the
# gap between bfloat16 numbers is 2^-8 = 0.0039.
def realised(precision, count=1):
    p = parameter(torch.ones(count), torch.bfloat16)
    optimizer = AdamW([p], lr=1e-5, state_precision=precision)
    p.grad = torch.ones_like(p)
    for _ in range(1000):
        optimizer.step()
    return p, optimizer.state[p]


def test_O01_fp32_master_realises_the_whole_update():
    p, state = realised("fp32")
    assert state["master"].item() == pytest.approx(0.98999, abs=1e-5)
    assert p.item() == 0.98828125, "the bfloat16 weight is not the rounded master"
    assert (1 - state["master"].item()) / 0.01 == pytest.approx(1.0, abs=2e-3)


def test_O01_plain_bf16_loses_the_whole_update():
    p, state = realised("bf16")
    assert p.item() == 1.0
    assert {k: v.dtype for k, v in state.items()} == {
        "step": torch.int64,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_O01_stochastic_rounding_realises_the_update_on_average():
    p, _ = realised("bf16_stochastic", count=4096)
    mean = p.double().mean().item()
    assert mean == pytest.approx(0.990, abs=0.003)
    # One weight moves by 0 or by a gap; its variance is at most 0.01 * gap, so 4096 of them are known to 1e-4.
    assert (1 - mean) / 0.01 == pytest.approx(1.0, abs=0.05), "biased rounding"
    assert len(p.unique()) > 1, "all weights took the same random numbers"


def test_kahan_compensation_realises_most_of_the_update():
    p, state = realised("bf16_kahan")
    weight = p.item() + state["compensation"].item()
    assert p.item() < 1.0
    # The compensation is bfloat16 as well: near 2^-9 its own gap is 0.76 of an update.
    assert 0.75 < (1 - weight) / 0.01 < 1.05


def test_stochastic_second_moment_decays_where_nearest_rounding_is_stuck():
    def second_moment(precision):
        p = parameter(torch.ones(4096), torch.bfloat16)
        optimizer = AdamW([p], lr=1e-5, betas=(0.9, 0.999), state_precision=precision)
        p.grad = torch.full_like(p, 100.0)
        optimizer.step()
        p.grad = torch.zeros_like(p)
        for _ in range(200):
            optimizer.step()
        return optimizer.state[p]["exp_avg_sq"].double().mean().item()

    exact = 10.0 * 0.999**200
    assert second_moment("bf16") == 10.0, "a decay of 0.1 % is below half a gap"
    assert second_moment("bf16_stochastic") == pytest.approx(exact, rel=5e-3)


def test_rounding_depends_on_the_seed_alone():
    def run(seed):
        p = parameter(torch.ones(256), torch.bfloat16)
        take_steps([p], AdamW([p], lr=1e-3, state_precision="bf16_stochastic", seed=seed), 3)
        return p.data

    torch.manual_seed(1)
    first = run(0)
    torch.manual_seed(2)
    assert torch.equal(first, run(0)), "the global generator was used"
    assert not torch.equal(first, run(1))


# --- saving and loading


def flat_copy(optimizer):
    return {k: v.clone() for k, v in optimizer.tensors().items()}


@pytest.mark.parametrize("how", ["tensors", "state_dict"])
@pytest.mark.parametrize("precision", STATE_PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_and_three_after_loading_equal_six(precision, dtype, how):
    def fresh(weights=None):
        torch.manual_seed(3)
        start = weights or [torch.randn(6, 7).to(dtype), torch.randn(5).to(dtype), torch.randn(2).to(dtype)]
        params = [torch.nn.Parameter(w.clone()) for w in start]
        return params, AdamW(params, lr=1e-3, state_precision=precision, seed=len(start))

    params, whole = fresh()
    stepped = params[:2]  # the third never has a gradient
    take_steps(stepped, whole, 3, seed=0)
    saved_weights, saved_flat, saved_dict = [p.data.clone() for p in params], flat_copy(whole), whole.state_dict()
    saved_dict = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved_dict)
    take_steps(stepped, whole, 3, seed=1)

    again, resumed = fresh(saved_weights)
    take_steps(again, resumed, 1, seed=9)  # state that must vanish
    for p, w in zip(again, saved_weights, strict=True):
        p.data.copy_(w)
        p.grad = None
    if how == "tensors":
        resumed.load_tensors(saved_flat)
    else:
        resumed.param_groups[0]["lr"] = 7.0
        resumed.load_state_dict(saved_dict)
        assert resumed.param_groups[0]["lr"] == 1e-3
    loaded = resumed.tensors()
    assert loaded.keys() == saved_flat.keys()
    for name, value in saved_flat.items():
        assert loaded[name].dtype == value.dtype, f"{name} was cast to the parameter's dtype"
        assert torch.equal(loaded[name], value), name
        assert loaded[name].data_ptr() != value.data_ptr(), "loading must copy"
    take_steps(again[:2], resumed, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    assert all(torch.equal(v, resumed.tensors()[k]) for k, v in whole.tensors().items())


def test_O04_moments_of_bfloat16_parameters_stay_float32_after_loading():
    p = parameter(torch.linspace(-1, 1, 9), torch.bfloat16)
    optimizer = AdamW([p], lr=1e-3)
    take_steps([p], optimizer, 2)
    saved = flat_copy(optimizer)
    assert {k: v.dtype for k, v in saved.items()} == {
        "0.step": torch.int64,
        "0.exp_avg": torch.float32,
        "0.exp_avg_sq": torch.float32,
        "0.master": torch.float32,
    }
    other = AdamW([parameter(torch.zeros(9), torch.bfloat16)], lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(saved[k], v) and saved[k].dtype == v.dtype for k, v in other.tensors().items())


def test_loading_another_optimizers_state_says_what_differs_and_changes_nothing():
    p = parameter(torch.ones(3), torch.bfloat16)
    optimizer = AdamW([p], lr=1e-3, state_precision="bf16_stochastic")
    take_steps([p], optimizer, 1)
    before = flat_copy(optimizer)

    def changed(**entries):
        return {k: v for k, v in {**before, **entries}.items() if v is not None}

    cases = {
        "0.exp_avg is torch.float32": changed(**{"0.exp_avg": torch.zeros(3)}),
        r"0.exp_avg_sq is torch.bfloat16 \[4\]": changed(**{"0.exp_avg_sq": torch.zeros(4).bfloat16()}),
        "0.exp_avg is missing": changed(**{"0.exp_avg": None}),
        "has 0.master, which this run does not": changed(**{"0.master": torch.zeros(3)}),
        "has 1.step": changed(**{"1.step": torch.tensor(1)}),
        "lacks rounding.cpu": changed(**{"rounding.cpu": None}),
    }
    for message, tensors in cases.items():
        with pytest.raises(UserError, match=message):
            optimizer.load_tensors(tensors)
        assert all(torch.equal(v, before[k]) for k, v in optimizer.tensors().items()), message


def test_bad_arguments():
    with pytest.raises(ValueError, match="choose from fp32"):
        AdamW([parameter([1.0])], lr=1.0, state_precision="fp8")
    with pytest.raises(ValueError, match=r"Parameter 1 is torch\.float16"):
        AdamW([parameter([1.0]), parameter([1.0], torch.float16)], lr=1.0)
    with pytest.raises(ValueError, match="no closure"):
        AdamW([parameter([1.0])], lr=1.0).step(lambda: 0.0)
