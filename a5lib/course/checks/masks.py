"""Checks of `masks.py`: labels, mask and padding of a batch."""

from __future__ import annotations

import torch

from a5lib.course.checking import checks, expect, expect_keys
from a5lib.course.exercises import Algo

KEYS = ("input_ids", "labels", "response_mask")


@checks("pad_and_mask")
def mask_belongs_to_the_labels(algo: Algo) -> None:
    """The mask marks the labels that are response tokens."""
    batch = algo.pad_and_mask([[3, 4]], [[8, 9]], 0)
    expect_keys("pad_and_mask(...)", batch, KEYS)
    expect(
        "response_mask",
        batch["response_mask"],
        torch.tensor([[False, True, True]]),
        given="prompt [3, 4], response [8, 9]",
        likely="The mask must be shifted by one, with the labels.",
        mistakes={"The mask was not shifted with the labels.": torch.tensor([[False, False, True]])},
    )
