"""Whose code runs: the exercises, and the student's functions where they are written.

The only module that imports `starter/` and `solutions/`. It loads and mixes them; it does not know what they compute.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from a5lib.config import nearest
from a5lib.errors import UserError

Impl = Literal["auto", "starter", "solutions"]
Whose = Literal["yours", "reference", "unwritten"]

# file -> the functions that a student writes in it
EXERCISES: dict[str, tuple[str, ...]] = {
    "masks": ("pad_and_mask", "tokenize_prompt_and_output"),
    "rewards": ("parse_answer", "compute_rollout_rewards"),
    "advantages": ("compute_group_normalized_rewards",),
    "losses": ("compute_policy_gradient_loss", "aggregate_loss_across_microbatch"),
    "scoring": (
        "log_probs_from_logits",
        "get_response_log_probs",
        "log_probs_in_blocks",
        "get_response_log_probs_in_blocks",
    ),
    "adamw": ("adamw_update", "round_stochastically", "adamw_step"),
    "train_step": ("accumulate_gradients", "grpo_train_step"),
    "layer_major": ("layer_major_backward",),
    "colocation": ("colocated_cycle",),
    "estimator": ("estimate_advantages",),
}
NAMES = tuple(name for names in EXERCISES.values() for name in names)


@dataclass(frozen=True, repr=False)  # a bound function holds its Algo, so the repr would not end
class Algo:
    """The exercise functions of one run, by name, and whose each is.

    A function that calls other exercises looks them up here, so that yours and the reference's mix freely.
    """

    whose: dict[str, Whose]
    pad_and_mask: Callable[..., Any]
    tokenize_prompt_and_output: Callable[..., Any]
    parse_answer: Callable[..., Any]
    compute_rollout_rewards: Callable[..., Any]
    compute_group_normalized_rewards: Callable[..., Any]
    compute_policy_gradient_loss: Callable[..., Any]
    aggregate_loss_across_microbatch: Callable[..., Any]
    log_probs_from_logits: Callable[..., Any]
    get_response_log_probs: Callable[..., Any]
    log_probs_in_blocks: Callable[..., Any]
    get_response_log_probs_in_blocks: Callable[..., Any]
    adamw_update: Callable[..., Any]
    round_stochastically: Callable[..., Any]
    adamw_step: Callable[..., Any]
    accumulate_gradients: Callable[..., Any]
    grpo_train_step: Callable[..., Any]
    layer_major_backward: Callable[..., Any]
    colocated_cycle: Callable[..., Any]
    estimate_advantages: Callable[..., Any]

    def __post_init__(self) -> None:
        for name in self.whose:
            function = getattr(self, name)
            if "algo" in inspect.signature(function).parameters:
                object.__setattr__(self, name, functools.partial(function, algo=self))

    def summary(self) -> str:
        """How many of the exercises are the student's, as "7 of 19 yours"."""
        return f"{list(self.whose.values()).count('yours')} of {len(self.whose)} yours"


def load_algo(impl: Impl | None = None) -> Algo:
    """The exercise functions of one implementation, as the files are now: a file that was saved is read anew.

    Args:
        impl: "starter" takes every function from `starter/`, written or not (one that is not raises NotImplementedError
            when it is called); "solutions" takes the reference; "auto" takes the student's where it is written and the
            reference where not. None: the environment variable A5_IMPL, and "auto" where that is not set. Without
            `solutions/`, as on a teacher's starter branch, "auto" is the same as "starter".

    Raises:
        UserError: an unknown implementation, a folder that is missing, or a file of the student's that does not import.

    >>> load_algo("solutions").summary()
    '0 of 19 yours'
    """
    chosen = impl or chosen_impl()
    if chosen == "solutions":
        return _assemble(lambda file, name: "reference")
    mine = load_package("starter")
    if chosen == "starter" or not has_reference():
        return _assemble(lambda file, name: "yours")
    return _assemble(lambda file, name: "yours" if is_written(_exercise(mine, file, name)) else "reference")


