"""Streams that run on the CPU, one operation after another, and find what a real card would only sometimes show: two
operations on one piece of memory, at least one of which writes, and no event that says which comes first.

Every stream counts its operations and knows how far it has waited for the others (a vector clock). An event is a copy
of that knowledge. The host is one more stream: it is ordered before what it issues afterwards, and learns what the
compute stream knows where it waits for a number. An allocation on the card counts as a write of the compute stream,
because the memory may have been that of a tensor that is still in use there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from a5lib.engines.host import Lanes
from a5lib.engines.layer_major import LayerMajorEngine


class Stream:
    """What a `torch.cuda.Stream` is to the lanes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.knows: dict[str, int] = {name: 0}

    def record_event(self) -> dict[str, int]:
        """Everything issued here so far, and what that has waited for."""
        return dict(self.knows)

    def wait_event(self, event: dict[str, int]) -> None:
        """What is issued here from now on comes after the event."""
        for name, count in event.items():
            self.knows[name] = max(self.knows.get(name, 0), count)


class Region:
    """A buffer, on the host or on the card, and when each stream last read and wrote each part of it."""

    def __init__(self, on_host: bool) -> None:
        self.on_host = on_host
        self.seen: dict[tuple[int, int], dict[tuple[str, bool], tuple[int, str]]] = {}


class Streams(TorchDispatchMode):
    """Watch an engine's buffers; `races` says in words what was not ordered."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self.host, self.compute = Stream("host"), Stream("compute")
        self.current = self.compute
        self.regions: dict[int, Region] = {}
        self.races: list[str] = []
        names = iter(["inward", "outward"])
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.compute)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        self.lanes = Lanes(torch.device("cuda", 0))

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def watch(self, engine: LayerMajorEngine, monkeypatch: Any) -> None:
        """Replace the engine's lanes, and note its buffers: those that it has and those that it will allocate."""
        engine.lanes = self.lanes
        empty, host_empty, settled = engine.empty, engine.host.empty, engine._settled

        def noted(make: Any, on_host: bool) -> Any:
            def allocate(numel: int, dtype: torch.dtype) -> Tensor:
                return self.note(make(numel, dtype), on_host)

            return allocate

        def synchronize() -> None:
            settled()
            for stream in (self.compute, self.lanes.inward.stream, self.lanes.outward.stream):
                self.host.wait_event(stream.record_event())

        monkeypatch.setattr(engine, "empty", noted(empty, False))
        monkeypatch.setattr(engine.host, "empty", noted(host_empty, True))
        monkeypatch.setattr(engine, "_settled", synchronize)
        for unit in engine.parts.units:
            for flat in unit.flat.values():
                self.note(flat, unit.name not in engine.plan.resident)

    def note(self, tensor: Tensor, on_host: bool) -> Tensor:
        """Watch a buffer from its allocation on."""
        if tensor.nbytes:
            storage = tensor.untyped_storage()
            region = self.regions[storage.data_ptr()] = Region(on_host)
            weakref.finalize(storage, self._freed, storage.data_ptr(), region).atexit = False
            self._operate([(tensor, True)], "allocation")
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return result  # a view touches nothing
        touched = []
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            touched += [(leaf, written) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        self._operate(touched, str(func))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            self.host.wait_event(self.compute.record_event())  # ids and row numbers are the host's own
        return result

    def _operate(self, touched: list[tuple[Tensor, bool]], what: str) -> None:
        found = [(self.regions.get(t.untyped_storage().data_ptr()), t, written) for t, written in touched if t.nbytes]
        known = [(region, t, written) for region, t, written in found if region is not None]
        stream = self.current
        if stream is self.compute and known and all(region.on_host for region, _, _ in known):
            stream = self.host
        elif stream is not self.compute and len(known) < len(found):
            self.races.append(f"{what} on {stream.name} touches memory that is no buffer of the engine")
        elif stream is self.compute and any(region.on_host for region, _, _ in known):
            self.races.append(f"{what} takes host memory to the card outside a lane")
        stream.wait_event(self.host.knows)
        stream.knows[stream.name] += 1
        for region, tensor, written in known:
            self._check(region, tensor, written, stream, what)

    def _freed(self, address: int, region: Region) -> None:
        if self.regions.get(address) is region:
            del self.regions[address]
        owner = self.host if region.on_host else self.compute  # whose next allocation may take the memory
        for accesses in region.seen.values():
            for (name, _), (count, what) in accesses.items():
                if count > owner.knows.get(name, 0):
                    place = "host" if region.on_host else "card"
                    self.races.append(f"memory of the {place} is free before {what} on {name} has finished")

    def _check(self, region: Region, tensor: Tensor, written: bool, stream: Stream, what: str) -> None:
        start = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = start + reach * tensor.element_size()
        for (other_start, other_end), accesses in region.seen.items():
            if other_start < end and start < other_end:
                for (name, other_written), (count, other_what) in accesses.items():
                    if (written or other_written) and count > stream.knows.get(name, 0):
                        place = "host" if region.on_host else "card"
                        self.races.append(
                            f"{what} on {stream.name} {'writes' if written else 'reads'} memory of the {place} that "
                            f"{other_what} on {name} {'writes' if other_written else 'reads'}; nothing orders them"
                        )
        region.seen.setdefault((start, end), {})[stream.name, written] = (stream.knows[stream.name], what)
