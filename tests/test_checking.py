"""What `check`, `show` and `hint` say: the likely mistake in words, whatever the student's file holds; no traceback."""

from __future__ import annotations

import math
import re

import pytest
import torch

from a5lib.course import check, hint, show
from a5lib.course.checking import (
    Check,
    Mistake,
    Result,
    describe,
    expect,
    expect_error,
    expect_keys,
    expect_pair,
    show_value,
)
from a5lib.course.exercises import EXERCISES
from a5lib.course.notebook import check_in_words, report
from a5lib.course.stubs import BEGIN, END
from a5lib.errors import UserError
from tests.helpers import read_exercise, write_exercise


def mistake(*arguments, **options) -> Mistake:
    with pytest.raises(Mistake) as caught:
        expect("labels", *arguments, **{"given": "the input", "likely": "the likely one"} | options)
    return caught.value


# --- comparing


@pytest.mark.parametrize(
    ("got", "right"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2])),
        (torch.tensor([0.1 + 1e-7]), torch.tensor([0.1], dtype=torch.float64)),
        (torch.tensor([1.0], requires_grad=True), torch.tensor([1.0])),
        (torch.tensor(math.nan), torch.tensor(math.nan)),
        (torch.tensor(0.5), 0.5),
        (1, 1.0),
        (math.nan, math.nan),
        ({"a": (1, [True])}, {"a": [1, (True,)]}),
        (None, None),
        ("text", "text"),
    ],
)
def test_equal_values_pass(got, right):
    expect("value", got, right, given="", likely="")


@pytest.mark.parametrize(
    ("got", "right", "likely"),
    [
        (None, torch.tensor([1]), "The function gives None: is there a `return`?"),
        ([1], torch.tensor([1]), "labels must be a tensor, not list."),
        (torch.tensor([[1]]), torch.tensor([1]), r"labels has the shape (1, 1) and not (1,)."),
        (torch.tensor([1.0]), torch.tensor([1]), "labels has the type torch.float32 and not torch.int64."),
        (torch.tensor([1]), torch.tensor([True]), "labels has the type torch.int64 and not torch.bool."),
        (torch.tensor([2]), torch.tensor([1]), "the likely one"),
        (torch.tensor([1.001]), torch.tensor([1.0]), "the likely one"),
        (True, 1.0, "the likely one"),
        (torch.tensor(1j), 1.0, "the likely one"),
        (1, True, "the likely one"),
        ([1, 2], [1], "the likely one"),
        ({"a": 1}, {"b": 1}, "the likely one"),
    ],
)
def test_other_values_name_the_kind_or_the_likely_mistake(got, right, likely):
    assert mistake(got, right).likely == likely


def test_a_known_mistake_is_named_before_the_likely_one():
    known = {"You divided by n.": torch.tensor([2.0]), "You forgot the root.": torch.tensor([3.0])}
    assert mistake(torch.tensor([3.0]), torch.tensor([1.0]), mistakes=known).likely == "You forgot the root."


def test_a_mistake_in_four_lines():
    words = describe(mistake(torch.tensor([1 / 3]), torch.tensor([0.0])))
    assert words == (
        "Given:    the input\nExpected: labels = [0.0]\nGot:      labels = [0.3333]\nLikely:   the likely one"
    )
    long = describe(mistake(torch.zeros(1000), torch.zeros(1)))
    assert len(long) < 600 and "characters)" in long, "a big value would hide the words"
    assert describe(mistake("a\nb", "c")).count("\n") == 3


def test_small_numbers_are_not_shown_as_zero():
    assert show_value([1e-7, 0.0, -2.5, math.inf]) == "[1e-07, 0.0, -2.5, inf]"


