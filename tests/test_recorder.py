"""The recorder against a card of its own making: what is read, when, by which card, and what is left behind."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from a5lib import recorder
from a5lib.recorder import MOST_SAMPLES, MemoryRecorder, card_use, other_users
from a5lib.records import MemorySample

CUDA = torch.device("cuda", 1)
SLOW = 1000.0  # an interval that no test lives to see: only the looks at the beginning and the end are taken


class Allocator:
    """Bytes now and their peak, as torch's allocator counts them; `calls` tells what was asked, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = self.peak = 0

    def use(self, size: int) -> None:
        self.now, self.peak = size, max(self.peak, size)

    def reset(self, device: torch.device) -> None:
        assert device == CUDA
        self.calls.append("reset")
        self.peak = self.now

    def synchronize(self, device: torch.device) -> None:
        assert device == CUDA and threading.current_thread() is threading.main_thread()
        self.calls.append("wait")

    def stats(self, device: torch.device) -> dict[str, int]:
        assert device == CUDA
        self.calls.append("read")
        return {
            "allocated_bytes.all.current": self.now, "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": 2 * self.now, "reserved_bytes.all.peak": 2 * self.peak,
        }  # fmt: skip


class NVMLError(Exception):
    pass


class Nvml:
    """A machine with two cards. torch sees them in the other order, as CUDA_VISIBLE_DEVICES=1,0 makes it."""

    NVMLError = NVMLError

    def __init__(self, used: dict[str, int]) -> None:
        self.used = used
        self.starts = 0

    def nvmlInit(self) -> None:
        self.starts += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.used:
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        if self.used[handle] < 0:
            raise NVMLError("not supported")
        return SimpleNamespace(used=self.used[handle], free=1, total=self.used[handle] + 1)

    computing: tuple = ()  # (process id, bytes or None) each
    drawing: tuple = ()

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.computing]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.drawing]


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    fake = Allocator()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "memory_stats", fake.stats)
    properties = {0: SimpleNamespace(uuid="bbbb"), 1: SimpleNamespace(uuid="aaaa")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    return fake


def install(monkeypatch, nvml: object) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)


@pytest.fixture
def nvml(monkeypatch) -> Nvml:
    fake = Nvml({"GPU-aaaa": 1000, "GPU-bbbb": 2000})
    install(monkeypatch, fake)
    return fake


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "a5-memory"]


def wait_until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it did not come to pass within ten seconds")


# --- phases


def test_on_the_cpu_the_resident_set_is_read_and_the_card_left_alone() -> None:
    samples: list[MemorySample] = []
    memory = MemoryRecorder(torch.device("cpu"), samples.extend)
    memory.start()
    before = memory.stop("generate", 1).host_bytes
    memory.start()
    ballast = mmap.mmap(-1, 64 * 2**20)  # pages of its own: torch could be given some that are resident already
    torch.frombuffer(ballast, dtype=torch.uint8).fill_(1)
    point = memory.stop("update", 1)
    assert point.host_bytes - before > 50 * 2**20
    assert (point.card_peak_bytes, point.card_reserved_bytes, point.card_used_bytes) == (0, 0, None)
    assert {s.phase for s in samples} == {"generate", "update"}
    assert samples[-1].host - samples[0].host > 50 * 2**20
    assert all((s.allocated, s.reserved, s.card) == (0, 0, None) for s in samples)
    del ballast


def test_on_a_card_the_peak_is_reset_then_read_after_the_work_is_done(allocator, nvml) -> None:
    allocator.use(50)
    allocator.use(7)  # the 50 was before the phase
    memory = MemoryRecorder(CUDA, interval=SLOW)
    memory.start()
    allocator.use(9)
    allocator.use(8)
    point = memory.stop("score")
    assert (point.phase, point.card_peak_bytes, point.card_reserved_bytes) == ("score", 9, 18)
    assert point.card_used_bytes == 1000
    assert allocator.calls == ["reset", "read", "wait", "read"]


