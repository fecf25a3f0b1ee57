"""The README's table of what goes wrong with vLLM on the card that trains: each sentence is what the code says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from a5lib import machine
from a5lib.config import TrainConfig, resolve
from a5lib.engines.plan import GIB
from a5lib.recorder import other_users
from a5lib.rollouts import choice
from a5lib.rollouts.mismatch import MismatchWatch
from a5lib.rollouts.vllm_backend import SECONDS, VllmColocated
from a5lib.rollouts.weight_channel import WeightChannel, lay_out
from a5lib.training import check_context
from tests.test_readme import TEXT, both, heading_number, section, wide_rows
from tests.vllm_tools import Rig, weights

CARD = torch.device("cuda", 0)
LOG = Path("runs/first/vllm-worker.log")
TITLE = "When colocated vLLM fails"
SECOND_HALF = (
    "Nothing of it is left running; look for the cause in its log, then start again (a run: with --resume). The last "
    f"lines of {LOG}:"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A machine like a reader's: its paths, a card of 16 GB, and the folder in which the run folder lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (int(9.4 * GIB), int(15.6 * GIB)))
    return tmp_path


def fault(folder, method, kind, **settings):
    """A backend on the fake engine, in the run folder runs/first, in which this will happen."""
    rig = Rig(folder, **settings)
    rig.backend.log = LOG
    if kind:
        rig.fault(method, kind)
    return rig


def no_vllm(folder, monkeypatch):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/home/ann/a5/.venv/bin/python")
    choice.check_backend(resolve(TrainConfig(generation_backend="vllm-colocated")))


def other_programs(folder, monkeypatch):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=7 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda card: [SimpleNamespace(pid=4711, usedGpuMemory=6 * GIB)],
        nvmlDeviceGetGraphicsRunningProcesses=lambda card: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(name=lambda: {4711: "python"}[pid]))
    return other_users(CARD)


def little_of_the_card(folder, monkeypatch):
    settings = {"memory_share": 11.6 / 15.6}
    with VllmColocated(weights().items(), settings, folder, device=CARD) as backend:
        backend.start()


def keeps_the_card(folder, monkeypatch):
    fault(folder, "", "", card_free=15 * GIB, card_kept=int(2.1 * GIB)).cycle()


def no_sync(folder, monkeypatch):
    fault(folder, "", "").texts()


def other_weights(folder, monkeypatch):
    fault(folder, "load", "wrong checksum").cycle(step=4)


def killed(folder, monkeypatch):
    fault(folder, "generate", "killed").cycle()


def too_long(folder, monkeypatch):
    check_context(480, 512)


def little_of_the_host(folder, monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: (int(1.5 * GIB), 16 * GIB))
    WeightChannel(lay_out([("weight", torch.empty(1_484_916_736, dtype=torch.bfloat16, device="meta"))]))


def jump(folder, monkeypatch):
    return MismatchWatch(torch.bfloat16).jump(0.6)


ROWS = [no_vllm, other_programs, little_of_the_card, keeps_the_card, no_sync, other_weights, killed, too_long,
        little_of_the_host, jump]  # fmt: skip


def table(page):
    return wide_rows(section(page, heading_number(TITLE)), 3)


@both
@pytest.mark.parametrize("row", ROWS, ids=[row.__name__ for row in ROWS])
def test_each_sentence_of_the_table_is_what_the_code_says(page, row, here, monkeypatch):
    try:
        said = row(here, monkeypatch)
    except (ValueError, RuntimeError) as error:
        said = str(error)
    sentence, *quoted = said.splitlines()
    shown = table(page)[ROWS.index(row)]
    if quoted:  # the second half, the same for all faults of vLLM's process, stands below the table
        assert sentence.endswith(f" {SECOND_HALF}") and f"`{SECOND_HALF}`" in TEXT[page]
    assert shown[1] == f"`{sentence.removesuffix(f' {SECOND_HALF}')}`"
    if row is killed:
        assert quoted[-1].strip() == "The worker ended: killed by SIGKILL." and f"`{quoted[-1].strip()}`" in shown[2]


@both
def test_a_hang_is_said_as_below_the_table(page):
    assert f"gave no sign of life for {SECONDS['generate']:g} s" in section(page, heading_number(TITLE))


@both
def test_the_table_has_ten_rows(page):
    assert len(table(page)) == len(ROWS) == 10