def test_errors_that_must_be_raised():
    def refuse(error):
        raise error

    options = {"given": "bad input", "likely": "Refuse it."}
    expect_error(lambda: refuse(ValueError("row 3")), ValueError, words="row 3", **options)
    with pytest.raises(Mistake, match="Refuse it") as caught:
        expect_error(lambda: 7, ValueError, **options)
    assert (caught.value.expected, caught.value.got) == ("a ValueError", "7")
    with pytest.raises(Mistake):
        expect_error(lambda: refuse(ValueError("no")), ValueError, words="row 3", **options)
    with pytest.raises(KeyError):
        expect_error(lambda: refuse(KeyError("x")), ValueError, **options)


def test_dicts_and_pairs():
    expect_keys("the result", {"a": 1, "b": 2}, ("a",))
    for got in (None, [1], {"b": 1}):
        with pytest.raises(Mistake):
            expect_keys("the result", got, ("a",))
    assert expect_pair("the result", (1, {})) == (1, {})
    for got in (None, 1, (1,), [1, {}], torch.zeros(2)):
        with pytest.raises(Mistake):
            expect_pair("the result", got)


# --- a student's file


def checked(name: str, capsys) -> str:
    check(name)
    out = capsys.readouterr()
    assert "Traceback" not in out.out and not out.err
    return out.out


def test_missing_keys_and_other_kinds_are_named():
    for got, likely in (({"b": 2}, "The dict lacks 'a' and 'c'."), ([1], "the result must be a dict, not list.")):
        with pytest.raises(Mistake) as caught:
            expect_keys("the result", got, ("a", "b", "c"))
        assert caught.value.likely == likely


def test_a_report_says_a_thing_once_and_where_to_begin():
    first, second = ("pad_and_mask", "tokenize_prompt_and_output")
    whose = {first: "yours", second: "yours"}
    results = [
        Result(Check(first, "The padding is on the right.", print), "failed", "Likely:   One."),
        Result(Check(first, "The labels are shifted.", print), "failed", "Likely:   One."),
        Result(Check(second, "It returns a batch.", print), "failed", "Likely:   One."),
    ]
    said = report("masks", results, whose)
    assert said.count("Likely:   One.") == 2, "once for each function"
    assert said.count("The same as above.") == 1
    assert "Mend the first function first" in said
    assert "Mend the first function first" not in report("masks", results[:2], whose)


def test_stubs_say_what_to_write(course, capsys):
    words = checked("masks", capsys)
    assert "○ pad_and_mask is not written yet. In starter/masks.py: pad on the right" in words
    assert "○ tokenize_prompt_and_output is not written yet." in words
    assert "Until then a notebook uses the reference." in words and 'hint("masks", 1)' in words
    assert "tokenize" not in checked("pad_and_mask", capsys), "one function may be checked by itself"


def test_the_reference_passes(course, capsys, monkeypatch):
    (course / "starter" / "masks.py").write_text(read_exercise("solutions", "masks.py"), encoding="utf-8")
    assert re.fullmatch(r"masks: all \d+ checks pass \(your code\)\.\n", checked("masks", capsys))
    monkeypatch.setenv("A5_IMPL", "solutions")
    assert re.fullmatch(r"losses: all \d+ checks pass \(the reference\)\.\n", checked("losses", capsys))


REGIONS = (
    "return None",
    "return 3",
    "return []",
    "return {}",
    "return 'x'",
    "return (1, 2)",
    "return (None, {})",
    "return object()",
    "raise KeyError('x')",
    "raise SystemExit",
    "import torch; return torch.zeros(1)",
    "import torch; return {key: torch.zeros(1) for key in ('input_ids', 'labels')}",
)


@pytest.mark.parametrize("region", REGIONS)
def test_wrong_kinds_and_faults_are_worded_by_every_check(course, capsys, region):
    for exercise, names in EXERCISES.items():
        for name in names:
            write_exercise(course, exercise, name, f"    {region}\n")
        words = checked(exercise, capsys)
        assert f"{exercise}: 0 of" in words or "checks pass (your code)" in words
        assert "✗" in words, f"{exercise} passes with `{region}`"