def test_a_peak_between_two_looks_is_in_the_samples(allocator, nvml) -> None:
    samples: list[MemorySample] = []
    memory = MemoryRecorder(CUDA, samples.extend, interval=SLOW)
    allocator.use(3)
    memory.start()
    allocator.use(100)
    allocator.use(4)
    memory.stop("update", 1)
    allocator.use(5)
    memory.start()
    memory.stop("save", 1)
    assert [(s.phase, s.allocated, s.reserved) for s in samples] == [
        ("update", 3, 6), ("update", 100, 200), ("save", 5, 10), ("save", 5, 10),
    ]  # fmt: skip


def test_after_a_peak_the_samples_fall_again(allocator, nvml) -> None:
    memory = MemoryRecorder(CUDA, interval=SLOW)
    allocator.use(3)
    memory.start()
    allocator.use(100)
    allocator.use(4)
    assert [memory._look().allocated for _ in range(2)] == [100, 4]
    memory.stop("update")


def test_a_thread_looks_while_the_phase_runs_and_is_gone_afterwards(allocator, nvml) -> None:
    samples: list[MemorySample] = []
    memory = MemoryRecorder(CUDA, samples.extend, interval=0.001)
    assert not threads(), "nothing runs before the first phase"
    memory.start()
    allocator.use(5)
    (thread,) = threads()
    assert thread.daemon, "a run that is killed would hang on it"
    nvml.used["GPU-aaaa"] = 9000  # another program comes and goes
    wait_until(lambda: any(look.card == 9000 for look in list(memory._looks.kept)))
    nvml.used["GPU-aaaa"] = 1000
    point = memory.stop("update", 3)
    assert not threads() and not thread.is_alive()
    assert point.card_used_bytes == 9000
    assert allocator.calls.count("wait") == 1, "only the end of a phase may wait for the card"
    assert [s.t for s in samples] == sorted(s.t for s in samples)
    assert {(s.step, s.phase) for s in samples} == {(3, "update")}


def test_after_a_fault_the_card_is_not_waited_for(allocator, nvml) -> None:
    samples: list[MemorySample] = []
    memory = MemoryRecorder(CUDA, samples.extend)
    memory.start()
    memory.stop("update", 1, wait=False)
    assert "wait" not in allocator.calls and samples and not threads()


