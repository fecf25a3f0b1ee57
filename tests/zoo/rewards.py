"""Faults in rewards.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
