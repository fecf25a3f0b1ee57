"""Token ids in, a right-padded batch out: inputs, shifted labels, and the mask of the response tokens.

Position t of the model's output predicts token t + 1, so labels and mask are both shifted by one against the inputs.
The mask comes from lengths, never from comparing ids with the padding id, because that id may also be the true end of a
response. This file does not know what the tokens mean or how they are rewarded.
"""

import sys
from typing import Any

import torch
from torch import Tensor


def encode_prompt(prompt_str: str, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, with the start token that the tokenizer adds, if it adds one, and never with two.

    Nothing is added at the end, because the response continues the prompt. Given, not an exercise; notebook 02 explains
    it.
    """
    plain = list(tokenizer.encode(prompt_str, add_special_tokens=False))
    full = list(tokenizer.encode(prompt_str))
    for start in range(1, len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain and plain[:start] != full[:start]:
            return full[:start] + plain
    return plain


def pad_and_mask(prompt_ids: list[list[int]], response_ids: list[list[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Join prompts and responses, pad on the right, and build labels and mask.

    Taught in notebook 02.

    Args:
        prompt_ids: B lists of token ids, none of them empty.
        response_ids: B lists of token ids, exactly as sampled; a response may be empty.
        pad_token_id: id of the padding; it may also occur inside a response, where it counts.

    Returns:
        With T = (longest prompt + response) - 1:
        "input_ids" int64 [B, T], the tokens without the last column;
        "labels" int64 [B, T], the tokens without the first column, so that labels[b, t] follows input_ids[b, t];
        "response_mask" bool [B, T], True where the label is a response token.

    Raises:
        ValueError: the two lists differ in length or are empty, or a prompt has no token.

    >>> batch = pad_and_mask([[3], [3, 4]], [[4, 8], [8]], pad_token_id=0)
    >>> batch["labels"].tolist(), batch["response_mask"].int().tolist()
    ([[4, 8], [4, 8]], [[1, 1], [0, 1]])
    """
    if len(prompt_ids) != len(response_ids) or not prompt_ids:
        raise ValueError(f"Got {len(prompt_ids)} prompts and {len(response_ids)} responses; give one prompt to each.")
    empty = [row for row, ids in enumerate(prompt_ids) if len(ids) == 0]
    if empty:
        raise ValueError(f"Prompt {empty[0]} has no token, so nothing predicts its response; start it with one.")
    ### BEGIN YOUR CODE: pad on the right, then shift labels and mask by one (notebook 02)
    lengths = [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    longest = max(lengths)
    tokens = torch.full((len(prompt_ids), longest), pad_token_id, dtype=torch.int64)  # [B, T + 1]
    mask = torch.zeros(len(prompt_ids), longest, dtype=torch.bool)  # [B, T + 1]
    for row, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        tokens[row, : lengths[row]] = torch.tensor([*prompt, *response], dtype=torch.int64)
        mask[row, len(prompt) : lengths[row]] = True
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": mask[:, 1:]}  # [B, T] each
    ### END YOUR CODE


def tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: Any, *, algo: Any = None
) -> dict[str, Tensor]:
    """Encode prompts and outputs, each by itself, and batch them.

    Encoding the joined text could merge the last character of the prompt with the first of the output into one token,
    and the mask would begin at the wrong place. A training loop that still has the sampled ids should give those to
    `pad_and_mask` instead: encoding the decoded text need not give the sampled ids back. Taught in notebook 02.

    Args:
        prompt_strs: B prompts.
        output_strs: B responses to them.
        tokenizer: a transformers tokenizer; without a padding token its end-of-sequence token pads.
        algo: where `pad_and_mask` is looked up (None: this package).

    Returns:
        "input_ids", "labels", "response_mask", as `pad_and_mask` returns them.

    Raises:
        ValueError: the lists differ in length or are empty, or the tokenizer has neither token to pad with.
    """
    algo = sys.modules[__package__] if algo is None else algo
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise ValueError("The tokenizer has neither a padding nor an end-of-sequence token; set tokenizer.pad_token.")
    ### BEGIN YOUR CODE: encode prompts (encode_prompt) and outputs (no special tokens) apart (notebook 02)
    prompt_ids = [encode_prompt(prompt, tokenizer) for prompt in prompt_strs]
    response_ids = [list(tokenizer.encode(output, add_special_tokens=False)) for output in output_strs]
    return algo.pad_and_mask(prompt_ids, response_ids, pad_token_id)
    ### END YOUR CODE
