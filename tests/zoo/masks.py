"""Faults in masks.py."""

from tests.zoo import Fault

ENCODE_PROMPT = "prompt_ids = [encode_prompt(prompt, tokenizer) for prompt in prompt_strs]"
ENCODE_OUTPUT = "list(tokenizer.encode(output, add_special_tokens=False))"

FAULTS = [
    Fault(
        "mask not shifted",
        old='"response_mask": mask[:, 1:]}',
        new='"response_mask": mask[:, :-1]}',
        words="not shifted with the labels",
    ),
    Fault(
        "mask from the padding id",
        old='"response_mask": mask[:, 1:]}',
        new='"response_mask": (mask & (tokens != pad_token_id))[:, 1:]}',
        words="compares ids with the padding id",
    ),
    Fault(
        "mask up to the first padding id",
        old='"response_mask": mask[:, 1:]}',
        new='"response_mask": (mask & ((tokens == pad_token_id).cumsum(dim=1) == 0))[:, 1:]}',
        words="first id that equals the padding id",
    ),
    Fault(
        "labels not shifted",
        old='"labels": tokens[:, 1:]',
        new='"labels": tokens[:, :-1]',
        words="labels were not shifted",
    ),
    Fault(
        "inputs with the last token",
        old='"input_ids": tokens[:, :-1]',
        new='"input_ids": tokens',
        words="no label follows the last one",
    ),
    Fault(
        "padding on the left",
        old="tokens[row, : lengths[row]] =",
        new="tokens[row, longest - lengths[row] :] =",
        words="padding is on the left",
    ),
    Fault(
        "padded with zeros",
        old="torch.full((len(prompt_ids), longest), pad_token_id, dtype=torch.int64)",
        new="torch.zeros(len(prompt_ids), longest, dtype=torch.int64)",
        words="not pad_token_id",
    ),
    Fault(
        "padding counts",
        old="mask[row, len(prompt) : lengths[row]] = True",
        new="mask[row, len(prompt) :] = True",
        words="marks padding as response",
    ),
    Fault(
        "prompt counts",
        old="mask[row, len(prompt) : lengths[row]] = True",
        new="mask[row, : lengths[row]] = True",
        words="marks prompt tokens too",
    ),
    Fault(
        "last token left out",
        old="mask[row, len(prompt) : lengths[row]] = True",
        new="mask[row, len(prompt) : lengths[row] - 1] = True",
        words="last response token is missing",
    ),
    Fault(
        "mask of numbers",
        old="mask = torch.zeros(len(prompt_ids), longest, dtype=torch.bool)",
        new="mask = torch.zeros(len(prompt_ids), longest)",
        words="has the type torch.float32 and not torch.bool",
    ),
    Fault(
        "ids as floats",
        old="pad_token_id, dtype=torch.int64)",
        new="float(pad_token_id))",
        words="has the type torch.float32 and not torch.int64",
    ),
    Fault(
        "cut to the shortest row",
        old='return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": mask[:, 1:]}',
        new="tokens, mask = tokens[:, : min(lengths)], mask[:, : min(lengths)]\n"
        '    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": mask[:, 1:]}',
        words="cut to the shortest",
    ),
    Fault(
        "the caller's lists grow",
        old="tokens[row, : lengths[row]] = torch.tensor([*prompt, *response], dtype=torch.int64)\n"
        "        mask[row, len(prompt) : lengths[row]] = True",
        new="mask[row, len(prompt) : lengths[row]] = True\n"
        "        prompt += response\n"
        "        tokens[row, : lengths[row]] = torch.tensor(prompt, dtype=torch.int64)",
        words="changed the caller's lists",
    ),
    Fault(
        "nothing is returned",
        old='return {"input_ids": tokens[:, :-1],',
        new='batch = {"input_ids": tokens[:, :-1],',
        words="is there a `return`",
    ),
    Fault(
        "joined text",
        old="return algo.pad_and_mask(prompt_ids, response_ids, pad_token_id)",
        new="joined = [tokenizer.encode(p + o) for p, o in zip(prompt_strs, output_strs)]\n"
        "    response_ids = [ids[len(p) :] for p, ids in zip(prompt_ids, joined)]\n"
        "    prompt_ids = [ids[: len(p)] for p, ids in zip(prompt_ids, joined)]\n"
        "    return algo.pad_and_mask(prompt_ids, response_ids, pad_token_id)",
        words="joined text was encoded",
    ),
    Fault(
        "special tokens in outputs",
        old=ENCODE_OUTPUT,
        new="list(tokenizer.encode(output))",
        words="added to the output",
    ),
    Fault(
        "end token after the prompt",
        old=ENCODE_PROMPT,
        new="prompt_ids = [list(tokenizer.encode(prompt)) for prompt in prompt_strs]",
        words="end token was put between",
    ),
    Fault(
        "no start token",
        old=ENCODE_PROMPT,
        new="prompt_ids = [list(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompt_strs]",
        words="start token of the prompt is missing",
    ),
    Fault(
        "end token added to outputs",
        old=ENCODE_OUTPUT,
        new=ENCODE_OUTPUT + " + [tokenizer.eos_token_id]",
        words="An end token was added to the output",
    ),
    Fault(
        "stripped outputs",
        old="tokenizer.encode(output, add",
        new="tokenizer.encode(output.strip(), add",
        words="were stripped",
    ),
    Fault(
        "padded with a token that is not there",
        old="return algo.pad_and_mask(prompt_ids, response_ids, pad_token_id)",
        new="return algo.pad_and_mask(prompt_ids, response_ids, tokenizer.pad_token_id)",
        words="NoneType",
    ),
]
