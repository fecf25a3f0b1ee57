"""Faults in scoring.py."""

from tests.zoo import Fault

PICKED = 'result = {"log_probs": logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_sum}'
SCALED = "logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # [..., V]"
CHECKPOINTED = "checkpoint(score_block, h, y, use_reentrant=False, preserve_rng_state=False)"
WHOLE_MODEL = "return algo.log_probs_from_logits(logits, labels, return_token_entropy, temperature)"
JOINED = """
    names = ("log_probs", "token_entropy")
    columns = zip(names, zip(*scored, strict=True), strict=False)
    return {name: torch.cat(column).reshape(labels.shape)"""

FAULTS = [
    Fault(
        "temperature divides log-probs",
        old=f"{SCALED}\n    logits = logits - logits.detach().amax(dim=-1, keepdim=True)",
        new="logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1) / temperature\n"
        "    log_sum = 0.0 * logits[..., 0]\n    return {'log_probs': logits.gather(-1, labels.unsqueeze(-1))[..., 0]}",
        words="divides the log-probabilities",
    ),
    Fault(
        "temperature multiplies logits",
        old=SCALED,
        new=SCALED.replace("/ temperature", "* temperature"),
        words="multiplied by the temperature",
    ),
    Fault(
        "scored in bf16",
        old=SCALED,
        new="logits = logits / temperature",
        words="Computed in bf16",
    ),
    Fault(
        "largest logit not subtracted",
        old="logits = logits - logits.detach().amax(dim=-1, keepdim=True)",
        new="logits = logits + 0",
        words="Subtract the largest logit",
    ),
    Fault(
        "labels shifted once more",
        old=PICKED,
        new=PICKED.replace("labels.unsqueeze(-1)", "labels.roll(-1, -1).unsqueeze(-1)"),
        words="labels were shifted",
    ),
    Fault("logits not normalised", old=PICKED, new=PICKED.replace(" - log_sum", ""), words="subtract logsumexp"),
    Fault("log-probs detached", old=PICKED, new=PICKED.replace("- log_sum}", "- log_sum.detach()}"), words="detached"),
    Fault(
        "entropy with the wrong sign",
        old='result["token_entropy"] = log_sum - expected',
        new='result["token_entropy"] = expected - log_sum',
        words="never below 0",
    ),
    Fault(
        "entropy is NaN at -inf",
        old="logits.masked_fill(logits == -torch.inf, 0.0)",
        new="logits",
        words="0 times -inf is NaN",
    ),
    Fault(
        "entropy mended after the product",
        old="(logits.softmax(dim=-1) * logits.masked_fill(logits == -torch.inf, 0.0)).sum(dim=-1)",
        new="(logits.softmax(dim=-1) * logits).nan_to_num().sum(dim=-1)",
        words="not the result after it",
    ),
    Fault(
        "entropy always returned",
        old="    if return_token_entropy:\n",
        new="    if True:\n",
        words="only where it is asked for",
    ),
    Fault(
        "attention mask not passed",
        old="logits = model(input_ids, **forward_arguments(model, attention_mask)).logits",
        new="logits = model(input_ids).logits",
        words="attention_mask was not passed on",
    ),
    Fault(
        "positions count the padding",
        old="logits = model(input_ids, **forward_arguments(model, attention_mask)).logits",
        new="extra = {} if attention_mask is None else {'attention_mask': attention_mask}\n"
        "    logits = model(input_ids, **extra).logits",
        words="positions are missing",
    ),
    Fault(
        "input ids scored",
        old=WHOLE_MODEL,
        new=WHOLE_MODEL.replace("labels", "input_ids"),
        words="input ids were scored",
    ),
    Fault(
        "temperature not passed",
        old=WHOLE_MODEL,
        new=WHOLE_MODEL.replace(", temperature", ""),
        words="temperature was not passed on",
    ),
    Fault(
        "model run without gradient",
        old="logits = model(input_ids, **forward_arguments(model, attention_mask)).logits",
        new="logits = model(input_ids, **forward_arguments(model, attention_mask)).logits.detach()",
        words="detached",
    ),
    Fault(
        "last block dropped",
        old=f"for h, y in blocks]{JOINED}",
        new="for h, y in blocks if len(y) == block_size]" + JOINED.replace(".reshape(labels.shape)", ""),
        words="shorter, is missing",
    ),
    Fault("not checkpointed", old=CHECKPOINTED, new="score_block(h, y)", words="are kept"),
    Fault(
        "head applied to all positions",
        old=f"scored = [{CHECKPOINTED} for h, y in blocks]",
        new="scored = [checkpoint(score_block, flat_hidden, flat_labels, use_reentrant=False)]",
        words="hidden states of this block only",
    ),
    Fault(
        "bias forgotten in the block",
        old="torch.nn.functional.linear(hidden, head_weight, head_bias)",
        new="hidden @ head_weight.T",
        words="bias is forgotten",
    ),
    Fault(
        "blocks stay flat",
        old="torch.cat(column).reshape(labels.shape)",
        new="torch.cat(column)",
        words="shape",
    ),
    Fault(
        "bias not passed", old='head_bias=getattr(head, "bias", None)', new="head_bias=None", words="bias is forgotten"
    ),
    Fault(
        "whole model called for its hidden states",
        old="hidden_states = model.base_model(input_ids, **arguments).last_hidden_state",
        new="hidden_states = model(input_ids, **arguments, output_hidden_states=True).hidden_states[-1]",
        words="All logits came to be",
    ),
    Fault(
        "attention mask not passed in blocks",
        old="arguments = forward_arguments(model, attention_mask)",
        new="arguments = forward_arguments(model, None)",
        words="attention_mask was not passed on",
    ),
    Fault(
        "block size not passed",
        old="        block_size,\n        return_token_entropy,",
        new="        10**6,\n        return_token_entropy,",
        words="pass block_size on",
    ),
    Fault(
        "blocks of columns",
        old="zip(flat_hidden.split(block_size), flat_labels.split(block_size), strict=True)",
        new="zip(hidden_states.split(block_size, -2), labels.split(block_size, -1), strict=True)",
        words="block_size columns of every row",
    ),
]
