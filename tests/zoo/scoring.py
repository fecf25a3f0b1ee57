"""Faults in scoring.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
