"""The course as git branches for a class: one with the stubs and without answers, one with everything.

A branch is built from the last commit with git's own objects and an index of its own, so the files and the index of the
person who calls are never touched. The starter branch has no parent: its history would hold the answers.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from a5lib.course.exercises import package_folder
from a5lib.course.stubs import blank
from a5lib.errors import UserError

Kind = Literal["starter", "solutions"]
# The zoo quotes lines of the reference, and the last test writes out the order of the cycle.
ANSWERS = ("solutions/", "tests/zoo/", "tests/test_bug_zoo.py", "tests/test_scripted_engine.py")
MESSAGES = {"starter": "The course: stubs to fill in", "solutions": "The course with its solutions"}


class Repository:
    """The git repository of the course, by way of the `git` command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            top = self.git("rev-parse", "--show-toplevel").strip()
        except FileNotFoundError as error:
            raise UserError("git is not installed; install it, for example with `sudo apt install git`.") from error
        except GitError as error:
            raise UserError(f"{folder} is not in a git repository; `git clone` the course, or `git init`.") from error
        if Path(top).resolve() != folder.resolve():
            raise UserError(f"The course is not the top folder of its git repository, which is {top}; move it there.")

    def git(self, *words: str, give: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(["git", *words], cwd=self.folder, input=give, capture_output=True,
                              env={**os.environ, **(env or {})})  # fmt: skip
        if done.returncode:
            raise GitError(" ".join(done.stderr.decode(errors="replace").split()))
        return done.stdout.decode()

    def has(self, name: str) -> bool:
        try:
            self.git("rev-parse", "--verify", "--quiet", name)
        except GitError:
            return False
        return True

    def tree(self, commit: str) -> list[str]:
        """The paths of all files of a commit."""
        return self.git("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit).split("\0")[:-1]


class GitError(Exception):
    """git ended with a fault; its words."""


def make_branch(kind: Kind) -> str:
    """Make the branch `starter` or `solutions` from the last commit; returns sentences that say what was made.

    Raises:
        UserError: no git or no commit, changes in `starter/` or `solutions/` that are not committed, a branch of that
            name, or a commit without `solutions/`.
    """
    repository = Repository(package_folder("starter").parent)
    if not repository.has("HEAD"):
        raise UserError("The repository has no commit yet; commit the course first.")
    commit = repository.git("rev-parse", "HEAD").strip()
    paths = repository.tree(commit)
    if "solutions/__init__.py" not in paths:
        raise UserError("The last commit has no solutions/; switch to the branch that has them first.")
    if repository.has(f"refs/heads/{kind}"):
        raise UserError(f"There is a branch {kind} already; `git branch -D {kind}` deletes it.")
    changed = repository.git("status", "--porcelain", "--untracked-files=all", "--", "starter", "solutions")
    if changed:
        raise UserError(f"{changed.splitlines()[0][3:]} has changes that are not committed; commit them first.")
    try:
        made = commit_tree(repository, kind, commit, paths)
        repository.git("update-ref", f"refs/heads/{kind}", made, "0" * len(made))  # zeros: only if it does not exist
    except GitError as error:
        raise UserError(f"git could not make the branch {kind} ({error}).") from error
    left_out = ", ".join(path for path in ANSWERS if kind == "starter")
    return (
        f"Made the branch {kind} from commit {commit[:10]}"
        + (f", with stubs, without {left_out}, and without history." if left_out else ", with stubs and solutions.")
        + f" Look at it with `git ls-tree -r --name-only {kind}`; publish it alone with `git push REMOTE {kind}`."
    )


def commit_tree(repository: Repository, kind: Kind, commit: str, paths: list[str]) -> str:
    """Write the branch's commit with an index of its own; returns its id."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        repository.git("read-tree", commit, env=env)
        lines = [f"100644 {stub_blob(repository, commit, path)}\t{path}\0" for path in paths
                 if path.startswith("starter/") and path.replace("starter/", "solutions/", 1) in paths]  # fmt: skip
        if kind == "starter":
            lines += [f"0 {'0' * len(commit)}\t{path}\0" for path in paths if path.startswith(ANSWERS)]
        repository.git("update-index", "-z", "--index-info", give="".join(lines).encode(), env=env)
        tree = repository.git("write-tree", env=env).strip()
    parents = () if kind == "starter" else ("-p", commit)
    return repository.git("commit-tree", tree, *parents, "-m", MESSAGES[kind]).strip()


def stub_blob(repository: Repository, commit: str, path: str) -> str:
    """The stub of a file of `starter/`, from the reference of that commit, as an object of git."""
    reference = repository.git("cat-file", "blob", f"{commit}:{path.replace('starter/', 'solutions/', 1)}")
    return repository.git("hash-object", "-w", "--stdin", give=blank(reference).encode()).strip()
