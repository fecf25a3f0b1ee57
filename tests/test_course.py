"""Stubs, and whose code runs: the committed starter is the blanked solution, and a student's functions are found."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from a5lib.course import EXERCISES, blank, is_written, load_algo
from a5lib.errors import UserError
from tests.conftest import IMPL

ROOT = Path(__file__).parent.parent
FILES = sorted(path.name for path in (ROOT / "solutions").glob("*.py"))

BEGIN, END = "### BEGIN YOUR CODE", "### END YOUR CODE"


def read(package, file):
    return (ROOT / package / file).read_text(encoding="utf-8")


def test_blank_replaces_each_region_by_its_message():
    text = f'''def f(x):
    """Docstring."""
    if x:
        {BEGIN}: add "one" (notebook 02)
        y = x + 1

        return y
        {END}
    {BEGIN}
    return 0
    {END}


z = 3
'''
    assert (
        blank(text)
        == f'''def f(x):
    """Docstring."""
    if x:
        {BEGIN}: add "one" (notebook 02)
        raise NotImplementedError("add \\"one\\" (notebook 02)")
        {END}
    {BEGIN}
    raise NotImplementedError("write this region; the text above it says what it does")
    {END}


z = 3
'''
    )
    assert blank(blank(text)) == blank(text)
    assert blank("x = 1\n") == "x = 1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{BEGIN}\n{BEGIN}\n{END}\n{END}\n", "Line 2 begins a region inside the one of line 1"),
        (f"x\n{BEGIN}\ny\n", "region of line 2 does not end"),
        (f"x\n{END}\n", "Line 2 ends a region that does not begin"),
        (f"{BEGIN}\n{END}\n{END}\n", "Line 3 ends a region"),
    ],
)
def test_marks_that_do_not_pair_are_errors(text, words):
    with pytest.raises(UserError, match=words):
        blank(text)


@pytest.mark.parametrize("file", FILES)
def test_only_the_regions_of_starter_differ_from_the_reference(file):
    assert blank(read("starter", file)) == blank(read("solutions", file)), (
        f"starter/{file} was changed outside its marked regions"
    )


@pytest.mark.skipif(IMPL == "starter", reason="a student's starter is filled")
@pytest.mark.parametrize("file", FILES)
def test_the_committed_starter_is_the_blanked_reference(file):
    assert read("starter", file) == blank(read("solutions", file)), f"write starter/{file} anew from solutions/{file}"


def test_both_packages_have_the_same_files():
    assert sorted(path.name for path in (ROOT / "starter").glob("*.py")) == FILES
    assert set(EXERCISES) == {Path(file).stem for file in FILES} - {"__init__"}


def test_every_region_belongs_to_an_exercise_and_says_what_to_do():
    regions = [line for file in FILES for line in read("solutions", file).splitlines() if BEGIN in line]
    names = [name for group in EXERCISES.values() for name in group]
    assert len(regions) == len(names) == 12
    for line in regions:
        assert "(notebook" in line, f"{line.strip()} does not say which notebook teaches it"


def test_exercises_explain_themselves():
    reference = load_algo("solutions")
    for names in EXERCISES.values():
        for name in names:
            function = getattr(reference, name)
            doc = getattr(function, "func", function).__doc__
            assert "Taught in notebook" in doc, name
            for section in ("Args:", "Returns:" if name != "get_response_log_probs_in_blocks" else "Args:", "Raises:"):
                assert section in doc, (name, section)


def test_the_reference_is_never_yours():
    algo = load_algo("solutions")
    assert set(algo.whose.values()) == {"reference"}
    assert algo.summary() == "0 of 12 yours"


def test_the_exercises_of_one_algo_call_each_other(monkeypatch):
    algo = load_algo("solutions")
    calls = []

    def spy(*args):
        calls.append(args)
        return {}

    object.__setattr__(algo, "pad_and_mask", spy)

    class Tokenizer:
        pad_token_id = 7

        def encode(self, text, add_special_tokens=True):
            return [len(text)]

    algo.tokenize_prompt_and_output(["ab"], ["c"], Tokenizer())
    assert calls == [([[2]], [[1]], 7)]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of both packages that a test may change; they are imported from there instead of from the repository."""
    for package in ("starter", "solutions"):
        (tmp_path / package).mkdir()
        for file in FILES:
            text = blank(read("solutions", file)) if package == "starter" else read(package, file)
            (tmp_path / package / file).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [m for m in sys.modules if m.partition(".")[0] in ("starter", "solutions")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("A5_IMPL", raising=False)
    yield tmp_path
    for name in [m for m in sys.modules if m.partition(".")[0] in ("starter", "solutions")]:
        del sys.modules[name]  # monkeypatch puts those of the repository back
    importlib.invalidate_caches()


def write_exercise(course, file, name):
    """Fill one function of the copied starter with the reference's region, as a student would."""
    solution = read("solutions", f"{file}.py")
    start = solution.index(f"def {name}(")
    begin = solution.index(BEGIN, start)
    region = solution[begin : solution.index(END, begin)]
    path = course / "starter" / f"{file}.py"
    stub = path.read_text(encoding="utf-8")
    start = stub.index(f"def {name}(")
    begin = stub.index(BEGIN, start)
    path.write_text(stub[:begin] + region + stub[stub.index(END, begin) :], encoding="utf-8")


def test_starter_takes_every_function_from_the_student(course):
    algo = load_algo("starter")
    assert set(algo.whose.values()) == {"unwritten"}
    assert algo.summary() == "0 of 12 yours"
    with pytest.raises(NotImplementedError, match=r"pad on the right.*notebook 02"):
        algo.pad_and_mask([[1]], [[2]], 0)


def test_auto_mixes_yours_and_the_reference(course):
    assert load_algo().summary() == "0 of 12 yours"
    for name in list(sys.modules):
        if name.partition(".")[0] == "starter":
            del sys.modules[name]
    write_exercise(course, "masks", "pad_and_mask")
    write_exercise(course, "train_step", "accumulate_gradients")
    algo = load_algo("auto")
    assert algo.summary() == "2 of 12 yours"
    assert algo.whose["pad_and_mask"] == "yours"
    assert algo.whose["tokenize_prompt_and_output"] == "reference"
    assert algo.pad_and_mask.__module__ == "starter.masks"
    assert algo.accumulate_gradients.func.__module__ == "starter.train_step"
    assert algo.accumulate_gradients.keywords == {"algo": algo}
    assert algo.get_response_log_probs.func.__module__ == "solutions.scoring"


def test_the_environment_variable_chooses(course, monkeypatch):
    monkeypatch.setenv("A5_IMPL", "solutions")
    assert set(load_algo().whose.values()) == {"reference"}
    monkeypatch.setenv("A5_IMPL", "starter")
    assert set(load_algo().whose.values()) == {"unwritten"}
    monkeypatch.setenv("A5_IMPL", "solution")
    with pytest.raises(UserError, match="did you mean 'solutions'"):
        load_algo()


def test_written_or_not():
    def stub():
        raise NotImplementedError("write it")

    assert not is_written(stub)
    assert is_written(test_written_or_not)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", r"starter/losses\.py does not import \(SyntaxError in line 1"),
        ("import torch\n\nx = 1 / 0\n", r"starter/losses\.py does not import \(ZeroDivisionError in line 3: division"),
        (
            "import torhc\n",
            r"starter/losses\.py does not import \(ModuleNotFoundError in line 1: No module named",
        ),
        ("x = 1\n", r"starter/__init__\.py does not import \(ImportError in line"),
    ],
)
def test_a_file_that_does_not_import_gets_a_sentence(course, text, words):
    (course / "starter" / "losses.py").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words) as caught:
        load_algo("auto")
    assert "A5_IMPL=solutions" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert load_algo("solutions").summary() == "0 of 12 yours"


def test_a_function_that_was_removed_gets_a_sentence(course):
    (course / "starter" / "__init__.py").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"starter/masks\.py has no function pad_and_mask"):
        load_algo("starter")


def test_a_missing_folder_gets_a_sentence(monkeypatch):
    for package, impl in (("solutions", "solutions"), ("starter", "auto")):
        with monkeypatch.context() as patch:
            real = importlib.import_module

            def missing(name, package=package, real=real):
                if name == package:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                return real(name)

            patch.setattr(importlib, "import_module", missing)
            with pytest.raises(UserError, match=f"The folder {package}/ is missing"):
                load_algo(impl)


def test_unwritten_exercises_are_skipped_and_not_failed():
    """The tests themselves under A5_IMPL=starter, on a blank starter."""
    if any(name == "yours" for name in load_algo("starter").whose.values()):
        pytest.skip("the starter is being filled")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/test_rewards.py"],
        cwd=ROOT,
        env={**os.environ, "A5_IMPL": "starter", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert "not written yet: grade each response" in result.stdout
    assert "5 skipped" in result.stdout
    assert "2 passed" in result.stdout
