"""One optimizer step: rewards, advantages, losses and gradients of a batch, microbatch by microbatch.

The gradient is that of the whole batch, however it is split and whichever rows are skipped. This file does not know
where the rollouts came from, and its functions call the other exercises through `algo` only.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from .losses import MAX_LOG_RATIO, Method


class TokenSums:
    """Sums over trained response tokens, kept on the device until `read`, so that microbatches do not wait for the
    host.

    Sums and not means: the mean of two microbatches' means is not the mean over their tokens. Given, not an exercise.
    """

    def __init__(self, device: torch.device, has_kl: bool) -> None:
        self.tokens, self.entropy, self.clipped, self.kl = torch.zeros(4, device=device).unbind()
        self.ratio_min = torch.tensor(torch.inf, device=device)
        self.ratio_max = torch.tensor(-torch.inf, device=device)
        self.has_ratio, self.has_kl = False, has_kl

    def add(self, scored: dict[str, Tensor], loss_metadata: dict[str, Tensor], part: dict[str, Tensor]) -> None:
        """Add a microbatch: its scores, its loss's metadata and its columns, all [b, T]."""
        mask = part["response_mask"].bool()
        self.tokens = self.tokens + mask.sum()
        self.entropy = self.entropy + torch.where(mask, scored["token_entropy"].detach(), 0.0).sum()
        self.clipped = self.clipped + loss_metadata["clipped"].sum()
        if "ratio" in loss_metadata:
            ratio = loss_metadata["ratio"]
            self.has_ratio = True
            self.ratio_min = torch.minimum(self.ratio_min, torch.where(mask, ratio, torch.inf).amin())
            self.ratio_max = torch.maximum(self.ratio_max, torch.where(mask, ratio, -torch.inf).amax())
        if self.has_kl:
            log_ratio = torch.where(mask, scored["log_probs"].detach() - part["rollout_log_probs"], 0.0)
            log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            self.kl = self.kl + (log_ratio.exp() - 1.0 - log_ratio).sum()

    def read(self) -> dict[str, float]:
        """The means, as `accumulate_gradients` describes them."""
        sums = torch.stack([self.tokens, self.entropy, self.clipped, self.kl, self.ratio_min, self.ratio_max]).tolist()
        tokens, entropy, clipped, kl, ratio_min, ratio_max = sums
        means = {
            "entropy": entropy / max(tokens, 1.0),
            "clip_fraction": clipped / max(tokens, 1.0),
            "ratio_min": ratio_min if self.has_ratio else 1.0,
            "ratio_max": ratio_max if self.has_ratio else 1.0,
            "trained_tokens": tokens,
        }
        return {**means, "kl_rollout": kl / max(tokens, 1.0)} if self.has_kl else means


def check_finite(loss: Tensor, per_token_loss: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Raise FloatingPointError, naming the rows of the batch, if the loss is not finite. Given, not an exercise."""
    if not torch.isfinite(loss):
        bad = ~torch.where(mask.bool(), per_token_loss, 0.0).isfinite().all(dim=1)
        names = ", ".join(str(row) for row in sorted(rows[bad.to(rows.device)].tolist()))
        raise FloatingPointError(f"The loss is not finite in row {names} of the batch, counted from 0.")


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_grad_norm: float | None) -> float:
    """Scale the gradients down to a global L2 norm of `max_grad_norm` (None: leave them); return the norm before that.

    The norm is taken in float32. Given, not an exercise; notebook 08 explains it.

    Raises:
        FloatingPointError: the norm is not finite; the gradients are as they were.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in with_gradient if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if not torch.isfinite(norm):
        raise FloatingPointError(f"The gradient norm is {norm.item()}; the step was not taken.")
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_grad_norm, norm)
    return norm.item()


