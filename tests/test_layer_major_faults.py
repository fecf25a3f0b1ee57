"""The layer-major engine when something goes wrong, and its checkpoints: nothing is half done, or nobody goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from a5lib.config import OptimizerState
from a5lib.engines import trip as pass_file
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.resident import ResidentEngine
from a5lib.engines.trip import Trip
from a5lib.errors import UserError
from a5lib.optimizers import STATE_PRECISIONS
from tests.engine_tools import config, everything, layer_major, ragged_batch, resident, same_bits
from tests.helpers import tiny_olmo2

MIXED = frozenset({"layer 1", "head"})
BATCH = ragged_batch()


def engine(dtype: torch.dtype = torch.bfloat16, **options: Any) -> LayerMajorEngine:
    """One layer and the head on the card, so that both kinds of homes are tested."""
    return layer_major(tiny_olmo2().to(dtype), config(**options), resident=MIXED, kept=2)


def stepped(**options: Any) -> LayerMajorEngine:
    """An engine after a step, which has moments."""
    this = engine(**options)
    this.accumulate(BATCH)
    this.step(1e-3)
    return this


def memory(this: LayerMajorEngine) -> dict[str, Tensor]:
    """A copy of every flat tensor but the gradients."""
    return {
        f"{unit.name}/{name}": flat.clone()
        for unit in this.parts.units
        for name, flat in unit.flat.items()
        if name != "grad"
    }


def assert_goes_on_as_if_nothing_had_happened(this: LayerMajorEngine, undisturbed: LayerMajorEngine) -> None:
    for one in (this, undisturbed):
        one.accumulate(BATCH)
        one.step(1e-3)
    assert same_bits(everything(this), everything(undisturbed))


# --- numbers that are not finite


@pytest.mark.parametrize("state", ["fp32", "bf16_kahan"])  # those with a tensor more than the moments
@pytest.mark.parametrize(
    ("unit", "parameter"),
    [
        ("embedding", "model.embed_tokens.weight"),
        ("layer 0", "model.layers.0.self_attn.k_proj.weight"),
        ("layer 1", "model.layers.1.self_attn.k_proj.weight"),
        ("head", "lm_head.weight"),
    ],
)
def test_a_nan_gradient_changes_nothing(
    unit: str, parameter: str, state: OptimizerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, undisturbed = stepped(optimizer_state=state), stepped(optimizer_state=state)
    before = memory(this)
    finish = Trip.finish

    def spoiled(trip: Trip, at: Any, grad: Tensor, **options: Any) -> None:
        if at.name == unit:
            at.views(grad)[at.names.index(parameter)][3, 5] = torch.nan
        finish(trip, at, grad, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trip, "finish", spoiled)
        this.accumulate(BATCH)
    with pytest.raises(FloatingPointError, match=rf"parameter {parameter} is the first"):
        this.step(1e-3)
    assert same_bits(memory(this), before), "a weight, a moment or a master has changed"
    assert this.steps == 1
    with pytest.raises(RuntimeError, match="call accumulate first"):
        this.step(1e-3)
    assert_goes_on_as_if_nothing_had_happened(this, undisturbed)


def test_a_nan_on_its_way_down_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins in the last layer and reaches everything below; the error names the first in the model's order."""
    this = stepped()
    before = memory(this)
    layer = Trip.layer

    def spoiled(trip: Trip, hidden: Tensor, m: Any) -> Tensor:
        out = layer(trip, hidden, m)
        if out.requires_grad:
            out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.nan))
        return out

    monkeypatch.setattr(Trip, "layer", spoiled)
    this.accumulate(BATCH)
    with pytest.raises(FloatingPointError, match=r"parameter model\.embed_tokens\.weight is the first"):
        this.step(1e-3)
    assert same_bits(memory(this), before)


def test_an_infinite_gradient_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    this = stepped()
    before = memory(this)
    this.accumulate(BATCH)
    assert this.norms is not None
    this.norms[4] = torch.inf
    with pytest.raises(FloatingPointError, match=r"parameter model\.layers\.0\.self_attn\.o_proj\.weight .* norm inf"):
        this.step(1e-3)
    assert same_bits(memory(this), before)


