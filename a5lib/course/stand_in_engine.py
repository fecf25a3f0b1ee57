"""The vLLM worker's engine where there is no vLLM: `VllmEngine` over a small program that stands in for vLLM's `LLM`.

The worker, the protocol, the shared memory, the checksums and every guard of `VllmEngine` are the real ones; only what
computes is this file's. It keeps its weights packed as vLLM does, reuses the keys and values of a prompt until its
prefix cache is reset, and answers one request after another with transformers, so it is slow. It runs on the CPU. Used
in notebook 10; the worker loads it by the path of this file.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from a5lib.rollouts.vllm_engine import VllmEngine, VllmSettings
from a5lib.rollouts.vllm_versions import parts

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class StandInSettings(VllmSettings, total=False):
    """Those of `VllmEngine`, and what a load does wrong while it reports success.

    faults: by name of a weight; "lost": its old values stay; "changed": one of its bits does not arrive.
    """

    faults: dict[str, str]


class StandInEngine(VllmEngine):
    """See `VllmEngine`.

    Args:
        settings: see `StandInSettings`; top-p must be 1, and quantization "none".
    """

    def __init__(self, settings: StandInSettings) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        super().__init__(settings)

    def _make(self, settings: VllmSettings) -> tuple[Any, Any]:
        if settings["top_p"] != 1 or settings["quantization"] != "none":
            raise ValueError("The stand-in knows top-p 1 and unquantized weights alone.")
        print("No vLLM: its stand-in, on the CPU.", flush=True)
        return SimpleNamespace(__version__="none, a stand-in", SamplingParams=SimpleNamespace), StandInLlm(settings)


class StandInLlm:
    """What `VllmEngine` uses of vLLM's `LLM`."""

    def __init__(self, settings: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        config = AutoConfig.from_pretrained(settings["model"])
        dtype = getattr(torch, settings["dtype"])
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        pack(self.model)
        self.model.load_weights = self.load_weights
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        self.faults = settings.get("faults", {})
        self.prefixes: dict[tuple[int, ...], Any] = {}  # prompt -> its keys and values, and the logits after it
        self.model_config = SimpleNamespace(max_model_len=settings["max_model_len"])
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(get_num_unfinished_requests=lambda: 0, engine_core=core)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.prefixes.clear()
        return True

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight to its rows; a weight with a fault is none the less passed over without a word."""
        held = {part.name: part.values for part in parts(self.model)}
        for name, weight in weights:
            fault = self.faults.get(name)
            if fault != "lost":
                held[name].copy_(weight)
            if fault == "changed":
                held[name].view(torch.uint8)[-1, -1] ^= 1  # of the last number

    @torch.no_grad()
    def generate(self, requests: list[Any], params: list[Any], use_tqdm: Any) -> list[Any]:
        outputs = []
        for request, wanted in zip(requests, params, strict=True):
            outputs.append(SimpleNamespace(outputs=[self._complete(request["prompt_token_ids"], wanted)]))
            use_tqdm.update(1)
        return outputs

    def _complete(self, prompt: list[int], wanted: Any) -> SimpleNamespace:
        if tuple(prompt) not in self.prefixes:
            self.prefixes[tuple(prompt)] = self.model(torch.tensor([prompt]), use_cache=True)
        output = copy.deepcopy(self.prefixes[tuple(prompt)])
        generator = torch.Generator().manual_seed(wanted.seed)
        ids: list[int] = []
        log_probs: list[float] = []
        reason = "length"
        while len(ids) < wanted.max_tokens and reason == "length":
            scores = (output.logits[0, -1].float() / (wanted.temperature or 1)).log_softmax(-1)
            greedy = wanted.temperature == 0
            token = int(scores.argmax() if greedy else scores.exp().multinomial(1, generator=generator))
            ids.append(token)
            log_probs.append(float(scores[token]))
            text = self.tokenizer.decode(ids)
            if token == self.tokenizer.eos_token_id or any(stop in text for stop in wanted.stop):
                reason = "stop"
            elif len(ids) < wanted.max_tokens:
                output = self.model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        logprobs = SimpleNamespace(token_ids=ids, logprobs=log_probs)
        return SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)


class PackedLinear(nn.Module):
    """Linear layers whose weights are one matrix: the rows of the first, then those of the second, and so on."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.output_sizes = [layer.out_features for layer in layers]
        self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)

    def rows(self, index: int) -> Any:
        """One of the layers, as a function."""
        return lambda x: nn.functional.linear(x, self.weight.split(self.output_sizes)[index])


def pack(model: Any) -> None:
    """Replace a model's linear layers by packed ones, where vLLM packs them."""
    for module in list(model.modules()):
        for packed, names in PACKED.items():
            if all(hasattr(module, name) for name in names):
                together = PackedLinear([getattr(module, name) for name in names])
                for index, name in enumerate(names):
                    delattr(module, name)
                    setattr(module, name, together.rows(index))
                setattr(module, packed, together)
    model.packed_modules_mapping = PACKED
