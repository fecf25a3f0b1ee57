"""One AdamW step on one weight, with its state in a chosen precision.

This file knows a weight, its gradient and its state. It does not know the model or when to step; the library's own
`a5lib.optimizers.AdamW` does the same for a whole model.
"""

import math
import sys
from typing import Any, Literal, get_args

import torch
from torch import Tensor

StatePrecision = Literal["fp32", "bf16", "bf16_stochastic", "bf16_kahan"]


def new_state(weight: Tensor, state_precision: StatePrecision) -> dict[str, Any]:
    """The state of a bfloat16 weight before its first step. Given, not an exercise; notebook 07 explains it.

    Returns:
        "step", the int 0; "exp_avg" and "exp_avg_sq", zeros in the shape of the weight, float32 for "fp32" and bfloat16
        for the others; "master", a float32 copy of the weight ("fp32" only); "compensation", bfloat16 zeros
        ("bf16_kahan" only); "generator", a random generator with seed 0 ("bf16_stochastic" only).

    Raises:
        ValueError: the weight is not bfloat16, or an unknown `state_precision`.

    >>> sorted(new_state(torch.ones(2).bfloat16(), "bf16_kahan"))
    ['compensation', 'exp_avg', 'exp_avg_sq', 'step']
    """
    if state_precision not in get_args(StatePrecision):
        raise ValueError(
            f"Unknown state_precision {state_precision!r}; expected one of {', '.join(get_args(StatePrecision))}."
        )
    if weight.dtype != torch.bfloat16:
        raise ValueError(f"The weight is {weight.dtype}; expected torch.bfloat16.")
    dtype = torch.float32 if state_precision == "fp32" else torch.bfloat16
    state: dict[str, Any] = {
        "step": 0,
        "exp_avg": torch.zeros_like(weight, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(weight, dtype=dtype),
    }
    if state_precision == "fp32":
        state["master"] = weight.float()
    elif state_precision == "bf16_kahan":
        state["compensation"] = torch.zeros_like(weight)
    elif state_precision == "bf16_stochastic":
        state["generator"] = torch.Generator(weight.device).manual_seed(0)
    return state


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """One AdamW update of float32 tensors in place: `weight`, `exp_avg` and `exp_avg_sq` change, `grad` does not.

    With w the weight, g its gradient, m and v the moments, t the step's number, and lambda the weight decay:

    1. w <- w - lr lambda w
    2. m <- beta1 m + (1 - beta1) g
    3. v <- beta2 v + (1 - beta2) g^2
    4. w <- w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2. The reference keeps the order of operations of
    `torch.optim.AdamW` and gives its result bit for bit. Taught in notebook 07.

    Args:
        weight: float32, any shape.
        grad: float32, the shape of `weight`.
        exp_avg: float32, the shape of `weight`; m, the first moment.
        exp_avg_sq: float32, the shape of `weight`; v, the second moment.
        step: number of this step, counted from 1.
        lr: learning rate.
        betas: beta1 and beta2.
        eps: added to the root of the corrected second moment.
        weight_decay: lambda; 0 means no decay.

    Raises:
        ValueError: a tensor is not float32, or the step is below 1.

    >>> weight, exp_avg, exp_avg_sq = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
    >>> adamw_update(weight, torch.tensor([5.0]), exp_avg, exp_avg_sq, step=1, lr=0.1)
    >>> weight, exp_avg, exp_avg_sq
    (tensor([0.9000]), tensor([0.5000]), tensor([1.2500]))
    """
    for name, tensor in (("weight", weight), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}; adamw_update takes float32, so widen it before the call.")
    if step < 1:
        raise ValueError(f"step is {step}; steps are counted from 1.")
    ### BEGIN YOUR CODE: decay, moments, bias correction, step, all in place (notebook 07)
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    ### END YOUR CODE


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down at random, so that the expected value is the float32 value.

    A bfloat16 number is the upper 16 bits of a float32 number. Between the neighbours a < b of a value x, the result is
    b with probability (x - a) / (b - a) and a otherwise. A value that bfloat16 holds exactly does not change. The sign
    is a bit of its own, so negative values behave as positive ones do.

    Source: Zamirai et al. 2020, arXiv 2010.06192. Taught in notebook 07.

    Args:
        values: float32, any shape, finite.
        generator: source of the random bits, on the device of `values`.

    Returns:
        bfloat16, the shape of `values`.

    Raises:
        ValueError: the values are not float32.

    >>> round_stochastically(torch.tensor([1.0, -0.5]), torch.Generator().manual_seed(0))
    tensor([ 1.0000, -0.5000], dtype=torch.bfloat16)
    """
    if values.dtype != torch.float32:
        raise ValueError(f"The values are {values.dtype}; expected torch.float32.")
    ### BEGIN YOUR CODE: add 16 random bits below, cut off the lower half (notebook 07)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = values.contiguous().view(torch.int32) + noise
    return bits.bitwise_and(-(1 << 16)).view(torch.float32).bfloat16()  # the lower 16 bits are 0, so this is exact
    ### END YOUR CODE


def adamw_step(
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    state_precision: StatePrecision,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    algo: Any = None,
) -> None:
    """One AdamW step of a bfloat16 weight: the arithmetic is float32, the precision says how the result is stored.

    - "fp32": the float32 master is updated; the weight is the master, rounded to nearest. The moments are float32.
    - "bf16": weight and moments are widened, updated, and rounded to nearest.
    - "bf16_stochastic": the same, but the weight, and then the second moment, are rounded stochastically.
    - "bf16_kahan": as "bf16", but the update starts from weight + compensation, and the compensation then holds what
      the rounding of the weight left out (Kahan summation).

    Source: Zamirai et al. 2020, arXiv 2010.06192, for the last two. Taught in notebook 07.

    Args:
        weight: bfloat16, any shape; changed in place.
        grad: bfloat16 or float32, the shape of `weight`.
        state: an empty dict before the first step, which is then filled by `new_state`; changed in place.
        state_precision: one of the four above, the same at every step.
        lr, betas, eps, weight_decay: see `adamw_update`.
        algo: where `adamw_update` and `round_stochastically` are looked up (None: this package).

    Raises:
        ValueError: the weight is not bfloat16, or an unknown `state_precision`.

    >>> weight, state = torch.tensor([1.0]).bfloat16(), {}
    >>> adamw_step(weight, torch.tensor([1.0]), state, "bf16_kahan", lr=1e-3)
    >>> weight, round(state["compensation"].item(), 4)  # the update, -0.001, is too small for the weight
    (tensor([1.], dtype=torch.bfloat16), -0.001)
    """
    algo = sys.modules[__package__] if algo is None else algo
    if not state:
        state.update(new_state(weight, state_precision))
    ### BEGIN YOUR CODE: widen, update, store as the precision says (notebook 07)
    state["step"] += 1
    wide = state["master"] if state_precision == "fp32" else weight.float()
    if state_precision == "bf16_kahan":
        wide += state["compensation"].float()
    exp_avg, exp_avg_sq = state["exp_avg"].float(), state["exp_avg_sq"].float()
    algo.adamw_update(wide, grad.float(), exp_avg, exp_avg_sq, state["step"], lr, betas, eps, weight_decay)
    if state_precision == "bf16_stochastic":
        weight.copy_(algo.round_stochastically(wide, state["generator"]))
        exp_avg_sq = algo.round_stochastically(exp_avg_sq, state["generator"])
    else:
        weight.copy_(wide)
    if state_precision == "bf16_kahan":
        state["compensation"].copy_(wide - weight.float())
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)
    ### END YOUR CODE
