"""A model and a batch of tokens in, the log-probability and entropy of every next token out.

Two ways to the same numbers: all logits at once, or in blocks of positions, so that the logits of the whole vocabulary
are never in memory for all positions. This file does not know rewards or losses.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, return_token_entropy: bool = False, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Log-probability of each label, and the entropy of each distribution, in float32 whatever the logits are.

    With z = logits / temperature: log p(label) = z[label] - logsumexp(z), and the entropy is logsumexp(z) - sum(p z).
    Only one entry of the log-probabilities is needed, so the tensor of all of them is never made. A token with logit
    -inf has p = 0 and adds 0 to the entropy (not 0 * -inf = NaN), in value and gradient. Taught in notebook 06.

    Args:
        logits: float [..., V].
        labels: int64 [...].
        return_token_entropy: whether to compute the entropy.
        temperature: the sampling temperature; it divides the logits, not the log-probabilities.

    Returns:
        "log_probs" float32 [...] in nats, and "token_entropy" float32 [...] in nats if asked for (float64 for float64
        logits).

    Raises:
        ValueError: the temperature is not greater than 0, or the labels' shape does not fit.

    >>> logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    >>> scored = log_probs_from_logits(logits, torch.tensor([0]), return_token_entropy=True)
    >>> round(scored["log_probs"].item(), 4), round(scored["token_entropy"].item(), 4)
    (-0.6931, 0.6931)
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities need one above 0 (1 leaves the logits as they are)."
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; expected {tuple(logits.shape[:-1])}, as the logits.")
    ### BEGIN YOUR CODE: float32, scale, logsumexp minus gather; entropy without 0 * -inf (notebook 06)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # [..., V]
    logits = logits - logits.detach().amax(dim=-1, keepdim=True)  # no other distribution, but large logits keep digits
    log_sum = logits.logsumexp(dim=-1)  # [...]
    result = {"log_probs": logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_sum}
    if return_token_entropy:
        expected = (logits.softmax(dim=-1) * logits.masked_fill(logits == -torch.inf, 0.0)).sum(dim=-1)  # [...]
        result["token_entropy"] = log_sum - expected
    return result
    ### END YOUR CODE


def forward_arguments(model: torch.nn.Module, attention_mask: Tensor | None) -> dict[str, Any]:
    """What a forward pass for scoring needs beside the ids. Given, not an exercise; notebook 06 explains it.

    With an attention mask, positions are counted from the first real token, so that padding on the left changes
    nothing. A key-value cache has no use here and does not go with recomputing layers, so a transformers model is told
    to keep none; its config is left as it is.
    """
    arguments: dict[str, Any] = {}
    if isinstance(model, PreTrainedModel):
        arguments["use_cache"] = False
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
        arguments["position_ids"] = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return arguments


def get_response_log_probs(
    model: torch.nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool,
    temperature: float = 1.0,
    attention_mask: Tensor | None = None,
    *,
    algo: Any = None,
) -> dict[str, Tensor]:
    """Score the labels with one forward pass. Every position is scored, prompt and padding too; the mask comes later.

    Taught in notebook 06.

    Args:
        model: a causal language model; a call with [B, T] ids returns an object with `.logits` [B, T, V].
        input_ids: int64 [B, T].
        labels: int64 [B, T], labels[b, t] following input_ids[b, t].
        return_token_entropy: whether to return the entropy too.
        temperature: the sampling temperature.
        attention_mask: 0/1 or bool [B, T]; needed for padding on the left, not for padding on the right.
        algo: where `log_probs_from_logits` is looked up (None: this package).

    Returns:
        "log_probs" float32 [B, T], and "token_entropy" float32 [B, T] if asked for, both in nats and with gradient.

    Raises:
        ValueError: the temperature is not greater than 0.
    """
    algo = sys.modules[__package__] if algo is None else algo
    ### BEGIN YOUR CODE: call the model with forward_arguments, then log_probs_from_logits (notebook 06)
    logits = model(input_ids, **forward_arguments(model, attention_mask)).logits  # [B, T, V]
    return algo.log_probs_from_logits(logits, labels, return_token_entropy, temperature)
    ### END YOUR CODE


def log_probs_in_blocks(
    hidden_states: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    block_size: int = 32,
    return_token_entropy: bool = False,
    temperature: float = 1.0,
    head_bias: Tensor | None = None,
    *,
    algo: Any = None,
) -> dict[str, Tensor]:
    """Apply the head and score, `block_size` positions at a time, keeping no logits.

    Each block is checkpointed: its logits are made again in the backward pass, so that at most block_size * V of them
    exist at any time. Values and gradients are those of `log_probs_from_logits(hidden_states @ head_weight.T, labels)`,
    also when the head shares its weight with the embedding. Taught in notebook 06.

    Args:
        hidden_states: float [..., H], the last hidden states after the final norm.
        head_weight: float [V, H].
        labels: int64 [...]; may be empty.
        block_size: positions in a block.
        return_token_entropy: whether to return the entropy too.
        temperature: the sampling temperature.
        head_bias: float [V], where the head has one.
        algo: where `log_probs_from_logits` is looked up (None: this package).

    Returns:
        "log_probs" float32 [...], and "token_entropy" float32 [...] if asked for.

    Raises:
        ValueError: the last dimension is not the head's H (as when logits are passed), the labels' shape does not fit,
        or the block size is below 1.
    """
    algo = sys.modules[__package__] if algo is None else algo
    vocabulary, width = head_weight.shape
    if hidden_states.shape[-1] != width:
        what = (
            "logits, not hidden states" if hidden_states.shape[-1] == vocabulary else "no hidden states of this model"
        )
        raise ValueError(
            f"hidden_states has {hidden_states.shape[-1]} as last dimension, so it holds {what}; expected {width}."
        )
    if hidden_states.shape[:-1] != labels.shape:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; expected {tuple(hidden_states.shape[:-1])}.")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1.")
    ### BEGIN YOUR CODE: checkpoint head and log_probs_from_logits for each block of positions (notebook 06)

    def score_block(hidden: Tensor, block_labels: Tensor) -> tuple[Tensor, ...]:
        logits = torch.nn.functional.linear(hidden, head_weight, head_bias)  # [block, V]
        return tuple(algo.log_probs_from_logits(logits, block_labels, return_token_entropy, temperature).values())

    flat_hidden, flat_labels = hidden_states.reshape(-1, width), labels.reshape(-1)  # [N, H], [N]
    blocks = zip(flat_hidden.split(block_size), flat_labels.split(block_size), strict=True)
    scored = [checkpoint(score_block, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in blocks]
    names = ("log_probs", "token_entropy")
    columns = zip(names, zip(*scored, strict=True), strict=False)
    return {name: torch.cat(column).reshape(labels.shape) for name, column in columns}
    ### END YOUR CODE


def get_response_log_probs_in_blocks(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool,
    temperature: float = 1.0,
    attention_mask: Tensor | None = None,
    block_size: int = 32,
    *,
    algo: Any = None,
) -> dict[str, Tensor]:
    """`get_response_log_probs` with the head in blocks: the same values and gradients, and never [B, T, V] logits.

    The model's body runs once; its last hidden states [B, T, H] are what stays in memory. Taught in notebook 06.

    Args:
        model: a transformers causal language model.
        block_size: positions whose logits exist at one time.
        algo: where `log_probs_in_blocks` is looked up (None: this package).
        The others are those of `get_response_log_probs`, and so are the returned values.

    Raises:
        ValueError: the temperature is not greater than 0, or the model changes its logits after the head (a soft cap or
        a scale), which blocks would miss.
    """
    algo = sys.modules[__package__] if algo is None else algo
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"The model's config sets {name}, which scoring in blocks would miss; score it without blocks."
            )
    ### BEGIN YOUR CODE: run model.base_model once, then its head with log_probs_in_blocks (notebook 06)
    arguments = forward_arguments(model, attention_mask)
    hidden_states = model.base_model(input_ids, **arguments).last_hidden_state  # [B, T, H]
    head = model.get_output_embeddings()
    return algo.log_probs_in_blocks(
        hidden_states,
        head.weight,
        labels,
        block_size,
        return_token_entropy,
        temperature,
        head_bias=getattr(head, "bias", None),
    )
    ### END YOUR CODE