def test_a_card_that_fails_at_the_end_leaves_no_thread(allocator, nvml, monkeypatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    memory = MemoryRecorder(CUDA)
    memory.start()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.stop("update")
    assert not threads()


def test_a_phase_that_was_never_ended_is_ended_by_the_next() -> None:
    memory = MemoryRecorder(torch.device("cpu"))
    memory.start()
    memory.start()
    assert len(threads()) == 1
    memory.stop("update")
    assert not threads()


def test_samples_are_handed_over_for_the_first_steps_and_then_for_every_tenth() -> None:
    samples: list[MemorySample] = []
    memory = MemoryRecorder(torch.device("cpu"), samples.extend, interval=SLOW)
    for step in (1, 20, 21, 29, 30, 31, 200):
        memory.start()
        memory.stop("update", step)
    assert [s.step for s in samples] == [1, 1, 20, 20, 30, 30, 200, 200]


def test_a_long_phase_has_few_samples_and_all_its_peaks() -> None:
    looks = recorder._Looks()
    for i in range(5000):
        spike = i in (1234, 4998)
        looks.add(recorder._Look(float(i), 10_000 + i if spike else 5, 2, 70_000 + i if spike else None, 3))
        assert len(looks.kept) <= MOST_SAMPLES
    kept = looks.kept
    assert len(kept) > MOST_SAMPLES // 2
    # 5000 looks: 32 in each that is kept, and 8 in the last; 1234 is in the 39th, which ends with 39 * 32 - 1
    assert [(k.t, k.allocated, k.card) for k in kept if k.allocated > 5] == [(1247, 11234, 71234), (4999, 14998, 74998)]
    assert [k.t for k in kept[:-1]] == [32 * i - 1 for i in range(1, len(kept))]
    assert all((k.reserved, k.host) == (2, 3) for k in kept) and kept[0].card is None


# --- the whole card


def test_the_card_is_found_by_its_uuid_and_not_by_its_number(allocator, nvml) -> None:
    assert card_use(torch.device("cuda", 1))() == 1000
    assert card_use(torch.device("cuda", 0))() == 2000
    nvml.used["GPU-aaaa"] = 1500
    assert card_use(CUDA)() == 1500, "it must be asked anew each time"


def test_a_part_of_a_card_is_asked_for_itself(allocator, nvml) -> None:
    nvml.used = {"MIG-aaaa": 30}
    assert card_use(CUDA)() == 30


@pytest.mark.parametrize("fault", ["no package", "no driver", "an unknown card", "no answer"])
def test_without_an_answer_of_nvml_the_card_is_none_and_the_run_goes_on(allocator, nvml, monkeypatch, fault) -> None:
    def no_driver() -> None:
        raise NVMLError("driver not loaded")

    if fault == "no package":
        install(monkeypatch, None)  # importing it raises ImportError
    elif fault == "no driver":
        monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    elif fault == "an unknown card":
        nvml.used = {"GPU-cccc": 5}
    else:
        nvml.used["GPU-aaaa"] = -1
    memory = MemoryRecorder(CUDA, interval=0.001)
    memory.start()
    allocator.use(6)
    wait_until(lambda: len(memory._looks.kept) > 3)
    point = memory.stop("update")
    assert (point.card_peak_bytes, point.card_used_bytes) == (6, None)


def test_nvml_that_fails_for_a_while_leaves_a_hole_and_no_more(allocator, nvml) -> None:
    samples: list[MemorySample] = []
    memory = MemoryRecorder(CUDA, samples.extend, interval=SLOW)
    nvml.used["GPU-aaaa"] = -1
    memory.start()
    nvml.used["GPU-aaaa"] = 700
    assert memory.stop("update", 1).card_used_bytes == 700
    assert [s.card for s in samples] == [None, 700]


def test_a_cpu_run_asks_no_card(nvml) -> None:
    assert card_use(torch.device("cpu"))() is None
    assert nvml.starts == 0


# --- other users of the card

GIB, MIB = 2**30, 2**20
NOBODY = 2**22 + 1  # above the largest process id of Linux


@pytest.fixture
def orphan():
    """A process that an earlier run has left behind."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def test_V09_a_start_warns_of_the_processes_that_hold_the_card(allocator, nvml, orphan) -> None:
    nvml.used["GPU-aaaa"] = 7 * GIB
    nvml.computing = ((os.getpid(), 2 * GIB), (orphan, 6 * GIB), (NOBODY, GIB))
    nvml.drawing = ((os.getppid(), 100 * MIB),)
    assert other_users(CUDA) == (
        f"Other programs hold memory of this card, and the run has less: sleep (process {orphan}) 6.0 GiB; what an "
        "earlier run has left behind is ended by kill and the number of the process."
    )
    nvml.computing = ((orphan, None),)  # as under WSL2
    assert f": sleep (process {orphan}); what" in other_users(CUDA)


@pytest.mark.parametrize(("used", "said"), [(4 * GIB - 1, None), (4 * GIB, "hold 1.0 GiB of this card")])
def test_V09_of_processes_that_a_container_hides_the_bytes_are_said(allocator, nvml, monkeypatch, used, said) -> None:
    """torch has reserved so much that with CUDA itself 3 GiB are ours."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB - recorder.CONTEXT)
    nvml.used["GPU-aaaa"] = used
    nvml.computing = ((NOBODY, 9 * GIB),)
    sentence = other_users(CUDA)
    assert sentence is None if said is None else said in sentence and "outside this container" in sentence


@pytest.mark.parametrize("fault", ["no package", "an unknown card", "no answer", "not told"])
def test_without_an_answer_of_nvml_nobody_is_warned_of(allocator, nvml, monkeypatch, orphan, fault) -> None:
    nvml.used["GPU-aaaa"] = 9 * GIB
    nvml.computing = ((orphan, 6 * GIB),)
    assert other_users(CUDA) is not None
    if fault == "no package":
        install(monkeypatch, None)
    elif fault == "an unknown card":
        nvml.used = {"GPU-cccc": 9 * GIB}
    elif fault == "no answer":
        nvml.used["GPU-aaaa"] = -1
    else:
        monkeypatch.delattr(Nvml, "nvmlDeviceGetGraphicsRunningProcesses")
    assert other_users(CUDA) is None


def test_alone_on_the_card_nothing_is_said(allocator, nvml) -> None:
    nvml.used["GPU-aaaa"] = 3 * GIB
    nvml.computing = ((os.getpid(), 2 * GIB + 1),)
    assert other_users(CUDA) is None
