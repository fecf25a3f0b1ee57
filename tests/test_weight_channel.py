"""The weight channel and its checksums, against plain Python arithmetic on the same bytes."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import struct
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from a5lib.errors import UserError
from a5lib.rollouts import checksums as module
from a5lib.rollouts.checksums import Held, checksum, checksums, differences
from a5lib.rollouts.weight_channel import Slot, WeightChannel, attach, attach_to_read, channel_size, lay_out, views
from tests.vllm_tools import held, weights


@pytest.fixture
def channel():
    channel = WeightChannel(lay_out(weights().items()))
    yield channel
    channel.close()


def by_hand(data, level=0):
    """The checksum of some bytes in Python's whole numbers, word by word."""
    data += bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(data) // 4}i", data)
    random = hashlib.shake_256(f"a5lib weight checksum, level {level}".encode()).digest(8 * 4096)
    keys = [key | 1 for key in struct.unpack("<4096q", random)]
    sums = [
        sum(key * word for key, word in zip(keys, words[start : start + 4096], strict=False)) % 2**64
        for start in range(0, len(words), 4096)
    ]
    if len(sums) > 1:
        return by_hand(b"".join(struct.pack("<Q", value) for value in sums), level + 1)
    return sums[0] - 2**64 if sums[0] >= 2**63 else sums[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 4096, 4 * 4096, 4 * 4096 + 1, 4 * 4096 * 2048 + 4])
def test_the_checksum_is_that_of_whole_numbers(size):
    """From one word to more blocks than one block of sums takes in, which is a third level."""
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    assert int(checksum(data)) == by_hand(bytes(data.tolist()))


def test_the_checksum_does_not_depend_on_the_parts_it_is_computed_in(monkeypatch):
    data = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    expected = int(checksum(data))
    monkeypatch.setattr(module, "CPU_PART", 2 * module.BLOCK)
    assert int(checksum(data)) == expected


def test_bytes_count_and_not_how_a_tensor_lies():
    data = torch.arange(60, dtype=torch.bfloat16).view(6, 10)
    shifted = torch.empty(61, dtype=torch.bfloat16)[1:].view(6, 10).copy_(data)  # begins in the middle of a word
    transposed = data.t().contiguous().t()
    assert int(checksum(data)) == int(checksum(shifted)) == int(checksum(transposed)) == int(checksum(data.view(-1)))
    assert int(checksum(data)) != int(checksum(data.t()))
    assert int(checksum(torch.tensor(1.5))) == int(checksum(torch.tensor([1.5])))
    assert int(checksum(torch.empty(0))) == 0


def test_any_single_bit_shows():
    data = torch.randn(3 * 4096, generator=torch.Generator().manual_seed(0))
    expected = int(checksum(data))
    words = data.view(torch.int32)
    for place in (0, 1, 4095, 4096, 3 * 4096 - 1):
        for bit in range(32):
            flip = -(2**31) if bit == 31 else 1 << bit
            words[place] ^= flip
            assert int(checksum(data)) != expected, f"bit {bit} of word {place}"
            words[place] ^= flip
    assert int(checksum(data)) == expected


def test_places_show_even_where_only_signs_differ():
    """The worst case of the bound: every difference is the highest bit of a word."""
    data = torch.ones(4096 * 3)
    seen = {int(checksum(data))}
    for i in range(0, 2000, 2):
        signs = data.clone()
        signs[[i, i + 1]] = -1  # two words, so that odd keys alone would not do
        seen.add(int(checksum(signs)))
    assert len(seen) == 1001
    a, b = torch.zeros(2, 4096), torch.zeros(2, 4096)
    a[0] = b[1] = 1.0
    assert int(checksum(a)) != int(checksum(b)), "two blocks changed places"


def test_differences_names_everything_that_is_wrong():
    slots = [Slot("a", (2,), "float32", 0), Slot("b", (2, 2), "bfloat16", 64)]
    sent = {"a": 1, "b": 2}
    right = [Held("a", (2,), "float32", 1, "a"), Held("b", (2, 2), "bfloat16", 2, "ab[2:4]")]
    assert differences(slots, sent, right) == []
    assert differences(slots, sent, [*right, right[0]]) == [], "held twice, and both are right"
    assert differences(slots, sent, []) == ["a is missing", "b is missing"]
    assert differences(slots, sent, [*right, Held("a", (2,), "float32", 9, "head")]) == [
        "a has other values (held as head)"
    ]
    wrong = [right[0]._replace(shape=(1, 2)), right[1]._replace(dtype="float32"), right[0]._replace(name="c")]
    assert differences(slots, sent, wrong) == [
        "a is float32 [1, 2] and should be float32 [2]",
        "b is float32 [2, 2] and should be bfloat16 [2, 2] (held as ab[2:4])",
        "c was not sent (held as a)",
    ]


def test_slots_are_aligned_and_do_not_overlap():
    tensors = [("a", torch.zeros(33, dtype=torch.uint8)), ("b", torch.zeros(())), ("c", torch.zeros(5, 7).bfloat16())]
    slots = lay_out(tensors)
    assert slots == [Slot("a", (33,), "uint8", 0), Slot("b", (), "float32", 64), Slot("c", (5, 7), "bfloat16", 128)]
    assert channel_size(slots) == 128 + 70
    buffer = torch.zeros(channel_size(slots), dtype=torch.uint8)
    parts = views(slots, buffer)
    parts["b"].fill_(1.0)
    assert buffer.nonzero().flatten().tolist() == [66, 67], "1.0 is 0x3f800000, and the view is the buffer's memory"
    assert (parts["c"].dtype, parts["c"].shape) == (torch.bfloat16, (5, 7))


