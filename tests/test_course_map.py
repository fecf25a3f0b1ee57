"""The map in notebook 00: every notebook with its minutes and exercises, every problem with a section that exists."""

import re

import pytest

from a5lib.course.exercises import EXERCISES
from tests.notebook_tools import ALL, ROOT, load

NAMES = [name for names in EXERCISES.values() for name in names]


def rows(title):
    """The cells of the table under a heading of notebook 00."""
    text = next(c.source for c in load("00_start_here").cells if c.source.startswith(f"## {title}"))
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| [") or "ipynb" in line]
    assert lines, f"no table under {title}"
    return lines


def target(link):
    """The notebook that a link names and leads to."""
    name, file = re.fullmatch(r"\[(\w+)\]\((\w+)\.ipynb\)", link).groups()
    assert name == file, f"the link says {name} and leads to {file}"
    return name


def headings(name):
    text = "\n".join(cell.source for cell in load(name).cells if cell.cell_type == "markdown")
    return re.findall(r"^##+ (.+?)\s*$", text, re.MULTILINE)


MAP = rows("The map") if "00_start_here" in ALL else []
PROBLEMS = rows("The assignment") if "00_start_here" in ALL else []


def test_the_map_lists_every_notebook_in_order():
    assert [target(row[0]) for row in MAP] == ALL


@pytest.mark.parametrize("row", MAP, ids=lambda row: row[0][1:3])
def test_the_map_says_what_the_notebook_says(row):
    notebook = load(target(row[0]))
    header = notebook.cells[0].source
    minutes = re.search(r"\*\*Time\*\* (\d+) min", header)
    assert minutes and row[3] == minutes[1], f"the map says {row[3]} minutes, the notebook: {header.splitlines()[2]}"
    text = "\n".join(cell.source for cell in notebook.cells)
    for name in re.findall(r"`(\w+)`", row[2]):
        assert name in header, f"the header does not say that one writes {name}"
        assert re.search(rf"^#+ Exercise.*\b{name}\b", text, re.MULTILINE) or name in text


def test_every_exercise_is_in_the_map_once():
    written = [name for row in MAP for name in re.findall(r"`(\w+)`", row[2])]
    assert sorted(written) == sorted(NAMES)


@pytest.mark.parametrize("row", PROBLEMS, ids=lambda row: row[0][:30])
def test_the_section_of_each_problem_exists(row):
    problem, link, section = row
    found = headings(target(link))
    assert section.replace("`", "") in [heading.replace("`", "") for heading in found], (
        f"{problem}: {target(link)} has no section {section!r}; it has {found}"
    )


def test_links_between_notebooks_lead_somewhere():
    for name in ALL:
        for cell in load(name).cells:
            if cell.cell_type == "markdown":
                for file in re.findall(r"\]\((\w+)\.ipynb\)", cell.source):
                    assert file in ALL, f"{name} links to {file}.ipynb, which is not there"


def test_worked_answers_have_the_titles_that_the_notebooks_name():
    path = ROOT / "solutions" / "answers.md"
    if not path.exists():
        pytest.skip("solutions/ is not here")
    titles = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    for name in ALL:
        for cell in load(name).cells:
            for title in re.findall(rf'"({name}: [^"]+)"', " ".join(cell.source.split())):
                assert title in titles, f"{name} names the worked answer {title!r}, which is not in answers.md"
