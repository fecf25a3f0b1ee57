"""AdamW in four precisions, gradient clipping and warm-up: against torch, float64 and numbers worked out by hand."""

import functools
import math

import pytest
import torch

from a5lib import optimizers
from a5lib.errors import UserError
from a5lib.optimizers import (
    SECOND_MOMENT,
    STATE_PRECISIONS,
    WEIGHT,
    AdamW,
    adamw_numbers,
    adamw_update,
    clip_scale,
    gradient_norms,
    random_bits,
    rounding_key,
    stochastic_round,
    total_norm,
    warmup_lr,
)

CPU = torch.device("cpu")


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
    norm = total_norm(["a", "b"], gradient_norms([a.grad, b.grad]))
    assert norm == 5.0, "the norm after clipping, or one per tensor?"
    optimizer = AdamW([a, b], lr=0.1, betas=(0.0, 0.0))  # the first moment is the gradient as it was used
    optimizer.step(grad_scale=clip_scale(norm, 1.0))
    torch.testing.assert_close(optimizer.state[a]["exp_avg"], torch.tensor([0.6]), rtol=1e-7, atol=0)
    used = optimizer.state[b]["exp_avg"]  # the bfloat16 number next to 0.8 is 0.80078
    torch.testing.assert_close(used, torch.tensor([0.8]), rtol=1e-7, atol=0, msg="scaled in bfloat16")
    assert (a.grad.item(), b.grad.item()) == (3.0, 4.0), "the gradient was changed"


def test_a_small_gradient_and_no_gradient_are_not_scaled():
    assert total_norm([], gradient_norms([])) == 0.0
    assert total_norm(["a"], gradient_norms([torch.tensor([0.3, 0.4])])) == pytest.approx(0.5)
    assert [clip_scale(norm, 1.0) for norm in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0], "scaled up to the limit?"
    assert clip_scale(4.0, 1.0) == 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_many_elements_is_right(dtype):
    grad = torch.full((5_000, 6_000), 1e-3, dtype=dtype)
    exact = grad[0, 0].item() * math.sqrt(30_000_000)
    norms = gradient_norms([grad])
    assert norms.dtype == torch.float32
    assert norms.item() == pytest.approx(exact, rel=1e-6), "a long float32 sum loses its small terms"
    assert gradient_norms([grad[:2].T]).item() == pytest.approx(grad[0, 0].item() * math.sqrt(12_000), rel=1e-6)


