"""`a5 plan`: what a run would keep where, how much memory each phase takes, and how long the copies would need, without
starting it and without torch.

This file asks and prints. The arithmetic is in `a5lib.engines.plan`, the nearest setting in `a5lib.preflight`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from a5lib import machine
from a5lib.cards import COMMON_SIZES, LINKS, SHARE, USUAL_LINK, find_card, is_known
from a5lib.config import (
    ASSIGNMENT_DEFAULTS,
    MICROBATCH_SIZE,
    OFF_POLICY_TRAIN_BATCH_SIZE,
    TOY,
    TOY_DEFAULTS,
    VLLM_BATCH_SIZE,
    BackendName,
    EngineName,
    OptimizerState,
    TrainConfig,
    nearest,
    resolve,
)
from a5lib.engines.plan import CONTEXT, GIB, PHASES, DoesNotFit, Plan, UpdateSize, gib, plan_update, what_stays
from a5lib.errors import UserError
from a5lib.memory import ModelShape
from a5lib.preflight import Facts, advice, host_needed, measure_link
from a5lib.shapes import SHAPES, published_shape

SMALL = GIB // 100  # buffers that are smaller in every phase are printed as one
PROMPT_TOKENS = 160
LARGEST = 1000  # GiB; a larger number is meant as a card's name


@dataclass(frozen=True)
class Target:
    """The card that is planned for: in words, its bytes, and whether the layer compiles there; `link` is the generation
    and width of its PCIe connector, if that is known.
    """

    words: str
    budget: int
    compiled: bool = True
    link: tuple[int, int] | None = None


@dataclass(frozen=True)
class Request:
    """What is planned: the model's name and shape, the largest batch, and the options of `plan_update`."""

    model: str
    shape: ModelShape
    size: UpdateSize
    options: dict[str, Any]

    def plan(self, **changes: Any) -> Plan:
        return plan_update(self.shape, self.size, **self.options | changes)


def find_shape(model: str) -> tuple[str, ModelShape]:
    """Name and shape of a model: published ones by name or id, others from their config (see `load_config`).

    Raises:
        UserError: there is no such model, or it is of a kind that the ledger cannot count.
    """
    found = published_shape(model)
    if found is not None:
        return found
    if "/" not in model and not Path(model).exists():
        raise UserError(
            f"Unknown model {model!r}; did you mean {nearest(model, list(SHAPES))!r}? Choose from {', '.join(SHAPES)}, "
            "or give a folder or an id."
        )
    from a5lib.models import load_config

    return model, ModelShape.of(load_config(model))


def find_target(vram: str | None) -> Target:
    """What `--vram` means: a number of GiB, a card's name, or, left out, what is free on the card of this machine.

    Raises:
        UserError: it means nothing, or there is no card here.

    >>> find_target("8 GiB").budget // 2**30, find_target("4060").words
    (8, 'RTX 4060, 8 GB')
    """
    if vram is None:
        own = own_card()
        if own is None:
            raise UserError(
                "There is no NVIDIA card here to plan for; give its memory in GiB or its name, such as --vram 8 or "
                "--vram 'RTX 4060'."
            )
        return Target(f"this machine's {own[0]}", own[1])
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", vram, re.IGNORECASE)
    if number is not None and float(number[1]) < LARGEST and not is_known(vram):
        if float(number[1]) == 0:
            raise UserError("--vram is 0; give the GiB that the card has, such as --vram 8.")
        return Target(f"a card of {float(number[1]):g} GiB", int(float(number[1]) * GIB))
    card = find_card(vram)
    return Target(card.full_name, card.memory, card.has_bfloat16, card.link)


