"""Grading: find the answer in a response, compare it with the gold answer, and say what the response earns.

Model text is never evaluated. A number is read by a small grammar and compared exactly, as a rational; anything else
is compared as normalised text. Every function is pure, takes time linear in its input and needs no signals or
processes, so its bound holds in any thread. This module knows nothing about prompts, tokens or models.
Taught in notebook 01.

What counts as equal (the policies):

- An answer longer than `MAX_ANSWER_LENGTH` characters equals nothing.
- Currency signs, percent signs and units are removed from both sides: `18%` is 18, and is not 0.18.
- Commas belong to a number only where they separate thousands: `1,080` is 1080, and `12,34` is no number.
- Decimals, fractions, mixed numbers and scientific notation (at most three digits in the exponent) are numbers;
  `5^2`, `2 + 3` and `x = 5` are text.
- Of several `\\boxed{}` the last one counts, even where it is empty or not closed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from numbers import Number
from typing import Literal

MAX_ANSWER_LENGTH = 500

Rewards = dict[str, float]
Outcome = Literal["right", "wrong", "malformed"]

# A decimal with well-formed thousands commas; [0-9] rather than \d, which also matches the digits of other scripts.
_DECIMAL = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[+-]?)\s*
    (?:
        (?:(?P<whole>[0-9]+)\s+)?                                  # 1 1/2
        (?P<top>{_DECIMAL})\s*/\s*(?P<bottom>[+-]?{_DECIMAL})      # 2/3
      |
        (?P<decimal>{_DECIMAL})
        (?:
            [eE](?P<e>[+-]?[0-9]{{1,3}})                           # 2.5e3
          | \s*(?:\\times|\\cdot|[x\u00d7*\u00b7])\s*10\s*\^\s*\{{?(?P<power>[+-]?[0-9]{{1,3}})\}}?   # 2.5 \times 10^3
        )?
    )
    (?P<unit>.*)
    """,
    re.VERBOSE,
)
_THOUSANDS = re.compile(r"(?<![0-9])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")
_NUMBER_IN_TEXT = re.compile(
    r"""
    (?P<sign>(?<![0-9A-Za-z_.)\]}%])[-\u2212]\\?[$€£¥]?|)       # a minus sign; not the one in 5-3
    (?P<digits>
        (?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?
      | (?<![0-9.])\.[0-9]+
    )
    (?P<tail>/[0-9]+(?:\.[0-9]+)?|[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z])|)
    """,
    re.VERBOSE,
)

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FRACTION = re.compile(rf"\\frac\s*\{{\s*([+-]?{_DECIMAL})\s*\}}\s*\{{\s*([+-]?{_DECIMAL})\s*\}}")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])([0-9])")  # \frac23
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9])")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LATEX_SIZE = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])")
# What marks up an answer without being part of it becomes a space, so that it never joins two numbers.
_MARKUP = re.compile(r"\\[()\[\],;: ]|\*\*|[$€£¥₹¢%`~]")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])(?:\^\{?[23]\}?|[²³])")

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NOT_A_UNIT = _SCALES.keys() | {"and", "or", "to", "not", "no", "plus", "minus", "over", "half", "pi", "sqrt"}
_ONE_LETTER_UNITS = frozenset("acfghlms")  # "3 a day", degrees C and F, g, h, l, m, s; an x is a variable
_LONGEST_UNIT = 4  # words


