"""Checks of `layer_major.py`."""
