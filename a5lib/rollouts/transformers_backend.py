"""Generation with the transformers model itself: a lean loop that prefills each prompt once.

`model.generate` runs the prompt once per completion and keeps finished rows in the batch. This loop runs each prompt
once, copies its keys and values to the n completions of the group, writes new keys and values into memory that is
already there, and drops finished rows. At temperature 0 it gives the tokens of `generate`. It does not know about
training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from a5lib.records import Completion
from a5lib.rollouts import check_lengths

KEEP_UNTIL = 7 / 8  # finished rows are dropped when no more than this share is still being decoded


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, capacity, head size], of which the first `length` positions are in
    use.

    `DynamicLayer` copies everything it holds at each token; this one writes the new position in place.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            rows, heads, _, head_size = key_states.shape
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys = key_states.new_empty(rows, heads, self.capacity, head_size)
            self.values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
            self.is_initialized = True
        end: int = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order; a row named twice is copied."""
        keys, values = self.keys, self.values
        self.keys = keys.new_empty(len(rows), *keys.shape[1:])
        self.values = values.new_empty(len(rows), *values.shape[1:])
        self.keys[:, :, : self.length] = keys[rows, :, : self.length]
        self.values[:, :, : self.length] = values[rows, :, : self.length]


@dataclass
class _Row:
    """A completion in the making."""

    index: int  # among all completions of the call
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str | None = None  # set when finished
    finish_reason: str = "length"


