"""Rollouts: what turns prompts into completions. Every backend has the same small face, `RolloutBackend`.

The loop does not know which backend it has. It calls `sync` with the current weights before it generates, and gets
back the tokens that were sampled with their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from a5lib.records import Completion


class RolloutBackend(Protocol):
    """The face of a generation backend."""

    def sync(self, weights: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Take over the policy's weights as they are after rollout batch `step`; only then may it generate."""
        ...

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int,
        progress: Callable[[int], object] | None = None,
    ) -> list[Completion]:
        """Sample n completions to each unique prompt, prompt by prompt: `len(prompts) * n` of them.

        The result is a function of weights, arguments and seed; each completion has a random stream of its own.
        `progress` is called with the number of completions that have just finished.
        """
        ...

    def release(self) -> None:
        """Free what is held on the card for generation; `sync` takes it back."""
        ...
