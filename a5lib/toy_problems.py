"""GSM8K-like word problems made by code: what the embedded toy model is trained and tested on.

A template draws numbers, names and things, and gives a question with two ways to solve it: the right one, and a
tempting one that a careless reader takes (adds where it should subtract, stops a step early, forgets a number).
`toy_problems` hands out the right ones; the tempting ones are for the builder of the toy model (`a5lib.toy_build`).
Train, tuning and validation are disjoint by construction: a hash of the template and its numbers decides the split, so
a validation problem never occurs in training, not even under another name. This module knows nothing about models or
tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

from a5lib.errors import UserError
from a5lib.records import Problem

Split = Literal["train", "tuning", "validation"]
SPLITS: tuple[Split, ...] = ("train", "tuning", "validation")
LARGEST: dict[Split, int] = {"train": 50_000, "tuning": 5_000, "validation": 5_000}  # far below what the templates give

NAMES = ("Ann", "Ben", "Carla", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jon", "Kim", "Leo", "Mia", "Nina",
         "Omar", "Pia", "Ravi", "Sara", "Tom", "Uma", "Vera", "Wei", "Yan", "Zoe")  # fmt: skip
THINGS = ("pens", "cards", "stamps", "shells", "beads", "books", "coins", "stones", "stickers", "apples", "eggs",
          "plums", "marbles", "buttons", "candles", "cups")  # fmt: skip
GROUPS = ("boxes", "bags", "crates", "packs", "trays", "baskets")
GOODS = ("pies", "kites", "lamps", "maps", "mugs", "scarves", "toys", "vases")
PLACES = ("hall", "theater", "bus", "cinema", "tent", "school")


@dataclass(frozen=True)
class Step:
    """One line of a rationale: `text` holds `{}` where the equation `left op right = value` stands.

    >>> Step("Ann has {} pens.", 400, "*", 3).line()
    'Ann has 400*3=1,200 pens.'
    """

    text: str
    left: int
    op: Literal["+", "-", "*", "/"]
    right: int

    @property
    def value(self) -> int:
        """The result; a division leaves no remainder."""
        if self.op == "/":
            assert self.left % self.right == 0, f"{self.left}/{self.right} leaves a remainder"
            return self.left // self.right
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.op]

    def equation(self) -> str:
        """The equation, as in a GSM8K rationale: no spaces, commas from 1,000 on."""
        return f"{self.left:,}{self.op}{self.right:,}={self.value:,}"

    def line(self) -> str:
        """The sentence with its equation in it."""
        return self.text.replace("{}", self.equation())


@dataclass(frozen=True)
class Draft:
    """A drawn problem: its question, the right steps, and the steps of a careless reader with another result."""

    template: str
    lures: bool
    numbers: tuple[int, ...]
    question: str
    right: tuple[Step, ...]
    tempting: tuple[Step, ...]

    @property
    def split(self) -> Split:
        """Eight of ten hashes of (template, numbers) are train, one is tuning, one is validation."""
        key = f"{self.template}:{','.join(map(str, self.numbers))}"
        bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 10
        return "train" if bucket < 8 else "tuning" if bucket == 8 else "validation"

    def problem(self) -> Problem:
        """The problem with its right rationale; `answer` has no commas."""
        return Problem(self.question, rationale(self.right), str(self.right[-1].value))


def rationale(steps: Sequence[Step]) -> str:
    """The steps' sentences, a line each."""
    return "\n".join(step.line() for step in steps)


def to_gsm8k_json(problem: Problem) -> dict[str, str]:
    """The problem as a GSM8K record: `question`, and `answer` with the rationale and a last line `#### 1,200`.

    >>> to_gsm8k_json(Problem("How many?", "400*3=1,200 pens.", "1200"))["answer"].splitlines()[-1]
    '#### 1,200'
    """
    return {"question": problem.question, "answer": f"{problem.rationale}\n#### {int(problem.answer):,}"}


