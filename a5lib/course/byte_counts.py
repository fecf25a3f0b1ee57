"""Bytes of tensors, counted and not estimated: what a computation keeps for its backward pass, and what is alive at its
worst moment.

Every tensor that torch makes is seen, on the CPU and on a card. What an operation needs inside itself is not, and
neither is what was there before. This file does not know what is computed. Used in notebook 06.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def kept_bytes(run: Callable[[], Any]) -> int:
    """Bytes that the forward pass in `run` keeps for the backward pass. Weights and inputs that ask for a gradient are
    there anyway, and are left out.

    >>> import torch
    >>> x = torch.ones(1000, requires_grad=True)
    >>> kept_bytes(lambda: x.exp()), kept_bytes(lambda: x + 1)  # the slope of exp is its result; that of a sum is 1
    (4000, 0)
    """
    kept: dict[int, int] = {}  # one entry for each piece of memory, however many tensors look at it

    def pack(tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base  # of a view
        if not (whole.is_leaf and whole.requires_grad):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # named, so that nothing is released, and its place taken again, before the end
    del result
    return sum(kept.values())


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that tensors made by `run` take at one time.

    >>> import torch
    >>> peak_bytes(lambda: torch.ones(1000) + 1)  # the ones and the sum
    8000
    """
    with _Living() as living:
        run()
    return living.peak


class _Living(TorchDispatchMode):
    """Adds up each new piece of memory, and subtracts it when it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                given.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        return result

    def _gone(self, size: int) -> None:
        self.now -= size
