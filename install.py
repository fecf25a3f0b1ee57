"""Make `.venv` and install the versions of constraints.txt into it: `python3 install.py`.

Needs Python 3.11 or newer and nothing else. A second call finds the stamp `.venv/.installed` and returns at once; after
the install nothing needs a network. torch comes as the CPU build where there is no NVIDIA card. This file knows nothing
about the library; it stays readable for old Pythons, so that they can say what is missing.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = "dev,notebooks"
OLDEST, NEWEST = (3, 11), (3, 14)  # the pinned versions have wheels for these
OTHER_PYTHONS = ("python3.13", "python3.12", "python3.11", "python3.14")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEFAULT_BUILD_SIZE = "2.7 GB to download, 6 GB on the disk"  # x86_64 Linux: torch with CUDA 13.0 and its libraries


def main():
    """Install what is missing; returns nothing, exits with one sentence when something is in the way."""
    card = has_nvidia_card()
    version = venv_version()
    if version and STAMP.exists() and STAMP.read_text() in accepted_stamps(version, card):
        return
    if version is None:
        make_venv()
        version = venv_version()
    STAMP.unlink(missing_ok=True)
    build = install_torch(card)
    print("Installing the other packages of constraints.txt into .venv (about a minute) ...", flush=True)
    # First the pins as they are, which is fast and clear with any pip; then this package with the pinned setuptools,
    # and what another platform needs besides.
    pip("install", "-qq", "--no-deps", "-r", str(CONSTRAINTS))
    pip("install", "-qq", "-c", str(CONSTRAINTS), "--no-build-isolation", "-e", f".[{EXTRAS}]")
    STAMP.write_text(stamp(version, build))
    print("Installed in .venv. Now: .venv/bin/a5 train", flush=True)


def stamp(version, build):
    """The line in .venv/.installed: a hash of what decides the content, and torch's build, "cpu" or "default"."""
    decisive = (CONSTRAINTS.read_text(), (ROOT / "pyproject.toml").read_text(), str(version), EXTRAS, str(ROOT))
    return f"{hashlib.sha256(repr(decisive).encode()).hexdigest()} {build}\n"


def accepted_stamps(version, card):
    """The stamps that need no new install. A CPU build is out of date on a machine that has a card now."""
    return [stamp(version, "default")] + ([] if card else [stamp(version, "cpu")])


def has_nvidia_card():
    """Whether the NVIDIA driver is loaded or nvidia-smi lists a card (on WSL2 it may lie outside the PATH)."""
    if Path("/proc/driver/nvidia").exists():
        return True
    smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if smi is None:
        return False
    try:
        found = subprocess.run([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and b"GPU" in found.stdout


def python_version(python):
    """(major, minor) of an interpreter, or None if it does not run (a removed Python, a shim for nothing)."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        found = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return tuple(int(part) for part in found.stdout.split()) if found.returncode == 0 else None


def venv_version():
    """The Python version of a .venv that can be used as it is, else None (absent, unfit, moved from another folder)."""
    config = VENV / "pyvenv.cfg"
    if not config.exists():
        return None
    made_by = re.search(r"^command = .* (/.*)$", config.read_text(), re.MULTILINE)
    if made_by and Path(made_by.group(1)).resolve() != VENV.resolve():
        return None
    version = python_version(PYTHON)
    return version if version and OLDEST <= version <= NEWEST else None


def make_venv():
    """Create .venv with a fitting Python; an unfit one that is there is emptied."""
    ours = sys.version_info[:2]
    fits = OLDEST <= ours <= NEWEST
    python = sys.executable if fits else next(filter(None, map(fitting, OTHER_PYTHONS)), None)
    if python is None:
        sys.exit(
            f"Python 3.11 to 3.14 is needed, and python3 here is {ours[0]}.{ours[1]}; install one of these, "
            "for example with `sudo apt install python3.12 python3.12-venv`, and run this again."
        )
    probe = subprocess.run([python, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL)
    if probe.returncode:
        sys.exit("Python's venv is missing here; run `sudo apt install python3-venv` and then this again.")
    print(f"Making .venv with {python} ...", flush=True)
    if subprocess.run([python, "-m", "venv", "--clear", str(VENV)]).returncode:
        sys.exit(f"Making .venv with {python} failed for the reason above.")


def fitting(name):
    """The path of an interpreter called `name` if it is there, runs and fits, else None."""
    path = shutil.which(name)
    version = python_version(path) if path else None
    return path if version and OLDEST <= version <= NEWEST else None


def install_torch(card):
    """Install the pinned torch; returns its build, "cpu" or "default"."""
    version = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE).group(1)
    if not card and sys.platform == "linux":
        print(f"No NVIDIA card found: installing the CPU build of torch {version} ...", flush=True)
        wanted = ["install", "--no-deps", "--retries", "1", "--timeout", "15", f"torch=={version}+cpu"]
        # from where pip looks by itself (a folder of wheels, a mirror), else from PyTorch's own index
        if pip(*wanted, "-q", must=False) or pip(*wanted, "--index-url", CPU_INDEX, must=False):
            return "cpu"
        print(f"The CPU build could not be reached: installing the default build, {DEFAULT_BUILD_SIZE} ...", flush=True)
    elif card:
        print(f"NVIDIA card found: installing torch {version} with CUDA, {DEFAULT_BUILD_SIZE} ...", flush=True)
    # `===` so that a CPU build lying in a folder of wheels does not pass for the default build
    pip("install", "-c", str(CONSTRAINTS), f"torch==={version}")
    return "default"


def pip(*arguments, must=True):
    """Run the environment's pip; returns whether it succeeded. A failure that `must` not be ends the program."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stderr=None if must else subprocess.DEVNULL)
    if must and done.returncode:
        sys.exit("pip failed for the reason above; with a network, `python3 install.py` goes on where it stopped.")
    return done.returncode == 0


if __name__ == "__main__":
    os.chdir(str(ROOT))
    main()
