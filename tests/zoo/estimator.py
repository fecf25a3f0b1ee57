"""Faults in estimator.py."""

from tests.zoo import Fault

FAULTS: list[Fault] = []
