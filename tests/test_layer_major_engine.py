"""The layer-major engine: against a plain float64 loop, against the resident engine bit for bit, and under faults."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Olmo2ForCausalLM

from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.packing import Microbatch, pack
from a5lib.engines.trip import Trip
from a5lib.optimizers import STATE_PRECISIONS
from tests.engine_tools import (
    ALGORITHMS,
    Batch,
    config,
    everything,
    float64_norms,  # noqa: F401  a fixture
    gradients,
    layer_major,
    plain_gradients,
    plain_scores,
    plain_steps,
    ragged_batch,
    relative_error,
    resident,
    same_bits,
    whole_rows,
)
from tests.helpers import tiny_olmo2

EVERYTHING = frozenset({"embedding", "layer 0", "layer 1", "head"})
TOLERANCE = 1e-12


@cache
def shared_batch() -> Batch:
    """One batch for all; no test changes it."""
    return ragged_batch(tiny_olmo2())


@cache
def expected(algorithm: str, tied: bool, temperature: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the shared batch, by the plain float64 loop."""
    return plain_gradients(tiny_olmo2(tied=tied), shared_batch(), config(algorithm, temperature=temperature))


def assert_gradients(engine: LayerMajorEngine, wanted: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    actual = gradients(engine)
    assert actual.keys() == wanted.keys()
    for name, gradient in actual.items():
        error = relative_error(gradient, wanted[name])
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def check(algorithm: str, tied: bool, temperature: float = 1.0, **plan: Any) -> None:
    """Loss and every gradient of the shared batch in float64."""
    engine = layer_major(tiny_olmo2(tied=tied).double(), config(algorithm, temperature=temperature), **plan)
    loss, _ = engine.accumulate(shared_batch())
    wanted_loss, wanted = expected(algorithm, tied, temperature)
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE, abs=TOLERANCE)
    assert_gradients(engine, wanted)


# --- gradients


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_those_of_a_plain_float64_loop(algorithm: str, tied: bool) -> None:
    check(algorithm, tied)


@pytest.mark.parametrize("algorithm", ["grpo", "offpolicy_clip"])
def test_gradients_at_another_temperature(algorithm: str) -> None:
    check(algorithm, tied=False, temperature=0.6)


