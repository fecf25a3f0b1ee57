"""Stubs, and whose code runs: the committed starter is the blanked solution, and a student's functions are found."""

import os
import py_compile
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from a5lib.config import TrainConfig
from a5lib.course import EXERCISES, algo, blank, is_written, load_algo
from a5lib.course.exercises import NAMES, require_for_training, stub_called
from a5lib.course.stubs import BEGIN, END, function_text, region_text
from a5lib.errors import UserError
from tests.conftest import IMPL
from tests.fakes import WordTokenizer
from tests.helpers import FILES, ROOT, read_exercise, write_exercise


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


@pytest.mark.reference
@pytest.mark.parametrize("file", FILES)
def test_only_the_regions_of_starter_differ_from_the_reference(file):
    assert blank(read_exercise("starter", file)) == blank(read_exercise("solutions", file)), (
        f"starter/{file} was changed outside its marked regions"
    )


@pytest.mark.reference
@pytest.mark.skipif(IMPL == "starter", reason="a student's starter is filled")
@pytest.mark.parametrize("file", FILES)
def test_the_committed_starter_is_the_blanked_reference(file):
    assert read_exercise("starter", file) == blank(read_exercise("solutions", file)), (
        f"write starter/{file} anew from solutions/{file}"
    )


@pytest.mark.parametrize("package", ["starter", pytest.param("solutions", marks=pytest.mark.reference)])
def test_the_files_are_those_of_the_exercises(package):
    files = sorted(path.name for path in (ROOT / package).glob("*.py"))
    assert files == sorted(["__init__.py", *(f"{exercise}.py" for exercise in EXERCISES)])


def test_every_function_has_one_region_that_says_what_to_do_and_where_it_is_taught():
    assert len(NAMES) == len(set(NAMES)) == 19
    for exercise, names in EXERCISES.items():
        text = read_exercise("starter", f"{exercise}.py")
        assert text.count(BEGIN) == text.count(END) == len(names), exercise
        for name in names:
            function = function_text(text, name)
            assert re.search(rf"{BEGIN}: .+ \(notebook \d\d\)$", function, re.MULTILINE), name


def test_the_text_and_the_region_of_a_function():
    text = f"def f():\n    {BEGIN}: x\n    return 1\n    {END}\n\n\ndef g():\n    return 2\n"
    assert function_text(text, "f") == f"def f():\n    {BEGIN}: x\n    return 1\n    {END}"
    assert region_text(text, "f") == "    return 1"
    with pytest.raises(UserError, match="has no function h"):
        function_text(text, "h")
    with pytest.raises(UserError, match="Line 1 of the file, outside the marked regions, is not Python"):
        function_text("def f(:\n", "f")


def test_exercises_explain_themselves():
    functions = load_algo(IMPL)
    for exercise, names in EXERCISES.items():
        for name in names:
            doc = getattr(getattr(functions, name), "func", getattr(functions, name)).__doc__ or ""
            assert re.search(r"[Tt]aught in notebook \d\d", " ".join(doc.split())), name
            assert "Args:" in doc, name
            stub = function_text(read_exercise("starter", f"{exercise}.py"), name)
            assert "Returns:" in doc or ") -> None:" in stub or name == "get_response_log_probs_in_blocks", name
            assert "Raises:" in doc or "raise ValueError" not in stub, name


def test_the_reference_is_never_yours():
    functions = load_algo("solutions")
    assert set(functions.whose.values()) == {"reference"}
    assert functions.summary() == "0 of 19 yours"


def test_the_exercises_of_one_algo_call_each_other(monkeypatch):
    functions = load_algo(IMPL)
    calls = []

    def spy(*args):
        calls.append(args)
        return {}

    object.__setattr__(functions, "pad_and_mask", spy)

    class Tokenizer:
        pad_token_id = 7

        def encode(self, text, add_special_tokens=True):
            return [len(text)]

    functions.tokenize_prompt_and_output(["ab"], ["c"], Tokenizer())
    assert calls == [([[2]], [[1]], 7)]


def test_starter_takes_every_function_from_the_student(course):
    functions = load_algo("starter")
    assert set(functions.whose.values()) == {"unwritten"}
    assert functions.summary() == "0 of 19 yours"
    with pytest.raises(NotImplementedError, match=r"pad on the right.*notebook 02"):
        functions.pad_and_mask([[1]], [[2]], 0)


def test_auto_mixes_yours_and_the_reference(course):
    assert load_algo().summary() == "0 of 19 yours"
    write_exercise(course, "masks", "pad_and_mask")
    write_exercise(course, "train_step", "accumulate_gradients")
    functions = load_algo("auto")
    assert functions.summary() == "2 of 19 yours"
    assert functions.whose["pad_and_mask"] == "yours"
    assert functions.whose["tokenize_prompt_and_output"] == "reference"
    assert functions.pad_and_mask.__module__ == "starter.masks"
    assert functions.accumulate_gradients.func.__module__ == "starter.train_step"
    assert functions.accumulate_gradients.keywords == {"algo": functions}
    assert functions.get_response_log_probs.func.__module__ == "solutions.scoring"


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


