"""Which backend a run gets. Everything that is vLLM's alone is imported only where a run asks for it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from a5lib.config import ResolvedConfig, TrainConfig, resolve
from a5lib.engines.plan import VLLM_TOKENS, Plan, vllm_cache
from a5lib.errors import UserError
from a5lib.memory import ModelShape
from a5lib.models import policy_device, select_dtype
from a5lib.rollouts import RolloutBackend, vllm_backend
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.rollouts.vllm_engine import VllmSettings
from a5lib.rollouts.vllm_server import VllmServer
from a5lib.rollouts.worker_process import worker_environment

PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
PROBE_SECONDS = 60
FP8_CAPABILITY = (8, 9)
MOST_OF_A_CARD = 0.95  # that vLLM is ever told to take
ROWS_ON_CPU = 32  # longest responses whose keys and values vLLM has room for without a card; the others wait


def check_backend(config: ResolvedConfig) -> None:
    """See that there is a vLLM to start, within a second and before any work; nothing of it is imported. A server is
    asked when it is known what it has to serve (`VllmServer.start`).

    Raises:
        UserError: the Python of --vllm-python cannot be started, or has no vLLM; or eight bits do not go with the card
            or the weights.
    """
    if config.generation_backend != "vllm-colocated":
        return
    if config.rollout_quantization == "fp8":
        _check_fp8(config)
    python, remedy = config.vllm_python, "or use --generation-backend transformers"
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                f"--generation-backend {config.generation_backend} needs vLLM, which this Python ({sys.executable}) "
                f"does not have; name one that has it with --vllm-python, {remedy}."
            )
        return
    try:
        environment = worker_environment(os.environ, str(python))
        done = subprocess.run([str(python), "-c", PROBE], capture_output=True, timeout=PROBE_SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"--vllm-python {python} cannot be started ({getattr(error, 'strerror', None) or error}); give the path of "
            f"the Python that has vLLM, such as vllm-env/bin/python, {remedy}."
        ) from error
    if done.returncode:
        raise UserError(f"--vllm-python {python} has no vLLM; install it there, name another Python, {remedy}.")


def _check_fp8(config: ResolvedConfig) -> None:
    device = policy_device(config.model, config.device)
    dtype, name = select_dtype(config.dtype, device), f"--rollout-quantization {config.rollout_quantization}"
    if dtype != torch.bfloat16:
        raise UserError(f"{name} needs bfloat16 weights, and these are {str(dtype)[6:]}; use --dtype bfloat16.")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise UserError(
            f"{name} needs a card that multiplies eight-bit numbers (compute capability 8.9 or more, such as an RTX "
            f"4060), and this one's is {capability[0]}.{capability[1]}; leave it out."
        )


def best_backend(config: TrainConfig, vllm_python: Path | None = None) -> tuple[TrainConfig, str]:
    """The config with colocated vLLM on a card where there are both, otherwise as it is. Taught in notebook 11.

    Args:
        config: any.
        vllm_python: the Python that may have vLLM (None: this one).

    Returns:
        The config, and a sentence that says what generates and, where it is not vLLM, why.
    """
    as_it_is = f"{config.generation_backend} generates: "
    if not torch.cuda.is_available():
        return config, f"{as_it_is}there is no card."
    colocated = dataclasses.replace(config, device="cuda", generation_backend="vllm-colocated", vllm_python=vllm_python)
    try:
        check_backend(resolve(colocated))
    except UserError as error:
        return config, f"{as_it_is}{error}"
    return colocated, "vLLM generates, on the card that trains."


def make_backend(
    config: ResolvedConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    plan: Plan,
    run_dir: Path,
) -> RolloutBackend:
    """The backend that a config names. It is made before the engine, which may keep its weights in `channel`.

    Args:
        config: a resolved config.
        model: the policy.
        tokenizer: its tokenizer.
        device: where the run computes.
        plan: of the run; it says how much of a card vLLM gets.
        run_dir: the run folder, for the log of the worker.

    Raises:
        UserError: the memory through which the weights travel is not to be had.
    """
    if config.generation_backend == "transformers":
        return TransformersRollouts(model, tokenizer, config.generation_batch_size, device)
    if config.generation_backend == "vllm-server":
        return VllmServer(
            model.named_parameters(), tokenizer, config.vllm_url, model=str(model.config.name_or_path),
            max_model_len=plan.longest + 1, top_p=config.top_p, concurrency=config.generation_batch_size,
            trust_remote_code=config.trust_remote_code, device=device if device.type == "cuda" else None,
        )  # fmt: skip
    return vllm_backend.VllmColocated(
        model.named_parameters(),
        vllm_settings(config, model, device, plan),
        run_dir,
        python=None if config.vllm_python is None else str(config.vllm_python),
        device=device if device.type == "cuda" else None,
        engine=vllm_backend.ENGINE,
    )


def vllm_settings(config: ResolvedConfig, model: PreTrainedModel, device: torch.device, plan: Plan) -> VllmSettings:
    """What a run's vLLM is made with; on a card its memory is what the plan gives it in the phase "generate"."""
    on_card = device.type == "cuda"
    if on_card:
        # what it takes asleep comes on top: it is there before vLLM looks at what is free
        parts = {name: size for name, size in plan.card["generate"].items() if name.startswith("vLLM's")}
        cache = parts["vLLM's keys and values"]
        share = min(MOST_OF_A_CARD, sum(parts.values()) / torch.cuda.get_device_properties(device).total_memory)
    else:
        rows = min(config.generation_batch_size, ROWS_ON_CPU)
        cache = vllm_cache(ModelShape.of(model.config), plan.longest, rows, model.dtype.itemsize)
        share = MOST_OF_A_CARD  # a number that vLLM takes; without a card it counts the bytes above alone
    return {
        "model": str(model.config.name_or_path),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": plan.longest + 1,  # the plan does not count the last token, which is a label only
        "max_num_seqs": config.generation_batch_size,
        # without a card prompts go in whole
        "max_num_batched_tokens": max(VLLM_TOKENS, config.generation_batch_size if on_card else plan.longest + 1),
        "top_p": config.top_p,
        "kv_cache_bytes": cache,
        "memory_share": share,
        "trust_remote_code": config.trust_remote_code,
        "quantization": config.rollout_quantization,
    }