RESIDENCIES = {
    "embedding": {"resident": {"embedding"}},
    "head": {"resident": {"head"}},
    "first layer": {"resident": {"layer 0"}},
    "last layer": {"resident": {"layer 1"}, "kept": 2},
    "both layers": {"resident": {"layer 0", "layer 1"}},
    "embedding and a layer, with its inputs": {"resident": {"embedding", "layer 1"}, "card_levels": 1, "kept": 9},
    "inputs only": {"card_levels": 9},
    "everything": {"resident": EVERYTHING},
    "everything, with inputs": {"resident": EVERYTHING, "kept": 9, "card_levels": 9},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", RESIDENCIES.values(), ids=RESIDENCIES.keys())
def test_gradients_do_not_depend_on_what_stays_on_the_card(plan: dict[str, Any], tied: bool) -> None:
    check("offpolicy_clip", tied, **{**plan, "resident": frozenset(plan.get("resident", ()))})


@pytest.mark.parametrize("kept", [1, 2, 4, 9])
@pytest.mark.parametrize("tokens", [1, 24, 1000])
def test_gradients_do_not_depend_on_the_size_of_a_microbatch(tokens: int, kept: int) -> None:
    check("offpolicy_gspo", tied=False, microbatch_tokens=tokens, kept=kept)


@pytest.mark.parametrize("head_block", [1, 7, 1000])
def test_gradients_do_not_depend_on_the_blocks_of_the_head(head_block: int) -> None:
    check("cispo", tied=True, head_block=head_block)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack as for a card, every microbatch filled to one shape, and say how to run the segments without its kernel."""

    def packed(engine: LayerMajorEngine, batch: Batch) -> list[Microbatch]:
        tokens, longest = engine.plan.microbatch_tokens, engine.plan.longest
        result = []
        pairs = zip(pack(batch, tokens), pack(batch, tokens, fixed=True, longest=longest), strict=True)
        for plain, fixed in pairs:
            lengths = fixed.packing.starts.diff().tolist()
            packing = replace(fixed.packing, lengths=tuple(lengths), shared=plain.packing.shared)
            result.append(replace(fixed, packing=packing))
        return result

    monkeypatch.setattr(LayerMajorEngine, "_pack", packed)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [24, 100])
def test_what_fills_a_microbatch_adds_nothing(tokens: int, tied: bool) -> None:
    check("offpolicy_clip", tied, microbatch_tokens=tokens)


def test_a_prompt_that_responses_share_is_run_once() -> None:
    engine = layer_major(tiny_olmo2(), config(), microbatch_tokens=1000)
    (only,) = engine._pack(shared_batch())
    rows = shared_batch()["response_mask"].any(dim=1) & (shared_batch()["advantages"] != 0)
    ends = shared_batch()["response_mask"] * torch.arange(1, shared_batch()["labels"].shape[1] + 1)
    apart = int(ends.amax(dim=1)[rows].sum())
    assert len(only.packing.shared) == 2, "rows 0, 1 and 3, and rows 4 and 6"
    assert len(only.ids) < apart, "every row has brought its prompt along"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("algorithm", ["grpo", "offpolicy_clip"])
def test_gradients_in_float32_are_right_to_rounding(algorithm: str, tied: bool) -> None:
    engine = layer_major(tiny_olmo2(tied=tied), config(algorithm))
    engine.accumulate(shared_batch())
    assert_gradients(engine, expected(algorithm, tied)[1], tolerance=1e-5)


def test_L08_the_update_does_not_depend_on_how_a_batch_is_cut() -> None:
    lengths = (1, 4, 2, 3, 5)
    batch = ragged_batch(tiny_olmo2(), rows=8)
    place = torch.arange(batch["labels"].shape[1])
    rows = [place < length for length in (*lengths, 0, 0, 0)]
    batch = {**batch, "response_mask": torch.stack(rows), "advantages": torch.linspace(-1, 1, 8)}
    for algorithm in ("grpo", "grpo_constant"):
        _, wanted = plain_gradients(tiny_olmo2(), batch, config(algorithm))
        for tokens in (1, 6, 8, 100):
            engine = layer_major(tiny_olmo2().double(), config(algorithm), microbatch_tokens=tokens)
            engine.accumulate(batch)
            assert_gradients(engine, wanted)


def test_the_statistics_are_those_of_the_resident_engine() -> None:
    for algorithm in ALGORITHMS:
        other, this = resident(tiny_olmo2(), config(algorithm)), layer_major(tiny_olmo2(), config(algorithm))
        _, wanted = other.accumulate(shared_batch())
        _, stats = this.accumulate(shared_batch())
        assert stats == pytest.approx(wanted, rel=1e-5, abs=1e-7), algorithm


@pytest.mark.parametrize("algorithm", ["grpo", "offpolicy_clip", "offpolicy_gspo"])
def test_the_weights_of_the_losses_are_those_of_the_resident_engine(algorithm: str) -> None:
    batch = shared_batch()
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0)) * 2
    model = tiny_olmo2().double()
    other, this = resident(model, config(algorithm)), layer_major(model, config(algorithm))
    wanted = other.accumulate({**batch, "loss_weights": weights})[0]
    assert this.accumulate({**batch, "loss_weights": weights})[0] == pytest.approx(wanted)
    assert_gradients(this, gradients(other))
    this.norms = None
    assert this.accumulate(batch)[0] != pytest.approx(wanted, rel=1e-3), "weights that change nothing test nothing"


def test_a_row_may_be_longer_than_the_plan_foresaw() -> None:
    check("offpolicy_clip", tied=False, longest=2, microbatch_tokens=3)


def test_batches_of_different_sizes_follow_one_another() -> None:
    """Room for the hidden states grows when it is needed, and what is left in it does no harm."""
    engine = layer_major(tiny_olmo2().double(), config(), microbatch_tokens=6)
    for longest in (2, 10, 1, 10):
        batch = ragged_batch(tiny_olmo2(), longest=longest)
        engine.score(batch)
        engine.accumulate(batch)
        assert_gradients(engine, plain_gradients(tiny_olmo2(), batch, config())[1])
        engine.norms = None  # without a step, so that the weights stay


# --- steps


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("home", [frozenset(), frozenset({"layer 1", "head"}), EVERYTHING])
def test_two_steps_are_those_of_torch_with_the_plain_loop(home: frozenset[str], tied: bool) -> None:
    settings = config(weight_decay=0.1, max_grad_norm=0.1)
    norms, weights = plain_steps(tiny_olmo2(tied=tied), shared_batch(), settings, count=2, lr=1e-3)
    engine = layer_major(tiny_olmo2(tied=tied).double(), settings, resident=home)
    for norm in norms:
        engine.accumulate(shared_batch())
        assert engine.step(1e-3) == pytest.approx(norm, rel=1e-9)
        assert norm > 0.1, "nothing is clipped here"
    for name, weight in engine.weights():
        torch.testing.assert_close(weight.detach(), weights[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("bucket", [777, 10**9])
def test_steps_do_not_depend_on_the_bucket_not_even_when_they_are_rounded_at_random(bucket: int) -> None:
    settings = config(optimizer_state="bf16_stochastic")
    weights = []
    for size in (bucket, 1000):
        engine = layer_major(tiny_olmo2().bfloat16(), settings, bucket=size, resident=frozenset({"layer 0"}))
        engine.accumulate(shared_batch())
        engine.step(1e-3)
        weights.append(everything(engine))
    assert same_bits(*weights)


@pytest.mark.parametrize(("state", "recompute"), [*((state, False) for state in STATE_PRECISIONS), ("fp32", True)])
def test_in_bfloat16_steps_are_those_of_the_resident_engine_bit_for_bit(state: Any, recompute: bool) -> None:
    """Where every sum is done in the same order, rounding is the same too. That takes:

    - one row a microbatch, so that every matrix product has the same shape; both engines begin with the longest row, so
      the rows' gradients are added to a weight in the same order;
    - every token a response token: this engine's head sees the trained tokens only, the resident one's sees all, and
      the head's gradient is a sum over what it sees;
    - the same head (`--head fused`) in one block, whose gradient is added to the weight without a rounding between;
    - a head of its own: into a tied matrix the resident engine adds head and embedding row by row, this engine all of
      the head first;
    - a batch of a power of two, because one engine divides by 8 at the end and the other by each row's share.
    """
    settings = config(optimizer_state=state, head="fused", recompute_layers=recompute, gradient_accumulation_steps=8)
    batch = whole_rows(shared_batch())
    other = resident(tiny_olmo2().bfloat16(), settings)
    this = layer_major(tiny_olmo2().bfloat16(), settings, microbatch_tokens=1, head_block=1000, kept=2)
    for _ in range(3):
        losses = [engine.accumulate(batch)[0] for engine in (other, this)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        wanted = gradients(other)
        for name, gradient in gradients(this).items():
            assert torch.equal(gradient, wanted[name]), f"gradient of {name}"
        assert other.step(1e-3) == this.step(1e-3)
        wanted = everything(other)
        for name, tensor in everything(this).items():
            assert torch.equal(tensor, wanted[name]), name
    assert same_bits(everything(other), everything(this))


def test_in_bfloat16_a_tied_head_agrees_bit_for_bit_where_one_row_is_trained() -> None:
    settings = config(head="fused", gradient_accumulation_steps=8)
    batch = whole_rows(shared_batch())
    batch["advantages"] = torch.tensor([0.0, 0.0, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0])
    other = resident(tiny_olmo2(tied=True).bfloat16(), settings)
    this = layer_major(tiny_olmo2(tied=True).bfloat16(), settings, head_block=1000)
    for _ in range(3):
        for engine in (other, this):
            engine.accumulate(batch)
        assert same_bits(gradients(other), gradients(this))
        assert other.step(1e-3) == this.step(1e-3)
    assert same_bits(everything(other), everything(this))


# --- scores


@pytest.mark.parametrize("tokens", [1, 24, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_each_row_alone(tokens: int, temperature: float) -> None:
    batch = shared_batch()
    trained = batch["response_mask"] & (batch["advantages"] != 0)[:, None]
    scores = layer_major(tiny_olmo2(), config(temperature=temperature), microbatch_tokens=tokens).score(batch)
    with torch.no_grad():
        wanted = plain_scores(tiny_olmo2().double(), batch, temperature)
    for values, exact in zip((scores["log_probs"], scores["token_entropy"]), wanted, strict=True):
        assert (values.dtype, values.shape, values.device.type) == (torch.float32, exact.shape, "cpu")
        torch.testing.assert_close(values[trained].double(), exact[trained], rtol=0, atol=1e-5)
        assert not values[~trained].any(), "what no update runs is not scored"


def test_M09_scores_do_not_depend_on_padding() -> None:
    batch = shared_batch()
    wide = {name: torch.cat([values, values[:, -1:].expand(-1, 20)], dim=1) for name, values in batch.items()
            if values.dim() == 2}  # fmt: skip
    width = batch["labels"].shape[1]
    narrow_scores = layer_major(tiny_olmo2(), config()).score(batch)
    wide_scores = layer_major(tiny_olmo2(), config()).score({**batch, **wide})
    for name, values in narrow_scores.items():
        assert torch.equal(wide_scores[name][:, :width], values)


@pytest.mark.parametrize("filling", [False, True], ids=["", "filled"])
@pytest.mark.parametrize("plan", [{}, {"kept": 9, "resident": EVERYTHING}, {"kept_when_scoring": 9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_any_update_every_ratio_is_exactly_1(
    dtype: torch.dtype, plan: dict[str, Any], filling: bool, request: pytest.FixtureRequest
) -> None:
    """Scored in other microbatches than it is trained in, a row would round differently, and GSPO would clip it."""
    if filling:
        request.getfixturevalue("filled")
    settings = config("offpolicy_gspo", rollout_batch_size=24)
    engine = layer_major(tiny_olmo2().to(dtype), settings, **plan)
    batch = ragged_batch(rows=24)
    batch["old_log_probs"] = batch["rollout_log_probs"] = engine.score(batch)["log_probs"]
    for rows in torch.arange(24).split(8):
        _, stats = engine.accumulate({name: values[rows] for name, values in batch.items()})
        assert (stats["ratio_min"], stats["ratio_max"], stats["clip_fraction"]) == (1.0, 1.0, 0.0)
        assert stats["kl_rollout"] == 0.0, "Q03: before any update the policy is its own reference"
        assert all(gradient.isfinite().all() for gradient in gradients(engine).values())
        engine.norms = None  # no step: the next rows meet the same weights


@pytest.mark.parametrize(("plan", "stay"), [({}, (1, 1)), ({"kept": 2, "kept_when_scoring": 3}, (2, 3))])
def test_as_many_hidden_states_stay_on_the_card_as_the_plan_says(
    plan: dict[str, int], stay: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    up = Trip.up
    monkeypatch.setattr(Trip, "up", lambda trip: (kept.append(len(trip.hidden.here)), up(trip)))
    engine = layer_major(tiny_olmo2(), config(), microbatch_tokens=10, **plan)
    engine.accumulate(shared_batch())
    engine.score(shared_batch())
    assert tuple(kept) == stay


def test_a_score_between_gradient_and_step_disturbs_neither() -> None:
    plain, disturbed = (layer_major(tiny_olmo2(), config(), kept=2) for _ in range(2))
    for engine in (plain, disturbed):
        engine.accumulate(shared_batch())
        if engine is disturbed:
            engine.score(ragged_batch(seed=3))
        engine.step(1e-3)
    assert same_bits(everything(plain), everything(disturbed))


# --- batches with little or nothing to train


@pytest.mark.parametrize("make", [layer_major, resident])
def test_A01_a_batch_without_advantages_still_takes_the_step(make: Callable[..., Any]) -> None:
    engine = make(tiny_olmo2(), config())
    engine.accumulate(shared_batch())
    engine.step(1e-3)
    before = everything(engine)
    nothing = {**shared_batch(), "advantages": torch.zeros(8)}
    assert not engine.score(nothing)["log_probs"].any()
    loss, stats = engine.accumulate(nothing)
    assert (loss, stats["trained_tokens"], stats["skipped_sequences"]) == (0.0, 0.0, 1.0)
    assert (stats["ratio_min"], stats["ratio_max"], stats["entropy"]) == (1.0, 1.0, 0.0)
    assert not any(gradient.any() for gradient in gradients(engine).values()), "the last gradient once more"
    assert engine.step(1e-3) == 0.0
    after = everything(engine)
    assert not torch.equal(before["model/lm_head.weight"], after["model/lm_head.weight"]), "moments still move weights"
    assert after["optimizer/0.step"] == 2


@pytest.mark.parametrize("rows", [[4], [1], [0, 5]], ids=["one row", "one token", "one row and one without response"])
def test_a_batch_of_one_or_two_rows(rows: list[int]) -> None:
    batch = {name: values[rows] for name, values in shared_batch().items()}
    engine = layer_major(tiny_olmo2().double(), config(), kept=1)
    engine.score(batch)
    loss, _ = engine.accumulate(batch)
    wanted_loss, wanted = plain_gradients(tiny_olmo2(), batch, config())
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE)
    assert_gradients(engine, wanted)


def test_a_single_microbatch_need_not_be_kept_by_the_plan() -> None:
    check("offpolicy_clip", False, microbatch_tokens=500, kept=0, kept_when_scoring=0)


def test_only_rows_without_a_response_are_a_batch_with_nothing_to_train() -> None:
    batch = {**shared_batch(), "response_mask": torch.zeros_like(shared_batch()["response_mask"])}
    engine = layer_major(tiny_olmo2(), config())
    assert engine.accumulate(batch)[0] == 0.0
    assert engine.step(1e-3) == 0.0


# --- no wait of the host inside the pass


class NoHostValues(TorchDispatchMode):
    """Fails where an operation needs a number or a shape from the card before it can go on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        waits = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique", "_unique2"}
        assert name not in waits, f"{func} waits for the card"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert not any(at.dtype == torch.bool for at in args[1] if at is not None), f"{func} with a mask waits"
        if name == "_to_copy":
            device = (kwargs or {}).get("device")
            assert device in (None, args[0].device), "a copy to another device outside a lane"
        return func(*args, **(kwargs or {}))


class NoHostCalls(TorchFunctionMode):
    """Fails where Python asks a tensor for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        waits = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "synchronize")
        assert name not in waits, f"{name} waits for the card"
        return func(*args, **(kwargs or {}))


def without_waits(function: Callable[..., Any], ran: list[str]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        ran.append(function.__name__)
        with NoHostValues(), NoHostCalls():
            return function(*args, **kwargs)

    return guarded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("algorithm", ["grpo", "offpolicy_clip", "offpolicy_gspo"])
def test_the_host_never_waits_inside_a_pass(algorithm: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for owner, name in ((Trip, "up"), (Trip, "head"), (Trip, "down"), (LayerMajorEngine, "_update"),
                        (LayerMajorEngine, "_loss")):  # fmt: skip
        monkeypatch.setattr(owner, name, without_waits(getattr(owner, name), ran))
    engine = layer_major(tiny_olmo2(tied=tied), config(algorithm), resident=frozenset({"layer 1"}), kept=2)
    engine.score(shared_batch())
    assert ran == ["up", "head"]
    engine.accumulate(shared_batch())
    engine.step(1e-3)
    heads = 1 if algorithm == "grpo" else 2
    assert [name for name in ran[2:] if name != "_loss"] == ["up", *["head"] * heads, "down", "_update"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0.0)[torch.isfinite(x)],
        lambda x: x.cpu(),
        lambda x: int(x[0]),
    ],
)
def test_the_guard_against_waits_sees_one(wait: Callable[[Tensor], Any]) -> None:
    with pytest.raises(AssertionError, match=r"wait"):
        without_waits(wait, [])(torch.ones(3))


# --- the model outside the engine


@pytest.mark.parametrize("plan", [{}, {"resident": EVERYTHING}])
def test_weights_are_the_engines_own_memory(plan: dict[str, Any]) -> None:
    engine = layer_major(tiny_olmo2(), config(), **plan)
    homes = [
        (flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in (u.flat["weight"] for u in engine.parts.units)
    ]
    for name, weight in engine.weights():
        assert any(start <= weight.data_ptr() < end for start, end in homes), f"{name} is a copy"
    assert [name for name, _ in engine.weights()] == [name for name, _ in tiny_olmo2().named_parameters()]


def test_release_gives_the_card_back_and_training_goes_on() -> None:
    stays, leaves = (layer_major(tiny_olmo2(), config(), resident=frozenset({"layer 0", "head"})) for _ in range(2))
    for engine in (stays, leaves):
        engine.accumulate(shared_batch())
        engine.step(1e-3)
    unit = leaves.parts.layers[0]
    on_card = unit.flat["weight"]
    leaves.release()
    leaves.release()
    assert unit.flat["weight"].data_ptr() != on_card.data_ptr(), "still on the card"
    assert same_bits(everything(stays), everything(leaves)), "a checkpoint may be written meanwhile"
    for (name, weight), unit_weight in zip(leaves.weights(), dict(stays.weights()).values(), strict=True):
        assert torch.equal(weight, unit_weight), name
    for engine in (stays, leaves):
        engine.score(shared_batch())
        engine.accumulate(shared_batch())
        engine.step(1e-3)
    assert same_bits(everything(stays), everything(leaves))


def test_release_between_gradient_and_step_loses_nothing() -> None:
    stays, leaves = (layer_major(tiny_olmo2(), config(), resident=frozenset({"layer 0", "head"})) for _ in range(2))
    for engine in (stays, leaves):
        engine.accumulate(shared_batch())
        if engine is leaves:
            engine.release()
        engine.step(1e-3)
    assert same_bits(everything(stays), everything(leaves))


@pytest.mark.parametrize("tied", [False, True])
def test_the_trained_model_can_be_saved(tied: bool, tmp_path: Path) -> None:
    """Its parameters lie side by side in a few large tensors, which must not look like shared weights."""
    engine = layer_major(tiny_olmo2(tied=tied).bfloat16(), config())
    engine.accumulate(shared_batch())
    engine.step(1e-2)
    engine.model.save_pretrained(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 2.2 * sum(
        weight.numel() for _, weight in engine.weights()
    )
    loaded = dict(Olmo2ForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert same_bits({name: weight.detach() for name, weight in engine.weights()}, loaded)


ENGINES: dict[str, Callable[[], Any]] = {
    "layer-major": lambda: layer_major(tiny_olmo2(), config()),
    "layer-major, everything on the card": lambda: layer_major(tiny_olmo2(), config(), resident=EVERYTHING),
    "resident": lambda: resident(tiny_olmo2(), config()),
    "resident, recomputed": lambda: resident(tiny_olmo2(), config(recompute_layers=True, head="fused")),
    "resident, low memory": lambda: resident(tiny_olmo2(), config(low_memory=True)),
}


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES.keys())
def test_K01_training_leaves_the_model_able_to_generate(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # its warnings do not reach caplog else
    engine = make()
    model = engine.model
    prompt = {"input_ids": torch.tensor([[5, 9, 17]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}

    def generate(model: Any) -> list[int]:
        return model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()

    settings = model.config.to_dict()
    generate(model)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        for _ in range(3):
            engine.score(shared_batch())
            engine.accumulate(shared_batch())
            engine.step(3e-2)
    assert caplog.records == []
    assert model.config.use_cache and model.config.to_dict() == settings
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    other = tiny_olmo2()
    before = generate(other)
    other.load_state_dict(dict(engine.weights()), strict=False)
    assert generate(model) == generate(other) != before, "the tokens of the trained weights"