@pytest.mark.parametrize(
    ("make", "rows"),
    [(layer_major, "3, 6"), (resident, "6")],
    ids=["layer-major", "resident, microbatch by microbatch"],
)
@pytest.mark.parametrize("column", ["advantages", "old_log_probs"])
def test_a_loss_that_is_not_finite_names_its_rows(column: str, make: Callable[..., Any], rows: str) -> None:
    this = make(tiny_olmo2(), config())
    this.accumulate(BATCH)
    this.step(1e-3)
    before = everything(this)
    batch = {**BATCH, column: BATCH[column].clone()}
    batch[column][[3, 6]] = torch.nan
    with pytest.raises(FloatingPointError, match=rf"not finite in row {rows} of the batch"):
        this.accumulate(batch)
    assert same_bits(everything(this), before)


def test_a_nan_weight_is_named_by_the_rows_that_read_it() -> None:
    this = engine(torch.float32)
    token = int(BATCH["input_ids"][6, 0])  # rows 4 and 6 have one prompt, row 7 and the others have another
    readers = [row for row in (0, 1, 3, 4, 6, 7) if token in BATCH["input_ids"][row].tolist()]
    assert readers == [4, 6]
    dict(this.weights())["model.embed_tokens.weight"].data[token] = torch.nan
    with pytest.raises(FloatingPointError, match=r"in row 4, 6 of the batch, counted from 0"):
        this.accumulate(BATCH)


# --- interruptions


@contextlib.contextmanager
def interrupted(where: str, error: type[BaseException], call: int) -> Iterator[None]:
    """Raise `error` at a call, counted from 0, of one part of the pass."""
    calls = iter(range(10**6))

    def stop() -> None:
        if next(calls) == call:
            raise error("injected")

    layer, sweep, embedding = Trip.layer, pass_file.head_sweep, Trip._embedding_gradient

    def stopping_layer(trip: Trip, hidden: Tensor, m: Any) -> Tensor:
        if hidden.requires_grad == (where == "down"):
            stop()
        return layer(trip, hidden, m)

    def stopping_sweep(*args: Any, **options: Any) -> Any:
        stop()
        return sweep(*args, **options)

    def stopping_embedding(trip: Trip) -> None:
        embedding(trip)
        stop()

    with pytest.MonkeyPatch.context() as patch:
        if where in ("up", "down"):
            patch.setattr(Trip, "layer", stopping_layer)
        elif where == "head":
            patch.setattr(pass_file, "head_sweep", stopping_sweep)
        else:
            patch.setattr(Trip, "_embedding_gradient", stopping_embedding)
        yield


# Three microbatches and two layers; the ratio needs two sweeps of the head.
PLACES = [("up", 0), ("up", 5), ("head", 1), ("head", 5), ("down", 0), ("down", 3), ("down", 5), ("embedding", 0)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("where", "call"), PLACES)
def test_an_interrupted_pass_changes_nothing(where: str, call: int, error: type[BaseException]) -> None:
    this, undisturbed = stepped(), stepped()
    before = memory(this)
    with interrupted(where, error, call), pytest.raises(error, match="injected"):
        this.accumulate(BATCH)
    assert same_bits(memory(this), before)
    with pytest.raises(RuntimeError, match="call accumulate first"):
        this.step(1e-3)
    assert all(p.numel() == 0 for part in (this.parts.layer, this.parts.norm) for p in part.parameters()), (
        "the layer still wears weights and holds their memory"
    )
    assert_goes_on_as_if_nothing_had_happened(this, undisturbed)


@pytest.mark.parametrize(("where", "call"), [("up", 5), ("head", 1)])
def test_an_interrupted_score_changes_nothing(where: str, call: int) -> None:
    this, undisturbed = stepped(), stepped()
    with interrupted(where, KeyboardInterrupt, call), pytest.raises(KeyboardInterrupt):
        this.score(BATCH)
    assert torch.equal(this.score(BATCH)["log_probs"], undisturbed.score(BATCH)["log_probs"])
    assert_goes_on_as_if_nothing_had_happened(this, undisturbed)