class TransformersRollouts:
    """The `RolloutBackend` that generates with the very module that the engine trains.

    Where that module lies elsewhere than on `device`, as with the layer-major engine, `sync` makes a copy of it there,
    which lasts until `release`.

    Args:
        model: a causal language model of transformers whose layers all keep keys and values.
        tokenizer: its tokenizer.
        batch_size: completions decoded side by side.
        device: where to generate (None: where the model is).
    """

    takes_card = False  # it generates with what the engine keeps there, or beside it
    channel = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 256,
        device: torch.device | None = None,
    ) -> None:
        self.policy = model
        self.model = model
        self.device = device
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.synced_step: int | None = None
        self.eos_ids = _eos_ids(model, tokenizer)
        self._pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))

    def sync(self, weights: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Note the step: the module is shared with the engine, so its weights are already the current ones, or are
        copied from it.
        """
        self.release()
        if self.device is not None and any(p.device.type != self.device.type for p in self.policy.parameters()):
            copies: dict[int, Any] = {
                id(p): torch.nn.Parameter(p.detach().to(self.device), requires_grad=False)
                for p in self.policy.parameters()
            }
            self.model = copy.deepcopy(self.policy, copies)  # the memo's copies stand in for the parameters
            torch.nn.Module.to(self.model, self.device)  # buffers
        self.synced_step = step

    def start(self) -> None:
        """See `RolloutBackend.start`: it is ready."""

    def close(self) -> None:
        """See `RolloutBackend.close`."""
        self.release()

    def release(self) -> None:
        """See `RolloutBackend.release`."""
        if self.model is not self.policy:
            self.model = self.policy
            self.synced_step = None
            torch.cuda.empty_cache()

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
        """See `RolloutBackend.generate`. Log-probabilities are those of softmax(logits / temperature), in float32 and
        before top-p; at temperature 0 the likeliest token is taken and they are those of softmax(logits).

        Raises:
            UserError: a prompt is empty, or longer than the context less `max_tokens`.
            FloatingPointError: the model's logits are not finite.
            RuntimeError: `sync` has not been called.
        """
        if self.synced_step is None:
            raise RuntimeError("generate() was called before sync(): the weights are unknown; call sync() first.")
        check_lengths(prompts, max_tokens, self.model.config.max_position_embeddings)
        uniform = torch.rand(len(prompts) * n, max_tokens, generator=torch.Generator().manual_seed(seed))
        ending = self._pieces_that_may_end(stop)
        was_training = self.model.training
        self.model.eval()
        rows: list[_Row] = []
        try:
            for start in range(0, len(prompts) * n, self.batch_size):
                chunk = [_Row(i) for i in range(start, min(start + self.batch_size, len(prompts) * n))]
                self._decode(chunk, prompts, n, uniform, max_tokens, temperature, top_p, stop, ending, progress)
                rows += chunk
        finally:
            self.model.train(was_training)
        return [
            Completion(row.index // n, row.token_ids, row.text or "", row.finish_reason, row.log_probs) for row in rows
        ]

    @torch.inference_mode()
    def _decode(
        self,
        rows: list[_Row],
        prompts: Sequence[list[int]],
        n: int,
        uniform: Tensor,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: Sequence[str],
        ending: set[int],
        progress: Callable[[int], object] | None,
    ) -> None:
        device = next(self.model.parameters()).device
        first = rows[0].index // n
        unique = prompts[first : rows[-1].index // n + 1]
        ids, mask = _left_pad(unique, self.tokenizer.pad_token_id or 0, device)  # [P, W]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        layers = [PreallocatedLayer(ids.shape[1] + max_tokens) for _ in range(self.model.config.num_hidden_layers)]
        cache = Cache(layers=list(layers))
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # [P, V]  # fmt: skip

        of_prompt = torch.tensor([row.index // n - first for row in rows], device=device)
        for layer in layers:
            layer.select_rows(of_prompt)  # each prompt's keys and values, once per completion
        logits, mask, position = logits[of_prompt], mask[of_prompt], positions[of_prompt, -1:]

        active = rows
        for t in range(max_tokens):
            draws = uniform[[row.index for row in active], t].to(device)
            tokens, log_probs = sample(logits, draws, temperature, top_p)
            if not log_probs.isfinite().all():
                raise FloatingPointError("The model's logits are not finite.")
            for row, token, log_prob in zip(active, tokens.tolist(), log_probs.tolist(), strict=True):
                if row.text is not None:
                    continue  # finished, and not yet dropped
                row.token_ids.append(token)
                row.log_probs.append(log_prob)
                if self._finished(row, stop, ending, last=t + 1 == max_tokens) and progress is not None:
                    progress(1)
            alive = [i for i, row in enumerate(active) if row.text is None]
            if not alive:
                return
            if len(alive) <= KEEP_UNTIL * len(active):  # dropping rows copies the cache, so not one by one
                kept = torch.tensor(alive, device=device)
                for layer in layers:
                    layer.select_rows(kept)
                mask, position, tokens = mask[kept], position[kept], tokens[kept]
                active = [active[i] for i in alive]
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            position = position + 1
            logits = self.model(
                input_ids=tokens[:, None], attention_mask=mask, position_ids=position, past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]  # fmt: skip

    def _finished(self, row: _Row, stop: Sequence[str], ending: set[int], *, last: bool) -> bool:
        """Whether the row ends with its newest token; if so its text and finish reason are set."""
        token = row.token_ids[-1]
        if token in self.eos_ids:
            row.finish_reason = "stop"
        elif stop and token in ending:
            text = self.text(row.token_ids)
            ends = [text.find(s) + len(s) for s in stop if s in text]
            if ends:
                row.text, row.finish_reason = text[: min(ends)], "stop"
                return True
        if row.finish_reason == "stop" or last:
            row.text = self.text(row.token_ids)
            return True
        return False

    def text(self, token_ids: list[int]) -> str:
        """The decoded response; special tokens, and ids that the tokenizer does not know, have no text."""
        known = [i for i in token_ids if i < len(self._pieces)]
        return str(self.tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _pieces_that_may_end(self, stop: Sequence[str]) -> set[int]:
        """Ids whose text holds the last character of a stop string: only after these is the text worth decoding."""
        last = {s[-1] for s in stop}
        if all(c.isascii() and c.isprintable() and c != " " for c in last):
            return {i for i, piece in enumerate(self._pieces) if piece and not last.isdisjoint(piece)}
        return set(range(len(self._pieces)))  # characters that a byte-level vocabulary spells differently


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """One token a row, by inverting the cumulative distribution at a given uniform number.

    Args:
        logits: [B, V], any floating type; probabilities are float32.
        uniform: [B] float32 in [0, 1), one number a row, so that a row's token does not depend on its neighbours.
        temperature: 0 takes the likeliest token.
        top_p: keeps the likeliest tokens whose probabilities sum to at least this.

    Returns:
        tokens [B] int64 and their log-probabilities [B] float32 under softmax(logits / temperature), before top-p
        (temperature 0: under softmax(logits)).

    >>> logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    >>> [sample(logits, torch.tensor([u]), 1.0)[0].item() for u in (0.1, 0.3, 0.9)]
    [0, 1, 2]
    >>> [sample(logits, torch.tensor([u]), 1.0, top_p=0.7)[0].item() for u in (0.1, 0.99)]
    [1, 2]
    """
    scaled = logits.float() if temperature == 0 else logits.float() / temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if temperature == 0:
        tokens = log_probs.argmax(dim=-1)
    else:
        probs = log_probs.exp()
        if top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= top_p  # mass before this token already reaches top_p
            probs = probs.scatter(-1, order, ordered.masked_fill(outside, 0.0))
        cumulative = probs.cumsum(-1)
        total = cumulative[:, -1]
        target = (uniform * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
        outside = probs.gather(-1, tokens[:, None]).squeeze(-1) == 0  # a parallel sum on a card is not quite monotone
        tokens = torch.where(outside, probs.argmax(-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _left_pad(prompts: Sequence[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, [P, W] int64, padded on the left so that every prompt ends in the last column."""
    width = max(len(p) for p in prompts)
    ids = [[pad_id] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends a response: the tokenizer's, and those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {i for i in [tokenizer.eos_token_id, *several] if i is not None}
