"""`a5 diagnose-backend`: full cycles of training with transformers and with colocated vLLM, timed phase by phase.

A cycle is one rollout batch of the loop, with the loop's own engine, backend and batch. Every backend gets the same
prompts and takes the same update. Rewards are made up, right and wrong in turns, so that every response has a gradient;
the learning rate is so small that what the model says stays as it is. `vllm-alone` is the worker by itself: it never
sleeps, nothing is trained, and all memory of the budget is its own but for the trainer's CUDA context. Each finished
piece of work is a line of rows.jsonl; `cycle_views.py` reads them.

    leave              the trainer frees the card
    write              weights into shared memory and their checksums, on the trainer's side
    wake weights       vLLM takes room for its weights
    load               vLLM takes the weights; with transformers: a copy of them for generation
    verify             vLLM reads every tensor back and computes its checksum
    wake kv_cache      vLLM takes room for keys and values
    reset_prefix_cache vLLM forgets those of older weights
    generate           the whole rollout batch
    sleep              the backend leaves the card; what vLLM still holds there is looked at
    return             the trainer takes the card back
    score, update      log-probabilities under the weights that generated; gradient and optimizer step
    rest               masks, advantages, Python
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from a5lib import machine
from a5lib.bench_update import ROWS_FILE, TABLE_FILE, drawn, link_speed, wait, written
from a5lib.config import TOY, EngineName, OptimizerState, ResolvedConfig, TrainConfig, resolve
from a5lib.course.exercises import require_for_training
from a5lib.cycle_views import Backend, Row, checks, newest, sheets
from a5lib.engines import Engine
from a5lib.engines.choice import make_engine, plan_run
from a5lib.errors import UserError
from a5lib.models import encode_prompt, load_config, load_policy, load_tokenizer, policy_device, select_dtype
from a5lib.probe import held_to
from a5lib.prompts import load_prompt
from a5lib.recorder import MemoryRecorder
from a5lib.records import Completion, MemorySample
from a5lib.rollouts import RolloutBackend
from a5lib.rollouts.choice import check_backend, make_backend
from a5lib.rollouts.mismatch import mismatch
from a5lib.rollouts.vllm_backend import LOG_FILE, VllmColocated
from a5lib.rollouts.worker_process import group_members
from a5lib.runlog import describe_environment, read_jsonl
from a5lib.synthetic import PUBLISHED, published_config, random_model
from a5lib.toy_problems import toy_problems
from a5lib.training import ADVANTAGE_EPS, ROLLOUT_STREAM, check_context, make_batch, room_for_response, stream_seed

LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        model: a name in `a5lib.synthetic.PUBLISHED`, which gets random weights, or a model as `a5 train` takes it.
        rollouts, max_tokens: of a rollout batch; None: as `a5 train`.
        prompt_tokens: length of the made-up prompts that random weights get; others get embedded problems.
        vram_budget: GiB of the card for both tenants together; None: what is free.
        optimizer_state, engine, device, vllm_python: as in `TrainConfig`.
    """

    model: str = TOY
    rollouts: int | None = None
    prompt_tokens: int = 160
    max_tokens: int | None = None
    vram_budget: float | None = None
    optimizer_state: OptimizerState = "fp32"
    engine: EngineName | None = None
    device: str = "auto"
    vllm_python: Path | None = None

    def config(self, backend: Backend) -> ResolvedConfig:
        """The run whose cycles are measured with this backend."""
        config = resolve(
            TrainConfig(
                model=self.model, rollout_batch_size=self.rollouts, max_tokens=self.max_tokens,
                vram_budget=self.vram_budget, optimizer_state=self.optimizer_state, engine=self.engine,
                device=self.device, vllm_python=self.vllm_python, learning_rate=LEARNING_RATE,
                generation_backend="transformers" if backend == "transformers" else "vllm-colocated",
            )
        )  # fmt: skip
        if backend != "vllm-alone":
            return config
        # In the plan of this engine vLLM gets all but the trainer's CUDA context. That is there: checksums need it.
        return replace(config, engine="layer_major")

    def command(self, backend: Backend, cycles: int) -> str:
        """What measures this backend again; the path of the Python that has vLLM is nobody else's."""
        words = ["a5", "diagnose-backend", "--backends", backend, "--cycles", str(cycles)]
        for name, default in vars(Setting()).items():
            if (value := getattr(self, name)) != default:
                words += [f"--{name.replace('_', '-')}", "PYTHON" if name == "vllm_python" else str(value)]
        return shlex.join(words)