def test_norms_of_float64_gradients_are_float64():
    norms = gradient_norms([torch.tensor([1e-200], dtype=torch.float64), torch.tensor([2.0]).bfloat16()])
    assert norms.dtype == torch.float64
    assert norms.tolist() == [1e-200, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_O03_a_bad_gradient_is_named(bad):
    grads = [torch.full((1, 2), 5.0), torch.tensor([1.0, bad]), torch.tensor([math.nan])]
    with pytest.raises(FloatingPointError, match=r"parameter bias is the first with norm (nan|inf)"):
        total_norm(["weight", "bias", "scale"], gradient_norms(grads))


# --- random bits


def bits_at(key, n, stream):
    """What the tests below draw; a weak hash takes its place in the last of them."""
    return random_bits(key, n, stream)


def key(seed=0, step=1, first=0):
    return rounding_key(seed, step, first, CPU)


def faults(draw, n=1 << 17):
    """Every test that the bits fail: name -> standard deviations from what is expected of uniform, independent bits.

    5 of them have a probability of 6e-7, and about 5000 numbers are looked at.
    """

    def signs(bits):  # [n, 16] of -1 and 1
        return ((bits[:, None] >> torch.arange(16)) & 1).float() * 2 - 1

    found = {}
    for stream in (WEIGHT, SECOND_MOMENT):
        # all 65536 values: chi-square has a mean of 65535 and a variance of twice that
        counts = torch.bincount(draw(key(), 1 << 20, stream), minlength=1 << 16).double()
        chi_square = ((counts - 16) ** 2 / 16).sum().item() if len(counts) == 1 << 16 else math.inf
        found[f"uniform, stream {stream}"] = abs(chi_square - 65535) / math.sqrt(2 * 65535)
    bits = draw(key(), n + 8192, WEIGHT)
    base = signs(bits[:n])
    found["balance of each bit"] = base.sum(0).abs().max().item() / n**0.5
    found["bits of one element"] = (base.T @ base).fill_diagonal_(0.0).abs().max().item() / n**0.5
    others = {f"elements {lag} apart": bits[lag : lag + n] for lag in (1, 2, 3, 4, 7, 16, 64, 1000, 4096, 8192)}
    others |= {
        "two streams": draw(key(), n, SECOND_MOMENT),
        "two steps": draw(key(step=2), n, WEIGHT),
        "ten steps apart": draw(key(step=11), n, WEIGHT),
        "two seeds": draw(key(seed=1), n, WEIGHT),
        "2^32 elements apart": draw(key(first=1 << 32), n, WEIGHT),
        "seed and step exchanged": draw(key(seed=1, step=0), n, WEIGHT),
    }
    for name, other in others.items():
        found[name] = (base.T @ signs(other)).abs().max().item() / n**0.5  # every bit against every bit
    return {name: deviations for name, deviations in found.items() if deviations > 5}


def test_bits_are_uniform_and_uncorrelated():
    assert faults(bits_at) == {}


def test_the_statistics_find_weak_hashes():
    def index(key, n):
        return torch.arange(n) + key[1]

    def lcg(key, n, stream):  # the lower bits of a linear congruential generator have short periods
        return ((index(key, n) * 1664525 + 1013904223 + key[0]) & 0xFFFF).int()

    def without_step(key, n, stream):
        return random_bits(torch.stack([torch.tensor(5), key[1]]), n, stream)

    def without_stream(key, n, stream):
        return random_bits(key, n, WEIGHT)

    def fifteen_bits(key, n, stream):
        return random_bits(key, n, stream) >> 1

    def without_upper_index(key, n, stream):
        return random_bits(torch.stack([key[0], key[1] & 0xFFFFFFFF]), n, stream)

    def without_mixing(key, n, stream):  # one product, upper half
        return ((index(key, n) ^ key[0]) * 0x7FEB352D >> 16 & 0xFFFF).int()

    assert {"uniform, stream 0", "elements 1 apart", "two streams", "two steps"} <= faults(lcg).keys()
    assert {"two steps", "two seeds", "ten steps apart"} <= faults(without_step).keys()
    assert faults(without_stream).keys() == {"two streams"}
    assert {"uniform, stream 0", "balance of each bit"} <= faults(fifteen_bits).keys()
    assert faults(without_upper_index).keys() == {"2^32 elements apart"}
    assert {"uniform, stream 0", "elements 1 apart", "two steps"} <= faults(without_mixing).keys()


@pytest.mark.parametrize("first", [0, 12345, (1 << 32) - 50, (1 << 40) + 3])
@pytest.mark.parametrize("stream", [WEIGHT, SECOND_MOMENT])
def test_bits_belong_to_the_element_and_not_to_the_piece(first, stream):
    whole = random_bits(key(first=first), 1000, stream)
    assert whole.dtype == torch.int32 and whole.min() >= 0 and whole.max() < 1 << 16
    for size in (1, 7, 64):
        pieces = [random_bits(key(first=first + at), min(size, 1000 - at), stream) for at in range(0, 1000, size)]
        assert torch.equal(torch.cat(pieces), whole), f"pieces of {size}"


def test_bits_are_those_of_the_hash_in_whole_numbers():
    def mix(x):  # lowbias32, unsigned
        x = (x ^ x >> 16) * 0x7FEB352D % (1 << 32)
        x = (x ^ x >> 15) * 0x846CA68B % (1 << 32)
        return x ^ x >> 16

    for seed, first in ((0, 0), (7, (1 << 32) - 2), (1 << 60, 5 << 32)):
        mixed = key(seed, 3, first)[0].item() % (1 << 64)
        for i in range(4):
            index = first + i
            bits = mix(mix(index % (1 << 32) ^ mixed % (1 << 32)) + (index >> 32) & 0xFFFFFFFF ^ mixed >> 32)
            drawn = [random_bits(key(seed, 3, first), 4, stream)[i].item() for stream in (WEIGHT, SECOND_MOMENT)]
            assert drawn == [bits % (1 << 16), bits >> 16]


def test_the_key_holds_every_bit_of_its_numbers():
    made = rounding_key(3, 4, (1 << 62) + 1, CPU)
    assert made.dtype == torch.int64 and made[1].item() == (1 << 62) + 1
    keys = {rounding_key(seed, step, 0, CPU)[0].item() for seed in range(30) for step in range(30)}
    assert len(keys) == 900, "(1, 23) and (12, 3) must not be the same"


# --- stochastic rounding


# A value's neighbours and how far it is from one to the other follow from its exponent: from 2^e on the gap is 2^(e-7).
@pytest.mark.parametrize("value", [1 + 2**-9, -(1 + 2**-9), 0.02, -0.02, 3.3e-8, 777.7, -1e-30, 2.7e30])
def test_stochastic_rounding_has_the_mean_and_the_variance_of_its_value(value):
    n = 100_000
    values = torch.full((n,), value)
    exact = values[0].item()
    gap = 2.0 ** (math.floor(math.log2(abs(exact))) - 7)
    low = math.floor(exact / gap) * gap
    up = (exact - low) / gap
    assert 0.05 < up < 0.95, "choose a value between two neighbours"
    for stream in (WEIGHT, SECOND_MOMENT):
        rounded = stochastic_round(values, random_bits(key(), n, stream))
        assert rounded.dtype == torch.bfloat16
        assert set(rounded.tolist()) == {low, low + gap}
        steps = (rounded.double() - low) / gap  # 0 or 1
        assert abs(steps.mean().item() - up) < 5 * math.sqrt(up * (1 - up) / n), f"share rounded up, stream {stream}"
        assert steps.var().item() == pytest.approx(up * (1 - up), rel=0.05)


def test_the_lowest_bits_count():
    """1 + k/2^23 goes up for k of the 65536 numbers that the bits can be."""
    every = torch.arange(1 << 16, dtype=torch.int32)
    for k in (0, 1, 2, 32768, 65535):
        rounded = stochastic_round(torch.full((1 << 16,), 1 + k * 2**-23), every)
        assert (rounded == 1 + 2**-7).sum().item() == k


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2**-133, 3.3895e38, math.inf, -math.inf, 1.0078125]).bfloat16()
    for noise in (0, 1, 65535):
        rounded = stochastic_round(values.float(), torch.full((9,), noise, dtype=torch.int32))
        assert torch.equal(rounded.view(torch.int16), values.view(torch.int16)), "an exact value changed"
        all_bits = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN as some cards write it
        nans = torch.cat([all_bits, torch.tensor([math.nan, -math.nan])])
        assert stochastic_round(nans, torch.full((4,), noise, dtype=torch.int32)).isnan().all()


