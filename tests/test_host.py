"""Memory of the host, refused pins, and the order of copies and work: simulated streams find a missing wait."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM

from a5lib.course import load_algo
from a5lib.engines import hidden, host
from a5lib.engines.host import PAGE, HostMemory, Lane, Lanes, SharedWeights
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.plan import Plan
from a5lib.engines.trip import Trip
from a5lib.rollouts.weight_channel import WeightChannel, lay_out
from tests.engine_tools import CPU, config, everything, layer_major, ragged_batch, same_bits
from tests.helpers import tiny_olmo2
from tests.streams import Streams

LAYERS = frozenset({f"layer {i}" for i in range(5)})


# --- memory


class Pinning(HostMemory):
    """Host memory that asks for pins also where there is no card."""

    def __init__(self, device: torch.device, shared: SharedWeights | None = None) -> None:
        super().__init__(device, shared)
        self.pins = True


def test_a_buffer_has_the_size_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    unpinned: list[Tensor] = []
    monkeypatch.setattr(host, "pin", lambda buffer: pinned.append(buffer) is None)
    monkeypatch.setattr(host, "_unpin", lambda buffers, device: unpinned.extend(buffers))
    memory = Pinning(CPU)
    for numel, dtype, pages in (
        (1, torch.bfloat16, 1),
        (PAGE // 4, torch.float32, 1),
        (PAGE // 4 + 1, torch.float32, 2),
    ):
        buffer = memory.empty(numel, dtype)
        assert (buffer.shape, buffer.dtype) == ((numel,), dtype)
        assert pinned[-1].numel() == pages * PAGE, "torch's own allocator would round up to a power of two"
        assert buffer.data_ptr() % PAGE == 0
        assert pinned[-1].data_ptr() == buffer.data_ptr()
    assert memory.refused == 0
    del memory
    gc.collect()
    assert [b.data_ptr() for b in unpinned] == [b.data_ptr() for b in pinned], "pins are given back"


def test_an_empty_buffer_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "pin", lambda buffer: False)
    with pytest.warns(UserWarning):
        assert Pinning(CPU).empty(0, torch.float32).shape == (0,)
    assert HostMemory(CPU).empty(0, torch.float32).shape == (0,)


def test_a_refused_pin_falls_back_to_plain_memory_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True, False])
    monkeypatch.setattr(host, "pin", lambda buffer: next(answers))
    monkeypatch.setattr(host, "_unpin", lambda buffers, device: None)
    memory = Pinning(CPU)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            memory.empty(PAGE, torch.uint8).fill_(1)
    assert memory.refused == 2 * PAGE
    assert len(said) == 1
    assert "refused to pin" in str(said[0].message) and "copies" in str(said[0].message), "say what it costs"


def test_training_goes_on_in_plain_memory_where_every_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_olmo2()
    batch = ragged_batch(model)
    plain = layer_major(model, config())
    monkeypatch.setattr("a5lib.engines.layer_major.HostMemory", Pinning)
    monkeypatch.setattr(host, "pin", lambda buffer: False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        refused = layer_major(model, config())
        for engine in (plain, refused):
            engine.accumulate(batch)
            engine.step(1e-3)
    assert [str(w.message).split(";")[0] for w in said] == ["The system refused to pin 0.00 GiB of host memory"]
    assert same_bits(everything(plain), everything(refused))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_another_process_reads_lie_where_it_reads_them(tied: bool) -> None:
    model = tiny_olmo2(tied=tied)
    batch = ragged_batch(model)
    channel = WeightChannel(lay_out(model.named_parameters()))
    plan: dict[str, Any] = {"longest": 16, "microbatch_tokens": 24, "head_block": 5, "bucket": 5000}
    plan["resident"] = frozenset({"layer 1"})
    plain = layer_major(model, config(), **plan)
    algo = load_algo("solutions")
    shared = LayerMajorEngine(copy.deepcopy(model), config(), algo, Plan(**plan), CPU, channel)
    for engine in (plain, shared):
        engine.accumulate(batch)
        engine.step(1e-3)
    assert same_bits(everything(plain), everything(shared))
    lives = [name for name, _ in model.named_parameters() if ".layers.1." in name]

    def away() -> list[str]:
        return [name for name, w in shared.weights() if w.data_ptr() != channel.tensors[name].data_ptr()]

    assert away() == lives
    shared.release()
    assert not away(), "what lives on the card waits there"
    assert all(torch.equal(channel.tensors[name], w) for name, w in plain.weights())
    waiting = {key: place.data_ptr() for key, place in shared.waiting.items()}
    for engine in (plain, shared):
        engine.accumulate(batch)
        engine.step(1e-3)
    assert away() == lives
    shared.release()
    assert {key: place.data_ptr() for key, place in shared.waiting.items()} == waiting, "the same memory every time"
    assert all(torch.equal(channel.tensors[name], w) for name, w in plain.weights())
    assert same_bits(everything(plain), everything(shared))


def test_the_memory_that_another_process_reads_is_pinned_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    unpinned: list[Tensor] = []
    monkeypatch.setattr(host, "pin", lambda buffer: pinned.append(buffer) is None)
    monkeypatch.setattr(host, "_unpin", lambda buffers, device: unpinned.extend(buffers))
    gap = [("a", torch.zeros(16)), ("b", torch.zeros(3)), ("c", torch.zeros(16))]
    channel = WeightChannel(lay_out(gap))
    memory = HostMemory(torch.device("cuda"), channel)
    assert [b.data_ptr() for b in pinned] == [channel.buffer.data_ptr()] and channel.buffer.data_ptr() % PAGE == 0
    place = memory.weights(["a", "b"], 19, torch.float32)
    assert (place.data_ptr(), place.shape, place.dtype) == (channel.tensors["a"].data_ptr(), (19,), torch.float32)
    for names, numel in ((["b", "c"], 19), (["b", "a"], 19), (["a", "x"], 20), ([], 0)):  # a gap, other order, unknown
        assert memory.weights(names, numel, torch.float32).shape == (numel,)
    assert len(pinned) == 5, "memory of its own, pinned as any other"
    del memory
    gc.collect()
    assert len(unpinned) == 5, "pins are given back"


def test_a_pin_is_asked_of_the_driver_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("pin", address))
            assert (size, flags) == (PAGE, 0)
            return 0 if len(calls) == 1 else 2  # cudaErrorMemoryAllocation

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unpin", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    memory = Pinning(CPU)
    pinned = memory.empty(8, torch.float32)
    with pytest.warns(UserWarning, match="refused to pin"):
        refused = memory.empty(8, torch.float32)
    del memory
    gc.collect()
    assert calls == [("pin", pinned.data_ptr()), ("pin", refused.data_ptr()), ("unpin", pinned.data_ptr())]
    assert (pinned.fill_(1).sum(), refused.fill_(1).sum()) == (8, 8), "the memory outlives its pin"


def test_the_error_that_a_refused_pin_leaves_behind_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports a refusal once more, at the next kernel; that must not be one of the engine's."""
    left = ["CUDA error: out of memory"]
    zeros = torch.zeros

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise RuntimeError(left.pop())
        return zeros(*args, **kwargs)

    monkeypatch.setattr(host, "pin", lambda buffer: False)
    monkeypatch.setattr(host, "_unpin", lambda buffers, device: None)
    monkeypatch.setattr(torch, "zeros", kernel)
    with pytest.warns(UserWarning, match="refused to pin"):
        Pinning(CPU).empty(8, torch.float32)
    assert not left


