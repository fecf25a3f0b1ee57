"""Checks of `adamw.py`."""