def test_what_is_written_is_there_for_whoever_maps_the_memory(channel):
    sent = channel.write(weights(3).items())
    there = views(channel.slots, attach(channel.descriptor))
    assert there.keys() == weights(3).keys()
    assert all(torch.equal(there[name], weight) for name, weight in weights(3).items())
    assert sent == checksums(there.items())


class Copies(TorchDispatchMode):
    """Counts copies from tensor to tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.copy_.default
        return function(*args, **(kwargs or {}))


def test_what_lies_in_the_channel_is_not_copied(channel):
    outside = weights()
    with Copies() as copies:
        channel.write(outside.items())
    assert copies.count == len(outside)
    mixed = {**channel.tensors, "model.norm.weight": outside["model.norm.weight"]}
    with Copies() as copies:
        channel.write(mixed.items())
    assert copies.count == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, r"The given weights lack model\.norm\.weight\.$"),
        ({"new": torch.zeros(1)}, "The channel has no tensor new"),
        ({"model.norm.weight": torch.zeros(9)}, r"model.norm.weight is torch.float32 \[9\]; the channel was laid out"),
        ({"model.norm.weight": torch.zeros(8).half()}, "laid out for torch.float32"),
    ],
)
def test_other_weights_than_it_was_laid_out_for_are_refused(channel, change, words):
    given = {name: weight for name, weight in {**weights(), **change}.items() if weight is not None}
    with pytest.raises(ValueError, match=words):
        channel.write(given.items())
    with pytest.raises(ValueError, match="given twice"):
        channel.write([*weights().items(), *weights().items()])


def test_the_memory_is_anonymous_and_its_owners_alone_and_goes():
    before = held()
    channel = WeightChannel(lay_out(weights().items()))
    assert os.fstat(channel.descriptor).st_mode & 0o777 == 0o600
    assert os.readlink(f"/proc/self/fd/{channel.descriptor}") == "/memfd:a5lib-weights (deleted)"
    assert not os.get_inheritable(channel.descriptor), "only the worker is to have it"
    assert held()["mappings"] == before["mappings"] + 1
    channel.close()
    channel.close()
    assert held() == before


def test_a_tensor_of_the_channel_stays_good_after_it_is_closed():
    """An engine that keeps its weights there goes on with them."""
    channel = WeightChannel(lay_out(weights().items()))
    norm = channel.tensors["model.norm.weight"].fill_(2.0)
    channel.close()
    assert norm.sum() == 16


def test_a_channel_that_is_forgotten_is_closed():
    before = held()
    channel = WeightChannel(lay_out(weights().items()))
    assert held() != before
    del channel
    gc.collect()
    assert held() == before


def test_without_anonymous_files_it_is_one_that_has_lost_its_name(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    before = held()
    channel = WeightChannel(lay_out(weights().items()))
    link = os.readlink(f"/proc/self/fd/{channel.descriptor}")
    assert link.startswith("/dev/shm/a5lib-weights-") and link.endswith("(deleted)")
    assert os.fstat(channel.descriptor).st_mode & 0o777 == 0o600
    assert held()["/dev/shm"] == 0
    channel.write(weights().items())
    channel.close()
    assert held() == before


def big(size):
    return [Slot("model.embed_tokens.weight", (size,), "uint8", 0)]


def test_V17_more_than_is_available_is_refused_before_anything_is_taken(monkeypatch):
    monkeypatch.setattr("a5lib.machine.host_memory", lambda: (64 * 2**20, 2**30))
    before = held()
    with pytest.raises(UserError, match=r"needs 2\.77 GiB .* only 0\.06 GiB are available"):
        WeightChannel(big(2_969_833_472))
    assert held() == before


def test_V17_a_system_that_refuses_the_memory(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = held()
    with pytest.raises(UserError, match=r"needs 0\.50 GiB of memory .* \(No space left on device; .* GiB are free\)"):
        WeightChannel(big(2**29))
    assert held() == before


def test_V17_a_full_dev_shm_is_seen_at_once_and_not_as_a_bus_error(monkeypatch):
    """Really refused by the system: more than /dev/shm can ever hold."""
    stat = os.statvfs("/dev/shm")
    monkeypatch.setattr("a5lib.machine.host_memory", lambda: (2**50, 2**50))
    monkeypatch.delattr(os, "memfd_create")
    before = held()
    with pytest.raises(UserError, match=r"GiB of /dev/shm .*No space left on device.*docker run --shm-size"):
        WeightChannel(big(stat.f_blocks * stat.f_frsize + 2**30))
    assert held() == before


@pytest.mark.parametrize("fault", [0, 801])
def test_the_worker_reads_pinned_memory_and_a_refused_pin_is_said_and_goes_on(channel, fault, monkeypatch, capsys):
    asked = []
    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: asked.append(size) or fault)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    made = torch.zeros

    def zeros(*size, device=None):
        assert fault and device == "cuda", "only to let CUDA raise its last error"
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "zeros", zeros)
    buffer = attach_to_read(channel.descriptor)
    monkeypatch.setattr(torch, "zeros", made)
    assert asked == [channel_size(channel.slots)]
    assert ("could not be pinned (CUDA error 801)" in capsys.readouterr().out) == (fault == 801)
    channel.write(weights().items())
    assert torch.equal(buffer, channel.buffer), "it sees what is written elsewhere"