def test_pins_are_given_back_when_no_copy_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Driver:
        def cudaHostUnregister(self, address: int) -> int:
            calls.append("unpin")
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    host._unpin([torch.zeros(1)], torch.device("cuda", 0))
    assert calls == ["wait", "unpin"]


# --- lanes


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    lanes = Lanes(CPU)
    target = torch.zeros(3)
    with lanes.inward.after(lanes.now(), lanes.outward.mark()):
        target.copy_(torch.ones(3), non_blocking=True)
    assert lanes.inward.mark() is None and lanes.now() is None
    lanes.wait(lanes.inward.mark())
    lanes.join()
    assert target.tolist() == [1, 1, 1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_the_simulated_streams_see_a_missing_wait_and_accept_one_that_is_there(streams: Streams) -> None:
    lanes = streams.lanes
    there, here = streams.note(torch.zeros(4), on_host=True), streams.note(torch.zeros(4), on_host=False)
    lanes.join()  # the new buffers
    with streams:
        with lanes.inward.after():
            here.copy_(there)
        lanes.wait(lanes.inward.mark())
        here.mul_(2)
        assert streams.races == []
        with lanes.outward.after(lanes.now()):
            there.copy_(here)
        here.add_(1)
    (race,) = streams.races
    assert race.startswith("aten.add_.Tensor on compute writes memory of the card that aten.copy_.default on outward")


def test_the_simulated_streams_see_memory_that_is_freed_too_early(streams: Streams) -> None:
    there, here = streams.note(torch.zeros(4), on_host=True), streams.note(torch.zeros(4), on_host=False)
    streams.lanes.join()
    with streams:
        with streams.lanes.outward.after(streams.lanes.now()):
            there.copy_(here)
        del here
    assert len(streams.races) == 1 and "memory of the card is free before" in streams.races[0]


def test_a_join_orders_both_lanes_and_the_work_after_each_other(streams: Streams) -> None:
    lanes = streams.lanes
    for lane in (lanes.inward, lanes.outward):
        with streams, lane.after():
            pass
    issued: list[Any] = [lanes.inward.stream, lanes.outward.stream, streams.compute]
    for stream in issued:
        stream.knows[stream.name] += 1
    lanes.join()
    for stream in issued:
        assert all(stream.knows[other.name] == 1 for other in issued), stream.name


PLANS = {
    "nothing stays": {"microbatch_tokens": 8},
    "two microbatches stay": {"kept": 2, "kept_when_scoring": 3},
    "all microbatches stay": {"kept": 9, "kept_when_scoring": 9},
    "two layers and the embedding stay": {"resident": frozenset({"layer 1", "layer 2", "embedding"}), "kept": 2},
    "the layers stay": {"resident": LAYERS, "card_levels": 1},
    "everything stays": {"resident": LAYERS | {"embedding", "head"}},
}


def run_everything(engine: LayerMajorEngine) -> None:
    """Updates of every kind one after another, without a wait between them that the engine does not make itself."""
    batch = ragged_batch()
    engine.score(batch)
    engine.accumulate(batch)
    engine.step(1e-3)
    engine.accumulate({**batch, "advantages": torch.zeros(8)})
    engine.step(1e-3)
    engine.accumulate(batch)
    engine.step(1e-3)
    saved = {group: {name: t.clone() for name, t in named.items()} for group, named in engine.tensors().items()}
    engine.release()
    engine.score(batch)
    engine.accumulate(batch)
    engine.step(1e-3)
    engine.load_tensors(saved)


def small_engine(tied: bool = False, algorithm: str = "offpolicy_clip", **plan: Any) -> LayerMajorEngine:
    """Five narrow layers, so that the room of a visiting layer is used again."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Olmo2ForCausalLM(
            Olmo2Config(vocab_size=260, hidden_size=8, intermediate_size=12, num_hidden_layers=5, pad_token_id=0,
                        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied)
        )  # fmt: skip
    return layer_major(model.eval(), config(algorithm), **{"bucket": 900, **plan})


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_copy_and_every_use_of_a_buffer_is_ordered(
    plan: dict[str, Any], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(**plan)
    streams.watch(engine, monkeypatch)
    with streams:
        run_everything(engine)
    assert not streams.races, "\n".join(sorted(set(streams.races)))


@pytest.mark.parametrize("home", [set(), {"embedding"}, {"head"}], ids=["host", "embedding", "head"])
def test_the_order_also_holds_with_a_tied_head_and_a_derivative_known_beforehand(
    home: set[str], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tied=True, algorithm="grpo", kept=2, resident=frozenset(home))
    streams.watch(engine, monkeypatch)
    with streams:
        run_everything(engine)
    assert not streams.races, "\n".join(sorted(set(streams.races)))


def no_wait(*args: Any, **kwargs: Any) -> None:
    """Stands where a wait has been taken out."""


def after_without_events(lane: Lane, *events: Any) -> Any:
    return torch.cuda.stream(lane.stream)


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Lanes, "wait", no_wait),
        (Lanes, "join", no_wait),
        (Lane, "after", after_without_events),
        (hidden.HiddenStates, "use", lambda self, visitor: visitor.tensor),
        (hidden.HiddenStates, "done", no_wait),
    ],
    ids=["wait", "join", "after", "use", "done"],
)
def test_a_wait_that_is_taken_out_is_found(
    owner: Any, name: str, replacement: Any, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(kept=2)
    streams.watch(engine, monkeypatch)
    monkeypatch.setattr(owner, name, replacement)
    with streams:
        run_everything(engine)
    assert streams.races, f"without {name} a card would sometimes read what is not there yet"


@pytest.mark.parametrize(("size", "enough"), [(hidden.RING, True), (4, False)])
def test_no_slot_of_the_ring_is_filled_before_its_use(size: int, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going down, two hidden states of a microbatch and two of the next are on the card, and one is on its way out."""
    in_use: set[int] = set()
    overwritten = []
    take, send_for, done = hidden.HiddenStates._next, hidden.HiddenStates.input, hidden.HiddenStates.done

    def taken(states: Any) -> Any:
        slot = take(states)
        overwritten.extend([slot] if id(slot) in in_use else [])
        return slot

    def sent_for(states: Any, level: int, m: int) -> Any:
        visitor = send_for(states, level, m)
        in_use.add(id(visitor.slot))
        return visitor

    def used(states: Any, *visitors: Any) -> None:
        in_use.difference_update(id(visitor.slot) for visitor in visitors)
        done(states, *visitors)

    monkeypatch.setattr(hidden.HiddenStates, "_next", taken)
    monkeypatch.setattr(hidden.HiddenStates, "input", sent_for)
    monkeypatch.setattr(hidden.HiddenStates, "done", used)
    monkeypatch.setattr(hidden, "RING", size)
    engine = layer_major(tiny_olmo2(), config(), microbatch_tokens=8)
    engine.score(ragged_batch())
    engine.accumulate(ragged_batch())
    assert bool(overwritten) != enough


def test_a_fault_in_the_middle_leaves_nothing_in_flight(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(kept=2)
    streams.watch(engine, monkeypatch)
    batch = ragged_batch()

    def interrupted(trip: Trip) -> None:
        for i in trip.visiting(range(trip.depth - 1, -1, -1), with_gradient=True):
            trip.finish(trip.parts.layers[i], trip.slots[0].grad)
            raise KeyboardInterrupt

    with streams:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Trip, "down", interrupted)
            engine.accumulate(batch)
        gc.collect()
        engine.accumulate(batch)
        engine.step(1e-3)
    assert not streams.races, "\n".join(sorted(set(streams.races)))
