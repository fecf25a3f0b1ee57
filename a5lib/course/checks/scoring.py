"""Checks of `scoring.py`."""
