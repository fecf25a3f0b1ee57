"""Make an environment with a real vLLM on the CPU: `python tests/vllm/make_environment.py FOLDER`.

It installs the versions of constraints-vllm.txt, about 1 GB to download and 2.2 GB on the disk, in two or three
minutes. A second call finds the stamp `FOLDER/.installed` and returns at once. Needs Python 3.11 or newer and nothing
else.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints-vllm.txt")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(folder):
    """Install what is missing; exits with one sentence when something is in the way."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    content = hashlib.sha256(f"{CONSTRAINTS.read_text()}{sys.version}{folder}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == content:
        return
    print(f"Making {folder} with vLLM for the CPU: about 1 GB to download, three minutes ...", flush=True)
    run(sys.executable, "-m", "venv", "--clear", folder)
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    pins.remove(torch)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile", "--no-deps"]
    # from where pip looks by itself (a folder of wheels, a mirror), else from PyTorch's own index
    if not run(*pip, torch, must=False):
        run(*pip, torch, "--index-url", CPU_INDEX)
    run(*pip, *pins)
    stamp.write_text(content)


def run(*command, must=True):
    """Run a command; returns whether it succeeded. A failure that `must` not be ends the program."""
    done = subprocess.run([str(word) for word in command], stderr=None if must else subprocess.DEVNULL)
    if must and done.returncode:
        sys.exit("The environment for vLLM could not be made, for the reason above; run this again with a network.")
    return done.returncode == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
