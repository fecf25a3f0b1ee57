"""What the tests of the engines share: ragged batches, a plain float64 loop to compare with, and snapshots."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from a5lib.config import ResolvedConfig, TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.plan import Plan
from a5lib.engines.resident import ResidentEngine
from tests.fp64_reference import batch_loss

CPU = torch.device("cpu")
ALGORITHMS = ("grpo", "grpo_constant", "offpolicy_noclip", "offpolicy_clip", "offpolicy_gspo", "cispo")

Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the norms of a float64 model compute in float64, in every engine and in the plain loop.

    Those of transformers go through float32, so their gradients are rounded to 7 digits. Where several rows share a
    prompt, the engine rounds the sum of their gradients, and a plain loop adds up rounded ones.
    """
    for norm in (LlamaRMSNorm, Olmo2RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        plain = norm.forward

        def forward(self: Any, hidden_states: Tensor, plain: Any = plain) -> Tensor:
            if hidden_states.dtype != torch.float64:
                return plain(self, hidden_states)
            variance = hidden_states.square().mean(-1, keepdim=True)
            return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

        monkeypatch.setattr(norm, "forward", forward)


def ragged_batch(model: PreTrainedModel | None = None, rows: int = 8, longest: int = 10, seed: int = 0) -> Batch:
    """Prompts of 2 to 5 tokens, each shared by a group of four, and responses of up to `longest` tokens.

    Row 1 has one response token, row 2 has advantage 0, row 5 has no response, and row 7 has a prompt of its own. Each
    prompt has a padding token, whose row of the embedding has a rule of its own. The old log-probabilities lie near the
    model's, so that some ratios are clipped and some are not.
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(rows) // 4
    prompts = torch.randint(2, 6, (rows,), generator=generator)[4 * group]
    responses = torch.randint(1, longest + 1, (rows,), generator=generator)
    responses[1:2], responses[5:6] = 1, 0
    width = int((prompts + responses).max()) + 1  # ids [B, width + 1]; the last column is padding everywhere
    ids = torch.randint(2, 250, (rows, width + 1), generator=generator)
    place = torch.arange(width + 1)
    ids = torch.where(place < prompts[:, None], ids[4 * group], ids)
    ids[:, 1] = 0
    ids[7:8, 0] += 1
    ids[place >= (prompts + responses)[:, None]] = 0
    mask = (place[1:] >= prompts[:, None]) & (place[1:] < (prompts + responses)[:, None])
    advantages = torch.randn(rows, generator=generator)
    advantages[2:3] = 0.0
    old = torch.full((rows, width), -5.0)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "response_mask": mask}
    if model is not None:
        with torch.no_grad():
            old = plain_scores(copy.deepcopy(model).double(), batch)[0].float()
    old = old + 0.2 * torch.randn(rows, width, generator=generator)
    return {**batch, "advantages": advantages, "old_log_probs": old, "rollout_log_probs": old}


def whole_rows(batch: Batch) -> Batch:
    """The same batch, every token before the padding a response token, prompts too."""
    places = torch.arange(batch["response_mask"].shape[1])
    ends = (batch["response_mask"] * (places + 1)).amax(dim=1, keepdim=True)
    return {**batch, "response_mask": places < ends}


def config(algorithm: str = "offpolicy_clip", **options: Any) -> ResolvedConfig:
    """Batches of 8 in two groups, the resident engine's microbatches of 2."""
    sizes = {"rollout_batch_size": 8, "group_size": 4, "train_batch_size": 8, "max_tokens": 16}
    options = sizes | options
    options.setdefault("gradient_accumulation_steps", max(1, options["train_batch_size"] // 2))
    return resolve(TrainConfig(model="x", algorithm=algorithm, **options))


def layer_major(model: PreTrainedModel, settings: ResolvedConfig, **plan: Any) -> LayerMajorEngine:
    """An engine over a copy of the model, which works in small pieces and keeps nothing on the "card"."""
    plan = {"longest": 16, "microbatch_tokens": 24, "head_block": 5, "bucket": 5000} | plan
    return LayerMajorEngine(copy.deepcopy(model), settings, load_algo("solutions"), Plan(**plan), CPU)


def resident(model: PreTrainedModel, settings: ResolvedConfig) -> ResidentEngine:
    """The plain engine over a copy of the model; its head, where it is not "full", works in one block."""
    return ResidentEngine(copy.deepcopy(model), settings, load_algo("solutions"), head_block=1000)


def gradients(engine: LayerMajorEngine | ResidentEngine) -> dict[str, Tensor]:
    """The gradient that waits for a step, by parameter; a copy."""
    if isinstance(engine, ResidentEngine):
        return {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    pairs = [
        pair for unit in engine.parts.units for pair in zip(unit.names, unit.views(unit.flat["grad"]), strict=True)
    ]
    return {name: grad.clone() for name, grad in pairs}


def everything(engine: LayerMajorEngine | ResidentEngine) -> dict[str, Tensor]:
    """A copy of all weights and of all optimizer state."""
    return {f"{group}/{k}": t.clone() for group, tensors in engine.tensors().items() for k, t in tensors.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two dictionaries of tensors hold the same names, types and numbers."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def relative_error(tensor: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what is expected; where that is 0, the norm of the tensor."""
    scale = expected.double().norm()
    return float((tensor.double() - expected.double()).norm() / (scale if scale > 0 else 1.0))


# --- the plain loop


def plain_scores(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of every label and entropy at every place, [B, T], one row at a time, by definition."""
    log_probs, entropy = [], []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        scores = torch.log_softmax(model(ids[None]).logits[0] / temperature, dim=-1)  # [T, V]
        log_probs.append(scores[torch.arange(len(labels)), labels])
        entropy.append(-(scores.exp() * scores).sum(dim=-1))
    return torch.stack(log_probs), torch.stack(entropy)


def plain_loss(model: PreTrainedModel, batch: Batch, settings: ResolvedConfig) -> Tensor:
    """The batch's loss, as the formulas say it."""
    preset = settings.preset
    return batch_loss(
        plain_scores(model, batch, settings.temperature)[0],
        batch["old_log_probs"].double().tolist(),
        batch["response_mask"].tolist(),
        batch["advantages"].double().tolist(),
        preset.importance_reweighting_method,
        preset.cliprange,
        preset.loss_normalization,
        settings.normalization_constant,
    )


def plain_gradients(model: PreTrainedModel, batch: Batch, settings: ResolvedConfig) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of a float64 copy of the model: autograd through the plain model, nothing packed or kept."""
    model = copy.deepcopy(model).double()
    loss = plain_loss(model, batch, settings)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def plain_steps(
    model: PreTrainedModel, batch: Batch, settings: ResolvedConfig, count: int, lr: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms and final weights of a float64 copy, trained with torch's AdamW."""
    model = copy.deepcopy(model).double()
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=betas, eps=settings.adam_eps, weight_decay=settings.weight_decay
    )
    norms = []
    for _ in range(count):
        optimizer.zero_grad()
        plain_loss(model, batch, settings).backward()
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, settings.max_grad_norm / norms[-1])
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}
