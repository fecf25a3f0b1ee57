"""How far the log-probabilities of the engine that generated are from the trainer's for the same tokens and weights.

Both compute the same function with other kernels, so they differ by rounding: in bfloat16 by some 0.03 nats a token in
the mean. A mean that is many times that says that the engine generated with other weights.
"""

from __future__ import annotations

import statistics
from collections import deque

import torch
from torch import Tensor

from a5lib.engines.statistics import MAX_LOG_RATIO
from a5lib.rollouts.fp8 import FP8

CAP = 2.0  # of a truncated importance weight
# The mean that rounding alone gives, in nats: 0.031 was seen with bfloat16 and a model of 135 million parameters, where
# transformers in bfloat16 is as far from float32. In float32 it was 5e-6; a card may multiply at less precision. Linear
# layers in eight bits took some three times what bfloat16 takes, with the toy model.
ROUNDING = {torch.bfloat16: 0.031, torch.float32: 1e-3, FP8: 0.1}
JUMP, REMEMBERED = 5, 20


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
        `mismatch_mean` and `mismatch_max`, the mean and the largest absolute difference over the tokens, in nats,
        `mismatch_ess`, and `mismatch_capped`, the share of weights above 2; nothing where there is no token.

    >>> values = mismatch(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]), torch.tensor([[True, True]]))
    >>> {name: round(value, 4) for name, value in values.items()}
    {'mismatch_mean': 0.25, 'mismatch_max': 0.5, 'mismatch_ess': 0.9434, 'mismatch_capped': 0.0}
    """
    difference = (trainer.double() - engine.double())[mask]
    if not len(difference):
        return {}
    weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch_mean": float(difference.abs().mean()),
        "mismatch_max": float(difference.abs().max()),
        "mismatch_ess": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
        "mismatch_capped": float((weights > CAP).double().mean()),
    }


def truncated_importance_weights(engine: Tensor, trainer: Tensor, mask: Tensor, cap: float = CAP) -> Tensor:
    """min(exp(trainer - engine), cap) for each response token: what a token's loss is multiplied by so that it counts
    as if the trainer had sampled it. Taught in notebook 10.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025, who apply
    truncated importance sampling (Ionides, 2008) to this mismatch.

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


class MismatchWatch:
    """Says when the mismatch of a batch is no longer that of rounding. Taught in notebook 10.

    A jump is a mean of more than 5 times what is usual here: the median of the last 20 batches, or what rounding alone
    gives with this dtype, whichever is more. So the first batch is judged too, and a run whose mismatch is high from
    the start, and says so, is not said again at every step.

    Args:
        dtype: of the trainer's weights, or float8_e4m3fn where those that generate are rounded to eight bits.

    >>> watch = MismatchWatch(torch.bfloat16)
    >>> watch.jump(0.03), watch.jump(0.15)
    (None, None)
    >>> "differ by 0.6 nats a token" in watch.jump(0.6)
    True
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.rounding = ROUNDING.get(dtype, ROUNDING[torch.float32])
        self.means: deque[float] = deque(maxlen=REMEMBERED)

    def jump(self, mean: float) -> str | None:
        """One sentence, or None; the mean of this batch counts for those after it."""
        usual = max(self.rounding, statistics.median(self.means) if self.means else 0.0)
        self.means.append(mean)
        if mean <= JUMP * usual:
            return None
        return (
            f"The log-probabilities of the engine that generates and of the trainer differ by {mean:.2g} nats a token "
            f"in the mean, more than {JUMP} times what is usual here ({usual:.2g}): the engine may compute with other "
            "weights or in another precision; compare mismatch_mean in metrics.jsonl, and stop if it stays."
        )
