"""The exercises of the course, one file a subject, importable by name from the package.

`solutions/` holds the reference; `starter/` holds the same files with the marked regions left for you to write. Both
need torch and transformers alone and know nothing of the library that calls them.
"""

from .adamw import adamw_step, adamw_update, round_stochastically
from .advantages import compute_group_normalized_rewards
from .colocation import colocated_cycle
from .estimator import estimate_advantages
from .layer_major import layer_major_backward
from .losses import aggregate_loss_across_microbatch, compute_policy_gradient_loss
from .masks import encode_prompt, pad_and_mask, tokenize_prompt_and_output
from .rewards import compute_rollout_rewards, parse_answer
from .scoring import (
    get_response_log_probs,
    get_response_log_probs_in_blocks,
    log_probs_from_logits,
    log_probs_in_blocks,
)
from .train_step import accumulate_gradients, grpo_train_step

__all__ = [
    "accumulate_gradients",
    "adamw_step",
    "adamw_update",
    "aggregate_loss_across_microbatch",
    "colocated_cycle",
    "compute_group_normalized_rewards",
    "compute_policy_gradient_loss",
    "compute_rollout_rewards",
    "encode_prompt",
    "estimate_advantages",
    "get_response_log_probs",
    "get_response_log_probs_in_blocks",
    "grpo_train_step",
    "layer_major_backward",
    "log_probs_from_logits",
    "log_probs_in_blocks",
    "pad_and_mask",
    "parse_answer",
    "round_stochastically",
    "tokenize_prompt_and_output",
]