def own_card() -> tuple[str, int] | None:
    """Name and free bytes of the card that a run would take, as the driver says; None where there is none.

    It is the first that CUDA_VISIBLE_DEVICES names, by number or the beginning of a UUID; without it, the first.
    Numbers are nvidia-smi's; CUDA may count unlike cards in another order.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first in ("", "-1"):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        named = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle).startswith(first)]
        handle = handles[int(first)] if first.isdecimal() else named[0]
        return str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except Exception:  # no package, no driver, or a driver that does not say
        return None


def make_request(
    *,
    model: str = "olmo2-1b",
    algorithm: str = "grpo",
    sequences: int | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    max_tokens: int | None = None,
    generation_backend: BackendName = "transformers",
    generation_batch_size: int | None = None,
    optimizer_state: OptimizerState = "fp32",
    engine: EngineName | None = None,
) -> Request:
    """What `a5 train` would plan with these flags and a model in bfloat16 on a card.

    Raises:
        UserError: an unknown model or algorithm, or a size below 1.
    """
    defaults = TOY_DEFAULTS if model == TOY else ASSIGNMENT_DEFAULTS
    preset = resolve(TrainConfig(algorithm=algorithm)).preset
    rollouts = defaults["rollout_batch_size"]
    given = {"sequences": sequences, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens,
             "generation_batch_size": generation_batch_size}  # fmt: skip
    for name, value in given.items():
        least = int(name != "generation_batch_size")
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    rows = sequences or (OFF_POLICY_TRAIN_BATCH_SIZE if preset.off_policy else rollouts)
    response = max_tokens or defaults["max_tokens"]
    rollouts = max(rollouts, rows) if preset.off_policy else rows
    alone = generation_backend == "transformers"
    decoded = generation_batch_size
    if decoded is None:
        decoded = defaults["generation_batch_size"] if alone else VLLM_BATCH_SIZE
    scores = not alone or preset.importance_reweighting_method != "none"  # with vLLM the mismatch is measured
    decoded = min(decoded, rollouts)
    name, shape = find_shape(model)
    size = UpdateSize(
        sequences=rows,
        longest=prompt_tokens + response - 1,  # the last token is a label only
        response=response,
        scored=rollouts if scores else 0,
        decoded=decoded if alone else 0,
        served=decoded if generation_backend == "vllm-colocated" else 0,
        sent=generation_backend == "vllm-server",
        group=min(TrainConfig.group_size, rows),
    )
    options = {"optimizer_state": optimizer_state, "engine": engine, "microbatch": math.gcd(rows, MICROBATCH_SIZE),
               "recompute_layers": False, "head": "full"}  # fmt: skip
    return Request(name, shape, size, options)


def print_plan(request: Request, vram: str | None, console: Console) -> None:
    """Plan for a card, and print the ledger, the choice, the host's memory and the time of the copies. Taught in
    notebook 09.

    Raises:
        UserError: nothing fits; names the nearest setting that does.
    """
    target = find_target(vram)
    options = request.options | {"budget": target.budget, "compiled": target.compiled}
    flags = ("--sequences", "--vram")
    try:
        plan = request.plan(**options)
    except DoesNotFit as error:
        more = advice(request.shape, request.size, Facts(), *flags, options)
        raise UserError(f"{error.shortage}; {more}.") from None
    size = request.size
    by = " by vLLM" if size.served else ""
    console.print(
        f"{request.model}, {request.shape.parameters():,} parameters, on {target.words}: {size.sequences} sequences of "
        f"at most {size.longest:,} tokens in an update, {size.decoded or size.served or 'no'} responses decoded side "
        f"by side{by}, AdamW's state {options['optimizer_state']}.",
        highlight=False,
    )
    if not target.compiled:
        console.print("The card computes bfloat16 by emulation only, slowly; nothing is compiled there.")
    console.print(ledger_table(plan))
    console.print(
        f"Choice: the {plan.engine.replace('_', '-')} engine, {plan.microbatches} microbatches of "
        f"{plan.microbatch_tokens:,} tokens. On the card stays: {what_stays(plan)}.",
        highlight=False,
    )
    console.print(
        f"Predicted peak, gaps between buffers included: {plan.budget_needed() / GIB:.2f} of "
        f"{target.budget / GIB:.2f} GiB.",
        highlight=False,
    )
    console.print(host_words(request, plan, flags, options), highlight=False)
    if any(plan.traffic.values()):
        print_transfer(plan, target, console)


def ledger_table(plan: Plan) -> Table:
    """Buffers by phase, in GiB, and their sums."""
    table = Table(title="Predicted on the card, GiB")
    table.add_column("")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    card = {phase: {"CUDA and its kernels": CONTEXT, **plan.card[phase]} for phase in PHASES}
    names = list(dict.fromkeys(name for buffers in card.values() for name in buffers))
    largest = {name: max(buffers.get(name, 0) for buffers in card.values()) for name in names}
    small = [name for name in names if largest[name] < SMALL]
    rows = {name: [card[phase].get(name, 0) for phase in PHASES] for name in names if name not in small}
    if small:
        rows["smaller buffers"] = [sum(card[phase].get(name, 0) for name in small) for phase in PHASES]
    for name, sizes in rows.items():
        table.add_row(name, *(_cell(size) for size in sizes))
    table.add_section()
    table.add_row("all together", *(_cell(sum(card[phase].values())) for phase in PHASES), style="bold")
    return table


def _cell(size: int) -> str:
    return f"{size / GIB:.2f}" if size else ""


def host_words(request: Request, plan: Plan, flags: tuple[str, str], options: dict[str, Any]) -> str:
    """The host's memory by buffer, and whether this machine has it."""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.host.items() if size)
    needed, free = host_needed(plan), machine.host_memory()[0]
    program = (needed - sum(plan.host.values())) / GIB
    words = f"Host memory: {gib(needed)} (in GiB: {parts}, the program itself {program:.2f})."
    if needed <= free:
        return f"{words} This machine has {gib(free, there=True)} free: it fits."
    more = advice(request.shape, request.size, Facts(host_free=free, card_free=options["budget"]), *flags, options)
    return f"{words} This machine has {gib(free, there=True)} free, too little; {more}."


