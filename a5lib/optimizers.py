"""AdamW with a chosen precision of its state, gradient clipping, and the learning rate of a step.

This file knows parameters and their gradients. It does not know the model, the loss or when to step.

For a bfloat16 parameter an update smaller than half the gap between neighbouring bfloat16 numbers rounds to nothing.
The gap below 1 is 2^-8 = 0.0039, so a learning rate of 1e-5 never moves a weight of 1. `AdamW` offers four answers,
named by `state_precision`; the bytes are per parameter and include the weight but not the gradient. The last columns
are the share of the intended change that the weights show after 200 steps at a learning rate of 1e-6 and of 1e-5, for
weights with a standard deviation of 0.02 (`runs/optimizer-state/shares.txt`):

| state_precision | weight | moments | extra | bytes | 1e-6 | 1e-5 |
|---|---|---|---|---|---|---|
| `fp32` | bf16 | fp32 | fp32 master copy of the weight | 14 | 99.4 % | 100.0 % |
| `bf16` | bf16 | bf16 | none: small updates are lost | 6 | 1.0 % | 12.7 % |
| `bf16_stochastic` | bf16, rounded stochastically | bf16, the second too | none | 6 | 100.1 % | 100.0 % |
| `bf16_kahan` | bf16 | bf16 | bf16 compensation: what the weight's rounding left out | 8 | 99.7 % | 100.0 % |

`fp32` is the default because it loses nothing and adds nothing: the master holds 100.0 % in every case measured, also
for weights of 1, which do not show 200 steps yet, and the moments are not rounded either. The change that
`bf16_stochastic` makes is right on average but noisy: at 1e-6 its cosine with the intended one is 0.76, with `fp32`
0.96. What `bf16_kahan` keeps is itself rounded: for weights of 1 it holds 98 to 106 %.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from a5lib.config import OptimizerState
from a5lib.errors import UserError

STATE_PRECISIONS: tuple[OptimizerState, ...] = ("fp32", "bf16", "bf16_stochastic", "bf16_kahan")

# Elements of one pass of the update. It bounds the temporaries however large a parameter is: the embedding of a 1B
# model would otherwise need several gigabytes of them. Measured in blocks of float32, they are 3 with the state
# `fp32`, 9 with `bf16_stochastic`, and 6 with the other two.
BLOCK = 1 << 21
COMPILED_BLOCK = 1 << 24  # compiled code makes no temporaries, but the compiler's trials copy a block

WEIGHT, SECOND_MOMENT = 0, 1  # the two streams of `random_bits`


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


def gradient_norms(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each gradient, taken where it lies; the host does not wait. Taught in notebook 08.

    Args:
        grads: any shapes, dtypes and devices.

    Returns:
        float32 [number of gradients], float64 if a gradient is float64; on the device of the first gradient.
    """
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = []
    for grad in grads:
        if grad.is_cuda:  # a card adds up in a tree
            norm = torch.linalg.vector_norm(grad, dtype=dtype)
        else:  # a CPU adds one after another: in float32 the norm of 30 million equal elements would be off by 1.6 %
            blocks = grad.reshape(-1).split(BLOCK)
            norm = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]).norm()
        norms.append(norm.to(grads[0].device, dtype))
    return torch.stack(norms) if norms else torch.zeros(0)


def total_norm(names: Sequence[str], norms: Tensor) -> float:
    """The L2 norm of all gradients together: the root of the sum of squares, in float64. The host waits once.

    Taught in notebook 08.

    Args:
        names: of the parameters, for the error.
        norms: [number of names], as `gradient_norms` gives them.

    Returns:
        The norm, 0 where there is no gradient.

    Raises:
        FloatingPointError: a norm is not finite; names the first parameter at fault.

    >>> total_norm(["a", "b"], torch.tensor([3.0, 4.0]))
    5.0
    """
    each = norms.cpu().double()
    finite = each.isfinite()
    if not finite.all():
        bad = int((~finite).nonzero()[0])
        raise FloatingPointError(
            f"The gradient norm is not finite: parameter {names[bad]} is the first with norm {each[bad].item()}."
        )
    return each.square().sum().sqrt().item()


def clip_scale(norm: float, max_norm: float) -> float:
    """What all gradients are multiplied by so that their norm is at most `max_norm`. Taught in notebook 08.

    >>> clip_scale(5.0, 1.0), clip_scale(0.5, 1.0)
    (0.2, 1.0)
    """
    return max_norm / norm if norm > max_norm else 1.0


