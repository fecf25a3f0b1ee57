"""Which engine a run gets: the plan is made from the model's config and the card before any weight is read."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from a5lib.config import ResolvedConfig
from a5lib.engines import Engine
from a5lib.engines.attention import flash_fits
from a5lib.engines.host import SharedWeights
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.plan import CONTEXT, GIB, VLLM_ASLEEP, Plan, UpdateSize
from a5lib.engines.resident import ResidentEngine
from a5lib.memory import ModelShape
from a5lib.preflight import checked_plan, let_go_of_a_failed_run, this_machine


def plan_run(
    config: ResolvedConfig,
    model_config: PreTrainedConfig,
    longest_prompt: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Plan:
    """The plan of a training run: its largest batch, on this device, within `--vram-budget` or what is free.

    On the CPU there is no card to fit: the resident engine is chosen unless a budget or an engine is named, and the
    budget then bounds the buffers that stand for the card.

    Args:
        config: a resolved config.
        model_config: of the policy.
        longest_prompt: tokens of the longest prompt.
        device: where the run computes.
        dtype: type of the parameters.

    Raises:
        UserError: card or host memory is short; says by how much, and names the nearest setting that fits.
    """
    on_card = device.type == "cuda"
    decoded = config.generation_batch_size if on_card else 0
    served = decoded if config.generation_backend == "vllm-colocated" else 0
    size = UpdateSize(
        sequences=config.train_batch_size,
        longest=longest_prompt + config.max_tokens - 1,  # the last token is a label only
        response=config.max_tokens,
        scored=config.rollout_batch_size if config.scores else 0,
        decoded=decoded if config.generation_backend == "transformers" else 0,
        served=served,
        eight_bits=config.rollout_quantization == "fp8",
        sent=config.generation_backend != "transformers" and not served,
        group=config.group_size,
    )
    engine = config.engine
    if not on_card and engine is None:
        engine = "resident" if config.vram_budget is None else "layer_major"
    let_go_of_a_failed_run()
    facts = this_machine(device)
    budget = facts.card_free if config.vram_budget is None else int(config.vram_budget * GIB)
    return checked_plan(
        ModelShape.of(model_config),
        size,
        facts,
        budget=budget,
        engine=engine,
        optimizer_state=config.optimizer_state,
        bytes_per_weight=dtype.itemsize,
        compiled=compiles(device, dtype) if config.compile_layer is None else config.compile_layer,
        microbatch=-(-config.train_batch_size // config.gradient_accumulation_steps),
        recompute_layers=config.recompute_layers,
        head=config.head,
        on_card=on_card,
    )


def compiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether engines compile unless told otherwise: packed attention has a kernel there, and Triton is there."""
    return flash_fits(device, dtype) and importlib.util.find_spec("triton") is not None


def make_engine(
    model: PreTrainedModel,
    config: ResolvedConfig,
    algo: Any,
    plan: Plan,
    device: torch.device,
    shared: SharedWeights | None = None,
) -> Engine:
    """The engine that a plan names, for a model that lies on the CPU; `shared` as in `LayerMajorEngine`.

    A budget that was asked for becomes a hard cap: torch then refuses to allocate more, and the card's other users are
    safe. Without one, the cap of an earlier run in this process is lifted.
    """
    if device.type == "cuda":
        share = 1.0
        if config.vram_budget is not None:
            asleep = VLLM_ASLEEP if config.generation_backend == "vllm-colocated" else 0
            total = torch.cuda.get_device_properties(device).total_memory
            share = (config.vram_budget * GIB - CONTEXT - asleep) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)), device)
    if plan.engine == "layer_major":
        return LayerMajorEngine(model, config, algo, plan, device, shared)
    torch.nn.Module.to(model, device)
    compiled = plan.compiled and flash_fits(device, model.dtype)
    return ResidentEngine(model, config, algo, plan.head_block, shared, compiled)
