"""A real vLLM on a card: what the CPU cannot show. Level-2 sleep, recorded graphs after it, and the card's memory.

Run on a machine with a card: `A5_VLLM_PYTHON=PATH python -m pytest tests/vllm/test_card.py`.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Iterator

import pytest
import torch

from a5lib.engines.plan import VLLM_ASLEEP
from a5lib.models import TOY_MODEL_DIR, load_policy
from a5lib.records import Completion
from a5lib.rollouts.vllm_backend import VllmColocated
from a5lib.rollouts.worker_process import group_members
from tests.vllm.test_real_engine import STOP, Pair, perturb, prompts, reference_log_probs, settings

__all__ = ["prompts"]  # a fixture

PYTHON = os.environ.get("A5_VLLM_PYTHON")
GIB = 2**30

pytestmark = [
    pytest.mark.skipif(PYTHON is None or not torch.cuda.is_available(), reason="needs a card and a vLLM for it"),
    pytest.mark.timeout(300),
]


def card_free() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module")
def free_before() -> int:
    """Of the card, with this process's own context on it."""
    torch.zeros(1, device="cuda")
    return card_free()


@pytest.fixture(scope="module")
def toy(free_before: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The toy model in bfloat16, compiled and with recorded graphs, in a share of the card."""
    model, tokenizer = load_policy("toy", device="cpu", dtype="bfloat16")
    total = torch.cuda.get_device_properties(0).total_memory
    share = settings(
        TOY_MODEL_DIR, dtype="bfloat16", max_model_len=256, kv_cache_bytes=2 * GIB, memory_share=4 * GIB / total,
    )  # fmt: skip
    with VllmColocated(
        model.named_parameters(), share, tmp_path_factory.mktemp("card"), python=PYTHON, device=torch.device("cuda", 0)
    ) as vllm:
        yield Pair(model.eval(), tokenizer, vllm)


def greedy(toy: Pair, prompts: list[list[int]]) -> list[Completion]:
    return toy.vllm.generate(prompts, n=1, max_tokens=60, temperature=0.0, stop=STOP, seed=0)


def test_V01_after_sleep_and_sync_the_greedy_text_is_that_of_before(toy: Pair, prompts: list[list[int]]) -> None:
    toy.sync()
    before = greedy(toy, prompts)
    toy.vllm.release()
    with pytest.raises(RuntimeError, match="before sync"):
        greedy(toy, prompts)
    toy.sync()
    assert [c.token_ids for c in greedy(toy, prompts)] == [c.token_ids for c in before]
    assert len({c.text for c in before}) > len(before) // 2, "text, and not '!!!!'"


def test_V02_every_update_arrives_and_the_log_probs_are_those_of_the_new_weights(
    toy: Pair, prompts: list[list[int]]
) -> None:
    def difference(model: torch.nn.Module, completions: list[Completion]) -> float:
        wide = copy.deepcopy(model).float()
        return statistics.fmean(
            abs(ours - theirs)
            for c in completions
            for ours, theirs in zip(
                c.log_probs, reference_log_probs(wide, prompts[c.prompt_index], c, 1.0), strict=True
            )
        )

    for update in range(3):
        stale = copy.deepcopy(toy.model)
        perturb(toy.model, seed=update, size=0.1)
        toy.sync()
        sampled = toy.vllm.generate(prompts, n=4, max_tokens=40, temperature=1.0, stop=STOP, seed=update)
        fresh = difference(toy.model, sampled)
        assert fresh < 0.05
        assert difference(stale, sampled) > 2 * fresh, "the update was too small to be seen"


def test_V05_the_card_is_free_while_the_engine_sleeps(toy: Pair, prompts: list[list[int]], free_before: int) -> None:
    toy.sync()
    assert free_before - card_free() > 2 * GIB, "the cache of the engine that is awake"
    toy.vllm.release()
    assert free_before - card_free() < VLLM_ASLEEP
    ballast = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    del ballast  # torch keeps its memory until the engine wakes
    toy.sync()
    assert torch.cuda.memory_reserved() < GIB
    greedy(toy, prompts)


def test_V12_the_stop_string_is_kept(toy: Pair, prompts: list[list[int]]) -> None:
    toy.sync()
    sampled = toy.vllm.generate(prompts, n=8, max_tokens=80, temperature=1.0, stop=STOP, seed=3)
    stopped = [c.text for c in sampled if c.finish_reason == "stop" and STOP[0] in c.text]
    assert stopped
    assert all(text.endswith(STOP[0]) and text.count(STOP[0]) == 1 for text in stopped)


def test_nothing_is_left_on_the_card_or_in_the_system(toy: Pair, free_before: int) -> None:
    """The last test of this file: it ends the engine."""
    toy.sync()
    assert toy.vllm._worker is not None
    group = toy.vllm._worker.process.pid
    toy.vllm.close()
    torch.cuda.empty_cache()
    deadline = time.monotonic() + 10
    while (left := free_before - card_free()) > GIB // 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left <= GIB // 8
    assert not group_members(group)
