"""The one exception that means "the input is wrong, and here is what to do".

The command line prints a `UserError` as one sentence and exits with code 2; everything else is a fault of ours and
keeps its traceback.
"""


class UserError(ValueError):
    """Bad input: one sentence that says what was wrong, what was expected and what to do."""
