"""One AdamW step on one tensor, with its state in a chosen precision.

This file knows a weight, its gradient and its state. It does not know the model or when to step; the library's own
`a5lib.optimizers.AdamW` does the same for a whole model.
"""

from typing import Any

import torch
from torch import Tensor


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """Update float32 tensors in place."""
    ### BEGIN YOUR CODE: decay, moments, bias correction, step, all in place (notebook 07)
    raise AssertionError("placeholder")
    ### END YOUR CODE


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down at random, so that the expected value is the float32 value."""
    ### BEGIN YOUR CODE: add 16 random bits below, cut off the lower half (notebook 07)
    raise AssertionError("placeholder")
    ### END YOUR CODE


def adamw_step(weight: Tensor, grad: Tensor, state: dict[str, Any], *, algo: Any = None) -> None:
    """One step of a weight in one of four precisions."""
    ### BEGIN YOUR CODE: widen, update, store as the precision says (notebook 07)
    raise AssertionError("placeholder")
    ### END YOUR CODE
