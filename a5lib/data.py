"""Problems from GSM8K files, and the order in which training draws them.

A file has one JSON object a line with `question` and `answer`; the answer is a rationale, `####` and the gold answer.
Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", and its public repository. This module
knows nothing about prompts, tokens or rewards. Taught in notebook 01.
"""

from __future__ import annotations

import json
import os
import random
import re
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError

from a5lib.errors import UserError
from a5lib.grading import gsm8k_marker_answer
from a5lib.progress import progress_bar
from a5lib.records import Problem

GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
GSM8K_ROWS = {"train": 7473, "test": 1319}

_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


def load_gsm8k(path: str | Path, max_examples: int | None = None) -> list[Problem]:
    """The problems of a GSM8K file in the file's order, at most `max_examples` of them; blank lines are skipped.

    The rationale loses its calculator marks (`<<1+1=2>>`), the answer its thousands commas. Taught in notebook 01.

    Raises:
        UserError: a negative limit; a file that is missing, unreadable or empty; the first line, by its number, that is
            not JSON, lacks a field, or has no answer after `####`.
    """
    if max_examples is not None and max_examples < 0:
        raise UserError(f"max_examples is {max_examples}; it must be 0 or more, or None for the whole file.")
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file {path}; give a GSM8K JSONL file, or download one with: a5 data gsm8k.")
    problems: list[Problem] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if len(problems) == max_examples:
                    return problems
                if line.strip():
                    problems.append(_problem(line, f"Line {number} of {path}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The file {path} cannot be read as UTF-8 text ({error}); give a GSM8K JSONL file.") from error
    if not problems and max_examples != 0:
        raise UserError(f"The file {path} is empty; it must hold one JSON object a line with `question` and `answer`.")
    return problems


class BatchSampler:
    """Draws batches of problems without end: each epoch is a fresh seeded permutation, without repeats within it.

    A batch may span two epochs; it still holds no problem twice, because the new permutation then begins with problems
    that the batch does not hold. The order is a pure function of the number of problems, the batch size and the seed.
    Taught in notebook 08.

    Raises:
        UserError: `batch_size` is not between 1 and the number of problems.

    >>> sampler = BatchSampler([Problem(f"question {i}", "", str(i)) for i in range(5)], batch_size=2, seed=0)
    >>> first_epoch = sampler.next_batch() + sampler.next_batch() + sampler.next_batch()[:1]
    >>> sorted(problem.answer for problem in first_epoch)
    ['0', '1', '2', '3', '4']
    """

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int) -> None:
        if not 1 <= batch_size <= len(problems):
            raise UserError(
                f"A batch of {batch_size} prompts cannot be drawn from {len(problems)} problems without repeats; give "
                "more problems or make the batch smaller, of at least 1 prompt."
            )
        self.problems = problems
        self.batch_size = batch_size
        self.seed = seed
        self._start()

    def next_batch(self) -> list[Problem]:
        """The next `batch_size` problems, all different."""
        return [self.problems[index] for index in self._next_indices()]

    def state_dict(self) -> dict[str, int]:
        """Where the sampler stands, as JSON values: the position in the epoch, and what the order depends on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "problems": len(self.problems),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken; the batches before it are drawn again, which takes no time.

        Raises:
            UserError: the state is of another order, or is no state of this sampler.
        """
        mine = self.state_dict()
        for name in ("seed", "batch_size", "problems"):
            if state.get(name) != mine[name]:
                raise UserError(
                    f"The saved data order has {name} {state.get(name)} and this run has {mine[name]}; resume with the "
                    "same data and settings."
                )
        self._start()
        reached = (state["epoch"], state["position"])
        while (self._epoch, self._position) < reached:
            self._next_indices()
        if (self._epoch, self._position) != reached:
            raise UserError(f"The saved data order stands at {reached}, which is no batch's end; the file is damaged.")

    def _start(self) -> None:
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self.problems)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _next_indices(self) -> list[int]:
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        missing = self.batch_size - len(batch)
        if missing:  # the new epoch begins with problems that this batch does not hold
            self._epoch, self._position = self._epoch + 1, missing
            order = self._permutation(self._epoch)
            held = set(batch)
            batch += [index for index in order if index not in held][:missing]
            moved = set(batch[-missing:])
            self._order = batch[-missing:] + [index for index in order if index not in moved]
        return batch


def download_gsm8k(folder: str | Path, url: str = GSM8K_URL) -> dict[str, Path]:
    """Download the public GSM8K files to `folder/gsm8k-train.jsonl` and `folder/gsm8k-test.jsonl`.

    A complete file that is already there is kept. A file appears under its name only when it has all its rows.

    Returns:
        The paths of "train" and "test".

    Raises:
        UserError: no network; what came, or what is there already, is not the whole file; the folder cannot be written.
    """
    folder = Path(folder)
    paths = {split: folder / f"gsm8k-{split}.jsonl" for split in GSM8K_ROWS}
    for split, path in paths.items():
        whole = f"the whole GSM8K {split} file of {GSM8K_ROWS[split]} rows"
        if path.exists():
            if not _is_complete(path, split):
                raise UserError(f"{path} is there already but is not {whole}; move it away and try again.")
            continue
        aside = folder / f".{path.name}.{os.getpid()}.part"
        source = f"{url}/{split}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                _fetch(source, aside)
                if not _is_complete(aside, split):
                    raise UserError(f"What came from {source} is not {whole}; try again later, or put it at {path}.")
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        except (URLError, ConnectionError, TimeoutError, HTTPException) as error:
            raise UserError(
                f"{source} could not be downloaded ({error}); connect to the network, or put the file at {path}."
            ) from error
        except OSError as error:
            raise UserError(f"The folder {folder} cannot be written ({error}); choose another one.") from error
    return paths


def _problem(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON; each line must be an object with `question` and `answer`.") from error
    for name in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(name), str):
            raise UserError(f"{where} has no text field `{name}`; it must be an object with `question` and `answer`.")
    answer = gsm8k_marker_answer(row["answer"])
    if answer is None:
        raise UserError(f"{where} has no answer after `####`; end its `answer` with a line such as `#### 42`.")
    rationale = row["answer"].rpartition("####")[0]
    return Problem(row["question"], _CALCULATOR_MARK.sub("", rationale).strip(), answer)


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=30) as response, path.open("wb") as file:
        size = int(response.headers.get("Content-Length") or 0) or None
        with progress_bar(total=size, unit="B", unit_scale=True, desc=url.rpartition("/")[2]) as bar:
            while block := response.read(2**16):
                file.write(block)
                bar.update(len(block))


def _is_complete(path: Path, split: str) -> bool:
    try:
        return len(load_gsm8k(path)) == GSM8K_ROWS[split]
    except UserError:
        return False
