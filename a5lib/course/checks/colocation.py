"""Checks of `colocation.py`."""
