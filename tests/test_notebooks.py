"""The notebooks as files: thirteen of them, and the rules that keep them the same on every machine.

`make notebooks` runs them; this reads them. Field cases N01, N02, N04 and N06 are here and in test_widgets.py.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest

from a5lib.course import EXERCISES
from a5lib.course.exercises import has_reference
from tests import notebook_tools as tools

ROOT = Path(__file__).parent.parent
EXPECTED = [
    "00_start_here", "01_prompting", "02_masks", "03_rewards", "04_advantages", "05_policy_gradient",
    "06_chunked_scoring", "07_bf16_adamw", "08_train_step", "09_fitting_the_card", "10_colocated_vllm",
    "11_full_training", "12_variants",
]  # fmt: skip


def test_all_thirteen_are_here():
    assert tools.ALL == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_a_notebook_keeps_the_rules(name):
    nb = tools.load(name)
    nbformat.validate(nb)
    assert not list(tools.violations(nb, name))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_notebook_opens_in_colab_by_one_cell(name):
    nb = tools.load(name)
    badges = [cell.source for cell in nb.cells if "colab-badge" in cell.source]
    address = re.search(r"google\.com/github/([^/]+/[^/]+)/blob", nb.cells[1].source)[1]
    assert nb.cells[1].source == tools.BADGE.format(address=address, name=name)
    assert nb.cells[2].source == tools.COLAB.format(address=address)
    assert len(badges) == 1


@pytest.mark.parametrize("name", EXPECTED)
def test_links_between_files_lead_somewhere(name):
    text = "\n".join(cell.source for cell in tools.load(name).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if not link.startswith("http")]
    if not has_reference():
        links = [link for link in links if not link.startswith("../solutions/")]
    missing = [link for link in links if not (tools.NOTEBOOKS / link).exists()]
    assert not missing


def test_every_exercise_is_shown_and_checked_in_its_notebook():
    code = {n: "\n".join(c.source for c in tools.load(n).cells if c.cell_type == "code") for n in EXPECTED}
    for exercise, functions in EXERCISES.items():
        where = [n for n, text in code.items() if re.search(rf'check\("({exercise}|{"|".join(functions)})"\)', text)]
        assert where, f"no notebook checks {exercise}"
        shown = [n for n, text in code.items() if re.search(rf'show\(.*"({exercise}|{"|".join(functions)})"', text)]
        assert shown, f"no notebook shows {exercise}"


GOOD = {
    "cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# T\n\n**Time** 1 min. **You write** -."},
              {"cell_type": "code", "id": "b", "metadata": {}, "source": "1", "execution_count": 1, "outputs": []}],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}  # fmt: skip


def notebook(**changes):
    nb = json.loads(json.dumps(GOOD))
    nb["metadata"] |= changes.pop("metadata", {})
    nb["cells"][1] |= changes
    return nbformat.from_dict(nb)


def stream(text):
    return [{"output_type": "stream", "name": "stdout", "text": text}]


def test_a_good_notebook_breaks_no_rule():
    assert not list(tools.violations(notebook(outputs=stream("12.5 and 0.1235\n")), "x"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata": {"kernelspec": {"name": "conda-env-me-py", "display_name": "me"}}}, "not python3"),  # N02
        ({"metadata": {"widgets": {}}}, "widget state"),  # N04
        ({"execution_count": 7}, "execution counts"),
        ({"id": "a"}, "not unique"),
        ({"source": "import sys; sys.path.append('..')"}, "sys.path"),  # N06
        ({"outputs": stream("<f at 0x7f00deadbeef>")}, "address in memory"),
        ({"outputs": stream("/home/ann/a5lib")}, "path of one machine"),  # N06
        ({"outputs": stream(" 50%|#####     | 1/2")}, "progress bar"),  # N01
        ({"outputs": stream("0.123456")}, "four decimals"),
        ({"outputs": [{"output_type": "display_data", "metadata": {}, "data": {tools.WIDGET: {}}}]}, "widget view"),
        ({"outputs": [{"output_type": "error", "ename": "KeyError", "evalue": "x", "traceback": []}]}, "KeyError"),
    ],
)
def test_the_scan_finds_what_is_forbidden(changes, words):
    found = list(tools.violations(notebook(**changes), "x"))
    assert len(found) == 1
    assert words in found[0]


def test_normalise_makes_a_notebook_that_keeps_the_rules():
    nb = notebook(execution_count=9, outputs=stream("a") + stream("b") + [
        {"output_type": "display_data", "metadata": {"x": 1}, "data": {tools.WIDGET: {}, "text/plain": "IntSlider()"}}
    ], metadata={"widgets": {}, "kernelspec": {"name": "mine", "display_name": "mine"}})  # fmt: skip
    nb = tools.normalise(nb, "x")
    assert not list(tools.violations(nb, "x"))
    assert [output.text for output in nb.cells[1].outputs] == ["ab"]
    assert [cell.id for cell in nb.cells] == [cell.id for cell in tools.normalise(nb, "x").cells]


def test_the_address_is_written_everywhere(tmp_path, monkeypatch):
    nb = tools.with_colab_cells(notebook(), "x")
    nbformat.write(nb, tmp_path / "x.ipynb")
    monkeypatch.setattr(tools, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(tools, "ALL", ["x"])
    tools.set_address("ann/course")
    cells = tools.load("x").cells
    assert cells[1].source == tools.BADGE.format(address="ann/course", name="x")
    assert cells[2].source == tools.COLAB.format(address="ann/course")
