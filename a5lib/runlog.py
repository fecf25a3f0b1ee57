"""The run folder's records: what ran, on what machine, and what was measured, as plain text that outlives the process.

    config.json          the resolved config
    command.txt          the command that repeats the run
    environment.json     versions and machine
    metrics.jsonl        a line for each rollout batch
    evaluations.jsonl    a line for each validation
    memory.jsonl         how much memory was in use while each phase ran
    vllm-worker.log      what vLLM printed, where it generated
    rollouts/            step-000010.jsonl: a line for each response of that step

A line of evaluations.jsonl holds "step", "kind" ("sampled" or "greedy") and the fields of `evaluation.Evaluation`.
All JSON is strict: NaN and infinity are refused, not written as null, so that a reader never meets a hole without a
reason.
This file does not know how the numbers come about; `a5lib.records.METRICS` and `MemorySample` there say what they mean.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import psutil
import torch

from a5lib import __version__
from a5lib.config import TrainConfig, flag, resolve
from a5lib.errors import UserError
from a5lib.records import METRICS, MemorySample, Rollout

if TYPE_CHECKING:
    from a5lib.evaluation import Evaluation

METRICS_FILE, EVALUATIONS_FILE, MEMORY_FILE = "metrics.jsonl", "evaluations.jsonl", "memory.jsonl"
PLAN_FILE = "plan.json"


class RunLog:
    """Writes the records of one run; each line is flushed as it is written.

    Opening freezes config.json, environment.json and command.txt. For a resumed run it also drops what was logged after
    the checkpoint, because those steps are about to be taken again. Taught in notebook 11.

    Args:
        run_dir: the run folder; it exists.
        config: the resolved config.
        whose: whose exercise code runs, as `Algo.summary()` says.
        keep_until: step of the checkpoint that the run continues from; 0 for a new run.

    Raises:
        UserError: the tracker's package is missing (nothing is written then), or the folder cannot be written.
    """

    def __init__(self, run_dir: Path, config: TrainConfig, *, whose: str = "", keep_until: int = 0) -> None:
        self.run_dir = Path(run_dir)
        self._files: dict[str, IO[str]] = {}
        self._track, self._finish_tracker = start_tracker(config.tracker, self.run_dir, config)
        with self._disk_trouble():
            self._rewind(keep_until)
            self._seconds_before = max((r["t"] for r in read_jsonl(self.run_dir / MEMORY_FILE)), default=0.0)
            # The folder may be moved or published, so its own path is not part of the record.
            _replace(self.run_dir / "config.json", _json({**config.to_json(), "output_dir": None}, indent=1))
            _replace(self.run_dir / "command.txt", repeat_command(config))
            self._freeze_environment(describe_environment() | {"exercise_code": whose}, keep_until)

    def metrics(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl.

        Raises:
            ValueError: a name that is not in `METRICS`, no step, or a value that is no finite number or list of them.
        """
        unknown = sorted(set(record) - set(METRICS))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a metric; define it in a5lib.records.METRICS first.")
        if "step" not in record:
            raise ValueError("The metrics have no step.")
        for name, value in record.items():
            _check_numbers(name, value)
        self._append(METRICS_FILE, record)
        self._track(record["step"], {k: v for k, v in record.items() if k != "step" and not isinstance(v, list)})

    def evaluation(self, step: int, kind: str, result: Evaluation) -> None:
        """Append a line to evaluations.jsonl; `kind` is "sampled" or "greedy"."""
        if kind not in ("sampled", "greedy"):
            raise ValueError(f"The kind of an evaluation is {kind!r}; expected 'sampled' or 'greedy'.")
        self._append(EVALUATIONS_FILE, {"step": step, "kind": kind, **result.to_json()})
        self._track(step, {f"validation_accuracy_{kind}": result.accuracy})

    def memory(self, samples: Sequence[MemorySample]) -> None:
        """Append lines to memory.jsonl. In a continued run their seconds go on where the kept ones end."""
        self._append(
            MEMORY_FILE, *(dataclasses.asdict(s) | {"t": round(s.t + self._seconds_before, 3)} for s in samples)
        )

    def rollouts(self, step: int, rollouts: Sequence[Rollout]) -> Path:
        """Write rollouts/step-000010.jsonl, one line for each rollout; returns its path."""
        path = self.run_dir / "rollouts" / f"step-{step:06d}.jsonl"
        lines = [_json(dataclasses.asdict(r)) + "\n" for r in rollouts]
        with self._disk_trouble():
            path.parent.mkdir(exist_ok=True)
            _replace(path, "".join(lines))
        return path

    def plan(self, plan: dict[str, Any]) -> None:
        """Write plan.json: what the engine keeps where, in bytes."""
        with self._disk_trouble():
            _replace(self.run_dir / PLAN_FILE, _json(plan, indent=1))

    def sync(self) -> None:
        """Flush every line to the disk; called before a checkpoint is saved, so that no saved step lacks its line."""
        with self._disk_trouble():
            for file in self._files.values():
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files and the tracker."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._finish_tracker()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _append(self, name: str, *records: dict[str, Any]) -> None:
        lines = "".join(_json(record) + "\n" for record in records)
        with self._disk_trouble():
            if name not in self._files:
                self._files[name] = open(self.run_dir / name, "a", encoding="utf-8")  # noqa: SIM115
            self._files[name].write(lines)
            self._files[name].flush()

    def _rewind(self, step: int) -> None:
        for name in (METRICS_FILE, EVALUATIONS_FILE, MEMORY_FILE):
            path = self.run_dir / name
            if path.exists():
                _replace(path, "".join(_json(r) + "\n" for r in read_jsonl(path) if r["step"] <= step))
        for path in (self.run_dir / "rollouts").glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def _freeze_environment(self, environment: dict[str, Any], step: int) -> None:
        path = self.run_dir / "environment.json"
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            resumed = record.get("resumed", [])
            last = {**record, **(resumed[-1] if resumed else {})}
            if all(last.get(k) == v for k, v in environment.items()):
                return
            environment = {**record, "resumed": [*resumed, {"after_step": step, **environment}]}
        _replace(path, _json(environment, indent=1))

    @contextmanager
    def _disk_trouble(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The run log in {self.run_dir} cannot be written ({error.strerror}); make room or grant access and "
                "continue with --resume."
            ) from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, without a last line that a kill tore; none where there is no file.

    Raises:
        UserError: another line is not JSON; names it.
    """
    if not Path(path).exists():
        return []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line's end is empty, or torn
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: expected one JSON object a line; repair or remove that line."
            ) from error
    return records


def read_config(run_dir: Path) -> TrainConfig:
    """The config of a run, with `output_dir` set to where the run folder is now.

    Raises:
        UserError: no config.json, or one that cannot be read.
    """
    path = Path(run_dir) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{run_dir} is not a run folder: it has no config.json; name the folder of a run.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); name the folder of a run.") from error
    return dataclasses.replace(TrainConfig.from_json(values), output_dir=Path(run_dir))


def repeat_command(config: TrainConfig) -> str:
    """The shell command that repeats a run: the flags that differ from what `a5 train` would choose by itself.

    The output folder is left out, since a repetition needs a new one.

    >>> repeat_command(resolve(TrainConfig(algorithm="maxrl", seed=3, save_final=False)))
    'a5 train --algorithm maxrl --seed 3 --no-save-final'
    """
    short = TrainConfig.from_json({**config.to_json(), "output_dir": None})
    target = resolve(short)
    for field in dataclasses.fields(TrainConfig):
        if getattr(short, field.name) == field.default:
            continue
        default: dict[str, Any] = {field.name: field.default}
        candidate = dataclasses.replace(short, **default)
        try:
            if resolve(candidate) == target:
                short = candidate
        except UserError:
            pass
    words = ["a5", "train"]
    for field in dataclasses.fields(TrainConfig):
        value = getattr(short, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag(field.name) if value else flag(f"no_{field.name}"))
        else:
            words += [flag(field.name), str(value)]
    return shlex.join(words)


def describe_environment() -> dict[str, Any]:
    """Versions and machine, in strict JSON values; no host name, user name or path.

    `cores` are those this process may use, `threads` those torch uses, sizes are in GiB; `cards` lists the CUDA devices
    when the process has opened one.
    """
    packages = ("torch", "transformers", "safetensors", "numpy")
    affinity = getattr(os, "sched_getaffinity", None)
    opened = torch.cuda.is_initialized()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if opened else []
    return {
        "a5lib": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cuda": torch.version.cuda,
        "cards": [
            {"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
            for p in properties
        ],
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


Track = Callable[[int, dict[str, float]], object]


def start_tracker(name: str, run_dir: Path, config: TrainConfig) -> tuple[Track, Callable[[], object]]:
    """Open an experiment tracker: a function that takes a step and its numbers, and one that closes it.

    The packages are imported here and nowhere else. Histograms are not sent. A resumed run appears as a new one.

    Raises:
        UserError: the package is not installed.
    """
    if name == "none":
        return lambda step, numbers: None, lambda: None
    module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    try:
        tracker: Any = importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"--tracker {name} needs the package {name}, which does not import here ({error}); install it with: pip "
            f"install {name}"
        ) from error
    if name == "tensorboard":
        writer = tracker.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

        def track(step: int, numbers: dict[str, float]) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return track, writer.close
    place = {"dir": str(run_dir)} if name == "wandb" else {}
    run = tracker.init(project="a5lib", name=run_dir.name, config=config.to_json(), **place)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, allow_nan=False, indent=indent)


def _check_numbers(name: str, value: Any) -> None:
    for number in value if isinstance(value, list) else [value]:
        if not isinstance(number, int | float):
            raise ValueError(
                f"The metric {name} is {type(number).__name__}; expected a Python number or a list of them."
            )
        if not math.isfinite(number):
            raise ValueError(f"The metric {name} is {number}; only finite numbers are logged.")


def _replace(path: Path, text: str) -> None:
    """Write a whole file so that a kill leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.unfinished")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") or not text else text + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
