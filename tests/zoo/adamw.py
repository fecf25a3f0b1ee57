"""Faults in adamw.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
