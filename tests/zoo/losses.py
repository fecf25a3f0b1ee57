"""Faults in losses.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
