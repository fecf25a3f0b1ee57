"""How much of the update that AdamW intends arrives in bfloat16 weights, for each precision of its state.

`python -m a5lib.realised_share` prints the table of `runs/optimizer-state/shares.txt` in two minutes. It is the reason
for the default of `--optimizer-state`. Notebook 07 teaches the measure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from a5lib.config import OptimizerState
from a5lib.optimizers import STATE_PRECISIONS, AdamW
from a5lib.runlog import describe_environment

BETAS, EPS = (0.9, 0.95), 1e-8
# All gradients of a model with 1.5 billion weights have the norm 1, the default limit, if each has about this size.
GRADIENT = 2.5e-5


@dataclass(frozen=True)
class Share:
    """What became of an intended change d of the weights; r is the change of the stored bfloat16 weights.

    Attributes:
        share: sum d r / sum d^2: 1 if all of it arrived, 0 if nothing did.
        cosine: between d and r, 0 where nothing moved: how much of the change is not noise.
        moved: share of the weights that changed.
        kept: as `share`, for the weights that the optimizer goes on from: the master, or weight + compensation.
    """

    share: float
    cosine: float
    moved: float
    kept: float


def realised_share(state_precision: OptimizerState, lr: float, start: Tensor, steps: int = 200, seed: int = 0) -> Share:
    """Compare `steps` of AdamW with the same steps of `torch.optim.AdamW` in float64.

    The gradient of a weight has a fixed part and a part drawn anew at each step, both normal and of the same size, and
    is bfloat16. There is no weight decay.

    Args:
        state_precision: see the table in `a5lib.optimizers`.
        lr: learning rate.
        start: bfloat16 [n], the weights before the first step.
        steps: how many.
        seed: of the gradients and of the stochastic rounding.
    """
    stored = torch.nn.Parameter(start.clone())
    exact = torch.nn.Parameter(start.double())
    ours = AdamW([stored], lr, BETAS, EPS, state_precision=state_precision, seed=seed)
    reference = torch.optim.AdamW([exact], lr, BETAS, EPS, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.randn(start.shape, generator=generator)
    for _ in range(steps):
        stored.grad = ((fixed + torch.randn(start.shape, generator=generator)) * GRADIENT / 2**0.5).bfloat16()
        exact.grad = stored.grad.double()
        ours.step()
        reference.step()
    before = start.double()
    intended, realised = exact.detach() - before, stored.detach().double() - before
    state = ours.state[stored]
    kept = state["master"].double() if "master" in state else stored.detach().double()
    if "compensation" in state:
        kept = kept + state["compensation"].double()
    length = intended.norm() * realised.norm()
    return Share(
        share=(intended.dot(realised) / intended.square().sum()).item(),
        cosine=(intended.dot(realised) / length).item() if length > 0 else 0.0,
        moved=(realised != 0).double().mean().item(),
        kept=(intended.dot(kept - before) / intended.square().sum()).item(),
    )


def main() -> None:
    """Print the table, with the versions and the machine it comes from."""
    environment = describe_environment()
    n, steps = 1 << 20, 200
    starts = {
        "matrix, normal with std 0.02": 0.02 * torch.randn(n, generator=torch.Generator().manual_seed(1)),
        "norm weights, all 1": torch.ones(n),
    }
    print(f"Share of the intended change that arrives after {steps} steps of AdamW, {n} bfloat16 weights.")
    print("Intended: the same steps in float64. Command: python -m a5lib.realised_share")
    print(
        f"Machine: {environment['cpu']}, {environment['threads']} thread(s), Python {environment['python']}, "
        f"torch {environment['torch']}"
    )
    print("stored: in the bfloat16 weights. cosine: between intended and stored change. moved: weights that changed.")
    print("kept: in what the optimizer goes on from (master, or weight + compensation).")
    for name, start in starts.items():
        for lr in (1e-6, 1e-5):
            print(f"\n{name}, learning rate {lr:.0e}\n{'':18}{'stored':>8}{'cosine':>8}{'moved':>8}{'kept':>8}")
            for precision in STATE_PRECISIONS:
                found = realised_share(precision, lr, start.bfloat16(), steps)
                print(f"  {precision:16}{found.share:8.1%}{found.cosine:8.2f}{found.moved:8.1%}{found.kept:8.1%}")


if __name__ == "__main__":
    main()
