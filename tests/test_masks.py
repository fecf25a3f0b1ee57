"""Batches from token ids: shifted labels, masks from lengths, and texts that are encoded apart."""

import pytest
import torch

from tests.conftest import given
from tests.fakes import TableTokenizer, WordTokenizer

encode_prompt = given("masks").encode_prompt


def test_M01_pad_equals_eos(impl):
    batch = impl.pad_and_mask([[5], [5]], [[6, 2], [7, 8, 2]], pad_token_id=2)
    assert batch["labels"].tolist() == [[6, 2, 2], [7, 8, 2]]
    assert batch["response_mask"].int().tolist() == [[1, 1, 0], [1, 1, 1]], (
        "did you mask by comparing with the padding id? The first 2 of row 0 is its true end and must be learned"
    )


def test_M03_prompt_and_response_are_encoded_apart(impl):
    tokenizer = TableTokenizer({"a": [2], "b": [3], "ab": [1]})
    batch = impl.tokenize_prompt_and_output(["a"], ["b"], tokenizer)
    assert batch["input_ids"].tolist() == [[2]], "did you encode prompt + response as one text?"
    assert batch["labels"].tolist() == [[3]]
    assert batch["response_mask"].int().tolist() == [[1]]


def test_M04_one_start_token(impl):
    tokenizer = TableTokenizer({"p": [10], "r": [11], "<s>p": [1, 10]}, special=[1])
    for prompt in ("p", "<s>p"):
        batch = impl.tokenize_prompt_and_output([prompt], ["r"], tokenizer)
        tokens = [*batch["input_ids"][0].tolist(), batch["labels"][0, -1].item()]
        assert tokens == [1, 10, 11], f"prompt {prompt!r}: expected one start token in front and none in the response"
    assert encode_prompt("p", tokenizer) == [1, 10], "the engine must get the ids that are scored"


def test_the_response_follows_the_prompt_without_an_end_token_between(impl):
    tokenizer = TableTokenizer({"p": [10], "r": [11]}, special=[1], end=[9])
    batch = impl.tokenize_prompt_and_output(["p"], ["r"], tokenizer)
    assert batch["input_ids"].tolist() == [[1, 10]]
    assert batch["labels"].tolist() == [[10, 11]]


def test_M05_sampled_ids_are_kept(impl):
    # [4, 5] and [6] both decode to "hello", which encodes to [6]; the ids that were sampled are what is trained on.
    batch = impl.pad_and_mask([[3]], [[4, 5]], pad_token_id=0)
    assert batch["labels"].tolist() == [[4, 5]]
    assert batch["response_mask"].sum().item() == 2, "a response never has more tokens than were sampled"


def test_M06_alignment_and_empty_response(impl):
    pad = 0
    batch = impl.pad_and_mask([[3], [3, 4], [3, 4]], [[4, 8], [8], []], pad_token_id=pad)
    assert batch["input_ids"].tolist() == [[3, 4], [3, 4], [3, 4]]
    assert batch["labels"].tolist() == [[4, 8], [4, 8], [4, pad]]
    assert batch["response_mask"].int().tolist() == [[1, 1], [0, 1], [0, 0]], "did you shift the mask with the labels?"
    log_probs = torch.full((1, 2), -1.0, requires_grad=True)
    mask = batch["response_mask"][2:]
    for method in ("none", "noclip", "grpo", "gspo", "cispo"):
        loss, _ = impl.compute_policy_gradient_loss(torch.ones(1), log_probs, method, torch.zeros(1, 2), 0.2, mask)
        for normalization in ("sequence", "constant", "token"):
            total = impl.aggregate_loss_across_microbatch(loss, mask, normalization, 8)
            assert total.item() == 0.0, f"{method}, {normalization}: a row without response tokens counts as 0, not NaN"


def test_M10_largest_id_of_a_padded_vocabulary(impl, tiny_model):
    largest = tiny_model.config.vocab_size - 1
    batch = impl.pad_and_mask([[5]], [[5, largest]], pad_token_id=0)
    assert batch["labels"].tolist() == [[5, largest]]
    scored = impl.get_response_log_probs(tiny_model, batch["input_ids"], batch["labels"], True)
    assert scored["log_probs"].isfinite().all()


def test_dtypes_shapes_and_agreement_of_the_two_ways(impl):
    tokenizer = WordTokenizer()
    prompts, outputs = ["one two", "one two three"], ["four five six", "six"]
    by_text = impl.tokenize_prompt_and_output(prompts, outputs, tokenizer)
    encoded = [encode_prompt(p, tokenizer) for p in prompts], [tokenizer.encode(o, False) for o in outputs]
    by_ids = impl.pad_and_mask(*encoded, tokenizer.pad_token_id)
    for name, dtype in (("input_ids", torch.int64), ("labels", torch.int64), ("response_mask", torch.bool)):
        assert by_text[name].shape == (2, 4)
        assert by_text[name].dtype == dtype
        assert torch.equal(by_text[name], by_ids[name])


def test_tokenizer_without_padding_uses_its_end_token(impl):
    tokenizer = TableTokenizer({"p": [10], "long": [11, 12], "r": [11]})
    tokenizer.pad_token_id = None
    batch = impl.tokenize_prompt_and_output(["p", "p"], ["long", "r"], tokenizer)
    assert batch["labels"][1].tolist() == [11, 9]
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="pad_token"):
        impl.tokenize_prompt_and_output(["p"], ["r"], tokenizer)


@pytest.mark.parametrize(
    ("prompts", "responses", "words"),
    [([[1]], [[2], [3]], "1 prompts and 2 responses"), ([], [], "0 prompts"), ([[1], []], [[2], [3]], "Prompt 1")],
)
def test_bad_lists(impl, prompts, responses, words):
    with pytest.raises(ValueError, match=words):
        impl.pad_and_mask(prompts, responses, 0)