BROKEN = {
    "def broken(:\n": r"starter/losses\.py does not import \(SyntaxError in line 1",
    "import torch\n\nx = 1 / 0\n": r"starter/losses\.py does not import \(ZeroDivisionError in line 3: division",
    "import torhc\n": r"starter/losses\.py does not import \(ModuleNotFoundError in line 1: No module named",
    "exit()\n": r"starter/losses\.py does not import \(SystemExit in line 1",
    "raise ValueError\n": r"starter/losses\.py does not import \(ValueError in line 1: no message\)",
    "def f():\n  x = 1\n   y = 2\n": r"starter/losses\.py does not import \(IndentationError in line 3",
    "x = 1\n": r"starter/losses\.py has no function aggregate_loss_across_microbatch; .*`a5 course reset losses`",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_does_not_import_gets_a_sentence(course, text, capsys):
    (course / "starter" / "losses.py").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=BROKEN[text]) as caught:
        load_algo("auto")
    assert "\n" not in str(caught.value)
    assert load_algo("solutions").summary() == "0 of 19 yours"
    (course / "starter" / "masks.py").write_text(read_exercise("solutions", "masks.py"), encoding="utf-8")
    (course / "starter" / "losses.py").write_text(blank(read_exercise("solutions", "losses.py")), encoding="utf-8")
    assert load_algo("auto").whose["pad_and_mask"] == "yours", "what was saved while another file was broken is seen"


@pytest.mark.parametrize("text", ["", "pad_and_mask = 3\n"])
def test_a_function_that_was_removed_gets_a_sentence(course, text):
    (course / "starter" / "__init__.py").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"starter/masks\.py has no function pad_and_mask"):
        load_algo("starter")


def test_a_missing_file_gets_a_sentence(course, monkeypatch):
    (course / "starter" / "masks.py").unlink()
    others = [finder for finder in sys.meta_path if "editable" not in repr(finder)]  # it would find the repository's
    monkeypatch.setattr(sys, "meta_path", others)
    with pytest.raises(UserError, match=r"^starter/masks\.py is missing; `a5 course reset masks` writes a fresh stub"):
        load_algo("auto")


def test_a_file_that_is_none_of_ours_is_left_alone(course):
    (course / "starter" / ".#masks.py").symlink_to("student@host.1:2")  # how Emacs marks a file that is being edited
    assert load_algo("auto").summary() == "0 of 19 yours"


def test_a_file_that_cannot_be_read_gets_a_sentence(course):
    (course / "starter" / "notes.py").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"starter/notes\.py cannot be read \(No such file or directory\)"):
        load_algo("auto")


def test_a_missing_folder_gets_a_sentence(course):
    (course / "solutions" / "__init__.py").unlink()  # as git leaves it: a folder with nothing but __pycache__
    with pytest.raises(UserError, match=r"solutions/ is not in this version of the course; A5_IMPL=starter"):
        load_algo("solutions")
    assert set(load_algo("auto").whose.values()) == {"unwritten"}, "without the reference auto is the same as starter"
    (course / "starter" / "__init__.py").unlink()
    with pytest.raises(UserError, match=r"The folder starter/ is missing; restore it with `git checkout -- starter`"):
        load_algo("auto")


