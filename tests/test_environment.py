"""The ways to set up agree: pyproject.toml, constraints.txt, environment.yml, Makefile and install.py."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from a5lib import doctor

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    parsed = [line.partition("==") for line in lines]
    assert all(name and version for name, _, version in parsed), "every line of constraints.txt is NAME==VERSION"
    return {canonicalize_name(name): version for name, _, version in parsed}


def pip_lines():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    return next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))


def test_every_pin_is_exact_and_inside_the_range_of_pyproject():
    pinned = pins()
    extras = install.EXTRAS.split(",")
    needs = PROJECT["dependencies"] + [need for extra in extras for need in PROJECT["optional-dependencies"][extra]]
    for need in map(Requirement, needs):
        version = pinned.get(canonicalize_name(need.name))
        assert version, f"pyproject.toml asks for {need.name}, which constraints.txt does not pin"
        assert need.specifier.contains(version), f"the pin {need.name}=={version} is outside {need.specifier}"
    assert pinned["torch"] == "2.13.0", "torch without a local label, so that the CPU and the CUDA build both fit"
    assert not any("+" in version for version in pinned.values())


def test_the_older_versions_that_must_run_are_inside_the_ranges():
    ranges = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
    assert ranges["torch"].contains("2.11.0") and ranges["transformers"].contains("5.17.0")
    assert not ranges["transformers"].contains("5.20.0"), "vllm 0.32.0 needs transformers below 5.20"


@pytest.mark.parametrize(
    "need", ["transformers<5.20.0,>=5.16.1", "numpy<2.4", "lark==1.2.2", "tokenizers>=0.23.2", "setuptools<81,>=78.1.1"]
)
def test_the_pins_leave_room_for_vllm(need):
    need = Requirement(need)
    assert need.specifier.contains(pins()[need.name]), f"vllm 0.32.0 or what it needs asks for {need}"


def test_what_is_installed_here_is_pinned():
    """Follows the installed packages' own requirements from a5lib on; none may be missing in constraints.txt."""
    pinned, seen, todo = pins(), set(), [("a5lib", frozenset(install.EXTRAS.split(",")))]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        for need in map(Requirement, texts):
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                continue
            todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    unpinned = {name for name, _ in seen} - set(pinned) - {"a5lib"}
    accelerator = {name for name in unpinned if name.startswith(("nvidia-", "cuda-")) or name == "triton"}
    assert unpinned <= accelerator, f"add to constraints.txt: {sorted(unpinned - accelerator)}"


def test_environment_yml_says_the_same_as_constraints_and_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    from_conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    assert [entry for entry in from_conda if not entry.startswith("python")] == ["pip"], "all else comes from pip"
    python = SpecifierSet(next(entry for entry in from_conda if entry.startswith("python")).removeprefix("python"))
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert python.contains(f"{oldest}.0") and not python.contains("3.10.13"), "the same oldest Python as pyproject.toml"
    assert python.contains("{}.{}.1".format(*install.NEWEST)), "the same newest Python as install.py"
    assert not python.contains(f"{install.NEWEST[0]}.{install.NEWEST[1] + 1}.0")
    lines = pip_lines()
    assert "-c constraints.txt" in lines and f"-e .[{install.EXTRAS}]" in lines
    versions = dict(line.split("==") for line in lines if "==" in line)
    assert {"torch", "transformers"} <= set(versions)
    for name, version in versions.items():
        assert pins()[name] == version, f"environment.yml has {name} {version}, constraints.txt {pins()[name]}"


def test_doctor_recommends_the_pinned_versions():
    assert pins()["torch"] == doctor.TORCH
    assert Version(doctor.VLLM) == Version("0.32.0")


def test_install_py_and_pyproject_want_the_same_python():
    assert PROJECT["requires-python"] == ">={}.{}".format(*install.OLDEST)


def test_ci_runs_the_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK), ".ci/run must be executable"
    assert "set -euo pipefail" in script.read_text() and "make test" in script.read_text()
    assert re.search(r"cov-fail-under=90\b", (ROOT / "Makefile").read_text())


