"""`a5 bench update`: time and memory of one update, row by row of `bench_variants.VARIANTS`, each row in a process of
its own.

Every row has the same made-up inputs and runs on random weights in a published size. A row's record goes to rows.jsonl
in the output folder; the tables are made from that file, so they are drawn again without a card. A row that fails or
takes too long is in the table too, with the reason.

    tokens/s                tokens of the sequences that were run, padding not counted, over the median seconds
    tokens that count/s     response tokens whose advantage is not 0, over the median seconds
    utilisation             model FLOP/s over the card's: of this process's own product of 8192 x 8192 bfloat16 matrices

The model's FLOPs are those of each sequence by itself: 6 for each weight of a layer and each token, 6 for each weight
of the head and each token that counts, and 12 x layers x width for each pair of a token and one before it, width being
that of all heads together (scoring alone: a third of it all). What is computed twice to save memory counts once, and a
prompt that is computed once for a group counts with each of its responses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from a5lib.bench_variants import GROUPS, SETTINGS, VARIANTS, Variant
from a5lib.config import ResolvedConfig, TrainConfig, nearest, resolve
from a5lib.course.exercises import load_algo, require_for_training
from a5lib.engines import Batch
from a5lib.engines.choice import compiles, make_engine
from a5lib.engines.plan import CONTEXT, Plan, UpdateSize, plan_update
from a5lib.errors import UserError
from a5lib.memory import ModelShape
from a5lib.models import leave_out_cudnn_attention, select_device, select_dtype
from a5lib.peers import PEERS, Update, adamw_numbers
from a5lib.recorder import MemoryRecorder
from a5lib.runlog import describe_environment, read_jsonl
from a5lib.synthetic import made_up_batch, published_config, random_model

ROWS_FILE, TABLE_FILE = "rows.jsonl", "table.md"
GIB = 2**30
LINK_BYTES = 1 << 28
MATRIX = 8192
PEER_PACKAGES = ("trl", "liger-kernel", "torchao", "bitsandbytes")

COMMAND = (sys.executable, "-m", "a5lib.bench_update")  # the process of one row

Row = dict[str, Any]


# --- all rows: a process for each


def bench_update(
    names: Sequence[str] = ("all",),
    output: Path = Path("runs/bench-update"),
    *,
    device: str = "auto",
    warmups: int | None = None,
    updates: int | None = None,
    change: Callable[[Variant], Variant] = lambda variant: variant,
    console: Console | None = None,
) -> list[Row]:
    """Run rows of the benchmark and write what came out.

    While a row builds its model, the process of the next one imports its libraries and then waits: that costs no time
    of the card, and no import takes a core beside updates that are being measured.

    Args:
        names: rows or groups of rows by name; "all"; or "none", to draw the tables again from what is there.
        output: folder; new rows are added to those that it holds, and the newest of a name counts.
        device: as in `a5lib.models.select_device`.
        warmups, updates: in place of each row's own numbers.
        change: applied to each row, such as `bench_variants.shrunk`.
        console: where the tables go.

    Returns:
        The records of the rows that were run.

    Raises:
        UserError: an unknown name, a number that is too small, a function that a row needs and that is not written, or
        a folder that cannot be written.
    """
    for name, value, least in (("warmups", warmups, 0), ("updates", updates, 1)):
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}.")
    console = console or Console()
    numbers: dict[str, Any] = {k: v for k, v in (("warmups", warmups), ("updates", updates)) if v is not None}
    chosen = [dataclasses.replace(change(v), **numbers) for v in choose(names)]
    algo = load_algo()
    for variant in chosen:
        if variant.peer is None:
            require_for_training(algo, config_of(variant))
    where = str(select_device(device))
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)
        rows = []
        with open(output / ROWS_FILE, "a", encoding="utf-8") as file:
            for variant, row in zip(chosen, _run_all(chosen, output, where), strict=True):
                rows.append(row)
                file.write(json.dumps(row, allow_nan=False) + "\n")
                file.flush()
                console.print(f"{len(rows)}/{len(chosen)} {variant.name}: {_one_line(row)}", highlight=False)
        newest = latest_rows(output)
        (output / TABLE_FILE).write_text(markdown(newest), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another --output.") from error
    for table in tables(newest):
        console.print(table)
    return rows


def choose(names: Sequence[str]) -> list[Variant]:
    """The rows that are meant, in the table's order.

    >>> [v.name for v in choose(["losses", "host"])]
    ['host', 'clip', 'scoring']
    """
    known = [v.name for v in VARIANTS]
    for name in names:
        if name not in (*known, *GROUPS, "all", "none"):
            raise UserError(
                f"Unknown variant {name!r}; did you mean {nearest(name, [*known, *GROUPS])!r}? Groups are "
                f"{', '.join(GROUPS)}; rows are {', '.join(known)}."
            )
    return [v for v in VARIANTS if {"all", v.name, v.group} & set(names)]


def latest_rows(folder: Path) -> list[Row]:
    """The newest record of each row in a folder, in the table's order."""
    path = folder / ROWS_FILE
    rows = {row["variant"]["name"]: row for row in (read_jsonl(path) if path.exists() else [])}
    order = {v.name: i for i, v in enumerate(VARIANTS)}
    return sorted(rows.values(), key=lambda row: order.get(row["variant"]["name"], len(order)))


