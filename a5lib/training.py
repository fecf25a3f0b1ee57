"""The loop. It reads straight down: rollouts, rewards, advantages, update, log, evaluate, save.

It does not know which engine trains, which backend generates, or whose code computes the mathematics: it receives
`algo`. An on-policy preset takes one optimizer step on each rollout batch; an off-policy preset cuts the batch into
train batches and takes a step on each, against log-probabilities that were scored once, before the first. Where the
backend takes the card, the engine leaves it before each generation and takes it back at its next call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from a5lib.checkpoints import Checkpoint, capture_rng, latest_checkpoint, restore_rng, save_checkpoint
from a5lib.config import MAY_CHANGE_ON_RESUME, ResolvedConfig, TrainConfig, flag, resolve
from a5lib.data import BatchSampler, load_gsm8k
from a5lib.engines import Batch
from a5lib.engines.choice import make_engine, plan_run
from a5lib.errors import UserError
from a5lib.evaluation import Evaluation, evaluate
from a5lib.grading import REWARD_FUNCTIONS
from a5lib.metrics import Clock, combine_updates, rollout_metrics, throughput
from a5lib.models import (
    claim_folder,
    encode_prompt,
    load_config,
    load_policy,
    load_tokenizer,
    policy_device,
    save_model,
    select_dtype,
)
from a5lib.optimizers import warmup_lr
from a5lib.preflight import pinning_warning, this_machine
from a5lib.progress import progress_bar
from a5lib.prompts import PromptTemplate, grader_name, load_prompt
from a5lib.recorder import MemoryRecorder, other_users
from a5lib.records import Completion, Problem, Rollout
from a5lib.rollouts.choice import check_backend, make_backend
from a5lib.rollouts.fp8 import FP8
from a5lib.rollouts.mismatch import MismatchWatch, mismatch, truncated_importance_weights
from a5lib.rollouts.vllm_backend import LOG_FILE
from a5lib.runlog import EVALUATIONS_FILE, RunLog, read_config, read_jsonl
from a5lib.toy_problems import Split, toy_problems

# One stream of random numbers for each purpose, so that one more validation does not change the rollouts.
ROLLOUT_STREAM, EVALUATION_STREAM = 1, 2
ADVANTAGE_EPS = 1e-6
BAR = "{desc} {n_fmt}/{total_fmt} |{bar:10}| {elapsed}<{remaining}{postfix}"  # fits into 80 columns


@dataclass
class RunState:
    """What changes from step to step besides tensors and data order; it travels in the checkpoint as JSON."""

    step: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class Summary:
    """Where a run is and how far it came; its evaluations are in `evaluations.jsonl` there."""

    run_dir: Path
    step: int
    finished: bool
    whose: str


def train(
    flags: TrainConfig,
    algo: Any,
    *,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    stop: StopRequest | None = None,
    say: Callable[[str], object] = print,
) -> Summary:
    """Train a policy and leave a run folder.

    Args:
        flags: the run; `None` fields are filled in by `a5lib.config.resolve`.
        algo: the exercise functions (see `a5lib.course.load_algo`).
        resume: continue the run in `flags.output_dir` from its newest complete checkpoint.
        on_step: called with each line of metrics, after it has been written.
        stop: where another thread, as a notebook's button, asks to stop after the step; Ctrl-C asks there too.
        say: receives the few sentences that a person should read.

    Raises:
        UserError: the input is wrong (before any work), or the loss or gradient is not finite (the last checkpoint
        stays).
    """
    config = resolve(flags)
    check_backend(config)
    preset = config.preset
    template = load_prompt(config.prompt)
    grader = grader_name(template, config.grader)
    reward_fn = REWARD_FUNCTIONS[grader]
    train_problems = load_problems(config.train_file, "train", config.train_examples)
    val_problems = load_problems(config.val_file, "validation", config.val_examples)
    sampler = BatchSampler(train_problems, config.rollout_batch_size // config.group_size, config.seed)
    device = policy_device(config.model, config.device)
    dtype = select_dtype(config.dtype, device)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    model_config = load_config(config.model, trust_remote_code=config.trust_remote_code)
    room = room_for_response(model_config, tokenizer, template, [*train_problems, *val_problems])
    check_context(room, config.max_tokens)
    if (others := other_users(device)) is not None:
        say(others)
    plan = plan_run(config, model_config, model_config.max_position_embeddings - room, device, dtype)
    warning = pinning_warning(plan, this_machine(device))
    if warning is not None:
        say(warning)
    model, _ = load_policy(
        config.model,
        device="cpu",
        dtype=str(dtype).removeprefix("torch."),
        attention_implementation=config.attention_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    run_dir, checkpoint = open_run(config) if resume else (claim_run_dir(config), None)

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(config.seed)
    backend = make_backend(config, model, tokenizer, device, plan, run_dir)
    engine = make_engine(model, config, algo, plan, device, shared=backend.channel)
    watch = MismatchWatch(FP8 if config.rollout_quantization == "fp8" else dtype)
    state = RunState()
    data = {"--train-file": fingerprint(train_problems), "--val-file": fingerprint(val_problems)}
    warnings: list[str] = []
    if checkpoint is not None:
        state, warnings = RunState(**checkpoint.state["run"]), checkpoint.skipped
        check_continuation(config, state, checkpoint.state["data"], data)
        engine.load_tensors(checkpoint.tensors)
        sampler.load_state_dict(checkpoint.state["sampler"])
        restore_rng(checkpoint.tensors["rng"], checkpoint.state["rng"])
        checkpoint = None  # its tensors are as large as the training state
    log = RunLog(run_dir, config, whose=algo.summary(), keep_until=state.step)
    log.plan(plan.to_json())
    recorder = MemoryRecorder(device, log.memory)
    say(f"Run folder: {run_dir}. Algorithm {config.algorithm}; code: {algo.summary()}; reward: {grader}.")
    if plan.engine == "layer_major":
        say("The layer-major engine trains: the losses are those of the code above, scoring and accumulation its own.")
    for sentence in warnings:
        say(sentence)
    if resume:
        say(f"Continuing after step {state.step} of {config.num_steps}.")

    def hand_over() -> None:
        """The current weights to the backend, and the card too where the two take turns."""
        if backend.takes_card:
            engine.release()
        backend.sync(engine.weights(), state.step)

    def validate(samples: int, *, greedy: bool = False) -> Evaluation:
        hand_over()
        with (
            run_faults(f"Validation after step {state.step}", config),
            progress_bar(total=len(val_problems) * samples, desc="validate", unit="resp", leave=False) as progress,
        ):
            result = evaluate(
                backend, tokenizer, val_problems, template, reward_fn, max_tokens=config.max_tokens,
                temperature=0.0 if greedy else config.temperature, top_p=config.top_p, samples=samples,
                seed=stream_seed(config.seed, EVALUATION_STREAM), progress=progress.update,
            )  # fmt: skip
        backend.release()
        log.evaluation(state.step, "greedy" if greedy else "sampled", result)
        return result

    def validate_fully(when: str) -> None:
        """Sampled and greedy, unless a run that is continued has these results already."""
        known = {(r["step"], r["kind"], r["samples"]) for r in read_jsonl(run_dir / EVALUATIONS_FILE)}
        if (state.step, "sampled", config.eval_samples) not in known:
            say(f"{when}, sampled: {validate(config.eval_samples).describe()}.")
        if (state.step, "greedy", 1) not in known:
            say(f"{when}, greedy: {validate(1, greedy=True).describe()}.")

    def save() -> float:
        """Save a checkpoint; returns the seconds it took."""
        started = time.perf_counter()
        log.sync()
        rng_tensors, rng_state = capture_rng()
        tensors = {**engine.tensors(), "rng": rng_tensors}
        json_state = {"run": dataclasses.asdict(state), "sampler": sampler.state_dict(), "rng": rng_state,
                      "data": data}  # fmt: skip
        save_checkpoint(run_dir, state.step, tensors, json_state)
        return time.perf_counter() - started

    with log, closing(backend):
        save_seconds = save() if config.save_every and not resume else 0.0
        if backend.takes_card:
            say(f"vLLM starts, which can take a minute; its own log: {run_dir / LOG_FILE}.")
            engine.release()
        backend.start()
        if state.step == 0:
            validate_fully("Before")
        bar = progress_bar(range(state.step + 1, config.num_steps + 1), desc="train", bar_format=BAR,
                           initial=state.step, total=config.num_steps)  # fmt: skip
        with stop_between_steps(say, stop) as request:
            for step in bar:
                clock = Clock(recorder, step)

                with clock("generate"), run_faults(f"Step {step}, generation", config):
                    problems = sampler.next_batch()
                    prompts = [encode_prompt(tokenizer, template.render(p.question)) for p in problems]
                    hand_over()
                    completions = backend.generate(
                        prompts, n=config.group_size, max_tokens=config.max_tokens, temperature=config.temperature,
                        top_p=config.top_p, stop=template.stop, seed=stream_seed(config.seed, ROLLOUT_STREAM, step),
                    )  # fmt: skip
                    backend.release()

                with clock("reward"):
                    answers = [problems[c.prompt_index].answer for c in completions]
                    rewards, reward_stats = algo.compute_rollout_rewards(
                        reward_fn, [c.text for c in completions], answers
                    )
                    advantages, advantage_stats = algo.compute_group_normalized_rewards(
                        rewards, config.group_size, preset.baseline, ADVANTAGE_EPS, preset.advantage_normalizer
                    )

                batch = make_batch(algo, tokenizer.pad_token_id, prompts, completions, advantages)
                mismatch_metrics: dict[str, float] = {}
                if config.scores:
                    # Once, before the first update changes the policy.
                    with clock("score"), run_faults(f"Step {step}, scoring", config):
                        log_probs = engine.score(batch)["log_probs"]
                    if preset.importance_reweighting_method != "none":
                        batch["old_log_probs"] = log_probs
                    if config.measures_mismatch:
                        trained = batch["response_mask"] & (batch["advantages"] != 0)[:, None]  # what was scored
                        both = batch["rollout_log_probs"], log_probs, trained
                        mismatch_metrics = mismatch(*both)
                        if config.mismatch_correction == "tis":
                            batch["loss_weights"] = truncated_importance_weights(*both)
                        if mismatch_metrics and (jump := watch.jump(mismatch_metrics["mismatch_mean"])):
                            say(f"Step {step}: {jump}")

                updates = []
                with clock("update"):
                    for rows in torch.arange(len(completions)).split(config.train_batch_size):
                        learning_rate = warmup_lr(config.learning_rate, config.warmup_steps, state.optimizer_steps + 1)
                        with run_faults(f"Step {step}, sequences {int(rows[0])} to {int(rows[-1])}", config):
                            loss, stats = engine.accumulate({name: values[rows] for name, values in batch.items()})
                            grad_norm = engine.step(learning_rate)
                        state.optimizer_steps += 1
                        updates.append(stats | dict(loss=loss, grad_norm=grad_norm, learning_rate=learning_rate))

                state.step = step
                rollouts = [
                    Rollout(problems[c.prompt_index], prompts[c.prompt_index], c, reward_fn(c.text, answer), advantage)
                    for c, answer, advantage in zip(completions, answers, advantages.tolist(), strict=True)
                ]
                if step == 1 or due(step, config.log_rollouts_every):
                    log.rollouts(step, rollouts)
                last = step == config.num_steps
                if due(step, config.eval_every) and not last:
                    with clock("eval"):
                        validate(1)
                metrics = {
                    "step": step,
                    "optimizer_steps": state.optimizer_steps,
                    **combine_updates(updates),
                    **mismatch_metrics,
                    **reward_stats,
                    "zero_variance_groups": advantage_stats["zero_variance_groups"],
                    **rollout_metrics(tokenizer, rollouts, grader),
                    **throughput(batch, rollouts, clock),
                    **clock.metrics(),
                    "seconds_save": save_seconds,
                }
                log.metrics(metrics)
                stopping = request.requested
                saving = stopping or due(step, config.save_every) or (last and config.save_every)
                save_seconds = save() if saving else 0.0
                bar.set_postfix(
                    reward=f"{metrics['reward_mean']:.2f}",
                    format=f"{metrics['format_reward_mean']:.2f}",
                    tokens_s=f"{metrics['generation_tokens_per_second']:.0f}",
                )
                if on_step is not None:
                    on_step(metrics)
                if stopping:
                    return Summary(run_dir, step, finished=False, whose=algo.summary())

        validate_fully("After")
        sampled = [r for r in read_jsonl(run_dir / EVALUATIONS_FILE) if r["kind"] == "sampled"]
        best = max(sampled, key=lambda r: r["accuracy"])
        say(f"Best sampled accuracy: {100 * best['accuracy']:.1f} %, at step {best['step']}.")
        if config.save_final:
            if model.generation_config is not None:
                model.generation_config.do_sample = True  # a temperature without it is refused when saving
            save_model(model, tokenizer, run_dir / "model")
    return Summary(run_dir, state.step, finished=True, whose=algo.summary())


def load_problems(file: Path | None, split: Split, count: int) -> list[Problem]:
    """The first problems of a GSM8K JSONL file, or of the embedded split where no file is named."""
    return toy_problems(split, count) if file is None else load_gsm8k(file, count)


def room_for_response(
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
    problems: Sequence[Problem],
) -> int:
    """Tokens of the model's context that the longest prompt leaves.

    Raises:
        UserError: it leaves none.
    """
    context: int = model_config.max_position_embeddings
    longest = max(len(encode_prompt(tokenizer, template.render(p.question))) for p in problems)
    if longest >= context:
        raise UserError(
            f"The longest prompt has {longest} tokens but the model's context is {context}; use shorter prompts."
        )
    return context - longest


def check_context(room: int, max_tokens: int) -> None:
    """Refuse, before any work, a longest response that does not fit behind the longest prompt."""
    if max_tokens > room:
        raise UserError(
            f"--max-tokens {max_tokens} does not fit: the longest prompt leaves {room} tokens of the model's context; "
            f"use --max-tokens {room} or fewer."
        )


def claim_run_dir(config: ResolvedConfig) -> Path:
    """Make the run folder; it must be new or empty."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run_dir = config.output_dir or Path("runs") / f"{config.algorithm}-seed{config.seed}-{stamp}"
    resume = f"choose a new folder, or continue that run with --resume {shlex.quote(str(run_dir))}"
    claim_folder(run_dir, "--output-dir", otherwise=resume)
    return run_dir


