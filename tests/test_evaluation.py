"""Intervals, pass@k and the evaluation of a scripted backend, against enumeration and numbers worked out by hand."""

import itertools
import json
import math
import statistics

import pytest
import torch

from a5lib.errors import UserError
from a5lib.evaluation import (
    Evaluation,
    _t_quantile_975,
    clustered_interval,
    evaluate,
    pass_at_k,
    wilson_interval,
)
from a5lib.grading import r1_zero_reward_fn
from a5lib.prompts import load_prompt
from a5lib.records import Completion, Problem

# --- intervals


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson_against_known_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_bounds_solve_its_equation():
    # The bounds are the shares p at which the observed share lies 1.96 standard errors of p away.
    for successes, n in ((3, 17), (200, 256), (1, 1000)):
        for p in wilson_interval(successes, n):
            assert abs(successes / n - p) == pytest.approx(1.959963985 * math.sqrt(p * (1 - p) / n), rel=1e-8)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_count(successes, n):
    with pytest.raises(ValueError, match="expected at least one trial"):
        wilson_interval(successes, n)


@pytest.mark.parametrize(
    ("degrees", "table"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (255, 1.969)],
)
def test_t_quantiles_against_the_printed_table(degrees, table):
    assert _t_quantile_975(degrees) == pytest.approx(table, rel=2e-3)


def test_clustered_interval_by_hand():
    # mean 0.5, deviations 0.5, 0, 0, 0.5: variance 0.5 / 3, standard error sqrt(0.5 / 3 / 4), t with 3 degrees 3.182
    half = 3.182 * math.sqrt(0.5 / 3 / 4)
    assert clustered_interval([0.0, 0.5, 0.5, 1.0]) == pytest.approx((max(0, 0.5 - half), min(1, 0.5 + half)), abs=2e-3)
    means = [0.4, 0.5, 0.5, 0.6]
    half = 3.182 * math.sqrt(0.02 / 3 / 4)
    assert clustered_interval(means) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)


def test_clustered_interval_is_cut_to_shares_and_never_without_width():
    low, high = clustered_interval([1.0] * 9 + [0.5])
    assert high == 1.0 and low < 0.95
    assert clustered_interval([1.0] * 10) == pytest.approx((0.7225, 1.0), abs=5e-5)
    assert clustered_interval([0.5, 0.5]) == wilson_interval(1, 2)
    with pytest.raises(ValueError, match="at least two"):
        clustered_interval([0.5])


def test_clustered_interval_covers_the_truth_where_counting_samples_does_not():
    # Half of the problems are easy (0.95), half hard (0.05), so the truth is 0.5; 64 are drawn, with 8 samples each.
    generator = torch.Generator().manual_seed(0)
    trials, clustered, pooled = 400, 0, 0
    for _ in range(trials):
        easy = torch.rand(64, generator=generator) < 0.5
        chance = torch.where(easy, 0.95, 0.05)
        right = (torch.rand(64, 8, generator=generator) < chance[:, None]).double()
        low, high = clustered_interval(right.mean(1).tolist())
        clustered += low <= 0.5 <= high
        low, high = wilson_interval(int(right.sum()), 64 * 8)
        pooled += low <= 0.5 <= high
    assert 0.92 <= clustered / trials <= 0.98, "a 95 % interval should hold the truth 95 times in a hundred"
    assert pooled / trials < 0.7


# --- pass@k


def test_pass_at_k_equals_the_share_of_all_subsets_with_a_right_one():
    for n in range(1, 8):
        for c in range(n + 1):
            samples = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(samples, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), f"n={n} c={c} k={k}"


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="expected 1 <= k <= n"):
        pass_at_k(n, c, k)


# --- evaluate


class Characters:
    """A tokenizer whose ids are character codes."""

    bos_token_id = eos_token_id = None

    def encode(self, text, **_):
        return [ord(c) for c in text]

    def __call__(self, text, **_):
        return {"input_ids": self.encode(text)}


class Scripted:
    """A backend that answers each prompt from a list of texts; it records how it was called."""

    def __init__(self, script, lengths=None):
        self.script, self.lengths, self.calls = script, lengths, []

    def sync(self, weights, step):
        raise AssertionError("evaluate does not sync: that is the loop's")

    def generate(self, prompts, *, n, progress=None, **settings):
        self.calls.append({"prompts": prompts, "n": n, **settings})
        completions = []
        for i, texts in enumerate(self.script):
            for text in texts[:n]:
                finish = "stop" if text.endswith("</answer>") else "length"
                completions.append(Completion(i, [1] * len(text.split()), text, finish, [0.0] * len(text.split())))
                if progress:
                    progress(1)
        return completions