def tear(this: LayerMajorEngine, error: type[BaseException], call: int) -> None:
    """Interrupt a step at one of its buckets."""
    this.accumulate(BATCH)
    update, calls = this.update, iter(range(10**6))

    def stopping(*args: Any, **options: Any) -> None:
        if next(calls) == call:
            raise error("injected")
        update(*args, **options)

    this.update = stopping
    with pytest.raises(error, match="injected"):
        this.step(1e-3)
    this.update = update


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1, 15])
def test_after_a_torn_step_nobody_goes_on_before_a_checkpoint_is_loaded(call: int, error: type[BaseException]) -> None:
    this, undisturbed = stepped(), stepped()
    saved = {group: {name: t.clone() for name, t in named.items()} for group, named in this.tensors().items()}
    tear(this, error, call)
    calls: list[Callable[[], Any]] = [
        lambda: this.score(BATCH),
        lambda: this.accumulate(BATCH),
        lambda: this.step(1e-3),
        this.weights,
        this.tensors,
        this.release,
    ]
    for refused in calls:
        with pytest.raises(RuntimeError, match=r"interrupted halfway; load a checkpoint before you go on"):
            refused()
    this.load_tensors(saved)
    assert_goes_on_as_if_nothing_had_happened(this, undisturbed)


# --- calls in the wrong order


def test_a_second_gradient_before_the_step_is_refused() -> None:
    this, undisturbed = stepped(), stepped()
    for one in (this, undisturbed):
        one.accumulate(BATCH)
    with pytest.raises(RuntimeError, match="takes one batch a step"):
        this.accumulate(BATCH)
    for one in (this, undisturbed):
        one.step(1e-3)
    assert same_bits(everything(this), everything(undisturbed)), "the refused call has left something"


def test_a_step_without_a_gradient_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call accumulate first"):
        engine().step(1e-3)


# --- checkpoints


def saved_from(this: Any) -> dict[str, dict[str, Tensor]]:
    """A deep copy, as a file would hold it."""
    return {group: {name: t.clone() for name, t in named.items()} for group, named in this.tensors().items()}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("state", STATE_PRECISIONS)
def test_a_run_continues_bit_for_bit(state: OptimizerState, steps: int) -> None:
    whole = engine(optimizer_state=state)
    for _ in range(steps):
        whole.accumulate(BATCH)
        whole.step(1e-3)
    saved = saved_from(whole)
    resumed = layer_major(tiny_olmo2(seed=9).bfloat16(), config(optimizer_state=state), bucket=777)
    resumed.accumulate(BATCH)
    resumed.step(1e-2)  # what was here before must go
    resumed.accumulate(BATCH)
    resumed.load_tensors(saved)
    assert same_bits(everything(resumed), everything(whole))
    assert memory(resumed).keys() == memory(whole).keys()
    for name, flat in memory(resumed).items():
        assert torch.equal(flat, memory(whole)[name]), f"{name} is state that a checkpoint does not hold"
    resumed.plan = whole.plan.__class__(**{**vars(resumed.plan), "kept": 2})  # sums in the same order
    for _ in range(2):
        for one in (whole, resumed):
            one.accumulate(ragged_batch(seed=1))
            one.step(1e-3)
    assert same_bits(everything(resumed), everything(whole))


