"""`a5 course ...` as a student and a teacher meet it, and the starter branch as a student gets it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

import a5lib.course.branches
import a5lib.course.files
from a5lib.course.exercises import EXERCISES, NAMES, exercise_of
from a5lib.course.stubs import blank, region_text
from a5lib.errors import UserError
from tests.helpers import ROOT, read_exercise, write_exercise
from tests.test_cli import a5, contents, refused


@pytest.fixture
def there(course: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copied course as the current folder, with one notebook."""
    (course / "notebooks").mkdir()
    (course / "notebooks" / "02_masks.ipynb").write_text('{"cells": ["**Your answer:** pads come last"]}')
    monkeypatch.chdir(course)
    return course


def solve(course: Path, *exercises: str) -> None:
    for exercise in exercises:
        (course / "starter" / f"{exercise}.py").write_text(read_exercise("solutions", f"{exercise}.py"))


def rows(out: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


# --- status and check


def test_status_of_untouched_stubs(there: Path) -> None:
    result = a5("course status")
    assert (result.code, result.err) == (0, "")
    table = rows(result.out)
    assert list(table) == list(EXERCISES)
    assert table["masks"][:2] == ["02", "0 of 2"] and table["masks"][3] == "reference"
    assert f"0 of {len(NAMES)} functions written, 0 of " in result.out
    assert "Next: starter/masks.py, notebook 02_masks." in result.out


def test_status_counts_what_is_written_and_right(there: Path, monkeypatch) -> None:
    solve(there, "masks")
    write_exercise(there, "rewards", "parse_answer", "    return None\n")
    table = rows(a5("course status").out)
    assert table["masks"][1] == "2 of 2" and table["masks"][3] == "yours"
    done, of, total = table["masks"][2].split()
    assert (done, of) == (total, "of")
    assert table["rewards"][1] == "1 of 2" and table["rewards"][3] == "yours 1, reference 1"
    monkeypatch.setenv("A5_IMPL", "starter")
    assert rows(a5("course status").out)["rewards"][3] == "yours 1, none yet 1"
    monkeypatch.setenv("A5_IMPL", "solutions")
    result = a5("course status")
    assert "A5_IMPL=solutions" in result.out and rows(result.out)["masks"][3] == "reference"
    monkeypatch.setenv("A5_IMPL", "mine")
    assert "A5_IMPL is 'mine'" in refused("course status")


def test_status_of_a_file_that_does_not_import(there: Path) -> None:
    (there / "starter" / "losses.py").write_text("def f(:\n")
    result = a5("course status")
    assert result.code == 0
    assert " ".join(result.out.split()).startswith("starter/losses.py does not import (SyntaxError in line 1")


def test_check_is_for_machines_too(there: Path) -> None:
    solve(there, "masks")
    assert a5("course check masks").code == 0
    assert a5("course check pad_and_mask").out.startswith("masks: all ")
    result = a5("course check losses")
    assert (result.code, result.err) == (1, "") and "is not written yet" in result.out
    write_exercise(there, "masks", "pad_and_mask", "    return None\n")
    result = a5("course check masks")
    assert result.code == 1 and "Likely:" in result.out
    result = a5("course check")
    assert result.code == 1
    assert all(f"starter/{exercise}.py" in result.out for exercise in EXERCISES if exercise != "masks")
    (there / "starter" / "losses.py").write_text("def f(:\n")
    result = a5("course check")
    assert (result.code, result.out.count("does not import")) == (1, 1)
    assert "did you mean 'masks'" in refused("course check mask")


def test_every_check_passes_on_the_reference(there: Path) -> None:
    solve(there, *EXERCISES)
    result = a5("course check")
    assert result.code == 0, result.out
    assert result.out.count("checks pass (your code).") == len(EXERCISES)


# --- reset and diff


def test_reset_keeps_every_old_file(there: Path) -> None:
    path = there / "starter" / "masks.py"
    stub = path.read_text()
    assert a5("course reset masks").out == "starter/masks.py is still the stub; nothing was changed.\n"
    for number in (1, 2, 3):
        path.write_text(f"mine = {number}\n")
        result = a5("course reset masks")
        assert result.code == 0
        assert result.out == (
            f"starter/masks.py is a fresh stub. Your file is kept as starter/masks.py.old-{number}.\n"
        )
        assert path.read_text() == stub
    assert [(there / "starter" / f"masks.py.old-{n}").read_text() for n in (1, 2, 3)] == [
        f"mine = {n}\n" for n in (1, 2, 3)
    ]
    path.unlink()
    assert a5("course reset masks").out == "starter/masks.py is a fresh stub.\n"
    assert path.read_text() == stub


def test_reset_refuses_what_it_cannot_do(there: Path) -> None:
    assert "did you mean 'masks'" in refused("course reset mask")
    assert "`a5 course reset masks` resets pad_and_mask too" in refused("course reset pad_and_mask")
    assert "lacks NAME" in refused("course reset")


def test_a_full_disk_loses_nothing(there: Path, monkeypatch) -> None:
    path = there / "starter" / "masks.py"
    path.write_text("mine\n")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(a5lib.course.files.os, "replace", full)
    assert "was not reset (No space left on device)" in a5("course reset masks").err
    assert path.read_text() == "mine\n"


def git(folder: Path, *words: str) -> str:
    who = {f"GIT_{role}_{what}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *words], cwd=folder, env=os.environ | who, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_without_the_reference_the_stub_comes_from_git(there: Path) -> None:
    path, stub = there / "starter" / "masks.py", (there / "starter" / "masks.py").read_text()
    shutil.rmtree(there / "solutions")
    solve(there, "masks")
    assert a5("course reset masks").code == 0, "without git the file itself, without what is in its regions"
    assert path.read_text() == stub
    for text in ("all is gone\n", "### BEGIN YOUR CODE\n"):
        path.write_text(text)
        assert "ask your teacher" in refused("course reset masks")
        assert "ask your teacher" in refused("course diff masks")
    git(there, "init", "-q")
    path.write_text(stub)
    git(there, "add", "starter")
    git(there, "commit", "-q", "-m", "stubs")
    path.write_text("mine\n")
    git(there, "commit", "-q", "-a", "-m", "mine")
    assert a5("course reset masks").code == 0
    assert path.read_text() == stub


def test_diff_shows_what_was_written(there: Path) -> None:
    assert a5("course diff").out == "Your code does not differ from the stub.\n"
    write_exercise(there, "masks", "pad_and_mask", "    return None")
    path = there / "starter" / "masks.py"
    out = a5("course diff masks").out
    assert out.startswith("--- stub/masks.py\n+++ starter/masks.py\n@@ ")
    assert "\n+    return None" in out and "\n-    raise NotImplementedError(" in out
    assert a5("course diff pad_and_mask").out == a5("course diff").out == out
    assert "\n-    longest = max(lengths)\n" in a5("course diff masks --solution").out
    solve(there, "masks")
    assert a5("course diff masks --solution").out == "Your code does not differ from the reference.\n"
    path.write_text(path.read_text().rstrip("\n"))
    assert a5("course diff masks --solution").out.endswith("### END YOUR CODE\n")
    shutil.rmtree(there / "solutions")
    assert "solutions/ is not in this version" in refused("course diff masks --solution")
    assert "did you mean 'masks'" in refused("course diff mask")


# --- submit


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {"model": str(Path.home() / "models" / "small"), "train_file": "data/train.jsonl", "seed": 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text('{"exercise_code": "7 of 19 yours"}')
    (folder / "command.txt").write_text("a5 train --model /home/me/small --train-file data/train.jsonl\n")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (folder / name).write_text('{"step": 1}\n')
    (folder / "curves.png").write_bytes(b"\x89PNG")
    for name in ("model/model.safetensors", "checkpoints/step-000001/state.json", "rollouts/step-000001.jsonl"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("big")
    return folder


def test_submit_packs_code_notebooks_logs_and_results(there: Path) -> None:
    solve(there, "masks")
    (there / "starter" / "masks.py.old-1").write_text("old")
    make_run(there / "runs" / "study" / "seed0")
    make_run(there / "runs" / "first")
    reference = make_run(there / "runs" / "of-the-course")
    (reference / "environment.json").write_text('{"exercise_code": "0 of 19 yours"}')  # nothing of the student's
    result = a5("course submit")
    assert result.code == 0, result.err
    assert "Wrote a5-submission.zip" in result.out
    with zipfile.ZipFile("a5-submission.zip") as archive:
        files = {name: archive.read(name).decode(errors="replace") for name in archive.namelist()}
    logs = ["command.txt", "config.json", "curves.png", "environment.json", "evaluations.jsonl", "metrics.jsonl"]
    assert sorted(files) == sorted(
        ["starter/__init__.py", *(f"starter/{exercise}.py" for exercise in EXERCISES)]
        + ["notebooks/02_masks.ipynb", "status.json"]
        + [f"runs/{run}/{log}" for run in ("first", "study/seed0") for log in logs]
    )
    assert files["starter/masks.py"] == read_exercise("solutions", "masks.py")
    assert not [name for name, text in files.items() if str(Path.home()) in text or "/home/me" in text]
    assert json.loads(files["runs/first/config.json"]) == {
        "model": "small", "train_file": "data/train.jsonl", "seed": 3,
    }  # fmt: skip
    assert files["runs/first/command.txt"] == "a5 train --model small --train-file data/train.jsonl\n"
    status = json.loads(files["status.json"])
    assert status["runs"] == {"runs/first": "7 of 19 yours", "runs/study/seed0": "7 of 19 yours"}
    assert status["exercises"]["masks"]["functions"] == dict.fromkeys(EXERCISES["masks"], "written")
    assert {check["status"] for check in status["exercises"]["masks"]["checks"]} == {"passed"}
    assert {check["status"] for check in status["exercises"]["losses"]["checks"]} == {"unwritten"}
    assert status["does_not_import"] is None


def test_submit_again_is_the_same_file_and_nothing_is_written_over(there: Path) -> None:
    run = make_run(there / "runs" / "first")
    assert a5("course submit --output one.zip").code == 0
    os.utime(there / "starter" / "masks.py", (1_000_000_000, 1_000_000_000))
    assert a5("course submit --output two.zip --runs", run).code == 0
    assert Path("one.zip").read_bytes() == Path("two.zip").read_bytes()
    assert "one.zip is there already" in refused("course submit --output one.zip")
    assert "cannot be written (No such file or directory)" in refused("course submit --output none/one.zip")


def test_submit_takes_a_file_that_does_not_import(there: Path) -> None:
    (there / "starter" / "losses.py").write_text("def f(:\n")
    assert a5("course submit").code == 0
    with zipfile.ZipFile("a5-submission.zip") as archive:
        status = json.loads(archive.read("status.json"))
    assert status["does_not_import"].startswith("starter/losses.py does not import") and status["exercises"] == {}


def test_submit_takes_runs_from_elsewhere(there: Path, tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    result = a5("course submit --runs", one)
    assert result.code == 0 and "runs/run/metrics.jsonl" in result.out
    assert "Two run folders are called runs/run" in refused("course submit --output x.zip --runs", one, other)
    assert "is not a run folder" in refused("course submit --output x.zip --runs", there / "starter")
    (one / "config.json").write_text("{")
    assert "config.json is damaged" in refused("course submit --output x.zip --runs", one)


def test_submit_refuses_what_would_mislead_or_is_too_big(there: Path, monkeypatch) -> None:
    (there / "notebooks" / "03_big.ipynb").write_bytes(b"0" * (26 * 2**20))
    sentence = refused("course submit")
    assert "26." in sentence and "at most 25 MiB" in sentence and "notebooks/03_big.ipynb with 26.0 MiB" in sentence
    monkeypatch.setenv("A5_IMPL", "solutions")
    assert "would not be of your code" in refused("course submit")


# --- branches


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the files of this one as they are now."""
    if shutil.which("git") is None or not (ROOT / ".git").exists() or not (ROOT / "solutions").exists():
        pytest.skip("needs git, a clone, and solutions/")
    folder = tmp_path_factory.mktemp("class room") / "teacher"
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "All")
    return folder


def branch(teacher: Path, kind: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a5lib.course.branches, "package_folder", lambda package: teacher / package)
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Teacher")
            patch.setenv(f"GIT_{role}_EMAIL", "t@example.org")
        return a5lib.course.branches.make_branch(kind)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def starter_branch(teacher: Path) -> str:
    return branch(teacher, "starter")


def files_of(teacher: Path, kind: str) -> set[str]:
    return set(git(teacher, "ls-tree", "-r", "--name-only", kind).splitlines())


def test_the_starter_branch_has_stubs_and_no_answers(teacher: Path, starter_branch: str) -> None:
    assert starter_branch.startswith("Made the branch starter from commit ")
    here, there = files_of(teacher, "main"), files_of(teacher, "starter")
    assert {name for name in here - there if not name.startswith(("solutions/", "tests/zoo/"))} == {
        "tests/test_bug_zoo.py", "tests/test_scripted_engine.py",
    }  # fmt: skip
    assert not there - here and not [name for name in there if name.startswith(("solutions/", "tests/zoo/"))]
    for exercise in EXERCISES:
        stub = git(teacher, "show", f"starter:starter/{exercise}.py")
        assert stub == blank(read_exercise("solutions", f"{exercise}.py"))
    assert git(teacher, "rev-list", "--count", "refs/heads/starter") == "1\n", "the history would hold the answers"


def test_the_longest_line_of_each_solution_is_nowhere_on_the_starter_branch(teacher: Path, starter_branch: str) -> None:
    known = {"round_stochastically": "a5lib/optimizers.py"}  # the library's own AdamW, which notebook 07 is about
    for name in NAMES:
        region = region_text(read_exercise("solutions", f"{exercise_of(name)}.py"), name)
        longest = max((line.partition("  #")[0].strip() for line in region.splitlines()), key=len)
        done = subprocess.run(["git", "grep", "-l", "-F", "-e", longest, "starter"], cwd=teacher, capture_output=True)
        found = done.stdout.decode().replace("starter:", "").split()
        assert found in ([], [known.get(name)]), f"{longest!r} of {name} is in {found}"


def test_the_branch_solutions_is_the_full_one(teacher: Path) -> None:
    (teacher / "starter" / "masks.py").write_text(read_exercise("solutions", "masks.py"))
    git(teacher, "commit", "-q", "-a", "-m", "A filled starter")
    assert branch(teacher, "solutions").endswith("`git push REMOTE solutions`.")
    assert files_of(teacher, "solutions") == files_of(teacher, "main")
    assert git(teacher, "show", "solutions:starter/masks.py") == blank(read_exercise("solutions", "masks.py"))
    git(teacher, "reset", "-q", "--hard", "HEAD~1")
    git(teacher, "branch", "-q", "-D", "solutions")


def test_files_and_index_of_the_teacher_stay_as_they_are(teacher: Path, starter_branch: str) -> None:
    (teacher / "README.md").write_text("not committed\n")
    (teacher / "notes.txt").write_text("staged\n")
    git(teacher, "add", "notes.txt")
    before = contents(teacher), git(teacher, "status", "--porcelain")
    index = (teacher / ".git" / "index").read_bytes()
    branch(teacher, "solutions")
    after = contents(teacher)
    assert (teacher / ".git" / "index").read_bytes() == index
    assert {name for name in before[0] | after if before[0].get(name) != after.get(name)
            and not name.startswith((".git/objects", ".git/refs", ".git/logs"))} == set()  # fmt: skip
    assert git(teacher, "status", "--porcelain") == before[1]
    assert "notes.txt" not in files_of(teacher, "solutions")
    git(teacher, "reset", "-q", "--hard")
    git(teacher, "branch", "-q", "-D", "solutions")


def test_a_branch_is_refused_in_one_sentence(teacher: Path, starter_branch: str, tmp_path: Path, monkeypatch) -> None:
    def sentence(folder: Path, kind: str) -> str:
        with pytest.raises(UserError) as caught:
            branch(folder, kind)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "`git branch -D starter` deletes it" in sentence(teacher, "starter")
    masks = teacher / "starter" / "masks.py"
    stub = masks.read_text()
    masks.write_text("mine\n")
    assert "starter/masks.py has changes that are not committed" in sentence(teacher, "solutions")
    masks.write_text(stub)
    (teacher / "solutions" / "new.py").write_text("")
    assert "solutions/new.py has changes" in sentence(teacher, "solutions")
    (teacher / "solutions" / "new.py").unlink()
    inner = teacher / "inner" / "starter"
    inner.mkdir(parents=True)
    assert "not the top folder" in sentence(inner.parent, "starter")
    shutil.rmtree(inner.parent)
    (tmp_path / "starter").mkdir()
    assert "is not in a git repository" in sentence(tmp_path, "starter")
    git(tmp_path, "init", "-q")
    assert "has no commit yet" in sentence(tmp_path, "starter")
    (tmp_path / "starter" / "masks.py").write_text("")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "stubs")
    assert "has no solutions/" in sentence(tmp_path, "solutions")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "git is not installed" in sentence(tmp_path, "starter")
    monkeypatch.chdir(tmp_path)
    assert "'starters'" in refused("course branch starters")


STUDENT = """
import contextlib, sys
from a5lib.cli import main
from a5lib.course import algo, check, hint
import a5lib.models
a5lib.models.load_policy = a5lib.training.load_policy = None  # nothing may load a model

for words in ("course status", "course check masks", "train", "bench toy", "course diff --solution",
              "course reset masks"):
    try:
        main(words.split())
    except SystemExit as stop:
        print(f"exit code of {words}: {stop.code}", flush=True)
check("losses")
hint("masks", 3)
try:
    algo.pad_and_mask([[1]], [[2]], 0)
except Exception as error:
    print(*error._render_traceback_())
"""


@pytest.mark.timeout(300)
def test_the_starter_branch_works_for_a_student(teacher: Path, starter_branch: str, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--single-branch", "--branch", "starter", f"file://{teacher}", "student")
    student = tmp_path / "student"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST", "A5_IMPL"))}
    env["PYTHONPATH"] = str(student)  # for the kernel, which starts in notebooks/

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], cwd=student, env=env, capture_output=True, text=True)

    done = python("-c", "import a5lib.training\n" + STUDENT)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Traceback" not in said
    for command, code in {"course status": 0, "course check masks": 1, "train": 2, "bench toy": 2,
                          "course diff --solution": 2, "course reset masks": 0}.items():  # fmt: skip
        assert f"exit code of {command}: {code}\n" in said, said
    assert "0 of 19 functions written" in said
    sentence = "pad_and_mask is not written yet; write it in starter/masks.py (notebook 02 teaches it), then run this"
    assert done.stderr.count(f"{sentence} again.\n") == 2
    assert f"{sentence} cell again" in done.stdout
    assert "starter/masks.py is still the stub" in said
    assert "ask your teacher" in said

    cells = ["from a5lib.course import algo\nbatch = algo.pad_and_mask([[1]], [[2]], 0)", "batch['labels']", "1 / 0"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    (student / "notebooks" / "99_three_cells.ipynb").write_text(nbformat.writes(nb))
    done = python("-c", "from tests.notebook_tools import *\nnb = execute(load('99_three_cells'), 'starter', "
                  "allow_errors=True)\nfor cell in nb.cells: print(cell.outputs[0].traceback)")  # fmt: skip
    assert len(done.stdout.splitlines()) == 3, done.stderr
    stopped, follows, fault = map(ast.literal_eval, done.stdout.splitlines())
    assert len(stopped) == len(follows) == 1 and "pad_and_mask is not written yet" in stopped[0]
    assert "name 'batch' is not defined. A cell above stopped at a function that is not written" in follows[0]
    assert len(fault) > 1 and "ZeroDivisionError" in fault[-1], "a fault of another kind keeps its traceback"

    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests", "-k", "masks")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in done.stdout and "passed" in done.stdout
