"""Stubs out of solutions: the marked regions, and the text of one function with its region left to write.

This file knows text. It does not know which files there are or whose code runs.
"""

from __future__ import annotations

import ast
import json

from a5lib.errors import UserError

BEGIN, END = "### BEGIN YOUR CODE", "### END YOUR CODE"


def blank(text: str) -> str:
    """A solution's text with every marked region replaced by a stub that says what to do.

    A region lies between the lines `### BEGIN YOUR CODE: what to do` and `### END YOUR CODE`, which stay; the words
    after the colon become the stub's message. Blanking a blanked text changes nothing, so a student's file and the
    reference give the same text as long as nothing outside the regions was changed.

    Raises:
        UserError: a region within a region, one that does not end, or an end without a beginning, with the line number.

    >>> print(blank('def f():\\n    ### BEGIN YOUR CODE: return 1\\n    return 1\\n    ### END YOUR CODE'))
    def f():
        ### BEGIN YOUR CODE: return 1
        raise NotImplementedError("return 1")
        ### END YOUR CODE
    """
    lines: list[str] = []
    began: int | None = None
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        words = line.strip()
        if words.startswith(BEGIN):
            if began is not None:
                raise UserError(
                    f"Line {number} begins a region inside the one of line {began}; end that with `{END}` first."
                )
            began = number
            what = words.removeprefix(BEGIN).strip(" :") or "write this region; the text above it says what it does"
            indent = line[: len(line) - len(line.lstrip())]
            lines += [line, f"{indent}raise NotImplementedError({json.dumps(what, ensure_ascii=False)})\n"]
        elif words.startswith(END):
            if began is None:
                raise UserError(f"Line {number} ends a region that does not begin; put `{BEGIN}` before it.")
            began = None
            lines.append(line)
        elif began is None:
            lines.append(line)
    if began is not None:
        raise UserError(f"The region of line {began} does not end; put `{END}` after it.")
    return "".join(lines)


def function_text(text: str, name: str) -> str:
    """The lines of one top-level function of a file, comments and markers included.

    >>> print(function_text('x = 1\\n\\ndef f():\\n    # one\\n    return 1\\n', 'f'))
    def f():
        # one
        return 1
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(
            f"Line {error.lineno} of the file, outside the marked regions, is not Python ({error.msg})."
        ) from error
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not nodes:
        raise UserError(f"The file has no function {name}; `a5 course diff` shows what changed.")
    lines = text.splitlines()
    start, end = nodes[0].lineno - 1, nodes[0].end_lineno or len(lines)
    while end < len(lines) and (lines[end].startswith((" ", "\t")) or not lines[end].strip()):
        end += 1  # the last marker is a comment, which the syntax tree leaves out
    return "\n".join(lines[start:end]).rstrip()


def region_text(text: str, name: str) -> str:
    """What lies between the markers of one function."""
    lines = function_text(text, name).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(BEGIN))
    end = next(i for i, line in enumerate(lines) if line.strip().startswith(END))
    return "\n".join(lines[begin + 1 : end])
