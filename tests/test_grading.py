"""Grading: right values worked out by hand for faults that graders have had in public, named after each fault."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import pytest

from a5lib.grading import (
    MAX_ANSWER_LENGTH,
    REWARD_FUNCTIONS,
    answers_equal,
    gsm8k_marker_answer,
    last_boxed,
    last_number,
    near_miss_format,
    outcome,
    question_only_reward_fn,
    r1_zero_lenient_reward_fn,
    r1_zero_reward_fn,
)

POWER_TOWER = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
CODE = ["__import__('os').system('touch PWNED')", "[x for x in (1).__class__.__base__.__subclasses__()]"]
LONG = ["9" * 100_000, "1," * 50_000, "(" * 3000 + "1" + ")" * 3000, r"\frac{" * 2000, r"\boxed{" * 5000]


def in_form(answer):
    return f"t </think> <answer>{answer}</answer>"


def rewards(answer, gold):
    """The answer reward of a well-formed response; the format must be 1 whatever the answer."""
    graded = r1_zero_reward_fn(in_form(answer), gold)
    assert graded["format_reward"] == 1.0, "a bad answer does not make the format bad"
    assert graded["reward"] == graded["answer_reward"], "only the answer is paid"
    return graded["answer_reward"]


# case, answer, gold, answer reward
CASES = [
    ("G01_thousands_comma", "1,080", "1080", 1),
    ("G01_comma_in_gold", "1080", "1,080", 1),
    ("G01_latex_comma", "1{,}080", "1080", 1),
    ("G01_latex_thin_space", r"1\,080", "1080", 1),
    ("G01_negative_space", r"1,\!080", "1080", 1),
    ("G01_million", "1,234,567.5", "1234567.5", 1),
    ("G01_not_thousands", "12,34", "1234", 0),
    ("G01_group_too_long", "1,0800", "10800", 0),
    ("G01_starts_with_zero", "0,123", "123", 0),
    ("G04_negative", "-3", "-3", 1),
    ("G04_space_after_sign", "- 3", "-3", 1),
    ("G04_minus_sign", "\u22123", "-3", 1),
    ("G04_sign_lost", "3", "-3", 0),
    ("G04_plus", "+7", "7", 1),
    ("G04_negative_money", "-$3", "-3", 1),
    ("G04_money_negative", "$-3", "-3", 1),
    ("G06_dollar", "$18", "18", 1),
    ("G06_escaped_dollar", r"\$18", "18", 1),
    ("G06_cents", "$18.00", "18", 1),
    ("G06_decimal", "18.0", "18", 1),
    ("G06_unit", "18 dollars", "18", 1),
    ("G06_trailing_dot", "18.", "18", 1),
    ("G06_unit_and_dot", "18 dollars.", "18", 1),
    ("G06_thousands_and_cents", "$1,234.00", "1234", 1),
    ("G06_apples", "42 apples", "42", 1),
    ("G06_unit_in_gold", "18", "18 square feet", 1),
    ("G06_rate", "$60/hour", "60", 1),
    ("G06_speed", "60 km/h", "60", 1),
    ("G06_square_unit", "3 m^2", "3", 1),
    ("G06_cubic_unit", "3 cm^{3}", "3", 1),
    ("G06_power_of_a_variable", "3 x^2", "3", 0),
    ("G06_latex_unit", r"3\text{ cm}", "3", 1),
    ("G06_degrees", r"90^\circ", "90", 1),
    ("G06_scale", "1.5 million dollars", "1500000", 1),
    ("G06_scale_is_no_unit", "2 hundred", "2", 0),
    ("G06_variable_is_no_unit", "18x", "18", 0),
    ("G06_constant_is_no_unit", r"2\pi", "2", 0),
    ("G06_word_for_more", "18 and a half", "18", 0),
    ("G06_two_numbers", "18 or 19", "18", 0),
    ("G06_hyphen_left_over", "18-", "18", 0),
    ("G06_sentence", "18 of which we eat up to five", "18", 0),
    ("G07_percent", "20%", "20", 1),
    ("G07_escaped_percent", r"20\%", "20", 1),
    ("G07_percent_word", "20 percent", "20", 1),
    ("G07_share", "0.2", "20", 0),
    ("G07_policy_percent_is_stripped", "18%", "0.18", 0),
    ("G07_policy_percent_in_gold", "18", "18%", 1),
    ("G09_latex_fraction", r"\frac{2}{3}", "2/3", 1),
    ("G09_dfrac", r"\dfrac{2}{3}", "2 / 3", 1),
    ("G09_short_fraction", r"\frac23", "2/3", 1),
    ("G09_negative_fraction", r"-\frac{2}{3}", r"\frac{-2}{3}", 1),
    ("G09_fraction_cut", "2/3", "2", 0),
    ("G09_fraction_decimal", "1/2", "0.5", 1),
    ("G09_leading_zero", "016", "16", 1),
    ("G09_leading_dot", ".5", "0.5", 1),
    ("G09_times_ten", r"2.5 \times 10^3", "2500", 1),
    ("G09_times_ten_braces", r"2.5 \cdot 10^{-1}", "0.25", 1),
    ("G09_e", "2.5e3", "2500", 1),
    ("G09_exponent_bounded", "1e99999999", "1", 0),
    ("G09_mixed", "1 1/2", "1.5", 1),
    ("G09_mixed_latex", r"-1\frac{1}{2}", "-1.5", 1),
    ("G09_not_mixed", "3 5/2", "5.5", 0),
    ("G09_division_by_zero", "1/0", "1", 0),
    ("G09_no_tolerance", "0.333", "1/3", 0),
    ("G09_no_rounding", "0.30000000000000004", "0.3", 0),
    ("G10_text", r"\text{13}", "13", 1),
    ("G10_bold", "**13**", "13", 1),
    ("G10_bold_latex", r"\mathbf{13}", "13", 1),
    ("G10_math", "$13$", "13", 1),
    ("G10_math_parentheses", r"\(13\)", "13", 1),
    ("G10_sized_parentheses", r"\left(13\right)", "13", 1),
    ("G10_braces", r"\boxed{{13}}", "13", 1),
    ("G10_pair_is_no_number", "(1, 3)", "13", 0),
    ("G10_code", "`13`", "13", 1),
    ("G10_lines", "\n13\n", "13", 1),
    ("G10_markup_never_joins", "1$3", "13", 0),
    ("G12_boxed", r"\boxed{42}", "42", 1),
    ("G12_boxed_last", r"\boxed{1} or \boxed{2}", "2", 1),
    ("G12_boxed_first_is_not_it", r"\boxed{1} or \boxed{2}", "1", 0),
    ("G12_unbalanced", r"\boxed{42", "42", 0),
    ("G20_int_gold", "3", 3, 1),
    ("G20_float_gold", "18", 18.0, 1),
    ("G20_float_text", "18.0", "18", 1),
    ("G20_list_gold", "41", ["40", "41"], 1),
    ("G20_list_gold_wrong", "42", ["40", 41], 0),
    ("G20_empty_list", "42", [], 0),
    ("G20_float_means_its_decimal", "0.1", 0.1, 1),
    ("G20_fraction_gold", "0.5", Fraction(1, 2), 1),
    ("G20_decimal_gold", "0.50", Decimal("0.5"), 1),
    ("G20_huge_int_gold", "1", 10**5000, 0),
    ("G20_infinite_gold", "1", float("inf"), 0),
    ("text_equal", "The  Red\nhouse.", "the red house", 1),
    ("text_latex", r"\dfrac{x}{2}", r"\frac{x}{2}", 1),
    ("text_not_evaluated", "2 + 3", "5", 0),
    ("text_no_power", "5^2", "25", 0),
    ("text_against_number", "five", "5", 0),
    ("empty", "", "", 0),
    ("empty_after_markup", "$.$", "", 0),
    ("other_script", "\u0661\u0662", "12", 0),
]


@pytest.mark.parametrize(("answer", "gold", "right"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_answer(answer, gold, right):
    assert rewards(answer, gold) == right


def test_G03_last_number_is_never_joined():
    assert last_number("answer is 3 5") == "5", "did an unescaped dot join the two?"
    assert last_number("3a5") == "5"
    assert last_number("It is 3.") == "3"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("no number", None),
        ("", None),
        ("48 - 2 makes 5-3", "3"),
        ("he owes -$1,080.50!", "-1,080.50"),
        ("so \u22124 degrees", "-4"),
        ("12,34", "34"),
        ("1,0800", "0800"),
        ("a share of 2/3", "2/3"),
        ("about 2.5e3 of them", "2.5e3"),
        ("is .5", ".5"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_G04_gold_keeps_its_sign():
    assert gsm8k_marker_answer("He has 2 - 5.\n#### -3") == "-3"


def test_G12_nested_boxed():
    assert last_boxed(r"\boxed{\frac{1}{3}}") == r"\frac{1}{3}", "did you stop at the first closing brace?"
    assert last_boxed(r"\boxed{1} … \boxed{2}") == "2"
    assert last_boxed(r"\boxed{42") is None
    assert last_boxed("42") is None
    assert last_boxed(r"\boxed {\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{\left\{ 1 \right.}") == r"\left\{ 1 \right.", "an escaped brace opens nothing"


def test_G14_several_blocks():
    two = "t </think> <answer>42</answer> <answer>1</answer>"
    assert r1_zero_reward_fn(two, "42") == {"reward": 0, "format_reward": 0, "answer_reward": 0}, "any-of pays guessing"
    assert r1_zero_reward_fn(two, "1")["reward"] == 0
    twice = "t </think> <answer>1</answer> t </think> <answer>42</answer>"
    assert r1_zero_reward_fn(twice, "42")["format_reward"] == 0
    assert r1_zero_reward_fn("t </answer> </think> <answer>42</answer>", "42")["format_reward"] == 0
    assert r1_zero_reward_fn("</answer> t </think> <answer>42", "42")["format_reward"] == 0
    assert rewards("4<answer>42", "42") == 0


def test_G14_text_after_the_block():
    after = "t </think> <answer>42</answer> so 7"
    assert r1_zero_reward_fn(after, "42") == {"reward": 0, "format_reward": 1, "answer_reward": 0}
    assert r1_zero_reward_fn("t </think> <answer>42</answer>\n", "42")["reward"] == 1, "white space is no text"
    assert r1_zero_reward_fn("t </think> <answer>4</answer>2", "42")["reward"] == 0


def test_G17_strict_and_lenient_format():
    newline = "t </think>\n<answer>42</answer>"
    nothing = "t </think><answer>42</answer>"
    no_think = "t <answer>42</answer>"
    not_closed = "t </think> <answer>42"
    responses = [newline, nothing, no_think, not_closed]
    assert [r1_zero_reward_fn(r, "42")["format_reward"] for r in responses] == [0, 0, 0, 0]
    assert [r1_zero_reward_fn(r, "42")["reward"] for r in responses] == [0, 0, 0, 0], "no format, no answer"
    assert [r1_zero_lenient_reward_fn(r, "42")["format_reward"] for r in responses] == [1, 1, 0, 0]
    assert [r1_zero_lenient_reward_fn(r, "42")["reward"] for r in responses] == [1, 1, 0, 0]
    assert [near_miss_format(r) for r in responses] == [True, True, False, False]
    assert not near_miss_format(in_form("42")), "the strict format is no near miss"


def test_G18_think_is_opened_by_the_prompt():
    graded = r1_zero_reward_fn("2 plus 2.</think> <answer>4</answer>", "4")
    assert graded == {"reward": 1, "format_reward": 1, "answer_reward": 1}
    assert r1_zero_reward_fn("<think> 2 plus 2.</think> <answer>4</answer>", "4")["reward"] == 1


def test_G20_no_answer_and_wrong_types():
    assert not answers_equal(None, "None")
    assert not answers_equal("None", None)
    with pytest.raises(TypeError, match="not dict"):
        answers_equal("1", {"answer": 1})


@pytest.mark.parametrize("gold", ["18", "1/2"])
def test_G21_power_tower_does_not_hang(gold):
    def grade():
        start = time.perf_counter()
        return rewards(POWER_TOWER, gold), time.perf_counter() - start

    with ThreadPoolExecutor(1) as pool:
        for reward, seconds in (grade(), pool.submit(grade).result(timeout=10)):
            assert reward == 0
            assert seconds < 2
    assert rewards("18", "18") == 1, "the process must stay usable"


def test_G23_threads_give_the_same_rewards():
    items = [(answer, gold) for _, answer, gold, _ in CASES]
    items += [(answer, gold) for answer in [POWER_TOWER, *CODE, *LONG] for gold in ("18", "1/2")]
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    mine = signal.getsignal(signal.SIGALRM)
    try:
        expected = [rewards(*item) for item in items]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda item: rewards(*item), items)) == expected
        assert signal.getsignal(signal.SIGALRM) is mine, "the grader replaced the user's alarm handler"
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_G25_model_text_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in CODE:
        for reward_fn in REWARD_FUNCTIONS.values():
            assert reward_fn(in_form(code), "1/2")["reward"] == 0
            assert reward_fn(f"\\boxed{{{code}}}", "1/2")["reward"] == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("answer", LONG, ids=["digits", "commas", "parentheses", "fractions", "boxes"])
def test_G26_long_answers_are_fast(answer):
    start = time.perf_counter()
    assert rewards(answer, "18") == 0
    assert question_only_reward_fn(answer, "18")["reward"] == 0
    assert question_only_reward_fn(f"\\boxed{{{answer}}}", "18")["reward"] == 0
    last_number(answer)
    gsm8k_marker_answer("####" * 1000 + answer)
    assert time.perf_counter() - start < 0.5, "is a pattern quadratic?"


def test_G26_bound_on_length():
    longest = "9" * MAX_ANSWER_LENGTH
    assert answers_equal(longest, longest)
    assert not answers_equal(longest + "9", longest + "9"), "an answer over the bound equals nothing"


@pytest.mark.parametrize(
    "answer", ["9" * 500, "1," * 250, "1,000" + ",000" * 120 + "0", "1 " * 250, "5 a" * 160, "a" * 495]
)
def test_G26_answers_at_the_bound_are_fast(answer):
    start = time.perf_counter()
    for _ in range(20):
        rewards(answer, answer[:-1])
    assert time.perf_counter() - start < 0.5


def test_G27_answer_followed_by_chatter():
    response = "2+40=42\n#### 42\n" + "and so on and on " * 60
    assert gsm8k_marker_answer(response) == "42", "was only the end of the response searched?"
    assert answers_equal(gsm8k_marker_answer(response), "42")


def test_marker_answer():
    assert gsm8k_marker_answer("#### 1\n#### 1,080 ") == "1080", "the last marker counts"
    assert gsm8k_marker_answer("#### 12,34") == "12,34"
    assert gsm8k_marker_answer("no marker") is None
    assert gsm8k_marker_answer("empty ####  \n42") is None


def test_question_only():
    right = question_only_reward_fn(r"It is 42. \boxed{\$42}", "42")
    assert right == {"reward": 1, "format_reward": 1, "answer_reward": 1}
    wrong = question_only_reward_fn(r"\boxed{41}", "42")
    assert wrong == {"reward": 0, "format_reward": 1, "answer_reward": 0}
    bare = question_only_reward_fn("42", "42")
    assert bare == {"reward": 0, "format_reward": 0, "answer_reward": 0}
    assert [outcome(graded) for graded in (right, wrong, bare)] == ["right", "wrong", "malformed"]


def test_rewards_are_floats_of_the_three_names():
    for name, reward_fn in REWARD_FUNCTIONS.items():
        graded = reward_fn("nothing", "1")
        assert list(graded) == ["reward", "format_reward", "answer_reward"], name
        assert all(type(value) is float for value in graded.values()), name


def test_random_text_never_raises():
    pieces = [
        "\\boxed{",
        "}",
        "{",
        "\\frac{",
        "1",
        "0",
        ",",
        ".",
        "-",
        "/",
        "$",
        "%",
        "**",
        "e9",
        " ",
        "\n",
        "\\",
        "^",
        "####",
    ]
    pieces += [
        "</think> <answer>",
        "</answer>",
        "million",
        "x",
        "\\text{",
        "\\times 10^",
        "٣",
        "½",
        "\ud800",
        "\x00",
        "元",
    ]
    rng = random.Random(0)
    for _ in range(4000):
        text = "".join(rng.choices(pieces, k=rng.randrange(25)))
        for reward_fn in REWARD_FUNCTIONS.values():
            reward_fn(text, text[::2])
            reward_fn(in_form(text), text)
        last_number(text), gsm8k_marker_answer(text), near_miss_format(text)
        assert answers_equal(text, "18") == answers_equal("18", text), "equality must be symmetric"


def test_random_numbers_equal_themselves_in_every_spelling():
    rng = random.Random(1)
    for _ in range(1000):
        number = rng.randrange(-(10**9), 10**9)
        spellings = [
            f"{number}",
            f"{number:,}",
            f"{number}.00",
            f"${number:,}.0",
            f"{number} apples",
            f"{2 * number}/2",
        ]
        for spelling in spellings:
            assert answers_equal(spelling, number), spelling
            assert not answers_equal(spelling, number + 1), spelling
            if number >= 0 or "$" not in spelling:
                assert answers_equal(last_number(f"so it is {spelling}."), number), spelling
