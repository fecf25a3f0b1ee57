"""Faults in train_step.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