def random_bits(key: Tensor, n: int, stream: int) -> Tensor:
    """16 random bits for each of n neighbouring elements: a hash of what `rounding_key` holds and the element's index.

    There is no generator and no state. An element gets the same bits however the model is cut into blocks, on the CPU
    and on a card, and after a resume.

    The two halves of the index go through two rounds of a 32-bit mixer, each with its own half of the key. The mixer is
    `lowbias32` of C. Wellons' hash-prospector (public domain, https://nullprogram.com/blog/2018/07/31/). Its
    multipliers and shifts were found there by a search for the smallest bias: if one input bit flips, each output bit
    flips in half of the cases, to within 0.2 thousandths on average. `tests/test_optimizers.py` tests what we need.

    Args:
        key: int64 [2], see `rounding_key`.
        n: number of elements.
        stream: `WEIGHT` or `SECOND_MOMENT`: the lower or the upper half of the hash.

    Returns:
        int32 [n], uniform from 0 to 65535.
    """
    index = torch.arange(n, device=key.device) + key[1]
    bits = _mix(index.to(torch.int32) ^ key[0].to(torch.int32))
    bits = _mix(bits + (index >> 32).to(torch.int32) ^ (key[0] >> 32).to(torch.int32))
    return bits & 0xFFFF if stream == WEIGHT else bits >> 16 & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    """lowbias32 of int32 numbers. Products wrap; the masks make of a signed shift the unsigned one."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)


def rounding_key(seed: int, step: int, first: int, device: torch.device) -> Tensor:
    """The key of `random_bits` for elements that follow one another in the model, made without a wait of the host.

    Args:
        seed: of the run.
        step: number of the optimizer step, from 1.
        first: index of the first element. Elements are counted over all parameters in their order.
        device: where the key is used.

    Returns:
        int64 [2]: 64 bits of the SHA-256 of seed and step, and `first`.
    """
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    return _filled([int.from_bytes(digest[:8], "little", signed=True), first], torch.int64, device)


def _filled(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.tensor(values)`, but filled on the device: a copy from the host would make the host wait."""
    return torch.stack([torch.full((), value, dtype=dtype, device=device) for value in values])


