"""The worker: a program that runs under vLLM's own Python, by the path of this file.

    PYTHON a5lib/rollouts/worker.py --connection FD --weights FD --engine MODULE:CLASS

That Python may have no a5lib, or another one: everything is imported from beside this file. It needs the standard
library, torch, and what the engine needs. Two processes run it. The guard waits until the trainer or the engine's
process ends, however it ends, and then kills all that is left of both; the other one serves requests
(`a5lib.rollouts.worker_loop`). What they print goes to the log that the trainer gave them as standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when its parent ends


def import_from_here() -> None:
    """Let `a5lib.rollouts` mean the folder of this file, and nothing else of a5lib be run by importing it."""
    folder = Path(__file__).resolve().parent
    for name, path in (("a5lib", folder.parent), ("a5lib.rollouts", folder)):
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(path)]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != folder]  # a program's own folder


def stand_guard(connection: int) -> None:
    """Go on in a child process; this one stays behind as its guard and never returns.

    It polls, and runs nothing that could hang. A parent's end is seen by its process id and by its end of the
    connection: a signal of the system (PR_SET_PDEATHSIG) would come when the thread ends that started the worker. From
    the guard, which has one thread, the engine's process does get that signal.
    """
    guard, trainer = os.getpid(), os.getppid()
    engine = os.fork()
    if engine == 0:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it ended before the signal was asked for
            os._exit(1)
        return
    hung_up = select.poll()
    hung_up.register(connection, 0)
    end = "the trainer is gone"
    while os.getppid() == trainer and not hung_up.poll(100):
        ended, status = os.waitpid(engine, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            end = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            break
    print(f"The worker ended: {end}.", flush=True)
    os.killpg(guard, signal.SIGKILL)  # the engine, whatever it started, and the guard itself


def load_engine(name: str) -> Any:
    """The class that "package.module:Class" or "path/to/file.py:Class" names."""
    module_name, _, class_name = name.rpartition(":")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), class_name)
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, class_name)


def main() -> None:
    """Guard, and serve until the trainer stops it or is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--weights", type=int, required=True)
    parser.add_argument("--engine", required=True)
    options = parser.parse_args()
    for descriptor in (options.connection, options.weights):
        os.set_inheritable(descriptor, False)
    stand_guard(options.connection)
    faulthandler.enable()  # a crash in native code leaves its stack in the log

    from a5lib.rollouts.protocol import Connection  # not before the guard, which is to stay small
    from a5lib.rollouts.weight_channel import attach_to_read
    from a5lib.rollouts.worker_loop import WorkerLoop

    buffer = attach_to_read(options.weights)
    os.close(options.weights)
    connection = Connection(socket.socket(fileno=options.connection))
    WorkerLoop(connection, buffer, lambda settings: load_engine(options.engine)(settings)).serve()


if __name__ in ("__main__", "__mp_main__"):  # the second in processes that vLLM spawns
    import_from_here()
if __name__ == "__main__":
    main()
