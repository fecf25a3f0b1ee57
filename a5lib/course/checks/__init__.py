"""The checks of each exercise, one file an exercise. Expected values are worked out by hand, never by the reference."""