def toy_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct problems of a split, the same on every machine; a shorter list is the start of a longer one.

    No two have the same template and numbers. Taught in notebook 01.

    Raises:
        UserError: an unknown split, or more problems asked for than `LARGEST` of the split.

    >>> toy_problems("validation", 3) == toy_problems("validation", 9)[:3]
    True
    """
    if split not in SPLITS:
        raise UserError(f"There is no split {split!r} of the toy problems; choose from {', '.join(SPLITS)}.")
    if count > LARGEST[split]:
        raise UserError(
            f"{count:,} toy problems of the split {split!r} were asked for; there are enough different ones for "
            f"{LARGEST[split]:,}, so ask for that many or fewer."
        )
    dice = Dice(Random(len(SPLITS) * seed + SPLITS.index(split)))
    seen: set[tuple[str, tuple[int, ...]]] = set()
    problems: list[Problem] = []
    while len(problems) < count:
        draft = draw(dice, split)
        key = (draft.template, draft.numbers)
        if key not in seen:
            seen.add(key)
            problems.append(draft.problem())
    return problems


def draw(dice: Dice, split: Split) -> Draft:
    """A draft of the split: a template drawn uniformly, then numbers until their hash falls into the split."""
    template = dice.pick(TEMPLATES)
    while True:
        draft = template.draw(dice)
        if draft.split == split:
            return draft


T = TypeVar("T")


class Dice:
    """Draws that are the same in every Python version, which only `random()` of a seeded `Random` promises."""

    def __init__(self, rng: Random) -> None:
        self.random = rng.random

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self.random() * len(options))]

    def two_names(self) -> tuple[str, str]:
        """Two different names."""
        first = self.between(0, len(NAMES) - 1)
        second = (first + self.between(1, len(NAMES) - 1)) % len(NAMES)
        return NAMES[first], NAMES[second]


Drawn = tuple[tuple[int, ...], str, list[Step], list[Step]]


@dataclass(frozen=True)
class Template:
    """A kind of problem. Where it `lures`, the tempting way is the more frequent one in the toy model's pretraining."""

    name: str
    lures: bool
    function: Callable[[Dice], Drawn]

    def draw(self, dice: Dice) -> Draft:
        """A draft with random numbers and names, drawn again while the tempting way happens to be right."""
        while True:
            numbers, question, right, tempting = self.function(dice)
            if right[-1].value != tempting[-1].value:
                return Draft(self.name, self.lures, numbers, question, tuple(right), tuple(tempting))


TEMPLATES: list[Template] = []


def template(lures: bool) -> Callable[[Callable[[Dice], Drawn]], Callable[[Dice], Drawn]]:
    """Register a function that draws (numbers, question, right steps, tempting steps) under its own name."""

    def register(function: Callable[[Dice], Drawn]) -> Callable[[Dice], Drawn]:
        TEMPLATES.append(Template(function.__name__, lures, function))
        return function

    return register


# --- one step ---------------------------------------------------------------------------------------------------------


@template(lures=True)
def more_than(dice: Dice) -> Drawn:
    (ann, ben), things = dice.two_names(), dice.pick(THINGS)
    b = dice.between(3, 99)
    a = b + dice.between(3, 150)
    question = f"{ann} has {a} {things}, which is {b} more than {ben} has. How many {things} does {ben} have?"
    text = f"{ben} has {{}} {things}."
    return (a, b), question, [Step(text, a, "-", b)], [Step(text, a, "+", b)]


@template(lures=False)
def fewer_than(dice: Dice) -> Drawn:
    (ann, ben), things = dice.two_names(), dice.pick(THINGS)
    b = dice.between(3, 99)
    a = b + dice.between(3, 150)
    question = f"{ann} has {a} {things}, which is {b} fewer than {ben} has. How many {things} does {ben} have?"
    text = f"{ben} has {{}} {things}."
    return (a, b), question, [Step(text, a, "+", b)], [Step(text, a, "-", b)]


@template(lures=False)
def colder(dice: Dice) -> Drawn:
    a, b = dice.between(1, 60), dice.between(2, 90)
    question = f"It was {a} degrees at noon. By night it was {b} degrees colder. How many degrees was it at night?"
    text = "At night it was {} degrees."
    return (a, b), question, [Step(text, a, "-", b)], [Step(text, a, "+", b)]


@template(lures=True)
def boxes(dice: Dice) -> Drawn:
    ann, things, groups = dice.pick(NAMES), dice.pick(THINGS), dice.pick(GROUPS)
    a, b = dice.between(2, 9), dice.between(11, 99)
    question = f"{ann} has {a} {groups} with {b} {things} each. How many {things} does {ann} have?"
    text = f"{ann} has {{}} {things}."
    return (a, b), question, [Step(text, b, "*", a)], [Step(text, b, "+", a)]


