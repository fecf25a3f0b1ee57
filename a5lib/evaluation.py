"""Accuracy with an interval, pass@k, outcome classes and lengths of a policy on a set of problems.

This file asks a backend for completions and grades them. It does not know the model, the run folder or training.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from a5lib.errors import UserError
from a5lib.grading import outcome
from a5lib.models import encode_prompt
from a5lib.prompts import PromptTemplate
from a5lib.records import Problem
from a5lib.rollouts import RolloutBackend

OUTCOMES = ("right", "wrong", "malformed")
EXAMPLES_PER_OUTCOME = 3
Z95 = statistics.NormalDist().inv_cdf(0.975)  # 1.96: 95 % of a normal distribution lies within this many deviations


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a share from n independent trials (Wilson 1927).

    It stays within [0, 1] and has a width even at 0 and n successes, where mean +- 1.96 standard errors has none.
    Taught in notebook 01.

    >>> [round(x, 4) for x in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials: expected at least one trial and 0 to n successes.")
    share, z2 = successes / n, Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def clustered_interval(problem_means: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean over problems when each problem has several samples.

    The samples of one problem are alike: an easy problem is mostly right, a hard one mostly wrong. To count each of
    them as an independent trial would make the interval too narrow, up to the root of the samples per problem. The
    problems are what was drawn independently, so this is a t interval over their means, cut to [0, 1]. Where all means
    are equal their spread says nothing, and the Wilson interval of that many single trials is given. Taught in
    notebook 01.

    Args:
        problem_means: share of right samples of each problem, at least two problems.

    >>> [round(x, 3) for x in clustered_interval([0.0, 0.25, 0.5, 0.5, 1.0, 0.75])]
    [0.129, 0.871]
    """
    n = len(problem_means)
    if n < 2:
        raise ValueError(f"{n} problems: an interval over problems needs at least two.")
    mean, deviation = statistics.fmean(problem_means), statistics.stdev(problem_means)
    if deviation == 0:
        return wilson_interval(mean * n, n)
    half = _t_quantile_975(n - 1) * deviation / math.sqrt(n)
    return max(0.0, mean - half), min(1.0, mean + half)


def _t_quantile_975(degrees: int) -> float:
    """97.5 % point of Student's t: exact for 1 and 2 degrees of freedom, else the expansion of Abramowitz and Stegun
    26.7.5, right to three digits.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z, d = Z95, degrees
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * d**4)
    )


def paired_bootstrap(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Difference of two methods and its 95 % interval, over seeds and problems at once.

    Each resample draws seeds with replacement and problems with replacement, the same ones for both methods, and takes
    the difference of the means: what the two share (hard problems, a lucky seed) cancels. The interval is the
    percentile interval of Efron and Tibshirani 1993, chapter 13. With few seeds it is too narrow: the percentile method
    assumes that the seeds drawn represent all seeds. Taught in notebook 12.

    Args:
        ours, theirs: [seeds][problems], such as the share of right samples; seeds and problems in the same order.
        resamples: draws.
        seed: of the draws.

    Returns:
        (mean of ours minus theirs, lower end, upper end).

    Raises:
        ValueError: the two do not have the same seeds and problems.

    >>> paired_bootstrap([[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], resamples=10)
    (1.0, 1.0, 1.0)
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)  # [S, P]
    if a.ndim != 2 or a.shape != b.shape or a.size == 0:
        raise ValueError(f"Got results of shape {a.shape} and {b.shape}; give one row a seed, the same for both.")
    difference = a - b  # [S, P]
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for i in range(resamples):
        seeds = generator.integers(a.shape[0], size=a.shape[0])
        problems = generator.integers(a.shape[1], size=a.shape[1])
        means[i] = difference[np.ix_(seeds, problems)].mean()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(difference.mean()), float(low), float(high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from n of which c are right, is right.

    The unbiased estimate of Chen et al. 2021, equation 1: 1 - C(n-c, k) / C(n, k). Taught in notebook 01.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} right among {n} samples: expected 1 <= k <= n and 0 <= c <= n.")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Example:
    """One graded response, to read."""

    question: str
    answer: str
    response: str


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. Shares are of all responses, problems times samples."""

    problems: int
    samples: int
    temperature: float
    accuracy: float
    """Mean over problems of the share of right samples."""
    interval: tuple[float, float]
    """95 % confidence interval of the accuracy: over problems, or Wilson's for one sample a problem or one problem."""
    pass_at_k: dict[int, float]
    """k -> mean over problems of the unbiased pass@k, for the powers of two up to `samples`."""
    counts: dict[str, int]
    """Responses that are right, wrong (well formed, wrong answer) and malformed."""
    format_share: float
    """Share of responses in the required format."""
    response_length_mean: float
    """Mean response length in tokens."""
    response_length_max: int
    """Longest response in tokens."""
    truncated_share: float
    """Share of responses cut off at the longest length."""
    examples: dict[str, list[Example]]
    """The first few responses of each class."""
    right_per_problem: list[int] = field(default_factory=list)
    """Right samples of each problem, in order: two runs on the same problems can be compared problem by problem."""

    def describe(self) -> str:
        """Accuracy, interval and number of problems in a few words.

        >>> Evaluation(256, 1, 1.0, 0.3125, (0.2704, 0.3568), {}, {}, 1.0, 1.0, 1, 0.0, {}).describe()
        'accuracy 31.2 % (27.0-35.7, n=256)'
        """
        low, high = self.interval
        number = f"n={self.problems}" + (f" x {self.samples}" if self.samples > 1 else "")
        return f"accuracy {100 * self.accuracy:.1f} % ({100 * low:.1f}-{100 * high:.1f}, {number})"

    def to_json(self) -> dict[str, Any]:
        """Every field as JSON values; the k of pass@k become text."""
        values = dataclasses.asdict(self)
        return values | {
            "interval": list(self.interval),
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
        }