def print_transfer(plan: Plan, target: Target, console: Console) -> None:
    """How long the copies of one update need: at the measured speed, or at assumed speeds where no card is here."""
    inward, outward = (sum(size for name, size in plan.traffic.items() if name.endswith(way)) for way in ("in", "out"))
    travels = f"In one update {inward / 1e9:.1f} GB travel to the card and {outward / 1e9:.1f} GB from it"
    link = _measured()
    if link is not None:
        seconds = plan.transfer_seconds(link.inward, link.outward)
        console.print(
            f"{travels}: {seconds:.2f} s at the {link.inward / 1e9:.1f} and {link.outward / 1e9:.1f} GB/s measured "
            f"here (pageable memory: {link.pageable / 1e9:.1f} GB/s).",
            highlight=False,
        )
        return
    table = Table(title="Time of the copies at assumed speeds")
    for column in ("PCIe", "GB/s each way", "seconds an update"):
        table.add_column(column, justify="left" if column == "PCIe" else "right")
    for speed in sorted(set(LINKS.values()), reverse=True):
        links = [link for link in LINKS if LINKS[link] == speed]
        its = f" ({target.words})" if target.link in links else ""
        words = " or ".join(f"{generation}.0 x{width}" for generation, width in links)
        table.add_row(f"{words}{its}", f"{speed / 1e9:.1f}", f"{plan.transfer_seconds(speed, speed):.2f}")
    console.print(f"{travels}. No card is here to measure; a slot can be narrower than the card.", highlight=False)
    console.print(table)


def _measured() -> Any:
    """The speed of this machine's link; None where there is no card that torch can use."""
    if own_card() is None:
        return None
    import torch

    return measure_link(torch.device("cuda")) if torch.cuda.is_available() else None


@dataclass(frozen=True)
class CardRow:
    """What fits a card of so many gigabytes: the plan and the responses that it decodes side by side, or, without a
    plan, what is short.
    """

    gigabytes: int
    decoded: int
    plan: Plan | None
    short: str = ""

    @property
    def seconds(self) -> float:
        """Of the copies of one update, at the speed of `USUAL_LINK`."""
        return 0.0 if self.plan is None else self.plan.transfer_seconds(LINKS[USUAL_LINK], LINKS[USUAL_LINK])


def card_rows(request: Request, sizes: Sequence[int] = COMMON_SIZES) -> list[CardRow]:
    """One row for each size of card in gigabytes. So many responses are decoded side by side as fit, but no more than
    the request says, and that by halves. Taught in notebook 09.
    """
    rows = []
    by = "served" if request.size.served else "decoded"
    for gigabytes in sizes:
        decoded = getattr(request.size, by)
        while True:
            one = dataclasses.replace(request, size=dataclasses.replace(request.size, **{by: decoded}))
            try:
                rows.append(CardRow(gigabytes, decoded, one.plan(budget=int(SHARE * gigabytes * GIB))))
                break
            except DoesNotFit as error:
                if decoded <= 1:
                    rows.append(CardRow(gigabytes, 0, None, f"needs {gib(error.plan.budget_needed())}"))
                    break
                decoded //= 2
    return rows


def print_cards(request: Request, console: Console) -> None:
    """A row for each common size of card."""
    size = request.size
    table = Table(title=f"{request.model}: {size.sequences} sequences of at most {size.longest} tokens, predicted")
    for column in ("card", "engine", "layers\nkept", "\ndecoded", "peak\nGiB", "host\nGiB", "copies\ns"):
        table.add_column(column, justify="left" if column in ("card", "engine") else "right")
    for row in card_rows(request):
        if row.plan is None:
            table.add_row(f"{row.gigabytes} GB", row.short)
            continue
        layers = sum(name.startswith("layer") for name in row.plan.resident)
        table.add_row(
            f"{row.gigabytes} GB",
            row.plan.engine.replace("_", "-"),
            "all" if row.plan.engine == "resident" else f"{layers} of {request.shape.layers}",
            str(row.decoded),
            f"{row.plan.budget_needed() / GIB:.1f}",
            f"{host_needed(row.plan) / GIB:.1f}",
            f"{row.seconds:.2f}",
        )
    console.print(table)
    console.print(
        f"Of a card, torch sees {100 * SHARE:.1f} %. 'layers kept': with gradient and optimizer state; 'decoded': "
        f"responses side by side; 'copies': of one update, at an assumed {LINKS[USUAL_LINK] / 1e9:.0f} GB/s each way "
        f"(PCIe {USUAL_LINK[0]}.0 x{USUAL_LINK[1]}).",
        highlight=False,
    )
