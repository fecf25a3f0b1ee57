"""The plain engine: parameters, gradients and optimizer state all stay on the model's device.

The mathematics is `algo`'s: this file only chooses rows, moves them, and steps. Its savings can be switched one by one:
`--gradient-accumulation-steps` for small microbatches, `--recompute-layers`, and `--head` for the way of scoring. AdamW
works in blocks in any case (see `a5lib.optimizers`). With layers recomputed and the head fused, layers and AdamW can be
compiled.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from a5lib.config import ResolvedConfig
from a5lib.engines import Batch
from a5lib.engines.host import HostMemory, SharedWeights
from a5lib.heads import fused_log_probs
from a5lib.optimizers import AdamW, clip_scale, gradient_norms, total_norm


class ResidentEngine:
    """The `Engine` that keeps everything in one place.

    Args:
        model: the policy, on its device; its parameters are trained in place.
        config: a resolved config.
        algo: the exercise functions (see `a5lib.course.load_algo`).
        head_block: positions whose logits exist at one time, unless the head is "full".
        shared: memory through which the weights are sent for generation.
        compiled: compile the layers, which have to be recomputed then, and AdamW.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ResolvedConfig,
        algo: Any,
        head_block: int = 32,
        shared: SharedWeights | None = None,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.algo = algo
        self.device = next(model.parameters()).device
        self.host = HostMemory(self.device, shared)  # pins what the weights are sent through
        self.score_fn: Callable[..., dict[str, Tensor]] = {
            "full": algo.get_response_log_probs,
            "blocks": partial(algo.get_response_log_probs_in_blocks, block_size=head_block),
            "fused": partial(fused_scores, block=head_block),
        }[config.head]
        if config.recompute_layers:
            # The reentrant kind keeps no graph on the way up, and needs no call of Python for each tensor of a layer.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        self.compiled: dict[torch.nn.Module, Callable[..., Any]] = {}  # what each layer runs instead of its own forward
        if compiled:
            torch.compiler.reset()  # code compiled for an earlier engine fills a cache with few places
            core: Any = model.base_model
            run = torch.compile(type(core.layers[0]).forward, dynamic=True)  # one code for all lengths and layers
            self.compiled = {layer: types.MethodType(run, layer) for layer in core.layers}
        self.optimizer = AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            state_precision=config.optimizer_state,
            seed=config.seed,
            compiled=compiled,
        )

    def score(self, batch: Batch) -> dict[str, Tensor]:
        """See `Engine.score`. The microbatches are those of `accumulate`: then a ratio is exactly 1 before any update,
        also in bfloat16, where the same row in another batch rounds differently. So does code that was compiled for
        another case, and therefore compiled layers run as in `accumulate`, with a graph that is dropped. Rows with
        advantage 0 stay 0.
        """
        batch = {name: values.to(self.device) for name, values in batch.items()}
        mask = batch["response_mask"].bool()
        out = {name: torch.zeros(mask.shape, device=self.device) for name in ("log_probs", "token_entropy")}
        trained = (batch["advantages"] != 0) & mask.any(dim=1)
        size = -(-self.config.train_batch_size // self.config.gradient_accumulation_steps)
        microbatches: list[Tensor] = []
        for rows in torch.arange(len(mask), device=self.device).split(self.config.train_batch_size):
            rows = rows[trained[rows]]
            microbatches += rows[by_length(mask[rows])].split(size) if len(rows) else ()
        with self._at_work(training=bool(self.compiled)), torch.set_grad_enabled(bool(self.compiled)):
            for index in microbatches:
                used = used_width(mask[index])
                ids, labels = (batch[name][index, :used] for name in ("input_ids", "labels"))
                scores = self.score_fn(self.model, ids, labels, True, temperature=self.config.temperature)
                for name, values in out.items():
                    values[index, :used] = scores[name].detach().float()
                del scores  # and a graph, before the next one grows
        return {name: values.cpu() for name, values in out.items()}

    def accumulate(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """See `Engine.accumulate`; the work is `algo.accumulate_gradients`.

        After a fault the whole gradient is dropped, also what earlier calls have added.
        """
        preset = self.config.preset
        constant = self.config.normalization_constant if preset.loss_normalization == "constant" else None
        try:
            with self._at_work(training=True):
                loss, metadata = self.algo.accumulate_gradients(
                    self.model,
                    batch,
                    self.config.gradient_accumulation_steps,
                    preset.importance_reweighting_method,
                    preset.cliprange,
                    preset.loss_normalization,
                    constant,
                    self.config.temperature,
                    score=self.score_fn,
                )
        except BaseException:  # some microbatches have been added already
            self.optimizer.zero_grad(set_to_none=True)
            raise
        return float(loss), metadata

    def step(self, learning_rate: float) -> float:
        """See `Engine.step`."""
        try:
            grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            norm = total_norm(list(grads), gradient_norms(list(grads.values())))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step(grad_scale=clip_scale(norm, self.config.max_grad_norm))
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """See `Engine.weights`. A tied parameter has one name."""
        return self.model.named_parameters()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """See `Engine.tensors`."""
        return {
            "model": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "optimizer": self.optimizer.tensors(),
        }

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """See `Engine.load_tensors`."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors["model"][name])
        self.optimizer.load_tensors(tensors["optimizer"])

    def release(self) -> None:
        """See `Engine.release`: here everything stays, because generation uses the very same weights."""

    @contextlib.contextmanager
    def _at_work(self, *, training: bool) -> Iterator[None]:
        """In here layers run their compiled code, if there is one. Generation runs them as they are, because there the
        shapes change all the time.

        Layers are recomputed only in training mode; these models have no dropout.
        """
        self.model.train(training)
        for layer, run in self.compiled.items():
            layer.forward = run
        try:
            # There are some cases of shape and mode for each kind of layer; torch keeps 8 and runs the others plain.
            with torch._dynamo.config.patch(recompile_limit=64) if self.compiled else contextlib.nullcontext():
                yield
        finally:
            for layer in self.compiled:
                del layer.forward
            self.model.eval()


def fused_scores(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = True,
    temperature: float = 1.0, *, block: int,
) -> dict[str, Tensor]:  # fmt: skip
    """`get_response_log_probs` by `a5lib.heads.fused_log_probs`; the entropy carries no gradient."""
    hidden = model.base_model(input_ids, use_cache=False).last_hidden_state  # [B, T, H]
    head: Any = model.get_output_embeddings()
    log_probs, entropy = fused_log_probs(hidden, head.weight, labels, temperature=temperature, block=block)
    return {"log_probs": log_probs, "token_entropy": entropy}


def by_length(mask: Tensor) -> Tensor:
    """Row numbers [B] from the longest row to the shortest, by the last position that the mask [B, T] marks.

    >>> by_length(torch.tensor([[0, 1, 0], [0, 1, 1]])).tolist()
    [1, 0]
    """
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * positions).amax(dim=1).argsort(descending=True, stable=True)


def used_width(mask: Tensor) -> int:
    """Columns up to the last one that the mask [B, T] marks in any row; at least 1."""
    columns = mask.bool().any(dim=0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 1
