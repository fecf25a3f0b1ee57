"""Checks that teach: what a student's function returned, what was expected, and the likely mistake.

This file runs checks and words their results. The checks themselves are in `checks/`, one file an exercise.
"""

from __future__ import annotations

import importlib
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from a5lib.course.exercises import (
    EXERCISES,
    Algo,
    algo_to_check,
    exercise_of,
    package_folder,
    stub_called,
    what_to_write,
)

Status = Literal["passed", "failed", "unwritten"]


class Mistake(AssertionError):
    """A check failed: the smallest input that shows it, what was expected, what came, and the likely reason."""

    def __init__(self, what: str, given: str, expected: str, got: str, likely: str) -> None:
        super().__init__(likely)
        self.what, self.given, self.expected, self.got, self.likely = what, given, expected, got, likely


@dataclass(frozen=True)
class Check:
    """One check of one function; `run` receives the functions and raises `Mistake`."""

    function: str
    title: str
    run: Callable[[Algo], None]


@dataclass(frozen=True)
class Result:
    """What a check found; `words` explains a failure, or says what is to be written."""

    check: Check
    status: Status
    words: str = ""


_CHECKS: dict[str, list[Check]] = {exercise: [] for exercise in EXERCISES}


def checks(function: str) -> Callable[[Callable[[Algo], None]], Callable[[Algo], None]]:
    """Register a check of one exercise function. Its docstring is its title: a short sentence that should be true."""

    def register(run: Callable[[Algo], None]) -> Callable[[Algo], None]:
        _CHECKS[exercise_of(function)].append(Check(function, (run.__doc__ or "").strip(), run))
        return run

    return register