def diagnose_backend(
    algo: Any,
    setting: Setting,
    backends: Sequence[Backend] = get_args(Backend),
    cycles: int = 4,
    output: Path = Path("runs/diagnose-backend"),
    console: Console | None = None,
) -> bool:
    """Measure cycles with one backend after another, write a row for each, and print what they say together.

    Args:
        algo: the exercise functions (see `a5lib.course.load_algo`).
        setting: what is measured.
        backends: what generates; earlier rows of the folder stand in for those that are left out.
        cycles: of each backend; the first does not count.
        output: folder; rows are added to those that it holds.
        console: where words and tables go.

    Returns:
        Whether every check that could be made has passed.

    Raises:
        UserError: wrong input, no vLLM, or a plan that does not fit, before any work; or a worker that failed.
    """
    if cycles < 2:
        raise UserError(f"--cycles is {cycles}; it must be at least 2, because the first one does not count.")
    console = console or Console()
    for backend in backends:
        config = setting.config(backend)
        check_backend(config)
        require_for_training(algo, config)
    path = output / ROWS_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another --output.") from error

    measured = []

    def add(row: Row) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if row["row"] == "start":
            measured.append(row["setting"])
        if row["row"] == "cycle":
            console.print(
                f"{row['backend']}, cycle {row['cycle']} of {cycles}: {row['cycle_seconds']:.2f} s, "
                f"{row['tokens_per_second']:,.0f} tokens/s.", highlight=False,
            )  # fmt: skip

    for backend in backends:
        if backend != "transformers":
            console.print(f"vLLM starts, which can take a minute; its own log: {output / LOG_FILE}.", highlight=False)
        with held_to(setting.vram_budget, policy_device(setting.model, setting.device)):
            measure(algo, setting, backend, cycles, output, add)
    groups = newest(read_jsonl(path))
    page = ["# Cycles of training, measured", *written(sheets(groups)), ""]
    (output / TABLE_FILE).write_text("\n".join(page), encoding="utf-8")
    here = [group for group in groups if next(iter(group.values())).start["setting"] in measured]
    for part in drawn(sheets(here)):
        console.print(part, highlight=False)
    return all(check.passed is not False for group in here for check in checks(group))


