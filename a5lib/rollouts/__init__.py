"""Rollouts: what turns prompts into completions. Every backend has the same small face, `RolloutBackend`.

The loop does not know which backend it has. It calls `sync` with the current weights before it generates, and gets
back the tokens that were sampled with their log-probabilities.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from a5lib.errors import UserError
from a5lib.records import Completion

if TYPE_CHECKING:
    from a5lib.rollouts.weight_channel import WeightChannel


class RolloutBackend(Protocol):
    """The face of a generation backend."""

    @property
    def takes_card(self) -> bool:
        """Whether the engine must leave the card before `start` and `sync`."""
        ...

    @property
    def channel(self) -> WeightChannel | None:
        """Memory that weights are taken from, in which an engine may keep them; None where there is none."""
        ...

    def start(self) -> None:
        """Get ready where that takes time; otherwise the first `sync` does."""
        ...

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

    def close(self) -> None:
        """End for good, whatever state it is in; harmless when repeated."""
        ...


def completion_seed(seed: int, prompt: int, completion: int) -> int:
    """The seed of one completion, from 0 to 2**63 - 1: 63 bits of the SHA-256 of the call's seed and its two numbers.

    No two completions of a call share one, so a group's responses differ, and the same call repeats them.

    >>> completion_seed(0, 0, 0) != completion_seed(0, 0, 1) != completion_seed(0, 1, 0)
    True
    """
    digest = hashlib.sha256(f"{seed} {prompt} {completion}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def check_lengths(prompts: Sequence[list[int]], max_tokens: int, context: int) -> None:
    """Refuse prompts that leave no room for `max_tokens` in a context of so many tokens, the model's or the one that
    vLLM was started with, before any work.

    Raises:
        UserError: a prompt is empty or too long; it names the prompts by number, from 0.
    """
    empty = [i for i, p in enumerate(prompts) if not p]
    if empty:
        raise UserError(f"Prompt {empty[0]} has no tokens; every prompt needs at least one.")
    long = [i for i, p in enumerate(prompts) if len(p) + max_tokens > context]
    if not long:
        return
    worst = max(long, key=lambda i: len(prompts[i]))
    longest = len(prompts[worst])
    numbers = ", ".join(map(str, long[:10])) + (", ..." if len(long) > 10 else "")
    what = f"{len(long)} prompt(s), number {numbers}, do not fit:"
    if longest >= context:
        raise UserError(
            f"{what} prompt {worst} has {longest} tokens and the context is {context}; shorten the prompts."
        )
    raise UserError(
        f"{what} up to {longest} prompt tokens and --max-tokens {max_tokens} exceed the context of {context}; "
        f"use --max-tokens {context - longest} or fewer, or shorter prompts."
    )
