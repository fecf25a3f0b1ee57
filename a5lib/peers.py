"""Other libraries' ways to the same update, each as its own documentation advises, for the benchmark's table.

Every function takes the model in bfloat16 on the card, a batch, a resolved config and the exercise functions, and
returns an `Update`: forward, loss and backward in one half, clipping and the optimizer's step in the other. Layers are
checkpointed and the optimizer is AdamW with the config's numbers everywhere. What differs is named in each docstring,
and so is what of the library was called. The packages are imported inside, since none is needed by anything else here.

Docs read: TRL 1.16 (GRPOTrainer, reducing memory usage), Liger-Kernel 0.8 (chunked losses, monkey patches), torchao
0.18 (optim/README.md, "Optimizer CPU offload"), bitsandbytes 0.50 (8-bit optimizers, paged optimizers).
"""

from __future__ import annotations

import functools
import importlib
import math
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from a5lib.config import ResolvedConfig
from a5lib.engines import Batch
from a5lib.errors import UserError

HEAD_BLOCK = 512  # positions whose logits exist at one time, where the loss is ours


class Update(NamedTuple):
    """One update in two halves, so that both can be timed.

    `accumulate()` returns the batch's loss, `step()` the gradient norm before clipping, or None where the library
    clips nothing. After `step` the gradients are gone.
    """

    accumulate: Callable[[], float]
    step: Callable[[], float | None]


Peer = Callable[[PreTrainedModel, Batch, ResolvedConfig, Any], Update]


def package(name: str) -> Any:
    """Import a peer's module.

    Raises:
        UserError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package built for another torch raises many kinds
        top = {"liger_kernel": "liger-kernel"}.get(root := name.partition(".")[0], root)
        raise UserError(
            f"The package {top} does not import here ({type(error).__name__}: {error}); install it with: pip install "
            f"{top}"
        ) from error


def trl_grpo(model: PreTrainedModel, batch: Batch, config: ResolvedConfig, algo: Any) -> Update:
    """TRL's GRPO update: its fused LM head and loss, and torch's fused AdamW with bfloat16 state.

    Called are `trl.trainer.utils.add_fused_lm_head`, as `GRPOTrainer.__init__` does, and `GRPOTrainer._compute_loss`
    (with it `_get_per_token_logps_and_entropies`) on a stand-in for the trainer. The stand-in has the trainer's
    defaults, but the loss type "grpo", whose mean over tokens and then rows is ours; the accelerator is a real one.
    Defaults of its config that are kept: checkpointed layers, bfloat16 autocast, `adamw_torch_fused`, 8 rows at a time.
    Rollouts, rewards and the data loader are not part of it.
    """
    trainer = package("trl.trainer.grpo_trainer").GRPOTrainer
    package("trl.trainer.utils").add_fused_lm_head(
        model, temperature=config.temperature, outputs=("log_probs", "entropy")
    )
    low = model.dtype == torch.bfloat16
    accelerator = package("accelerate").Accelerator(
        mixed_precision="bf16" if low else "no", cpu=model.device.type == "cpu"
    )
    checkpoint_layers(model)
    wrapped = accelerator.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_numbers(config), fused=True)
    batches = microbatches(batch, config, model.device)
    stand_in = types.SimpleNamespace(
        accelerator=accelerator, model=model, loss_type="grpo", importance_sampling_level="token", beta=0.0,
        epsilon_low=0.2, epsilon_high=0.2, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=len(batches),
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False), _metrics=defaultdict(_lists),
    )  # fmt: skip
    stand_in._get_per_token_logps_and_entropies = types.MethodType(trainer._get_per_token_logps_and_entropies, stand_in)
    inputs = []
    for part in batches:
        first = first_response_column(part)
        prompt = part["input_ids"][:, : first + 1]
        completion = part["labels"][:, first:]
        inputs.append(
            {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": completion,
                "completion_mask": part["response_mask"][:, first:].long(),
                "advantages": part["advantages"],
            }
        )

    def accumulate() -> float:
        total = 0.0
        for given in inputs:
            loss = trainer._compute_loss(stand_in, wrapped, given)
            accelerator.backward(loss)
            total += loss.item()
        return total

    return Update(accumulate, functools.partial(clip_and_step, model, optimizer, config))


def liger_grpo(
    model: PreTrainedModel,
    batch: Batch,
    config: ResolvedConfig,
    algo: Any,
    *,
    layers: bool = True,
    compiled: bool = True,
) -> Update:
    """Liger's fused linear GRPO loss, its layer kernels, and torch's fused AdamW with bfloat16 state.

    Called are `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` on the last hidden states, with its defaults (one
    sequence at a time, compiled) but the loss type "grpo", whose mean is ours, and no reference model; and with
    `layers`, on a card, `apply_liger_kernel_to_olmo2` (RMS norm, rotary positions, SwiGLU).
    """
    loss_fn = package("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="grpo", temperature=config.temperature, compiled=compiled
    )
    if layers and model.device.type == "cuda":
        package("liger_kernel.transformers").apply_liger_kernel_to_olmo2(fused_linear_cross_entropy=False, model=model)
    checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_numbers(config), fused=True)
    batches = microbatches(batch, config, model.device)
    head: Any = model.get_output_embeddings()

    def accumulate() -> float:
        total = torch.zeros((), device=model.device)
        for part in batches:
            first = first_response_column(part)
            hidden = model.base_model(part["input_ids"], use_cache=False).last_hidden_state
            loss, _ = loss_fn(
                hidden[:, first:], head.weight, part["labels"][:, first:], part["response_mask"][:, first:].float(),
                part["advantages"],
            )  # fmt: skip
            loss = loss * (len(part["labels"]) / len(batch["labels"]))
            loss.backward()
            total += loss.detach()
        return total.item()

    return Update(accumulate, functools.partial(clip_and_step, model, optimizer, config))


def torchao_offload(
    model: PreTrainedModel, batch: Batch, config: ResolvedConfig, algo: Any, *, gradients: bool = True
) -> Update:
    """torchao's `CPUOffloadOptimizer` over torch's fused AdamW: the step is taken by the processor, in bfloat16.

    With `gradients`, gradients leave the card during the backward pass; that does not go with accumulating them, so the
    whole batch is one microbatch. Its documentation says that clipping is not supported, so nothing is clipped. The
    loss is ours (see `our_gradients`).
    """
    offload = package("torchao.optim").CPUOffloadOptimizer
    checkpoint_layers(model)
    optimizer = offload(
        model.parameters(), torch.optim.AdamW, offload_gradients=gradients, **adamw_numbers(config), fused=True
    )
    steps = 1 if gradients else config.gradient_accumulation_steps

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Update(functools.partial(our_gradients, model, batch, config, algo, steps), step)


def bitsandbytes_paged(
    model: PreTrainedModel, batch: Batch, config: ResolvedConfig, algo: Any, *, bits: int = 8
) -> Update:
    """bitsandbytes' paged AdamW: its state is in memory that the driver moves between host and card when either is
    short.

    Called is `bitsandbytes.optim.PagedAdamW8bit` or `PagedAdamW32bit`. torch does not count such memory: the whole
    card's use does. The loss is ours (see
    `our_gradients`).

    Raises:
        UserError: the state would not fit into what is free on the card; such an allocation can hang a card.
    """
    optim = package("bitsandbytes").optim
    if model.device.type == "cuda":
        needed = model.num_parameters() * bits // 4
        free, _ = torch.cuda.mem_get_info(model.device)
        if needed > free / 2:
            raise UserError(
                f"Paged AdamW would take {needed / 2**30:.1f} GiB of managed memory and {free / 2**30:.1f} GiB are "
                "free on the card; half of that is the most that is safe."
            )
    checkpoint_layers(model)
    optimizer = {8: optim.PagedAdamW8bit, 32: optim.PagedAdamW32bit}[bits](model.parameters(), **adamw_numbers(config))
    return Update(
        functools.partial(our_gradients, model, batch, config, algo, config.gradient_accumulation_steps),
        functools.partial(clip_and_step, model, optimizer, config),
    )


PEERS: Mapping[str, Peer] = {
    "trl": trl_grpo,
    "liger": liger_grpo,
    "liger-loss": functools.partial(liger_grpo, layers=False),
    "torchao": torchao_offload,
    "torchao-state": functools.partial(torchao_offload, gradients=False),
    "bitsandbytes-8": bitsandbytes_paged,
    "bitsandbytes-32": functools.partial(bitsandbytes_paged, bits=32),
}
"""Each peer by the name that the benchmark's table gives it."""


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass, as all of these libraries advise; training mode switches it on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def adamw_numbers(config: ResolvedConfig) -> dict[str, Any]:
    """What every AdamW takes from the config."""
    return {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }


