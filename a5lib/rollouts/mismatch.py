"""How far the log-probabilities of the engine that generated are from the trainer's for the same tokens and weights.

Both compute the same function with other kernels, so they differ by rounding: in bfloat16 by some 0.03 nats a token in
the mean. A mean that is many times that says that the engine generated with other weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from a5lib.engines.statistics import MAX_LOG_RATIO


def mismatch(engine: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """The difference on the response tokens of a batch. Taught in notebook 10.

    The effective sample size is that of importance weights w = exp(trainer - engine), one a token:
    (sum w)**2 / sum w**2, divided by the number of tokens, so 1 where both agree (Kong, 1992). Differences are clamped
    to +-20 before exp.

    Args:
        engine: log-probabilities of the sampled tokens as the engine gave them, [B, T] floating.
        trainer: the trainer's, of the same tokens under the weights that generated them, [B, T] floating.
        mask: which positions are response tokens, [B, T] bool.

    Returns:
        `mismatch_mean` and `mismatch_max`, the mean and the largest absolute difference over the tokens, in nats, and
        `mismatch_ess`; 0, 0 and 1 where there is no token.

    >>> values = mismatch(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]), torch.tensor([[True, True]]))
    >>> {name: round(value, 4) for name, value in values.items()}
    {'mismatch_mean': 0.25, 'mismatch_max': 0.5, 'mismatch_ess': 0.9434}
    """
    difference = (trainer.double() - engine.double())[mask]
    if not len(difference):
        return {"mismatch_mean": 0.0, "mismatch_max": 0.0, "mismatch_ess": 1.0}
    weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch_mean": float(difference.abs().mean()),
        "mismatch_max": float(difference.abs().max()),
        "mismatch_ess": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def truncated_importance_weights(engine: Tensor, trainer: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """min(exp(trainer - engine), cap) for each response token: what a token's loss is multiplied by so that it counts
    as if the trainer had sampled it (Ionides, "Truncated importance sampling", 2008). Taught in notebook 10.

    Args:
        engine, trainer, mask: see `mismatch`.
        cap: the largest weight, so that a single token cannot rule the update.

    Returns:
        float32 [B, T] without a gradient; 1 where there is no response token.

    >>> logs = torch.tensor([[0.1, 0.9, 0.5]]).log(), torch.tensor([[0.8, 0.45, 0.1]]).log()
    >>> truncated_importance_weights(*logs, torch.tensor([[True, True, False]]))
    tensor([[2.0000, 0.5000, 1.0000]])
    """
    difference = torch.where(mask, trainer.detach().float() - engine.detach().float(), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
