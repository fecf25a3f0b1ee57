"""Generation by vLLM on the card that trains: the two take turns.

vLLM runs in a process of its own, the worker, under its own Python. Between two turns it sleeps and holds no weights.
`sync` wakes it, sends every weight through shared memory, and compares what the engine then holds with what was sent;
only after that can it generate. This file knows the order of the steps. How the worker is reached is the business of
`worker_process.py`, and what vLLM does at each step that of `vllm_engine.py`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from a5lib.engines.plan import VLLM_ASLEEP, gib
from a5lib.errors import UserError
from a5lib.records import Completion
from a5lib.rollouts import check_lengths, completion_seed
from a5lib.rollouts.checksums import as_held, differences, in_words
from a5lib.rollouts.protocol import VERSION
from a5lib.rollouts.weight_channel import GIB, WeightChannel, lay_out
from a5lib.rollouts.worker_process import WorkerError, WorkerProcess

ENGINE = "a5lib.rollouts.vllm_engine:VllmEngine"
LOG_FILE = "vllm-worker.log"

# The longest time in seconds that the worker may be silent at each request. Starting includes compilation.
SECONDS = {"hello": 900.0, "wake": 60.0, "load": 300.0, "reset_prefix_cache": 60.0, "generate": 900.0, "sleep": 60.0,
           "memory": 60.0, "stop": 30.0}  # fmt: skip


class Event(NamedTuple):
    """A request that the worker has answered: what was asked, and the seconds that it took."""

    call: str
    seconds: float


class VllmColocated:
    """The `RolloutBackend` that shares the trainer's card with vLLM. Taught in notebook 10.

    The worker starts with `start`, or at the first `sync`. If it fails it is ended, with all that belongs to it, and
    the next `sync` starts another.

    Args:
        weights: the policy's parameters by name: names, shapes and dtypes count here, not values.
        settings: what the engine is made with, as JSON (see `VllmEngine`).
        run_dir: folder of `vllm-worker.log`, the worker's own log.
        python: the Python that has vLLM (None: this one).
        device: the card that both use; checksums of what is sent are computed there (None: where each weight lies).
        seconds: longest silence at a request, in place of those in `SECONDS`.
        engine: the class that the worker makes; tests name another one.

    Attributes:
        events: every request to the worker that was answered, in order, since this object was made.
        verify_seconds: of the last "load": what the engine took to read its weights back, with their checksums.
        facts: what the engine says of itself, since it was started.
        memory: what the worker said of card and host when it last fell asleep.
        channel: the `WeightChannel`; an engine that keeps its weights in `channel.tensors` saves the copy.

    Raises:
        UserError: the shared memory for the weights is not to be had.
    """

    takes_card = True

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        settings: Mapping[str, Any],
        run_dir: Path,
        *,
        python: str | None = None,
        device: torch.device | None = None,
        seconds: Mapping[str, float] | None = None,
        engine: str = ENGINE,
    ) -> None:
        self.channel = WeightChannel(lay_out(weights))
        self.settings = dict(settings)
        self.log = run_dir / LOG_FILE
        self.python = python or sys.executable
        self.device = device
        self.seconds = {**SECONDS, **(seconds or {})}
        self.engine = engine
        self.events: list[Event] = []
        self.verify_seconds = 0.0
        self.facts: dict[str, Any] = {}
        self.memory: dict[str, int | None] = {}
        self.synced_step: int | None = None
        self._worker: WorkerProcess | None = None
        self._awake = False
        self._free: int | None = None  # bytes of the card that would be free without it
        self._turn = threading.Lock()
        self._at_work = ""

    def start(self) -> None:
        """Start the worker and put it to sleep; some 60 s with a card, where vLLM compiles. Harmless when repeated.

        Raises:
            UserError: too little of the card is free.
            WorkerError: it does not start; says why.
            RuntimeError: another call is still at work.
        """
        with self._alone("start"):
            self._start()

    def sync(self, weights: Iterable[tuple[str, Tensor]], step: int) -> None:
        """See `RolloutBackend.sync`. The trainer must have left the card.

        Raises:
            WorkerError: the worker failed, or does not hold exactly what was sent; it has been ended.
            RuntimeError: another call is still at work.
        """
        with self._alone("sync"):
            self._start()
            self._sleep()
            sent = self.channel.write(weights, self.device)
            _empty_cache()
            if self.device is not None and self._free is not None:  # what came and went while it slept is not its own
                self._free += torch.cuda.mem_get_info(self.device)[0] - (self.memory["card_free"] or 0)
            self._awake = True
            self._ask("wake", tag="weights")
            answer = self._ask("load", step=step, checksums=sent)
            with self._reading("load"):
                held, self.verify_seconds = as_held(answer["held"]), float(answer["verify_seconds"])
            if faults := differences(self.channel.slots, sent, held):
                raise self._failure(f"does not hold the weights of step {step} that it was sent: {in_words(faults)}")
            self._ask("wake", tag="kv_cache")
            try:
                self._ask("reset_prefix_cache")
            except RuntimeError as refusal:
                raise self._failure(f"kept keys and values of older weights: {refusal}") from None
            self.synced_step = step

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int,
        progress: Callable[[int], object] | None = None,
    ) -> list[Completion]:
        """See `RolloutBackend.generate`. Log-probabilities are those of softmax(logits / temperature), before top-p.

        Raises:
            UserError: a prompt is empty, or longer than the context less `max_tokens`.
            FloatingPointError: a log-probability is not finite.
            WorkerError: the worker failed; it has been ended.
            RuntimeError: `sync` has not been called since the last `release`, or another call is still at work.
        """
        with self._alone("generate"):
            if self.synced_step is None:
                raise RuntimeError("generate() was called before sync(): the weights are unknown; call sync() first.")
            check_lengths(prompts, max_tokens, self.facts["max_model_len"])
            seeds = [[completion_seed(seed, i, j) for j in range(n)] for i in range(len(prompts))]
            rows = self._ask(
                "generate", progress, step=self.synced_step, prompts=list(prompts), n=n, max_tokens=max_tokens,
                temperature=temperature, top_p=top_p, stop=list(stop), seeds=seeds,
            )  # fmt: skip
            with self._reading("generate"):
                completions = [_completion(i // n, row) for i, row in enumerate(rows)]
                if len(completions) != len(prompts) * n:
                    raise ValueError(f"{len(completions)} completions and not {len(prompts) * n}")
            if not all(map(math.isfinite, (p for c in completions for p in c.log_probs))):
                raise FloatingPointError("The model's log-probabilities are not finite.")
            return completions

    def release(self) -> None:
        """See `RolloutBackend.release`: the engine sleeps at level 2, without weights. Harmless when repeated.

        Raises:
            RuntimeError: `generate` or `sync` is still at work in another thread; an engine must not sleep then.
            WorkerError: the worker failed, or kept too much of the card.
        """
        with self._alone("release"):
            self._sleep()

    def close(self) -> None:
        """End the worker and let go of the shared memory. Harmless when repeated."""
        with self._alone("close"):
            if self._worker is not None:
                self._worker.stop(self.seconds["stop"])
            self._worker = self.synced_step = None
            self.channel.close()

    def __enter__(self) -> VllmColocated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- how it is done

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call at a time, so that the engine cannot be put to sleep at work."""
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                f"{call}() was called while {self._at_work}() is at work in another thread; wait until it has returned."
            )
        try:
            self._at_work = call
            yield
        finally:
            self._turn.release()

    def _start(self) -> None:
        if self.channel.descriptor < 0:
            raise RuntimeError("This backend has been closed; make a new one.")
        if self._worker is not None and self._worker.alive:
            return
        self._awake, self.synced_step = False, None
        if self.device is not None:
            self._check_room(self.device)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        card = None if self.device is None else self.device.index
        self._worker = WorkerProcess(self.python, self.engine, self.channel.descriptor, self.log, card)
        try:
            facts = self._ask("hello", version=VERSION, settings=self.settings, slots=self.channel.slots)
        except RuntimeError as refusal:
            raise self._failure(f"did not start: {refusal}") from None
        with self._reading("hello"):
            self.facts = {**facts, "max_model_len": int(facts["max_model_len"])}
            self._free = facts.get("card_free")
        self._awake = True
        self._sleep()

    def _check_room(self, card: torch.device) -> None:
        """vLLM compares what it may take with what is free as well, but only after half a minute."""
        _empty_cache()
        free, total = torch.cuda.mem_get_info(card)
        needed = int(self.settings["memory_share"] * total) + VLLM_ASLEEP
        if free < needed:
            raise UserError(
                f"vLLM needs {gib(needed)} of the card, but {gib(free, there=True)} are free; close what else uses the "
                "card (nvidia-smi lists it), or give the run less with --vram-budget."
            )

    def _sleep(self) -> None:
        """Off the card, and make sure of it."""
        if not self._awake or self._worker is None or not self._worker.alive:
            return
        self._ask("sleep", level=2)
        self._awake, self.synced_step = False, None
        self.memory = self._ask("memory")
        now = self.memory.get("card_free")
        if self._free is not None and now is not None and self._free - now > VLLM_ASLEEP:
            raise self._failure(
                f"sleeps, but {(self._free - now) / GIB:.2f} GiB less of the card are free than before it started "
                f"(at most {VLLM_ASLEEP / GIB:.2f} are expected)"
            )

    def _ask(self, method: str, progress: Callable[[int], object] | None = None, **arguments: Any) -> Any:
        assert self._worker is not None
        asked = time.perf_counter()
        try:
            result = self._worker.request(method, arguments, self.seconds[method], progress)
        finally:
            if not self._worker.alive:
                self.synced_step = None
        tag = arguments.get("tag") or arguments.get("level")
        self.events.append(Event(method if tag is None else f"{method} {tag}", time.perf_counter() - asked))
        return result

    @contextmanager
    def _reading(self, method: str) -> Iterator[None]:
        """An answer that does not have the agreed form ends the worker."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._failure(f"sent garbage during {method!r}: {type(error).__name__} {error}") from error

    def _failure(self, what: str) -> WorkerError:
        assert self._worker is not None
        self.synced_step = None
        return self._worker.failure(what)


def _empty_cache() -> None:
    """What torch keeps for later is lost to the engine."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _completion(prompt_index: int, row: dict[str, Any]) -> Completion:
    ids, log_probs, text, reason = row["token_ids"], row["log_probs"], row["text"], row["finish_reason"]
    if len(ids) != len(log_probs) or not ids or reason not in ("stop", "length") or not isinstance(text, str):
        raise ValueError(f"a completion of {len(ids)} tokens, {len(log_probs)} log-probabilities and end {reason!r}")
    return Completion(prompt_index, [int(i) for i in ids], text, reason, [float(p) for p in log_probs])
