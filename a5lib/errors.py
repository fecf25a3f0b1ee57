"""The one exception that means "the input is wrong, and here is what to do".

The command line prints a `UserError` as one sentence and exits with code 2, and a notebook shows that sentence alone;
everything else is a fault of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input: one sentence that says what was wrong, what was expected and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [str(self)]
