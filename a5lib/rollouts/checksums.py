"""Checksums of weights: whether two processes hold the same bytes under the same names.

Trainer and worker run this very code, on the CPU or on a card, and get the same numbers. It needs torch and the
standard library alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from a5lib.rollouts.weight_channel import Slot

BLOCK = 4096  # words that one sum takes in
CPU_PART, CARD_PART = 2**16, 2**22  # words worked on at a time: by a thread, so that products stay in its cache


class Held(NamedTuple):
    """A tensor as the engine holds it, under the trainer's name.

    `held_as` says where: the engine's own name, and the rows where it is packed with others
    ("layers.0.qkv_proj.weight[0:64]"). A tensor that the engine holds twice, such as a tied head, has two of these.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int
    held_as: str


def as_held(rows: Iterable[Sequence[Any]]) -> list[Held]:
    """What an engine holds, as it comes in JSON.

    Raises:
        TypeError, ValueError: that is of another form.
    """
    return [Held(name, tuple(shape), dtype, int(value), where) for name, shape, dtype, value, where in rows]


def checksum(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A 64-bit number that depends on every byte of a tensor and on its place. Taught in notebook 10.

    The bytes are read as 32-bit words w. Each block of 4,096 words becomes the sum of key[i] * w[i] modulo 2**64, with
    fixed odd 64-bit keys; the sums of all blocks are hashed in the same way with other keys, until one is left. This is
    multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, arXiv:1202.4961) in a tree
    (Carter and Wegman, 1979). If the keys are random, two different tensors of one size have the same checksum with a
    probability of at most 2**-32 a level, and there are at most three levels below 64 GiB. That bound is for the worst
    case, in which only the signs differ; where lower bits differ too, as after an update, it is near 2**-63. A single
    word that differs always shows. The keys are public: this finds faults, not forgeries.

    Args:
        tensor: of any shape and dtype, on the CPU or on a card.
        device: where to compute (None: where the tensor lies). It needs some 50 MB on a card.

    Returns:
        int64 [] on that device; nothing has waited for the card.

    >>> weight = torch.tensor([1.0, 2.0])
    >>> checksum(weight) == checksum(weight.clone()), checksum(weight) == checksum(weight.flip(0))
    (tensor(True), tensor(False))
    """
    device = tensor.device if device is None else device
    words = _words(tensor.detach())
    level = 0
    while True:
        keys = _keys(level, device)
        part_size = CPU_PART * torch.get_num_threads() if device.type == "cpu" else CARD_PART
        sums = []
        for part in words.split(part_size):
            part = part.to(device, non_blocking=True)
            if len(part) % BLOCK:
                part = torch.cat([part, part.new_zeros(-len(part) % BLOCK)])
            sums.append((part.view(-1, BLOCK) * keys).sum(1))  # int64, and products and sums wrap
        if len(sums) == 1 and len(sums[0]) <= 1:
            return sums[0].sum()
        words, level = torch.cat(sums).view(torch.int32), level + 1


def checksums(tensors: Iterable[tuple[str, Tensor]], device: torch.device | None = None) -> dict[str, int]:
    """The checksum of each tensor by name; the host waits for a card only after the last one."""
    sums = {name: checksum(tensor, device) for name, tensor in tensors}
    return {name: int(value) for name, value in sums.items()}


def differences(slots: Sequence[Slot], sent: Mapping[str, int], held: Sequence[Held]) -> list[str]:
    """Every way in which what the engine holds is not what was sent, one clause each; empty where all is well.

    Args:
        slots: names, shapes and dtypes that were sent.
        sent: their checksums.
        held: what the engine holds.

    >>> from a5lib.rollouts.weight_channel import Slot
    >>> differences([Slot("norm", (8,), "float32", 0)], {"norm": 5}, [Held("norm", (8,), "float32", 6, "final_norm")])
    ['norm has other values (held as final_norm)']
    """
    wanted = {slot.name: slot for slot in slots}
    found = {row.name for row in held}
    faults = [f"{name} is missing" for name in wanted if name not in found]
    for row in held:
        slot = wanted.get(row.name)
        where = "" if row.held_as == row.name else f" (held as {row.held_as})"
        if slot is None:
            faults.append(f"{row.name} was not sent{where}")
        elif (tuple(row.shape), row.dtype) != (slot.shape, slot.dtype):
            has, wants = f"{row.dtype} {list(row.shape)}", f"{slot.dtype} {list(slot.shape)}"
            faults.append(f"{row.name} is {has} and should be {wants}{where}")
        elif row.checksum != sent[row.name]:
            faults.append(f"{row.name} has other values{where}")
    return faults


def in_words(faults: Sequence[str]) -> str:
    """The first three of `differences`, and how many more there are.

    >>> in_words(["a is missing", "b is missing", "c is missing", "d is missing"])
    'a is missing; b is missing; c is missing; and 1 more'
    """
    return "; ".join([*faults[:3], *([f"and {len(faults) - 3} more"] if len(faults) > 3 else [])])


def and_others(names: Sequence[str]) -> str:
    """The first of some names, and how many others there are.

    >>> and_others(["a"]), and_others(["a", "b"]), and_others(["a", "b", "c"])
    ('a', 'a and 1 other', 'a and 2 others')
    """
    others = len(names) - 1
    return names[0] + (f" and {others} other{'s' * (others > 1)}" if others else "")


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int32 words, filled up with zeros; a view of it where its place and size allow."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4 or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
    return flat.view(torch.int32)


@functools.cache
def _keys(level: int, device: torch.device) -> Tensor:
    """Odd int64 keys [BLOCK] of a level: the same with every version of torch."""
    random = hashlib.shake_256(f"a5lib weight checksum, level {level}".encode()).digest(8 * BLOCK)
    return (torch.frombuffer(bytearray(random), dtype=torch.int64) | 1).to(device)
