"""The worker's loop: it takes requests, lets the engine do them, and answers. It knows the protocol and no vLLM.

`WorkerEngine` is the face that an engine has here: `VllmEngine` in `vllm_engine.py`, and a scripted one in the tests.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from a5lib.rollouts.checksums import Held
from a5lib.rollouts.protocol import VERSION, Connection, Garbage, Refusal
from a5lib.rollouts.weight_channel import Slot, as_slots

ANSWER_SECONDS = 60.0  # in which the trainer must take an answer


class WorkerEngine(Protocol):
    """The face of an engine in the worker. It is made with the settings that the trainer sent: `Engine(settings)`.

    What goes in and comes out is plain JSON, tensors excepted. A method raises `Refusal` where it cannot be done now
    and nothing has changed; after any other exception the worker is ended.

    Attributes:
        verify_seconds: what the reading back of the last `load` took, checksums included.
    """

    verify_seconds: float

    def facts(self) -> dict[str, Any]:
        """`max_model_len` in tokens, `vllm`, `torch`, `device`, and `card_free`: bytes of the card that were free
        before the engine was made (None without a card).
        """
        ...

    def wake(self, tag: str) -> None:
        """Take room on the card: "weights" or "kv_cache"."""
        ...

    def load(self, slots: Sequence[Slot], buffer: Tensor, checksums: dict[str, int]) -> Sequence[Held]:
        """Load every tensor of the buffer (uint8, see `views`), and say what the engine holds afterwards.

        The checksums are those of the trainer. The answer must come from the memory that generation reads: of each
        tensor once for every place that holds it, a tied head included.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        ...

    def generate(
        self,
        prompts: list[list[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: list[str],
        seeds: list[list[int]],
        progress: Callable[[int], None],
    ) -> list[dict[str, Any]]:
        """n completions to each prompt, prompt by prompt, with the seed seeds[prompt][completion], below 2**63.

        Each is {"token_ids": [int], "log_probs": [float], "text": str, "finish_reason": "stop" | "length"} as
        `a5lib.records.Completion` defines them: the stop string is kept, and log-probabilities are those of
        softmax(logits / temperature) before top-p. `progress(k)` is to be called when k more are finished; without a
        word for as long as the trainer's time limit, the worker passes for hung.
        """
        ...

    def sleep(self, level: int) -> None:
        """Free the card; level 2 throws the weights away. `Refusal` while a completion is unfinished."""
        ...

    def memory(self) -> dict[str, int | None]:
        """`card_free` and `card_total` of the whole card (None without one), and `host`, the resident set; in bytes."""
        ...

    def close(self) -> None:
        """End in order."""
        ...


class WorkerLoop:
    """Serves the requests that are methods of `Requests`.

    Args:
        connection: to the trainer.
        buffer: the weight channel, uint8 [size].
        make_engine: makes the engine from the settings of the first request.
    """

    def __init__(
        self, connection: Connection, buffer: Tensor, make_engine: Callable[[dict[str, Any]], WorkerEngine]
    ) -> None:
        self.connection = connection
        self.requests = Requests(buffer, make_engine)

    def serve(self) -> None:
        """Answer requests until one of them is "stop" or the trainer is gone.

        A request that takes longer than its time limit ends this process, with the stack of every thread in the log:
        so does a hung engine, whatever it hangs in.
        """
        method = ""
        while method != "stop":
            try:
                request = self.connection.receive()
                if request is None:
                    return
                number, method, seconds = request["id"], request["method"], request["seconds"]
                arguments = request["arguments"]
            except (Garbage, KeyError) as error:
                print(f"The trainer sent something that is no request: {error}.", flush=True)
                return
            answer = self._answer(number, method, seconds, arguments)
            self.connection.send({"id": number, **answer}, ANSWER_SECONDS)

    def _answer(self, number: int, method: str, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
        def progress(count: int) -> None:
            faulthandler.dump_traceback_later(seconds, exit=True)  # from here on again
            self.connection.send({"id": number, "progress": count}, ANSWER_SECONDS)

        if method == "generate":
            arguments = {**arguments, "progress": progress}
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            return {"result": self.requests.do(method, arguments)}
        except Refusal as refusal:
            return {"refused": str(refusal)}
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}
        finally:
            faulthandler.cancel_dump_traceback_later()


class Requests:
    """What can be asked of the worker. Beside the engine's own checks it refuses to generate with other weights than
    those that the trainer means.
    """

    NAMES = ("hello", "wake", "load", "reset_prefix_cache", "generate", "sleep", "memory", "stop")

    def __init__(self, buffer: Tensor, make_engine: Callable[[dict[str, Any]], WorkerEngine]) -> None:
        self.buffer = buffer
        self.make_engine = make_engine
        self.engine: Any = None
        self.slots: list[Slot] = []
        self.step: int | None = None  # of the weights that the engine holds

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do one of `NAMES`; the first must be "hello"."""
        if name not in self.NAMES:
            raise Refusal(f"The worker knows no request {name!r}; it knows {', '.join(self.NAMES)}.")
        if (self.engine is None) != (name == "hello"):
            raise Refusal(f"{name!r} came {'before' if self.engine is None else 'after'} the first 'hello'.")
        if name in ("hello", "load", "generate", "sleep", "stop"):
            return getattr(self, name)(**arguments)
        return getattr(self.engine, name)(**arguments)

    def hello(self, version: int, settings: dict[str, Any], slots: list[list[Any]]) -> dict[str, Any]:
        if version != VERSION:
            raise Refusal(f"The trainer speaks version {version} of the protocol, and the worker version {VERSION}.")
        self.slots = as_slots(slots)
        self.engine = self.make_engine(settings)
        return {**self.engine.facts(), "pid": os.getpid()}

    def load(self, step: int, checksums: dict[str, int]) -> dict[str, Any]:
        self.step = None
        held = [Held(*row) for row in self.engine.load(self.slots, self.buffer, checksums)]
        self.step = step
        return {"held": held, "verify_seconds": self.engine.verify_seconds}

    def generate(self, step: int, **arguments: Any) -> list[dict[str, Any]]:
        if self.step != step:
            raise Refusal(f"The worker holds the weights of step {self.step} and is to generate with those of {step}.")
        completions: list[dict[str, Any]] = self.engine.generate(**arguments)
        return completions

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)
        self.step = None

    def stop(self) -> None:
        self.engine.close()
