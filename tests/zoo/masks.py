"""Faults in masks.py."""

from tests.zoo import Fault

FAULTS = [
    Fault(
        "mask not shifted",
        old='"response_mask": mask[:, 1:]}',
        new='"response_mask": mask[:, :-1]}',
        words="not shifted",
    ),
]
