"""The bug zoo: plausible faults in each exercise, which the checks must find and name. One file an exercise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault planted by replacing `old`, which occurs once in the reference's file, by `new`.

    `words` must occur in the message of a check that fails: they name the fault.
    """

    name: str
    old: str
    new: str
    words: str