def open_run(config: ResolvedConfig) -> tuple[Path, Checkpoint]:
    """The run folder to continue and its newest complete checkpoint; a field that may not change is refused by name."""
    run_dir = config.output_dir
    assert run_dir is not None
    before = read_config(run_dir)
    for name in (f.name for f in dataclasses.fields(TrainConfig)):
        old, new = getattr(before, name), getattr(config, name)
        if old != new and name not in MAY_CHANGE_ON_RESUME:
            raise UserError(
                f"{flag(name)} was {old} in this run and cannot become {new} on resume; start a new run for that."
            )
    return run_dir, latest_checkpoint(run_dir)


def check_continuation(config: ResolvedConfig, state: RunState, before: dict[str, str], now: dict[str, str]) -> None:
    """Refuse to continue towards a step that has passed, or on problems that have changed."""
    if config.num_steps < state.step:
        raise UserError(
            f"--num-steps {config.num_steps} is below step {state.step}, which the run has reached already."
        )
    for name, digest in now.items():
        if before[name] != digest:
            raise UserError(f"The problems of {name} are not those that this run began with; restore the file.")


def make_batch(
    algo: Any,
    pad_token_id: int,
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    advantages: Tensor,
) -> Batch:
    """The batch that engines take: ids, labels and mask [B, T], advantages [B], and the sampling log-probabilities [B,
    T].

    The ids are those that were sampled; text is never tokenised again. Taught in notebook 02.
    """
    prompt_ids = [prompts[c.prompt_index] for c in completions]
    batch: Batch = algo.pad_and_mask(prompt_ids, [c.token_ids for c in completions], pad_token_id)
    rollout_log_probs = torch.zeros(batch["labels"].shape)
    for row, (prompt, completion) in enumerate(zip(prompt_ids, completions, strict=True)):
        first = len(prompt) - 1  # the label at column t is token t + 1
        rollout_log_probs[row, first : first + len(completion.log_probs)] = torch.tensor(completion.log_probs)
    return {**batch, "advantages": advantages.float(), "rollout_log_probs": rollout_log_probs}


