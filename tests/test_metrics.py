"""From a rollout batch to the numbers that are logged: weights, lengths, drift, clocks and memory, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import a5lib.metrics as metrics
from a5lib.metrics import MEMORY_PHASES, PHASES, Clock, combine_updates, rollout_metrics, throughput
from a5lib.models import load_policy
from a5lib.recorder import MemoryRecorder
from a5lib.records import METRICS, Completion, MemoryPoint, Problem, Rollout


@pytest.fixture(scope="module")
def tokenizer():
    return load_policy(device="cpu")[1]


def rollout(tokenizer, ids: list[int], *, text: str | None = None, finish: str = "stop", prompt: int = 3) -> Rollout:
    known = [i for i in ids if i < len(tokenizer)]
    text = tokenizer.decode(known, skip_special_tokens=True) if text is None else text
    completion = Completion(0, ids, text, finish, [0.0] * len(ids))
    return Rollout(Problem("?", "", "1"), [5] * prompt, completion, {}, 0.0)


def update(**values: float) -> dict[str, float]:
    names = "loss grad_norm learning_rate entropy clip_fraction kl_rollout ratio_min ratio_max skipped_sequences"
    return dict.fromkeys([*names.split(), "trained_tokens"], 0.0) | values


def test_means_over_tokens_are_weighted_by_tokens() -> None:
    long = update(entropy=1.0, clip_fraction=0.5, kl_rollout=0.1, trained_tokens=30, loss=1.0, skipped_sequences=0.5)
    short = update(entropy=3.0, clip_fraction=0.1, kl_rollout=0.5, trained_tokens=10, loss=2.0, grad_norm=4.0)
    both = combine_updates([long, short])
    assert both["entropy"] == pytest.approx(1.5), "2.0 is the mean of means"
    assert both["clip_fraction"] == pytest.approx(0.4)
    assert both["kl_rollout"] == pytest.approx(0.2)
    assert (both["loss"], both["grad_norm"], both["skipped_sequences"]) == (1.5, 2.0, 0.25)


def test_extremes_and_the_last_learning_rate() -> None:
    first = update(ratio_min=0.9, ratio_max=1.3, learning_rate=1e-4)
    second = update(ratio_min=0.8, ratio_max=1.1, learning_rate=2e-4)
    both = combine_updates([first, second])
    assert (both["ratio_min"], both["ratio_max"], both["learning_rate"]) == (0.8, 1.3, 2e-4)


def test_a_batch_without_trained_tokens_divides_by_nothing() -> None:
    assert combine_updates([update(entropy=0.0)])["entropy"] == 0.0


def test_lengths_truncation_and_shares(tokenizer) -> None:
    ids = tokenizer.encode("so 12 apples", add_special_tokens=False)
    rollouts = [rollout(tokenizer, [*ids, tokenizer.eos_token_id]), rollout(tokenizer, ids, finish="length")]
    got = rollout_metrics(tokenizer, rollouts, "r1_zero")
    assert got["response_length_mean"] == len(ids) + 0.5, "the end token counts: the policy chose it"
    assert (got["response_length_max"], got["generated_tokens"]) == (len(ids) + 1, 2 * len(ids) + 1)
    assert (got["truncated_share"], got["drifted_share"], got["phantom_tokens"]) == (0.5, 0.0, 0)


def test_M05_ids_that_encoding_would_not_give_back_are_counted(tokenizer) -> None:
    merged = tokenizer.encode(" apples", add_special_tokens=False)
    spelt = tokenizer.convert_tokens_to_ids(["Ġ", *"apples"])
    assert len(merged) < len(spelt), "the fixture needs a word that the tokenizer merges"
    rollouts = [rollout(tokenizer, merged), rollout(tokenizer, spelt)]
    assert rollouts[0].completion.text == rollouts[1].completion.text
    assert rollout_metrics(tokenizer, rollouts, "r1_zero")["drifted_share"] == 0.5


def test_M10_ids_beyond_the_tokenizer_are_counted_and_are_no_drift(tokenizer) -> None:
    ids = [*tokenizer.encode("7", add_special_tokens=False), len(tokenizer), len(tokenizer) + 5]
    got = rollout_metrics(tokenizer, [rollout(tokenizer, ids)], "r1_zero")
    assert (got["phantom_tokens"], got["drifted_share"]) == (2, 0.0)


def test_near_misses_of_the_format_are_for_the_strict_grader(tokenizer) -> None:
    near = rollout(tokenizer, [5], text="so 3 </think>\n<answer> 3 </answer>")
    strict = rollout(tokenizer, [5], text="so 3 </think> <answer> 3 </answer>")
    assert rollout_metrics(tokenizer, [near, strict], "r1_zero")["near_miss_format"] == 0.5
    assert rollout_metrics(tokenizer, [near, strict], "question_only")["near_miss_format"] == 0.0


def test_every_name_is_defined(tokenizer) -> None:
    clock = Clock(MemoryRecorder(torch.device("cpu")))
    rollouts = [rollout(tokenizer, [5])]
    names = {
        *combine_updates([update()]),
        *rollout_metrics(tokenizer, rollouts, "r1_zero"),
        *throughput({"advantages": torch.ones(1)}, rollouts, clock),
        *clock.metrics(),
    }
    assert names <= set(METRICS)


# --- clock and throughput


class SlowCard:
    """A recorder whose card is still busy for five seconds when a phase ends."""

    def __init__(self, now: list[float], device: str) -> None:
        self.now, self.device, self.started = now, torch.device(device), 0
        self.stopped: list[tuple[str, int, bool]] = []

    def start(self) -> None:
        self.started += 1

    def stop(self, phase: str, step: int = 0, *, wait: bool = True) -> MemoryPoint:
        self.stopped.append((phase, step, wait))
        self.now[0] += 5
        return MemoryPoint(phase, 100, 200)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize(("device", "size"), [("cpu", 100), ("cuda", 200)])
def test_seconds_are_those_of_finished_work(now: list[float], device: str, size: int) -> None:
    clock = Clock(SlowCard(now, device))
    for seconds in (1, 2):
        with clock("update"):
            now[0] += seconds
    with clock("reward"):
        now[0] += 0.5
    now[0] += 10
    got = clock.metrics()
    assert got["seconds_update"] == 13, "1 + 2, and 5 each that the card was still busy"
    assert (got["seconds_reward"], got["seconds_generate"], got["seconds_step"]) == (5.5, 0, 28.5)
    assert (got["memory_update"], got["memory_score"]) == (size, 0)
    assert clock.recorder.started == 3
    assert {f"seconds_{p}" for p in PHASES} | {f"memory_{p}" for p in MEMORY_PHASES} < set(got)


def test_a_phase_that_fails_is_ended_without_waiting_for_the_card(now: list[float]) -> None:
    clock = Clock(SlowCard(now, "cuda"), step=7)
    with clock("generate"):
        pass
    with pytest.raises(torch.OutOfMemoryError), clock("update"):
        raise torch.OutOfMemoryError
    assert clock.recorder.stopped == [("generate", 7, True), ("update", 7, False)]
    assert clock.seconds["update"] == 0


def test_update_throughput_counts_the_sequences_that_were_trained_on(now, tokenizer) -> None:
    rollouts = [rollout(tokenizer, [5] * 4, prompt=6), rollout(tokenizer, [5] * 10, prompt=6)]
    clock = Clock(MemoryRecorder(torch.device("cpu")))
    clock.seconds |= {"generate": 2.0, "score": 1.0, "update": 4.0}
    got = throughput({"advantages": torch.tensor([0.5, 0.0])}, rollouts, clock)
    assert got == {"generation_tokens_per_second": 7.0, "update_tokens_per_second": 2.0}
    clock.seconds |= {"generate": 0.0, "score": 0.0, "update": 0.0}
    assert throughput({"advantages": torch.zeros(2)}, rollouts, clock)["update_tokens_per_second"] == 0