def evaluate(
    backend: RolloutBackend,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    template: PromptTemplate,
    reward_fn: Callable[[str, object], dict[str, float]],
    *,
    max_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    samples: int = 1,
    seed: int,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Sample responses to the problems and grade them; for a greedy evaluation temperature 0 and one sample.

    Near-equal scores can change the text of a greedy response with the batch size, so compare accuracies within their
    intervals, not texts. Taught in notebook 01.

    Args:
        backend: generates; already in step with the weights.
        samples: responses to each problem.
        progress: called with the number of responses just generated.

    Raises:
        UserError: there are no problems.
    """
    if not problems:
        raise UserError("There are no problems to evaluate; give at least one validation problem.")
    completions = backend.generate(
        [encode_prompt(tokenizer, template.render(p.question)) for p in problems],
        n=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=template.stop,
        seed=seed,
        progress=progress,
    )
    if [c.prompt_index for c in completions] != [i for i in range(len(problems)) for _ in range(samples)]:
        raise RuntimeError(f"The backend did not return {samples} completions of each prompt, prompt by prompt.")
    right = [0] * len(problems)
    counts = dict.fromkeys(OUTCOMES, 0)
    examples: dict[str, list[Example]] = {name: [] for name in OUTCOMES}
    formatted = 0
    for completion in completions:
        problem = problems[completion.prompt_index]
        rewards = reward_fn(completion.text, problem.answer)
        kind = outcome(rewards)
        right[completion.prompt_index] += kind == "right"
        counts[kind] += 1
        formatted += rewards["format_reward"] > 0
        if len(examples[kind]) < EXAMPLES_PER_OUTCOME:
            examples[kind].append(Example(problem.question, problem.answer, completion.text))

    means = [c / samples for c in right]
    single = samples == 1 or len(problems) == 1  # the samples of one problem are independent trials of that problem
    lengths = [len(c.token_ids) for c in completions]
    return Evaluation(
        problems=len(problems),
        samples=samples,
        temperature=temperature,
        accuracy=statistics.fmean(means),
        interval=wilson_interval(sum(right), len(completions)) if single else clustered_interval(means),
        pass_at_k={
            k: statistics.fmean(pass_at_k(samples, c, k) for c in right)
            for k in (2**i for i in range(samples.bit_length()))
        },
        counts=counts,
        format_share=formatted / len(completions),
        response_length_mean=statistics.fmean(lengths),
        response_length_max=max(lengths),
        truncated_share=sum(c.finish_reason == "length" for c in completions) / len(completions),
        examples=examples,
        right_per_problem=right,
    )