def test_stochastic_rounding_takes_views_that_are_not_contiguous():
    values = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(stochastic_round(values, torch.full((3, 2), 65535, dtype=torch.int32)).float(), values)


def test_rounding_through_the_bits_is_that_of_torch():
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    ties = (torch.arange(-2000, 2000, dtype=torch.int32) << 16) + 0x8000
    values = torch.cat([bits, ties, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)]).view(torch.float32)
    ours, theirs = optimizers._nearest_bfloat16(values), values.bfloat16().float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


# --- the update


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_and_float64_parameters_equal_torch_in_every_precision(precision, weight_decay, dtype):
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(37, 5, generator=generator, dtype=dtype), torch.randn(11, generator=generator, dtype=dtype)]
    ours, theirs = [[torch.nn.Parameter(t.clone()) for t in start] for _ in range(2)]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    mine = AdamW(ours, state_precision=precision, **settings)
    take_steps(ours, mine, 20)
    take_steps(theirs, torch.optim.AdamW(theirs, foreach=False, **settings), 20)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), f"differs by {(a - b).abs().max().item()}"
        assert mine.state[a]["exp_avg"].dtype == mine.state[a]["exp_avg_sq"].dtype == dtype


def test_scaled_gradients_are_those_that_torch_gets_scaled():
    grad_scale = 0.37
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 30)) for _ in range(2))
    mine, other = AdamW([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ours.grad = torch.randn(30, generator=generator)
        theirs.grad = ours.grad * grad_scale
        mine.step(grad_scale=grad_scale)
        other.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(mine.state[ours]["exp_avg"], other.state[theirs]["exp_avg"])


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


SHAPES = ((8, 125), (37,), (), (3, 4, 5))


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_change_nothing(monkeypatch, precision, dtype):
    """Neither in the optimizer nor where flat pieces of many parameters are updated: every bit is the same."""
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    grads = [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(3)]

    def in_blocks(size):
        monkeypatch.setattr(optimizers, "BLOCK", size)
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer = AdamW(params, state_precision=precision, seed=5, **settings)
        for each in grads:
            for p, grad in zip(params, each, strict=True):
                p.grad = grad.clone()
            optimizer.step(grad_scale=0.3)
        states = [optimizer.state[p] for p in params]
        flat = {name: torch.cat([state[name].reshape(-1) for state in states]) for name in states[0] if name != "step"}
        return flat | {"weight": torch.cat([p.detach().reshape(-1) for p in params])}

    def in_flat_pieces(size):
        def flat(tensors):
            return torch.cat([t.reshape(-1) for t in tensors])

        whole, names = {"weight": flat(start)}, expected.keys() - {"weight"}
        whole |= {name: torch.zeros(len(whole["weight"]), dtype=expected[name].dtype) for name in names}
        if "master" in names:
            whole["master"] = whole["weight"].float()
        for step, each in enumerate(grads, start=1):
            arguments = (settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"], step, 0.3, CPU)
            for at in range(0, len(whole["weight"]), size):
                piece = {name: t[at : at + size] for name, t in whole.items()}
                adamw_update(
                    piece.pop("weight"), flat(each)[at : at + size], piece, adamw_numbers(*arguments),
                    betas=settings["betas"], eps=settings["eps"], state_precision=precision,
                    key=rounding_key(5, step, at, CPU),
                )  # fmt: skip
        return whole

    expected = in_blocks(1 << 21)
    for size in (7, 64, 1000):
        for how in (in_blocks, in_flat_pieces):
            found = how(size)
            assert found.keys() == expected.keys()
            different = [name for name in expected if not torch.equal(found[name], expected[name])]
            assert not different, f"{how.__name__} of {size} change {different}"


def test_no_update_is_larger_than_a_block(monkeypatch):
    sizes = []
    monkeypatch.setattr(optimizers, "BLOCK", 64)
    monkeypatch.setattr(optimizers, "adamw_update", lambda weight, *_, **__: sizes.append(weight.numel()))
    take_steps(params := [parameter(torch.ones(10, 15)), parameter(torch.ones(3))], AdamW(params, lr=0.1), 1)
    assert sizes == [64, 64, 22, 3]


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
def test_one_compiled_update_serves_every_step(precision):
    """In one graph, compiled once: nothing that changes from step to step may be a Python number."""
    torch._dynamo.reset()
    compiled = torch.compile(adamw_update, dynamic=False, fullgraph=True, backend="aot_eager")

    def run(update):
        p = parameter(torch.linspace(-1, 1, 50), torch.bfloat16)
        state = {k: v for k, v in AdamW([p], 1e-3, state_precision=precision)._new_state(p).items() if k != "step"}
        for step in range(1, 5):
            update(
                p.detach(), torch.linspace(1, 2, 50).bfloat16() * step, state,
                adamw_numbers(1e-3 * step, (0.9, 0.95), 1e-8, 0.1, step, 1 / step, CPU),
                betas=(0.9, 0.95), eps=1e-8, state_precision=precision, key=rounding_key(0, step, 50 * step, CPU),
            )  # fmt: skip
        return {"weight": p.detach(), **state}

    with torch._dynamo.config.patch(error_on_recompile=True):
        found = run(compiled)
    torch.testing.assert_close(found, run(adamw_update), rtol=1e-6, atol=0.0)  # a compiler may fuse two operations


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
def test_a_compiled_optimizer_takes_the_steps_of_a_plain_one_in_few_codes(monkeypatch, precision):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(optimizers, "COMPILED_BLOCK", 20)
    torch._dynamo.utils.counters.clear()
    taken = []
    for compiled in (False, True):
        params = [
            parameter(torch.linspace(-1, 1, 54).view(6, 9), torch.bfloat16),
            parameter(torch.ones(9), torch.bfloat16),
        ]
        optimizer = AdamW(params, lr=0.1, state_precision=precision, compiled=compiled)
        take_steps(params, optimizer, 3)
        taken.append([p.detach() for p in params] + list(optimizer.tensors().values()))
    torch.testing.assert_close(taken[1], taken[0], rtol=1e-6, atol=1e-7)  # a compiler may fuse two operations
    codes = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < codes <= 3, "whole vectors, first blocks and later blocks of matrices"


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
def test_a_transposed_parameter_is_updated_like_any_other(monkeypatch, precision):
    monkeypatch.setattr(optimizers, "BLOCK", 5)
    start = torch.arange(12.0).reshape(4, 3).bfloat16()
    a, b = torch.nn.Parameter(start.T.contiguous().T), torch.nn.Parameter(start.clone())
    assert not a.is_contiguous()
    take_steps([a], take_a := AdamW([a], lr=0.1, state_precision=precision), 3)
    take_steps([b], take_b := AdamW([b], lr=0.1, state_precision=precision), 3)
    assert torch.equal(a, b) and not torch.equal(a, start)
    assert all(torch.equal(v, take_b.tensors()[k]) for k, v in take_a.tensors().items())


def test_a_parameter_without_a_gradient_keeps_its_place_in_the_count():
    """The random bits of a parameter do not depend on whether one before it has a gradient."""

    def second(first_has_a_gradient):
        params = [parameter(torch.ones(100), torch.bfloat16), parameter(torch.ones(500), torch.bfloat16)]
        optimizer = AdamW(params, lr=1e-3, state_precision="bf16_stochastic")
        params[0].grad = torch.ones_like(params[0]) if first_has_a_gradient else None
        params[1].grad = torch.ones_like(params[1])
        optimizer.step()
        return params[1].data

    assert torch.equal(second(True), second(False))
    assert len(second(True).unique()) == 2


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
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
    loaded = other.tensors()
    assert loaded.keys() == saved.keys()
    for name, value in loaded.items():
        assert value.device.type == "cpu" and value.dtype == saved[name].dtype and torch.equal(value, saved[name]), name


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
        "has rounding.cpu, which this run does not": changed(**{"rounding.cpu": torch.zeros(3)}),
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
