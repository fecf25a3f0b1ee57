"""Whose code runs: the exercises, and the student's functions where they are written.

The only module that imports `starter/` and `solutions/`. It loads and mixes them; it does not know what they compute.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from a5lib.config import HeadName, TrainConfig, nearest, resolve
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
PACKAGE_OF = {"yours": "starter", "reference": "solutions"}


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
            with suppress(ValueError, TypeError):  # a callable of the student's that has no signature takes no algo
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
    """
    chosen = impl or chosen_impl()
    if chosen == "solutions":
        return _assemble(lambda file, name: "reference")
    mine = load_package("starter")
    if chosen == "starter" or not has_reference():
        return _assemble(lambda file, name: "yours")
    return _assemble(lambda file, name: "yours" if is_written(_exercise(mine, file, name)) else "reference")


SCORING: dict[HeadName, tuple[str, ...]] = {
    "full": ("log_probs_from_logits", "get_response_log_probs"),
    "blocks": ("log_probs_from_logits", "log_probs_in_blocks", "get_response_log_probs_in_blocks"),
    "fused": (),
}


def require_for_training(functions: Algo, flags: TrainConfig) -> None:
    """Raise `UserError`, before any work, if a run would call a function that is not written, or one that leaves the
    weights of --mismatch-correction out without a word.
    """
    config = resolve(flags)
    needed = {*EXERCISES["advantages"], *EXERCISES["losses"], "pad_and_mask", "compute_rollout_rewards"}
    if config.engine != "layer_major" and not (config.device == "cpu" and config.vram_budget is not None):
        needed |= {*SCORING[config.head], "accumulate_gradients"}
    for name in NAMES:
        if name in needed and functions.whose[name] == "unwritten":
            otherwise = ", or set A5_IMPL=auto to run the reference in its place" if has_reference() else ""
            raise UserError(f"{unwritten_words(name)}, then run this again{otherwise}.")
    if config.mismatch_correction != "none" and "accumulate_gradients" in needed:
        from a5lib.course.checking import Mistake
        from a5lib.course.checks.train_step import losses_are_weighted_token_by_token

        try:
            losses_are_weighted_token_by_token(functions)
        except Mistake as mistake:
            raise UserError(
                f"--mismatch-correction {config.mismatch_correction} needs the weights that accumulate_gradients in "
                'starter/train_step.py leaves out; multiply each token\'s loss by its entry of batch["loss_weights"] '
                "(`a5 course check accumulate_gradients` says more), or leave that flag out."
            ) from mistake


def unwritten_words(name: str) -> str:
    """That a function is not written, where it is written, and the notebook that teaches it; no full stop yet."""
    exercise = exercise_of(name)
    return f"{name} is not written yet; write it in starter/{exercise}.py (notebook {notebook_of(exercise)} teaches it)"


def starter_text(exercise: str) -> str:
    """The student's file as it is saved."""
    try:
        return (package_folder("starter") / f"{exercise}.py").read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(
            f"starter/{exercise}.py cannot be read ({error}); `a5 course reset {exercise}` writes a fresh stub."
        ) from error


def notebook_of(exercise: str) -> str:
    """The notebook that teaches an exercise, "02" for masks, from the marker in the student's file."""
    found = re.search(r"\(notebook (\d+)\)", starter_text(exercise))
    return found[1] if found else "?"


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
    whose: dict[str, Whose] = {name: choose(file, name) for file, names in EXERCISES.items() for name in names}
    packages = {of: load_package(PACKAGE_OF[of]) for of in dict.fromkeys(whose.values())}
    for name, of in whose.items():
        functions[name] = _exercise(packages[of], exercise_of(name), name)
        if of == "yours" and not is_written(functions[name]):
            whose[name] = "unwritten"
    return Algo(whose=whose, **functions)


class LiveAlgo:
    """In a notebook: `algo.NAME` is your function as it was last saved, or the reference's where yours is not written.

    With A5_IMPL=solutions it is always the reference's.
    """

    def now(self) -> Algo:
        """The functions as they are saved now. A training run takes these, so that edits do not change it midway.

        Without `solutions/`, one that is not written says so calmly when it is called, also by another exercise.
        """
        functions = load_algo("solutions" if chosen_impl() == "solutions" else "auto")
        for name, of in functions.whose.items():
            if of == "unwritten":
                object.__setattr__(functions, name, functools.partial(_say_unwritten, name))
        return functions

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.now(), name)


def _say_unwritten(name: str, *args: Any, **kwargs: Any) -> None:
    from a5lib.course.notebook import explain_what_is_missing

    explain_what_is_missing()
    raise UserError(
        f"{unwritten_words(name)}, then run this cell again; there is no solutions/ here that could run in its place."
    )


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
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or "NotImplementedError" not in code.co_names


def what_to_write(function: Callable[..., Any]) -> str:
    """The message of a stub."""
    code = inspect.unwrap(getattr(function, "func", function)).__code__
    messages = [c for c in code.co_consts if isinstance(c, str) and "(notebook" in c]
    return messages[-1] if messages else "write the marked region"


