"""Common NVIDIA cards: how much memory torch sees on them, and how fast copies between host and card can be.

Facts only, for a plan for a card that is somewhere else. What is on this machine is asked of the driver instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from a5lib.config import nearest
from a5lib.errors import UserError

SHARE = 0.975  # of the memory that a card is sold with, torch sees so much: the driver keeps the rest
COMMON_SIZES = (6, 8, 10, 12, 16, 24)  # GB

# Bytes a second that pinned copies reach, each way, by generation and width of PCIe: about 80 % of the nominal rate.
LINKS: dict[tuple[int, int], float] = {
    (5, 16): 50e9, (5, 8): 25e9, (5, 4): 12.5e9,
    (4, 16): 25e9, (4, 8): 12.5e9, (4, 4): 6.2e9,
    (3, 16): 12.5e9, (3, 8): 6.2e9, (3, 4): 3.1e9,
}  # fmt: skip
USUAL_LINK = (4, 16)


@dataclass(frozen=True)
class Card:
    """A card as it is sold.

    Args:
        name: without "NVIDIA" and "GeForce".
        gigabytes: of memory, as on the box.
        capability: compute capability; bfloat16 is fast from 8.0.
        link: generation and width of its PCIe connector.
        gib: what torch sees in GiB; None: `SHARE` of what is on the box.
    """

    name: str
    gigabytes: int
    capability: tuple[int, int]
    link: tuple[int, int]
    gib: float | None = None

    @property
    def memory(self) -> int:
        """Bytes that torch sees."""
        return int((SHARE * self.gigabytes if self.gib is None else self.gib) * 2**30)

    @property
    def full_name(self) -> str:
        """Name and memory.

        >>> find_card("rtx 4070ti").full_name
        'RTX 4070 Ti, 12 GB'
        """
        return f"{self.name}, {self.gigabytes} GB"

    @property
    def has_bfloat16(self) -> bool:
        """Whether packed attention runs on it, and engines compile."""
        return self.capability >= (8, 0)


def _family(capability: tuple[int, int], link: tuple[int, int], cards: dict[str, int | tuple[int, ...]]) -> list[Card]:
    return [
        Card(name, size, capability, link)
        for name, sizes in cards.items()
        for size in (sizes if isinstance(sizes, tuple) else (sizes,))
    ]


CARDS: tuple[Card, ...] = (
    *_family((12, 0), (5, 16), {"RTX 5090": 32, "RTX 5080": 16, "RTX 5070 Ti": 16, "RTX 5070": 12}),
    *_family((12, 0), (5, 8), {"RTX 5060 Ti": (8, 16), "RTX 5060": 8, "RTX 5050": 8, "RTX 5090 Laptop": 24,
                               "RTX 5080 Laptop": 16, "RTX 5070 Ti Laptop": 12, "RTX 5070 Laptop": 8,
                               "RTX 5060 Laptop": 8}),
    *_family((8, 9), (4, 16), {"RTX 4090": 24, "RTX 4080 Super": 16, "RTX 4080": 16, "RTX 4070 Ti Super": 16,
                               "RTX 4070 Ti": 12, "RTX 4070 Super": 12, "RTX 4070": 12}),
    *_family((8, 9), (4, 8), {"RTX 4060 Ti": (8, 16), "RTX 4060": 8, "RTX 4070 Laptop": 8, "RTX 4060 Laptop": 8,
                              "RTX 4050 Laptop": 6}),
    *_family((8, 9), (4, 16), {"RTX 4090 Laptop": 16, "RTX 4080 Laptop": 12}),
    *_family((8, 6), (4, 16), {"RTX 3090 Ti": 24, "RTX 3090": 24, "RTX 3080 Ti": 12, "RTX 3080": (10, 12),
                               "RTX 3070 Ti": 8, "RTX 3070": 8, "RTX 3060 Ti": 8, "RTX 3060": (8, 12),
                               "RTX 3080 Laptop": (8, 16), "RTX 3070 Laptop": 8, "RTX 3060 Laptop": 6}),
    *_family((8, 6), (4, 8), {"RTX 3050": (6, 8), "RTX A2000": (6, 12)}),
    *_family((8, 6), (4, 16), {"RTX A4000": 16, "RTX A5000": 24}),
    *_family((7, 5), (3, 16), {"RTX 2080 Ti": 11, "RTX 2080 Super": 8, "RTX 2080": 8, "RTX 2070 Super": 8,
                               "RTX 2070": 8, "RTX 2060": (6, 12), "Titan RTX": 24, "GTX 1660": 6}),
    *_family((6, 1), (3, 16), {"GTX 1080 Ti": 11, "GTX 1080": 8, "GTX 1070": 8, "GTX 1060": (3, 6)}),
    Card("RTX A6000", 48, (8, 6), (4, 16), 47.4),
    Card("RTX 6000 Ada", 48, (8, 9), (4, 16), 47.4),
    Card("RTX 4000 Ada", 20, (8, 9), (4, 16), 19.5),
    Card("RTX PRO 6000", 96, (12, 0), (5, 16), 94.9),
    Card("P100", 16, (6, 0), (3, 16), 15.9),
    Card("V100", 16, (7, 0), (3, 16), 15.8),
    Card("V100", 32, (7, 0), (3, 16), 31.7),
    Card("T4", 16, (7, 5), (3, 16), 14.6),
    Card("A10", 24, (8, 6), (4, 16), 22.0),
    Card("A10G", 24, (8, 6), (4, 16), 22.0),
    Card("L4", 24, (8, 9), (4, 16), 22.0),
    Card("A40", 48, (8, 6), (4, 16), 44.4),
    Card("L40S", 48, (8, 9), (4, 16), 44.4),
    Card("A100", 40, (8, 0), (4, 16), 39.4),
    Card("A100", 80, (8, 0), (4, 16), 79.1),
    Card("H100", 80, (9, 0), (5, 16), 79.1),
    Card("H200", 141, (9, 0), (5, 16), 139.8),
    Card("B200", 180, (10, 0), (5, 16), 178.0),
)  # fmt: skip


def find_card(text: str) -> Card:
    """The card that a name means: with or without maker, family and memory, such as "4060" or "3060 12GB".

    Raises:
        UserError: no such card is known, or there are several of different memory.

    >>> find_card("NVIDIA GeForce RTX 3060 12GB").gigabytes, find_card("a100-80gb").memory // 2**30
    (12, 79)
    """
    named, size = _split(text)
    found = [card for card in CARDS if _bare(card.name) == named and size in (None, card.gigabytes)]
    if len(found) == 1:
        return found[0]
    if found:
        sizes = " or ".join(f"{card.gigabytes}" for card in found)
        raise UserError(f"The {found[0].name} comes with {sizes} GB; say which, such as '{_with_size(found[-1])}'.")
    others = [card for card in CARDS if _bare(card.name) == named]
    if others:
        sizes = " or ".join(f"{card.gigabytes}" for card in others)
        raise UserError(f"There is no {others[0].name} with {size} GB; it comes with {sizes} GB.")
    guess = nearest(named, [_bare(card.name) for card in CARDS])
    name = next(card.name for card in CARDS if _bare(card.name) == guess)
    raise UserError(
        f"The card {text!r} is unknown; did you mean {name!r}? Otherwise give its memory in GiB, such as --vram 8."
    )


def is_known(text: str) -> bool:
    """Whether a text is a card's name, possibly of several cards.

    >>> is_known("4060"), is_known("8"), is_known("12GB")
    (True, False, False)
    """
    return any(_bare(card.name) == _split(text)[0] for card in CARDS)


def _split(text: str) -> tuple[str, int | None]:
    """The bare name and the gigabytes in a text, if it says them."""
    size = re.search(r"(?<![a-z0-9])(\d+)\s*gi?b?\b", text, re.IGNORECASE)
    rest = text if size is None else text[: size.start()] + text[size.end() :]
    return _bare(rest), None if size is None else int(size[1])


def _bare(name: str) -> str:
    """A name without maker, family and everything but letters and digits.

    >>> _bare("NVIDIA GeForce RTX 4070 Ti"), _bare("Tesla T4"), _bare("RTX A6000"), _bare("RTX 4060 Laptop GPU")
    ('4070ti', 't4', 'a6000', '4060laptop')
    """
    return re.sub(r"nvidia|geforce|rtx|gtx|tesla|quadro|gpu|pcie|sxm\d?|hbm\d?e?|[^a-z0-9]", "", name.lower())


def _with_size(card: Card) -> str:
    return f"{card.name} {card.gigabytes}GB"
