"""Run, tidy and inspect the notebooks: `python -m tests.notebook_tools run 02_masks`.

- `run NAME ...`      executes notebooks on the reference and writes them tidied, as they are committed
- `starter NAME ...`  executes them on the stubs, without writing, and says what ended in an error
- `validate`          is what `make test` runs: nbval on the reference from two folders, the stubs in a path with spaces
- `address OWNER/REPO` writes the GitHub address of your copy into the Colab badges and cells
Without names all notebooks are meant. This file knows notebooks as data; what they teach is not its business.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from a5lib.course.exercises import EXERCISES, has_reference, load_algo

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
LAX = ("11_full_training",)  # these train, so their numbers change from machine to machine
ADDRESS = "YOUR_NAME/a5lib"  # no GitHub name has an underscore: nothing foreign can be fetched before you set yours
# One thread, no progress bars, and a short training: what a test needs and a student does not.
QUIET = {"CI": "true", "OMP_NUM_THREADS": "1", "A5_STEPS": os.environ.get("A5_STEPS", "4")}
WIDGET = "application/vnd.jupyter.widget-view+json"

BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{address}/blob/main/notebooks/{name}.ipynb) "
    "In Colab the next cell installs the course. What is lost there: files you edit disappear when Colab ends, so "
    "download `starter/` before that."
)
COLAB = """\
import sys

if "google.colab" in sys.modules:  # only in Colab: fetch the course and install it
    %cd /content
    !git clone -q https://github.com/{address} a5lib
    %cd a5lib/notebooks
    %pip install -q -e ..
    import site

    site.main()"""


def with_colab_cells(nb: Any, name: str, address: str = ADDRESS) -> Any:
    """The notebook with the badge and the Colab cell after its header."""
    badge = nbformat.v4.new_markdown_cell(BADGE.format(address=address, name=name))
    nb.cells[1:1] = [badge, nbformat.v4.new_code_cell(COLAB.format(address=address))]
    return nb


def execute(nb: Any, impl: str, folder: Path = NOTEBOOKS, allow_errors: bool = False) -> Any:
    """Run all cells in a new kernel that starts in `folder`; GPU cells (tag nbval-skip) are left as they are."""
    env = os.environ | QUIET | {"A5_IMPL": impl}
    client = NotebookClient(
        nb,
        timeout=600,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors alone
        resources={"metadata": {"path": str(folder)}},
        allow_errors=allow_errors,
        skip_cells_with_tag="nbval-skip",
    )
    return client.execute(env=env)


def normalise(nb: Any, name: str) -> Any:
    """As it is committed: plain metadata, counted cells, ids that do not change, no widgets, streams in one piece."""
    nb.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    nb.nbformat, nb.nbformat_minor = 4, 5
    count = 0
    for index, cell in enumerate(nb.cells):
        cell.id = hashlib.sha256(f"{name} {index}".encode()).hexdigest()[:8]
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = [output for output in _joined(cell.outputs) if WIDGET not in output.get("data", {})]
        for output in cell.outputs:
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if output.output_type == "execute_result":
                output.execution_count = count
    return nb


def _joined(outputs: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def violations(nb: Any, name: str) -> Iterator[str]:
    """What breaks the rules of the notebooks, in words."""
    kernel = nb.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield f"the kernel is called {kernel!r} and not python3"
    if "widgets" in nb.metadata:
        yield "widget state is stored"
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) != len(ids):
        yield "cell ids are missing or not unique"
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"execution counts are {counts} and not 1 to {len(code)}"
    titles = re.findall(r"^# .+$", "\n".join(_prose(nb)), re.MULTILINE)
    if len(titles) != 1 or not nb.cells[0].source.startswith("# "):
        yield f"one H1 in the first cell is expected, not {titles}"
    if re.search(r"^#+ \d", "\n".join(_prose(nb)), re.MULTILINE):
        yield "a heading is numbered by hand"
    if "**Time**" not in nb.cells[0].source or "**You write**" not in nb.cells[0].source:
        yield "the header does not say Time and You write"
    for index, cell in enumerate(code, start=1):
        if "sys.path" in cell.source:
            yield f"code cell {index} touches sys.path"
        if not cell.source.strip():
            yield f"code cell {index} is empty"
        tags = cell.metadata.get("tags", [])
        for output in cell.outputs:
            yield from (f"code cell {index}: {fault}" for fault in _output_faults(output, tags))


def _prose(nb: Any) -> list[str]:
    return [re.sub(r"```.*?```", "", c.source, flags=re.DOTALL) for c in nb.cells if c.cell_type == "markdown"]


def _output_faults(output: Any, tags: list[str]) -> Iterator[str]:
    if output.output_type == "error":
        yield f"ended in {output.ename}: {output.evalue}"
        return
    data = output.get("data", {})
    if WIDGET in data:
        yield "a widget view is stored"
    text = output.get("text", "") + "".join(data.get(kind, "") for kind in ("text/plain", "text/html", "text/markdown"))
    if re.search(r"0x[0-9a-f]{6,}", text):
        yield "an address in memory is printed"
    if re.search(r"(?:/home/|/root/|/Users/|/tmp/|[A-Z]:\\)", text) or str(ROOT) in text:
        yield "a path of one machine is printed"
    if re.search(r"\d+%\|", text):
        yield "a progress bar is stored"
    if "nbval-ignore-output" not in tags and re.search(r"(?<![\w.])(?!\d{4}\.\d{5}\b)\d+\.\d{5,}", text):
        yield "a number has more than four decimals"  # 2402.03300 is an arXiv id


def load(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def errors(nb: Any) -> list[str]:
    """The cells that ended in an error, in words. Without `solutions/` a cell may stop with one calm sentence."""
    return [
        f"code cell {index}: {output.ename}: {output.evalue}"
        for index, cell in enumerate((c for c in nb.cells if c.cell_type == "code"), start=1)
        for output in cell.outputs
        if output.output_type == "error" and (has_reference() or len(output.traceback) > 1)
    ]


def quiet_checks(nb: Any) -> list[str]:
    """The cells with a check of an unwritten function that do not say what is to be written, in words."""
    unwritten = {name for name, whose in load_algo("starter").whose.items() if whose == "unwritten"}
    found = []
    for cell in nb.cells:
        for name in re.findall(r'^check\("(\w+)"\)', cell.source, re.MULTILINE) if cell.cell_type == "code" else []:
            said = "".join(output.get("text", "") for output in cell.outputs)
            for function in unwritten & set(EXERCISES.get(name, (name,))):
                if f"○ {function} is not written yet. In starter/" not in said:
                    found.append(f'check("{name}") does not say what to write for {function}')
    return found


def set_address(address: str) -> None:
    """Write the GitHub address, OWNER/REPO, into badges and Colab cells."""
    for name in ALL:
        path = NOTEBOOKS / f"{name}.ipynb"
        text = path.read_text(encoding="utf-8")
        for before in set(re.findall(r"research\.google\.com/github/([^/]+/[^/]+)/blob", text)):
            text = text.replace(f"google.com/github/{before}/", f"google.com/github/{address}/")
            text = text.replace(f"https://github.com/{before} a5lib", f"https://github.com/{address} a5lib")
        path.write_text(text, encoding="utf-8")


def nbval(names: Sequence[str], *, lax: bool, cwd: Path) -> int:
    """Compare notebooks with their stored outputs, each in a kernel of its own; returns pytest's exit code."""
    files = [os.path.relpath(NOTEBOOKS / f"{name}.ipynb", cwd) for name in names]
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--timeout=600", "-n", "2", "--dist", "loadfile"]
    options += ["--nbval-sanitize-with", str(ROOT / "tests" / "sanitize.cfg")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--nbval-lax" if lax else "--nbval", *files],
        cwd=cwd,
        env=os.environ | QUIET | {"A5_IMPL": "solutions"},
    ).returncode


