"""A student's file beside its stub: compare them, or start anew. Nothing that a student wrote is removed."""

from __future__ import annotations

import difflib
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from a5lib.course.exercises import (
    EXERCISES,
    course_folder,
    exercise_of,
    has_reference,
    package_folder,
    starter_text,
)
from a5lib.course.stubs import BEGIN, blank
from a5lib.errors import UserError


def stub_of(exercise: str) -> str:
    """The stub of an exercise: from the reference, else the newest one that git has, else the file without its regions.

    Raises:
        UserError: none of these can be had.
    """
    if has_reference():
        return blank((package_folder("solutions") / f"{exercise}.py").read_text(encoding="utf-8"))
    for text in _committed(exercise):
        with suppress(UserError):
            if blank(text) == text and _is_whole(exercise, text):
                return text
    with suppress(UserError):
        text = blank(starter_text(exercise))
        if _is_whole(exercise, text):
            return text
    raise UserError(
        f"There is no stub to go back to: solutions/ is not here, git has none of starter/{exercise}.py, and a region "
        "is missing in the file itself; ask your teacher for it."
    )


def _is_whole(exercise: str, text: str) -> bool:
    """Whether a text has a region for each function of the exercise."""
    names = EXERCISES[exercise]
    return text.count(BEGIN) == len(names) and all(f"def {name}(" in text for name in names)


def _committed(exercise: str) -> Iterator[str]:
    """The versions of a student's file that git has, newest first; none without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=course_folder(), capture_output=True, check=True)
        return done.stdout.decode("utf-8")

    try:
        for commit in git("log", "--format=%H", "--", f"starter/{exercise}.py").split():
            yield git("show", f"{commit}:./starter/{exercise}.py")
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return


def difference(exercise: str, solution: bool = False) -> str:
    """A unified diff from the stub (or the reference) to the student's file; empty where they are the same."""
    if solution:
        before = (package_folder("solutions") / f"{exercise}.py").read_text(encoding="utf-8")
    else:
        before = stub_of(exercise)
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        starter_text(exercise).splitlines(keepends=True),
        f"{'solutions' if solution else 'stub'}/{exercise}.py",
        f"starter/{exercise}.py",
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def reset(name: str) -> str:
    """Write a fresh stub of a file; the old file is kept beside it. Returns a sentence that says what was done."""
    exercise = exercise_of(name)
    if name != exercise:
        raise UserError(
            f"A whole file is reset, not one function of it; `a5 course reset {exercise}` resets {name} too."
        )
    path, stub = package_folder("starter") / f"{exercise}.py", stub_of(exercise).encode()
    try:
        before = path.read_bytes() if path.exists() else None
        if before == stub:
            return f"starter/{exercise}.py is still the stub; nothing was changed."
        kept = "" if before is None else f" Your file is kept as starter/{_keep(path, before).name}."
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(stub)
        os.replace(fresh, path)
    except OSError as error:
        raise UserError(f"starter/{exercise}.py was not reset ({error.strerror}); your file is as it was.") from error
    return f"starter/{exercise}.py is a fresh stub.{kept}"


def _keep(path: Path, text: bytes) -> Path:
    for number in count(1):
        old = path.with_name(f"{path.name}.old-{number}")
        try:
            with old.open("xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            continue
        return old
    raise AssertionError("count ends")
