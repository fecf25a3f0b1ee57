"""Each planted fault fails a check whose message names it; the reference fails none."""

import importlib
import types
from pathlib import Path

import pytest

from a5lib.course.checking import run_checks
from a5lib.course.exercises import EXERCISES, Algo, has_reference

pytestmark = pytest.mark.skipif(not has_reference(), reason="the zoo is made from solutions/, which is not here")

ROOT = Path(__file__).parent.parent
ZOO = {name: importlib.import_module(f"tests.zoo.{name}").FAULTS for name in EXERCISES}
CASES = [pytest.param(name, fault, id=f"{name}-{fault.name}") for name in EXERCISES for fault in ZOO[name]]


def algo_with(exercise, text):
    """The reference with one of its files given as text; its place is named starter/, as a student's would be."""
    package = importlib.import_module("solutions")
    module = types.ModuleType(f"solutions.{exercise}")
    module.__package__ = "solutions"
    exec(compile(text, str(ROOT / "starter" / f"{exercise}.py"), "exec"), module.__dict__)
    changed = EXERCISES[exercise]
    names = [name for group in EXERCISES.values() for name in group]
    functions = {name: getattr(module if name in changed else package, name) for name in names}
    return Algo(whose={name: "yours" if name in changed else "reference" for name in names}, **functions)


def source(exercise):
    return (ROOT / "solutions" / f"{exercise}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("exercise", list(EXERCISES))
def test_the_reference_passes_every_check(exercise):
    results = run_checks(exercise, algo_with(exercise, source(exercise)))
    assert {result.check.function for result in results} == set(EXERCISES[exercise]), "a function has no check"
    assert not [result for result in results if result.status != "passed"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # one of the faults
@pytest.mark.parametrize(("exercise", "fault"), CASES)
def test_a_planted_fault_is_named(exercise, fault):
    text = source(exercise)
    assert text.count(fault.old) == 1, f"{fault.old!r} occurs {text.count(fault.old)} times in {exercise}.py"
    failed = [r for r in run_checks(exercise, algo_with(exercise, text.replace(fault.old, fault.new)))
              if r.status == "failed"]  # fmt: skip
    assert failed, "no check noticed"
    assert any(fault.words in r.words for r in failed), [r.words for r in failed]


def test_there_are_enough_faults():
    assert all(len(faults) >= 4 for faults in ZOO.values()), {name: len(faults) for name, faults in ZOO.items()}
    assert sum(map(len, ZOO.values())) >= 36