def expect(
    what: str,
    got: Any,
    right: Any,
    *,
    given: str,
    likely: str,
    mistakes: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Compare a result with the right one, and raise `Mistake` if it differs.

    Args:
        what: name of the value, such as "labels".
        got: what the student's function gave.
        right: a tensor, number, text, bool, None, or lists, tuples and dicts of these. Where it is a tensor or a float
            tensor, `got` must be a tensor of the same shape and of the same kind (bool, whole or floating); values may
            differ by `tolerance`, absolute and relative.
        given: the input, in words or numbers that a person can follow.
        likely: the likely mistake, if none of `mistakes` fits; a sentence that does not give the answer away.
        mistakes: sentence -> the value that this mistake would give. The first that fits `got` is named.
    """
    if _same(got, right, tolerance):
        return
    for sentence, wrong in (mistakes or {}).items():
        if _same(got, wrong, tolerance):
            raise Mistake(what, given, show_value(right), show_value(got), sentence)
    raise Mistake(what, given, show_value(right), show_value(got), _wrong_kind(what, got, right) or likely)


def expect_error(
    function: Callable[..., Any], kind: type[Exception], *, given: str, likely: str, words: str = ""
) -> None:
    """Call a function that must refuse its input by raising `kind`, with `words` in the message."""
    try:
        got = function()
    except kind as error:
        if stub_called(error):
            raise
        if words in str(error):
            return
        raise Mistake("the message", given, f"a {kind.__name__} that says {words!r}", str(error), likely) from None
    raise Mistake("the call", given, f"a {kind.__name__}", show_value(got), likely)


def expect_keys(what: str, got: Any, keys: Sequence[str]) -> None:
    """Raise `Mistake` unless `got` is a dict with these keys: the values are read afterwards."""
    if not isinstance(got, dict) or any(key not in got for key in keys):
        have = f"a dict with {', '.join(map(str, got)) or 'nothing'}" if isinstance(got, dict) else show_value(got)
        missing = [repr(key) for key in keys if isinstance(got, dict) and key not in got]
        likely = _wrong_kind(what, got, {}) or f"The dict lacks {' and '.join(missing)}."
        raise Mistake(what, "any input", f"a dict with {', '.join(keys)}", have, likely)


def expect_pair(what: str, got: Any) -> tuple[Any, Any]:
    """Raise `Mistake` unless `got` is a pair; returns it."""
    if not isinstance(got, tuple) or len(got) != 2:
        likely = _wrong_kind(what, got, ()) or "The function returns two things: the values, and a dict of metadata."
        raise Mistake(what, "any input", "a tuple of two", show_value(got), likely)
    return got


def _same(got: Any, right: Any, tolerance: float) -> bool:
    if isinstance(right, Tensor):
        if not isinstance(got, Tensor) or got.shape != right.shape:
            return False
        kinds = [(t.dtype == torch.bool, t.is_floating_point()) for t in (got, right)]
        return kinds[0] == kinds[1] and torch.allclose(
            got.detach().double().cpu(), right.detach().double().cpu(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if isinstance(right, float):
        got = got.item() if isinstance(got, Tensor) and got.numel() == 1 else got
        if isinstance(got, bool) or not isinstance(got, int | float):
            return False
        return math.isclose(got, right, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(got) and math.isnan(right))
    if isinstance(right, dict):
        return (
            isinstance(got, dict)
            and got.keys() == right.keys()
            and all(_same(got[key], value, tolerance) for key, value in right.items())
        )
    if isinstance(right, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(right)
            and all(_same(g, r, tolerance) for g, r in zip(got, right, strict=True))
        )
    return type(got) is type(right) and bool(got == right)


def _wrong_kind(what: str, got: Any, right: Any) -> str:
    """What is wrong with the kind of a result, before its values matter; empty where the kind is right."""
    if got is None:
        return "The function gives None: is there a `return`?"
    if isinstance(right, dict) and not isinstance(got, dict):
        return f"{what} must be a dict, not {type(got).__name__}."
    if isinstance(right, Tensor):
        if not isinstance(got, Tensor):
            return f"{what} must be a tensor, not {type(got).__name__}."
        if got.shape != right.shape:
            return f"{what} has the shape {tuple(got.shape)} and not {tuple(right.shape)}."
        if (got.dtype == torch.bool) != (right.dtype == torch.bool) or got.is_floating_point() != (
            right.is_floating_point()
        ):
            return f"{what} has the type {got.dtype} and not {right.dtype}."
    return ""


def show_value(value: Any) -> str:
    """A value as a person reads it: tensors as lists, floats with at most four decimals.

    >>> show_value(torch.tensor([[0.5, 1.0]])), show_value(1 / 3), show_value({"a": None})
    ('[[0.5, 1.0]]', '0.3333', "{'a': None}")
    """
    if isinstance(value, Tensor):
        return show_value(value.detach().cpu().tolist())
    if isinstance(value, float):
        return f"{value:.4g}" if value and abs(value) < 1e-3 else str(round(value, 4))
    if isinstance(value, list | tuple):
        marks = "[]" if isinstance(value, list) else "()"
        return marks[0] + ", ".join(map(show_value, value)) + marks[1]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {show_value(v)}" for key, v in value.items()) + "}"
    return repr(value)


def run_checks(exercise: str, algo: Algo | None = None) -> list[Result]:
    """All checks of an exercise, in order. `algo`: the functions (None: as `algo_to_check` chooses them)."""
    exercise = exercise_of(exercise)
    importlib.import_module(f"a5lib.course.checks.{exercise}")
    functions = algo_to_check(exercise) if algo is None else algo
    results = []
    for check in _CHECKS[exercise]:
        if functions.whose[check.function] == "unwritten":
            results.append(Result(check, "unwritten", what_to_write(getattr(functions, check.function))))
        else:
            results.append(_run(check, functions))
    return results


def _run(check: Check, functions: Algo) -> Result:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            check.run(functions)
    except Mistake as mistake:
        return Result(check, "failed", describe(mistake))
    except (Exception, SystemExit) as error:
        if name := stub_called(error):
            return Result(check, "unwritten", f"It calls {name}, which is not written yet.")
        return Result(check, "failed", _place(error, check))
    return Result(check, "passed")


def describe(mistake: Mistake) -> str:
    """A mistake in four lines."""
    lines = {"Given": mistake.given, "Expected": f"{mistake.what} = {mistake.expected}",
             "Got": f"{mistake.what} = {_short(mistake.got)}", "Likely": mistake.likely}  # fmt: skip
    return "\n".join(f"{name + ':':<10}{text}" for name, text in lines.items())


def _short(text: str, longest: int = 400) -> str:
    """A value of the student's on one line; a big one would hide the words around it."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[:longest]} ... ({len(text)} characters)"


def _place(error: BaseException, check: Check) -> str:
    """An exception of the student's code in two lines: kind, words, file and line, never a traceback."""
    folder = package_folder("starter")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == folder]
    words = _short(str(error)) or "no message"
    if frames:
        where = f"line {frames[-1].lineno} of starter/{Path(frames[-1].filename).name}: `{frames[-1].line}`"
        return f"{check.function} raised {type(error).__name__} in {where}\n{'Words:':<10}{words}"
    if isinstance(error, TypeError) and re.search(rf"\b{check.function}\(\) ", words):
        return (
            f"{check.function} cannot be called as the course calls it ({words}).\n"
            f"{'Likely:':<10}Its first line was changed; `a5 course diff {exercise_of(check.function)}` shows that."
        )
    return (
        f"{check.function} returned something that the check could not use ({type(error).__name__}: {words}).\n"
        f"{'Likely:':<10}Compare what you return with the section `Returns` of its docstring."
    )
