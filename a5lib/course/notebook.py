"""What a notebook says to a student: an exercise's text, the results of its checks, and hints.

In IPython texts are shown as Markdown, elsewhere they are printed. This file only shows; `checking` decides.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from a5lib.course.checking import Result, run_checks
from a5lib.course.exercises import (
    EXERCISES,
    MissingPackage,
    Whose,
    algo_to_check,
    chosen_impl,
    exercise_of,
    has_reference,
    package_folder,
    starter_text,
)
from a5lib.course.stubs import blank, function_text, region_text
from a5lib.errors import UserError


def show(*names: str) -> None:
    """Show the stubs of exercises (files, or single functions) and a link to the file to edit.

    The region is always shown as a stub, also where you have written it.
    """
    for exercise in dict.fromkeys(exercise_of(name) for name in names):
        text = blank(starter_text(exercise))
        wanted = [f for f in EXERCISES[exercise] if exercise in names or f in names]
        code = "\n\n\n".join(function_text(text, name) for name in wanted)
        _display(
            f"Write this in [starter/{exercise}.py](../starter/{exercise}.py), between the markers, and save the file:"
            f"\n\n```python\n{code}\n```"
        )


def check(name: str) -> None:
    """Run the checks of an exercise (a file or one function) on your code as it is saved, and say what they found."""
    print(check_in_words(name)[1])


def check_in_words(*names: str) -> tuple[bool, str]:
    """Whether every check of these exercises passes, and what `check` says. A file that does not import fails.

    Raises:
        UserError: there is no such exercise, A5_IMPL has no such value, or `starter/` is missing.
    """
    chosen_impl()
    passed, reports = True, []
    for name, exercise in [(name, exercise_of(name)) for name in names]:
        try:
            functions = algo_to_check(exercise)
            results = [r for r in run_checks(exercise, functions) if name in (exercise, r.check.function)]
            reports.append(report(exercise, results, functions.whose))
        except MissingPackage:
            raise
        except UserError as error:
            return False, str(error)
        passed = passed and all(result.status == "passed" for result in results)
    return passed, "\n\n".join(reports)


def report(exercise: str, results: list[Result], whose: dict[str, Whose]) -> str:
    """The results in words: what is wrong first, then what is still to be written."""
    passed = [r for r in results if r.status == "passed"]
    failed = [r for r in results if r.status == "failed"]
    unwritten = {r.check.function: r.words for r in results if r.status == "unwritten"}
    code = "the reference" if all(whose[f] == "reference" for f in EXERCISES[exercise]) else "your code"
    if not failed and not unwritten:
        return f"{exercise}: all {len(passed)} checks pass ({code})."
    lines = []
    if passed or failed:
        lines.append(f"{exercise}: {len(passed)} of {len(passed) + len(failed)} checks pass ({code}).")
    if len({result.check.function for result in failed}) > 1:
        lines.append("Mend the first function first: those after it may call it.")
    said: set[tuple[str, str]] = set()
    for result in failed:
        function, words = result.check.function, result.words
        lines += ["", f"✗ {function}: {result.check.title}"]
        lines += ["  The same as above."] if (function, words) in said else [f"  {w}" for w in words.splitlines()]
        said.add((function, words))
    for function, words in unwritten.items():
        if whose[function] != "unwritten":
            lines += ["", f"○ {function} cannot be checked yet. {words}"]
            continue
        lines += ["", f"○ {function} is not written yet. In starter/{exercise}.py: {words}"]
        if has_reference():
            lines.append("  Until then a notebook uses the reference.")
    lines += ["", f'Stuck? hint("{exercise}", 1), then 2, then 3.']
    return "\n".join(lines).strip()


def hint(name: str, level: int = 1) -> None:
    """Show a hint for an exercise (a file or one function): 1 is a nudge, 2 the formula, 3 the code."""
    if level not in (1, 2, 3):
        raise UserError(f"There is no hint {level!r}; choose 1 (a nudge), 2 (the formula) or 3 (the code).")
    exercise = exercise_of(name)
    functions = [f for f in EXERCISES[exercise] if name in (exercise, f)]
    _display("\n\n".join(f"**{function}**\n\n{hint_text(function, level)}" for function in functions))


def hint_text(function: str, level: int) -> str:
    """One hint. The first two are in `hints/`; the third is the reference's region, where `solutions/` is here."""
    exercise = exercise_of(function)
    if level == 3:
        if not has_reference():
            return "The code is in solutions/, which is not in this version of the course; ask your teacher."
        text = (package_folder("solutions") / f"{exercise}.py").read_text(encoding="utf-8")
        return f"```python\n{region_text(text, function)}\n```"
    text = files("a5lib.course").joinpath("hints", f"{exercise}.md").read_text(encoding="utf-8")
    section = re.search(rf"^# {function}$(.*?)(?=^# |\Z)", text, re.MULTILINE | re.DOTALL)
    found = section and re.search(rf"^## {level}$(.*?)(?=^## |\Z)", section[1], re.MULTILINE | re.DOTALL)
    if not found:
        raise UserError(f"hints/{exercise}.md has no hint {level} for {function}.")
    return found[1].strip()


def explain_what_is_missing() -> None:
    """From now on, in this kernel, a name, an entry or a file's line that is missing is one sentence: a cell above
    stopped at a function that is not written, and what it would have made is not there."""
    shell = _shell()
    if shell is None:
        return

    def explain(shell: Any, kind: type, error: Exception, trace: Any, tb_offset: int | None = None) -> None:
        words = (
            f"{': '.join(filter(None, (kind.__name__, str(error))))}. A cell above stopped at a function that is not "
            "written, and this one may need what it would have made; write that function first, or go on with a cell "
            "that does not need it."
        )
        shell._showtraceback(kind, error, [words])  # what IPython itself calls; a custom handler has to show

    shell.set_custom_exc((NameError, LookupError, StopIteration), explain)


def _shell() -> Any:
    """The IPython shell that this runs in, or None."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _display(markdown: str) -> None:
    if _shell() is None:
        print(markdown)
        return
    from IPython.display import Markdown, display

    display(Markdown(markdown))
