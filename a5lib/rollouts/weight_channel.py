"""The weight channel: memory that trainer and worker share, laid out once, through which every sync sends the weights.

It is an anonymous file in memory. It has no name, so no other program can open it and nothing is left behind: the
memory is freed when the last process that maps it ends, however that happens. The worker inherits its descriptor. Both
Pythons run this file; the worker needs torch and the standard library alone for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from a5lib.errors import UserError
from a5lib.rollouts.checksums import and_others, checksum

ALIGNMENT = 64  # bytes; a cache line
GIB = 2**30
CHANNEL_NAME = "a5lib-weights"  # what /proc shows of it


class Slot(NamedTuple):
    """Where one tensor lies in the channel: `offset` in bytes; `dtype` as torch spells it, such as "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


def as_slots(rows: Iterable[Sequence[Any]]) -> list[Slot]:
    """The slots of a channel, as they come in JSON."""
    return [Slot(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in rows]


def lay_out(weights: Iterable[tuple[str, Tensor]]) -> list[Slot]:
    """A slot for every tensor, in the given order, each beginning at a multiple of 64 bytes.

    >>> [slot.offset for slot in lay_out([("a", torch.zeros(3)), ("b", torch.zeros(2, 2))])]
    [0, 64]
    """
    slots: list[Slot] = []
    for name, weight in weights:
        dtype = str(weight.dtype).removeprefix("torch.")
        slots.append(Slot(name, tuple(weight.shape), dtype, -(-channel_size(slots[-1:]) // ALIGNMENT) * ALIGNMENT))
    return slots


def channel_size(slots: Sequence[Slot]) -> int:
    """Bytes up to the end of the last slot."""
    return max((slot.offset + _bytes(slot) for slot in slots), default=0)


def views(slots: Sequence[Slot], buffer: Tensor) -> dict[str, Tensor]:
    """The tensors that lie in a buffer (uint8 [size]), by name; no bytes are copied."""
    return {
        slot.name: buffer[slot.offset : slot.offset + _bytes(slot)].view(getattr(torch, slot.dtype)).view(slot.shape)
        for slot in slots
    }


def attach(descriptor: int) -> Tensor:
    """Map the channel behind an inherited descriptor, which may be closed afterwards: uint8 [size], shared."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def attach_to_read(descriptor: int) -> Tensor:
    """The worker's side: as `attach`, but pinned where there is a card, and sealed (see `seal`)."""
    buffer = attach(descriptor)
    if torch.cuda.is_available():
        fault = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if fault:
            print(f"The weight channel could not be pinned (CUDA error {fault}); loads are slower.", flush=True)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA keeps the refusal as its last error: let this kernel raise it
    seal(buffer)
    return buffer


def seal(buffer: Tensor) -> None:
    """Let this mapping of the channel only be read. The weights may be the trainer's own, so a write to them ends this
    process at once.
    """
    address, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes)
    if ctypes.CDLL(None, use_errno=True).mprotect(address, size, mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), "the weight channel could not be sealed")


class WeightChannel:
    """The trainer's side. Taught in notebook 10.

    Args:
        slots: what the channel holds, as `lay_out` gives it.

    Attributes:
        descriptor: of the shared memory; a child process inherits it.
        buffer: all of it, uint8 [size].
        tensors: the slots as tensors, by name. An engine may keep its weights there; then nothing is copied.

    Raises:
        UserError: the memory is not to be had.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.descriptor = _reserve(channel_size(self.slots))
        self._end = weakref.finalize(self, os.close, self.descriptor)
        self.buffer = attach(self.descriptor)
        self.tensors = views(self.slots, self.buffer)

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]], device: torch.device | None = None) -> dict[str, int]:
        """Copy every tensor in that does not lie there already.

        Args:
            weights: all tensors of the channel by name, each on the host or on a card.
            device: where the checksums are computed (None: where each tensor lies). A card is much faster.

        Returns:
            The checksum of each tensor by name, taken from the given weights and not from the copies.

        Raises:
            ValueError: a tensor is missing, given twice or not of the channel, or has another shape or dtype.
        """
        sums: dict[str, Tensor] = {}
        cards: set[torch.device] = set()
        for name, weight in weights:
            place = self.tensors.get(name)
            if place is None or name in sums:
                raise ValueError(f"{name} was given twice." if name in sums else f"The channel has no tensor {name}.")
            if (weight.shape, weight.dtype) != (place.shape, place.dtype):
                raise ValueError(
                    f"{name} is {weight.dtype} {list(weight.shape)}; the channel was laid out for {place.dtype} "
                    f"{list(place.shape)}."
                )
            if weight.device.type == "cuda":
                cards.add(weight.device)
            if weight.data_ptr() != place.data_ptr():
                place.copy_(weight, non_blocking=True)
            sums[name] = checksum(weight, device)
        if missing := [slot.name for slot in self.slots if slot.name not in sums]:
            raise ValueError(f"The given weights lack {and_others(missing)}.")
        for card in cards:
            torch.cuda.synchronize(card)
        return {name: int(value) for name, value in sums.items()}

    def flat(self, names: Sequence[str]) -> Tensor | None:
        """The memory of these tensors as one, [elements of all], for an engine that keeps them end to end; None where
        they do not lie so, in this order and without a gap, or differ in dtype.
        """
        chosen = [slot for slot in self.slots if slot.name in set(names)]
        ends = [slot.offset + _bytes(slot) for slot in chosen]
        together = all(end == slot.offset for end, slot in zip(ends, chosen[1:], strict=False))
        if [slot.name for slot in chosen] != list(names) or not together or len({s.dtype for s in chosen}) != 1:
            return None
        return self.buffer[chosen[0].offset : ends[-1]].view(getattr(torch, chosen[0].dtype))

    def close(self) -> None:
        """Let go of the memory; it is freed when no tensor and no process uses it any more. Harmless when repeated."""
        if self.descriptor >= 0:
            self._end()
            self.descriptor = -1
            self.tensors, self.buffer = {}, torch.empty(0, dtype=torch.uint8)


def _reserve(size: int) -> int:
    """A descriptor of `size` bytes of anonymous shared memory, all of them really there."""
    from a5lib.machine import host_memory, shared_memory  # the worker's Python may lack what this needs

    available = host_memory()[0]
    if size > available:
        raise UserError(
            f"The weight channel needs {size / GIB:.2f} GiB of memory that trainer and worker share, but only "
            f"{available / GIB:.2f} GiB are available; close other programs or choose a smaller model."
        )
    anonymous = hasattr(os, "memfd_create")
    descriptor = os.memfd_create(CHANNEL_NAME) if anonymous else _unlinked_file()
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, size)  # now; otherwise writing ends in a bus error once memory is full
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        place, free = ("memory", available) if anonymous else ("/dev/shm", (shared_memory() or (0, 0))[0])
        remedy = "close other programs" if anonymous else "enlarge it (docker run --shm-size=8g ...)"
        raise UserError(
            f"The weight channel needs {size / GIB:.2f} GiB of {place} that trainer and worker share, and the system "
            f"refused it ({error.strerror}; {free / GIB:.2f} GiB are free); {remedy} or choose a smaller model."
        ) from error
    return descriptor


def _unlinked_file() -> int:
    """Where the system has no anonymous files: one of an unguessable name, which it loses at once."""
    descriptor, name = tempfile.mkstemp(prefix=f"{CHANNEL_NAME}-", dir="/dev/shm")
    os.unlink(name)
    return descriptor


def _bytes(slot: Slot) -> int:
    return math.prod(slot.shape) * int(getattr(torch, slot.dtype).itemsize)
