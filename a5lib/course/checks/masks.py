"""Checks of `masks.py`: labels, mask and padding of a batch, and which text is encoded how."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from a5lib.course.checking import checks, expect, expect_keys
from a5lib.course.exercises import Algo

KEYS = ("input_ids", "labels", "response_mask")
NO, YES = False, True


def _batch(algo: Algo, prompts: list[list[int]], responses: list[list[int]], pad: int) -> dict[str, Tensor]:
    batch = algo.pad_and_mask(prompts, responses, pad)
    expect_keys("pad_and_mask(...)", batch, KEYS)
    return batch


@checks("pad_and_mask")
def labels_follow_inputs(algo: Algo) -> None:
    """A label is the token after its input."""
    batch = _batch(algo, [[3, 4]], [[8, 9]], 0)
    given = "prompt [3, 4], response [8, 9]"
    expect(
        "input_ids",
        batch["input_ids"],
        torch.tensor([[3, 4, 8]]),
        given=given,
        likely="input_ids are the tokens of prompt and response, without the last one.",
        mistakes={
            "input_ids hold all the tokens, but no label follows the last one: leave it out.": torch.tensor(
                [[3, 4, 8, 9]]
            ),
            "input_ids lost the first token; the labels are the ones that begin at the second token.": torch.tensor(
                [[4, 8, 9]]
            ),
        },
    )
    expect(
        "labels",
        batch["labels"],
        torch.tensor([[4, 8, 9]]),
        given=given,
        likely="labels are the same tokens, without the first one.",
        mistakes={
            "The labels were not shifted: each is its own input, which the model already sees.": torch.tensor(
                [[3, 4, 8]]
            ),
            "labels hold all the tokens; nothing predicts the first one, so leave it out.": torch.tensor(
                [[3, 4, 8, 9]]
            ),
            "The labels of the prompt were replaced by -100; leave them, the mask says what counts.": torch.tensor(
                [[-100, 8, 9]]
            ),
        },
    )
    expect(
        "the type of labels",
        str(batch["labels"].dtype),
        "torch.int64",
        given=given,
        likely="Ids are int64: an embedding and a cross entropy need that type.",
    )


@checks("pad_and_mask")
def mask_belongs_to_the_labels(algo: Algo) -> None:
    """The mask marks the labels that are response tokens."""
    batch = _batch(algo, [[3, 4]], [[8, 9]], 0)
    expect(
        "response_mask",
        batch["response_mask"],
        torch.tensor([[NO, YES, YES]]),
        given="prompt [3, 4], response [8, 9]",
        likely="The mask is True where the label, not the input, is a response token.",
        mistakes={
            "The mask was not shifted with the labels.": torch.tensor([[NO, NO, YES]]),
            "The mask was shifted in the wrong direction or twice.": torch.tensor([[YES, YES, NO]]),
            "The last response token is missing; it is trained like the others.": torch.tensor([[NO, YES, NO]]),
            "The mask marks prompt tokens too; the policy did not choose those.": torch.tensor([[YES, YES, YES]]),
            "The mask marks the prompt and not the response.": torch.tensor([[YES, NO, NO]]),
        },
    )


@checks("pad_and_mask")
def padding_is_on_the_right(algo: Algo) -> None:
    """Short rows are padded on the right, with `pad_token_id`, and the padding does not count."""
    batch = _batch(algo, [[3], [3, 4]], [[8], [8, 9]], 7)
    given = "prompts [3] and [3, 4], responses [8] and [8, 9], padding id 7"
    second = [3, 4, 8, 9]

    def tokens(first: list[int]) -> list[list[int]]:
        return [first, second]

    rows = {
        "The padding is on the left; put it on the right, behind the response.": tokens([7, 7, 3, 8]),
        "There is padding between prompt and response; the response follows its prompt at once.": tokens([3, 7, 8, 7]),
        "The padding is 0, not pad_token_id.": tokens([3, 8, 0, 0]),
    }
    expect(
        "input_ids",
        batch["input_ids"],
        torch.tensor([[3, 8, 7], [3, 4, 8]]),
        given=given,
        likely="Each row is prompt, response, then padding up to the longest row; then the last column is left out.",
        mistakes={sentence: torch.tensor(row)[:, :-1] for sentence, row in rows.items()}
        | {
            "The rows were cut to the shortest one; pad to the longest instead.": torch.tensor([[3], [3]]),
            "Each row lost its own last token before the padding; leave out the last column after it.": torch.tensor(
                [[3, 7, 7], [3, 4, 8]]
            ),
        },
    )
    expect(
        "labels",
        batch["labels"],
        torch.tensor([[8, 7, 7], [4, 8, 9]]),
        given=given,
        likely="labels are the padded tokens without the first column.",
        mistakes={sentence: torch.tensor(row)[:, 1:] for sentence, row in rows.items()},
    )
    expect(
        "response_mask",
        batch["response_mask"],
        torch.tensor([[YES, NO, NO], [NO, YES, YES]]),
        given=given,
        likely="A row has as many True as its response has tokens, beginning after len(prompt) - 1 labels.",
        mistakes={
            "The mask marks padding as response.": torch.tensor([[YES, YES, YES], [NO, YES, YES]]),
            "The mask was not shifted with the labels.": torch.tensor([[NO, YES, NO], [NO, NO, YES]]),
            "Every row got the mask of the longest prompt; take each row's own length.": torch.tensor(
                [[NO, NO, NO], [NO, YES, YES]]
            ),
            "Every row got the mask of the longest prompt; take the length of each row.": torch.tensor(
                [[NO, YES, YES], [NO, YES, YES]]
            ),
        },
    )


@checks("pad_and_mask")
def padding_id_inside_a_response(algo: Algo) -> None:
    """A response token counts also where its id is the padding id."""
    batch = _batch(algo, [[5], [5]], [[6, 2], [2, 8, 2]], 2)
    expect(
        "response_mask",
        batch["response_mask"],
        torch.tensor([[YES, YES, NO], [YES, YES, YES]]),
        given="prompts [5] and [5], responses [6, 2] and [2, 8, 2], padding id 2",
        likely="Make the mask from the lengths of prompt and response alone.",
        mistakes={
            "The mask compares ids with the padding id, so a true end of the response is not trained: use lengths.": (
                torch.tensor([[YES, NO, NO], [NO, YES, NO]])
            ),
            "The mask ends at the first id that equals the padding id: use lengths.": torch.tensor(
                [[YES, NO, NO], [NO, NO, NO]]
            ),
            "The mask marks padding as response.": torch.tensor([[YES, YES, YES], [YES, YES, YES]]),
        },
    )


@checks("pad_and_mask")
def empty_response(algo: Algo) -> None:
    """A row with an empty response has no True."""
    batch = _batch(algo, [[3], [3, 4]], [[8, 9], []], 0)
    expect(
        "response_mask",
        batch["response_mask"],
        torch.tensor([[YES, YES], [NO, NO]]),
        given="prompts [3] and [3, 4], responses [8, 9] and [], padding id 0",
        likely="An empty response has no tokens, so nothing in its row counts.",
        mistakes={"The mask marks padding as response.": torch.tensor([[YES, YES], [NO, YES]])},
    )


@checks("pad_and_mask")
def lists_stay_as_they_are(algo: Algo) -> None:
    """The lists you are given do not change."""
    prompts, responses = [[3, 4], [3]], [[8], [9]]
    _batch(algo, prompts, responses, 0)
    expect(
        "prompts and responses after the call",
        (prompts, responses),
        ([[3, 4], [3]], [[8], [9]]),
        given="prompts [3, 4] and [3], responses [8] and [9]",
        likely="Your code changed the caller's lists, as `+=`, `append` and `extend` do; make new lists with `+`.",
    )


def _tokenizer(dressed: bool) -> PreTrainedTokenizerFast:
    """Knows "a", "b", " " and joins "ab" into one token. `dressed`: it puts <s> before a text and </s> behind it."""
    table = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, " ": 5}
    tokenizer = Tokenizer(models.BPE(table, [("a", "b")]))
    if dressed:
        ends = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def _tokens(algo: Algo, prompts: list[str], outputs: list[str], dressed: bool) -> list[list[int]]:
    """The rows of tokens, put together again from inputs and labels."""
    batch = algo.tokenize_prompt_and_output(prompts, outputs, _tokenizer(dressed))
    expect_keys("tokenize_prompt_and_output(...)", batch, KEYS)
    rows: list[list[int]] = torch.cat([batch["input_ids"][:, :1], batch["labels"]], dim=1).tolist()
    return rows


@checks("tokenize_prompt_and_output")
def texts_are_encoded_apart(algo: Algo) -> None:
    """Prompt and output are encoded apart, each for itself."""
    expect(
        "tokens",
        _tokens(algo, ["a"], ["b"], dressed=False),
        [[2, 3]],
        given='prompt "a" (token 2), output "b" (token 3); the text "ab" would be one token, 4',
        likely="Encode the prompt, encode the output, and give both lists to algo.pad_and_mask.",
        mistakes={
            "The joined text was encoded, so one token holds the end of the prompt and the start of the output.": [[4]],
            "Prompts and outputs were exchanged.": [[3, 2]],
        },
    )


@checks("tokenize_prompt_and_output")
def special_tokens(algo: Algo) -> None:
    """The prompt gets the tokenizer's start token once; nothing is added to the output."""
    expect(
        "tokens",
        _tokens(algo, ["a"], ["b"], dressed=True),
        [[0, 2, 3]],
        given='prompt "a", output "b"; this tokenizer makes "<s>a</s>" of "a": start token 0, end token 1',
        likely="Use encode_prompt for the prompt, and encode the output without special tokens.",
        mistakes={
            "Special tokens were added to the output: encode it without them.": [[0, 2, 0, 3, 1]],
            "The end token was put between prompt and output: encode_prompt leaves it out.": [[0, 2, 1, 3]],
            "Special tokens were added to prompt and output; the output continues the prompt.": [[0, 2, 1, 0, 3, 1]],
            "The start token of the prompt is missing: encode_prompt adds it.": [[2, 3]],
            "An end token was added to the output; it ends where its text ends.": [[0, 2, 3, 1]],
            "The joined text was encoded, so one token holds the end of the prompt and the start of the output.": [
                [0, 4, 1]
            ],
            "The joined text was encoded, and one token holds the end of the prompt and the start of the output.": [
                [0, 4]
            ],
        },
    )


