"""Checks of `estimator.py`."""
