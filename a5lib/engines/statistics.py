"""What an update reports about a batch: means over its trained response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from a5lib.engines import Batch

MAX_LOG_RATIO = 20.0


def statistics(batch: Batch, log_probs: Tensor, entropy: Tensor, loss_metadata: dict[str, Tensor]) -> dict[str, Tensor]:
    """Entropy, clip fraction, range of the ratio and KL of a batch [B, T], as `accumulate_gradients` reports them.

    Tokens are those of rows that are run: response tokens of rows with a non-zero advantage. The values are tensors of
    one number on the batch's device, so that nothing waits here.
    """
    mask = batch["response_mask"] & (batch["advantages"] != 0)[:, None]
    tokens = mask.sum()
    one = torch.ones((), device=mask.device)

    def mean(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0).sum() / tokens.clamp(min=1)

    ratio = loss_metadata.get("ratio")
    any_ratio = ratio is not None and len(mask) > 0
    stats = {
        "entropy": mean(entropy),
        "clip_fraction": mean(loss_metadata["clipped"].float()),
        "ratio_min": torch.where(mask, ratio, torch.inf).amin() if ratio is not None and any_ratio else one,
        "ratio_max": torch.where(mask, ratio, -torch.inf).amax() if ratio is not None and any_ratio else one,
        "trained_tokens": tokens,
        "skipped_sequences": (batch["advantages"] == 0).float().mean(),
    }
    # Without a trained token there is no ratio, as where none is used.
    for name in ("ratio_min", "ratio_max"):
        stats[name] = torch.where(tokens > 0, stats[name], one.to(stats[name].dtype))
    if "rollout_log_probs" in batch:
        d = (log_probs - batch["rollout_log_probs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        stats["kl_rollout"] = mean(d.exp() - 1.0 - d)
    return stats


def bad_rows(batch: Batch, per_token_loss: Tensor) -> str:
    """The sentence for a loss that is not finite: it names the rows of the batch where the loss of a token is not."""
    bad = ~torch.where(batch["response_mask"], per_token_loss, 0.0).isfinite().all(dim=1)
    rows = ", ".join(str(row) for row in bad.nonzero().flatten().tolist())
    return f"The loss is not finite in row {rows or 'unknown'} of the batch, counted from 0."
