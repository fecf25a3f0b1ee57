"""Memory of a phase, measured: what torch's allocator holds, what is in use on the whole card and by whom, and the
process's resident set.

While a phase runs a thread looks at the counters, about twenty times a second. It never waits for the card and never
writes: what it saw is handed over when the phase ends. This file predicts nothing (`a5lib.memory` does) and does not
know what a phase is about.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import torch

from a5lib.engines.plan import CONTEXT, GIB, MIB, gib
from a5lib.records import MemoryPoint, MemorySample

MOST_SAMPLES = 200  # of one phase; an even number
WORTH_NAMING = 256 * MIB  # of another process; a program that draws on the screen takes less
WORTH_SAYING = GIB  # in use by nobody that is shown; the driver itself takes less
FIRST_STEPS, THEN_EVERY = 20, 10  # the steps whose samples are handed over: 1 to 20, then 30, 40, ...


class MemoryRecorder:
    """Marks phases, and measures the memory of each. Taught in notebook 09.

    Args:
        device: where the work runs. Of a card, allocator and whole use are read; on the CPU the process alone.
        sink: receives the samples of a phase when it ends, such as `RunLog.memory`. It gets those of the steps 1 to 20,
            and of every tenth step after that.
        interval: seconds between two looks.

    >>> recorder = MemoryRecorder(torch.device("cpu"))
    >>> recorder.start()
    >>> recorder.stop("update").phase
    'update'
    """

    def __init__(
        self,
        device: torch.device,
        sink: Callable[[Sequence[MemorySample]], object] | None = None,
        interval: float = 0.05,
    ) -> None:
        self.device = device
        self.sink = sink
        self.interval = interval
        self._began = time.perf_counter()
        self._process = psutil.Process()
        self._card_use = card_use(device)
        self._peaks: dict[str, int] = {}
        self._looks = _Looks()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a phase: forget the allocator's earlier peaks, and look from now on."""
        self._end()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._peaks = {}
        self._looks = _Looks()
        self._looks.add(self._look())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="a5-memory", daemon=True)
        self._thread.start()

    def stop(self, phase: str, step: int = 0, *, wait: bool = True) -> MemoryPoint:
        """End the phase that `start` began, and hand over its samples.

        Args:
            phase: its name.
            step: number of the rollout batch; 0 outside of one.
            wait: until the card has done its work. After a fault it may never be ready; give False then.
        """
        try:
            if wait and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self._end()
        self._looks.add(self._look())
        looks = self._looks.kept
        if self.sink is not None and (step <= FIRST_STEPS or step % THEN_EVERY == 0):
            self.sink([MemorySample(step=step, phase=phase, **look._asdict()) for look in looks])
        return MemoryPoint(
            phase,
            host_bytes=looks[-1].host,
            card_peak_bytes=max(look.allocated for look in looks),
            card_reserved_bytes=max(look.reserved for look in looks),
            card_used_bytes=_most(look.card for look in looks),
        )

    def _watch(self) -> None:
        while not self._over.wait(self.interval):
            self._looks.add(self._look())

    def _end(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _look(self) -> _Look:
        # One call for all of the allocator's counters. It reads them under the allocator's lock and asks no card.
        stats = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        return _Look(
            t=round(time.perf_counter() - self._began, 3),
            allocated=self._most_since_the_last_look(stats, "allocated_bytes.all"),
            reserved=self._most_since_the_last_look(stats, "reserved_bytes.all"),
            card=self._card_use(),
            host=self._process.memory_info().rss,
        )

    def _most_since_the_last_look(self, stats: dict[str, Any], counter: str) -> int:
        """The allocator's own peak where it has risen, so that none between two looks is missed; else the use now."""
        peak = stats.get(f"{counter}.peak", 0)
        rose = peak > self._peaks.get(counter, 0)
        self._peaks[counter] = peak
        return int(peak if rose else stats.get(f"{counter}.current", 0))


def card_use(device: torch.device) -> Callable[[], int | None]:
    """A function that asks NVML how many bytes of the whole card are in use, by all programs and the driver itself.

    NVML is the library behind nvidia-smi. It counts all cards of the machine, and torch those of CUDA_VISIBLE_DEVICES:
    the card is found by its UUID, not by its number. The answer is None without a card, without the package
    nvidia-ml-py, and where NVML cannot tell (as with memory that card and host share); nothing is raised.

    >>> card_use(torch.device("cpu"))() is None
    True
    """
    if device.type != "cuda":
        return lambda: None
    try:
        nvml, handle = _nvml(device)
    except Exception:  # no package, no driver, or another kind of card
        return lambda: None

    def ask() -> int | None:
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except Exception:  # a measurement that fails is no reason to stop a run
            return None

    return ask


def other_users(device: torch.device) -> str | None:
    """One sentence about other processes that hold memory of the card, such as an engine that outlived its trainer.

    NVML is asked. A container often hides the processes outside it; then only the bytes are known. None where nobody
    else holds much, and wherever `card_use` would not know either.

    >>> other_users(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda":
        return None
    try:
        nvml, handle = _nvml(device)
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        processes = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle), *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        ]  # fmt: skip
    except Exception:
        return None
    held: dict[int, int | None] = {process.pid: process.usedGpuMemory for process in processes}  # None: not told
    here = torch.cuda.memory_reserved(device) + CONTEXT if torch.cuda.is_initialized() else 0
    ours = held.pop(os.getpid(), None) or here
    names = []
    for pid, size in held.items():
        with suppress(psutil.Error):  # a number of the world outside the container
            name = psutil.Process(pid).name()
            if size is None or size >= WORTH_NAMING:
                names.append(f"{name} (process {pid})" + ("" if size is None else f" {gib(size)}"))
    if names:
        return (
            f"Other programs hold memory of this card, and the run has less: {', '.join(names)}; what an earlier run "
            "has left behind is ended by kill and the number of the process."
        )
    if used - ours < WORTH_SAYING:
        return None
    return (
        f"Programs that are not shown here hold {gib(used - ours)} of this card, and the run has less; nvidia-smi "
        "outside this container lists them."
    )


def _nvml(device: torch.device) -> tuple[Any, Any]:
    """NVML, and its handle of a card or of the part of one that MIG makes; raises where there is none."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


class _Look(NamedTuple):
    t: float
    allocated: int
    reserved: int
    card: int | None
    host: int


class _Looks:
    """At most `MOST_SAMPLES` looks. When they are full, neighbours become one that holds the most of both."""

    def __init__(self) -> None:
        self.kept: list[_Look] = []
        self._width = 1  # looks in each that is kept, the last one excepted
        self._in_last = 1

    def add(self, look: _Look) -> None:
        if self.kept and self._in_last < self._width:
            self.kept[-1] = _merged(self.kept[-1], look)
            self._in_last += 1
            return
        if len(self.kept) == MOST_SAMPLES:
            pairs = zip(self.kept[::2], self.kept[1::2], strict=True)
            self.kept = [_merged(a, b) for a, b in pairs]
            self._width *= 2
        self.kept.append(look)
        self._in_last = 1


def _merged(a: _Look, b: _Look) -> _Look:
    return _Look(b.t, max(a.allocated, b.allocated), max(a.reserved, b.reserved), _most((a.card, b.card)),
                 max(a.host, b.host))  # fmt: skip


def _most(values: Iterable[int | None]) -> int | None:
    return max((v for v in values if v is not None), default=None)
