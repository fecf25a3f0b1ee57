"""Checks of `train_step.py`."""
