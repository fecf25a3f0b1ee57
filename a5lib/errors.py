"""The one exception that means "the input is wrong, and here is what to do".

The command line prints a `UserError` as one sentence and exits with code 2, and a notebook shows that sentence alone;
everything else is a fault of ours and keeps its traceback.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """Bad input: one sentence that says what was wrong, what was expected and what to do.

    Args:
        sentence: that; it is brought to one line.
        quoted: lines of a log that are shown below it.

    >>> print(UserError("The worker ended; its log:", ["out of", "memory"]))
    The worker ended; its log:
        out of
        memory
    """

    def __init__(self, sentence: str, quoted: Sequence[str] = ()) -> None:
        super().__init__("\n    ".join([" ".join(sentence.split()), *quoted]))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [str(self)]
