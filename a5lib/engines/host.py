"""The host's side of a card: memory that copies can run beside the work from, and the two streams that carry them.

Pinned memory stays where it is, so the card copies from and to it while it computes. Every buffer is allocated once.
On the CPU the same code runs with plain memory, and nothing is asynchronous.
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


class SharedWeights(Protocol):
    """Memory for weights that another process maps too (see `a5lib.rollouts.weight_channel.WeightChannel`)."""

    @property
    def buffer(self) -> Tensor:
        """All of it, uint8, from the beginning of a page."""
        ...

    def flat(self, names: Sequence[str]) -> Tensor | None:
        """The place of these weights as one flat tensor, or None where they do not lie together."""
        ...


class HostMemory:
    """Buffers on the host for one device, pinned where the device is a card.

    Torch's own pinned allocator rounds every size up to a power of two; here a buffer has the size that was asked for.
    Where the system refuses to pin, the buffer is pageable: everything works, and copies are slower and wait. One
    warning says so. Pins are given back when this object goes.

    Args:
        device: the card, or the CPU.
        shared: where weights are placed if they have a place there, so that they need not be copied for generation.
    """

    def __init__(self, device: torch.device, shared: SharedWeights | None = None) -> None:
        self.device, self.pins = device, device.type == "cuda"
        self.refused = 0
        self.shared = shared
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned, device)
        if shared is not None and self.pins:
            self._pin(shared.buffer)

    def weights(self, names: Sequence[str], numel: int, dtype: torch.dtype) -> Tensor:
        """As `empty`, for the weights of these names: their place in the shared memory, if they have one."""
        place = None if self.shared is None else self.shared.flat(names)
        return self.empty(numel, dtype) if place is None else place

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor [numel] on the host."""
        if not self.pins:
            return torch.empty(numel, dtype=dtype)
        size = max(1, -(-numel * dtype.itemsize // PAGE)) * PAGE
        area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: large pages are pinned faster
            with contextlib.suppress(OSError):
                area.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(area, dtype=torch.uint8)
        self._pin(buffer)
        return buffer[: numel * dtype.itemsize].view(dtype)

    def _pin(self, buffer: Tensor) -> None:
        if pin(buffer):
            self._pinned.append(buffer)
            return
        with contextlib.suppress(RuntimeError):
            # CUDA keeps the refusal as its last error, and the next kernel would raise it: let this one do so.
            torch.zeros(1, device=self.device)
        size = buffer.numel()
        if not self.refused:
            warnings.warn(
                f"The system refused to pin {size / 2**30:.2f} GiB of host memory; it is used as it is, so copies "
                "between host and card are about half as fast or slower and no longer run beside the work.",
                stacklevel=3,
            )
        self.refused += size


def pin(buffer: Tensor) -> bool:
    """Ask the driver to pin a page-aligned buffer; False where it refuses."""
    return int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0


def _unpin(buffers: list[Tensor], device: torch.device) -> None:
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a card that has failed copies no more
            torch.cuda.synchronize(device)  # a copy may still be on its way, as after a step
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    buffers.clear()


class Lane:
    """A stream that copies in one direction; `with lane: target.copy_(source, non_blocking=True)`.

    On the CPU every copy is finished when the call returns, so there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, *events: torch.cuda.Event | None) -> Iterator[None]:
        """Work issued inside goes on this lane, after the events."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            for event in events:
                if event is not None:
                    self.stream.wait_event(event)
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event: everything issued on this lane so far."""
        return None if self.stream is None else self.stream.record_event()


class Lanes:
    """The lanes in and out of a card, and the events that tie them to its compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inward, self.outward = Lane(device), Lane(device)

    def now(self) -> torch.cuda.Event | None:
        """An event: everything computed so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self, *events: torch.cuda.Event | None) -> None:
        """What is computed from here on waits for the events. The host does not wait."""
        for event in events:
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """What is computed from here on waits for both lanes; buffers may be freed after it."""
        self.wait(self.inward.mark(), self.outward.mark())
        for lane in (self.inward, self.outward):
            with lane.after(self.now()):
                pass
