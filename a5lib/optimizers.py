"""AdamW with a chosen precision of its state, gradient clipping, and the learning rate of a step.

This file knows parameters and their gradients. It does not know the model, the loss or when to step.

For a bfloat16 parameter an update smaller than half the gap between neighbouring bfloat16 numbers rounds to nothing.
The gap below 1 is 2^-8 = 0.0039, so a learning rate of 1e-5 never moves a weight of 1. `AdamW` offers four answers,
named by `state_precision`; the bytes are per parameter and include the weight but not the gradient:

| state_precision | weight | moments | extra | bytes |
|---|---|---|---|---|
| `fp32` | bf16 | fp32 | fp32 master copy of the weight | 14 |
| `bf16` | bf16 | bf16 | none: small updates are lost | 6 |
| `bf16_stochastic` | bf16, rounded stochastically | bf16, the second rounded stochastically | none | 6 |
| `bf16_kahan` | bf16 | bf16 | bf16 compensation: what the weight's rounding left out | 8 |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from a5lib.config import OptimizerState
from a5lib.errors import UserError

STATE_PRECISIONS: tuple[OptimizerState, ...] = ("fp32", "bf16", "bf16_stochastic", "bf16_kahan")

# Elements that one pass of the update holds in float32. It bounds the temporaries (about six of these blocks) however
# large a parameter is: the embedding of a 1B model would otherwise need several gigabytes of them.
BLOCK = 1 << 22


def warmup_lr(peak: float, warmup_steps: int, optimizer_step: int) -> float:
    """Learning rate of one optimizer step: a linear rise to `peak`, then `peak`.

    The s-th step of W uses s/W of the peak. The value depends on the step's number alone, so a resumed run cannot be a
    step behind. Taught in notebook 08.

    Args:
        peak: learning rate after the rise.
        warmup_steps: W; 0 means no rise.
        optimizer_step: number of the step about to be taken, from 1.

    >>> [warmup_lr(1.0, 4, s) for s in (1, 2, 4, 5)]
    [0.25, 0.5, 1.0, 1.0]
    """
    if optimizer_step < 1:
        raise ValueError(f"optimizer_step is {optimizer_step}; steps are counted from 1.")
    return peak if optimizer_step >= warmup_steps else peak * optimizer_step / warmup_steps


def clip_grad_norm(parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]], max_norm: float) -> float:
    """Scale all gradients down together so that their global L2 norm is at most `max_norm`.

    Norms are taken in float32 where each gradient lies, and only the norms travel between devices. At or below the
    limit nothing is touched. Taught in notebook 08.

    Args:
        parameters: as `model.parameters()` or `model.named_parameters()`; those without a gradient are left out.
        max_norm: the limit.

    Returns:
        The norm before clipping, 0 where there is no gradient.

    Raises:
        FloatingPointError: the norm is not finite; names the first parameter at fault. No gradient has changed.
    """
    named = [p if isinstance(p, tuple) else (f"number {i}", p) for i, p in enumerate(parameters)]
    with_grad = [(name, p.grad) for name, p in named if p.grad is not None]
    if not with_grad:
        return 0.0
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for _, grad in with_grad]
    each = torch.stack([n.to(norms[0].device) for n in norms]).double().cpu()
    norm = each.square().sum().sqrt().item()
    if not math.isfinite(norm):
        bad = int((~each.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"The gradient norm is not finite: parameter {with_grad[bad][0]} is the first with norm {each[bad].item()}."
        )
    if norm > max_norm:
        for _, grad in with_grad:
            grad.mul_(max_norm / norm)
    return norm


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 so that the expected value is the float32 value. Taught in notebook 07.

    bfloat16 is the upper half of float32. Adding a uniform random 16-bit number to the bits and dropping the lower half
    rounds the magnitude up with a probability equal to the dropped fraction; the sign bit is not reached, so negative
    numbers behave the same. Numbers that bfloat16 holds exactly, zero included, do not change. NaN stays NaN.

    Args:
        values: float32, any shape.
        generator: source of the random bits, on the device of `values`.

    Returns:
        bfloat16, the shape of `values`.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    rounded = bits.view(torch.float32)
    return torch.where(values.isnan(), values, rounded).bfloat16()  # a NaN with all bits set would carry into the sign


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) whose state has a chosen precision. Taught in notebook 07.

    Arithmetic is always float32; `state_precision` (table at the top of this file) says how the result is stored. It
    concerns bfloat16 parameters only: float32 parameters have float32 state and give what `torch.optim.AdamW` gives.
    Blocks of at most `BLOCK` elements are updated one after another, so no temporary has the size of the model.

    Args:
        params: parameters or parameter groups, float32 or bfloat16.
        lr: learning rate; change it through `param_groups`.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay; each step multiplies the weight by 1 - lr * weight_decay.
        state_precision: "fp32", "bf16", "bf16_stochastic" (rounding of Zamirai et al. 2020) or "bf16_kahan"
            (Kahan summation, same paper).
        seed: of the stochastic rounding.

    Raises:
        ValueError: an unknown `state_precision`, or a parameter of another type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_precision: OptimizerState = "fp32",
        seed: int = 0,
    ) -> None:
        if state_precision not in STATE_PRECISIONS:
            raise ValueError(f"state_precision is {state_precision!r}; choose from {', '.join(STATE_PRECISIONS)}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_precision = state_precision
        self._generators: dict[str, torch.Generator] = {}
        for i, p in enumerate(self._parameters()):
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"Parameter {i} is {p.dtype}; AdamW takes float32 and bfloat16 parameters.")
            if state_precision == "bf16_stochastic" and p.dtype == torch.bfloat16:
                device = str(p.device)
                self._generators.setdefault(device, torch.Generator(p.device).manual_seed(seed))

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step: the one place that says which tensors, dtypes and devices."""
        low = p.dtype == torch.bfloat16
        dtype = torch.bfloat16 if low and self.state_precision != "fp32" else torch.float32
        state = {
            "step": torch.zeros((), dtype=torch.int64),
            "exp_avg": torch.zeros_like(p, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(p, dtype=dtype),
        }
        if low and self.state_precision == "fp32":
            state["master"] = p.detach().float()
        if low and self.state_precision == "bf16_kahan":
            state["compensation"] = torch.zeros_like(p)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. `closure` must be None."""
        if closure is not None:
            raise ValueError("AdamW.step takes no closure: compute the gradients before it.")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(self._new_state(p))
                state["step"] += 1
                step = int(state["step"])
                tensors = {"p": p, "grad": p.grad, **{k: v for k, v in state.items() if k != "step"}}
                for block in _blocks(tensors):
                    self._update(block, group, step)

    def _update(self, t: dict[str, Tensor], group: dict[str, Any], step: int) -> None:
        p = t["p"]
        # Float32 tensors are updated where they lie; bfloat16 ones are widened, and stored again below.
        if "master" in t:
            weight = t["master"]
        elif "compensation" in t:
            weight = p.float() + t["compensation"].float()
        else:
            weight = p.float()
        m, v = t["exp_avg"].float(), t["exp_avg_sq"].float()
        _adamw(weight, t["grad"].float(), m, v, group, step)

        if weight is not p:
            stochastic = self.state_precision == "bf16_stochastic"
            p.copy_(stochastic_round(weight, self._generators[str(p.device)]) if stochastic else weight)
        if "compensation" in t:
            t["compensation"].copy_(weight - p.float())
        if m is not t["exp_avg"]:
            t["exp_avg"].copy_(m)
            # Changes of the second moment, 1 - beta2 of it, can be below half a gap for ever, so it is rounded
            # stochastically too. The first moment changes enough at each step.
            stochastic = self.state_precision == "bf16_stochastic"
            t["exp_avg_sq"].copy_(stochastic_round(v, self._generators[str(p.device)]) if stochastic else v)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as flat tensors for a safetensors file; not copies.

        Keys are "<parameter index>.<state name>", and "rounding.<device>" for each random generator (uint8).
        Learning rate and the other numbers of `param_groups` are not in it: they come from the config.
        """
        flat = {f"{i}.{k}": v for i, p in enumerate(self._parameters()) for k, v in self.state.get(p, {}).items()}
        return flat | {f"rounding.{device}": g.get_state() for device, g in self._generators.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state by what `tensors` gave, bit for bit.

        Each tensor goes where this optimizer keeps its own and never takes the parameter's dtype: float32 moments of a
        bfloat16 parameter stay float32.

        Raises:
            UserError: a tensor is missing, unknown, or has another shape or dtype. The state has not changed.
        """
        tensors = dict(tensors)
        rounding = {device: tensors.pop(f"rounding.{device}", None) for device in self._generators}
        loaded: list[tuple[Tensor, dict[str, Tensor]]] = []
        for i, p in enumerate(self._parameters()):
            expected = self._new_state(p)
            found = {name: tensors.pop(f"{i}.{name}", None) for name in expected}
            if all(v is None for v in found.values()):
                continue  # never stepped
            for name, want in expected.items():
                have = found[name]
                if have is None or have.shape != want.shape or have.dtype != want.dtype:
                    what = "missing" if have is None else f"{have.dtype} {list(have.shape)}"
                    raise UserError(
                        f"Optimizer state {i}.{name} is {what}; expected {want.dtype} {list(want.shape)}; resume with "
                        "the model and --optimizer-state it was saved with."
                    )
                want.copy_(have)
            loaded.append((p, expected))
        lost = [f"rounding.{device}" for device, saved in rounding.items() if saved is None]
        if tensors or lost:
            what = f"has {min(tensors)}, which this run does not" if tensors else f"lacks {lost[0]}, which this run has"
            raise UserError(
                f"The saved optimizer {what}; resume with the model, --device and --optimizer-state it had."
            )
        self.state.clear()
        self.state.update(loaded)
        for device, saved in rounding.items():
            assert saved is not None
            self._generators[device].set_state(saved.cpu())

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the state of the rounding's generators under "rounding"."""
        return super().state_dict() | {"rounding": {d: g.get_state() for d, g in self._generators.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, except that every tensor keeps its dtype and bits (see `load_tensors`)."""
        flat = {f"{i}.{k}": v for i, state in state_dict["state"].items() for k, v in state.items()}
        self.load_tensors(flat | {f"rounding.{device}": s for device, s in state_dict["rounding"].items()})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})


def _blocks(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in pieces of at most `BLOCK` elements; one piece where their layouts do not allow flat views."""
    if tensors["p"].numel() <= BLOCK or not all(t.is_contiguous() for t in tensors.values()):
        yield tensors
        return
    for pieces in zip(*(t.view(-1).split(BLOCK) for t in tensors.values()), strict=True):
        yield dict(zip(tensors, pieces, strict=True))


def _adamw(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> None:
    """One AdamW update of float32 tensors in place, in the order of operations of `torch.optim.AdamW`."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if group["weight_decay"]:
        weight.mul_(1 - lr * group["weight_decay"])
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
