"""Whose code runs: stubs out of solutions, and the student's functions where they are written.

The only module that knows `starter/` and `solutions/`. It compares and loads them; it does not know what they compute.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from a5lib.config import nearest
from a5lib.errors import UserError

BEGIN, END = "### BEGIN YOUR CODE", "### END YOUR CODE"

Impl = Literal["auto", "starter", "solutions"]
Whose = Literal["yours", "reference", "unwritten"]

# file -> the functions that a student writes in it
EXERCISES: dict[str, tuple[str, ...]] = {
    "masks": ("pad_and_mask", "tokenize_prompt_and_output"),
    "rewards": ("compute_rollout_rewards",),
    "advantages": ("compute_group_normalized_rewards",),
    "losses": ("compute_policy_gradient_loss", "aggregate_loss_across_microbatch"),
    "scoring": (
        "log_probs_from_logits",
        "get_response_log_probs",
        "log_probs_in_blocks",
        "get_response_log_probs_in_blocks",
    ),
    "train_step": ("accumulate_gradients", "grpo_train_step"),
}


def blank(text: str) -> str:
    """A solution's text with every marked region replaced by a stub that says what to do.

    A region lies between the lines `### BEGIN YOUR CODE: what to do` and `### END YOUR CODE`, which stay; the words
    after the colon become the stub's message. Blanking a blanked text changes nothing, so a student's file and the
    reference give the same text as long as nothing outside the regions was changed.

    Raises:
        UserError: a region within a region, one that does not end, or an end without a beginning, with the line number.

    >>> print(blank('def f():\\n    ### BEGIN YOUR CODE: return 1\\n    return 1\\n    ### END YOUR CODE'))
    def f():
        ### BEGIN YOUR CODE: return 1
        raise NotImplementedError("return 1")
        ### END YOUR CODE
    """
    lines: list[str] = []
    began: int | None = None
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        words = line.strip()
        if words.startswith(BEGIN):
            if began is not None:
                raise UserError(
                    f"Line {number} begins a region inside the one of line {began}; end that with `{END}` first."
                )
            began = number
            what = words.removeprefix(BEGIN).strip(" :") or "write this region; the text above it says what it does"
            indent = line[: len(line) - len(line.lstrip())]
            lines += [line, f"{indent}raise NotImplementedError({json.dumps(what, ensure_ascii=False)})\n"]
        elif words.startswith(END):
            if began is None:
                raise UserError(f"Line {number} ends a region that does not begin; put `{BEGIN}` before it.")
            began = None
            lines.append(line)
        elif began is None:
            lines.append(line)
    if began is not None:
        raise UserError(f"The region of line {began} does not end; put `{END}` after it.")
    return "".join(lines)


@dataclass(frozen=True, repr=False)  # a bound function holds its Algo, so the repr would not end
class Algo:
    """The exercise functions of one run, by name, and whose each is.

    A function that calls other exercises looks them up here, so that yours and the reference's mix freely.
    """

    whose: dict[str, Whose]
    tokenize_prompt_and_output: Callable[..., Any]
    pad_and_mask: Callable[..., Any]
    compute_rollout_rewards: Callable[..., Any]
    compute_group_normalized_rewards: Callable[..., Any]
    compute_policy_gradient_loss: Callable[..., Any]
    aggregate_loss_across_microbatch: Callable[..., Any]
    log_probs_from_logits: Callable[..., Any]
    get_response_log_probs: Callable[..., Any]
    log_probs_in_blocks: Callable[..., Any]
    get_response_log_probs_in_blocks: Callable[..., Any]
    accumulate_gradients: Callable[..., Any]
    grpo_train_step: Callable[..., Any]

    def __post_init__(self) -> None:
        for name in self.whose:
            function = getattr(self, name)
            if "algo" in inspect.signature(function).parameters:
                object.__setattr__(self, name, functools.partial(function, algo=self))

    def summary(self) -> str:
        """How many of the exercises are the student's, as "7 of 12 yours"."""
        return f"{list(self.whose.values()).count('yours')} of {len(self.whose)} yours"


def load_algo(impl: Impl | None = None) -> Algo:
    """The exercise functions of one implementation.

    Args:
        impl: "starter" takes every function from `starter/`, written or not (one that is not raises NotImplementedError
            when it is called); "solutions" takes the reference; "auto" takes the student's where it is written and the
            reference where not. None: the environment variable A5_IMPL, and "auto" where that is not set.

    Raises:
        UserError: an unknown implementation, a folder that is missing, or a file of the student's that does not import.

    >>> load_algo("solutions").summary()
    '0 of 12 yours'
    """
    chosen = impl or os.environ.get("A5_IMPL") or "auto"
    if chosen not in get_args(Impl):
        guess = nearest(chosen, get_args(Impl))
        raise UserError(f"A5_IMPL is {chosen!r}; did you mean {guess!r}? Choose auto, starter or solutions.")
    mine = None if chosen == "solutions" else _load_package("starter")
    functions: dict[str, Callable[..., Any]] = {}
    whose: dict[str, Whose] = {}
    for file, names in EXERCISES.items():
        for name in names:
            function = None if mine is None else _exercise(mine, file, name)
            if function is not None and (chosen == "starter" or is_written(function)):
                functions[name], whose[name] = function, "yours" if is_written(function) else "unwritten"
            else:
                functions[name], whose[name] = _exercise(_load_package("solutions"), file, name), "reference"
    return Algo(whose=whose, **functions)


def is_written(function: Callable[..., Any]) -> bool:
    """Whether an exercise is more than its stub: nothing in it raises NotImplementedError."""
    return "NotImplementedError" not in inspect.unwrap(function).__code__.co_names


def _load_package(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise UserError(f"The folder {package}/ is missing; restore it with `git checkout {package}`.") from error
        raise _import_error(package, error) from error
    except Exception as error:
        raise _import_error(package, error) from error


def _import_error(package: str, error: Exception) -> UserError:
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno) for f in frames if os.path.basename(os.path.dirname(f.filename)) == package]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    file, line = places[-1] if places else (f"{package}/__init__.py", 1)
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    where = f"{package}/{os.path.basename(file)}"
    return UserError(
        f"{where} does not import ({type(error).__name__} in line {line}: {reason}); mend that line, or set "
        "A5_IMPL=solutions to run the reference."
    )


def _exercise(package: ModuleType, file: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(package, name, None)
    if function is None:
        raise UserError(
            f"{package.__name__}/{file}.py has no function {name}; restore its first line from the reference."
        )
    return function
