"""The worker as its trainer sees it: a process that is started, asked, and ended with all that belongs to it.

Whatever goes wrong becomes one `WorkerError` that quotes the end of the worker's log, and by then nothing of the worker
is left. This file knows the protocol; it does not know what is asked for.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from a5lib.errors import UserError
from a5lib.rollouts.protocol import Connection, Garbage

WORKER = Path(__file__).with_name("worker.py")
GRACE = 2.0  # seconds; the worker ends itself when a request's time is up, and this long afterwards the trainer does
PARTING = 5.0  # seconds that a dying worker has to write its last line
QUOTED_LINES = 12


class WorkerError(UserError):
    """The worker failed and has been ended; says how, and quotes the end of its log."""


class WorkerProcess:
    """A worker that runs, started at once.

    It gets a session of its own, so that Ctrl-C reaches the trainer alone, and a log for all that it prints. It ends
    with this object, with the trainer, or with `stop`.

    Args:
        python: the Python that has vLLM.
        engine: what `worker.load_engine` takes.
        weights: descriptor of the weight channel.
        log: file that the worker's output is added to.
        card: the trainer's card, by torch's number (None: the first, or none).

    Raises:
        UserError: there is no such Python.
    """

    def __init__(self, python: str, engine: str, weights: int, log: Path, card: int | None = None) -> None:
        self.log = log
        self.requests = 0
        with log.open("ab") as output:
            self._log_begins = output.tell()
            ours, theirs = socket.socketpair()
            command = [python, str(WORKER), "--connection", str(theirs.fileno()), "--weights", str(weights),
                       "--engine", engine]  # fmt: skip
            try:
                with theirs:
                    self.process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                        pass_fds=(theirs.fileno(), weights), env=worker_environment(os.environ, python, card),
                    )  # fmt: skip
            except OSError as error:
                ours.close()
                raise UserError(
                    f"{python} cannot be started ({error.strerror}); --vllm-python must be the path of the Python that "
                    "has vLLM."
                ) from error
        self.connection = Connection(ours)
        self._end = weakref.finalize(self, _end, self.process, self.connection, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it can be asked: it has not been ended here. That it died by itself shows when it is asked."""
        return self._end.alive

    def request(
        self,
        method: str,
        arguments: Mapping[str, Any],
        seconds: float,
        progress: Callable[[int], object] | None = None,
    ) -> Any:
        """Ask for something and wait for the result.

        Args:
            method: one of `worker_loop.Requests.NAMES`.
            arguments: its arguments, as JSON.
            seconds: the longest time without a sign of life.
            progress: receives the numbers that the worker sends before its answer.

        Raises:
            RuntimeError: the worker refused; it goes on as if it had not been asked.
            WorkerError: the worker failed, did not answer in time, sent garbage or died; it has been ended.
        """
        self.requests += 1
        request = {"id": self.requests, "method": method, "seconds": seconds, "arguments": dict(arguments)}
        try:
            answer = self._exchange(request, progress)
        except TimeoutError:
            raise self.failure(f"gave no sign of life for {seconds:g} s during {method!r}") from None
        except Garbage as error:
            raise self.failure(f"sent garbage during {method!r}: {error}") from None
        except BaseException:  # an interrupt, say: the answer would be taken for that of the next request
            self._end()
            raise
        if answer is None:
            _wait(self.process, PARTING)
            raise self.failure(f"died during {method!r}")
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        if "failed" in answer:
            raise self.failure(f"failed during {method!r}: {answer['failed']}")
        return answer["result"]

    def _exchange(self, request: dict[str, Any], progress: Callable[[int], object] | None) -> dict[str, Any] | None:
        """The answer, or None when the worker has gone."""
        seconds = request["seconds"]
        with suppress(ConnectionError):  # it has gone, as `receive` will find
            self.connection.send(request, seconds)
        heard = time.monotonic()
        while (answer := self.connection.receive(seconds + GRACE)) is not None:
            if answer.get("id") != request["id"] or not answer.keys() & {"result", "refused", "failed", "progress"}:
                raise Garbage(f"an answer to another request, {str(answer)[:60]}")
            if "progress" not in answer:
                return answer
            heard = time.monotonic()
            if progress is not None:
                progress(answer["progress"])
        if time.monotonic() - heard >= seconds:  # it ended itself when its time was up
            raise TimeoutError
        return None

    def failure(self, what: str) -> WorkerError:
        """End the worker, and return the error that says what it did: "The vLLM worker ..."."""
        self._end()
        with self.log.open("rb") as log:
            log.seek(self._log_begins)
            lines = log.read().decode(errors="replace").splitlines()[-QUOTED_LINES:] or ["(it wrote nothing)"]
        return WorkerError(
            f"The vLLM worker {what.rstrip('.')}. Nothing of it is left running; look for the cause in its log, then "
            f"start again (a run: with --resume). The last lines of {self.log}:",
            lines,
        )

    def stop(self, seconds: float) -> None:
        """End in order: the engine closes first. What is left after that is killed. Harmless when repeated."""
        if self.alive:
            with suppress(WorkerError, RuntimeError):
                self.request("stop", {}, seconds)
                _wait(self.process, PARTING)
            self._end()


def worker_environment(environment: Mapping[str, str], python: str, card: int | None = None) -> dict[str, str]:
    """The worker's environment from the trainer's.

    vLLM's sleeping allocator does not go together with torch's `expandable_segments`, so that one setting is dropped.
    What points to the packages of the trainer's Python is dropped where the worker has another one. vLLM takes the
    first card that it sees, so it sees the trainer's alone.

    Args:
        environment: the trainer's.
        python: the worker's Python.
        card: the trainer's card, by torch's number (None: the first).

    >>> worker_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
    ...                     "PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": "/ours"}, "/other/python")
    {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:128', 'PYTHONUNBUFFERED': '1'}
    """
    result = dict(environment)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the old name and the new one
        settings = [part for part in result.pop(name, "").split(",") if part]
        if kept := [part for part in settings if part.partition(":")[0].strip() != "expandable_segments"]:
            result[name] = ",".join(kept)
    if not _is_this_python(python):
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            result.pop(name, None)
    if card:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        result["CUDA_VISIBLE_DEVICES"] = visible[card] if len(visible) > card else str(card)
    return {**result, "PYTHONUNBUFFERED": "1"}  # so that the log holds the last words of a worker that is killed


def _is_this_python(python: str) -> bool:
    """Environments of one installation lie in folders of their own, where their Pythons are links to the same file."""
    both = [os.path.abspath(shutil.which(name) or name) for name in (python, sys.executable)]
    return len({(os.path.dirname(path), os.path.realpath(path)) for path in both}) == 1


def group_members(group: int) -> list[int]:
    """Process ids of a process group, without those that have ended and wait to be collected (Linux alone)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process to end by itself, and do not collect it: until then its number is no other group's."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return
        time.sleep(0.01)


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    """Kill the worker with all that it started, and wait until they are gone, so that what they held is free."""
    if os.getpid() != owner:  # a fork of the trainer that ends
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    connection.close()  # not before: the guard would note in the log that the trainer is gone
    process.wait()
    deadline = time.monotonic() + PARTING
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
