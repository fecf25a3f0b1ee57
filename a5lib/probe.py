"""`a5 probe`: does a full-parameter update of this model fit this card? Two updates are taken, and what they must leave
behind is checked.

The probe is the off-policy loop in small: a rollout batch of made-up responses is scored once, then two train batches
of it are updated on with GSPO. It passes when nothing ran out of memory, the gradient of every tensor was finite and
not zero, both moments of every tensor are alive, and every tensor has changed. What is learned means nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from a5lib.config import EngineName, OptimizerState, ResolvedConfig, TrainConfig, resolve
from a5lib.course.exercises import require_for_training
from a5lib.engines import Engine
from a5lib.engines.choice import make_engine, plan_run
from a5lib.engines.plan import Plan
from a5lib.errors import UserError
from a5lib.models import load_config, load_policy, select_device, select_dtype
from a5lib.recorder import MemoryRecorder
from a5lib.records import MemoryPoint
from a5lib.synthetic import PUBLISHED, made_up_batch, published_config, random_model

GIB = 2**30
# Of the two steps. After the small one the ratios of the second update are near 1, as in training. The large one moves
# even a weight of 1 by more than bfloat16 rounds away; nothing runs after it.
LEARNING_RATES = (1e-5, 1e-2)
GROUP = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Phase:
    """Seconds and peaks of one phase."""

    name: str
    seconds: float
    memory: MemoryPoint


@dataclass
class Probe:
    """What a probe found: phases as far as it came, and each check with whether it passed and in which words."""

    plan: Plan
    phases: list[Phase] = field(default_factory=list)
    checks: dict[str, tuple[bool, str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every check was made and passed."""
        return bool(self.checks) and all(fine for fine, _ in self.checks.values())


