"""Checks of `rewards.py`."""