def stochastic_round(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 so that the expected value is the float32 value. Taught in notebook 07.

    bfloat16 is the upper half of float32. Adding a uniform random 16-bit number to the bits and dropping the lower half
    rounds the magnitude up with a probability equal to the dropped fraction; the sign bit is not reached, so negative
    numbers behave the same. Numbers that bfloat16 holds exactly, zero included, do not change. NaN stays NaN.

    Args:
        values: float32, any shape.
        bits: int32, the shape of `values`, uniform from 0 to 65535; see `random_bits`.

    Returns:
        bfloat16, the shape of `values`.
    """
    rounded = ((values.view(torch.int32) + bits) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).bfloat16()  # a NaN with all bits set would carry into the sign


def adamw_numbers(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    device: torch.device,
) -> Tensor:
    """The numbers of `adamw_update` that change from step to step, in a tensor: a compiled update is compiled once.

    Args:
        step: number of the optimizer step, from 1.
        grad_scale: what the gradient is multiplied by.
        device: of the parameters.

    Returns:
        float64 [4]: grad_scale, 1 - lr weight_decay, sqrt(1 - beta2^step), -lr / (1 - beta1^step).
    """
    beta1, beta2 = betas
    values = (grad_scale, 1 - lr * weight_decay, math.sqrt(1 - beta2**step), -lr / (1 - beta1**step))
    return _filled(values, torch.float64, device)


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    numbers: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    state_precision: OptimizerState,
    key: Tensor,
) -> None:
    """One AdamW update of n elements in place (Loshchilov and Hutter 2019, algorithm 2). Taught in notebook 07.

    Every element is computed by itself, in float32 (float64 for float64 weights) and in the order of operations of
    `torch.optim.AdamW`. It does not matter into which pieces the elements are cut. All are plain tensor operations,
    without a wait of the host, so that `torch.compile` can take the whole.

    Args:
        weight: bfloat16, float32 or float64 [n], contiguous; changed.
        grad: [n], any of these dtypes; it is scaled in float32 and never rounded after that.
        state: "exp_avg" and "exp_avg_sq", and "master" or "compensation" where the precision has one; [n], changed.
        numbers: see `adamw_numbers`.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        state_precision: see the table at the top of this file.
        key: of these elements, see `rounding_key`; used by "bf16_stochastic" only.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    # Tensors of this type are updated where they lie; bfloat16 ones are widened, and stored again below.
    if "master" in state:
        wide = state["master"]
    elif "compensation" in state:
        wide = weight.float() + state["compensation"].float()
    else:
        wide = weight.to(dtype)
    m, v = state["exp_avg"].to(dtype), state["exp_avg_sq"].to(dtype)
    _adamw(wide, grad.to(dtype), m, v, numbers.to(dtype), betas, eps)

    stochastic = state_precision == "bf16_stochastic" and weight.dtype == torch.bfloat16
    n = weight.numel()
    if stochastic:
        weight.copy_(stochastic_round(wide, random_bits(key, n, WEIGHT)))
    elif "compensation" in state:
        # Rounded through the bits: a compiler may leave out a conversion to bfloat16 and back, and then the
        # compensation would be 0.
        nearest = _nearest_bfloat16(wide)
        weight.copy_(nearest)
        state["compensation"].copy_(wide - nearest)
    elif weight.dtype != dtype:
        weight.copy_(wide)
    if state["exp_avg"].dtype != dtype:
        state["exp_avg"].copy_(m)
        # Changes of the second moment, 1 - beta2 of it, can be below half a gap for ever, so it is rounded
        # stochastically too. The first moment changes enough at each step.
        state["exp_avg_sq"].copy_(stochastic_round(v, random_bits(key, n, SECOND_MOMENT)) if stochastic else v)


def _adamw(
    weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, numbers: Tensor, betas: tuple[float, float], eps: float
) -> None:
    """The arithmetic of one update, in place, all tensors of one dtype."""
    grad_scale, decay, correction2, step_size = numbers.unbind()
    beta1, beta2 = betas
    grad = grad * grad_scale
    weight.mul_(decay)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = v.sqrt().div_(correction2).add_(eps)
    weight.add_((m * step_size).div_(denominator))


def _nearest_bfloat16(values: Tensor) -> Tensor:
    """float32 rounded to the nearest bfloat16, ties to even, still as float32."""
    bits = values.view(torch.int32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & -(1 << 16)
    return torch.where(values.isnan(), values, rounded.view(torch.float32))


def fill_state(name: str, target: Tensor, saved: Tensor | None) -> None:
    """Copy one saved tensor of an optimizer's state to where it is kept.

    Raises:
        UserError: it is missing, or has another shape or dtype.
    """
    if saved is None or saved.shape != target.shape or saved.dtype != target.dtype:
        what = "missing" if saved is None else f"{saved.dtype} {list(saved.shape)}"
        raise UserError(
            f"Optimizer state {name} is {what}; expected {target.dtype} {list(target.shape)}; resume with the model "
            "and --optimizer-state it was saved with."
        )
    target.copy_(saved)


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) whose state has a chosen precision. Taught in notebook 07.

    The arithmetic is `adamw_update`; `state_precision` (table at the top of this file) says how the result is stored.
    It concerns bfloat16 parameters only: float32 and float64 parameters have state of their own type and give what
    `torch.optim.AdamW` gives. Blocks of at most `BLOCK` elements (compiled: `COMPILED_BLOCK`) are updated one after
    another, so no temporary has the size of the model.

    Args:
        params: parameters or parameter groups, float32, float64 or bfloat16.
        lr: learning rate; change it through `param_groups`.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay; each step multiplies the weight by 1 - lr * weight_decay.
        state_precision: "fp32", "bf16", "bf16_stochastic" (rounding of Zamirai et al. 2020) or "bf16_kahan"
            (Kahan summation, same paper).
        seed: of the stochastic rounding.
        compiled: compile the update; it then makes no temporaries, and its blocks are larger.

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
        compiled: bool = False,
    ) -> None:
        if state_precision not in STATE_PRECISIONS:
            raise ValueError(f"state_precision is {state_precision!r}; choose from {', '.join(STATE_PRECISIONS)}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_precision = state_precision
        self.seed = seed
        self.update = torch.compile(adamw_update, dynamic=True) if compiled else adamw_update
        self.block = COMPILED_BLOCK if compiled else BLOCK
        for i, p in enumerate(self._parameters()):
            if p.dtype not in (torch.float32, torch.float64, torch.bfloat16):
                raise ValueError(f"Parameter {i} is {p.dtype}; AdamW takes float32, float64 and bfloat16 parameters.")

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step: the one place that says which tensors, dtypes and devices."""
        low = p.dtype == torch.bfloat16
        dtype = torch.float32 if low and self.state_precision == "fp32" else p.dtype
        state = {
            "step": torch.zeros((), dtype=torch.int64),
            "exp_avg": torch.zeros(p.shape, dtype=dtype, device=p.device),
            "exp_avg_sq": torch.zeros(p.shape, dtype=dtype, device=p.device),
        }
        if low and self.state_precision == "fp32":
            state["master"] = p.detach().float().contiguous()
        if low and self.state_precision == "bf16_kahan":
            state["compensation"] = torch.zeros(p.shape, dtype=dtype, device=p.device)
        return state

    @torch.no_grad()
    def step(self, closure: None = None, *, grad_scale: float = 1.0) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: must be None.
            grad_scale: what the gradients are multiplied by, see `clip_scale`; they themselves do not change.
        """
        if closure is not None:
            raise ValueError("AdamW.step takes no closure: compute the gradients before it.")
        first = 0  # index of the parameter's first element in the whole model
        for group in self.param_groups:
            numbers: dict[tuple[int, torch.device], Tensor] = {}
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(self._new_state(p))
                    state["step"] += 1
                    at = (int(state["step"]), p.device)
                    if at not in numbers:
                        settings = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
                        numbers[at] = adamw_numbers(*settings, at[0], grad_scale, p.device)
                    self._update(p, group, numbers[at], first)
                first += p.numel()

    def _update(self, p: Tensor, group: dict[str, Any], numbers: Tensor, first: int) -> None:
        """Update one parameter, block by block."""
        assert p.grad is not None
        state = {name: value.view(-1) for name, value in self.state[p].items() if name != "step"}
        weight, grad = p.detach().reshape(-1), p.grad.reshape(-1)  # copies where the layout is not contiguous
        for at in range(0, p.numel(), self.block):
            block = slice(at, at + self.block)
            self.update(
                weight[block],
                grad[block],
                {name: value[block] for name, value in state.items()},
                numbers,
                betas=group["betas"],
                eps=group["eps"],
                state_precision=self.state_precision,
                key=rounding_key(self.seed, int(self.state[p]["step"]), first + at, p.device),
            )
        if not p.is_contiguous():
            p.copy_(weight.view(p.shape))

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as flat tensors for a safetensors file; not copies.

        Keys are "<parameter index>.<state name>". The learning rate, the other numbers of `param_groups` and the
        seed are not in it: they come from the config.
        """
        return {f"{i}.{k}": v for i, p in enumerate(self._parameters()) for k, v in self.state.get(p, {}).items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state by what `tensors` gave, bit for bit.

        Each tensor goes where this optimizer keeps its own and never takes the parameter's dtype: float32 moments of a
        bfloat16 parameter stay float32.

        Raises:
            UserError: a tensor is missing, unknown, or has another shape or dtype. The state has not changed.
        """
        tensors = dict(tensors)
        loaded: list[tuple[Tensor, dict[str, Tensor]]] = []
        for i, p in enumerate(self._parameters()):
            expected = self._new_state(p)
            found = {name: tensors.pop(f"{i}.{name}", None) for name in expected}
            if all(v is None for v in found.values()):
                continue  # never stepped
            for name, want in expected.items():
                fill_state(f"{i}.{name}", want, found[name])
            loaded.append((p, expected))
        if tensors:
            raise UserError(
                f"The saved optimizer has {min(tensors)}, which this run does not; resume with the model and "
                "--optimizer-state it was saved with."
            )
        self.state.clear()
        self.state.update(loaded)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, except that every tensor keeps its dtype and bits (see `load_tensors`)."""
        self.load_tensors({f"{i}.{k}": v for i, state in state_dict["state"].items() for k, v in state.items()})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})


def state_dtypes(dtype: torch.dtype, state_precision: OptimizerState) -> dict[str, torch.dtype]:
    """Names and types of the tensors that AdamW keeps for a parameter of type `dtype`; see the table above.

    >>> state_dtypes(torch.bfloat16, "bf16_kahan")["compensation"]
    torch.bfloat16
    """
    low = dtype == torch.bfloat16
    wide = torch.float32 if low and state_precision == "fp32" else dtype
    extra = {"fp32": {"master": wide}, "bf16_kahan": {"compensation": dtype}}.get(state_precision, {}) if low else {}
    return {"exp_avg": wide, "exp_avg_sq": wide, **extra}