def algo_to_check(exercise: str) -> Algo:
    """The student's functions of one file among the reference's others, so that a check finds faults of that file
    alone. Under A5_IMPL=solutions all are the reference's."""
    if chosen_impl() == "solutions":
        return load_algo("solutions")
    load_package("starter")
    reference = has_reference()
    return _assemble(lambda file, name: "yours" if file == exercise or not reference else "reference")


def _assemble(choose: Callable[[str, str], Whose]) -> Algo:
    functions: dict[str, Callable[..., Any]] = {}
    whose: dict[str, Whose] = {}
    for file, names in EXERCISES.items():
        for name in names:
            whose[name] = choose(file, name)
            package = load_package("solutions" if whose[name] == "reference" else "starter")
            functions[name] = _exercise(package, file, name)
            if whose[name] == "yours" and not is_written(functions[name]):
                whose[name] = "unwritten"
    return Algo(whose=whose, **functions)


class LiveAlgo:
    """In a notebook: `algo.NAME` is your function as it was last saved, or the reference's where yours is not written.

    With A5_IMPL=solutions it is always the reference's.
    """

    def now(self) -> Algo:
        """The functions as they are saved now. A training run takes these, so that edits do not change it midway."""
        return load_algo("solutions" if chosen_impl() == "solutions" else "auto")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        now = self.now()
        if now.whose.get(name) == "unwritten":
            raise UserError(
                f"{name} is not written yet, and there is no solutions/ here to run instead; write it in "
                f"starter/{exercise_of(name)}.py, then run this cell again."
            )
        return getattr(now, name)


algo = LiveAlgo()


def chosen_impl() -> Impl:
    """The implementation that A5_IMPL names; "auto" where it is not set."""
    chosen = os.environ.get("A5_IMPL") or "auto"
    if chosen not in get_args(Impl):
        guess = nearest(chosen, get_args(Impl))
        raise UserError(f"A5_IMPL is {chosen!r}; did you mean {guess!r}? Choose auto, starter or solutions.")
    return chosen  # type: ignore[return-value]


def is_written(function: Callable[..., Any]) -> bool:
    """Whether an exercise is more than its stub: nothing in it raises NotImplementedError."""
    return "NotImplementedError" not in inspect.unwrap(function).__code__.co_names


def exercise_of(name: str) -> str:
    """The file of an exercise: its own name, or the file that holds the function.

    >>> exercise_of("masks"), exercise_of("pad_and_mask")
    ('masks', 'masks')
    """
    for file, names in EXERCISES.items():
        if name == file or name in names:
            return file
    guess = nearest(name, [*EXERCISES, *NAMES])
    raise UserError(f"There is no exercise {name!r}; did you mean {guess!r}? They are {', '.join(EXERCISES)}.")


def has_reference() -> bool:
    """Whether `solutions/` is here; a teacher's starter branch has none."""
    return importlib.util.find_spec("solutions") is not None


def package_folder(package: str) -> Path:
    """Where `starter/` or `solutions/` lies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(package)
    return Path(next(iter(spec.submodule_search_locations)))


_stamps: dict[str, tuple[tuple[str, int, int], ...]] = {}  # package -> name, time and size of its files when imported


def load_package(package: str) -> ModuleType:
    """Import `starter` or `solutions`, anew if a file of it was saved since.

    Raises:
        UserError: the folder is missing, or a file of it does not import.
    """
    folder = package_folder(package)
    files = sorted(folder.glob("*.py"))
    stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    if package in sys.modules and _stamps.get(package, stamp) != stamp:
        for name in [m for m in sys.modules if m.partition(".")[0] == package]:
            del sys.modules[name]
        for file in files:  # compiled files are compared by whole seconds, and two saves can be closer
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        importlib.invalidate_caches()
    _stamps[package] = stamp
    try:
        return importlib.import_module(package)
    except Exception as error:
        _stamps.pop(package)
        raise _import_error(package, error) from error


def _missing(package: str) -> UserError:
    return UserError(f"The folder {package}/ is missing; restore it with `git checkout {package}`.")


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
