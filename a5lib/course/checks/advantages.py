"""Checks of `advantages.py`."""