def test_a_save_is_seen_even_in_the_same_instant_with_the_same_size(course):
    path = course / "starter" / "masks.py"
    for value in (1, 2, 3):
        write_exercise(course, "masks", "pad_and_mask", f"    return {value}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert load_algo("auto").pad_and_mask([[1]], [[2]], 0) == value


def test_a_compiled_file_of_an_older_save_is_not_taken(course):
    path = course / "starter" / "masks.py"
    for value in (1, 2):
        write_exercise(course, "masks", "pad_and_mask", f"    return {value}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        if value == 1:
            py_compile.compile(str(path))  # by another process, such as a notebook's kernel
    assert load_algo("auto").pad_and_mask([[1]], [[2]], 0) == 2


def test_unusual_callables_count_as_written(course):
    with (course / "starter" / "masks.py").open("a", encoding="utf-8") as file:
        file.write("import functools\npad_and_mask = functools.partial(dict, labels=1)\n")
    with (course / "starter" / "losses.py").open("a", encoding="utf-8") as file:
        file.write(
            "import torch\naggregate_loss_across_microbatch = torch.no_grad()(aggregate_loss_across_microbatch)\n"
        )
    functions = load_algo("auto")
    assert functions.whose["pad_and_mask"] == "yours"
    assert functions.pad_and_mask() == {"labels": 1}
    assert functions.whose["aggregate_loss_across_microbatch"] == "reference", "a stub in a wrapper is still a stub"


# --- in a notebook: algo.NAME


def test_live_functions_follow_the_file(course, monkeypatch):
    assert algo.pad_and_mask.__module__ == "solutions.masks"
    before = algo.now()
    write_exercise(course, "masks", "pad_and_mask")
    assert algo.pad_and_mask.__module__ == "starter.masks"
    assert before.pad_and_mask.__module__ == "solutions.masks", "a run keeps the functions that it began with"
    monkeypatch.setenv("A5_IMPL", "starter")
    assert algo.compute_rollout_rewards.__module__ == "solutions.rewards", "cells below an unwritten one still run"
    monkeypatch.setenv("A5_IMPL", "solutions")
    assert algo.pad_and_mask.__module__ == "solutions.masks"
    monkeypatch.setenv("A5_IMPL", "mine")
    with pytest.raises(UserError, match="A5_IMPL is 'mine'"):
        _ = algo.pad_and_mask


def test_live_functions_say_calmly_what_is_missing_where_there_is_no_reference(course):
    (course / "solutions" / "__init__.py").unlink()
    words = (
        r"pad_and_mask is not written yet; write it in starter/masks\.py \(notebook 02 teaches it\), then run this "
        r"cell again; there is no solutions/ here"
    )
    with pytest.raises(UserError, match=words) as caught:
        algo.pad_and_mask([[1]], [[2]], 0)
    assert caught.value._render_traceback_() == [str(caught.value)]
    write_exercise(course, "masks", "tokenize_prompt_and_output")
    with pytest.raises(UserError, match=words):  # also when one of your functions calls it
        algo.tokenize_prompt_and_output(["a"], ["b"], WordTokenizer())


def test_two_threads_that_load_at_once_get_whole_files(course):
    slow = course / "starter" / "masks.py"
    slow.write_text("import time\ntime.sleep(0.3)\n" + slow.read_text(encoding="utf-8"), encoding="utf-8")
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(load_algo, ["starter", "starter"]))
    assert [functions.whose["pad_and_mask"] for functions in loaded] == ["unwritten"] * 2


# --- before a run


def test_a_run_needs_some_functions_and_names_the_first_that_is_not_written(course):
    with pytest.raises(UserError, match=r"^pad_and_mask is not .* or set A5_IMPL=auto to run the reference"):
        require_for_training(load_algo("starter"), TrainConfig())
    require_for_training(load_algo("auto"), TrainConfig())
    for file in ("masks", "rewards", "advantages", "losses", "train_step"):
        (course / "starter" / f"{file}.py").write_text(read_exercise("solutions", f"{file}.py"), encoding="utf-8")
    for name in ("log_probs_from_logits", "get_response_log_probs"):
        write_exercise(course, "scoring", name)
    (course / "solutions" / "__init__.py").unlink()
    require_for_training(load_algo(), TrainConfig())
    require_for_training(load_algo(), TrainConfig(engine="layer_major", low_memory=True))  # scores by itself
    with pytest.raises(UserError, match=r"^log_probs_in_blocks is not written yet; .* then run this again\.$"):
        require_for_training(load_algo(), TrainConfig(low_memory=True))


def test_a_correction_of_the_mismatch_needs_gradients_that_take_the_weights(course):
    for file in ("losses", "train_step"):
        (course / "starter" / f"{file}.py").write_text(read_exercise("solutions", f"{file}.py"), encoding="utf-8")
    require_for_training(load_algo(), TrainConfig(mismatch_correction="tis"))
    path = course / "starter" / "train_step.py"
    text = path.read_text(encoding="utf-8")
    assert '"loss_weights" in part' in text
    path.write_text(text.replace('"loss_weights" in part', '"no_weights" in part'), encoding="utf-8")
    with pytest.raises(UserError, match=r'^--mismatch-correction tis needs .* entry of batch\["loss_weights"\] \(`a5'):
        require_for_training(load_algo(), TrainConfig(mismatch_correction="tis"))
    require_for_training(load_algo(), TrainConfig())
    require_for_training(load_algo(), TrainConfig(mismatch_correction="tis", engine="layer_major"))


def test_a_stub_is_told_from_a_fault_of_pytorch(course):
    stub = load_algo("starter").pad_and_mask
    with pytest.raises(NotImplementedError) as caught:
        stub([[1]], [[2]], 0)
    assert stub_called(caught.value) == "pad_and_mask"
    assert stub_called(ValueError()) is None
    try:
        raise NotImplementedError("'log_softmax' not implemented for 'Long'")
    except NotImplementedError as error:
        assert stub_called(error) is None