def answers_equal(prediction: object, gold: object) -> bool:
    """Whether two answers are the same: exactly as rationals if both are numbers, as text if neither is.

    Either side may be text, a number, or `None` (no answer, equal to nothing); `gold` may be a list of accepted
    answers. Text is compared with markup removed, white space collapsed and case ignored. Taught in notebook 01.

    Raises:
        TypeError: an answer of another type.

    >>> answers_equal("$1,080.00", "1080"), answers_equal(r"\\frac{1}{2}", 0.5), answers_equal("0.333", "1/3")
    (True, True, False)
    """
    if isinstance(gold, list | tuple):
        return any(answers_equal(prediction, one) for one in gold)
    value = _read_answer(prediction)
    return value is not None and value == _read_answer(gold)


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}` of the text, braces balanced; `None` if there is none or it is not closed.

    >>> last_boxed(r"first \\boxed{1}, then \\boxed{\\frac{1}{3}}.")
    '\\\\frac{1}{3}'
    """
    box = _last(_BOX, text)
    if box is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace counts nothing
        if depth == 0:
            return text[box.end() : brace.start()]
    return None


def last_number(text: str) -> str | None:
    """The last number of the text as it is written there, without a currency sign; `None` where there is none.

    For text that gives its answer in no particular form. Digits are never joined across a space or a letter.

    >>> last_number("48/2 = 24, so he owes -$1,080."), last_number("answer is 3 5"), last_number("It is 3.")
    ('-1,080', '5', '3')
    """
    found = _last(_NUMBER_IN_TEXT, text)
    return found and ("-" if found["sign"] else "") + found["digits"] + found["tail"]


def gsm8k_marker_answer(text: str) -> str | None:
    """The rest of the line after the last `####`, without thousands commas; `None` where there is none.

    >>> gsm8k_marker_answer("1000 + 80 = 1,080\\n#### 1,080\\nThat was easy.")
    '1080'
    """
    _, marker, rest = text.rpartition("####")
    line = rest.lstrip(" \t").partition("\n")[0].strip()
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), line) if marker and line else None


def r1_zero_reward_fn(response: str, ground_truth: object) -> Rewards:
    """Rewards of a response to an r1_zero prompt, whose end is already `<think>`; the strict format.

    The format is exactly one `</think> <answer>`, with one space, and after it the only `</answer>` of the response, so
    several answer blocks earn nothing. Text after the block keeps the format and makes the answer wrong.

    Returns:
        `{"reward", "format_reward", "answer_reward"}`, each 0.0 or 1.0. The reward is the answer reward; the format is
        never paid. A malformed response has no answer. Taught in notebooks 01 and 03.

    >>> r1_zero_reward_fn("2 plus 2.</think> <answer>4</answer>", "4")
    {'reward': 1.0, 'format_reward': 1.0, 'answer_reward': 1.0}
    >>> r1_zero_reward_fn("2 plus 2.</think><answer>4</answer>", "4")
    {'reward': 0.0, 'format_reward': 0.0, 'answer_reward': 0.0}
    """
    return _rewards(_answer_block(response, _STRICT_OPENING), ground_truth)


def r1_zero_lenient_reward_fn(response: str, ground_truth: object) -> Rewards:
    """`r1_zero_reward_fn` with any white space, or none, between `</think>` and `<answer>`.

    >>> r1_zero_lenient_reward_fn("2 plus 2.</think><answer>4</answer>", "4")
    {'reward': 1.0, 'format_reward': 1.0, 'answer_reward': 1.0}
    """
    return _rewards(_answer_block(response, _LENIENT_OPENING), ground_truth)


def question_only_reward_fn(response: str, ground_truth: object) -> Rewards:
    """Rewards of a response that puts its answer in `\\boxed{}`: the format is a closed last box.

    Returns:
        The same three rewards as `r1_zero_reward_fn`.

    >>> question_only_reward_fn(r"So it is \\boxed{4}.", "4")
    {'reward': 1.0, 'format_reward': 1.0, 'answer_reward': 1.0}
    """
    return _rewards(last_boxed(response), ground_truth)


REWARD_FUNCTIONS: dict[str, Callable[[str, object], Rewards]] = {
    "r1_zero": r1_zero_reward_fn,
    "r1_zero_lenient": r1_zero_lenient_reward_fn,
    "question_only": question_only_reward_fn,
}


def near_miss_format(response: str) -> bool:
    """Whether only the lenient r1_zero format accepts the response.

    >>> near_miss_format("t </think>\\n<answer>4</answer>"), near_miss_format("t </think> <answer>4</answer>")
    (True, False)
    """
    return _answer_block(response, _STRICT_OPENING) is None and _answer_block(response, _LENIENT_OPENING) is not None


def outcome(rewards: Rewards) -> Outcome:
    """The class of a graded response: "right", "wrong" (well formed, wrong answer) or "malformed".

    >>> outcome(r1_zero_reward_fn("t </think> <answer>4</answer>", "5"))
    'wrong'
    """
    if not rewards["format_reward"]:
        return "malformed"
    return "right" if rewards["answer_reward"] else "wrong"


_STRICT_OPENING = re.compile(r"</think> <answer>")
_LENIENT_OPENING = re.compile(r"</think>\s*<answer>")
_CLOSING = "</answer>"


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _answer_block(response: str, opening: re.Pattern[str]) -> str | None:
    """The text in the response's one answer block, "" if more text follows the block, `None` if it is malformed."""
    openings = list(opening.finditer(response))
    if len(openings) != 1 or response.count(_CLOSING) != 1:
        return None
    inside, closing, after = response[openings[0].end() :].partition(_CLOSING)
    if not closing:
        return None
    return "" if after.strip() else inside


