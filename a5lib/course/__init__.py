"""The course: exercises and their stubs, whose code runs, checks that teach, hints and progress.

What a notebook imports is here: `algo`, `show`, `check`, `hint`. The rooms below: `stubs` (marked regions), `exercises`
(whose code runs), `checking` and `checks/` (what is wrong, in words), `notebook` (what is shown); and, behind
`a5 course`, `progress`, `files` (diff, reset), `submission` and `branches`.
"""

from a5lib.course.exercises import EXERCISES, Algo, algo, is_written, load_algo
from a5lib.course.notebook import check, hint, show
from a5lib.course.stubs import blank

__all__ = ["EXERCISES", "Algo", "algo", "blank", "check", "hint", "is_written", "load_algo", "show"]
