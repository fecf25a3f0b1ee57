"""Faults in colocation.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