def _run_all(variants: Sequence[Variant], folder: Path, device: str) -> Iterable[Row]:
    with contextlib.ExitStack() as stack:

        def start(variant: Variant) -> subprocess.Popen[str]:
            log = stack.enter_context(open(_log(folder, variant), "w", encoding="utf-8"))
            pipe = subprocess.PIPE
            process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)
            stack.callback(_end, process)
            return process

        following = start(variants[0]) if variants else None
        for i, variant in enumerate(variants):
            process = following
            assert process is not None
            result = folder / "logs" / f"{variant.name}.json"
            result.unlink(missing_ok=True)
            _say(process, json.dumps({"variant": dataclasses.asdict(variant), "device": device, "result": str(result)}))
            following = start(variants[i + 1]) if i + 1 < len(variants) else None
            if following is not None and following.stdout is not None:  # until it says "imported", or has died
                select.select([following.stdout], [], [], 60 * variant.minutes)
            _say(process, "measure")
            yield _ended(process, variant, folder, result)


def _log(folder: Path, variant: Variant) -> Path:
    return folder / "logs" / f"{variant.name}.txt"


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died already; its exit code will say so
        process.stdin.write(line + "\n")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _ended(process: subprocess.Popen[str], variant: Variant, folder: Path, result: Path) -> Row:
    """Wait for a row, and read what it wrote."""
    try:
        code = process.wait(timeout=60 * variant.minutes)
    except subprocess.TimeoutExpired:
        _end(process)
        return _failed(variant, f"given up after {variant.minutes:g} minutes")
    if not result.exists():
        last = _log(folder, variant).read_text(encoding="utf-8", errors="replace").strip()
        words = last.splitlines()[-1][:200] if last else "it said nothing"
        why = "killed, as when the host's memory runs out" if code == -9 else f"exit code {code}"
        return _failed(variant, f"the process ended without a result ({why}): {words}")
    row: Row = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return row


def _failed(variant: Variant, reason: str) -> Row:
    return {"variant": dataclasses.asdict(variant), "error": reason}


# --- one row: in its process


