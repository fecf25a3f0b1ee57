"""`a5 bench toy`: what the toy model does on this machine, every figure from one run.

Generation: our lean loop and `model.generate` on the same prompts, in turns, medians of several rounds; at temperature
0 both must give the same tokens. Update: the loop itself for a few steps, seconds by phase and peak memory from its
own metrics.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from a5lib.config import TrainConfig
from a5lib.errors import UserError
from a5lib.metrics import PHASES
from a5lib.models import encode_prompt, load_policy
from a5lib.prompts import load_prompt
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.toy_problems import toy_problems
from a5lib.training import train


@dataclass(frozen=True)
class GenerationTimes:
    """Seconds and response tokens of each round for both ways, and on how many rows greedy tokens agree."""

    lean_seconds: list[float]
    library_seconds: list[float]
    lean_tokens: list[int]
    library_tokens: list[int]
    same_greedy: int
    rows: int

    @property
    def speedup(self) -> float:
        """Median tokens per second of the lean loop over that of `model.generate`."""
        return _rate(self.lean_tokens, self.lean_seconds) / _rate(self.library_tokens, self.library_seconds)


class _StopAfter(StoppingCriteria):
    """Ends each row whose decoded tail holds a stop string: what `generate` needs to stop where the lean loop does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], width: int) -> None:
        self.tokenizer, self.stop, self.width = tokenizer, stop, width

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        tails = self.tokenizer.batch_decode(input_ids[:, self.width :][:, -12:])
        return torch.tensor([any(s in tail for s in self.stop) for tail in tails], device=input_ids.device)


def compare_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: int = 16,
    group_size: int = 8,
    max_tokens: int = 96,
    rounds: int = 5,
) -> GenerationTimes:
    """Time both ways in turns on the same prompts at temperature 1, after a warm-up each; compare greedy tokens."""
    template = load_prompt("r1_zero")
    ids = [encode_prompt(tokenizer, template.render(p.question)) for p in toy_problems("validation", prompts)]
    backend = TransformersRollouts(model, tokenizer, prompts * group_size)
    backend.sync(model.named_parameters(), 0)

    def lean(temperature: float, seed: int) -> list[list[int]]:
        completions = backend.generate(
            ids, n=group_size, max_tokens=max_tokens, temperature=temperature, stop=template.stop, seed=seed
        )
        return [c.token_ids for c in completions]

    def library(temperature: float, seed: int) -> list[list[int]]:
        return library_generate(model, tokenizer, ids, group_size, max_tokens, temperature, template.stop, seed)

    same = sum(a == b for a, b in zip(lean(0.0, 0), library(0.0, 0), strict=True))
    seconds: dict[str, list[float]] = {"lean": [], "library": []}
    tokens: dict[str, list[int]] = {"lean": [], "library": []}
    ways: list[tuple[str, Callable[[float, int], list[list[int]]]]] = [("lean", lean), ("library", library)]
    for seed in range(rounds):
        for name, generate in ways:
            started = time.perf_counter()
            responses = generate(1.0, seed)
            seconds[name].append(time.perf_counter() - started)
            tokens[name].append(sum(len(r) for r in responses))
    return GenerationTimes(
        seconds["lean"], seconds["library"], tokens["lean"], tokens["library"], same, prompts * group_size
    )


@torch.inference_mode()
def library_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    n: int,
    max_tokens: int,
    temperature: float,
    stop: Sequence[str],
    seed: int,
) -> list[list[int]]:
    """The same job with `model.generate`: sampled ids, one list a completion, cut after the end of each.

    The tokenizer's padding is a token of its own, which never ends a response.
    """
    torch.manual_seed(seed)
    rows = [p for p in prompts for _ in range(n)]
    width = max(len(p) for p in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in rows], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False} if temperature == 0 else {
        "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0
    }  # fmt: skip
    out = cast(Any, model).generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList([_StopAfter(tokenizer, stop, width)]),
        **sampling,
    )
    return [row[: row.index(pad)] if pad in row else row for row in out[:, width:].tolist()]


def bench(
    algo: Any,
    *,
    steps: int = 5,
    rounds: int = 5,
    prompts: int = 16,
    group_size: int = 8,
    console: Console | None = None,
) -> None:
    """Run both parts and print their tables.

    Args:
        algo: the exercise functions (see `a5lib.course.load_algo`).
        steps: training steps, at least 2; the first is a warm-up.
        rounds: rounds of generation for each way.
        prompts: prompts in a batch.
        group_size: responses to each prompt.
        console: where to print.

    Raises:
        UserError: too few steps or rounds.
    """
    for name, value, least in (("steps", steps, 2), ("rounds", rounds, 1)):
        if value < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}.")
    console = console or Console()
    model, tokenizer = load_policy()
    times = compare_generation(model, tokenizer, prompts=prompts, group_size=group_size, rounds=rounds)

    table = Table(title=f"Generation: {prompts} x {group_size} responses, temperature 1, median (min-max) of {rounds}")
    for column in ("", "seconds", "response tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds, tokens in (
        ("lean loop", times.lean_seconds, times.lean_tokens),
        ("transformers.generate", times.library_seconds, times.library_tokens),
    ):
        table.add_row(name, _spread(seconds, "{:.2f}"), f"{_rate(tokens, seconds):.0f}")
    console.print(table)
    console.print(f"The lean loop is {times.speedup:.2f} times as fast; at temperature 0 it gives the same tokens on "
                  f"{times.same_greedy} of {times.rows} rows.")  # fmt: skip

    metrics: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            num_steps=steps, rollout_batch_size=prompts * group_size, group_size=group_size, val_examples=8,
            eval_samples=1, eval_every=0, save_every=0, save_final=False, log_rollouts_every=0,
            output_dir=Path(folder) / "run",
        )  # fmt: skip
        if not train(config, algo, on_step=metrics.append, say=lambda sentence: None).finished:
            raise KeyboardInterrupt  # the loop took it as a wish to stop after the step
    warm = metrics[1:]
    table = Table(
        title=f"Training: {prompts} x {group_size} responses, median (min-max) of {len(warm)} steps after a warm-up"
    )
    table.add_column("")
    table.add_column("", justify="right")
    for phase in PHASES[:4]:
        table.add_row(f"seconds {phase}", _spread([m[f"seconds_{phase}"] for m in warm], "{:.3f}"))
    table.add_row("seconds a step", _spread([m["seconds_step"] for m in warm], "{:.2f}"))
    for name in ("generation_tokens_per_second", "update_tokens_per_second"):
        table.add_row(name.replace("_", " "), _spread([m[name] for m in warm], "{:.0f}"))
    peak = max(max(m[f"memory_{phase}"] for phase in ("generate", "score", "update")) for m in metrics)
    kind = "card, peak allocated" if model.device.type == "cuda" else "process, resident"
    table.add_row(f"memory ({kind})", f"{peak / 2**20:.0f} MiB")
    console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, device {model.device}.")


def _rate(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    return statistics.median(t / s for t, s in zip(tokens, seconds, strict=True))


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = (form.format(v) for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"