def stub_called(error: BaseException) -> str | None:
    """The exercise whose stub raised an exception, or None if it came from elsewhere: PyTorch raises
    NotImplementedError too, for example where a function has no form for whole numbers."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, NotImplementedError) or not frames:
        return None
    code = frames[-1].f_code
    return code.co_name if code.co_name in NAMES and "NotImplementedError" in code.co_names else None


def exercise_of(name: str) -> str:
    """The file of an exercise: its own name, or the file that holds the function.

    >>> exercise_of("masks"), exercise_of("pad_and_mask")
    ('masks', 'masks')
    """
    for file, names in EXERCISES.items():
        if name == file or name in names:
            return file
    guess = nearest(str(name), [*EXERCISES, *NAMES])
    raise UserError(f"There is no exercise {name!r}; did you mean {guess!r}? They are {', '.join(EXERCISES)}.")


def has_reference() -> bool:
    """Whether `solutions/` is here; a teacher's starter branch has none.

    It must lie beside `starter/`: with two copies of the course and one environment, Python would find the other's.
    """
    reference, mine = _folder("solutions"), _folder("starter")
    return reference is not None and (mine is None or mine.parent == reference.parent)


def package_folder(package: str) -> Path:
    """Where `starter/` or `solutions/` lies."""
    folder = _folder(package)
    if folder is None or (package == "solutions" and not has_reference()):
        raise MissingPackage(f"The folder {package}/ is missing; restore it with `git checkout -- {package}`."
                             if package == "starter" else
                             "The folder solutions/ is not in this version of the course; A5_IMPL=starter runs your "
                             "code alone.")  # fmt: skip
    return folder


def course_folder() -> Path:
    """The folder that holds `starter/`, `notebooks/` and `runs/`."""
    return package_folder("starter").parent


def package_files(package: str) -> list[Path]:
    """The Python files of a package, by name; a hidden one, as an editor's lock, is none."""
    return sorted(package_folder(package).glob("[!.]*.py"))


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    # a folder that lost its files, but not its __pycache__, would pass for a package without an origin
    return Path(spec.origin).parent if spec and spec.origin and os.path.exists(spec.origin) else None


class MissingPackage(UserError):
    """`starter/` or `solutions/` is not there."""


_texts: dict[str, dict[Path, bytes]] = {}  # package -> its files as they were when it was imported


_loading = threading.RLock()


def load_package(package: str) -> ModuleType:
    """Import `starter` or `solutions`, anew if a file of it was saved since.

    Raises:
        UserError: the folder is missing, or a file of it cannot be read or does not import.
    """
    with _loading:  # another thread must not see half an import
        try:
            files = {file: file.read_bytes() for file in package_files(package)}
        except OSError as error:
            name = f"{package}/{os.path.basename(error.filename)}"
            raise UserError(f"{name} cannot be read ({error.strerror}); grant access to it, or remove it.") from error
        if package in sys.modules and _texts.setdefault(package, files) == files:
            return sys.modules[package]
        _forget(package)
        for file in files:  # Python compares compiled files by whole seconds and size; two saves can be closer
            with suppress(OSError):
                Path(importlib.util.cache_from_source(str(file))).unlink()
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(package)
        except (Exception, SystemExit) as error:
            _forget(package)
            raise _import_error(package, error) from error
        _texts[package] = files
        return module


def _forget(package: str) -> None:
    _texts.pop(package, None)
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        del sys.modules[name]


def _import_error(package: str, error: BaseException) -> UserError:
    lost = re.match(r"cannot import name '(\w+)' from '\w+\.(\w+)'", str(error))
    if isinstance(error, ImportError) and lost:
        return _no_function(package, lost[2], lost[1])
    folder, _, file = (getattr(error, "name", None) or "").rpartition(".")
    if isinstance(error, ModuleNotFoundError) and folder == "starter" and file in EXERCISES:
        return UserError(f"starter/{file}.py is missing; `a5 course reset {file}` writes a fresh stub.")
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno) for f in frames if os.path.basename(os.path.dirname(f.filename)) == package]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    place, line = places[-1] if places else (f"{package}/__init__.py", 1)
    reason = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split()) or "no message"
    otherwise = ", or set A5_IMPL=solutions to run the reference" if has_reference() else ""
    return UserError(
        f"{package}/{os.path.basename(place)} does not import ({type(error).__name__} in line {line}: {reason}); mend "
        f"that line{otherwise}."
    )


def _exercise(package: ModuleType, file: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(package, name, None)
    if not callable(function):
        raise _no_function(package.__name__, file, name)
    return function


def _no_function(package: str, file: str, name: str) -> UserError:
    return UserError(
        f"{package}/{file}.py has no function {name}; write its first line as it was (`a5 course diff {file}` shows "
        f"what changed), or take a fresh stub with `a5 course reset {file}`."
    )
