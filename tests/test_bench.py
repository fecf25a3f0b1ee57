"""What `a5 bench toy` measures: both ways of generating do the same job on the same prompts."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
import torch
from rich.console import Console

import a5lib.bench as module
from a5lib.bench import GenerationTimes, bench, compare_generation, library_generate
from a5lib.course import load_algo
from a5lib.errors import UserError
from a5lib.models import encode_prompt, load_policy
from a5lib.prompts import load_prompt
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.toy_problems import toy_problems


@pytest.fixture(scope="module")
def toy():
    return load_policy(device="cpu")


def test_E02_both_ways_give_the_same_greedy_tokens_on_every_row(toy) -> None:
    times = compare_generation(*toy, prompts=4, group_size=2, max_tokens=80, rounds=1)
    assert (times.same_greedy, times.rows) == (8, 8), "the two ways do not do the same job, so their times mean nothing"
    assert len(times.lean_seconds) == len(times.library_seconds) == len(times.lean_tokens) == 1
    assert min(times.lean_tokens + times.library_tokens) > 8
    assert times.speedup > 0


def prompt_ids(tokenizer, count: int) -> list[list[int]]:
    template = load_prompt("r1_zero")
    return [encode_prompt(tokenizer, template.render(p.question)) for p in toy_problems("validation", count)]


def test_the_librarys_responses_end_at_the_stop_string(toy) -> None:
    model, tokenizer = toy
    rows = library_generate(model, tokenizer, prompt_ids(tokenizer, 6), 1, 80, 0.0, ("</answer>",), 0)
    texts = [tokenizer.decode(row) for row in rows]
    stopped = [text for text in texts if "</answer>" in text]
    assert stopped, "the toy model finishes some of these responses"
    assert all(text.endswith("</answer>") for text in stopped)
    assert len({len(row) for row in rows}) > 1, "shorter rows are cut at their own end, not at the longest row's"
    unstopped = library_generate(model, tokenizer, prompt_ids(tokenizer, 6), 1, 80, 0.0, (), 0)
    assert all(b[: len(a)] == a for a, b in zip(rows, unstopped, strict=True))


def test_a_seed_repeats_the_librarys_samples_and_the_end_token_is_kept(toy) -> None:
    model, tokenizer = toy
    first, again, other = (
        library_generate(model, tokenizer, prompt_ids(tokenizer, 2), 4, 60, 1.0, (), seed) for seed in (0, 0, 1)
    )
    assert first == again != other
    ended = [row for row in first if tokenizer.eos_token_id in row]
    assert ended
    assert all(row.index(tokenizer.eos_token_id) == len(row) - 1 for row in ended)
    assert all(tokenizer.pad_token_id not in row for row in first)


def test_a_stop_string_is_found_where_the_lean_loop_finds_it(toy) -> None:
    model, tokenizer = toy
    backend = TransformersRollouts(model, tokenizer)
    backend.sync((), 0)
    ids = prompt_ids(tokenizer, 3)
    lean = backend.generate(ids, n=1, max_tokens=40, temperature=0.0, stop=(" and",), seed=0)
    assert library_generate(model, tokenizer, ids, 1, 40, 0.0, (" and",), 0) == [c.token_ids for c in lean]


def test_the_speedup_is_of_median_rates() -> None:
    times = GenerationTimes([1.0, 2.0, 10.0], [4.0, 4.0, 1.0], [100, 100, 100], [100, 200, 100], 3, 3)
    assert times.speedup == 50 / 50  # medians of 100, 50, 10 and of 25, 50, 100


def small_bench(**options) -> str:
    out = io.StringIO()
    bench(load_algo("solutions"), **options, prompts=2, group_size=2, console=Console(file=out, width=100))
    return out.getvalue()


def test_bench_prints_speeds_seconds_and_memory_of_one_run() -> None:
    text = " ".join(small_bench(steps=2, rounds=1).split())
    for words in ("lean loop", "transformers.generate", "seconds generate", "seconds reward", "seconds score",
                  "seconds update", "seconds a step", "generation tokens per second", "update tokens per second",
                  "2 x 2 responses", "1 steps after a warm-up", torch.__version__):  # fmt: skip
        assert words in text, f"{words}\n{text}"
    assert re.search(r"the same tokens on 4 of 4 rows", text)
    assert re.search(r"memory \(process, resident\)\D+[1-9]\d+ MiB", text), "in MiB, of a process that holds torch"


def test_too_few_steps_or_rounds_are_refused_before_any_work(monkeypatch) -> None:
    monkeypatch.setattr(module, "load_policy", lambda: pytest.fail("work was done"))
    with pytest.raises(UserError, match="--steps is 1; it must be at least 2"):
        bench(None, steps=1)
    with pytest.raises(UserError, match="--rounds is 0"):
        bench(None, rounds=0)


def test_a_run_that_was_stopped_has_no_table(monkeypatch) -> None:
    train = module.train
    monkeypatch.setattr(module, "train", lambda *a, **k: dataclasses.replace(train(*a, **k), finished=False))
    with pytest.raises(KeyboardInterrupt):
        small_bench(steps=2, rounds=1)
