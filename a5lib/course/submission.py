"""What a student hands in: files, notebooks, run logs and check results in one zip."""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from a5lib import __version__
from a5lib.course.exercises import chosen_impl, course_folder, package_files
from a5lib.course.progress import progress
from a5lib.errors import UserError

RUN_FILES = ("config.json", "environment.json", "metrics.jsonl", "evaluations.jsonl", "command.txt", "curves.png")
SUBMISSION_LIMIT = 25 * 2**20  # bytes before compression; the logs of a run take about 1 MiB


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
