"""Progress bars: shown, off in CI, and text where ipywidgets is missing, in a real kernel."""

import sys

import nbformat
import pytest
from nbclient import NotebookClient

from a5lib.progress import progress_bar


@pytest.mark.parametrize(("ci", "shown"), [(None, True), ("", True), ("false", True), ("true", False), ("1", False)])
def test_ci_turns_the_bars_off(monkeypatch, capsys, ci, shown):
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    assert list(progress_bar(range(3), desc="count")) == [0, 1, 2]
    assert ("count" in capsys.readouterr().err) == shown


SETUP = """
import sys, warnings
{block}
from a5lib.config import TrainConfig
from a5lib.course import load_algo
from a5lib.training import train
from pathlib import Path
"""
TRAIN = """
config = TrainConfig(num_steps=1, rollout_batch_size=4, group_size=2, max_tokens=16, train_examples=4, val_examples=1,
                     eval_samples=1, device="cpu", output_dir=Path({folder!r}), save_every=0, save_final=False)
summary = train(config, load_algo("solutions"))
assert summary.finished
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def kernel_outputs(folder, monkeypatch, ci, block):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CI", ci)
    cells = [SETUP.format(block=block), TRAIN.format(folder=str(folder / "run"))]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(nb, timeout=50, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in nb.cells for output in cell.outputs]
    return outputs, "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stderr")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.reference
def test_a_kernel_without_ipywidgets_trains_with_text_bars(tmp_path, monkeypatch):
    outputs, errors = kernel_outputs(tmp_path, monkeypatch, ci="", block='sys.modules["ipywidgets"] = None')
    assert not any(WIDGET in output.get("data", {}) for output in outputs), "a widget without ipywidgets"
    assert "train 1/1" in errors, f"no text bar: {errors!r}"
    assert "Warning" not in errors, f"a missing package that nobody needs is no warning: {errors!r}"


@pytest.mark.reference
def test_a_kernel_in_ci_shows_no_bars_at_all(tmp_path, monkeypatch):
    outputs, errors = kernel_outputs(tmp_path, monkeypatch, ci="true", block="")
    assert not any(WIDGET in output.get("data", {}) for output in outputs), "a bar of tqdm.notebook"
    assert errors == ""
