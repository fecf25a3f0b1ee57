"""How far a student is: what is written, whose code a run takes, and what the checks found.

This file counts; `checking` decides what is right.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from a5lib.course.checking import Result, run_checks
from a5lib.course.exercises import (
    EXERCISES,
    MissingPackage,
    Whose,
    chosen_impl,
    course_folder,
    load_algo,
    notebook_of,
)
from a5lib.errors import UserError


@dataclass(frozen=True)
class Progress:
    """One exercise: whose code a run takes for each function, which are written, and what the checks found."""

    exercise: str
    whose: dict[str, Whose]
    written: list[str]
    results: list[Result]

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)


def progress() -> tuple[list[Progress], str]:
    """How far each exercise is, and the sentence that says why nothing is known, if a file does not import."""
    chosen_impl()
    try:
        mine, runs = load_algo("starter"), load_algo()
        return [
            Progress(
                exercise,
                {name: runs.whose[name] for name in names},
                [name for name in names if mine.whose[name] == "yours"],
                run_checks(exercise),
            )
            for exercise, names in EXERCISES.items()
        ], ""
    except MissingPackage:
        raise
    except UserError as error:
        return [], str(error)


def notebook_name(exercise: str) -> str:
    """The notebook of an exercise by the name of its file, or by its number where the file is not there."""
    number = notebook_of(exercise)
    files = sorted((course_folder() / "notebooks").glob(f"{number}_*.ipynb"))
    return files[0].stem if files else number


def print_status(console: Console) -> None:
    """A table of all exercises, and what comes next."""
    found, fault = progress()
    if fault:
        console.print(f"{fault} Until then no code runs and nothing can be checked.", highlight=False, markup=False)
        return
    table = Table(title="The course" + (f", A5_IMPL={os.environ['A5_IMPL']}" if os.environ.get("A5_IMPL") else ""))
    for column in ("exercise", "notebook", "written", "checks passed", "code that runs"):
        table.add_column(column, justify="right" if column in ("written", "checks passed") else "left")
    for row in found:
        table.add_row(
            row.exercise,
            notebook_of(row.exercise),
            f"{len(row.written)} of {len(row.whose)}",
            f"{row.count('passed')} of {len(row.results)}",
            whose_in_words(row.whose),
        )
    console.print(table)
    functions = sum(len(row.whose) for row in found)
    written = sum(len(row.written) for row in found)
    passed, checks = sum(row.count("passed") for row in found), sum(len(row.results) for row in found)
    console.print(f"{written} of {functions} functions written, {passed} of {checks} checks passed.", highlight=False)
    todo = next((row for row in found if len(row.written) < len(row.whose) or row.count("failed")), None)
    if todo is not None:
        console.print(f"Next: starter/{todo.exercise}.py, notebook {notebook_name(todo.exercise)}.", highlight=False)


def whose_in_words(whose: dict[str, Whose]) -> str:
    """
    >>> whose_in_words({"f": "yours", "g": "reference", "h": "yours"}), whose_in_words({"f": "unwritten"})
    ('yours 2, reference 1', 'none yet')
    """
    words = {"yours": "yours", "reference": "reference", "unwritten": "none yet"}
    counts = Counter(words[of] for of in whose.values())
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{of} {n}" for of, n in counts.items())
