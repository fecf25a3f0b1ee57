"""The events of the layer-major engine, as it is watched: on two layers, what they must be can be written down."""

from __future__ import annotations

from typing import Any

import pytest

from a5lib.course.engine_events import engine_events
from a5lib.engines.packing import pack
from tests import engine_tools
from tests.helpers import tiny_olmo2

pytestmark = pytest.mark.reference

UP = """
in embedding weight, work embedding 0, out layer 0 0,
in layer 0 weight, in layer 1 weight, work layer 0 0, out layer 1 0, work layer 1 0
"""
HEAD = "in head weight, work head 0, out head grad"
DOWN = """
in layer 1 weight, in layer 0 weight, in layer 1 0, in layer 0 0, work layer 1 0, out layer 1 grad,
work layer 0 0, out layer 0 grad, work embedding 0, out embedding grad
"""


def words(events: list[Any]) -> list[str]:
    return [" ".join(event) for event in events]


def expected(*texts: str) -> list[str]:
    return [event.strip() for text in texts for event in text.strip().split(",")]


def engine(**plan: Any) -> Any:
    return engine_tools.layer_major(tiny_olmo2(), engine_tools.config("grpo"), **{"microbatch_tokens": 1000} | plan)


def test_a_pass_over_two_layers_with_one_microbatch() -> None:
    batch = engine_tools.ragged_batch()
    this = engine()
    assert words(engine_events(this, lambda: this.accumulate(batch))) == expected(UP, HEAD, DOWN)


def test_scoring_goes_up_only_and_sends_nothing_home() -> None:
    batch = engine_tools.ragged_batch()
    this = engine()
    found = words(engine_events(this, lambda: this.score(batch)))
    assert found == [event for event in expected(UP, "in head weight, work head 0") if not event.startswith("out")]


def test_what_stays_on_the_card_does_not_travel() -> None:
    batch = engine_tools.ragged_batch()
    this = engine(resident=frozenset({"embedding", "layer 0", "layer 1", "head"}))
    found = words(engine_events(this, lambda: this.accumulate(batch)))
    assert not [event for event in found if "weight" in event or "grad" in event]
    assert found[-1] == "work embedding 0" and found.count("work layer 1 0") == 2, "up and down"


def test_microbatches_are_numbered_and_wait_on_the_host() -> None:
    batch = engine_tools.ragged_batch()
    this = engine(microbatch_tokens=1, kept=1)
    found = words(engine_events(this, lambda: this.accumulate(batch)))
    last = len(pack(batch, 1)) - 1
    assert [event for event in found if event.startswith("work head")] == [f"work head {m}" for m in range(last + 1)]
    assert "in head 0" not in found and f"in head {last}" in found, "the last hidden states of all but the first"


def test_a_step_brings_four_tensors_and_takes_three_home() -> None:
    batch = engine_tools.ragged_batch()
    this = engine(bucket=10**9)
    this.accumulate(batch)
    found = words(engine_events(this, lambda: this.step(1e-3)))
    coming, going = ("weight", "grad", "exp_avg", "exp_avg_sq"), ("weight", "exp_avg", "exp_avg_sq")
    units = ("embedding", "layer 0", "layer 1", "head")
    assert [e for e in found if e.startswith("in")] == [f"in {u} {n}" for u in units for n in coming]
    assert [e for e in found if e.startswith("out")] == [f"out {u} {n}" for u in units for n in going]
    assert found.index("out embedding weight") < found.index("in layer 1 weight"), "three buckets are on their way"


def test_nothing_is_left_on_the_engine() -> None:
    batch = engine_tools.ragged_batch()
    this = engine()
    first = engine_events(this, lambda: this.accumulate(batch))
    this.step(0.0)
    assert engine_events(this, lambda: this.accumulate(batch)) == first, "a hook that stays would count twice"
