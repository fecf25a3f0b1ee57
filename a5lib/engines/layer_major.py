"""The layer-major engine: one layer at a time, every microbatch through it, so that one layer is on the card.

Weights, gradients, optimizer state and layer inputs have their home on the host and visit the card when their turn
comes; what the plan keeps on the card stays there. Copies run on two lanes beside the work, and events order them: the
host never waits inside a pass. The arithmetic is that of the plain loop with recomputed layers. Notebook 09 walks
through this file; `plan.py` decides what stays on the card.

    up     embed; for each layer, for each microbatch: run it without a graph, keep its input
    head   norm, log-probabilities and their gradient, in blocks of tokens
    down   for each layer in reverse, for each microbatch: run it again with a graph, go back through it
    step   clip by the global norm; AdamW, bucket by bucket

The losses are `algo`'s. Scoring and accumulation are this engine's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from a5lib.config import ResolvedConfig
from a5lib.engines import Batch
from a5lib.engines.attention import flash_fits
from a5lib.engines.hidden import Levels
from a5lib.engines.host import HostMemory, Lane, Lanes, SharedWeights
from a5lib.engines.packing import Microbatch, pack
from a5lib.engines.parts import Unit, take_apart, undress
from a5lib.engines.plan import STEP_BUFFERS, Plan
from a5lib.engines.statistics import bad_rows, statistics
from a5lib.engines.trip import Trip, run_layer
from a5lib.errors import UserError
from a5lib.heads import HeadKernels
from a5lib.optimizers import (
    adamw_numbers,
    adamw_update,
    clip_scale,
    fill_state,
    rounding_key,
    state_dtypes,
    total_norm,
)


class LayerMajorEngine:
    """The `Engine` that runs layer by layer. Taught in notebook 09.

    Args:
        model: the policy, on the CPU; its parameters become views of the engine's memory and are trained in place.
        config: a resolved config.
        algo: the exercise functions (see `a5lib.course.load_algo`).
        plan: what stays on the card, and the sizes of microbatches and blocks (see `plan_update`).
        device: the card; or the CPU, and then the "card" is plain memory too and the path is the same.
        shared: memory in which the weights that live on the host are kept, if another process is to read them.

    Raises:
        UserError: the model is of a family that this engine does not know.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ResolvedConfig,
        algo: Any,
        plan: Plan,
        device: torch.device,
        shared: SharedWeights | None = None,
    ) -> None:
        self.model, self.config, self.algo, self.plan, self.device = model, config, algo, plan, device
        self.parts = take_apart(model, device)
        self.width = self.parts.embedding.shapes[0][1]
        self.dtype = self.parts.embedding.parameters[0].dtype
        self.host, self.lanes = HostMemory(device, shared), Lanes(device)
        state = state_dtypes(self.dtype, config.optimizer_state)
        for unit in self.parts.units:
            if unit.name in plan.resident:
                unit.settle(self.empty, state)
            else:
                unit.settle(self.host.empty, state, self.host.weights)
        self.levels = Levels(self.host, plan.microbatch_tokens, self.width, self.dtype)
        self.flash = flash_fits(device, self.dtype)
        self.compiled = plan.compiled and self.flash
        if self.compiled:
            torch.compiler.reset()  # code compiled for an earlier engine fills a cache with few places
        self.run = torch.compile(run_layer, dynamic=False) if self.compiled else run_layer
        self.update = torch.compile(adamw_update) if self.compiled else adamw_update
        self.kernels = HeadKernels(self.compiled)
        self.names = [name for unit in self.parts.units for name in unit.names]
        self.norms: Tensor | None = None  # of the gradient that waits for a step, one number a parameter
        self.steps = 0
        self.released = False
        self.waiting: dict[tuple[str, str], Tensor] = {}  # host memory for what lives on the card, by unit and name
        self.torn = False  # a step was interrupted, or loading: some weights are changed, others are not

    # --- the face

    def score(self, batch: Batch) -> dict[str, Tensor]:
        """See `Engine.score`. Each train batch is packed by itself, as `accumulate` will pack it: then a ratio is
        exactly 1 before any update, also in bfloat16.
        """
        self._ready()
        width = batch["labels"].shape[1]
        microbatches: list[Microbatch] = []
        size = self.config.train_batch_size
        for first in range(0, len(batch["advantages"]), size):
            packed = self._pack({name: values[first : first + size] for name, values in batch.items()})
            microbatches += [microbatch.shifted(first * width) for microbatch in packed]
        scores = self._scores(batch)
        if microbatches:
            with self._trip(microbatches, keep_inputs=False) as trip:
                trip.up()
                trip.head(scores)
        return {name: values.view(batch["labels"].shape).float().cpu() for name, values in scores.items()}

    def accumulate(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """See `Engine.accumulate`: the gradient of one batch, which `step` takes."""
        self._ready()
        if self.norms is not None:
            raise RuntimeError("A gradient waits for its step; the layer-major engine takes one batch a step.")
        on_card = {name: values.to(self.device) for name, values in batch.items()}
        on_card["response_mask"] = on_card["response_mask"].bool()
        microbatches, scores = self._pack(batch), self._scores(batch)
        shape = batch["labels"].shape
        if not microbatches:
            self._settled()  # the last step may still be reading the gradient
            for unit in self.parts.units:
                unit.flat["grad"].zero_()
            norms = torch.zeros(len(self.names))
        else:
            with self._trip(microbatches, keep_inputs=True) as trip:
                trip.up()
                # Where the loss is linear in the log-probabilities, its derivative is known before they are.
                linear = self.config.preset.importance_reweighting_method == "none"
                if not linear:
                    trip.head(scores)
                log_probs = scores["log_probs"].view(shape).clone().requires_grad_()
                _, coefficients, _ = self._loss(on_card, log_probs)
                trip.head(scores if linear else None, coefficients.view(-1))
                trip.down()
                norms = trip.norms
        with torch.no_grad():
            loss, _, metadata = self._loss(on_card, scores["log_probs"].view(shape))
            stats = statistics(on_card, scores["log_probs"].view(shape), scores["token_entropy"].view(shape), metadata)
        value = float(loss)  # the host waits for the card here
        if not torch.isfinite(loss):
            raise FloatingPointError(bad_rows(on_card, metadata["per_token"]))
        self.norms = norms
        return value, {name: float(stat) for name, stat in stats.items()}

    def step(self, learning_rate: float) -> float:
        """See `Engine.step`."""
        self._ready()
        if self.norms is None:
            raise RuntimeError("There is no gradient to step with; call accumulate first.")
        norms, self.norms = self.norms, None
        norm = total_norm(self.names, norms)
        self.torn = True
        self._update(learning_rate, clip_scale(norm, self.config.max_grad_norm))
        self.steps += 1
        self.torn = False
        return norm

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """See `Engine.weights`: views of the engine's memory, on the host or the card."""
        self._settled()
        return self.model.named_parameters()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """See `Engine.tensors`; names and shapes are those of the resident engine."""
        self._settled()
        state: dict[str, Tensor] = {}
        index = 0
        for unit in self.parts.units if self.steps else []:
            named = {name: unit.views(flat) for name, flat in unit.flat.items() if name not in ("weight", "grad")}
            for i in range(len(unit.names)):
                state |= {f"{index}.{name}": views[i] for name, views in named.items()}
                state[f"{index}.step"] = torch.tensor(self.steps)
                index += 1
        return {"model": {name: p.detach() for name, p in self.model.named_parameters()}, "optimizer": state}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """See `Engine.load_tensors`."""
        self.norms, self.torn = None, False
        self._settled()  # a step's copies may still be on their way
        saved = dict(tensors["optimizer"])
        self.steps = int(saved.get("0.step", 1)) if saved else 0
        state = self.tensors()["optimizer"]
        self.torn = True  # until everything is there
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors["model"][name])
        if self.steps == 0:
            self._new_state()
        for name, target in state.items():
            fill_state(name, target, saved.pop(name, None))
        if saved:
            raise UserError(f"The saved optimizer has {min(saved)}, which this run does not; resume with its model.")
        self.torn = False

    def release(self) -> None:
        """See `Engine.release`: what lives on the card waits on the host."""
        self._settled()
        if not self.released:
            self._carry(self.lanes.outward, self._waiting_place)
            self._settled()
        self.released = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- how it is done

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor on the card."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _carry(self, lane: Lane, place: Callable[[Unit, str], Tensor]) -> None:
        """Take what lives on the card elsewhere, or back."""
        left: list[Tensor] = []  # not to be freed before it is copied
        for unit in self.parts.units:
            if unit.name in self.plan.resident:
                homes = {name: place(unit, name) for name in unit.flat}
                with lane.after(self.lanes.now()):
                    for name, flat in unit.flat.items():
                        homes[name].copy_(flat, non_blocking=True)
                left += unit.flat.values()
                unit.rehouse(homes)
        self.lanes.join()

    def _waiting_place(self, unit: Unit, name: str) -> Tensor:
        """Where a flat tensor waits on the host, the same each time; weights in shared memory, where there is some."""
        key = unit.name, name
        if key not in self.waiting:
            size = unit.numel, unit.flat[name].dtype
            self.waiting[key] = self.host.weights(unit.names, *size) if name == "weight" else self.host.empty(*size)
        return self.waiting[key]

    def _ready(self) -> None:
        """Take the card back, and refuse to work on weights that a step has left half changed."""
        if self.torn:
            raise RuntimeError("A step or a load was interrupted halfway; load a checkpoint before you go on.")
        if self.released:
            self._carry(self.lanes.inward, lambda unit, name: self.empty(unit.numel, unit.flat[name].dtype))
        self.released = False

    def _settled(self) -> None:
        """Wait until every copy has arrived, so that the host may read."""
        if self.torn:
            raise RuntimeError("A step or a load was interrupted halfway; load a checkpoint before you go on.")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _new_state(self) -> None:
        for unit in self.parts.units:
            for name, flat in unit.flat.items():
                if name not in ("weight", "grad"):
                    flat.zero_()
            if "master" in unit.flat:
                unit.flat["master"].copy_(unit.flat["weight"])

    def _pack(self, batch: Batch) -> list[Microbatch]:
        return pack(batch, self.plan.microbatch_tokens, fixed=self.flash, longest=self.plan.longest)

    def _scores(self, batch: Batch) -> dict[str, Tensor]:
        wide = torch.promote_types(self.dtype, torch.float32)
        cells = batch["labels"].numel()
        return {name: torch.zeros(cells, dtype=wide, device=self.device) for name in ("log_probs", "token_entropy")}

    def _loss(self, batch: Batch, log_probs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The batch's loss, its derivative with respect to the log-probabilities [B, T], and the loss's metadata with
        the loss of every token, "per_token" [B, T].
        """
        preset = self.config.preset
        constant = self.config.normalization_constant if preset.loss_normalization == "constant" else None
        per_token, metadata = self.algo.compute_policy_gradient_loss(
            batch["advantages"], log_probs, preset.importance_reweighting_method, batch.get("old_log_probs"),
            preset.cliprange, batch["response_mask"],
        )  # fmt: skip
        if "loss_weights" in batch:
            per_token = per_token * batch["loss_weights"]
        loss = self.algo.aggregate_loss_across_microbatch(
            per_token, batch["response_mask"], preset.loss_normalization, constant
        )
        derivative = torch.autograd.grad(loss, log_probs)[0] if log_probs.requires_grad else torch.zeros(0)
        return loss.detach(), derivative, {**metadata, "per_token": per_token.detach()}

    @contextlib.contextmanager
    def _trip(self, microbatches: Sequence[Microbatch], *, keep_inputs: bool) -> Iterator[Trip]:
        """A pass over the layers; afterwards, or after a fault, its buffers may be freed."""
        try:
            trip = Trip(self, [m.to(self.device) for m in microbatches], keep_inputs)
            self.lanes.join()  # a new buffer may lie where another tensor is still at work
            yield trip
        finally:
            self.lanes.join()
            undress(self.parts.layer)
            undress(self.parts.norm)

    @torch.no_grad()
    def _update(self, learning_rate: float, grad_scale: float) -> None:
        """AdamW over every unit: in place where it lives on the card, otherwise in buckets, three on their way."""
        config, size, lanes = self.config, self.plan.bucket, self.lanes
        betas = (config.adam_beta1, config.adam_beta2)
        step = self.steps + 1
        numbers = adamw_numbers(
            learning_rate, betas, config.adam_eps, config.weight_decay, step, grad_scale, self.device
        )

        def update(tensors: dict[str, Tensor], first: int) -> None:
            state = {name: t for name, t in tensors.items() if name not in ("weight", "grad")}
            self.update(
                tensors["weight"], tensors["grad"], state, numbers, betas=betas, eps=config.adam_eps,
                state_precision=config.optimizer_state, key=rounding_key(config.seed, step, first, self.device),
            )  # fmt: skip

        work = []
        for unit in self.parts.units:
            for start in range(0, unit.numel, size):
                part = {name: flat[start : start + size] for name, flat in unit.flat.items()}
                if unit.name in self.plan.resident:
                    update(part, unit.first + start)
                else:
                    work.append((part, unit.first + start))
        if not work:
            return
        size = min(size, max(len(part["weight"]) for part, _ in work))
        ring = [{name: self.empty(size, t.dtype) for name, t in work[0][0].items()} for _ in range(STEP_BUFFERS)]
        sent: list[Any] = [None] * STEP_BUFFERS
        arrived: list[Any] = [None] * STEP_BUFFERS
        lanes.join()  # gradients have come home, and what was at work where the ring lies has finished

        def bring(j: int) -> None:
            with lanes.inward.after(sent[j % STEP_BUFFERS]):
                for name, source in work[j][0].items():
                    ring[j % STEP_BUFFERS][name][: len(source)].copy_(source, non_blocking=True)
                arrived[j % STEP_BUFFERS] = lanes.inward.mark()

        for j in range(min(STEP_BUFFERS - 1, len(work))):
            bring(j)
        for j, (part, first) in enumerate(work):
            buffers = ring[j % STEP_BUFFERS]
            lanes.wait(arrived[j % STEP_BUFFERS])
            update(buffers, first)
            with lanes.outward.after(lanes.now()):
                for name, target in part.items():
                    if name != "grad":
                        target.copy_(buffers[name][: len(target)], non_blocking=True)
                sent[j % STEP_BUFFERS] = lanes.outward.mark()
            if j + STEP_BUFFERS - 1 < len(work):
                bring(j + STEP_BUFFERS - 1)
        lanes.join()
