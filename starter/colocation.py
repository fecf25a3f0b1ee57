"""The cycle in which one card passes between a trainer and a generation engine.

Both have their own weights, and together they need more memory than the card has. So one leaves before the other comes.
This file knows the order of the steps; what each step does is the trainer's and the engine's business.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class Trainer(Protocol):
    """What the cycle asks of a trainer. Between its turns everything that it has lies in the host's memory."""

    def take_card(self) -> None:
        """Move weights and optimizer state to the card; the engine must have left it."""

    def update(self, rollouts: list[Any]) -> dict[str, Any]:
        """One optimizer step on the rollouts, which its present weights must have produced; returns metrics."""

    def release_card(self) -> None:
        """Move everything back to the host's memory and free the card."""

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights as they are at this moment, by name."""

    def checksums(self) -> dict[str, str]:
        """A checksum of each weight as it is at this moment, by name."""


class Engine(Protocol):
    """What the cycle asks of a generation engine. The names are those of vLLM where it has them."""

    def generate(self, prompts: list[str]) -> Iterable[Any]:
        """Rollouts, one for each prompt, as they finish. The engine is busy until the last one is taken."""

    def sleep(self, level: int = 1) -> None:
        """Free the card. Level 1 keeps the weights in the host's memory, level 2 throws them away."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take room on the card again: ["weights"] for the weights, ["kv_cache"] for keys and values, None for both."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy weights into the engine. That it returns does not prove that every weight arrived."""

    def checksums(self) -> dict[str, str]:
        """A checksum of each weight that the engine would compute with now, under the trainer's names."""

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts; they came from earlier weights."""


def colocated_cycle(trainer: Trainer, engine: Engine, prompts: list[str]) -> dict[str, Any]:
    """One cycle on one card: generate, update, and give the engine the new weights.

    At the beginning and at the end of a cycle the engine is awake, holds the trainer's present weights, verified, and
    has no keys or values of older ones; the trainer is off the card. Taught in notebook 10.

    Args:
        trainer: it takes and releases the card.
        engine: it sleeps and wakes.
        prompts: the prompts of this cycle; not empty.

    Returns:
        The metrics that `trainer.update` returned.

    Raises:
        ValueError: there is no prompt.
        RuntimeError: after loading, the engine's checksums are not the trainer's; the message names the first weight
            that differs.
    """
    if not prompts:
        raise ValueError("There is no prompt; a cycle needs at least one.")
    ### BEGIN YOUR CODE: call the steps of the cycle in the right order, and verify (notebook 10)
    raise NotImplementedError("call the steps of the cycle in the right order, and verify (notebook 10)")
    ### END YOUR CODE
