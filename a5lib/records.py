"""The records that layers hand to each other: a problem, a completion, a rollout, and the names of the metrics.

Plain data, no behaviour beyond what reads it. `METRICS` is the one place where a logged number is defined; the run log
refuses a name that is not in it, and the README's table is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A word problem as in GSM8K: the question, the rationale, and the text after `####` (commas removed)."""

    question: str
    rationale: str
    answer: str


@dataclass(frozen=True)
class Completion:
    """One sampled response, exactly as the engine sampled it.

    `token_ids` holds the sampled ids, the end-of-sequence token included when it was sampled; `log_probs` holds one
    float32 log-probability per id under the sampling policy at the sampling temperature; `text` is the decoded
    response with the stop string kept. `finish_reason` is "stop" (stop string or end-of-sequence) or "length".
    """

    prompt_index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    log_probs: list[float]


@dataclass(frozen=True)
class Rollout:
    """A completion with the problem it answers and what it earned."""

    problem: Problem
    prompt_ids: list[int]
    completion: Completion
    rewards: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0


@dataclass(frozen=True)
class MemoryPoint:
    """Memory of a phase, in bytes.

    `host_bytes` is the process's resident set at the end. Of the card, each the most since the phase began:
    `card_peak_bytes` what torch's allocator has handed out, `card_reserved_bytes` what it has taken from the card for
    that (both 0 on the CPU), `card_used_bytes` the use of the whole card by all programs, as seen about twenty times a
    second (None where nothing can be asked).
    """

    phase: str
    host_bytes: int
    card_peak_bytes: int
    card_reserved_bytes: int = 0
    card_used_bytes: int | None = None


@dataclass(frozen=True)
class MemorySample:
    """A line of memory.jsonl: the most of each, in bytes, since the sample before it. A phase has at most 200 of them.

    `t` is in seconds since the run began. `allocated` is what torch's allocator has handed out on the card, `reserved`
    what it has taken from the card for that (both 0 on the CPU), `card` the use of the whole card by all programs (None
    where nothing can be asked), `host` the process's resident set.
    """

    t: float
    step: int
    phase: str
    allocated: int
    reserved: int
    card: int | None
    host: int


# name -> definition. One line of metrics.jsonl holds these for one rollout batch.
METRICS: dict[str, str] = {
    "step": "Number of the rollout batch, from 1.",
    "optimizer_steps": "Optimizer steps taken since the start of the run.",
    "learning_rate": "Learning rate of the last optimizer step.",
    "loss": "Negated objective, mean over the optimizer steps; its size says little by itself.",
    "grad_norm": "Global L2 norm of the gradient before clipping, mean over the optimizer steps.",
    "entropy": "Mean over trained response tokens of the entropy of the next-token distribution, in nats.",
    "clip_fraction": "Share of trained response tokens on which clipping changed the loss (GSPO: all of a sequence).",
    "ratio_min": "Smallest importance ratio, new over old, on a trained response token (1 where none is used).",
    "ratio_max": "Largest importance ratio on a trained response token (1 where none is used).",
    "kl_rollout": "Estimate of KL(rollout policy || current policy) per trained response token: the mean of "
    "exp(d) - 1 - d, with d = current minus sampling log-probability.",
    "mismatch_mean": "Mean over trained response tokens of the absolute difference between the trainer's "
    "log-probability before the first update and that of generation, in nats; this and the next three only with vLLM "
    "or `--mismatch-correction tis`, and where a response was trained on.",
    "mismatch_max": "The largest such difference.",
    "mismatch_ess": "Effective sample size of the weights w = exp(trainer - generation): (sum w)^2 / sum w^2, divided "
    "by the number of tokens; 1 where both agree.",
    "mismatch_capped": "Share of trained response tokens whose weight is above 2, where `--mismatch-correction tis` "
    "cuts it.",
    "reward_mean": "Mean reward of the rollout batch (the answer's correctness, 0 or 1).",
    "reward_std": "Population standard deviation of the reward over the rollout batch.",
    "format_reward_mean": "Share of responses in the required format; logged, never paid.",
    "format_reward_std": "Population standard deviation of the format reward.",
    "answer_reward_mean": "Share of responses whose answer is right.",
    "answer_reward_std": "Population standard deviation of the answer reward.",
    "reward_histogram": "Counts of the reward in ten equal bins from 0 to 1, the last one closed.",
    "format_reward_histogram": "The same for the format reward.",
    "answer_reward_histogram": "The same for the answer reward.",
    "near_miss_format": "Share of responses that only the lenient format accepts.",
    "zero_variance_groups": "Share of groups whose rewards are all equal; with a mean baseline they carry no gradient.",
    "skipped_sequences": "Share of sequences left out of the updates because their advantage is exactly 0.",
    "response_length_mean": "Mean response length in tokens.",
    "response_length_max": "Longest response in tokens.",
    "truncated_share": "Share of responses cut off at the longest length.",
    "drifted_share": "Share of responses whose text, encoded again, gives other tokens than were sampled.",
    "phantom_tokens": "Sampled token ids that the tokenizer does not know.",
    "generated_tokens": "Response tokens sampled in this rollout batch.",
    "generation_tokens_per_second": "Response tokens sampled per second of `seconds_generate`.",
    "update_tokens_per_second": "Prompt and response tokens of trained sequences per second of scoring and updating.",
    "seconds_generate": "Seconds spent generating; with vLLM the hand-over as well: the weights' way to it, their "
    "verification, waking and sleep.",
    "seconds_reward": "Seconds spent grading.",
    "seconds_score": "Seconds spent scoring old log-probabilities.",
    "seconds_update": "Seconds spent in forward, backward and optimizer.",
    "seconds_eval": "Seconds spent validating.",
    "seconds_save": "Seconds spent on the checkpoint after the rollout batch before this one.",
    "seconds_step": "Seconds for the whole rollout batch.",
    "memory_generate": "Peak card memory while generating, in bytes; on the CPU the process's resident set afterwards.",
    "memory_score": "The same for scoring.",
    "memory_update": "The same for the updates.",
}