@template(lures=False)
def share(dice: Dice) -> Drawn:
    ann, things = dice.pick(NAMES), dice.pick(THINGS)
    b, each = dice.between(2, 9), dice.between(6, 99)
    a = b * each
    question = f"{ann} shares {a} {things} equally among {b} friends. How many {things} does each friend get?"
    text = f"Each friend gets {{}} {things}."
    return (a, b), question, [Step(text, a, "/", b)], [Step(text, a, "-", b)]


# --- two steps --------------------------------------------------------------------------------------------------------


@template(lures=False)
def boxes_then_gives(dice: Dice) -> Drawn:
    (ann, ben), things, groups = dice.two_names(), dice.pick(THINGS), dice.pick(GROUPS)
    a, b = dice.between(2, 9), dice.between(6, 60)
    c = dice.between(2, a * b - 1)
    question = f"{ann} fills {a} {groups} with {b} {things} each and gives {c} {things} to {ben}. How many are left?"
    first = Step(f"{ann} had {{}} {things}.", b, "*", a)
    return (a, b, c), question, [first, Step("Then {} are left.", b * a, "-", c)], [first]


@template(lures=True)
def change(dice: Dice) -> Drawn:
    ann, goods = dice.pick(NAMES), dice.pick(GOODS)
    a, b = dice.between(2, 9), dice.between(3, 20)
    c = a * b + dice.between(2, 60)
    question = f"{ann} buys {a} {goods} for {b} dollars each and pays with {c} dollars. How much change does {ann} get?"
    first = Step(f"The {goods} cost {{}} dollars.", b, "*", a)
    return (a, b, c), question, [first, Step("The change is {} dollars.", c, "-", b * a)], [first]


