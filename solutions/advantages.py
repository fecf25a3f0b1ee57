"""Rewards in, advantages out: how much better a response did than the others to the same prompt.

The rewards of a group lie next to each other (prompt-major order). This file does not know the policy or its tokens.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor


def compute_group_normalized_rewards(
    raw_rewards: Tensor,
    group_size: int,
    baseline: Literal["mean", "none"] = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: Literal["std", "none", "mean"] = "std",
    prompt_ids: Sequence[Hashable] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Subtract a baseline and divide by a scale, group by group.

    With r the rewards of a group, mu their mean and sigma their sample standard deviation (`torch.std`, G - 1 degrees
    of freedom): A = (r - b) / n with b = mu ("mean") or 0 ("none"), and n = sigma + eps ("std"), mu + eps ("mean") or 1
    ("none"). Where the rewards of a group are all equal, A is exactly 0 if a mean is subtracted or a standard deviation
    is divided by; computing r - mu would leave rounding noise there, which the division by eps blows up.

    Sources: GRPO, Shao et al. 2024 (arXiv 2402.03300, section 4.1.2); no normaliser, Dr. GRPO, Liu et al. 2025
    (2503.20783); division by the mean, MaxRL, Tajwar et al. 2026 (2602.02710). Taught in notebook 04.

    Args:
        raw_rewards: float [B] or [B, 1], B a multiple of `group_size`.
        group_size: G, responses to each prompt.
        baseline: what is subtracted.
        advantage_eps: added to the divisor.
        advantage_normalizer: what is divided by.
        prompt_ids: optional, one hashable name of the prompt to each response; interleaved groups are then refused.

    Returns:
        advantages: float32 [B].
        metadata: "zero_variance_groups", the share of groups whose rewards are all equal.

    Raises:
        ValueError: B is not a multiple of G; an option is unknown; a group of one is compared with itself by "std", or
        by "mean" after its mean was subtracted; a group mixes prompts.

    >>> compute_group_normalized_rewards(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_size=4)[0]
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    rewards = raw_rewards.float().reshape(-1)  # [B]
    if baseline not in ("mean", "none"):
        raise ValueError(f"Unknown baseline {baseline!r}; expected 'mean' or 'none'.")
    if advantage_normalizer not in ("std", "none", "mean"):
        raise ValueError(f"Unknown advantage_normalizer {advantage_normalizer!r}; expected 'std', 'none' or 'mean'.")
    if group_size < 1 or rewards.numel() == 0 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not divide into groups of group_size {group_size}.")
    if group_size == 1 and (advantage_normalizer == "std" or (advantage_normalizer, baseline) == ("mean", "mean")):
        raise ValueError(
            f"group_size 1 has nothing to compare a response with under advantage_normalizer {advantage_normalizer!r}; "
            "use groups of at least 2."
        )
    if prompt_ids is not None:
        for start in range(0, len(prompt_ids), group_size):
            if len(set(prompt_ids[start : start + group_size])) != 1:
                raise ValueError(
                    f"Group {start // group_size} mixes prompts; put the responses to a prompt side by side."
                )
    ### BEGIN YOUR CODE: reshape to [groups, G], baseline, normaliser, exact zeros (notebook 04)
    groups = rewards.reshape(-1, group_size)  # [B / G, G]
    mean = groups.mean(dim=1, keepdim=True)  # [B / G, 1]
    all_equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)  # [B / G, 1]
    advantages = groups - mean if baseline == "mean" else groups
    if advantage_normalizer == "std":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    elif advantage_normalizer == "mean":
        advantages = advantages / (mean + advantage_eps)
    if baseline == "mean" or advantage_normalizer == "std":
        advantages = torch.where(all_equal, 0.0, advantages)
    return advantages.reshape(-1), {"zero_variance_groups": all_equal.float().mean().item()}
    ### END YOUR CODE