def probe(
    algo: Any,
    *,
    model: str = "olmo2-1b",
    vram_budget: float | None = None,
    engine: EngineName | None = None,
    optimizer_state: OptimizerState = "bf16",
    sequences: int = 8,
    tokens: int = 672,
    device: str = "auto",
    seed: int = 0,
) -> Probe:
    """Take the two updates and check them.

    Args:
        algo: the exercise functions (see `a5lib.course.load_algo`).
        model: a name in `a5lib.synthetic.PUBLISHED`, which gets random weights, or a model as `a5 train` takes it.
        vram_budget: GiB on the card that the plan may use, and a hard cap on torch's allocator. None: what is free.
        engine: a name; None: what the budget allows.
        optimizer_state: precision of AdamW's state.
        sequences: rows of each train batch, a multiple of 4.
        tokens: columns of the batch; 16 in 21 of them, such as 512 of 672, are the response.
        device: as in `a5lib.models.select_device`.
        seed: of weights and tokens.

    Raises:
        UserError: sizes that do not fit together, or a plan that does not fit the budget.
    """
    target = select_device(device)
    dtype = select_dtype("auto", target)
    rollouts, response = len(LEARNING_RATES) * sequences, max(1, tokens * 16 // 21)
    recorder = MemoryRecorder(target)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        recorder.start()
        started = time.perf_counter()
        finished = False
        try:
            yield
            finished = True
        finally:
            memory = recorder.stop(name, wait=finished)
            found.phases.append(Phase(name, time.perf_counter() - started, memory))

    config = resolve(
        TrainConfig(
            model=model, algorithm="offpolicy_gspo", rollout_batch_size=rollouts, train_batch_size=sequences,
            group_size=GROUP, max_tokens=response, optimizer_state=optimizer_state, learning_rate=LEARNING_RATES[0],
            engine=engine, vram_budget=vram_budget, recompute_layers=True, head="fused", seed=seed,
            gradient_accumulation_steps=sequences,
        )
    )  # fmt: skip
    require_for_training(algo, config)
    given = published_config(model) if model in PUBLISHED else load_config(model)
    trainer_alone = dataclasses.replace(config, generation_batch_size=0)
    plan = plan_run(trainer_alone, given, tokens + 1 - response, target, dtype)
    found = Probe(plan)
    with held_to(vram_budget, target):
        try:
            with phase("load"):
                policy, trainer = _build(config, algo, plan, target, dtype)
            before = digests(policy)
            batch = made_up_batch(
                vocabulary=policy.config.vocab_size, sequences=rollouts, tokens=tokens, response=response,
                group_size=GROUP, seed=seed,
            )  # fmt: skip
            with phase("score"):
                batch["old_log_probs"] = trainer.score(batch)["log_probs"]
            norms = []
            for update, learning_rate in enumerate(LEARNING_RATES):
                rows = slice(update * sequences, (update + 1) * sequences)
                with phase(f"update {update + 1}"):
                    trainer.accumulate({name: values[rows] for name, values in batch.items()})
                with phase(f"step {update + 1}"):
                    norms.append(trainer.step(learning_rate))
                if update == 0:
                    found.checks["gradients"] = check_gradients(policy, trainer)
            found.checks["norms"] = check_norms(norms)
            found.checks["moments"] = check_moments(policy, trainer)
            found.checks["weights"] = check_changed(before, digests(policy))
        except torch.OutOfMemoryError as error:
            found.checks["memory"] = (False, f"the card ran out of memory: {_first_sentence(error)}")
        except FloatingPointError as error:
            found.checks["gradients"] = (False, str(error))
    return found


@contextmanager
def held_to(budget: float | None, device: torch.device) -> Iterator[None]:
    """Within, `make_engine` may hold torch's allocator to a budget in GiB; what comes after is free again.

    Raises:
        UserError: the budget is above what the card has.
    """
    if budget is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if budget * GIB > total:
        raise UserError(f"--vram-budget is {budget:g} GiB and this card has {total / GIB:.1f}; give at most that.")
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _build(
    config: ResolvedConfig, algo: Any, plan: Plan, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, Engine]:
    home = device if plan.engine == "resident" else torch.device("cpu")
    if config.model in PUBLISHED:
        model = random_model(published_config(config.model), dtype=dtype, device=home, seed=config.seed)
    else:
        model = load_policy(config.model, device=str(home), dtype=str(dtype).removeprefix("torch."))[0]
    return model, make_engine(model, config, algo, plan, device)


def digests(model: PreTrainedModel) -> dict[str, bytes]:
    """A fingerprint of each parameter, so that no second copy of the model is needed to see a change."""
    return {
        name: hashlib.blake2b(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
        for name, p in model.named_parameters()
    }


def moments(model: PreTrainedModel, engine: Engine) -> Iterator[tuple[str, str, Tensor | None]]:
    """Name of the parameter, name of the moment, and the moment, or None where the optimizer has none."""
    state = engine.tensors()["optimizer"]
    for i, (name, _) in enumerate(model.named_parameters()):
        for moment in MOMENTS:
            yield name, moment, state.get(f"{i}.{moment}")


def check_gradients(model: PreTrainedModel, engine: Engine) -> tuple[bool, str]:
    """After the first step the first moment is the gradient times a constant: where is it not finite, or all zero?"""
    bad = [name for name, moment, value in moments(model, engine) if moment == "exp_avg" and not _alive(value)]
    return _verdict(bad, len(list(model.parameters())), "gradients finite and not zero")


def check_moments(model: PreTrainedModel, engine: Engine) -> tuple[bool, str]:
    """Both moments of every tensor are there, finite and not all zero."""
    found = list(moments(model, engine))
    bad = [f"{moment} of {name}" for name, moment, value in found if not _alive(value)]
    return _verdict(bad, len(found), "moments finite and not zero")


def check_norms(norms: list[float]) -> tuple[bool, str]:
    """The gradient norm of every update is finite and not zero."""
    words = ", ".join(f"{norm:.4g}" for norm in norms)
    return all(0 < norm < float("inf") for norm in norms), f"gradient norms {words}"


def check_changed(before: dict[str, bytes], after: dict[str, bytes]) -> tuple[bool, str]:
    """Every parameter has other bits than before."""
    return _verdict([name for name in before if before[name] == after[name]], len(before), "parameters changed")


def _alive(value: Tensor | None) -> bool:
    return value is not None and bool(value.isfinite().all()) and bool(value.any())


def _verdict(bad: list[str], total: int, what: str) -> tuple[bool, str]:
    words = f"{total - len(bad)} of {total} {what}"
    return not bad, words + (f"; not {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") if bad else "")


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0].strip().rstrip(".")


def print_probe(found: Probe, console: Console) -> None:
    """The phases as a table, the checks as lines, and PASS or FAIL."""
    table = Table(title=f"Peaks of the {found.plan.engine.replace('_', '-')} engine, GiB")
    for column in ("phase", "seconds", "predicted", "allocated", "reserved", "whole card", "process"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in found.phases:
        memory, predicted = phase.memory, found.plan.peak(phase.name.split()[0])
        sizes = (
            predicted,
            memory.card_peak_bytes,
            memory.card_reserved_bytes,
            memory.card_used_bytes,
            memory.host_bytes,
        )
        table.add_row(phase.name, f"{phase.seconds:.2f}", *("-" if not size else f"{size / GIB:.2f}" for size in sizes))
    console.print(table)
    for fine, words in found.checks.values():
        console.print(f"{'ok  ' if fine else 'FAIL'} {words}", highlight=False, markup=False)
    console.print("PASS" if found.passed else "FAIL")