# install.py in a folder of its own, with pip replaced by a list of the calls


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A clone without .venv; `calls` holds what would have gone to pip, `fails` what pip cannot do."""
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name, path in {
        "ROOT": ".", "VENV": ".venv", "PYTHON": ".venv/bin/python", "STAMP": ".venv/.installed",
        "CONSTRAINTS": "constraints.txt",
    }.items():  # fmt: skip
        monkeypatch.setattr(install, name, tmp_path / path)

    class Bare:
        calls: list[str] = []  # noqa: RUF012
        fails: tuple[str, ...] = ()
        card = False

    def pip(*arguments, must=True):
        line = " ".join(arguments)
        Bare.calls.append(line)
        works = not any(part in line for part in Bare.fails)
        if must and not works:
            sys.exit("pip failed")
        return works

    def make_venv():
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"command = /usr/bin/python3 -m venv {tmp_path}/.venv\n")
        if not install.PYTHON.exists():
            install.PYTHON.symlink_to(sys.executable)

    Bare.calls = []
    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install, "make_venv", make_venv)
    monkeypatch.setattr(install, "has_nvidia_card", lambda: Bare.card)
    return Bare


def test_without_a_card_the_cpu_build_and_once_only(bare):
    install.main()
    assert "torch==2.13.0+cpu" in bare.calls[0] and "--index-url" not in bare.calls[0], "first what pip finds by itself"
    assert len(bare.calls) == 3, "a CPU build was found, so no other build of torch may be fetched"
    assert "--no-build-isolation" in bare.calls[-1], "pip would download the newest setuptools"
    bare.calls.clear()
    install.main()
    assert bare.calls == [], "a second `make train` must install nothing"


def test_pytorchs_index_comes_second_and_the_default_build_last(bare, capsys):
    bare.fails = ("+cpu",)
    install.main()
    assert bare.calls[1].endswith("--index-url https://download.pytorch.org/whl/cpu")
    assert bare.calls[2].endswith("torch===2.13.0"), "`==` would take a CPU build for the default one"
    assert "2.7 GB" in capsys.readouterr().out, "the size is said before the download"


def test_with_a_card_the_default_build_even_after_a_cpu_build(bare):
    install.main()
    bare.card = True
    bare.calls.clear()
    install.main()
    assert bare.calls[0].endswith("torch===2.13.0"), "the stamp of a CPU build is out of date once there is a card"
    bare.card = False
    bare.calls.clear()
    install.main()
    assert bare.calls == [], "a card that is gone for a while is no reason to download again"


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_versions_are_installed(bare, name):
    install.main()
    path = install.ROOT / name
    path.write_text(path.read_text() + "\n# changed\n")
    bare.calls.clear()
    install.main()
    assert bare.calls, f"a changed {name} must be installed"


def test_an_interrupted_install_leaves_no_stamp(bare):
    bare.fails = ("--no-build-isolation",)
    with pytest.raises(SystemExit):
        install.main()
    assert not install.STAMP.exists(), "the stamp may be written only when everything is installed"


def test_a_moved_or_dead_environment_is_made_again(bare):
    install.main()
    assert install.venv_version() == sys.version_info[:2]
    config = install.VENV / "pyvenv.cfg"
    config.write_text("command = /usr/bin/python3 -m venv /somewhere/else/.venv\n")
    assert install.venv_version() is None, "the scripts of a moved environment point to the old folder"
    config.write_text("home = /usr/bin\n")
    install.PYTHON.unlink()
    install.PYTHON.symlink_to("/removed/python3")
    assert install.venv_version() is None


def test_a_python_that_does_not_fit_is_named_in_one_sentence(monkeypatch):
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 2, "final", 0))
    monkeypatch.setattr(install, "fitting", lambda name: None)
    with pytest.raises(SystemExit, match=r"Python 3.11 to 3.14 is needed, and python3 here is 3.9;") as stopped:
        install.make_venv()
    assert "\n" not in str(stopped.value)


def test_a_missing_venv_module_is_named_in_one_sentence(monkeypatch):
    monkeypatch.setattr(install.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=r"sudo apt install python3-venv"):
        install.make_venv()


def test_a_card_is_found_only_where_nvidia_smi_lists_one(monkeypatch, tmp_path):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a card")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not install.has_nvidia_card()
    smi = tmp_path / "nvidia-smi"
    for script, expected in (
        ("echo 'GPU 0: NVIDIA GeForce RTX 4060 (UUID: GPU-1)'", True),
        ("echo 'No devices were found'", False),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the GPU driver'; exit 9", False),
    ):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert install.has_nvidia_card() is expected, script