def measure(
    algo: Any, setting: Setting, backend_name: Backend, cycles: int, output: Path, add: Callable[[Row], None]
) -> None:
    """Make policy, engine and backend, run the cycles, and close; `add` gets each row when it is finished.

    Rows have `row`: "start" (what is measured, where, with what), "cycle" (the last one has the `samples` of a card's
    memory, by seconds since it began), or "end" (what the worker left behind).
    """
    config = setting.config(backend_name)
    device = policy_device(config.model, config.device)
    dtype = select_dtype("auto", device)
    name = {"began": time.strftime("%Y-%m-%d %H:%M:%S"), "backend": backend_name}
    looks: list[MemorySample] = []
    recorder = MemoryRecorder(device, looks.extend)
    link = link_speed(device)  # what this leaves on the card is gone before the plan is made
    started = time.perf_counter()
    group = None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(recorder.stop, "fault", wait=False)  # without a fault it has stopped already
        recorder.start()
        policy = Policy(config, setting.prompt_tokens, cycles, folder)
        plan = plan_run(config, policy.config, policy.longest, device, dtype)
        model = policy.load(dtype)
        backend = stack.enter_context(closing(make_backend(config, model, policy.tokenizer, device, plan, output)))
        engine = None
        if backend_name != "vllm-alone":
            engine = make_engine(model, config, algo, plan, device, shared=backend.channel)
            if backend.takes_card:
                engine.release()
        backend.start()
        facts = None
        if isinstance(backend, VllmColocated):
            facts = {key: backend.facts[key] for key in ("vllm", "torch", "device")}
            group = os.getpgid(backend.facts["pid"])
        if engine is None:
            backend.sync(model.named_parameters(), 0)
        add({
            "row": "start", **name,
            "setting": {
                "model": setting.model, "parameters": model.num_parameters(),
                "dtype": str(dtype).removeprefix("torch."),
                "responses": config.rollout_batch_size, "group_size": config.group_size,
                "prompt_tokens": setting.prompt_tokens if policy.random else None, "max_tokens": config.max_tokens,
                "vram_budget": setting.vram_budget, "optimizer_state": config.optimizer_state, "engine": setting.engine,
                "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            },
            "command": setting.command(backend_name, cycles),
            "environment": describe_environment() | {"vllm": facts},
            "link_gb_per_s": link,
            "side_by_side": config.generation_batch_size,
            "weight_bytes": sum(p.nbytes for p in model.parameters()),
            "plan": plan.to_json(),
            "seconds": time.perf_counter() - started,
            "memory": memory(recorder, backend),
        })  # fmt: skip
        for number, prompts in enumerate(policy.prompts, start=1):
            looks.clear()
            recorder.start()
            if engine is None:
                row = generation(config, backend, prompts, policy.stop, number)
            else:
                row = cycle(algo, config, engine, backend, prompts, policy, device, number)
            row["memory"] = memory(recorder, backend)
            if number == cycles and device.type == "cuda":
                zero = looks[0].t
                row["samples"] = [{"t": look.t - zero, "reserved": look.reserved, "card": look.card} for look in looks]
            add({"row": "cycle", **name, **row})
    add({"row": "end", **name, "orphans": [] if group is None else group_members(group)})


def cycle(
    algo: Any,
    config: ResolvedConfig,
    engine: Engine,
    backend: RolloutBackend,
    prompts: list[list[int]],
    policy: Policy,
    device: torch.device,
    number: int,
) -> Row:
    """One rollout batch, from the trainer's leaving the card to its optimizer step."""
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        wait(device)
        began = time.perf_counter()
        yield
        wait(device)
        seconds[name] = time.perf_counter() - began

    began = time.perf_counter()
    if backend.takes_card:
        with phase("leave"):
            engine.release()
    asked = len(backend.events) if isinstance(backend, VllmColocated) else 0
    with phase("load"):
        backend.sync(engine.weights(), number)
    if isinstance(backend, VllmColocated):
        calls = {event.call: event.seconds for event in backend.events[asked:]}
        calls |= {"write": seconds["load"] - sum(calls.values()), "verify": backend.verify_seconds}
        calls["load"] -= backend.verify_seconds
        seconds |= calls
    with phase("generate"):
        completions = generate(config, backend, prompts, policy.stop, number)
    with phase("sleep"):
        backend.release()
    batch = make_batch(algo, policy.tokenizer.pad_token_id, prompts, completions, made_up_advantages(algo, config))
    if backend.takes_card:
        with phase("return"):  # no response has a gradient, so there is nothing to do but to come back
            engine.score({**batch, "advantages": torch.zeros_like(batch["advantages"])})
    found = {}
    if config.scores:
        with phase("score"):
            log_probs = engine.score(batch)["log_probs"]
        found = mismatch(batch["rollout_log_probs"], log_probs, batch["response_mask"])
    with phase("update"):
        loss, _ = engine.accumulate(batch)
        norm = engine.step(config.learning_rate)
    whole = time.perf_counter() - began
    tokens = sum(len(c.token_ids) for c in completions)
    return {
        "cycle": number,
        "seconds": seconds | {"rest": whole - sum(seconds.values())},
        "cycle_seconds": whole,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds["generate"],
        "loss": loss,
        "grad_norm": norm,
        **found,
    }


def generation(
    config: ResolvedConfig, backend: RolloutBackend, prompts: list[list[int]], stop: Sequence[str], number: int
) -> Row:
    """A rollout batch of an engine that has weights and stays awake."""
    began = time.perf_counter()
    completions = generate(config, backend, prompts, stop, number)
    whole = time.perf_counter() - began
    tokens = sum(len(c.token_ids) for c in completions)
    return {
        "cycle": number,
        "seconds": {"generate": whole},
        "cycle_seconds": whole,
        "tokens": tokens,
        "tokens_per_second": tokens / whole,
    }


def generate(
    config: ResolvedConfig, backend: RolloutBackend, prompts: list[list[int]], stop: Sequence[str], number: int
) -> list[Completion]:
    """What the loop asks of a backend in one rollout batch."""
    return backend.generate(
        prompts, n=config.group_size, max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p,
        stop=stop, seed=stream_seed(config.seed, ROLLOUT_STREAM, number),
    )  # fmt: skip


def made_up_advantages(algo: Any, config: ResolvedConfig) -> Tensor:
    """Those of a rollout batch whose responses are right and wrong in turns, float32 [B]."""
    rewards = [float(i % 2) for i in range(config.rollout_batch_size)]
    preset = config.preset
    advantages: Tensor = algo.compute_group_normalized_rewards(
        torch.tensor(rewards), config.group_size, preset.baseline, ADVANTAGE_EPS, preset.advantage_normalizer
    )[0]
    return advantages


def memory(recorder: MemoryRecorder, backend: RolloutBackend) -> dict[str, int | None]:
    """End the recorder's phase: bytes of `card` (all programs, the most since the phase began; None without one),
    `allocated` and `reserved` by the trainer's torch there (the most), resident sets of `trainer` and `worker`, and
    `shared`: the weight channel and what lies in /dev/shm.
    """
    give_heap_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; what it keeps for later is no growth
    if give_heap_back is not None:
        give_heap_back(0)
    point = recorder.stop("cycle")
    free, total = machine.shared_memory() or (0, 0)
    return {
        "card": point.card_used_bytes,
        "allocated": point.card_peak_bytes,
        "reserved": point.card_reserved_bytes,
        "trainer": point.host_bytes,
        "worker": backend.memory.get("host") if isinstance(backend, VllmColocated) else None,
        "shared": total - free + (0 if backend.channel is None else backend.channel.buffer.nbytes),
    }


class Policy:
    """What generates and is trained, and the prompts of every cycle.

    A published model gets random weights, made-up prompts of one length and no stop string: nearly every response then
    has the longest length. vLLM reads configuration and tokenizer from `folder`; the tokenizer is the toy model's, as
    nobody reads the texts. Any other model gets its own tokenizer and embedded problems.

    Attributes:
        config, tokenizer: of the policy.
        prompts: token ids, [cycles][prompts of a batch][length].
        longest: tokens of the longest prompt.
        stop: strings that end a response.

    Raises:
        UserError: prompts and responses do not fit the model's context.
    """

    def __init__(self, run: ResolvedConfig, prompt_tokens: int, cycles: int, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.random = run.model in PUBLISHED
        self.config: PreTrainedConfig = published_config(run.model) if self.random else load_config(run.model)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(TOY if self.random else run.model)
        count = run.rollout_batch_size // run.group_size
        self.stop: Sequence[str] = ()
        if self.random:
            self.config.eos_token_id = self.tokenizer.eos_token_id
            self.config.pad_token_id = self.tokenizer.pad_token_id
            room = self.config.max_position_embeddings - prompt_tokens
            if prompt_tokens < 1 or room < 1:
                raise UserError(
                    f"--prompt-tokens is {prompt_tokens}; it must be at least 1 and below the model's context of "
                    f"{self.config.max_position_embeddings}."
                )
            generator = torch.Generator().manual_seed(run.seed)
            shape = (cycles, count, prompt_tokens)
            self.prompts = torch.randint(2, self.config.vocab_size, shape, generator=generator).tolist()
        else:
            template = load_prompt(run.prompt)
            problems = toy_problems("train", cycles * count)
            room = room_for_response(self.config, self.tokenizer, template, problems)
            ids = [encode_prompt(self.tokenizer, template.render(p.question)) for p in problems]
            self.prompts = [ids[i : i + count] for i in range(0, len(ids), count)]
            self.stop = template.stop
        check_context(room, run.max_tokens)
        self.longest: int = self.config.max_position_embeddings - room

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model, on the CPU."""
        if not self.random:
            return load_policy(self.run.model, device="cpu", dtype=str(dtype).removeprefix("torch."))[0]
        model = random_model(self.config, dtype=dtype, seed=self.run.seed)
        model.config.architectures = [type(model).__name__]
        model.config.name_or_path = str(self.folder)
        model.config.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)
        return model
