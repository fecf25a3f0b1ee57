"""From what happened in one rollout batch to the numbers that are logged. `a5lib.records.METRICS` defines each of
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from a5lib.grading import near_miss_format
from a5lib.recorder import MemoryRecorder
from a5lib.records import Rollout

PHASES = ("generate", "reward", "score", "update", "eval", "save")
MEMORY_PHASES = ("generate", "score", "update")


class Clock:
    """Seconds and memory of each phase of one rollout batch: `with clock("update"): ...`.

    Args:
        recorder: measures the memory.
        step: number of the rollout batch, which the recorder's samples carry.
    """

    def __init__(self, recorder: MemoryRecorder, step: int = 0) -> None:
        self.recorder = recorder
        self.step = step
        self.began = time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.memory = dict.fromkeys(MEMORY_PHASES, 0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.recorder.start()
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            self.recorder.stop(phase, self.step, wait=False)  # its samples show how the memory became full
            raise
        point = self.recorder.stop(phase, self.step)  # waits for the card, so the seconds are those of finished work
        self.seconds[phase] += time.perf_counter() - started
        if phase in self.memory:
            on_card = self.recorder.device.type == "cuda"
            self.memory[phase] = point.card_peak_bytes if on_card else point.host_bytes

    def metrics(self) -> dict[str, float]:
        """`seconds_*` and `memory_*` so far, and `seconds_step` since the clock was made."""
        return {
            **{f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()},
            **{f"memory_{phase}": size for phase, size in self.memory.items()},
            "seconds_step": time.perf_counter() - self.began,
        }


def combine_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One line from the optimizer steps of a rollout batch.

    Means over tokens are weighted by each step's trained tokens; a batch without any has entropy, clip fraction and KL
    0.

    >>> one = dict(loss=1.0, grad_norm=2.0, learning_rate=0.1, entropy=1.0, clip_fraction=0.0, kl_rollout=0.0,
    ...            ratio_min=0.9, ratio_max=1.0, skipped_sequences=0.5, trained_tokens=30)
    >>> two = dict(one, loss=3.0, entropy=3.0, ratio_min=0.8, trained_tokens=10)
    >>> both = combine_updates([one, two])
    >>> both["loss"], both["entropy"], both["ratio_min"]
    (2.0, 1.5, 0.8)
    """
    tokens = sum(u["trained_tokens"] for u in updates)
    combined = {
        name: sum(u[name] for u in updates) / len(updates) for name in ("loss", "grad_norm", "skipped_sequences")
    }
    for name in ("entropy", "clip_fraction", "kl_rollout"):
        combined[name] = sum(u[name] * u["trained_tokens"] for u in updates) / max(tokens, 1)
    combined["ratio_min"] = min(u["ratio_min"] for u in updates)
    combined["ratio_max"] = max(u["ratio_max"] for u in updates)
    combined["learning_rate"] = updates[-1]["learning_rate"]
    return combined


def rollout_metrics(tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[Rollout], grader: str) -> dict[str, Any]:
    """Lengths, truncation, drift under re-encoding, unknown ids, and the share of near-miss formats."""
    completions = [r.completion for r in rollouts]
    lengths = [len(c.token_ids) for c in completions]
    known = len(tokenizer)
    encoded = tokenizer([c.text for c in completions], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    sampled = [[i for i in c.token_ids if i not in special and i < known] for c in completions]
    near_miss = sum(near_miss_format(c.text) for c in completions) if grader == "r1_zero" else 0
    count = len(rollouts)
    return {
        "near_miss_format": near_miss / count,
        "response_length_mean": sum(lengths) / count,
        "response_length_max": max(lengths),
        "truncated_share": sum(c.finish_reason == "length" for c in completions) / count,
        "drifted_share": sum(a != b for a, b in zip(encoded, sampled, strict=True)) / count,
        "phantom_tokens": sum(i >= known for c in completions for i in c.token_ids),
        "generated_tokens": sum(lengths),
    }


def throughput(batch: dict[str, Tensor], rollouts: Sequence[Rollout], clock: Clock) -> dict[str, float]:
    """Tokens per second of generation, vLLM's hand-over included, and of scoring and updating the trained sequences."""
    generated = sum(len(r.completion.token_ids) for r in rollouts)
    trained = sum(
        len(r.prompt_ids) + len(r.completion.token_ids)
        for r, advantage in zip(rollouts, batch["advantages"].tolist(), strict=True)
        if advantage != 0
    )
    update_seconds = clock.seconds["score"] + clock.seconds["update"]
    return {
        "generation_tokens_per_second": generated / max(clock.seconds["generate"], 1e-9),
        "update_tokens_per_second": trained / max(update_seconds, 1e-9),
    }
