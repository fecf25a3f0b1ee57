"""A real vLLM engine as the worker has it: weights come out of shared memory, and what it holds is read back.

It runs in the process that makes it, under the Python that has vLLM, and imports nothing of a5lib beyond what lies
beside it. What differs between versions of vLLM is in `vllm_versions.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from a5lib.rollouts import vllm_versions as versions
from a5lib.rollouts.checksums import Held, and_others, checksum, checksums, differences
from a5lib.rollouts.fp8 import as_sent
from a5lib.rollouts.protocol import Refusal
from a5lib.rollouts.weight_channel import Slot, views

TAGS = ("weights", "kv_cache")


class VllmSettings(TypedDict):
    """How to make the engine.

    model: folder with configuration and tokenizer; weights are not read from it.
    dtype: of weights and computation, such as "bfloat16"; it must be that of the weights that are sent.
    max_model_len: longest prompt and response together, in tokens.
    max_num_seqs: completions that are decoded side by side.
    max_num_batched_tokens: that it works on at one time; on the CPU at least max_model_len.
    top_p: that of the run; below 1, only temperatures 0 and 1 can be served (see `VllmEngine.generate`).
    kv_cache_bytes: for keys and values.
    memory_share: of the whole card, for weights, work, keys and values; CUDA itself and graphs come on top.
    trust_remote_code: run the model folder's own Python code.
    quantization: "fp8": linear weights in eight bits, rounded anew at each load; "none": as they are sent.
    """

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    top_p: float
    kv_cache_bytes: int
    memory_share: float
    trust_remote_code: bool
    quantization: str


class VllmEngine:
    """The `WorkerEngine` over vLLM's `LLM`. It starts awake, and generates nothing before weights are in and verified.

    Args:
        settings: see `VllmSettings`.

    Raises:
        RuntimeError: vLLM would compute with copies of the weights.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self.card = torch.cuda.is_available()
        self.card_free = torch.cuda.mem_get_info()[0] if self.card else None
        self.top_p, self.rounds = settings["top_p"], settings["quantization"] == "fp8"
        self.vllm, self.llm = self._make(settings)
        self.tokenizer = self.llm.get_tokenizer()
        self.awake = set(TAGS)
        self.verified = self.fresh = False
        self.verify_seconds = 0.0
        self._own = self._apply(own_memory)
        self._check_own_memory()

    def facts(self) -> dict[str, Any]:
        """See `WorkerEngine.facts`."""
        return {
            "max_model_len": self.llm.model_config.max_model_len,
            "vllm": self.vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self.card else "cpu",
            "card_free": self.card_free,
        }

    def wake(self, tag: str) -> None:
        """See `WorkerEngine.wake`; it does nothing for what is awake."""
        if tag not in TAGS:
            raise Refusal(f"There is no {tag!r} to wake; there are {' and '.join(TAGS)}.")
        if tag in self.awake:
            return
        if "weights" not in self.awake | {tag}:
            raise Refusal('Wake "weights" before "kv_cache": a load may need room that keys and values would take.')
        if self.card:
            self.llm.wake_up([tag])
        self.awake.add(tag)

    def load(self, slots: Sequence[Slot], buffer: Tensor, checksums: dict[str, int]) -> list[Held]:
        """See `WorkerEngine.load`. A tensor that does not fit is left out, and so differs in the answer."""
        if "weights" not in self.awake:
            raise Refusal('The engine is asleep; wake "weights" before a load, so that there is room for them.')
        self.verified = self.fresh = False
        weights = views(slots, buffer)
        reload = (lambda fitting: versions.reload(self.llm, fitting)) if self.rounds else None
        self._apply(lambda model: load(model, slots, weights, reload))
        self._check_own_memory()
        if self.card:
            torch.cuda.synchronize()  # so that the seconds below are those of reading back
        began = time.perf_counter()
        rows: list[Held] = self._apply(lambda model: held(model, slots, weights))
        self.verify_seconds = time.perf_counter() - began
        if self.card and self.rounds:
            torch.cuda.empty_cache()  # what loading took is for keys and values now
        self.verified = not differences(slots, checksums, rows)
        return rows

    def reset_prefix_cache(self) -> None:
        """See `WorkerEngine.reset_prefix_cache`."""
        if "kv_cache" not in self.awake:
            raise Refusal(
                'The engine has no room for keys and values; wake "kv_cache" before the prefix cache is reset.'
            )
        if not self.llm.reset_prefix_cache():
            raise Refusal("vLLM did not reset its prefix cache; it says that blocks of it are in use.")
        self.fresh = True

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: Sequence[str],
        seeds: Sequence[Sequence[int]],
        progress: Callable[[int], object],
    ) -> list[dict[str, Any]]:
        """See `WorkerEngine.generate`.

        Each completion is a request of its own, since vLLM gives the n of one request neighbouring seeds; they share
        the prompt's keys and values through the prefix cache.

        Raises:
            Refusal: the weights are not verified, or vLLM does not have what is asked for.
        """
        self._check_ready(temperature, top_p)
        params = [
            self.vllm.SamplingParams(
                seed=seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=list(stop),
                include_stop_str_in_output=True, detokenize=bool(stop), logprobs=0, flat_logprobs=True,
            )
            for of_prompt in seeds for seed in of_prompt
        ]  # fmt: skip
        requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        outputs = self.llm.generate(requests, params, use_tqdm=versions.FinishedBar(progress))
        return [self._completion(output.outputs[0], stop) for output in outputs]

    def sleep(self, level: int) -> None:
        """See `WorkerEngine.sleep`. On the CPU there is nothing to free: it is noted, and the weights stay."""
        if left := versions.unfinished(self.llm):
            raise Refusal(f"The engine is busy: {left} completions are unfinished; it cannot sleep before they are.")
        if not self.awake:
            return
        self.awake, self.verified, self.fresh = set(), False, False
        if self.card:
            torch.cuda.synchronize()  # 0.24 does not wait for a batch that has been started beyond the last stop
            self.llm.sleep(level=level)
        else:
            print(f"Sleep level {level} exists on a card only; this engine keeps its memory.", flush=True)

    def memory(self) -> dict[str, int | None]:
        """See `WorkerEngine.memory`."""
        import psutil

        free, total = torch.cuda.mem_get_info() if self.card else (None, None)
        return {"card_free": free, "card_total": total, "host": psutil.Process().memory_info().rss}

    def close(self) -> None:
        """See `WorkerEngine.close`."""
        versions.shut_down(self.llm)

    def _make(self, settings: VllmSettings) -> tuple[Any, Any]:
        """The module and its `LLM`; nothing of it is imported before."""
        versions.prepare_environment(self.card)
        import vllm

        if not vllm.__version__.startswith(versions.KNOWN):
            print(f"a5lib knows vLLM {versions.known()}; this is {vllm.__version__}, untried.", flush=True)
        versions.make_process_group(self.card)
        if not self.card:
            versions.switch_off_packing()
        llm = vllm.LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            kv_cache_memory_bytes=settings["kv_cache_bytes"],
            gpu_memory_utilization=settings["memory_share"],
            enforce_eager=not self.card,  # on a card it compiles, and records graphs
            trust_remote_code=settings["trust_remote_code"],
            quantization=versions.FP8_ROWS if self.rounds else None,
            load_format="dummy",  # a forgotten load then shows at once; a checkpoint would pass for trained weights
            enable_prefix_caching=True,
            enable_sleep_mode=self.card,  # refused on the CPU
            # A seeded request whose prompt is cut in pieces ends vLLM on the CPU: its generators cannot be wound back.
            enable_chunked_prefill=self.card,
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            # raw ones are taken before the temperature, processed ones after top-p
            logprobs_mode="processed_logprobs" if settings["top_p"] == 1 else "raw_logprobs",
        )
        return vllm, llm

    def _apply(self, function: Callable[[nn.Module], Any]) -> Any:
        return self.llm.apply_model(function)[0]

    def _check_own_memory(self) -> None:
        self._apply(lambda model: check_own_memory(model, self._own))

    def _check_ready(self, temperature: float, top_p: float) -> None:
        if not self.verified:
            raise Refusal("The engine's weights are not verified; load them before it generates.")
        if "kv_cache" not in self.awake:
            raise Refusal('The engine has no room for keys and values; wake "kv_cache" before it generates.')
        if not self.fresh:
            raise Refusal("The prefix cache may hold keys and values of older weights; reset it before it generates.")
        if refusal := not_served(temperature, top_p, self.top_p):
            raise Refusal(refusal)

    def _completion(self, output: Any, stop: Sequence[str]) -> dict[str, Any]:
        ids, log_probs = list(output.token_ids), list(output.logprobs.logprobs)
        if list(output.logprobs.token_ids) != ids or output.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM gave {len(log_probs)} log-probabilities for {len(ids)} tokens, and the finish reason "
                f"{output.finish_reason!r}."
            )
        return {
            "token_ids": ids,
            "log_probs": log_probs,
            "text": response_text(self.tokenizer, ids, stop),
            "finish_reason": output.finish_reason,
        }


