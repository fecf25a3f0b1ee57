"""Log-probabilities and advantages in, a loss at every token out, and the ways to make one number of it.

A loss is a negated objective, so that an optimizer that minimises it raises the probability of good responses. This
file does not know the model, the prompts or how a batch is split.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["none", "noclip", "grpo", "gspo", "cispo"]

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: far outside every clip range, and still finite when squared or summed


def compute_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor,
    policy_log_probs: Tensor,
    importance_reweighting_method: Method = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy-gradient loss of every token.

    With A the advantage of the response, p the policy's probability of the token, w = exp(log p - old log p), and s =
    exp of the mean of log p - old log p over the response's tokens, the loss is

    - "none": -A log p
    - "noclip": -A w
    - "grpo": -min(A w, A clip(w, 1 - eps, 1 + eps)) (PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; GRPO,
      Shao et al. 2024, arXiv 2402.03300, equation 3)
    - "gspo": the same with s in place of w, so that each row is constant (Zheng et al. 2025, arXiv 2507.18071)
    - "cispo": -stop_gradient(min(w, 1 + eps)) A log p (MiniMax 2025, arXiv 2506.13585)

    The arithmetic is float32 (float64 stays float64). Log-ratios are clamped to +-20 before exp; beyond that they have
    no gradient. Where `response_mask` is False, log-probability and log-ratio are replaced by 0 before anything is
    computed from them: multiplying by the mask afterwards would turn an infinity into NaN. The loss there is finite,
    has no gradient and means nothing; `aggregate_loss_across_microbatch` leaves it out.

    Taught in notebook 05.

    Args:
        raw_rewards_or_advantages: float [B] or [B, 1].
        policy_log_probs: float [B, T], log-probabilities of the labels under the policy that is trained.
        importance_reweighting_method: one of the five above.
        old_log_probs: float [B, T], the same under the policy that sampled; needed by all but "none". No gradient
            flows.
        cliprange: eps; needed by "grpo", "gspo" and "cispo".
        response_mask: bool or 0/1 [B, T]; needed by "gspo". None: every position counts.

    Returns:
        loss: float32 [B, T].
        metadata: "clipped" bool [B, T], response tokens whose loss the clipping changed; "clip_fraction" float [],
        their share of the response tokens; and, where a ratio is used, "ratio" float32 [B, T] without gradient.

    Raises:
        ValueError: an unknown method, a missing argument (named), or shapes that do not fit.
    """
    method = importance_reweighting_method
    if method not in get_args(Method):
        raise ValueError(f"Unknown importance_reweighting_method {method!r}; expected one of {get_args(Method)}.")
    if method != "none" and old_log_probs is None:
        raise ValueError(f"importance_reweighting_method {method!r} needs old_log_probs.")
    if method in ("grpo", "gspo", "cispo") and cliprange is None:
        raise ValueError(f"importance_reweighting_method {method!r} needs cliprange.")
    if method == "gspo" and response_mask is None:
        raise ValueError("importance_reweighting_method 'gspo' needs response_mask.")
    if raw_rewards_or_advantages.numel() != policy_log_probs.shape[0]:
        raise ValueError(
            f"raw_rewards_or_advantages has {raw_rewards_or_advantages.numel()} values for "
            f"{policy_log_probs.shape[0]} rows of policy_log_probs; give one to each row."
        )
    for name, tensor in (("old_log_probs", old_log_probs), ("response_mask", response_mask)):
        if tensor is not None and tensor.shape != policy_log_probs.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; policy_log_probs has {tuple(policy_log_probs.shape)}."
            )
    new = policy_log_probs.to(torch.promote_types(policy_log_probs.dtype, torch.float32))  # [B, T]
    advantages = raw_rewards_or_advantages.to(new.dtype).reshape(-1, 1)  # [B, 1]
    mask = torch.ones_like(new, dtype=torch.bool) if response_mask is None else response_mask.bool()  # [B, T]
    old = None if old_log_probs is None else old_log_probs.detach().to(new.dtype)  # [B, T]
    ### BEGIN YOUR CODE: write the five losses; replace masked positions before exp (notebook 05)
    log_probs = torch.where(mask, new, 0.0)  # [B, T]
    clipped = torch.zeros_like(mask)  # [B, T]
    metadata: dict[str, Tensor] = {}
    if old is None or method == "none":
        loss = -advantages * log_probs
    else:
        log_ratio = torch.where(mask, new - old, 0.0)  # [B, T]
        if method == "gspo":
            tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]; an empty row has log-ratio 0
            log_ratio = (log_ratio.sum(dim=1, keepdim=True) / tokens).expand_as(new)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [B, T]
        metadata["ratio"] = ratio.detach()
        if method == "noclip" or cliprange is None:
            loss = -advantages * ratio
        elif method == "cispo":
            weight = ratio.detach().clamp(max=1.0 + cliprange)
            loss = -weight * advantages * log_probs
            clipped = (ratio > 1.0 + cliprange) & (advantages != 0) & mask
        else:  # grpo, gspo
            inside = ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
            loss = -torch.minimum(advantages * ratio, advantages * inside)
            clipped = (advantages * inside < advantages * ratio) & mask
    metadata["clipped"] = clipped
    metadata["clip_fraction"] = clipped.sum() / mask.sum().clamp(min=1)
    return loss, metadata
    ### END YOUR CODE


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: Tensor,
    mask: Tensor,
    loss_normalization: Literal["sequence", "constant", "token"] = "sequence",
    normalization_constant: int | None = None,
) -> Tensor:
    """One number from the losses of the tokens.

    - "sequence": mean over the tokens of a row, then over the rows; a row without tokens counts as 0 (GRPO, Shao et al.
      2024, arXiv 2402.03300, equation 3)
    - "constant": sum over all tokens, divided by a constant (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)
    - "token": mean over all tokens of the batch, so that long responses weigh more

    Taught in notebook 05.

    Args:
        per_token_policy_gradient_loss: float [B, T].
        mask: bool or 0/1 [B, T]; positions outside it are left out, whatever they hold.
        loss_normalization: one of the three above.
        normalization_constant: the divisor of "constant".

    Returns:
        float [], with gradient.

    Raises:
        ValueError: an unknown normalisation, or "constant" without a positive constant.

    >>> loss, mask = torch.tensor([[1.0, 1.0], [3.0, 99.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> aggregate_loss_across_microbatch(loss, mask), aggregate_loss_across_microbatch(loss, mask, "constant", 10)
    (tensor(2.), tensor(0.5000))
    """
    if loss_normalization not in ("sequence", "constant", "token"):
        raise ValueError(
            f"Unknown loss_normalization {loss_normalization!r}; expected 'sequence', 'constant' or 'token'."
        )
    if loss_normalization == "constant" and not (normalization_constant is not None and normalization_constant > 0):
        raise ValueError(
            f"loss_normalization 'constant' needs a positive normalization_constant, not {normalization_constant}."
        )
    ### BEGIN YOUR CODE: leave out what the mask excludes, then average or divide (notebook 05)
    losses = torch.where(mask.bool(), per_token_policy_gradient_loss, 0.0)  # [B, T]
    tokens = mask.bool().sum(dim=1)  # [B]
    if loss_normalization == "sequence":
        return (losses.sum(dim=1) / tokens.clamp(min=1)).mean()
    if loss_normalization == "token":
        return losses.sum() / tokens.sum().clamp(min=1)
    assert normalization_constant is not None
    return losses.sum() / normalization_constant
    ### END YOUR CODE
