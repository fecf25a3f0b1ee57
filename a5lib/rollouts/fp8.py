"""Weights that the engine holds in eight bits, and whether they are what was sent, rounded.

vLLM rounds the matrices of linear layers by itself at each load, so its bits are never those of the trainer. This file
knows what a right rounding is; it needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of a float8_e4m3fn
SMALLEST_SCALE = 1 / (LARGEST * 512)  # that vLLM gives a row, one of zeros included
SLACK = 2.0**-20  # relative: float32 arithmetic in another order, far below a step of float8_e4m3fn (2**-4)
PART = 2**21  # numbers worked on at a time


@torch.no_grad()
def as_sent(held: Tensor, scale: Tensor, sent: Tensor) -> Tensor:
    """What was sent, where the engine holds its rounding; what the engine holds, everywhere else.

    A row w is held rightly as scale * q if scale = max |w| / 448, and each q is as near to w / scale as any
    float8_e4m3fn is. So the checksum of what comes back is that of what was sent only if every number is held rightly:
    each number is judged by itself, and nobody says "it is right" for a whole tensor.

    A weight that is missing, old or another one shows, and so does a scale: by every number that is not the rounding of
    what was sent. Not seen is an old weight where it has the very same eight bits and scale as the new one (the engine
    then computes with the new one), a number midway between two that was rounded up and not down, and whether vLLM
    multiplies rightly; of that `mismatch` tells.

    Args:
        held: the engine's q, float8_e4m3fn [rows, columns].
        scale: of each row, float32 [rows, 1].
        sent: what was sent, float32 or bfloat16 [rows, columns], where the engine's weights lie or on the host.

    Returns:
        [rows, columns], with the dtype of what was sent, where the engine's weights lie. On a card it takes some 100 MB
        besides.

    >>> held, scale = torch.tensor([[448.0, 7.0, -3.0]]).to(FP8), torch.tensor([[0.5]])
    >>> as_sent(held, scale, torch.tensor([[224.0, 3.6, -2.5]]))
    tensor([[224.0000,   3.6000,  -1.5000]])
    """
    found = torch.empty(held.shape, dtype=sent.dtype, device=held.device)
    rows = max(1, PART // held.shape[1])
    for q, s, w, out in zip(held.split(rows), scale.split(rows), sent.split(rows), found.split(rows), strict=True):
        w, q = w.to(held.device, torch.float32), q.float()
        due = (w.abs().amax(1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
        exact = w / s
        nearest = exact.clamp(-LARGEST, LARGEST).to(FP8).float()
        right = ((exact - q).abs() <= (exact - nearest).abs() + SLACK * exact.abs()) & ((s - due).abs() <= SLACK * due)
        out.copy_(torch.where(right, w, s * q))
    return found
