"""A trainer and an engine on one card, all of them scripted: they follow the rules of a cycle and object in words.

Nothing is computed and nothing is on a card. The weights are four small tensors; the bytes on the card are taken from
the ledger, so they are predictions for a real model, not measurements. Used by notebook 10 and its checks; the names
of the engine's methods are those of vLLM where it has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from a5lib.memory import OLMO2_1B, update_ledger

GIB = 1 << 30
PROMPTS = ("2 + 3 = ?", "7 - 4 = ?", "6 * 2 = ?")
TAGS = ("weights", "kv_cache")
WEIGHTS = ("embed_tokens", "layers.0", "layers.1", "lm_head")
SEQUENCES, LENGTH = 64, 672  # of the update that the trainer's bytes are predicted for
KV_TOKENS = 65_536  # tokens whose keys and values the engine's cache holds


class Objection(Exception):
    """A step came at the wrong time. The message says which rule it breaks."""


@dataclass
class ScriptedCard:
    """The card's memory, in bytes by tenant, and its history.

    Args:
        size: bytes of the card.

    `phases` lists (name of the step, trainer's bytes, engine's bytes) after each step, for `figures.cycle_figure`;
    `steps` lists the names alone.
    """

    size: int = 16 * GIB
    held: dict[str, int] = field(default_factory=lambda: {"trainer": 0, "engine": 0})
    phases: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def steps(self) -> list[str]:
        return [name for name, _, _ in self.phases]

    def record(self, step: str) -> None:
        """Write down who holds how much, under the name of the step."""
        self.phases.append((step, self.held["trainer"], self.held["engine"]))


@dataclass(frozen=True)
class ScriptedRollout:
    """An answer, and the version of the weights that it came from."""

    prompt: str
    text: str
    version: int


def checksum(tensor: Tensor) -> str:
    """The first 12 digits of the SHA-256 of a tensor's type, shape and bytes, wherever it lies.

    >>> checksum(torch.zeros(2)) == checksum(torch.zeros(2)), checksum(torch.zeros(2)) == checksum(torch.ones(2))
    (True, False)
    """
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


class ScriptedTrainer:
    """A trainer whose optimizer step adds 1 to every weight. It objects to a step at the wrong time.

    Args:
        card: the card that it shares with an engine.
    """

    def __init__(self, card: ScriptedCard) -> None:
        self.card = card
        self.version = 0
        self._weights = {name: torch.full((2, 2), float(i)) for i, name in enumerate(WEIGHTS)}
        self._ledger = update_ledger(OLMO2_1B, sequences=SEQUENCES, length=LENGTH, microbatch=1)
        self._updated = False

    def take_card(self) -> None:
        """Weights and optimizer state come to the card."""
        if self.card.held["trainer"]:
            raise Objection("The trainer has the card already; it takes it once a cycle.")
        if self.card.held["engine"]:
            raise Objection(
                f"The engine still holds {self.card.held['engine'] / GIB:.1f} GiB of the card; it must sleep before "
                "the trainer takes the card."
            )
        self.card.held["trainer"] = self._ledger["weights"] + self._ledger["optimizer state"]
        self._updated = False
        self.card.record("take card")

    def update(self, rollouts: list[ScriptedRollout]) -> dict[str, Any]:
        """One step: the version goes up by 1. Returns the new "version" and the number of "rollouts"."""
        if not self.card.held["trainer"]:
            raise Objection("The trainer's weights are in the host's memory; it must take the card before an update.")
        if not isinstance(rollouts, list) or not rollouts:
            raise Objection("The update needs a list of rollouts with something in it; collect them from the engine.")
        versions = {rollout.version for rollout in rollouts}
        if versions != {self.version}:
            raise Objection(
                f"These rollouts come from weights of version {min(versions)}, but the trainer is at version "
                f"{self.version}: the engine generated with old weights."
            )
        resting = self.card.held["trainer"]
        self.card.held["trainer"] = sum(self._ledger.values())
        self.card.record("update")
        self.card.held["trainer"] = resting
        for weight in self._weights.values():
            weight += 1
        self.version += 1
        self._updated = True
        return {"version": self.version, "rollouts": len(rollouts)}

    def release_card(self) -> None:
        """Everything goes back to the host's memory."""
        if not self.card.held["trainer"]:
            raise Objection("The trainer does not have the card, so it cannot release it.")
        if not self._updated:
            raise Objection("The trainer took the card and made no update; the turn was for nothing.")
        self.card.held["trainer"] = 0
        self.card.record("release card")

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights as they are now."""
        return {name: weight.clone() for name, weight in self._weights.items()}

    def checksums(self) -> dict[str, str]:
        """A checksum of each weight as it is now."""
        return {name: checksum(weight) for name, weight in self._weights.items()}


class ScriptedEngine:
    """A generation engine that starts awake with the trainer's weights. It objects to a step at the wrong time.

    Args:
        card: the card that it shares with `trainer`.
        trainer: whose weights it has at the start.
        skips: weights that a load leaves as they were, though it reports success; a fault, none by default.
    """

    def __init__(self, card: ScriptedCard, trainer: ScriptedTrainer, skips: Sequence[str] = ()) -> None:
        self.card = card
        self.skips = skips
        self._model_bytes = OLMO2_1B.parameters() * 2
        self._cache_bytes = KV_TOKENS * OLMO2_1B.kv_bytes_per_token()
        self._weights = trainer.weights()
        self._trainer = trainer
        self._room = set(TAGS)  # what has room on the card
        self._loaded = True  # whether weights are in that room
        self._backup = False  # whether sleep kept the weights in the host's memory
        self._verified = True
        self._prefixes_fresh = True
        self._unfinished = 0
        self._hold()

    def generate(self, prompts: Sequence[str]) -> Iterator[ScriptedRollout]:
        """One rollout for each prompt, as they finish; the engine is busy until the last one is taken."""
        if not self._room:
            raise Objection("The engine is asleep; it must wake before it generates.")
        if not self._loaded:
            raise Objection("The engine has no weights: sleep threw them away; load them before it generates.")
        if "kv_cache" not in self._room:
            raise Objection('The engine has no room for keys and values; wake "kv_cache" before it generates.')
        if not self._verified:
            raise Objection(
                "The loaded weights were not verified; compare the engine's checksums with the trainer's before it "
                "generates."
            )
        if not self._prefixes_fresh:
            raise Objection(
                "The prefix cache may still hold keys and values of the old weights; reset it before the engine "
                "generates."
            )
        if not isinstance(prompts, list | tuple) or not prompts:
            raise Objection("The engine needs a list of prompts with something in it.")
        self._unfinished = len(prompts)
        self.card.record("generate")
        return self._finish(prompts)

    def _finish(self, prompts: Sequence[str]) -> Iterator[ScriptedRollout]:
        version = int(self._weights[WEIGHTS[0]][0, 0])  # each update adds 1, from 0
        for prompt in prompts:
            self._unfinished -= 1
            yield ScriptedRollout(prompt, "<answer> 5 </answer>", version)

    def sleep(self, level: int = 1) -> None:
        """Free the card; keep the weights in the host's memory (1) or nothing (2)."""
        if level not in (1, 2):
            raise Objection(f"There is no sleep level {level}; 1 keeps the weights in the host's memory, 2 does not.")
        if not self._room:
            raise Objection("The engine is asleep already.")
        if self._unfinished:
            raise Objection(
                f"The engine is busy: {self._unfinished} rollouts are not taken yet; take all of them before it sleeps."
            )
        self._backup = level == 1 and self._loaded
        self._room, self._loaded, self._prefixes_fresh = set(), False, False
        self._hold()
        self.card.record("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take room on the card for "weights", "kv_cache" or both (None)."""
        wanted = list(TAGS) if tags is None else [tags] if isinstance(tags, str) else list(tags)
        unknown = [tag for tag in wanted if tag not in TAGS]
        if unknown or not wanted:
            raise Objection(f'There is no {unknown or "empty"} tag; wake_up takes ["weights"] or ["kv_cache"].')
        if self._room.intersection(wanted):
            raise Objection(f"{' and '.join(sorted(self._room.intersection(wanted)))} is awake already.")
        if self.card.held["trainer"]:
            raise Objection(
                f"The trainer holds {self.card.held['trainer'] / GIB:.1f} GiB of the card; it must release the card "
                "before the engine wakes."
            )
        if "kv_cache" in wanted and not (self._loaded or (self._backup and "weights" in wanted)):
            raise Objection(
                "Keys and values were to wake before the weights are in; the load may need the room that they would "
                "take, so load first."
            )
        self._room |= set(wanted)
        if "weights" in wanted and self._backup:
            self._loaded = True  # the weights of before the update
        if "weights" in wanted:
            self._verified = False
        self._hold()
        for tag in wanted:
            self.card.record(f"wake {tag}")

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy weights into their room. It reports no fault of its own."""
        if "weights" not in self._room:
            raise Objection('The engine is asleep; wake "weights" before loading, so that they have room.')
        if "kv_cache" in self._room:
            raise Objection(
                'Keys and values have taken the room that a load may need; wake only "weights", load, then wake '
                '"kv_cache".'
            )
        if self._backup:
            raise Objection("Level 1 keeps old weights in the host's memory that the load overwrites; use level 2.")
        if not isinstance(weights, dict) or weights.keys() != self._weights.keys():
            raise Objection(f"load_weights needs a dict with exactly {', '.join(WEIGHTS)}.")
        self._weights |= {name: weight.clone() for name, weight in weights.items() if name not in self.skips}
        self._loaded, self._verified, self._prefixes_fresh = True, False, False
        self.card.record("load weights")

    def checksums(self) -> dict[str, str]:
        """A checksum of each weight that the engine would compute with now."""
        if not self._loaded:
            raise Objection("The engine has no weights to take checksums of; load them first.")
        self._verified = True
        self.card.record("verify")
        return {name: checksum(weight) for name, weight in self._weights.items()}

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        if "kv_cache" not in self._room:
            raise Objection('There is no room for keys and values, so nothing can be reset; wake "kv_cache" first.')
        self._prefixes_fresh = True
        self.card.record("reset prefix cache")

    def ready(self) -> bool:
        """Whether a next cycle may begin: awake, with the trainer's present weights, verified, and a fresh cache."""
        current = {name: checksum(weight) for name, weight in self._weights.items()} == self._trainer.checksums()
        return self._room == set(TAGS) and self._loaded and self._verified and self._prefixes_fresh and current

    def _hold(self) -> None:
        sizes = {"weights": self._model_bytes, "kv_cache": self._cache_bytes}
        self.card.held["engine"] = sum(sizes[tag] for tag in self._room)


def scripted_pair(skips: Sequence[str] = ()) -> tuple[ScriptedTrainer, ScriptedEngine]:
    """A trainer and an engine that share a new card; the engine is awake and has the trainer's weights.

    >>> trainer, engine = scripted_pair()
    >>> [rollout.version for rollout in engine.generate(["1 + 1 = ?"])], engine.card.steps
    ([0], ['generate'])
    """
    card = ScriptedCard()
    trainer = ScriptedTrainer(card)
    return trainer, ScriptedEngine(card, trainer, skips)


# In the order of the alphabet, which is no order of play.
STEPS: dict[str, Callable[[ScriptedTrainer, ScriptedEngine, dict[str, Any]], None]] = {
    "generate": lambda trainer, engine, memory: memory.update(rollouts=list(engine.generate(PROMPTS))),
    "load weights": lambda trainer, engine, memory: engine.load_weights(trainer.weights()),
    "release card": lambda trainer, engine, memory: trainer.release_card(),
    "reset prefix cache": lambda trainer, engine, memory: engine.reset_prefix_cache(),
    "sleep": lambda trainer, engine, memory: engine.sleep(level=2),
    "take card": lambda trainer, engine, memory: trainer.take_card(),
    "update": lambda trainer, engine, memory: memory.update(metrics=trainer.update(memory.get("rollouts", []))),
    "verify": lambda trainer, engine, memory: _verify(trainer, engine),
    "wake kv_cache": lambda trainer, engine, memory: engine.wake_up(["kv_cache"]),
    "wake weights": lambda trainer, engine, memory: engine.wake_up(["weights"]),
}


def _verify(trainer: ScriptedTrainer, engine: ScriptedEngine) -> None:
    if engine.checksums() != trainer.checksums():
        raise Objection("The engine's weights are not the trainer's.")


def play(steps: Iterable[str], cycles: int = 2) -> str:
    """Play steps by name, over again for each cycle, on a new pair; returns the first objection, or that none came.

    >>> print(play(["generate", "take card"]))
    take card: The engine still holds 10.8 GiB of the card; it must sleep before the trainer takes the card.
    """
    trainer, engine = scripted_pair()
    memory: dict[str, Any] = {}
    for step in [*steps] * cycles:
        if step not in STEPS:
            return f"{step}: There is no such step; there are {', '.join(STEPS)}."
        try:
            STEPS[step](trainer, engine, memory)
        except Objection as objection:
            return f"{step}: {objection}"
    return f"No objection in {cycles} cycles."
