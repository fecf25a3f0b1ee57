"""Models with random weights in published sizes, and made-up batches of rollouts: what the benchmark and the capacity
probe run on, without a download.

Time and memory of an update depend on sizes, not on what the weights say. This file does not know engines or losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, PreTrainedConfig, PreTrainedModel

from a5lib.config import nearest
from a5lib.errors import UserError

WEIGHT_STD = 0.02
BLOCK = 4_194_301  # random values that are made; a prime, so that no two rows of a matrix begin at the same one

MEDIAN_RESPONSE, SPREAD = 159, 0.5  # of a log-normal distribution: mean 180 tokens, as of GSM8K responses
SHORTEST_RESPONSE = 16


def _olmo2(**sizes: Any) -> Olmo2Config:
    return Olmo2Config(
        **{"vocab_size": 100_352, "max_position_embeddings": 4096} | sizes,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )


def _llama31_8b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        bos_token_id=None, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


PUBLISHED: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "olmo2-1b": lambda: _olmo2(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
                               num_key_value_heads=16),
    "olmo2-7b": lambda: _olmo2(hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32,
                               num_attention_heads=32, num_key_value_heads=32),
    "llama3.1-8b": _llama31_8b,
    "tiny": lambda: _olmo2(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024),
}  # fmt: skip
"""OLMo-2-0425-1B, OLMo-2-1124-7B (arXiv 2501.00656) and Llama-3.1-8B (arXiv 2407.21783) by their published
configurations, and a tiny OLMo-2 of our own for tests. The special tokens' ids are not theirs: 0 pads, 1 ends."""


def published_config(name: str) -> PreTrainedConfig:
    """The configuration of a published model, by its name in `PUBLISHED`.

    Raises:
        UserError: there is no such name.

    >>> published_config("llama3.1-8b").num_key_value_heads
    8
    """
    if name not in PUBLISHED:
        raise UserError(
            f"Unknown model {name!r}; did you mean {nearest(name, list(PUBLISHED))!r}? Choose from "
            f"{', '.join(PUBLISHED)}."
        )
    return PUBLISHED[name]()


@torch.no_grad()
def random_model(
    config: PreTrainedConfig, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", seed: int = 0
) -> PreTrainedModel:
    """A model of this configuration in evaluation mode: matrices normal with deviation 0.02, norms 1, biases 0.

    Only `BLOCK` values are drawn; every parameter takes the next ones, round and round. So the largest model is made in
    the time that writing it takes, its weights are in memory once, and a seed gives the same weights on every device.

    Args:
        config: a transformers configuration.
        dtype: type of the parameters.
        device: where they lie.
        seed: of the values.

    >>> model = random_model(published_config("tiny"), dtype=torch.float32)
    >>> 0.019 < model.get_input_embeddings().weight.std().item() < 0.021
    True
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device=device)
    rotary = model.base_model.rotary_emb
    model.base_model.rotary_emb = type(rotary)(config).to(device)  # its frequencies are no parameters
    generator = torch.Generator().manual_seed(seed)
    block = (torch.randn(BLOCK, generator=generator) * WEIGHT_STD).to(dtype).to(device)
    position = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)
            continue
        flat = parameter.view(-1)
        done = 0
        while done < flat.numel():
            piece = block[position : position + flat.numel() - done]
            flat[done : done + piece.numel()] = piece
            done += piece.numel()
            position = (position + piece.numel()) % BLOCK
    return model.eval()


def made_up_batch(
    *,
    vocabulary: int,
    sequences: int = 64,
    tokens: int = 672,
    response: int = 512,
    group_size: int = 8,
    ragged: bool = False,
    zero_share: float = 0.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """A train batch of random tokens, as `algo.tokenize_prompt_and_output` and the advantages would give it.

    Args:
        vocabulary: ids are drawn from 2 to below this; 0 is the padding on the right.
        sequences: rows, a multiple of `group_size`.
        tokens: columns T, of which a whole row uses all.
        response: the longest response.
        group_size: rows that share a prompt.
        ragged: prompts of 3/4 to 5/4 of the mean length that fits, and responses as of GSM8K: log-normal, mean 180,
            cut off at `response`. Otherwise every row fills all columns.
        zero_share: share of the groups whose advantages are all 0 (every response right, or none).
        seed: of everything.

    Returns:
        "input_ids", "labels" int64 [B, T]; "response_mask" bool [B, T]; "advantages" float32 [B], in each group that
        is not all 0 with mean 0 and standard deviation 1.

    Raises:
        UserError: sizes that do not fit together.

    >>> batch = made_up_batch(vocabulary=264, sequences=4, tokens=12, response=8, group_size=4)
    >>> batch["response_mask"].sum(dim=1).tolist()
    [8, 8, 8, 8]
    """
    if sequences % group_size or group_size < 2:
        raise UserError(f"{sequences} sequences do not make whole groups of {group_size}; a group has at least 2.")
    if not 1 <= response < tokens:
        raise UserError(
            f"A response of {response} tokens does not fit into {tokens} columns; it may have 1 to {tokens - 1}."
        )
    generator = torch.Generator().manual_seed(seed)
    groups = sequences // group_size
    longest_prompt = tokens + 1 - response  # the last token of a sequence is a label only
    prompts = torch.full((groups,), longest_prompt)
    lengths = torch.full((sequences,), response)
    if ragged:
        share = 0.6 + 0.4 * torch.rand(groups, generator=generator)  # 3/4 to 5/4 of the middle
        prompts = (longest_prompt * share).round().long().clamp(min=1)
        drawn = MEDIAN_RESPONSE * (SPREAD * torch.randn(sequences, generator=generator)).exp()
        lengths = drawn.round().long().clamp(min(SHORTEST_RESPONSE, response), response)
    prompts = prompts.repeat_interleave(group_size)[:, None]  # [B, 1]
    position = torch.arange(tokens + 1)
    ids = torch.randint(2, vocabulary, (groups, tokens + 1), generator=generator).repeat_interleave(group_size, dim=0)
    sampled = torch.randint(2, vocabulary, (sequences, tokens + 1), generator=generator)
    is_response = (position >= prompts) & (position < prompts + lengths[:, None])  # [B, T + 1]
    ids = torch.where(position < prompts, ids, torch.where(is_response, sampled, 0))
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "response_mask": is_response[:, 1:].contiguous(),
        "advantages": _advantages(groups, group_size, zero_share, generator),
    }


def _advantages(groups: int, group_size: int, zero_share: float, generator: torch.Generator) -> Tensor:
    """Rewards of 0 and 1, at least one of each in a group, normalised; the first groups of a shuffled order are 0."""
    right = torch.randint(1, group_size, (groups, 1), generator=generator)
    order = torch.rand(groups, group_size, generator=generator).argsort(dim=1)
    rewards = (order < right).float()
    normal = (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)
    zero = torch.randperm(groups, generator=generator)[: math.floor(groups * zero_share + 0.5)]
    normal[zero] = 0.0
    return normal.flatten()
