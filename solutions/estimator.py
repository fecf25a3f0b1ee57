"""An advantage estimator of your own: rewards of groups in, one number for each response out.

It takes the place of `advantages.py` in a training run. The reference is leave-one-out; yours may be another. This file
does not know the policy, its tokens or the loss.
"""

import torch


def estimate_advantages(raw_rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """The advantage of each response, from the rewards of its own group alone.

    The reference is RLOO: with r the rewards of a group of G, A_i = r_i - b_i, and b_i is the mean of the other G - 1
    rewards. The baseline does not depend on response i, so the gradient's estimate is unbiased. Any fair estimator may
    stand here: the same rewards always give the same finite advantages, they do not depend on other groups, they move
    with the rewards when the order changes, and with rewards of 0 and 1 the expected gradient of one prompt is a
    positive multiple of the true one.

    Sources: Ahmadian et al. 2024 (arXiv 2402.14740); Kool, van Hoof and Welling 2019 ("Buy 4
    REINFORCE Samples, Get a Baseline for Free!"). Taught in notebook 12.

    Args:
        raw_rewards: float or whole numbers, [B] or [B, 1]; the rewards of a group lie side by side. Must stay as it is.
        group_size: G, responses to each prompt, at least 2; B is a multiple of it.

    Returns:
        advantages: float32 [B].

    Raises:
        ValueError: B is not a multiple of G, or a group of one has no others.

    >>> estimate_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_size=4)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    rewards = raw_rewards.float().reshape(-1)  # [B]
    if group_size < 2 or rewards.numel() == 0 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not divide into groups of group_size {group_size}, at least 2.")
    ### BEGIN YOUR CODE: a fair estimator of your choice, such as leave-one-out (notebook 12)
    groups = rewards.reshape(-1, group_size)  # [B / G, G]
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)  # [B / G, G], mean of the other rewards
    return (groups - others).reshape(-1)  # [B]
    ### END YOUR CODE