def main() -> None:
    """The process of one row: libraries are imported by now; wait for the request, run it, write the record.

    Standard output says so once; what is printed later goes to the log, as standard error does.
    """
    print("imported", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = sys.stdin.readline()
    if not line:
        return  # nobody needs this row any more
    request = json.loads(line)
    variant = Variant(**request["variant"])
    try:
        row = run_row(variant, request["device"], before_measuring=_wait_for_a_word)
    except Exception as error:
        traceback.print_exc()
        words = " ".join(str(error).split())
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        row = _failed(variant, f"{name}{words}"[:400])
    Path(request["result"]).write_text(json.dumps(row, allow_nan=False), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # giving back tens of GiB page by page takes longer than the row


def _wait_for_a_word() -> None:
    if not sys.stdin.readline():
        os._exit(0)  # whoever asked for the row has ended


def run_row(variant: Variant, device_name: str, before_measuring: Callable[[], object] = lambda: None) -> Row:
    """Build what a row needs, run its warm-ups and updates, and return its record, JSON values only."""
    device = torch.device(device_name)
    began = time.perf_counter()
    machine = {"link_gb_per_s": link_speed(device), "matmul_flop_per_s": matmul_speed(device)}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured with is not part of the row
    given = published_config(variant.model)
    batch = made_up_batch(
        vocabulary=given.vocab_size, sequences=variant.sequences, tokens=variant.tokens, response=variant.response,
        group_size=variant.group_size, ragged=variant.ragged, zero_share=variant.zero_share,
    )  # fmt: skip
    model, update, plan = build(variant, force_padding(batch) if variant.padded else batch, device)
    setup = time.perf_counter() - began
    before_measuring()
    seconds, phases, losses, norms = measure(
        update, variant.warmups, variant.updates, MemoryRecorder(device, interval=0.2)
    )
    work = count_work(model, batch, scoring=variant.scoring)
    row: Row = {
        "variant": dataclasses.asdict(variant),
        "error": None,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seconds": seconds,
        "setup_seconds": round(setup, 2),
        "loss": losses,
        "grad_norm": norms,
        "cap_bytes": cap_bytes(config_of(variant), device),
        "predicted": predictions(variant, plan),
        "plan": None if plan is None else plan.to_json(),
        "phases": phases,
        **work,
        **machine,
        "environment": describe_environment() | {"packages": _peer_versions(variant)},
    }
    return row | derived(row)


def derived(row: Row) -> Row:
    """What follows from a row's own figures: peaks over the phases, median, rates, utilisation, error of the ledger."""
    peaks = {name: max(phase[name] for phase in row["phases"].values()) for name in ("allocated", "reserved", "host")}
    cards = [phase["card"] for phase in row["phases"].values() if phase["card"] is not None]
    median = statistics.median(row["seconds"]["total"])
    flops = row["matmul_flop_per_s"]
    predicted = max((row["predicted"] or {}).values(), default=None)
    measured = peaks["allocated"]
    return {
        "peak_allocated": measured,
        "peak_reserved": peaks["reserved"],
        "peak_host": peaks["host"],
        "peak_card": max(cards, default=None),
        "predicted_bytes": predicted,
        "predicted_error": None if not (predicted and measured) else predicted / measured - 1,
        "median_seconds": median,
        "tokens_per_second": row["tokens_run"] / median,
        "counting_tokens_per_second": row["tokens_that_count"] / median,
        "utilisation": row["model_flops"] / median / flops,
    }


def build(variant: Variant, batch: Batch, device: torch.device) -> tuple[PreTrainedModel, Update, Plan | None]:
    """The model, its update in two halves, and the plan of our engines."""
    algo, config = load_algo(), config_of(variant)
    given, dtype = published_config(variant.model), select_dtype("auto", device)
    if variant.peer:
        model = random_model(given, dtype=dtype, device=device)
        return model, PEERS[variant.peer](model, batch, config, algo), None
    leave_out_cudnn_attention()  # as in training; the peers have torch's own choice
    plan = plan_of(variant, config, device, dtype)
    model = random_model(given, dtype=dtype, device=device if plan.engine == "resident" else "cpu")
    # With a budget this is where torch's allocator is held to it.
    engine: Any = make_engine(model, config, algo, plan, device)
    if variant.adamw != "ours":
        engine.optimizer = TorchAdamW(
            model.parameters(), foreach=variant.adamw == "foreach", **adamw_numbers(config),
            master=config.optimizer_state == "fp32" and dtype == torch.bfloat16,
        )  # fmt: skip
    if variant.scoring:
        return model, Update(lambda: float(engine.score(batch)["log_probs"].mean()), lambda: None), plan
    if config.preset.importance_reweighting_method != "none":
        batch = batch | {"old_log_probs": engine.score(batch)["log_probs"]}
    return model, Update(lambda: engine.accumulate(batch)[0], lambda: engine.step(config.learning_rate)), plan


def plan_of(variant: Variant, config: ResolvedConfig, device: torch.device, dtype: torch.dtype) -> Plan:
    """The plan of a row; without a budget the layer-major engine keeps everything on the host."""
    scored = variant.scoring or config.preset.importance_reweighting_method != "none"
    return plan_update(
        ModelShape.of(published_config(variant.model)),
        UpdateSize(
            variant.sequences,
            variant.tokens,
            variant.response,
            scored=variant.sequences if scored else 0,
            group=variant.group_size,
        ),
        budget=None if config.vram_budget is None else int(config.vram_budget * GIB),
        engine=config.engine,
        optimizer_state=config.optimizer_state,
        bytes_per_weight=dtype.itemsize,
        compiled=compiles(device, dtype),
        microbatch=math.ceil(config.train_batch_size / config.gradient_accumulation_steps),
        recompute_layers=config.recompute_layers,
        head=config.head,
        on_card=device.type == "cuda",
    )


def cap_bytes(config: ResolvedConfig, device: torch.device) -> int | None:
    """The bytes that `make_engine` holds torch's allocator to: the budget without CUDA's own memory."""
    if config.vram_budget is None or device.type != "cuda":
        return None
    return int(config.vram_budget * GIB) - CONTEXT


def predictions(variant: Variant, plan: Plan | None) -> dict[str, int] | None:
    """The bytes that the plan predicts for each half of an update; None where it knows nothing of what is run."""
    if plan is None or variant.adamw != "ours":
        return None
    if variant.scoring:
        return {"accumulate": plan.peak("score"), "step": plan.peak("load")}
    return {"accumulate": plan.peak("update"), "step": plan.peak("step")}


def config_of(variant: Variant) -> ResolvedConfig:
    """The resolved config of a row; an update is one whole train batch."""
    fields = {**SETTINGS, **variant.settings}
    if variant.microbatch is not None:
        fields["gradient_accumulation_steps"] = math.ceil(variant.sequences / variant.microbatch)
    return resolve(
        TrainConfig(
            model=variant.model, rollout_batch_size=variant.sequences, train_batch_size=variant.sequences,
            group_size=variant.group_size, max_tokens=variant.response, **fields,
        )
    )  # fmt: skip


def measure(
    update: Update, warmups: int, updates: int, recorder: MemoryRecorder
) -> tuple[dict[str, list[float]], dict[str, dict[str, int | None]], list[float], list[float | None]]:
    """Run updates one after another, waiting for the card after each half.

    Returns:
        seconds of "accumulate", "step" and "total" of each update after the warm-ups; peaks in bytes of each half
        over all updates, warm-ups too; losses and gradient norms of all.
    """
    seconds: dict[str, list[float]] = {"accumulate": [], "step": [], "total": []}
    phases: dict[str, dict[str, int | None]] = {}
    losses: list[float] = []
    norms: list[float | None] = []
    for number in range(warmups + updates):
        taken: dict[str, float] = {}
        for phase, half in (("accumulate", update.accumulate), ("step", update.step)):
            recorder.start()
            wait(recorder.device)
            started = time.perf_counter()
            value = half()
            wait(recorder.device)
            taken[phase] = time.perf_counter() - started
            point = recorder.stop(phase)
            (losses if phase == "accumulate" else norms).append(value)  # type: ignore[arg-type]
            new = {"allocated": point.card_peak_bytes, "reserved": point.card_reserved_bytes,
                   "card": point.card_used_bytes, "host": point.host_bytes}  # fmt: skip
            old = phases.setdefault(phase, dict(new))
            phases[phase] = {k: max((v for v in (old[k], new[k]) if v is not None), default=None) for k in new}
        if number >= warmups:
            for phase, value in (taken | {"total": sum(taken.values())}).items():
                seconds[phase].append(value)
    return seconds, phases, losses, norms


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def force_padding(batch: Batch) -> Batch:
    """The same batch for a loop that knows neither lengths nor zero advantages: every row runs at full width.

    The last column counts as response and an advantage of 0 becomes 1e-30, so nothing is cut off or left out.
    """
    mask = batch["response_mask"].clone()
    mask[:, -1] = True
    advantages = torch.where(batch["advantages"] == 0, 1e-30, batch["advantages"])
    return batch | {"response_mask": mask, "advantages": advantages}


def count_work(model: PreTrainedModel, batch: Batch, *, scoring: bool = False) -> dict[str, int]:
    """Tokens and FLOPs of an update with this batch; the file's head gives the formula."""
    mask, kept = batch["response_mask"], batch["advantages"] != 0
    positions = torch.arange(1, mask.shape[1] + 1)
    lengths = (mask * positions).amax(dim=1)[kept]  # up to the last response token
    counting = int(mask[kept].sum())
    config: Any = model.config
    modules: tuple[Any, Any] = (model.get_output_embeddings(), model.get_input_embeddings())
    head, embedding = (module.weight for module in modules)
    layers = model.num_parameters() - embedding.numel() - (0 if head is embedding else head.numel())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int((lengths * lengths).sum()) // 2
    forward = 2 * layers * int(lengths.sum()) + 2 * head.numel() * counting
    forward += 2 * 2 * config.num_hidden_layers * config.num_attention_heads * head_size * pairs
    return {
        "tokens_run": int(lengths.sum()),
        "tokens_that_count": counting,
        "model_flops": forward if scoring else 3 * forward,
    }


def link_speed(device: torch.device) -> dict[str, float] | None:
    """GB/s from pinned host memory to the card and back, each the best of four copies of 256 MiB; None on the CPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    speeds = {}
    for name, target, source in (("to_card", card, host), ("to_host", host, card)):
        best = math.inf
        for _ in range(4):
            wait(device)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            wait(device)
            best = min(best, time.perf_counter() - started)
        speeds[name] = round(LINK_BYTES / best / 1e9, 2)
    return speeds


def matmul_speed(device: torch.device) -> float:
    """FLOP/s of a square matrix product, the best of ten: bfloat16 of 8192 on a card, float32 of 512 on the CPU."""
    size, dtype = (MATRIX, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(10):
        wait(device)
        started = time.perf_counter()
        a @ b
        wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


class TorchAdamW:
    """torch's AdamW behind the face that the resident engine's optimizer has.

    With `master` it keeps float32 copies of the weights, steps those with float32 copies of the gradients, and copies
    the weights back: mixed precision as it is usually done.
    """

    def __init__(self, parameters: Iterable[Tensor], *, foreach: bool, master: bool, **numbers: Any) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters] if master else self.parameters
        self.inner = torch.optim.AdamW(self.masters, foreach=foreach, **numbers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            if master is not parameter:
                master.grad = parameter.grad.float()
            assert master.grad is not None
            master.grad.mul_(grad_scale)
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _peer_versions(variant: Variant) -> dict[str, str]:
    versions = {}
    for name in PEER_PACKAGES if variant.peer else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


# --- tables

HEADERS = ("", "GiB allocated", "predicted", "reserved", "card", "seconds", "accumulate + step", "tokens/s",
           "that count/s", "utilisation")  # fmt: skip
SAME_INPUTS = ("host", "host-fp32", "resident", "published")  # rows of ours that run what the peers run


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table before it is drawn."""

    title: str
    headers: Sequence[str]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def sheets(rows: Sequence[Row]) -> list[Sheet]:
    """One sheet for each group of rows, and the ratios between the peers and us."""
    made = []
    for group in dict.fromkeys(row["variant"]["group"] for row in rows):
        members = [row for row in rows if row["variant"]["group"] == group]
        failed = [f"{row['variant']['what']}: {row['error']}." for row in members if row["error"]]
        made.append(Sheet(group, HEADERS, [_cells(row) for row in members if not row["error"]], failed))
    same = [r for r in rows if not r["error"] and (r["variant"]["peer"] or r["variant"]["name"] in SAME_INPUTS)]
    if any(row["variant"]["peer"] for row in same):
        made.append(_ratios(same))
    return made


def _cells(row: Row) -> list[str]:
    seconds = {name: statistics.median(values) for name, values in row["seconds"].items()}
    times = row["seconds"]["total"]
    predicted, error = row["predicted_bytes"], row["predicted_error"]
    return [
        row["variant"]["what"] + (f" (cap {row['cap_bytes'] / GIB:.2f})" if row["cap_bytes"] else ""),
        _gib(row["peak_allocated"]),
        "-" if not predicted else _gib(predicted) + (f" ({100 * error:+.1f} %)" if error is not None else ""),
        _gib(row["peak_reserved"]),
        "-" if row["peak_card"] is None else _gib(row["peak_card"]),
        f"{statistics.median(times):.3f} ({min(times):.3f}-{max(times):.3f}, {len(times)})",
        f"{seconds['accumulate']:.3f} + {seconds['step']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['counting_tokens_per_second']:,.0f}",
        f"{100 * row['utilisation']:.1f} %",
    ]


def _ratios(rows: Sequence[Row]) -> Sheet:
    """Everything that ran the same inputs, the fastest first, against the fastest and against the smallest peak."""
    ordered = sorted(rows, key=lambda row: row["median_seconds"])
    fastest = ordered[0]["median_seconds"]
    allocated = min(row["peak_allocated"] for row in rows) or 1
    cards = [row["peak_card"] for row in rows if row["peak_card"]]
    cells = [
        [
            row["variant"]["what"],
            f"{row['median_seconds'] / fastest:.2f}",
            f"{row['peak_allocated'] / allocated:.2f}",
            f"{row['peak_card'] / min(cards):.2f}" if row["peak_card"] else "-",
        ]
        for row in ordered
    ]
    headers = (
        "",
        "times the fastest's seconds",
        "times the smallest peak allocated",
        "times the smallest use of the card",
    )
    return Sheet("ratios on the same inputs", headers, cells)


def machine_words(rows: Sequence[Row]) -> str:
    """Card, versions and link speed of the rows, in one line each where they differ."""
    lines = []
    for row in rows:
        if row["error"]:
            continue
        environment = row["environment"]
        cards = ", ".join(card["name"] for card in environment["cards"]) or environment["cpu"]
        versions = {name: environment[name] for name in ("a5lib", "python", "torch", "transformers")}
        words = ", ".join(f"{name} {version}" for name, version in (versions | environment["packages"]).items())
        lines.append(f"{cards}; {words}")
    linked = [row["link_gb_per_s"] for row in rows if not row["error"] and row["link_gb_per_s"]]
    products = [row["matmul_flop_per_s"] for row in rows if not row["error"]]
    speeds = []
    for direction, phrase in (("to_card", "host to card"), ("to_host", "card to host")):
        if linked:
            speeds.append(f"{phrase} {statistics.median(link[direction] for link in linked):.1f} GB/s")
    if products:
        speeds.append(f"matrix product {statistics.median(products) / 1e12:.1f} TFLOP/s")
    return "\n".join([*dict.fromkeys(lines), ", ".join(speeds)]).strip()


def tables(rows: Sequence[Row]) -> list[Table | str]:
    """The sheets for a terminal."""
    return [*drawn(sheets(rows)), machine_words(rows)]


def drawn(sheets: Sequence[Sheet]) -> list[Table | str]:
    """Sheets as tables of a terminal, each with its notes below."""
    parts: list[Table | str] = []
    for sheet in sheets:
        table = Table(title=sheet.title)
        for i, header in enumerate(sheet.headers):
            table.add_column(header, justify="right" if i else "left")
        for cells in sheet.cells:
            table.add_row(*cells)
        parts += [*([table] if sheet.cells else []), *sheet.notes]
    return parts


def markdown(rows: Sequence[Row]) -> str:
    """The sheets for a file."""
    text = ["# An update, measured", "", *machine_words(rows).splitlines(), *written(sheets(rows))]
    text += ["", "Seconds: median (smallest-largest, number). Peaks are the highest of all updates, warm-ups too.", ""]
    return "\n".join(text)


def written(sheets: Sequence[Sheet]) -> list[str]:
    """Sheets as lines of Markdown, each with its notes below."""
    text: list[str] = []
    for sheet in sheets:
        text += ["", f"## {sheet.title[:1].upper()}{sheet.title[1:]}", ""]
        if sheet.cells:
            text += ["| " + " | ".join(sheet.headers) + " |", "|---|" + "--:|" * (len(sheet.headers) - 1)]
            text += ["| " + " | ".join(cells) + " |" for cells in sheet.cells]
        text += [f"\n{note}" for note in sheet.notes]
    return text


def _one_line(row: Row) -> str:
    if row["error"]:
        return str(row["error"])
    return (
        f"{row['median_seconds']:.3f} s, {_gib(row['peak_allocated'])} GiB allocated, set up in "
        f"{row['setup_seconds']:.0f} s"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


if __name__ == "__main__":
    main()