def microbatches(batch: Batch, config: ResolvedConfig, device: torch.device) -> list[Batch]:
    """The batch on the device, in as many parts as the config accumulates."""
    size = math.ceil(len(batch["labels"]) / config.gradient_accumulation_steps)
    parts = zip(*(tensor.to(device).split(size) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def first_response_column(batch: Batch) -> int:
    """The first column that is a response in any row of the mask [B, T]."""
    return int(batch["response_mask"].any(dim=0).int().argmax())


def our_gradients(model: PreTrainedModel, batch: Batch, config: ResolvedConfig, algo: Any, steps: int) -> float:
    """Accumulate the gradient of our own loss: `algo`'s, with the head on response columns, in checkpointed blocks."""
    first = first_response_column(batch)
    head: Any = model.get_output_embeddings()

    def score(
        model: PreTrainedModel, ids: Tensor, labels: Tensor, return_token_entropy: bool, temperature: float
    ) -> dict[str, Tensor]:
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, first:]
        scored = algo.log_probs_in_blocks(
            hidden, head.weight, labels[:, first:], HEAD_BLOCK, return_token_entropy, temperature
        )
        return {name: torch.nn.functional.pad(values, (first, 0)) for name, values in scored.items()}

    loss, _ = algo.accumulate_gradients(model, batch, steps, temperature=config.temperature, score=score)
    return float(loss)


def clip_and_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: ResolvedConfig) -> float:
    """torch's clipping, the optimizer's step, and gradients dropped; returns the norm before clipping."""
    norm: Tensor = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def _lists() -> defaultdict[str, list[float]]:
    return defaultdict(list)