def run_anew(name: str) -> str:
    """Run one notebook on the reference and store it tidied; the rules it breaks in one line, as in `run_on_stubs`."""
    began = time.perf_counter()
    nb = normalise(execute(load(name), impl="solutions", allow_errors=True), name)
    nbformat.write(nb, NOTEBOOKS / f"{name}.ipynb")
    return f"{name}: {time.perf_counter() - began:.0f} s, " + ("; ".join(violations(nb, name)) or "no error")


def run_on_stubs(name: str, folder: Path) -> str:
    """What one notebook says on the stubs, in one line; it ends in "no error" or names what went wrong."""
    began = time.perf_counter()
    nb = execute(load(name), impl="starter", folder=folder, allow_errors=True)
    found = errors(nb) + quiet_checks(nb)
    return f"{name}: {time.perf_counter() - began:.0f} s, " + ("; ".join(found) or "no error")


def validate() -> int:
    """All that `make test` asks of the notebooks; returns the number of passes that failed."""
    failed = 0
    if has_reference():
        strict = [name for name in ALL if name not in LAX]
        for cwd in (ROOT, NOTEBOOKS):  # twice, from two folders
            failed += nbval(strict, lax=False, cwd=cwd) != 0
            failed += nbval(LAX, lax=True, cwd=cwd) != 0
    else:
        print("The stored outputs come from solutions/, which is not here: the notebooks are not compared with them.")
    with tempfile.TemporaryDirectory(prefix="my course dir ") as place, ThreadPoolExecutor(2) as pool:
        for folder in ("notebooks", "runs"):
            shutil.copytree(ROOT / folder, Path(place) / folder)
        lines = list(pool.map(run_on_stubs, ALL, [Path(place) / "notebooks"] * len(ALL)))
        print("On the stubs, in a path with spaces:", *lines, sep="\n  ")
        failed += not all(line.endswith("no error") for line in lines)
    return failed


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("run", "starter", "validate", "address"):
        print(__doc__)
        return 2
    command, names = arguments[0], arguments[1:]
    if command == "validate":
        return int(validate() > 0)
    if command == "address":
        set_address(names[0])
        return 0
    failed = False
    for name in names or ALL:
        line = run_anew(name) if command == "run" else run_on_stubs(name, NOTEBOOKS)
        print(line, flush=True)
        failed |= not line.endswith("no error")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