def stream_seed(seed: int, *stream: int) -> int:
    """A seed for one use of random numbers, independent of every other use."""
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one (0: never)."""
    return bool(every) and step % (every or 1) == 0


@contextmanager
def run_faults(where: str, config: ResolvedConfig) -> Iterator[None]:
    """Numbers that are not finite, or a card that is full, end the run with one sentence; the checkpoint stays."""
    kept = "no checkpoint was kept" if not config.save_every else "the last checkpoint is untouched"
    try:
        yield
    except FloatingPointError as error:
        raise UserError(
            f"{where}: {str(error).rstrip('.')}; the step was not taken and {kept}; try a smaller --learning-rate or "
            "--dtype float32."
        ) from error
    except torch.OutOfMemoryError as error:
        go_on = "continue with --resume and" if config.save_every else "start anew with"
        raise UserError(
            f"{where}: the card's memory is full; {kept}; {go_on} a smaller --vram-budget or --generation-batch-size, "
            "or start anew with --optimizer-state bf16_stochastic."
        ) from error


def fingerprint(problems: Sequence[Problem]) -> str:
    """SHA-256 over questions and answers: a resumed run must find the same problems."""
    return hashlib.sha256("\0".join(f"{p.question}\0{p.answer}" for p in problems).encode()).hexdigest()


@dataclass
class StopRequest:
    """Set by Ctrl-C or a notebook's stop button: finish the step, save, and stop."""

    requested: bool = False


@contextmanager
def stop_between_steps(say: Callable[[str], object], stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """Turn the first interrupt into a request to stop after the step; a second one interrupts at once.

    Signals reach only the main thread; in any other they do not set the request.
    """
    stop = StopRequest() if stop is None else stop
    interrupted = False
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = stop.requested = True
        say("Stopping after this step, with a checkpoint; interrupt again to drop the step.")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
