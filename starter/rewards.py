"""Responses in, answers and rewards out, with the statistics that are logged for every named reward.

This file finds an answer and counts rewards. It does not know when two answers are equal: it is handed the reward
function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def parse_answer(response: str) -> str | None:
    """The answer in a response to an r1_zero prompt, by the rules of the strict format.

    A response is well formed if `</think> <answer>`, with exactly one space, occurs once in it, `</answer>` occurs once
    in it, and the closing tag comes after the opening one. The prompt ends with `<think>`, so the response need not
    have it. The grader of this course, `a5lib.grading.r1_zero_reward_fn`, follows the same rules. Taught in notebook
    03.

    Args:
        response: what the model wrote after the prompt.

    Returns:
        None for a response that is not well formed. Otherwise the text between the tags without white space at its
        ends, which may be "". Where more than white space follows `</answer>`, the result is "" too: the format is
        kept, but an answer that goes on after its end is no answer.

    >>> parse_answer("2 plus 2.</think> <answer> 4 </answer>"), parse_answer("2 plus 2.</think><answer>4</answer>")
    ('4', None)
    >>> parse_answer("2 plus 2.</think> <answer>4</answer> or 5")
    ''
    """
    ### BEGIN YOUR CODE: find the one answer block, or return None (notebook 03)
    raise NotImplementedError("find the one answer block, or return None (notebook 03)")
    ### END YOUR CODE


def compute_rollout_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
) -> tuple[Tensor, dict[str, Any]]:
    """Grade every response and summarise each named reward.

    Only "reward" is trained on; the others, such as "format_reward", are logged. Taught in notebook 03.

    Args:
        reward_fn: takes a response and its ground truth, returns named floats, "reward" among them.
        rollout_responses: B responses.
        repeated_ground_truths: B ground truths, one to each response.

    Returns:
        rewards: float32 [B], the value of "reward".
        metadata: for each name that `reward_fn` returns, `{name}_mean`, `{name}_std` (population standard deviation)
        and `{name}_histogram` (a list of counts in ten equal bins from 0 to 1, the last one closed; values outside are
        not counted).

    Raises:
        ValueError: the lists differ in length or are empty, or a reward is not finite; then the message begins like
        "format_reward of response 1 is not finite", with responses counted from 0.

    >>> rewards, metadata = compute_rollout_rewards(lambda r, t: {"reward": float(r == t)}, ["4", "5"], ["4", "4"])
    >>> rewards.tolist(), metadata["reward_mean"], metadata["reward_std"], metadata["reward_histogram"]
    ([1.0, 0.0], 0.5, 0.5, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    """
    if len(rollout_responses) != len(repeated_ground_truths) or not rollout_responses:
        raise ValueError(
            f"Got {len(rollout_responses)} responses and {len(repeated_ground_truths)} ground truths; give one to each."
        )
    ### BEGIN YOUR CODE: grade each response, then summarise every named reward (notebook 03)
    raise NotImplementedError("grade each response, then summarise every named reward (notebook 03)")
    ### END YOUR CODE
