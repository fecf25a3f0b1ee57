"""Checks of `colocation.py`: the cycle against a scripted engine that objects in words to a step at the wrong time."""

from __future__ import annotations

from typing import Any

from a5lib.course.checking import Mistake, checks, expect, expect_error
from a5lib.course.exercises import Algo
from a5lib.course.scripted_engine import (
    PROMPTS,
    WEIGHTS,
    Objection,
    ScriptedEngine,
    ScriptedTrainer,
    checksum,
    scripted_pair,
)

GIVEN = "a scripted trainer and engine on one card, three prompts"


def cycles(algo: Algo, count: int) -> tuple[list[Any], ScriptedTrainer, ScriptedEngine]:
    """Some cycles on one pair; an objection becomes the likely reason."""
    trainer, engine = scripted_pair()
    results = []
    for number in range(1, count + 1):
        try:
            results.append(algo.colocated_cycle(trainer, engine, list(PROMPTS)))
        except (Objection, RuntimeError) as error:
            end = "an objection" if isinstance(error, Objection) else "your RuntimeError"
            steps = " → ".join([*engine.card.steps, end])
            likely = str(error)
            if not isinstance(error, Objection):
                likely = f"{_what_was_loaded(trainer, engine)} Your own verification says: {error}"
            raise Mistake("the steps", f"{GIVEN}; cycle {number}", "no objection", steps, likely) from None
    return results, trainer, engine


def _what_was_loaded(trainer: ScriptedTrainer, engine: ScriptedEngine) -> str:
    """Which weights an engine without a fault has, when a cycle's verification refuses them."""
    if "load weights" not in engine.card.steps:
        return "No weights were loaded before the verification."
    have, want = engine.checksums(), trainer.checksums()
    if have == want:
        return "The engine has the trainer's weights, so the comparison is wrong: compare the two dicts of checksums."
    old = {name: checksum(weight - 1) for name, weight in trainer.weights().items()}  # an update adds 1
    return "The weights of before the update were sent." if have == old else "Other weights were sent."


@checks("colocated_cycle")
def cycle_after_cycle(algo: Algo) -> None:
    """A cycle runs without an objection, returns the trainer's metrics, and leaves all ready for the next."""
    results, trainer, engine = cycles(algo, 1)
    first_alone = "The update saw the first rollout alone: take all that the engine gives."
    expect(
        "colocated_cycle(...)", results[0], {"version": 1, "rollouts": 3}, given=GIVEN,
        likely="Return what trainer.update returned, for rollouts of all prompts.",
        mistakes={first_alone: {"version": 1, "rollouts": 1}},
    )  # fmt: skip
    expect(
        "bytes that the trainer holds after the cycle", trainer.card.held["trainer"], 0, given=GIVEN,
        likely="The trainer still holds the card at the end.",
    )  # fmt: skip
    undone = _left_undone(trainer, engine)
    expect("whether the next cycle can begin", not undone, True, given=GIVEN, likely=undone)
    results, _, _ = cycles(algo, 3)
    expect(
        "the versions after each of three cycles", [result["version"] for result in results], [1, 2, 3], given=GIVEN,
        likely="Each cycle makes one update.",
    )  # fmt: skip


def _left_undone(trainer: ScriptedTrainer, engine: ScriptedEngine) -> str:
    """What keeps the next cycle from beginning; empty where nothing does."""
    if engine.ready():
        return ""
    try:
        if next(engine.generate(["1 + 1 = ?"])).version != trainer.version:
            return "The engine generates with weights of before the update."
    except Objection as objection:
        return str(objection)
    return "The engine does not have the trainer's weights."


@checks("colocated_cycle")
def a_false_load_is_refused(algo: Algo) -> None:
    """A load that reports success but leaves a weight as it was ends in a RuntimeError."""
    for skips in [*((name,) for name in WEIGHTS), WEIGHTS]:
        what = f"skips {skips[0]}" if len(skips) == 1 else "changes nothing"
        given = f"an engine whose load {what} and reports success"
        trainer, engine = scripted_pair(skips)

        def run(trainer: ScriptedTrainer = trainer, engine: ScriptedEngine = engine, given: str = given) -> Any:
            try:
                return algo.colocated_cycle(trainer, engine, list(PROMPTS))
            except Objection as objection:
                likely = f"The engine objects first: {objection}"
                raise Mistake("the call", given, "a RuntimeError of your own", "an objection", likely) from None

        expect_error(
            run, RuntimeError, given=given, words=skips[0] if len(skips) == 1 else "",
            likely="After loading, compare all of the engine's checksums with the trainer's, and raise a RuntimeError "
            "that names the weight that differs.",
        )  # fmt: skip
