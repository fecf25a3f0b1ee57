"""The command line: `a5 train`, `a5 evaluate`, `a5 plot` and the rest, each a dataclass or function that tyro turns
into flags.

Bad input ends in one sentence on standard error and exit code 2, without a traceback. This module holds no logic of
its own beyond reading flags, calling the layer below and printing what comes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from a5lib.config import TOY, BackendName, EngineName, OptimizerState, TrainConfig, nearest, resolve
from a5lib.errors import UserError
from a5lib.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from a5lib.evaluation import Evaluation

console = Console()


@dataclass(frozen=True)
class TrainFlags(TrainConfig):
    """Train a policy with GRPO or one of its variants, and leave a run folder."""

    resume: Path | None = None
    """Continue the run in this folder; only flags that may change are taken beside it."""


@dataclass(frozen=True)
class EvaluateFlags:
    """Ask a model the problems of a set, grade its responses, and show what it gets right, wrong and malformed."""

    model: str = TOY
    """`toy`, a folder with a Hugging Face model (such as RUN/model), or an id."""
    val_file: Path | None = None
    """Problems, GSM8K JSONL (default: the embedded validation problems)."""
    val_examples: int = 256
    """Problems to use."""
    prompt: str = "r1_zero"
    """`r1_zero`, `r1_zero_three_shot`, `question_only`, or a text file that contains `{question}`."""
    grader: Literal["auto", "r1_zero", "r1_zero_lenient", "question_only"] = "auto"
    """Reward function: `auto` is the one that belongs to the named prompt."""
    samples: int = 1
    """Responses to each problem; pass@k is given for powers of two up to it."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Nucleus sampling mass."""
    max_tokens: int | None = None
    """Longest response in tokens (toy 80, otherwise 512 or what the context leaves)."""
    seed: int = 0
    """Seed of the sampling."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters."""
    attention_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of transformers."""
    trust_remote_code: bool = False
    """Allow Python code that a model repository ships to run; leave it off."""
    generation_batch_size: int | None = None
    """Responses decoded side by side (toy 256, otherwise 32)."""
    show: int = 2
    """Examples to print of each outcome class."""
    output: Path | None = None
    """Write the result as JSON to this file too."""


def train_command(flags: TrainFlags) -> int:
    from a5lib.course.exercises import load_algo, require_for_training
    from a5lib.plots import save_curves
    from a5lib.training import train

    if flags.resume is not None and flags.output_dir != flags.resume:
        raise UserError(
            f"--output-dir {flags.output_dir} does not go with --resume; the run continues in {flags.resume}."
        )
    config = as_config(flags)
    algo = load_algo()
    require_for_training(algo, config)
    summary = train(config, algo, resume=flags.resume is not None, say=say)
    print_summary(summary.run_dir)
    if summary.step:
        say(f"Curves: {save_curves(summary.run_dir)}.")
    say(f"The command that repeats this run: {summary.run_dir / 'command.txt'}.")
    if not summary.finished:
        a5 = "a5" if shutil.which("a5") else os.path.relpath(Path(sys.executable).with_name("a5"))
        say(
            f"Stopped after step {summary.step}. Continue with: {a5} train --resume {shlex.quote(str(summary.run_dir))}"
        )
        return 130
    return 0


def as_config(flags: TrainFlags) -> TrainConfig:
    """The flags without those that are not part of the run."""
    return TrainConfig(**{f.name: getattr(flags, f.name) for f in dataclasses.fields(TrainConfig)})


def print_summary(run_dir: Path) -> None:
    """A table of the sampled and greedy evaluations, first and last."""
    from a5lib.runlog import read_jsonl

    records = read_jsonl(run_dir / "evaluations.jsonl")
    full = [r for r in records if r["kind"] == "greedy"]
    steps = sorted({r["step"] for r in full})
    table = Table(title="Validation")
    for column in ("", "accuracy, sampled (95 %)", "greedy", "pass@8", "well formed", "tokens"):
        table.add_column(column, justify="left" if not column else "right")
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        sampled = [r for r in records if r["step"] == step and r["kind"] == "sampled"][-1]
        greedy = [r for r in full if r["step"] == step][-1]
        low, high = sampled["interval"]
        pass_at_8 = sampled["pass_at_k"].get("8")
        table.add_row(
            "before" if step == 0 else f"after step {step}",
            f"{100 * sampled['accuracy']:.1f} % ({100 * low:.1f}-{100 * high:.1f})",
            f"{100 * greedy['accuracy']:.1f} %",
            "-" if pass_at_8 is None else f"{100 * pass_at_8:.1f} %",
            f"{100 * sampled['format_share']:.1f} %",
            f"{sampled['response_length_mean']:.1f}",
        )
    console.print(table)


def evaluate_command(flags: EvaluateFlags) -> int:
    from a5lib.evaluation import evaluate
    from a5lib.grading import REWARD_FUNCTIONS
    from a5lib.models import load_policy
    from a5lib.prompts import grader_name, load_prompt
    from a5lib.rollouts.transformers_backend import TransformersRollouts
    from a5lib.training import check_context, load_problems, room_for_response

    if flags.samples < 1:
        raise UserError(f"--samples is {flags.samples}; it must be at least 1.")
    if flags.output is not None and (flags.output.is_dir() or not flags.output.parent.is_dir()):
        raise UserError(f"{flags.output} cannot be written; name a file in a folder that exists with --output.")
    shared = {f.name for f in dataclasses.fields(TrainConfig)} & {f.name for f in dataclasses.fields(flags)}
    values = {name: getattr(flags, name) for name in shared}
    if flags.temperature == 0:  # greedy, which training refuses
        del values["temperature"]
    resolved = resolve(TrainConfig(**values))
    template = load_prompt(flags.prompt)
    grader = grader_name(template, flags.grader)
    problems = load_problems(flags.val_file, "validation", flags.val_examples)
    model, tokenizer = load_policy(
        flags.model,
        device=flags.device,
        dtype=flags.dtype,
        attention_implementation=flags.attention_implementation,
        trust_remote_code=flags.trust_remote_code,
    )
    room = room_for_response(model.config, tokenizer, template, problems)
    max_tokens = min(resolved.max_tokens, room) if flags.max_tokens is None else resolved.max_tokens
    check_context(room, max_tokens)
    backend = TransformersRollouts(model, tokenizer, resolved.generation_batch_size)
    backend.sync(model.named_parameters(), 0)
    with progress_bar(total=len(problems) * flags.samples, desc="evaluate", unit="resp") as bar:
        result = evaluate(
            backend, tokenizer, problems, template, REWARD_FUNCTIONS[grader], max_tokens=max_tokens,
            temperature=flags.temperature, top_p=flags.top_p, samples=flags.samples, seed=flags.seed,
            progress=bar.update,
        )  # fmt: skip
    say(f"{flags.model}, prompt {template.name}, reward {grader}: {result.describe()}.")
    print_evaluation(result, flags.show)
    if flags.output is not None:
        asked = {"model": flags.model, "prompt": template.name, "reward": grader, "max_tokens": max_tokens,
                 "top_p": flags.top_p, "seed": flags.seed}  # fmt: skip
        write_text(flags.output, json.dumps(asked | result.to_json(), indent=1, allow_nan=False) + "\n", "--output")
    return 0


def print_evaluation(result: Evaluation, show: int) -> None:
    """The outcome classes with counts, pass@k, lengths, and a few responses of each class."""
    total = sum(result.counts.values())
    table = Table(title="Responses")
    for column in ("outcome", "responses", "share"):
        table.add_column(column, justify="left" if column == "outcome" else "right")
    for name, count in result.counts.items():
        table.add_row(OUTCOME_WORDS[name], str(count), f"{100 * count / total:.1f} %")
    console.print(table)
    several = ", ".join(f"pass@{k} {100 * share:.1f} %" for k, share in result.pass_at_k.items())
    console.print(
        f"{several}; {result.response_length_mean:.1f} tokens a response, the longest {result.response_length_max}; "
        f"{100 * result.truncated_share:.1f} % cut off.",
        highlight=False,
    )
    for name, examples in result.examples.items():
        for example in examples[:show]:
            console.rule(OUTCOME_WORDS[name])
            console.print(f"{example.question}\n[right answer: {example.answer}]\n{example.response}", markup=False)


OUTCOME_WORDS = {
    "right": "right",
    "wrong": "well formed, wrong answer",
    "malformed": "malformed",
}


def plot_command(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    output: Path = Path("curves.png"),
) -> int:
    """Draw the curves of one or more runs side by side.

    Args:
        runs: Run folders.
        output: Picture to write; the ending chooses the format (png, pdf, svg).
    """
    from a5lib.plots import plot_runs

    if not runs:
        raise UserError("a5 plot needs at least one run folder, such as runs/grpo-seed0.")
    return write_picture(plot_runs(list(runs)), output)


def plot_memory_command(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    output: Path = Path("memory.png"),
) -> int:
    """Draw the memory of a run over time, and beside it what was predicted.

    Args:
        run: Run folder.
        output: Picture to write; the ending chooses the format (png, pdf, svg).
    """
    from a5lib.plots import plot_memory

    return write_picture(plot_memory(run), output)


def write_picture(figure: Figure, output: Path) -> int:
    """Write a figure to the file that the user named; what goes wrong is one sentence."""
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise UserError(f"The picture cannot be written to {output} ({error}); choose another --output.") from error
    say(f"Wrote {output}.")
    return 0


def doctor_command(vllm_python: Path | None = None) -> int:
    """Say what this machine can run, what is missing, and the exact command that mends it.

    Args:
        vllm_python: The Python that has vLLM, as for a5 train (default: this one).
    """
    from a5lib.doctor import diagnose, print_findings

    findings = diagnose(vllm_python=vllm_python)
    print_findings(findings, console)
    return int(any(f.level == "fail" for f in findings))


def bench_toy_command(steps: int = 5, rounds: int = 5) -> int:
    """Measure generation, updates and memory of the toy model on this machine.

    Args:
        steps: Training steps, at least 2; the first is a warm-up.
        rounds: Rounds of generation for each way.
    """
    from a5lib.bench import bench
    from a5lib.course.exercises import load_algo, require_for_training

    algo = load_algo()
    require_for_training(algo, TrainConfig())
    bench(algo, steps=steps, rounds=rounds, console=console)
    return 0


def bench_update_command(
    variants: tuple[str, ...] = ("all",),
    output: Path = Path("runs/bench-update"),
    model: str | None = None,
    sequences: int | None = None,
    tokens: int | None = None,
    warmups: int | None = None,
    updates: int | None = None,
    device: str = "auto",
) -> int:
    """Measure one update in many variants, each in a process of its own, on random weights of a published size.

    Exit codes: 0 done, 1 a variant failed or took too long (the table says which and why), 2 nothing was run.

    Args:
        variants: Variants, or groups of them: engines, budgets, small-batches, ragged, losses, peers, ablation, large;
            `none` draws the tables again.
        output: Folder for the records and tables; new records are added to what is there.
        model: Another model for every variant: olmo2-1b, olmo2-7b, llama3.1-8b or tiny.
        sequences: Another number of sequences for every variant.
        tokens: Another number of tokens in a sequence.
        warmups: Updates before the measured ones (default: each variant's own, mostly 2).
        updates: Measured updates (default: each variant's own, mostly 5).
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """
    from a5lib.bench_update import bench_update
    from a5lib.bench_variants import shrunk

    rows = bench_update(
        variants, output, device=device, warmups=warmups, updates=updates, console=console,
        change=lambda variant: shrunk(variant, model, sequences, tokens),
    )  # fmt: skip
    return int(any(row["error"] for row in rows))


def diagnose_backend_command(
    backends: tuple[Literal["transformers", "vllm-colocated", "vllm-alone"], ...] = (
        "transformers",
        "vllm-colocated",
        "vllm-alone",
    ),
    cycles: int = 4,
    output: Path = Path("runs/diagnose-backend"),
    model: str = TOY,
    rollouts: int | None = None,
    prompt_tokens: int = 160,
    max_tokens: int | None = None,
    vram_budget: float | None = None,
    optimizer_state: OptimizerState = "fp32",
    engine: EngineName | None = None,
    device: str = "auto",
    vllm_python: Path | None = None,
) -> int:
    """Measure full cycles of training with transformers and with colocated vLLM, phase by phase, and their memory.

    Exit codes: 0 done, 1 a check failed (the lines below the tables say which), 2 nothing was measured, or vLLM failed.

    Args:
        backends: What generates; `vllm-alone` never sleeps, trains nothing and has the whole budget but a CUDA context.
        cycles: Cycles with each backend; the first does not count, and growth of memory is judged from 10 on.
        output: Folder for the records and tables; new records are added to what is there.
        model: olmo2-1b, olmo2-7b, llama3.1-8b or tiny, with random weights; `toy`; or a folder or id.
        rollouts: Responses in a cycle (toy 128, otherwise 256).
        prompt_tokens: Length of the made-up prompts that random weights get; others get embedded problems.
        max_tokens: Longest response in tokens (toy 80, otherwise 512).
        vram_budget: GiB of the card for trainer and vLLM together (default: what is free).
        optimizer_state: Precision of AdamW's state.
        engine: What holds weights, gradients and optimizer state (default: what the budget allows).
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        vllm_python: The Python that has vLLM, such as vllm-env/bin/python (default: this one).
    """
    from a5lib.course.exercises import load_algo
    from a5lib.diagnose import Setting, diagnose_backend

    setting = Setting(model, rollouts, prompt_tokens, max_tokens, vram_budget, optimizer_state, engine, device,
                      vllm_python)  # fmt: skip
    return int(not diagnose_backend(load_algo(), setting, backends, cycles, output, console))


def probe_command(
    model: str = "olmo2-1b",
    vram_budget: float | None = None,
    engine: EngineName | None = None,
    optimizer_state: OptimizerState = "bf16",
    sequences: int = 8,
    tokens: int = 672,
    device: str = "auto",
    seed: int = 0,
) -> int:
    """Check that this machine can train a model in full: two updates, and what they must leave behind.

    Exit codes: 0 the probe passed, 1 it failed or ran out of memory, 2 it was not run.

    Args:
        model: olmo2-1b, olmo2-7b, llama3.1-8b or tiny, with random weights; or a folder or id, with its own.
        vram_budget: Memory on the card in GiB: what the plan may use, and a hard cap (default: what is free).
        engine: What holds weights, gradients and optimizer state (default: what the budget allows).
        optimizer_state: Precision of AdamW's state.
        sequences: Sequences in each update, a multiple of 4.
        tokens: Tokens in a sequence, prompt and response.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: Of weights and tokens.
    """
    from a5lib.course.exercises import load_algo
    from a5lib.probe import print_probe, probe

    found = probe(
        load_algo(), model=model, vram_budget=vram_budget, engine=engine, optimizer_state=optimizer_state,
        sequences=sequences, tokens=tokens, device=device, seed=seed,
    )  # fmt: skip
    print_probe(found, console)
    return int(not found.passed)


def plan_command(
    model: str = "olmo2-1b",
    vram: str | None = None,
    sequences: int | None = None,
    prompt_tokens: int = 160,
    max_tokens: int | None = None,
    algorithm: str = "grpo",
    optimizer_state: OptimizerState = "fp32",
    engine: EngineName | None = None,
    generation_backend: BackendName = "transformers",
    generation_batch_size: int | None = None,
    cards: bool = False,
) -> int:
    """Say what a run would keep on the card and on the host, and whether it fits, without starting it.

    Exit codes: 0 there is a plan, 2 nothing fits; the sentence names the nearest setting that does.

    Args:
        model: A published size, such as olmo2-1b, llama3.1-8b, qwen3-4b or toy; a folder; or an id.
        vram: GiB of the card, or its name, such as 8 or "RTX 4060" (default: what is free on the card here).
        sequences: Responses in one optimizer step (default: those of `a5 train` with this algorithm).
        prompt_tokens: Tokens of the longest prompt.
        max_tokens: Longest response in tokens (toy 80, otherwise 512).
        algorithm: Preset, as of `a5 train`; off-policy ones score a rollout batch first.
        optimizer_state: Precision of AdamW's state.
        engine: What holds weights, gradients and optimizer state (default: resident if it fits).
        generation_backend: What generates: transformers or vllm-colocated on this card, vllm-server on another.
        generation_batch_size: Responses decoded side by side, 0 for none on this card (toy 256, otherwise 32, with vLLM
            256).
        cards: Print what fits on each common size of card instead.
    """
    from a5lib.plan_command import make_request, print_cards, print_plan

    if cards and vram is not None:
        raise UserError("--cards prints every common size of card; leave --vram out, or leave --cards out.")
    request = make_request(
        model=model, algorithm=algorithm, sequences=sequences, prompt_tokens=prompt_tokens, max_tokens=max_tokens,
        generation_backend=generation_backend, generation_batch_size=generation_batch_size,
        optimizer_state=optimizer_state, engine=engine,
    )  # fmt: skip
    if cards:
        print_cards(request, console)
    else:
        print_plan(request, vram, console)
    return 0


def gsm8k_command(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = Path("data"),
) -> int:
    """Download the public GSM8K files as gsm8k-train.jsonl and gsm8k-test.jsonl.

    Args:
        folder: Where to put them; whole files that are there are kept.
    """
    from a5lib.data import download_gsm8k

    paths = download_gsm8k(folder)
    say(f"GSM8K is in {folder}: a5 train --train-file {paths['train']} --val-file {paths['test']}")
    return 0


def from_gguf_command(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> int:
    """Turn a GGUF file into a Hugging Face model folder (needs the packages gguf and accelerate).

    Args:
        file: The GGUF file.
        out: Folder to write; must be new or empty.
        dtype: Type of the saved weights.
    """
    from a5lib.models import convert_gguf

    convert_gguf(file, out, dtype)
    say(f"Wrote {out}. Try it: a5 evaluate --model {out}")
    return 0


def toy_problems_command(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    /,
    split: Literal["train", "tuning", "validation"] = "tuning",
    count: int = 256,
    seed: int = 0,
) -> int:
    """Write embedded problems as GSM8K JSONL, to read them or to validate on a split of your own.

    Args:
        file: File to write.
        split: `tuning` is for choosing settings; results are reported on `validation`.
        count: Number of problems.
        seed: Which problems of the split.
    """
    from a5lib.toy_problems import to_gsm8k_json, toy_problems

    if count < 1:
        raise UserError(f"--count is {count}; it must be at least 1.")
    lines = [json.dumps(to_gsm8k_json(p)) + "\n" for p in toy_problems(split, count, seed)]
    write_text(file, "".join(lines), "FILE")
    say(f"Wrote {count} problems to {file}.")
    return 0


def toy_build_command(
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    steps: int = 4000,
    rows: int = 96,
    documents: int = 20_000,
    validation: int = 512,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    seed: int = 0,
    device: str = "auto",
) -> int:
    """Build the embedded toy model anew: tokenizer, training text, training, measurement, card.

    Args:
        out: Folder to write; must be new or empty.
        steps: Training steps.
        rows: Rows of text in a step.
        documents: Generated texts that the tokenizer is trained on.
        validation: Validation problems for the card.
        hidden_size: Width of the hidden states.
        layers: Decoder layers.
        heads: Attention heads, each 32 or 64 wide.
        seed: Seed of text and weights.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """
    from a5lib.toy_build import build

    build(
        out, steps=steps, rows=rows, documents=documents, validation=validation, hidden_size=hidden_size,
        layers=layers, heads=heads, seed=seed, device=device,
    )  # fmt: skip
    return 0


def course_status_command() -> int:
    """Show how far each exercise is: functions written, checks passed, whose code will run.

    The exit code is 0, also where checks fail; `a5 course check` is for grading.
    """
    from a5lib.course.progress import print_status

    print_status(console)
    return 0


def course_check_command(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = "all",
) -> int:
    """Check your code, and say in words what is wrong.

    Exit codes: 0 all checks pass, 1 something fails, is not written or does not import, 2 there is no such exercise.

    Args:
        name: A file without its ending, such as masks, or one function.
    """
    from a5lib.course import EXERCISES
    from a5lib.course.notebook import check_in_words

    passed, words = check_in_words(*(EXERCISES if name == "all" else [name]))
    print(words)
    return int(not passed)


def course_reset_command(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")], /) -> int:
    """Start a file anew: write a fresh stub, and keep your file beside it as NAME.py.old-1.

    Exit codes: 0 done, or the file is still the stub; 2 there is no such exercise, or no stub to take.

    Args:
        name: A file without its ending, such as masks.
    """
    from a5lib.course.files import reset

    say(reset(name))
    return 0


def course_diff_command(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = "all", solution: bool = False
) -> int:
    """Show what you changed, as a unified diff from the stub to your file.

    Exit codes: 0 done, also where nothing differs; 2 there is no such exercise, or nothing to compare with.

    Args:
        name: A file without its ending, such as masks.
        solution: Compare with the reference in solutions/ instead; this shows the answer.
    """
    from a5lib.course.exercises import EXERCISES, exercise_of
    from a5lib.course.files import difference

    text = "".join(difference(exercise, solution) for exercise in (EXERCISES if name == "all" else [exercise_of(name)]))
    print(
        text or f"Your code does not differ from {'the reference' if solution else 'the stub'}.", end="\n" * (not text)
    )
    return 0


def course_submit_command(output: Path = Path("a5-submission.zip"), runs: tuple[Path, ...] = ()) -> int:
    """Pack your files, notebooks, run logs and check results into a zip to hand in; no models, no checkpoints.

    Exit codes: 0 written, also where checks fail (status.json in the zip holds them); 2 nothing was written.

    Args:
        output: File to write; it must not exist.
        runs: Run folders (default: those below runs/ in which your code ran).
    """
    from a5lib.course.submission import submit

    names = submit(output, runs)
    print("\n".join(names))
    say(f"Wrote {output} with {len(names)} files.")
    return 0


def course_branch_command(
    kind: Annotated[Literal["starter", "solutions"], tyro.conf.Positional, tyro.conf.arg(metavar="KIND")], /
) -> int:
    """For teachers: make a git branch from the last commit. Your files and your index are not touched.

    Exit codes: 0 made, 2 not made.

    Args:
        kind: `starter` has the stubs, no solutions/ and no history; `solutions` has the stubs and solutions/.
    """
    from a5lib.course.branches import make_branch

    say(make_branch(kind))
    return 0


def write_text(path: Path, text: str, flag: str) -> None:
    """Write a file that the user named; what goes wrong is one sentence."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another {flag}.") from error


COMMANDS: dict[str, Callable[..., int]] = {
    "train": train_command,
    "evaluate": evaluate_command,
    "plot": plot_command,
    "plot memory": plot_memory_command,
    "doctor": doctor_command,
    "bench toy": bench_toy_command,
    "bench update": bench_update_command,
    "plan": plan_command,
    "probe": probe_command,
    "diagnose-backend": diagnose_backend_command,
    "course status": course_status_command,
    "course check": course_check_command,
    "course reset": course_reset_command,
    "course diff": course_diff_command,
    "course submit": course_submit_command,
    "course branch": course_branch_command,
    "toy problems": toy_problems_command,
    "toy build": toy_build_command,
    "data gsm8k": gsm8k_command,
    "model from-gguf": from_gguf_command,
}
FLAGS: dict[str, type] = {"train": TrainFlags, "evaluate": EvaluateFlags}


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code: 0 done, 1 a finding or fault, 2 bad input, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = run(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        code = 2
    except NotImplementedError as error:  # a stub in starter/ that was called; PyTorch raises this error too
        from a5lib.course.exercises import stub_called, unwritten_words

        name = stub_called(error)
        if name is None:
            raise
        print(f"{unwritten_words(name)}, then run this again.", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(
            "Interrupted; a run that has a checkpoint continues with a5 train --resume RUN, any other starts anew.",
            file=sys.stderr,
        )
        code = 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Find the command at the beginning of `argv` and call it with the flags that follow."""
    if not argv or argv[0] in ("-h", "--help"):
        print_help()
        return 0
    words = next((n for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), 0)
    if not words:
        following = [name.removeprefix(argv[0] + " ") for name in COMMANDS if name.startswith(argv[0] + " ")]
        if following:
            raise UserError(f"After a5 {argv[0]} comes {' or '.join(following)}; `a5 --help` lists the commands.")
        guess = nearest(" ".join(argv[:2]), list(COMMANDS))
        raise UserError(f"Unknown command {argv[0]!r}; did you mean 'a5 {guess}'? `a5 --help` lists the commands.")
    name, args = " ".join(argv[:words]), argv[words:]
    command = COMMANDS[name]
    if name not in FLAGS:
        return parse(name, deferred(command), args)()
    default = FLAGS[name]() if name != "train" else default_train_flags(args)
    return command(parse(name, FLAGS[name], args, default))


def default_train_flags(args: list[str]) -> TrainFlags:
    """The defaults of `a5 train`: with `--resume RUN` those are the run's own config."""
    from a5lib.runlog import read_config

    for i, arg in enumerate(args):
        flag, _, value = arg.partition("=")
        if flag == "--resume":
            value = value or " ".join(args[i + 1 : i + 2])
            if not value or value.startswith("-"):
                raise UserError("--resume needs the folder of a run, such as --resume runs/grpo-seed0.")
            run_dir = Path(value)
            config = read_config(run_dir)
            values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
            return TrainFlags(**values | {"output_dir": run_dir, "resume": run_dir})
    return TrainFlags()


def deferred(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command with the same flags, but not run yet: a misspelt flag must be found before any work."""

    @functools.wraps(command)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **kwargs)

    return bind


def parse(name: str, target: Any, args: list[str], default: Any = None) -> Any:
    """Let tyro parse the flags; whatever it objects to becomes one sentence."""
    words = io.StringIO()
    help_wanted = any(a in ("-h", "--help") for a in args)
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.nullcontext() if help_wanted else contextlib.redirect_stderr(words):
            parsed = tyro.cli(target, args=args, prog=f"a5 {name}", return_unknown_args=True, **extra)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(one_sentence(name, words.getvalue())) from None
    value, unknown = parsed
    if unknown and not unknown[0].startswith("-"):
        raise UserError(
            f"a5 {name} cannot use {unknown[0]!r}: a flag takes one value and a switch none; `a5 {name} --help` lists "
            "them all."
        )
    if unknown:
        known = sorted(set(re.findall(r"--[a-z][a-z0-9-]+", help_text(name, target))))
        guess = nearest(unknown[0].partition("=")[0], known)
        raise UserError(f"a5 {name} has no flag {unknown[0]}; did you mean {guess}? `a5 {name} --help` lists them all.")
    return value


def help_text(name: str, target: Any) -> str:
    """What `a5 NAME --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        tyro.cli(target, args=["--help"], prog=f"a5 {name}")
    return out.getvalue()


# What tyro says, and how we say it.
QUOTED = r"""('.*?'|".*?")"""
REWORDED = {
    rf"Error parsing (\S+):.*literal for int\(\) with base 10: {QUOTED}": r"\1 is \2; it must be a whole number",
    rf"Error parsing (\S+):.*could not convert string to float: {QUOTED}": r"\1 is \2; it must be a number",
    rf"invalid choice {QUOTED} for argument '(\S+)'\. Expected one of \((.+?),?\)": r"\2 is \1; choose from \3",
    r"Missing value for argument '(\S+)'": r"\1 needs a value",
}


def one_sentence(name: str, message: str) -> str:
    """tyro's boxed message as one line."""
    text = " ".join(re.sub(r"[╭╮╰╯│─┌┐└┘]|-{5,}", " ", message).split())
    missing = re.findall(r"([A-Z]{2,}) [^()]*\(required\)", text)
    if missing:
        return f"a5 {name} lacks {' and '.join(missing)}; `a5 {name} --help` says what to give there."
    for pattern, words in REWORDED.items():
        if match := re.search(pattern, text):
            return f"{match.expand(words)}; `a5 {name} --help` explains the flags."
    return f"a5 {name}: {text.rstrip('.')}; `a5 {name} --help` explains the flags."


def print_help() -> None:
    table = Table(title="a5: reasoning RL on the GPU you own", show_header=False, box=None)
    for name, command in COMMANDS.items():
        doc = (FLAGS[name].__doc__ if name in FLAGS else command.__doc__) or ""
        table.add_row(f"a5 {name}", doc.strip().splitlines()[0])
    console.print(table)
    console.print("`a5 COMMAND --help` lists the flags of a command.")


def say(sentence: str) -> None:
    """Print a sentence without breaking a progress bar."""
    tqdm.write(sentence)