def accumulate_gradients(
    model: torch.nn.Module,
    batch: dict[str, Any],
    gradient_accumulation_steps: int,
    importance_reweighting_method: Method = "none",
    cliprange: float | None = None,
    loss_normalization: Literal["sequence", "constant", "token"] = "sequence",
    normalization_constant: int | None = None,
    temperature: float = 1.0,
    *,
    score: Callable[..., dict[str, Tensor]] | None = None,
    algo: Any = None,
) -> tuple[Tensor, dict[str, float]]:
    """Add the gradient of the whole batch's loss to the parameters, a microbatch at a time.

    Exact for any split. With L the loss of a microbatch of b rows and n response tokens out of B rows and N tokens, its
    share of the batch's loss is L b / B ("sequence"), L n / N ("token") or L itself ("constant"); dividing by the
    number of microbatches would be wrong as soon as they differ in size. Rows whose advantage is exactly 0, and rows
    without a response token, have no gradient and are not run, while B, N and the constant stay those of the full
    batch. If nothing is left, every gradient that is None becomes zeros, because the optimizer's step (its moments, its
    decay) is still due.

    Rows are run from the longest to the shortest, so that a microbatch holds rows of similar length, and columns after
    the last response token of a microbatch are cut off. Nothing is clipped, stepped or zeroed here.

    Taught in notebook 08.

    Args:
        model: the policy.
        batch: "input_ids", "labels" int64 [B, T]; "response_mask" bool [B, T]; "advantages" float32 [B]; optional
            "old_log_probs" float32 [B, T] (needed by all methods but "none"), "rollout_log_probs" float32 [B, T] and
            "loss_weights" float32 [B, T], by which each token's loss is multiplied.
        gradient_accumulation_steps: a microbatch has at most B / this many rows, rounded up.
        importance_reweighting_method, cliprange: as in `compute_policy_gradient_loss`.
        loss_normalization, normalization_constant: as in `aggregate_loss_across_microbatch`.
        temperature: the sampling temperature.
        score: how log-probabilities are computed (None: `algo.get_response_log_probs`); called as
            score(model, input_ids, labels, return_token_entropy=True, temperature=temperature).
        algo: where the other exercises are looked up (None: this package).

    Returns:
        loss: float [], the batch's loss, without gradient.
        metadata: means over trained response tokens, those of the rows that were run: "entropy" (nats),
        "clip_fraction", "ratio_min" and "ratio_max" (1 where no ratio is used), "kl_rollout" (only with
        "rollout_log_probs"; mean of exp(d) - 1 - d, d = current minus sampling log-probability, clamped to +-20), their
        number "trained_tokens" (where it is 0, so are the means: weigh by it when averaging over steps), and
        "skipped_sequences", the share of advantages that are exactly 0.

    Raises:
        ValueError: fewer than one step, or what the loss functions refuse.
        FloatingPointError: a microbatch's loss is not finite; the message names the rows, and its backward was not run.
    """
    algo = sys.modules[__package__] if algo is None else algo
    score = algo.get_response_log_probs if score is None else score
    if gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps is {gradient_accumulation_steps}; it must be at least 1.")
    device = next(model.parameters()).device
    batch = {name: values.to(device) for name, values in batch.items() if values is not None}
    advantages, mask = batch["advantages"], batch["response_mask"].bool()  # [B], [B, T]
    columns = {name: values for name, values in batch.items() if name != "advantages"}  # [B, T] each
    sums = TokenSums(device, has_kl="rollout_log_probs" in columns)
    total = torch.zeros((), device=device)
    ### BEGIN YOUR CODE: drop rows without gradient, split, weigh each loss, run backward (notebook 08)
    batch_rows, batch_tokens = mask.shape[0], mask.sum().clamp(min=1)
    rows = ((advantages != 0) & mask.any(dim=1)).nonzero().flatten()  # [kept]
    if len(rows) == 0:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    else:
        used = mask.shape[1] - mask[rows].flip(1).int().argmax(dim=1)  # [kept], columns up to the last response token
        rows = rows[used.argsort(descending=True, stable=True)]
        widths = used.sort(descending=True).values.tolist()
    microbatch_size = -(-batch_rows // gradient_accumulation_steps)
    for start in range(0, len(rows), microbatch_size):
        chosen = rows[start : start + microbatch_size]  # [b]
        part = {name: column[chosen, : widths[start]] for name, column in columns.items()}
        part_mask = part["response_mask"].bool()
        scored = score(model, part["input_ids"], part["labels"], return_token_entropy=True, temperature=temperature)
        per_token_loss, loss_metadata = algo.compute_policy_gradient_loss(
            advantages[chosen],
            scored["log_probs"],
            importance_reweighting_method,
            part.get("old_log_probs"),
            cliprange,
            part_mask,
        )
        if "loss_weights" in part:
            per_token_loss = per_token_loss * part["loss_weights"]
        loss = algo.aggregate_loss_across_microbatch(
            per_token_loss, part_mask, loss_normalization, normalization_constant
        )
        if loss_normalization == "sequence":
            loss = loss * (len(chosen) / batch_rows)
        elif loss_normalization == "token":
            loss = loss * (part_mask.sum() / batch_tokens)
        check_finite(loss, per_token_loss, part_mask, chosen)
        sums.add(scored, loss_metadata, part)
        del scored  # the entropy's graph is not needed in the backward pass
        loss.backward()
        total = total + loss.detach()
    return total, {**sums.read(), "skipped_sequences": (advantages == 0).float().mean().item()}
    ### END YOUR CODE


def grpo_train_step(
    model: torch.nn.Module,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
    reward_fn: Callable[[str, str], dict[str, float]],
    repeated_prompts: list[str],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    baseline: Literal["mean", "none"] = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: Literal["std", "none", "mean"] = "std",
    importance_reweighting_method: Method = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    loss_normalization: Literal["sequence", "constant", "token"] = "sequence",
    normalization_constant: int | None = None,
    *,
    algo: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Grade a batch of responses and take one optimizer step on it. All gradients are None afterwards.

    Taught in notebook 08.

    Args:
        model: the policy; transformers model or any module whose call returns an object with `.logits`.
        tokenizer: its tokenizer.
        optimizer: over the model's parameters.
        gradient_accumulation_steps: microbatches; see `accumulate_gradients`.
        max_grad_norm: global gradient norm above which gradients are scaled down (None: never).
        reward_fn: see `compute_rollout_rewards`.
        repeated_prompts, rollout_responses, repeated_ground_truths: B strings each, the responses to a prompt side by
            side.
        group_size, baseline, advantage_eps, advantage_normalizer: see `compute_group_normalized_rewards`.
        importance_reweighting_method, old_log_probs, cliprange: see `compute_policy_gradient_loss`; old_log_probs is
            float [B, T] with the T of `tokenize_prompt_and_output`.
        loss_normalization, normalization_constant: see `aggregate_loss_across_microbatch`.
        algo: where the other exercises are looked up (None: this package).

    Returns:
        loss: float [], the batch's loss before the step, without gradient.
        metadata: that of the rewards, the advantages and `accumulate_gradients`, and "grad_norm", the global gradient
        norm before clipping.

    Raises:
        ValueError: what the exercises it calls refuse.
        FloatingPointError: the loss or the gradient norm is not finite; weights and optimizer are as they were.
    """
    algo = sys.modules[__package__] if algo is None else algo
    ### BEGIN YOUR CODE: tokens, rewards, advantages, gradients, clip_gradients, step (notebook 08)
    batch = algo.tokenize_prompt_and_output(repeated_prompts, rollout_responses, tokenizer)
    rewards, reward_metadata = algo.compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    advantages, advantage_metadata = algo.compute_group_normalized_rewards(
        rewards, group_size, baseline, advantage_eps, advantage_normalizer, prompt_ids=repeated_prompts
    )
    model.zero_grad(set_to_none=True)
    try:
        loss, metadata = algo.accumulate_gradients(
            model,
            {**batch, "advantages": advantages, "old_log_probs": old_log_probs},
            gradient_accumulation_steps,
            importance_reweighting_method,
            cliprange,
            loss_normalization,
            normalization_constant,
            algo=algo,
        )
        grad_norm = clip_gradients(model.parameters(), max_grad_norm)
        optimizer.step()
    finally:
        model.zero_grad(set_to_none=True)
    return loss, {**reward_metadata, **advantage_metadata, **metadata, "grad_norm": grad_norm}
    ### END YOUR CODE
