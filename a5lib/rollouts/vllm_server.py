"""Generation by a `vllm serve` that the user has started, with a card of its own, on the same machine.

Weights travel over vLLM's weight-transfer API. What that API calls its backend is ours, in `vllm_server_worker.py`: the
server reads the weight channel, host memory that the trainer keeps, so the trainer needs no vLLM, and the checksum of
every tensor comes back as the engine holds it. vLLM's own backends do not fit: `nccl` needs vLLM in the trainer's
Python and two cards, `ipc` unpickles what it is sent and needs both on one card, and neither says what has arrived.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from a5lib import __version__
from a5lib.errors import UserError
from a5lib.records import Completion
from a5lib.rollouts import check_lengths, completion_seed
from a5lib.rollouts.checksums import as_held, differences, in_words
from a5lib.rollouts.vllm_engine import not_served, response_text
from a5lib.rollouts.vllm_versions import SERVER_WORKER, TRANSFER_BACKEND
from a5lib.rollouts.weight_channel import WeightChannel, lay_out

FACTS = ("model", "max_model_len", "update_is_open", "stamp")  # besides those that the server is started with
# The longest time in seconds without an answer: to a question, while weights are loaded, and to one completion.
SECONDS = {"ask": 60.0, "load": 300.0, "generate": 900.0}


class ServerError(UserError):
    """The server is not there, was started otherwise, or failed; says how to start it where that helps."""


class VllmServer:
    """The `RolloutBackend` of a running vLLM server. Notebook 10 teaches the same cycle on one card.

    Args:
        weights: the policy's parameters by name: names, shapes and dtypes count here, not values.
        tokenizer: the policy's, for the text of the responses.
        url: of the server, http://127.0.0.1:8000 for one; a loopback address (`TrainConfig` refuses any other).
        model: folder or id that the server is to be started with; it needs no weights of it.
        max_model_len: longest prompt and response together, in tokens.
        top_p: that of the run.
        concurrency: completions that are asked for at the same time.
        trust_remote_code: whether the command that starts the server allows code of the model's repository.
        device: the trainer's card, where the checksums of what is sent are computed (None: where each weight lies).
        seconds: longest times without an answer, in place of those in `SECONDS`.

    Attributes:
        command: what starts the server, for a shell.
        facts: what the server says of itself, since `start`.
        channel: the `WeightChannel`; an engine that keeps its weights in `channel.tensors` saves the copy.

    Raises:
        UserError: the shared memory for the weights is not to be had.
    """

    takes_card = False

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        tokenizer: PreTrainedTokenizerBase,
        url: str,
        *,
        model: str,
        max_model_len: int,
        top_p: float = 1.0,
        concurrency: int = 256,
        trust_remote_code: bool = False,
        device: torch.device | None = None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        self.channel = WeightChannel(lay_out(weights))
        self.tokenizer, self.url, self.top_p, self.concurrency = tokenizer, url, top_p, concurrency
        self.device = device
        self.seconds = {**SECONDS, **(seconds or {})}
        self.wanted: dict[str, Any] = {
            "a5lib": __version__,
            "backend": TRANSFER_BACKEND,
            "dtype": self.channel.slots[0].dtype,
            # raw ones are taken before the temperature, processed ones after top-p
            "logprobs_mode": "processed_logprobs" if top_p == 1 else "raw_logprobs",
            "cards": 1,
        }
        self.max_model_len = max_model_len
        self.command = serve_command(
            url, model=model, dtype=self.wanted["dtype"], max_model_len=max_model_len,
            logprobs_mode=self.wanted["logprobs_mode"], card=device, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.facts: dict[str, Any] = {}
        self.synced_step: int | None = None
        self._stamp = ""
        self._slots = [[slot.name, list(slot.shape), slot.dtype, slot.offset] for slot in self.channel.slots]
        self._open: set[socket.socket] = set()  # of requests under way
        self._hung_up = False

    def start(self) -> None:
        """See that the server is there and was started as this run needs it. Harmless when repeated.

        Raises:
            ServerError: it is not; says which command starts it.
        """
        if self.channel.descriptor < 0:
            raise RuntimeError("This backend has been closed; make a new one.")
        self.facts = facts = self._facts()
        for name, value in self.wanted.items():
            if facts[name] != value:
                raise self._failure(f"was started with the {name} {facts[name]!r} and not {value!r}", start=True)
        if facts["max_model_len"] < self.max_model_len:
            raise self._failure(
                f"takes {facts['max_model_len']} tokens, and this run has up to {self.max_model_len}", start=True
            )

    def sync(self, weights: Iterable[tuple[str, Tensor]], step: int) -> None:
        """See `RolloutBackend.sync`. What the server is generating for others is aborted.

        Raises:
            ServerError: the server is not there or failed, or does not hold exactly what was sent; it is left paused,
                so that it generates nothing with these weights.
        """
        self.synced_step = None
        self.start()
        sent = self.channel.write(weights, self.device)
        stamp = secrets.token_hex(8)
        path = f"/proc/{os.getpid()}/fd/{self.channel.descriptor}"
        self._post("/pause?mode=abort")
        if self.facts["update_is_open"]:
            self._post("/finish_weight_update", {})
        # 0.24 would otherwise take the model apart and together again; 0.32 leaves that to the backend
        self._post("/start_weight_update", {"is_checkpoint_format": False})
        self._post(
            "/update_weights", {"update_info": {"channel": path, "slots": self._slots, "stamp": stamp}}, what="load"
        )
        self._post("/finish_weight_update", {})
        rows = self._ask("a5_held", json.dumps(self._slots), what="load")
        try:
            held = as_held(rows)
        except (TypeError, ValueError) as error:
            raise self._failure(f"sent garbage as its weights' checksums: {error}") from error
        if faults := differences(self.channel.slots, sent, held):
            raise self._failure(
                f"serves {self.facts['model']} and does not hold the weights of step {step} that it was sent: "
                f"{in_words(faults)}"
            )
        answer = self._post("/reset_prefix_cache")
        if isinstance(answer, dict) and not answer.get("success", True):  # 0.24 does not say; nothing is under way
            raise self._failure("did not reset its prefix cache, which holds keys and values of older weights")
        self._post("/resume")
        self.synced_step, self._stamp = step, stamp

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

        Each completion is a request of its own, since vLLM gives the n of one request neighbouring seeds; they share
        the prompt's keys and values through the prefix cache.

        Raises:
            UserError: a prompt is empty, or longer than the context less `max_tokens`.
            ServerError: the server failed, or got other weights meanwhile.
            RuntimeError: `sync` has not been called, or vLLM does not have what is asked for.
        """
        if self.synced_step is None:
            raise RuntimeError("generate() was called before sync(): the weights are unknown; call sync() first.")
        check_lengths(prompts, max_tokens, self.facts["max_model_len"])
        if refusal := not_served(temperature, top_p, self.top_p):
            raise RuntimeError(refusal)
        # What is left out, the server takes from the model's generation_config.json: top-k, penalties.
        common = {
            "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": list(stop),
            "include_stop_str_in_output": True, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        requests = [
            common | {"prompt": prompt, "seed": completion_seed(seed, i, j)}
            for i, prompt in enumerate(prompts)
            for j in range(n)
        ]
        answers = self._complete(requests, progress)
        if self._facts()["stamp"] != self._stamp:
            raise self._failure(
                f"no longer holds the weights of step {self.synced_step}: it was started again, or another run sent it "
                "its own; give each run a server of its own"
            )
        return [self._completion(i // n, answer, stop) for i, answer in enumerate(answers)]

    def release(self) -> None:
        """See `RolloutBackend.release`: nothing is held on the trainer's card."""

    def close(self) -> None:
        """Let go of the shared memory; the server goes on. Harmless when repeated."""
        self.synced_step = None
        self.channel.close()

    # --- how it is done

    def _facts(self) -> dict[str, Any]:
        """What `ServerWorker.a5_facts` gives."""
        facts = self._ask("a5_facts")
        if not isinstance(facts, dict) or not {*self.wanted, *FACTS} <= facts.keys():
            raise self._failure("runs another version of a5lib's worker", start=True)
        return facts

    def _complete(self, requests: list[dict[str, Any]], progress: Callable[[int], object] | None) -> list[Any]:
        """The answers, in the order of the requests; whatever ends this early ends the requests too."""
        answers: list[Any] = [None] * len(requests)
        self._hung_up = False
        pool = ThreadPoolExecutor(self.concurrency, "a5-vllm-server")
        try:
            waiting = {
                pool.submit(self._post, "/v1/completions", request, "generate"): i for i, request in enumerate(requests)
            }
            for done in as_completed(waiting):
                answers[waiting[done]] = done.result()
                if progress is not None:
                    progress(1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._hung_up = True  # vLLM aborts what nobody waits for
            for end in list(self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            pool.shutdown()
        return answers

    def _completion(self, prompt_index: int, answer: Any, stop: Sequence[str]) -> Completion:
        try:
            (choice,) = answer["choices"]
            ids, log_probs = (
                [int(i) for i in choice["token_ids"]],
                [float(p) for p in choice["logprobs"]["token_logprobs"]],
            )
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._failure(f"sent garbage as a completion: {type(error).__name__} {error}") from error
        if not ids or len(ids) != len(log_probs) or reason not in ("stop", "length"):
            raise self._failure(
                f"gave {len(log_probs)} log-probabilities for {len(ids)} tokens, and the finish reason {reason!r}"
            )
        if not all(map(math.isfinite, log_probs)):
            raise FloatingPointError("The model's log-probabilities are not finite.")
        return Completion(prompt_index, ids, response_text(self.tokenizer, ids, stop), reason, log_probs)

    def _ask(self, method: str, *arguments: str, what: str = "ask") -> Any:
        """What a method of `ServerWorker` returns."""
        answer = self._post("/collective_rpc", {"method": method, "args": list(arguments)}, what)
        try:
            (result,) = answer["results"]
        except (KeyError, TypeError, ValueError):
            raise self._failure(f"gave no single answer to {method}; it must run on one card", start=True) from None
        return result

    def _post(self, path: str, body: Any = None, what: str = "ask") -> Any:
        """The answer's JSON, None where it is empty."""
        name = path.partition("?")[0]
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=self.seconds[what])
        end = None
        try:
            connection.connect()
            end = connection.sock
            self._open.add(end)
            if what == "generate" and self._hung_up:
                raise ConnectionError("hung up")
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except TimeoutError:
            raise self._failure(f"gave no answer to {name} for {self.seconds[what]:g} s") from None
        except ConnectionRefusedError:
            raise self._failure("is not there", start=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"broke off {name} ({type(error).__name__})") from error
        finally:
            if end is not None:
                self._open.discard(end)
            connection.close()
        try:
            result = json.loads(content) if content else None
        except ValueError:
            result = content[:60].decode(errors="replace")
        if status != 200:
            what, start = _refused(name, status, result)
            raise self._failure(what, start=start)
        return result

    def _failure(self, what: str, *, start: bool = False) -> ServerError:
        """The error that says what the server did: "The vLLM server at ...", and how to start it where that helps."""
        self.synced_step = None
        remedy = "Look for the cause in what it printed last, then start again (a run: with --resume)."
        return ServerError(
            f"The vLLM server at {self.url} {what}. {f'Start it with: {self.command}' if start else remedy}"
        )


def _refused(path: str, status: int, result: Any) -> tuple[str, bool]:
    """What an answer other than 200 means, and whether another start of the server is the remedy."""
    if path == "/collective_rpc" and status == 404:
        return "is no vLLM server, or one without VLLM_SERVER_DEV_MODE=1", True
    error = result.get("error", result.get("detail", result)) if isinstance(result, dict) else result
    message = str(error.get("message", error) if isinstance(error, dict) else error).rstrip(".")
    if "has no attribute 'a5_" in message:
        return f"was started without --worker-extension-cls {SERVER_WORKER}", True
    return f"answered {path} with HTTP {status}: {message}", False


def serve_command(
    url: str,
    *,
    model: str,
    dtype: str,
    max_model_len: int,
    logprobs_mode: str = "processed_logprobs",
    card: torch.device | None = None,
    trust_remote_code: bool = False,
) -> str:
    """The command that starts a server for a run.

    Args:
        url: where it is to answer.
        model: folder or id; no weights are read from it, so that a forgotten load shows at once.
        dtype: that of the weights.
        max_model_len: longest prompt and response together, in tokens.
        logprobs_mode: vLLM's name of it.
        card: the trainer's; the server gets another one (None: no word of cards).
        trust_remote_code: run the model folder's own Python code.

    >>> serve_command("http://127.0.0.1:8000", model="toy", dtype="float32", max_model_len=256).split()[2:9]
    ['vllm', 'serve', 'toy', '--host', '127.0.0.1', '--port', '8000']
    """
    address = urlsplit(url)
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    if card is not None:
        variables = {"CUDA_VISIBLE_DEVICES": "0" if card.index else "1", **variables}
    words = [
        "vllm", "serve", model, "--host", address.hostname or "", "--port", str(address.port or 80), "--dtype", dtype,
        "--max-model-len", str(max_model_len), "--logprobs-mode", logprobs_mode, "--load-format", "dummy",
        "--weight-transfer-config", json.dumps({"backend": TRANSFER_BACKEND}), "--worker-extension-cls", SERVER_WORKER,
        *(["--trust-remote-code"] if trust_remote_code else []),
    ]  # fmt: skip
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(words)])
