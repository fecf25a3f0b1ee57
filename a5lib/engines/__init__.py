"""Engines: what turns a batch into a gradient and a gradient into a step. Every engine has the same small face,
`Engine`.

The loop does not know which engine it has. Batches are dictionaries of CPU tensors; an engine moves what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a plan is made without torch
    from torch import Tensor

Batch = dict[str, "Tensor"]


class Engine(Protocol):
    """The face of a training engine."""

    def score(self, batch: Batch) -> dict[str, Tensor]:
        """`log_probs` and `token_entropy`, float32 [B, T] on the CPU, under the current weights, without a gradient.

        `batch` is the whole rollout batch; rows that no update will run (advantage 0) may be left 0.
        """
        ...

    def accumulate(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """Add the gradient of the batch's loss; returns the loss and its statistics.

        Raises:
            FloatingPointError: the loss is not finite; it names the rows.
        """
        ...

    def step(self, learning_rate: float) -> float:
        """Clip the accumulated gradient, take one optimizer step, drop the gradient; returns the norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; nothing has been changed.
        """
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The current parameters by name, without copying them."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that an exact continuation needs: `model` and `optimizer`, each name -> tensor."""
        ...

    def load_tensors(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """The inverse of `tensors`."""
        ...

    def release(self) -> None:
        """Free what is held on the card for as long as nothing is asked; the next call takes it back."""
        ...
