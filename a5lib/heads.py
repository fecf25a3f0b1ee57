"""The head without the logits: log-probabilities, entropy and gradient in one sweep over blocks of tokens.

A block's logits exist while the block is at work, in the model's type; arithmetic on them is float32. The gradient of a
log-probability with respect to its logits is known in closed form, so no graph is kept: `head_sweep` computes it in
the same sweep where the derivative of the loss is known beforehand, and `fused_log_probs` makes the logits again in the
backward pass. This file knows a weight matrix and hidden states; it does not know the model, the loss or a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HEAD_BLOCK = 512


def score_block(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each row, both [n] in nats, float32 (float64 for float64 logits)."""
    log_probs, entropy, _ = _softmax(logits, labels, temperature)
    return log_probs, entropy


def score_block_with_gradient(
    logits: Tensor, labels: Tensor, coefficients: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`score_block`, and the derivative of the loss with respect to the logits, [n, V] in their type.

    With c = dL/dlogp, p = softmax(logits / temperature) and e the one-hot label: dL/dlogits = c (e - p) / temperature.
    """
    log_probs, entropy, p = _softmax(logits, labels, temperature)
    hot = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    gradient = torch.where(hot, 1 - p, -p) * (coefficients / temperature)[:, None]
    return log_probs, entropy, gradient.to(logits.dtype)


def _softmax(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # [n, V]
    z = z - z.amax(dim=-1, keepdim=True)  # no other distribution, but large logits keep digits
    log_sum = z.exp().sum(dim=-1).log()  # [n]
    p = (z - log_sum[:, None]).exp()
    expected = torch.where(p > 0, p * z, 0.0).sum(dim=-1)  # a logit of -inf adds 0, not 0 * -inf
    return z.gather(-1, labels[:, None])[:, 0] - log_sum, log_sum - expected, p


class HeadKernels:
    """The two block functions, compiled on request: then they read the logits from memory fewer times."""

    def __init__(self, compiled: bool = False) -> None:
        wrap: Callable[[Any], Any] = torch.compile if compiled else lambda function: function
        self.score = wrap(score_block)
        self.score_with_gradient = wrap(score_block_with_gradient)


PLAIN = HeadKernels()


def blocks(count: int, size: int) -> list[slice]:
    """The fewest slices of at most `size` that cover `count`, of nearly equal length.

    >>> blocks(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    >>> blocks(0, 2)
    []
    """
    parts = -(-count // size)
    step = -(-count // parts) if parts else 1
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


@torch.no_grad()
def head_sweep(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    block: int = HEAD_BLOCK,
    coefficients: Tensor | None = None,
    weight_grad: Tensor | None = None,
    kernels: HeadKernels = PLAIN,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Score tokens in blocks, and go back through the head where dL/dlogp is known. Taught in notebook 06.

    Args:
        hidden: float [n, H], the last hidden states after the final norm.
        weight: float [V, H].
        labels: int64 [n].
        temperature: the sampling temperature; it divides the logits.
        block: tokens whose logits exist at one time.
        coefficients: dL/dlogp, float [n]. None: no gradient.
        weight_grad: float [V, H]; the gradient of the weight is added to it. Needed with `coefficients`.
        kernels: plain or compiled block functions.

    Returns:
        log_probs and entropy, float32 [n] (float64 for float64), and the gradient with respect to `hidden` [n, H] or
        None.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    entropy = torch.empty_like(log_probs)
    gradient = None if coefficients is None else torch.empty_like(hidden)
    for at in blocks(len(hidden), block):
        logits = hidden[at] @ weight.t()  # [block, V]
        if coefficients is None or gradient is None or weight_grad is None:
            log_probs[at], entropy[at] = kernels.score(logits, labels[at], temperature)
            continue
        log_probs[at], entropy[at], back = kernels.score_with_gradient(
            logits, labels[at], coefficients[at], temperature
        )
        del logits
        weight_grad.addmm_(back.t(), hidden[at])
        torch.mm(back, weight, out=gradient[at])
    return log_probs, entropy, gradient


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, block: int,
                kernels: HeadKernels) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = dict(temperature=temperature, block=block, kernels=kernels)
        log_probs, entropy, _ = head_sweep(hidden, weight, labels, **ctx.options)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        _, _, gradient = head_sweep(
            hidden, weight, labels, coefficients=grads[0], weight_grad=weight.grad, **ctx.options
        )
        return gradient, None, None, None, None, None


def fused_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    block: int = HEAD_BLOCK,
    kernels: HeadKernels = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities with gradient and entropies without, keeping neither logits nor a graph of them.

    In the backward pass each block's logits are made again, and the weight's gradient is added to `weight.grad` in
    place, so that no second tensor of its size exists. `weight` must therefore be a leaf that takes a gradient.

    Args: see `head_sweep`; `labels` may have any shape [...], and `hidden` is then [..., H].

    Returns:
        log_probs and entropy, [...] each.

    Raises:
        ValueError: the last dimension of `hidden` is not the head's, as when logits are passed.
    """
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has {hidden.shape[-1]} as last dimension, but the head takes {weight.shape[1]}; pass the last "
            "hidden states, not the logits."
        )
    flat = _FusedLogProbs.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature, block, kernels
    )
    return flat[0].view(labels.shape), flat[1].view(labels.shape)
