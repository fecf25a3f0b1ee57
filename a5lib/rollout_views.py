"""One rollout as a person reads it: the sampled tokens with what is known of each, as text and as HTML.

Everything that a model wrote is escaped, so that no text of it acts as HTML. This file does not grade or score.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from a5lib.config import nearest
from a5lib.errors import UserError
from a5lib.grading import outcome
from a5lib.records import Completion, Problem, Rollout

ColorBy = Literal["mask", "log_prob", "entropy"]
LOWEST_LOG_PROB = -4.0  # and below: the darkest colour; the probability is under 2 %
HIGHEST_ENTROPY = 2.0  # nats, and above: the darkest colour
DARKEST = 0.7  # opacity: black text stays legible on it
UNSURE = math.log(0.5)  # sampled tokens with a probability below one half are underlined
HUES = {"mask": "63,144,218", "log_prob": "255,169,14", "entropy": "131,45,182"}  # petroff10's blue, orange, purple


def as_rollout(record: Rollout | Mapping[str, Any]) -> Rollout:
    """A rollout, or a line of a run's rollouts/step-*.jsonl, as a rollout.

    Raises:
        UserError: it is neither.
    """
    if isinstance(record, Rollout):
        return record
    try:
        values = {name: record[name] for name in ("prompt_ids", "rewards", "advantage")}
        return Rollout(Problem(**record["problem"]), completion=Completion(**record["completion"]), **values)
    except (TypeError, KeyError, AttributeError):
        raise UserError(
            f"Expected a Rollout, or a line of a run's rollouts/step-*.jsonl, not {type(record).__name__}."
        ) from None


def rollout_class(rollout: Rollout) -> str:
    """ "right", "wrong" or "malformed", as the rewards say; "not graded" without rewards."""
    return outcome(rollout.rewards) if {"format_reward", "answer_reward"} <= set(rollout.rewards) else "not graded"  # type: ignore[arg-type]


def rollout_text(rollout: Rollout | Mapping[str, Any], tokenizer: Any) -> str:
    """The rollout as plain text: response tokens stand in brackets, and prompt tokens do not. Taught in notebook 02.

    Args:
        rollout: a Rollout, or a line of rollouts/step-*.jsonl.
        tokenizer: that of the model which sampled it.

    Raises:
        UserError: it is no rollout.
    """
    r = as_rollout(rollout)
    response = "".join(f"[{_token(tokenizer, i)}]" for i in r.completion.token_ids).replace("\n", "↵\n")
    prompt = "".join(_token(tokenizer, i) for i in r.prompt_ids)
    lines = [_summary(r), "", f"Prompt, {len(r.prompt_ids)} tokens, mask 0:", prompt, "",
             f"Response, {len(r.completion.token_ids)} tokens, mask 1, each in brackets:", response]  # fmt: skip
    tokens = zip(r.completion.log_probs, r.completion.token_ids, strict=False)
    least = sorted(tokens, key=lambda pair: pair[0])[:5]
    if least:
        named = ", ".join(f"[{_token(tokenizer, i)}] {log_prob:.2f}" for log_prob, i in least)
        lines += ["", f"Least likely tokens, with their log-probability in nats: {named}"]
    return "\n".join(lines)


def rollout_html(
    rollout: Rollout | Mapping[str, Any],
    tokenizer: Any,
    color_by: ColorBy = "mask",
    entropy: Sequence[float] | None = None,
) -> str:
    """The rollout as HTML, one span for each token; the value of a token is shown when the mouse rests on it.

    "mask": response tokens are coloured and underlined. "log_prob": the less likely the sampled token, the darker;
    underlined where its probability was below one half. "entropy": the higher the entropy of the distribution that the
    token was sampled from, the darker. Taught in notebook 02.

    Args:
        rollout: a Rollout, or a line of rollouts/step-*.jsonl.
        tokenizer: that of the model which sampled it.
        color_by: one of the three above.
        entropy: of each response token in nats. A run does not log it for single tokens; without it "entropy" says so
            and colours by log-probability.

    Raises:
        UserError: it is no rollout, `color_by` is unknown, or `entropy` has another length than the response.
    """
    r = as_rollout(rollout)
    if color_by not in get_args(ColorBy):
        guess = nearest(str(color_by), get_args(ColorBy))
        raise UserError(f"color_by is {color_by!r}; did you mean {guess!r}? Choose mask, log_prob or entropy.")
    ids, log_probs = r.completion.token_ids, r.completion.log_probs
    if entropy is not None and len(entropy) != len(ids):
        raise UserError(f"entropy has {len(entropy)} values for {len(ids)} response tokens; give one for each.")
    note = ""
    if color_by == "entropy" and entropy is None:
        note = "The entropy of single tokens was not logged with this rollout; coloured by log-probability instead."
        color_by = "log_prob"
    if color_by == "log_prob" and not log_probs:
        note = "No log-probabilities are stored with this rollout; coloured by response mask instead."
        color_by = "mask"
    spans = [_span(_token(tokenizer, i), f"prompt token {i}, mask 0", "0,0,0", 0.0, False) for i in r.prompt_ids]
    spans.append("<br>")
    for at, i in enumerate(ids):
        title = f"response token {i}, mask 1"
        strength, underline = 0.5, True
        if at < len(log_probs):
            title += f", log-probability {log_probs[at]:.2f} nats (probability {math.exp(log_probs[at]):.1%})"
        if entropy is not None:
            title += f", entropy {entropy[at]:.2f} nats"
        if color_by == "log_prob":
            value = log_probs[at] if at < len(log_probs) else 0.0
            strength, underline = min(value / LOWEST_LOG_PROB, 1.0), value < UNSURE
        elif color_by == "entropy" and entropy is not None:
            strength, underline = min(entropy[at] / HIGHEST_ENTROPY, 1.0), False
        spans.append(_span(_token(tokenizer, i), title, HUES[color_by], strength, underline))
    head = "".join(f"<div>{html.escape(line)}</div>" for line in _summary(r).splitlines())
    note = f"<div><em>{note}</em></div>" if note else ""
    return (
        '<div style="background:#fff;color:#000;padding:8px;line-height:1.7">'
        f'{head}{note}<div style="margin:6px 0">{_legend(color_by)}</div>'
        f'<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere">{"".join(spans)}</div></div>'
    )


def _summary(r: Rollout) -> str:
    """Two lines: what it is and what it earned."""
    rewards = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in r.rewards.items())
    ended = {"stop": "it came to its end", "length": "it was cut off at the longest length"}
    how = ended.get(r.completion.finish_reason, r.completion.finish_reason)
    return (
        f"Answer expected: {r.problem.answer}. Class: {rollout_class(r)}.\n"
        f"{rewards or 'no rewards'}; advantage {r.advantage:.2f}; {len(r.completion.token_ids)} tokens, {how}."
    )


def _token(tokenizer: Any, token_id: int) -> str:
    """The text of one id; one that has no text of its own, as half a character, is named by its number."""
    try:
        text = tokenizer.decode([token_id])
    except (OverflowError, KeyError, IndexError, TypeError, ValueError):
        text = ""
    return text if text and "\ufffd" not in text else f"<{token_id}>"


def _span(text: str, title: str, hue: str, strength: float, underline: bool) -> str:
    style = f"background:rgba({hue},{DARKEST * strength:.2f})" + (";border-bottom:2px solid #000" if underline else "")
    shown = html.escape(text).replace("\n", "↵<br>")
    return f'<span title="{html.escape(title)}" style="{style};border-right:1px solid #ddd">{shown}</span>'


def _legend(color_by: ColorBy) -> str:
    hue = HUES[color_by]
    if color_by == "mask":
        parts = [_span("response, mask 1", "", hue, 0.5, True), _span("prompt, mask 0", "", "0,0,0", 0.0, False)]
        return "Colour: response mask. " + " ".join(parts)
    darkest = LOWEST_LOG_PROB if color_by == "log_prob" else HIGHEST_ENTROPY
    boxes = "".join(_span(f" {darkest * k / 4 + 0.0:g} ", "", hue, k / 4, False) for k in range(5))
    if color_by == "entropy":
        return f"Colour: entropy in nats, {boxes} or more."
    return f"Colour: log-probability in nats, {boxes} or less; underlined: probability below one half."
