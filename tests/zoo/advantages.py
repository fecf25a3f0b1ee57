"""Faults in advantages.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