@template(lures=True)
def weeks_of_days(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    verb, what = dice.pick((("reads", "pages"), ("runs", "miles"), ("bakes", "rolls"), ("draws", "cards")))
    a, b = dice.between(5, 70), dice.between(2, 9)
    question = f"{ann} {verb} {a} {what} every day. How many {what} is that in {b} weeks?"
    right = [Step(f"In a week it is {{}} {what}.", a, "*", 7), Step(f"In all it is {{}} {what}.", a * 7, "*", b)]
    return (a, b), question, right, [Step(f"In all it is {{}} {what}.", a, "*", b)]


@template(lures=True)
def together(dice: Dice) -> Drawn:
    (ann, ben), things = dice.two_names(), dice.pick(THINGS)
    a, b = dice.between(4, 150), dice.between(3, 99)
    question = f"{ann} has {a} {things}. {ben} has {b} more than {ann}. How many {things} do they have together?"
    first = Step(f"{ben} has {{}} {things}.", a, "+", b)
    return (a, b), question, [first, Step(f"Together they have {{}} {things}.", a + b, "+", a)], [first]


@template(lures=False)
def times_as_many(dice: Dice) -> Drawn:
    (ann, ben), things = dice.two_names(), dice.pick(THINGS)
    a, b = dice.between(6, 90), dice.between(3, 9)
    question = f"{ann} has {a} {things}. {ben} has {b} times as many. How many {things} do they have together?"
    first = Step(f"{ben} has {{}} {things}.", a, "*", b)
    return (a, b), question, [first, Step(f"Together they have {{}} {things}.", a * b, "+", a)], [first]


@template(lures=True)
def half_price(dice: Dice) -> Drawn:
    ann, goods = dice.pick(NAMES), dice.pick(GOODS)
    a, b = 2 * dice.between(3, 99), dice.between(2, 9)
    question = f"The {goods} cost {a} dollars each, but today they are half price. How much do {b} {goods} cost {ann}?"
    text = f"The {goods} cost {{}} dollars."
    right = [Step("Half price is {} dollars.", a, "/", 2), Step(text, a // 2, "*", b)]
    return (a, b), question, right, [Step(text, a, "*", b)]


@template(lures=False)
def discount(dice: Dice) -> Drawn:
    ann, goods = dice.pick(NAMES), dice.pick(GOODS)
    part, percent = dice.pick(((10, 10), (5, 20), (4, 25), (2, 50)))
    price = part * dice.between(3, 199)
    question = f"The {goods} cost {price:,} dollars. With {percent}% off, how many dollars does {ann} pay?"
    first = Step("The discount is {} dollars.", price, "/", part)
    second = Step(f"{ann} pays {{}} dollars.", price, "-", price // part)
    return (price, percent), question, [first, second], [first]


@template(lures=True)
def elevator(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b, c = dice.between(1, 40), dice.between(2, 60), dice.between(2, 40)
    question = f"{ann} is on floor {a} and takes the elevator {b} floors down, then {c} floors up. Which floor is that?"
    down = Step("Down is floor {}.", a, "-", b)
    text = "Then it is floor {}."
    return (a, b, c), question, [down, Step(text, a - b, "+", c)], [down, Step(text, a - b, "-", c)]


@template(lures=True)
def bills(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b, c = 100 * dice.between(2, 60), 10 * dice.between(2, 60), dice.between(2, 9)
    question = f"{ann} has {a:,} dollars in the bank and pays {c} bills of {b} dollars each. What is the balance then?"
    first = Step("The bills are {} dollars.", b, "*", c)
    right = [first, Step("The balance is {} dollars.", a, "-", b * c)]
    return (a, b, c), question, right, [Step("The balance is {} dollars.", a, "-", b)]


@template(lures=False)
def empty_seats(dice: Dice) -> Drawn:
    place = dice.pick(PLACES)
    a, b, c = dice.between(3, 9), dice.between(6, 60), dice.between(2, 5)
    question = f"A {place} has {a} rows of {b} seats. In every row {c} seats are empty. How many people sit there?"
    first = Step("Each row has {} people.", b, "-", c)
    return (a, b, c), question, [first, Step("There are {} people.", b - c, "*", a)], [first]


@template(lures=True)
def give_then_share(dice: Dice) -> Drawn:
    ann, things = dice.pick(NAMES), dice.pick(THINGS)
    b, c, each = dice.between(3, 80), dice.between(2, 9), dice.between(4, 60)
    a = b + c * each
    question = (
        f"{ann} has {a} {things}, keeps {b} and shares the rest equally among {c} friends. How many does each get?"
    )
    first = Step(f"The rest is {{}} {things}.", a, "-", b)
    return (a, b, c), question, [first, Step(f"Each gets {{}} {things}.", a - b, "/", c)], [first]


@template(lures=False)
def wages(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b, c = dice.between(11, 40), dice.between(2, 9), dice.between(2, 9)
    question = f"{ann} earns {a} dollars an hour and works {b} hours a day. How many dollars is that in {c} days?"
    first = Step("A day pays {} dollars.", a, "*", b)
    return (a, b, c), question, [first, Step("In all it is {} dollars.", a * b, "*", c)], [first]


@template(lures=True)
def saving(dice: Dice) -> Drawn:
    ann, goods = dice.pick(NAMES), dice.pick(("bike", "phone", "piano", "boat", "tent"))
    b, c = 10 * dice.between(2, 60), dice.between(2, 9)
    a = b * c + 100 * dice.between(1, 30)
    question = f"A {goods} costs {a:,} dollars. {ann} saves {b} dollars a week for {c} weeks. How much more is needed?"
    first = Step(f"{ann} saves {{}} dollars.", b, "*", c)
    return (a, b, c), question, [first, Step("Then {} dollars are needed.", a, "-", b * c)], [first]


@template(lures=False)
def ages(dice: Dice) -> Drawn:
    ann, ben = dice.two_names()
    a, b, c = dice.between(5, 60), dice.between(2, 30), dice.between(2, 30)
    question = f"{ann} is {a} years old and {ben} is {b} years older. How old will {ben} be in {c} years?"
    first = Step(f"{ben} is {{}} years old.", a, "+", b)
    return (a, b, c), question, [first, Step(f"{ben} will be {{}} years old.", a + b, "+", c)], [first]


@template(lures=True)
def round_trips(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b = dice.between(6, 90), dice.between(2, 9)
    question = f"{ann} lives {a} miles from work and drives there and back on {b} days. How many miles is that?"
    right = [Step("A day is {} miles.", a, "*", 2), Step("In all it is {} miles.", a * 2, "*", b)]
    return (a, b), question, right, [Step("In all it is {} miles.", a, "*", b)]


@template(lures=False)
def leaks(dice: Dice) -> Drawn:
    b, c = dice.between(2, 40), dice.between(2, 9)
    a = b * c + dice.between(5, 300)
    question = f"A tank holds {a} liters and loses {b} liters every hour. How many liters are left after {c} hours?"
    first = Step("It loses {} liters.", b, "*", c)
    text = "Then {} liters are left."
    return (a, b, c), question, [first, Step(text, a, "-", b * c)], [Step(text, a, "-", b)]


# --- three and four steps ---------------------------------------------------------------------------------------------


@template(lures=True)
def two_kinds(dice: Dice) -> Drawn:
    ann, (one, two) = dice.pick(NAMES), dice.pick((("pies", "cakes"), ("roses", "tulips"), ("pens", "books")))
    a, b, c, d = dice.between(2, 9), dice.between(3, 30), dice.between(2, 9), dice.between(3, 30)
    question = f"{ann} buys {a} {one} for {b} dollars each and {c} {two} for {d} dollars each. How much is it in all?"
    first = Step(f"The {one} cost {{}} dollars.", b, "*", a)
    second = Step(f"The {two} cost {{}} dollars.", d, "*", c)
    third = Step("In all it is {} dollars.", a * b, "+", c * d)
    return (a, b, c, d), question, [first, second, third], [first, second]


@template(lures=False)
def legs(dice: Dice) -> Drawn:
    a, b = dice.between(3, 99), dice.between(3, 99)
    question = f"A farm has {a} hens with 2 legs each and {b} cows with 4 legs each. How many legs are there?"
    hens, cows = Step("The hens have {} legs.", a, "*", 2), Step("The cows have {} legs.", b, "*", 4)
    right = [hens, cows, Step("There are {} legs.", a * 2, "+", b * 4)]
    return (a, b), question, right, [hens, cows]


@template(lures=False)
def average(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b, mean = dice.between(5, 70), dice.between(5, 70), dice.between(30, 60)
    c = 3 * mean - a - b
    if c < 1:
        return average(dice)
    question = f"{ann} scores {a}, {b} and {c} points in three games. What is the average?"
    two = Step("Two games give {} points.", a, "+", b)
    three = Step("Three give {} points.", a + b, "+", c)
    return (a, b, c), question, [two, three, Step("The average is {} points.", a + b + c, "/", 3)], [two, three]


@template(lures=True)
def quiz(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b, c, d = dice.between(2, 9), dice.between(2, 20), dice.between(2, 9), dice.between(2, 20)
    question = (
        f"{ann} wins {b} points in each of {a} rounds and loses {d} points in each of {c} rounds. What is the score?"
    )
    won, lost = Step(f"{ann} wins {{}} points.", b, "*", a), Step(f"{ann} loses {{}} points.", d, "*", c)
    text = "The score is {} points."
    return (
        (a, b, c, d),
        question,
        [won, lost, Step(text, a * b, "-", c * d)],
        [won, lost, Step(text, a * b, "+", c * d)],
    )


@template(lures=False)
def two_sorts_of_boxes(dice: Dice) -> Drawn:
    ann, things = dice.pick(NAMES), dice.pick(THINGS)
    a, b, c, d = dice.between(2, 9), dice.between(4, 30), dice.between(2, 9), dice.between(4, 30)
    e = dice.between(2, a * b + c * d - 1)
    question = (
        f"{ann} has {a} boxes of {b} {things} and {c} bags of {d} {things}, and sells {e}. How many {things} are left?"
    )
    steps = [Step("The boxes hold {}.", b, "*", a), Step("The bags hold {}.", d, "*", c),
             Step("In all it is {}.", a * b, "+", c * d), Step("Then {} are left.", a * b + c * d, "-", e)]  # fmt: skip
    return (a, b, c, d, e), question, steps, steps[:3]


@template(lures=True)
def profit(dice: Dice) -> Drawn:
    ann = dice.pick(NAMES)
    a, b, c, d = dice.between(2, 9), dice.between(3, 30), dice.between(2, 9), dice.between(3, 30)
    e = dice.between(2, 300)
    question = f"{ann} sells {a} pies at {b} dollars and {c} cakes at {d} dollars, and spent {e}. What is the profit?"
    steps = [Step("The pies give {}.", b, "*", a), Step("The cakes give {}.", d, "*", c),
             Step("In all it is {}.", a * b, "+", c * d), Step("The profit is {}.", a * b + c * d, "-", e)]  # fmt: skip
    return (a, b, c, d, e), question, steps, steps[:3]
