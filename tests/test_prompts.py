"""The prompt templates: one question each, the right stop string and grader, and errors that say what to do."""

import re

import pytest

from a5lib import grading
from a5lib.errors import UserError
from a5lib.prompts import NAMED_PROMPTS, grader_name, load_prompt


@pytest.mark.parametrize("name", NAMED_PROMPTS)
def test_every_named_prompt_holds_the_question_once(name):
    prompt = load_prompt(name)
    assert prompt.render("Why {x}?").count("Why {x}?") == 1
    assert "{question}" not in prompt.render("Why?")
    assert prompt.grader in grading.REWARD_FUNCTIONS


@pytest.mark.parametrize("name", ["r1_zero", "r1_zero_three_shot"])
def test_r1_zero_prompts_end_inside_the_think_block(name):
    prompt = load_prompt(name)
    assert prompt.render("How many?").endswith("\nUser: How many?\nAssistant: <think>"), (
        "a final newline is a token too"
    )
    assert prompt.stop == ("</answer>",)


def test_r1_zero_preamble_is_short_and_shows_the_strict_form():
    preamble = load_prompt("r1_zero").text.partition("\nUser:")[0]
    assert len(preamble.split()) <= 45, "each word of the preamble costs time in every toy rollout"
    assert "</think> <answer>" in preamble


def test_three_shot_examples_are_graded_right():
    turns = load_prompt("r1_zero_three_shot").text.split("\nUser: ")[1:-1]
    gold = ["57", "30", "1950"]  # 6*12-15; 2*9+4*(9/3); 2400-600+150
    assert len(turns) == 3
    for turn, answer in zip(turns, gold, strict=True):
        response = turn.partition("Assistant: <think>")[2]
        assert grading.r1_zero_reward_fn(response, answer)["reward"] == 1, f"the example itself is wrong: {turn}"
        assert not re.search(r"<<|####", turn)


def test_question_only_has_no_stop_string():
    prompt = load_prompt("question_only")
    assert prompt.stop == (), "a boxed answer does not end with </answer>"
    assert "\\boxed{}" in prompt.text


def test_a_question_with_braces_or_the_marker_is_not_filled_twice():
    prompt = load_prompt("r1_zero")
    assert "What is {question} or {0}?" in prompt.render("What is {question} or {0}?")


def test_prompt_file_keeps_its_text_and_needs_a_grader(tmp_path):
    path = tmp_path / "my prompt.txt"
    path.write_text("Q: {question}\nA {json}: <answer>4</answer>\n", encoding="utf-8")
    prompt = load_prompt(path)
    assert prompt.render("1?") == "Q: 1?\nA {json}: <answer>4</answer>"
    assert prompt.stop == ("</answer>",)
    assert load_prompt(str(path)) == prompt
    assert grader_name(prompt, "question_only") == "question_only"
    with pytest.raises(UserError, match="--grader r1_zero"):
        grader_name(prompt, "auto")


def test_prompt_file_without_an_answer_tag_has_no_stop(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("{question}", encoding="utf-8")
    assert load_prompt(path).stop == ()


@pytest.mark.parametrize(("text", "count"), [("Answer this.", "0 times"), ("{question} {question}", "2 times")])
def test_prompt_file_must_hold_the_question_exactly_once(tmp_path, text, count):
    path = tmp_path / "p.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=count):
        load_prompt(path)


def test_unknown_prompt_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'r1_zero_three_shot'"):
        load_prompt("r1_zero_3shot")


def test_prompt_that_is_not_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xff\xfe{question}")
    with pytest.raises(UserError, match="UTF-8"):
        load_prompt(path)
    with pytest.raises(UserError, match="no prompt"):
        load_prompt(tmp_path)


def test_named_prompt_chooses_its_grader_unless_told():
    assert grader_name(load_prompt("question_only"), "auto") == "question_only"
    assert grader_name(load_prompt("r1_zero"), "r1_zero_lenient") == "r1_zero_lenient"