RIGHT, WRONG, LOST = "a b </think> <answer>4</answer>", "a </think> <answer>5</answer>", "a b c d e f"
PROBLEMS = [Problem("2 + 2?", "", "4"), Problem("1 + 3?", "", "4")]
SETTINGS = {"max_tokens": 6, "temperature": 1.0, "top_p": 0.9, "seed": 3}


def run(script, problems=PROBLEMS, **changes):
    backend = Scripted(script)
    settings = {**SETTINGS, "samples": len(script[0]), **changes}
    return backend, evaluate(backend, Characters(), problems, load_prompt("r1_zero"), r1_zero_reward_fn, **settings)


def test_four_samples_of_two_problems():
    seen = []
    backend, result = run([[RIGHT, WRONG, RIGHT, LOST], [WRONG, WRONG, WRONG, RIGHT]], progress=seen.append)
    assert result.accuracy == (2 / 4 + 1 / 4) / 2
    assert result.counts == {"right": 3, "wrong": 4, "malformed": 1}
    assert result.format_share == 7 / 8
    assert result.truncated_share == 1 / 8
    # lengths in words: RIGHT 4, WRONG 3, LOST 6
    assert result.response_length_mean == (3 * 4 + 4 * 3 + 6) / 8
    assert result.response_length_max == 6
    # pass@2: 1 - C(2,2)/C(4,2) = 5/6 and 1 - C(3,2)/C(4,2) = 1/2; pass@4: 1 and 1
    assert result.pass_at_k == {1: pytest.approx(3 / 8), 2: pytest.approx((5 / 6 + 1 / 2) / 2), 4: 1.0}
    assert result.interval == clustered_interval([0.5, 0.25]), "samples of one problem are not independent trials"
    assert [e.response for e in result.examples["wrong"]] == [WRONG] * 3, "up to three examples of each class"
    assert result.examples["malformed"][0].question == "2 + 2?"
    assert sum(seen) == 8
    call, = backend.calls  # fmt: skip
    assert call["n"] == 4, "n = 1 with repeated prompts gives identical samples"
    assert len(call["prompts"]) == 2
    assert "".join(map(chr, call["prompts"][1])) == load_prompt("r1_zero").render("1 + 3?")
    assert call["stop"] == ("</answer>",)
    assert (call["max_tokens"], call["temperature"], call["top_p"], call["seed"]) == (6, 1.0, 0.9, 3)


def test_greedy_is_temperature_zero_and_one_sample():
    backend, result = run([[RIGHT], [LOST]], temperature=0.0)
    assert backend.calls[0]["temperature"] == 0.0 and backend.calls[0]["n"] == 1
    assert result.accuracy == 0.5
    assert result.interval == wilson_interval(1, 2)
    assert result.pass_at_k == {1: 0.5}
    assert result.truncated_share == 0.5
    assert result.describe() == "accuracy 50.0 % (9.5-90.5, n=2)"


def test_samples_that_are_no_power_of_two():
    _, result = run([[RIGHT] * 3, [WRONG] * 3])
    assert list(result.pass_at_k) == [1, 2]
    assert (
        result.describe() == f"accuracy 50.0 % ({100 * result.interval[0]:.1f}-{100 * result.interval[1]:.1f}, n=2 x 3)"
    )


def test_one_problem_has_an_interval():
    _, result = run([[RIGHT, WRONG]], problems=PROBLEMS[:1])
    assert result.interval == wilson_interval(1, 2)


def test_no_problems_is_a_sentence():
    with pytest.raises(UserError, match="no problems"):
        run([[]], problems=[], samples=1)


def test_completions_in_another_order_are_refused():
    class Shuffled(Scripted):
        def generate(self, *arguments, **settings):
            return super().generate(*arguments, **settings)[::-1]

    with pytest.raises(RuntimeError, match="prompt by prompt"):
        evaluate(Shuffled([[RIGHT], [RIGHT]]), Characters(), PROBLEMS, load_prompt("r1_zero"), r1_zero_reward_fn,
                 samples=1, **SETTINGS)  # fmt: skip


def test_json_holds_every_field():
    _, result = run([[RIGHT, WRONG], [WRONG, LOST]])
    values = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert values.keys() == Evaluation.__dataclass_fields__.keys()
    assert values["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert values["interval"] == list(result.interval)
    assert values["examples"]["right"] == [{"question": "2 + 2?", "answer": "4", "response": RIGHT}]
    assert statistics.fmean([0.5, 0.0]) == values["accuracy"]
