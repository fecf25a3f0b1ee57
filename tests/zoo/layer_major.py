"""Faults in layer_major.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