def not_served(temperature: float, top_p: float, made_for: float) -> str | None:
    """Why vLLM does not sample so, with the log-probabilities that training needs; None where it does.

    Args:
        temperature: that is asked for.
        top_p: that is asked for.
        made_for: the top-p by which its log-probabilities were chosen when it was started.
    """
    if (top_p == 1) != (made_for == 1):
        return f"The engine was made for top-p {made_for:g} and cannot serve {top_p:g}; make a new one."
    if temperature != 0 and not 0.01 <= temperature <= 2:  # it would raise the one and refuse the other
        return f"vLLM does not sample at temperature {temperature:g}; use 0, or from 0.01 to 2."
    if top_p < 1 and temperature not in (0, 1):
        return (
            f"vLLM gives log-probabilities before the temperature or after top-p, so temperature {temperature:g} "
            f"needs top-p 1, and top-p {top_p:g} needs temperature 1."
        )
    return None


def response_text(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> str:
    """A response decoded as the transformers backend does; vLLM's own text leaves out a character that is cut off."""
    known = [i for i in ids if i < len(tokenizer)]
    text = str(tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text


class OwnMemory(NamedTuple):
    """What vLLM computes with, by name.

    places: address and size of every parameter.
    constants: checksum of every buffer that stays as it is (see `vllm_versions.constants`).
    """

    places: dict[str, tuple[int, int]]
    constants: dict[str, int]


def own_memory(model: nn.Module) -> OwnMemory:
    """That of a model which is awake."""
    places = {name: (p.data_ptr(), p.numel()) for name, p in model.named_parameters(remove_duplicate=False)}
    return OwnMemory(places, checksums(versions.constants(model)))


def check_own_memory(model: nn.Module, before: OwnMemory) -> None:
    """See that vLLM computes with the memory that is read back: with its parameters, where they have always been, and
    with the buffers that it was made with. Whether those were right nobody knows here; `mismatch` would tell.

    Args:
        model: as vLLM holds it.
        before: its `own_memory` when it had been made.

    Raises:
        RuntimeError: it does not; names a layer, parameter or buffer.
    """
    names = versions.packed_layers(model)
    if names:
        raise RuntimeError(f"vLLM computes {and_others(names)} with packed copies of weights.")
    now = own_memory(model)
    if empty := [name for name, (_, size) in now.places.items() if size == 0]:
        raise RuntimeError(f"vLLM left {and_others(empty)} empty.")
    if moved := [name for name, place in now.places.items() if place != before.places.get(name)]:
        raise RuntimeError(f"vLLM moved {and_others(moved)}; recorded graphs read the old place.")
    if changed := [name for name, value in before.constants.items() if now.constants.get(name) != value]:
        raise RuntimeError(f"vLLM changed or lost {and_others(changed)}; a buffer comes with no load.")


@torch.no_grad()
def load(
    model: Any,
    slots: Sequence[Slot],
    weights: Mapping[str, Tensor],
    reload: Callable[[list[tuple[str, Tensor]]], object] | None = None,
) -> None:
    """Load the tensors that fit, with `reload` where the engine rounds them."""
    parts = {part.name: part for part in versions.parts(model)}
    fitting = [name for own, name in _names(model, slots).items() if own in parts and _fits(parts[own], weights[name])]
    (reload or model.load_weights)([(name, weights[name]) for name in fitting])


@torch.no_grad()
def held(model: nn.Module, slots: Sequence[Slot], sent: Mapping[str, Tensor] = MappingProxyType({})) -> list[Held]:
    """Read back every tensor of the model, under the names of the slots where they have one.

    A rounded tensor cannot have the checksum of what was sent. It is judged number by number against the tensor of the
    channel, and has the checksum of what comes of that (see `as_sent`); the trainer's checksums are not known here. The
    trainer took them from its own weights, so a fault of the channel shows as well.

    Args:
        model: as vLLM holds it.
        slots: names, shapes and dtypes that were sent.
        sent: the tensors themselves, by name; needed where the engine rounds.
    """
    names = _names(model, slots)
    # A tied head is the embedding under a second name; the trainer knows the first alone.
    first: dict[int, str] = {}
    parts = list(versions.parts(model))
    for part in parts:
        if part.name in names:
            first.setdefault(part.values.data_ptr(), names[part.name])
    rows = []
    for part in parts:
        name = names.get(part.name) or first.get(part.values.data_ptr()) or part.name
        values = part.values
        if part.scale is not None and name in sent and _fits(part, sent[name]):
            values = as_sent(values, part.scale, sent[name])
        form = tuple(values.shape), str(values.dtype).removeprefix("torch.")
        rows.append((name, *form, checksum(values), part.held_as))  # the host waits for the card once, below
    return [Held(name, shape, dtype, int(value), where) for name, shape, dtype, value, where in rows]


def _names(model: nn.Module, slots: Sequence[Slot]) -> dict[str, str]:
    """The trainer's name of each tensor by the engine's."""
    return {versions.engine_name(model, slot.name) or slot.name: slot.name for slot in slots}


def _fits(part: versions.Part, weight: Tensor) -> bool:
    return part.values.shape == weight.shape and (part.scale is not None or part.values.dtype == weight.dtype)