def _rewards(answer: str | None, gold: object) -> Rewards:
    right = float(answers_equal(answer, gold))
    return {"reward": right, "format_reward": float(answer is not None), "answer_reward": right}


def _read_answer(answer: object) -> Fraction | str | None:
    """An answer as a number, else as normalised text; `None` for no answer."""
    if answer is None:
        return None
    if isinstance(answer, int):  # bool too; not by way of text, which Python limits to 4,300 digits
        return Fraction(answer)
    if isinstance(answer, Number):
        answer = str(answer)  # 0.1 means 1/10, not the binary fraction next to it
    if not isinstance(answer, str):
        raise TypeError(f"An answer is text or a number, not {type(answer).__name__}: {answer!r:.100}.")
    if len(answer) > MAX_ANSWER_LENGTH:
        return None
    boxed = last_boxed(answer) if "\\boxed" in answer else answer
    if boxed is None:
        return None
    text = _normalise(boxed)
    number = _read_number(text)
    return (text.casefold() or None) if number is None else number


def _normalise(text: str) -> str:
    """The text without markup: maths and bold delimiters, currency, percent, LaTeX spacing and text commands."""
    text = text.replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%").replace("\\!", "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _LATEX_COMMA.sub(",", text)
    text = _DEGREE.sub("°", text)
    text = _LATEX_SIZE.sub("", text)
    text = _SHORT_FRACTION.sub(r" \1/\2 ", text)
    text = _FRACTION.sub(r" \1/\2 ", text)
    text = _LATEX_TEXT.sub(r"\1", text)
    text = " ".join(_MARKUP.sub(" ", text).split())
    return text.removesuffix(".").strip(" *_")


def _read_number(text: str) -> Fraction | None:
    """The value of a normalised text that is one number with at most a unit, else `None`."""
    if text[:1] + text[-1:] in ("()", "{}"):
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    scale = match and _unit_scale(match["unit"])
    if match is None or scale is None:
        return None
    if match["decimal"]:
        value = _decimal(match["decimal"]) * Fraction(10) ** int(match["e"] or match["power"] or 0)
    else:
        top, bottom = _decimal(match["top"]), _decimal(match["bottom"])
        if bottom == 0 or (match["whole"] and not 0 < top < bottom):
            return None
        value = int(match["whole"] or 0) + top / bottom
    return scale * (-value if match["sign"] == "-" else value)


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))  # the grammar has already checked it


def _unit_scale(unit: str) -> int | None:
    """1 for a unit, a power of ten for one that starts with "million" and the like, `None` for what is no unit."""
    unit = _UNIT_POWER.sub("", unit)
    words = re.findall("[a-z]+", unit.lower())
    if set(re.sub(r"[A-Za-z\s]+", "", unit)) - set("/-.'°") or (not words and unit.strip(" °")):
        return None
    scale = 1
    while words and words[0] in _SCALES:
        scale *= _SCALES[words.pop(0)]
    allowed = all(word in _ONE_LETTER_UNITS if len(word) == 1 else word not in _NOT_A_UNIT for word in words)
    return scale if allowed and len(words) <= _LONGEST_UNIT else None
