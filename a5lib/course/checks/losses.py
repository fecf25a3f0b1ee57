"""Checks of `losses.py`."""
