"""Prompt templates: a text with one `{question}` in it, where responses stop, and which reward function grades them.

The named templates are the files in `a5lib/prompt_texts/`; copy one to write your own. This module knows nothing about
tokenizers or chat templates: a prompt is plain text. Taught in notebook 01.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from a5lib.config import nearest
from a5lib.errors import UserError

QUESTION = "{question}"
ANSWER_STOP = "</answer>"

# name of the template -> name of the reward function that belongs to it
NAMED_PROMPTS: dict[str, str] = {
    "r1_zero": "r1_zero",
    "r1_zero_three_shot": "r1_zero",
    "question_only": "question_only",
}


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt's text and what belongs to it.

    `stop` holds the strings that end a response (the engine keeps them in the text): `("</answer>",)` where the text
    asks for an answer tag, otherwise none. `grader` names the reward function; it is `None` for a prompt from a file.
    """

    name: str
    text: str
    stop: tuple[str, ...]
    grader: str | None

    def render(self, question: str) -> str:
        """The prompt for one question. Braces, in the question or in the template, are ordinary characters.

        >>> load_prompt("question_only").render("What is {1} + {2}?").splitlines()[0]
        'What is {1} + {2}?'
        """
        return self.text.replace(QUESTION, question)


def load_prompt(name_or_path: str | Path) -> PromptTemplate:
    """The template of that name, or the one in that text file (UTF-8; line breaks at its very end are not part of it).

    A name comes before a file that is called the same; write `./r1_zero` for the file. Taught in notebook 01.

    Raises:
        UserError: neither a name nor a readable text file, or `{question}` does not stand in the text exactly once.

    >>> load_prompt("r1_zero").render("What is 1 + 1?").splitlines()[1:]
    ['User: What is 1 + 1?', 'Assistant: <think>']
    """
    name = str(name_or_path)
    if name in NAMED_PROMPTS:
        text = resources.files("a5lib").joinpath("prompt_texts", f"{name}.txt").read_text(encoding="utf-8")
        return _template(name, text, NAMED_PROMPTS[name])
    path = Path(name_or_path)
    if not path.is_file():
        raise UserError(
            f"There is no prompt {name!r}; use one of {', '.join(NAMED_PROMPTS)} (did you mean "
            f"{nearest(name, list(NAMED_PROMPTS))!r}?) or the path of a text file that contains {QUESTION} once."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The prompt file {name} cannot be read as UTF-8 text ({error}); save it as UTF-8.") from error
    return _template(name, text, grader=None)


def grader_name(prompt: PromptTemplate, grader: str) -> str:
    """The reward function to use: `grader` itself, or for `"auto"` the one that belongs to the prompt.

    Raises:
        UserError: `"auto"` with a prompt from a file, which does not say how its responses are graded.

    >>> grader_name(load_prompt("r1_zero_three_shot"), "auto")
    'r1_zero'
    """
    if grader != "auto":
        return grader
    if prompt.grader is None:
        raise UserError(
            f"The prompt file {prompt.name} does not say how responses are graded; add --grader r1_zero, "
            "--grader r1_zero_lenient or --grader question_only."
        )
    return prompt.grader


def _template(name: str, text: str, grader: str | None) -> PromptTemplate:
    count = text.count(QUESTION)
    if count != 1:
        raise UserError(f"The prompt {name} contains {QUESTION} {count} times; it must stand there exactly once.")
    return PromptTemplate(name, text.removesuffix("\n"), (ANSWER_STOP,) if ANSWER_STOP in text else (), grader)
