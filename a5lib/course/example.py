"""The example that the notebooks share: one problem, one prompt, four responses, and the batch they make.

The texts were written for the course, not sampled, so they have no sampling log-probabilities. Two are right, so with a
reward of 1 for a right answer the four rewards are 1, 0, 0, 1. This file does not know what a notebook does with them.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from a5lib.course.exercises import algo
from a5lib.grading import r1_zero_reward_fn
from a5lib.models import encode_prompt
from a5lib.prompts import ANSWER_STOP, load_prompt
from a5lib.records import Completion, Problem, Rollout

PROBLEM = Problem("Tom has 3 bags with 4 pens each. How many pens does Tom have?", "Tom has 4*3=12 pens.", "12")
PROMPT = load_prompt("r1_zero").render(PROBLEM.question)
TEXTS = (
    " Tom has 4*3=12 pens. </think> <answer>12</answer>",  # right
    " Tom has 4+3=7 pens. </think> <answer>7</answer>",  # wrong
    " Tom has 4*3=12 pens. </think> The answer is 12.",  # malformed: no answer tag
    " Two bags have 4*2=8 pens.\nThree bags have 8+4=12 pens. </think> <answer>12</answer>",  # right, but longer
)


def example_rollouts(tokenizer: PreTrainedTokenizerBase) -> list[Rollout]:
    """The four rollouts, graded. A response ends with its stop string, or else with the end-of-sequence token, which is
    not part of the text. `completion.log_probs` is empty.

    Taught in notebook 02.
    """
    prompt_ids = encode_prompt(tokenizer, PROMPT)
    rollouts = []
    for text in TEXTS:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        if not text.endswith(ANSWER_STOP):
            ids.append(tokenizer.eos_token_id)
        completion = Completion(0, ids, text, "stop", log_probs=[])
        rollouts.append(Rollout(PROBLEM, prompt_ids, completion, r1_zero_reward_fn(text, PROBLEM.answer)))
    return rollouts


def example_batch(tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """The four rollouts as one batch, made by your `pad_and_mask`: "input_ids", "labels" and "response_mask", [4, T].

    Taught in notebook 02.
    """
    rollouts = example_rollouts(tokenizer)
    batch: dict[str, Tensor] = algo.pad_and_mask(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.completion.token_ids for rollout in rollouts],
        tokenizer.pad_token_id,
    )
    return batch