def test_an_exception_is_told_with_its_line(course, capsys):
    write_exercise(course, "masks", "pad_and_mask", "    x = 1\n    return x / 0\n")
    number = read_exercise("starter", "masks.py").split("\n").index(f"    {END}") + 1
    words = checked("pad_and_mask", capsys)
    assert f"pad_and_mask raised ZeroDivisionError in line {number} of starter/masks.py: `return x / 0`" in words
    assert "Words:    division by zero" in words


def test_a_fault_of_pytorch_is_not_taken_for_a_stub(course, capsys):
    region = "    import torch\n    return torch.log_softmax(torch.tensor([1, 2]), 0)\n"
    write_exercise(course, "masks", "pad_and_mask", region)
    words = checked("pad_and_mask", capsys)
    assert "not written" not in words
    assert "torch.log_softmax" in words


def test_a_function_that_waits_for_another(course, capsys):
    write_exercise(course, "masks", "tokenize_prompt_and_output")
    words = checked("masks", capsys)
    assert (
        "○ tokenize_prompt_and_output cannot be checked yet. It calls pad_and_mask, which is not written yet." in words
    )


def test_a_changed_first_line_is_found(course, capsys):
    write_exercise(course, "masks", "pad_and_mask")
    path = course / "starter" / "masks.py"
    path.write_text(path.read_text().replace("def pad_and_mask(prompt_ids: list[list[int]], ", "def pad_and_mask("))
    words = checked("pad_and_mask", capsys)
    assert "pad_and_mask cannot be called as the course calls it" in words
    assert "`a5 course diff masks`" in words


def test_a_file_that_does_not_import_is_a_sentence(course, capsys):
    (course / "starter" / "losses.py").write_text("def f(:\n", encoding="utf-8")
    assert checked("masks", capsys).startswith("starter/losses.py does not import (SyntaxError in line 1")
    assert check_in_words(*EXERCISES)[0] is False


def test_checks_without_the_reference(course, capsys):
    (course / "solutions" / "__init__.py").unlink()
    assert "the reference" not in checked("masks", capsys)
    (course / "starter" / "masks.py").write_text(read_exercise("solutions", "masks.py"), encoding="utf-8")
    assert "all" in checked("masks", capsys)


def test_a_name_that_is_none(course):
    for ask in (check, show, hint):
        with pytest.raises(UserError, match=r"no exercise 'mask'; did you mean 'masks'"):
            ask("mask")


# --- showing


def test_show_gives_the_stub_even_when_it_is_written(course, capsys):
    write_exercise(course, "masks", "pad_and_mask", "    return my_own_answer\n")
    show("masks")
    out = capsys.readouterr().out
    assert "[starter/masks.py](../starter/masks.py)" in out
    assert out.count("raise NotImplementedError") == 2 and "my_own_answer" not in out
    show("pad_and_mask", "compute_group_normalized_rewards")
    out = capsys.readouterr().out
    assert out.count("raise NotImplementedError") == 2 and "def tokenize_prompt_and_output" not in out


def test_show_says_what_is_wrong_with_the_file(course):
    path = course / "starter" / "masks.py"
    stub = path.read_text()
    path.write_text(stub.replace(f"    {END}", ""))
    with pytest.raises(UserError, match="region"):
        show("masks")
    path.write_text("def f(:\n" + stub)
    with pytest.raises(UserError, match="Line 1 of the file, outside the marked regions, is not Python"):
        show("masks")
    path.unlink()
    with pytest.raises(UserError, match="`a5 course reset masks` writes a fresh stub"):
        show("masks")


def test_hints(course, capsys):
    for exercise in EXERCISES:
        for level in (1, 2, 3):
            hint(exercise, level)
            out = capsys.readouterr().out
            assert all(f"**{name}**" in out for name in EXERCISES[exercise])
    hint("pad_and_mask", 3)
    out = capsys.readouterr().out
    assert "```python" in out and BEGIN not in out and "longest" in out
    with pytest.raises(UserError, match="There is no hint 4"):
        hint("masks", 4)
    (course / "solutions" / "__init__.py").unlink()
    hint("pad_and_mask", 3)
    assert "ask your teacher" in capsys.readouterr().out