@checks("tokenize_prompt_and_output")
def spaces_are_kept(algo: Algo) -> None:
    """Texts are encoded as they are, with their spaces."""
    expect(
        "tokens",
        _tokens(algo, ["a "], [" b"], dressed=False),
        [[2, 5, 5, 3]],
        given='prompt "a ", output " b"; the space is token 5',
        likely="Encode the texts as they come; do not change them.",
        mistakes={
            "The spaces at the ends of the texts were stripped; they are tokens too.": [[2, 3]],
            "The spaces at the ends of the output were stripped; they are tokens too.": [[2, 5, 3]],
            "A space was put between prompt and output.": [[2, 5, 5, 5, 3]],
        },
    )


@checks("tokenize_prompt_and_output")
def rows_stay_in_order(algo: Algo) -> None:
    """Row b holds prompt b and output b, padded with the id that is chosen above your code."""
    tokenizer = _tokenizer(dressed=False)
    tokenizer.pad_token = None
    batch = algo.tokenize_prompt_and_output(["a", "aa"], ["bb", "b b"], tokenizer)
    expect_keys("tokenize_prompt_and_output(...)", batch, KEYS)
    # tokens [2, 3, 3, pad, pad] and [2, 2, 3, 5, 3], padding id 1
    given = 'prompts "a" and "aa", outputs "bb" and "b b"; no padding token, so the end token, 1, pads'
    expect(
        "labels",
        batch["labels"],
        torch.tensor([[3, 3, 1, 1], [2, 3, 5, 3]]),
        given=given,
        likely="Give algo.pad_and_mask the ids in the order of the texts, and pad_token_id.",
    )
    expect(
        "response_mask",
        batch["response_mask"],
        torch.tensor([[YES, YES, NO, NO], [NO, YES, YES, YES]]),
        given=given,
        likely="Return what algo.pad_and_mask returns; if a check of pad_and_mask fails too, mend that first.",
    )
