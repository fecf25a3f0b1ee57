"""How far a student is, and what can be done with the files: compare, take a fresh stub, hand in.

Nothing here decides what is right; `checking` does. Nothing that a student wrote is ever written over or removed.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from a5lib import __version__
from a5lib.course.checking import Result, run_checks
from a5lib.course.exercises import (
    EXERCISES,
    MissingPackage,
    Whose,
    chosen_impl,
    exercise_of,
    has_reference,
    load_algo,
    notebook_of,
    package_files,
    package_folder,
    starter_text,
)
from a5lib.course.stubs import BEGIN, blank
from a5lib.errors import UserError

RUN_FILES = ("config.json", "environment.json", "metrics.jsonl", "evaluations.jsonl", "command.txt", "curves.png")
SUBMISSION_LIMIT = 25 * 2**20  # bytes before compression; the logs of a run take about 1 MiB


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


def course_folder() -> Path:
    """The folder that holds `starter/`, `notebooks/` and `runs/`."""
    return package_folder("starter").parent


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


# --- stubs and differences


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


# --- handing in


def submit(output: Path, runs: Sequence[Path] = ()) -> list[str]:
    """Write a zip with a student's files, notebooks (written answers are there), run logs and check results.

    The same files give the same zip, byte for byte. Models and checkpoints are left out, and paths of this machine are
    cut down to the name of the file.

    Args:
        output: file to write; it must not exist.
        runs: run folders; none: those below `runs/` in which code of the student's ran.

    Returns:
        The names in the zip.

    Raises:
        UserError: the file is there already or cannot be written, a folder is no run, or all of it is too big.
    """
    if chosen_impl() == "solutions":
        raise UserError("A5_IMPL is solutions, so the checks would not be of your code; unset it, then submit.")
    folder = course_folder()
    files = {f"starter/{path.name}": path.read_bytes() for path in package_files("starter")}
    files |= {f"notebooks/{path.name}": path.read_bytes() for path in sorted((folder / "notebooks").glob("*.ipynb"))}
    logs = run_logs(folder, runs)
    files |= logs
    files["status.json"] = (json.dumps(status(logs), indent=1, ensure_ascii=False) + "\n").encode()
    size = sum(map(len, files.values()))
    if size > SUBMISSION_LIMIT:
        largest = max(files, key=lambda name: len(files[name]))
        raise UserError(
            f"The files come to {size / 2**20:.1f} MiB, and at most {SUBMISSION_LIMIT / 2**20:.0f} MiB may be handed "
            f"in; the largest is {largest} with {len(files[largest]) / 2**20:.1f} MiB: make it smaller, or name fewer "
            "runs with --runs."
        )
    try:
        with output.open("xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                info = zipfile.ZipInfo(name)  # dated 1980, so that the time does not change the zip
                info.external_attr = 0o644 << 16
                archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    except FileExistsError as error:
        raise UserError(f"{output} is there already; remove it, or name another file with --output.") from error
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another --output.") from error
    return list(files)


def run_logs(folder: Path, runs: Sequence[Path]) -> dict[str, bytes]:
    """The small records of run folders, by their names in the zip."""
    below = folder / "runs"
    found = list(runs) or sorted({path.parent.resolve() for place in (below, Path("runs"))
                                  for path in place.rglob("environment.json")
                                  if not (_exercise_code(path.read_bytes()) or "").startswith("0 of ")})  # fmt: skip
    logs: dict[str, bytes] = {}
    for run in found:
        if not (run / "environment.json").is_file():
            raise UserError(f"{run} is not a run folder: it has no environment.json; name the folder of a run.")
        place = run.resolve()
        inside = place.is_relative_to(below.resolve()) and place != below.resolve()
        name = f"runs/{place.relative_to(below.resolve()).as_posix() if inside else place.name}"
        if f"{name}/environment.json" in logs:
            raise UserError(f"Two run folders are called {name}; rename one of them.")
        for file in RUN_FILES:
            if (run / file).is_file():
                logs[f"{name}/{file}"] = _without_folders(run / file)
    return logs


def _without_folders(path: Path) -> bytes:
    """A record as bytes; where it may name files of this machine, only their names are kept."""
    content = path.read_bytes()

    def name_of(value: Any) -> Any:
        return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value

    try:
        if path.name == "config.json":
            return json.dumps({k: name_of(v) for k, v in json.loads(content).items()}, indent=1).encode() + b"\n"
        if path.name == "command.txt":
            return shlex.join(map(name_of, shlex.split(content.decode()))).encode() + b"\n"
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); hand in other runs with --runs.") from error
    return content


def status(logs: dict[str, bytes]) -> dict[str, Any]:
    """What a machine that grades reads: check results, and whose code each run used."""
    found, fault = progress()
    return {
        "a5lib": __version__,
        "does_not_import": fault or None,
        "exercises": {
            row.exercise: {
                "functions": {name: "written" if name in row.written else "unwritten" for name in row.whose},
                "passed": row.count("passed"),
                "checks": [
                    {"function": r.check.function, "title": r.check.title, "status": r.status, "words": r.words}
                    for r in row.results
                ],
            }
            for row in found
        },
        "runs": {
            name.removesuffix("/environment.json"): _exercise_code(content)
            for name, content in logs.items()
            if name.endswith("/environment.json")
        },
    }


def _exercise_code(environment: bytes) -> str | None:
    try:
        return json.loads(environment).get("exercise_code")
    except (ValueError, AttributeError):
        return None