@pytest.mark.parametrize(("state", "tied"), [*((state, False) for state in STATE_PRECISIONS), ("fp32", True)])
def test_checkpoints_are_those_of_the_resident_engine(state: OptimizerState, tied: bool) -> None:
    settings = config(optimizer_state=state)

    def both() -> tuple[ResidentEngine, LayerMajorEngine]:
        model = tiny_olmo2(tied=tied).bfloat16()
        return resident(model, settings), layer_major(model, settings, resident=MIXED)

    one, two = both()
    assert same_bits(everything(one), everything(two)), "before the first step"
    for this in (one, two):
        this.accumulate(BATCH)
        this.step(1e-3)
    for group, named in one.tensors().items():
        other = two.tensors()[group]
        assert list(named) == list(other) or group == "optimizer"
        assert {name: (t.shape, t.dtype) for name, t in named.items()} == {
            name: (t.shape, t.dtype) for name, t in other.items()
        }
    for source in (one, two):
        saved = saved_from(source)
        for target in both():
            target.load_tensors(saved)
            assert all(torch.equal(t, everything(source)[name]) for name, t in everything(target).items())
            target.accumulate(BATCH)
            target.step(1e-3)


def test_O04_moments_keep_their_type_and_stay_on_the_host() -> None:
    this = stepped(optimizer_state="fp32")
    this.load_tensors(saved_from(this))
    for unit in this.parts.units:
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert (unit.flat[name].dtype, unit.flat[name].device.type) == (torch.float32, "cpu")
        assert unit.flat["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("source", [layer_major, resident])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda o: o.pop("3.exp_avg"), r"Optimizer state 3\.exp_avg is missing; expected torch\.float32"),
        (lambda o: o.pop("0.step"), r"Optimizer state 0\.step is missing"),
        (lambda o: o.update({"3.master": o["3.master"].bfloat16()}), r"3\.master is torch\.bfloat16"),
        (lambda o: o.update({"3.exp_avg": o["3.exp_avg"][1:]}), r"3\.exp_avg is torch\.float32 \[63, 64\]; expected"),
        (lambda o: o.update({"3.compensation": o["3.exp_avg"]}), r"saved optimizer has 3\.compensation, which this"),
        (lambda o: o.update({"77.step": o["0.step"]}), r"saved optimizer has 77\.step, which this run does not"),
    ],
)
def test_state_that_does_not_fit_is_named(source: Callable[..., Any], change: Any, sentence: str) -> None:
    this = source(tiny_olmo2().bfloat16(), config())
    this.accumulate(BATCH)
    this.step(1e-3)
    saved = saved_from(this)
    change(saved["optimizer"])
    with pytest.raises(UserError, match=sentence):
        this.load_tensors(saved)


def test_after_half_a_load_nobody_goes_on_before_a_whole_one() -> None:
    this, undisturbed = stepped(), stepped()
    good = saved_from(this)
    half = {"model": good["model"], "optimizer": {k: t for k, t in good["optimizer"].items() if k != "3.exp_avg"}}
    with pytest.raises(UserError, match=r"3\.exp_avg is missing"):
        this.load_tensors(half)
    for use in (lambda: this.accumulate(BATCH), this.weights, this.tensors):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            use()
    this.load_tensors(good)
    assert_goes_on_as_if_nothing_had_happened(this, undisturbed)


@pytest.mark.parametrize("other", ["bf16", "bf16_kahan", "bf16_stochastic"])
def test_state_of_another_precision_is_refused(other: OptimizerState) -> None:
    saved = saved_from(stepped(optimizer_state="fp32"))
    with pytest.raises(UserError, match=r"--optimizer-state it was saved with"):
        engine(optimizer_state=other).load_tensors(saved)


def test_after_a_load_that_failed_nobody_goes_on_before_another_one_succeeds() -> None:
    this, undisturbed = stepped(), stepped()
    saved = saved_from(this)
    damaged = {**saved, "optimizer": {**saved["optimizer"], "9.master": saved["optimizer"]["9.master"][:1]}}
    with pytest.raises(UserError, match=r"9\.master"):
        this.load_tensors(damaged)
    for refused in (lambda: this.accumulate(BATCH), lambda: this.score(BATCH), this.weights, this.tensors):
        with pytest.raises(RuntimeError, match=r"load a checkpoint before you go on"):
            refused()
    this.load_tensors(saved)
    assert_goes_on_as_if_nothing_had_happened(this, undisturbed)
