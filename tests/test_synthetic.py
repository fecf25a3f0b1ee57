"""Models with random weights in published sizes, and made-up batches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from a5lib.errors import UserError
from a5lib.synthetic import PUBLISHED, made_up_batch, published_config, random_model

# Published sizes: parameters, and tensors that hold them.
SIZES = {"olmo2-1b": (1_484_916_736, 179), "olmo2-7b": (7_298_617_344, 355), "llama3.1-8b": (8_030_261_248, 291)}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_configuration_has_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published_config(name))
    parameters = list(model.parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == SIZES[name]


def test_a_misspelt_model_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"did you mean 'olmo2-1b'.*olmo2-7b"):
        published_config("olmo-1b")


@pytest.mark.parametrize("name", ["tiny", "llama3.1-8b"])
def test_only_the_weights_differ_from_a_model_that_transformers_makes(name: str) -> None:
    config = published_config(name)
    if name != "tiny":  # the same rotary frequencies, few weights
        for field, value in {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}.items():  # fmt: skip
            setattr(config, field, value)
    ours = random_model(config, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.load_state_dict(ours.state_dict())
    for (name_a, a), (name_b, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert name_a == name_b
        assert torch.equal(a, b), f"{name_a} is not what the config asks for"
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_weights_have_the_published_spread_and_no_two_matrices_or_rows_are_the_same() -> None:
    model = random_model(published_config("tiny"), dtype=torch.float32, seed=3)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    for name, weight in matrices.items():
        assert abs(weight.mean()) < 2e-3, name
        assert 0.018 < weight.std() < 0.022, name
    rows = torch.cat([weight[:, :64] for weight in matrices.values()])
    assert len(rows.unique(dim=0)) == len(rows)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert norms
    assert all((p == 1).all() for p in norms)


def test_a_seed_repeats_the_weights_and_another_does_not() -> None:
    first, again, other = (random_model(published_config("tiny"), seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.bfloat16


def test_weights_beyond_the_drawn_block_go_on_with_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a5lib.synthetic.BLOCK", 1009)
    flat = random_model(published_config("tiny"), dtype=torch.float32).get_input_embeddings().weight.flatten()
    assert torch.equal(flat[1009:2018], flat[:1009])
    assert len(flat[:1009].unique()) > 1000


def test_a_whole_batch_fills_all_columns() -> None:
    batch = made_up_batch(vocabulary=264, sequences=8, tokens=40, response=24, group_size=4)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["response_mask"].shape == (8, 40)
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["response_mask"], (torch.arange(40) >= 16).expand(8, 40))
    assert batch["input_ids"].min() >= 2
    prompts = batch["input_ids"][:, :17]
    assert torch.equal(prompts[0], prompts[3]), "a group shares its prompt"
    assert not torch.equal(prompts[3], prompts[4])
    assert len(batch["labels"][:, 16:].unique(dim=0)) == 8


def test_a_ragged_batch_has_gsm8k_like_lengths_and_padding_on_the_right() -> None:
    batch = made_up_batch(vocabulary=1000, sequences=640, tokens=712, group_size=16, ragged=True, zero_share=0.3)
    mask = batch["response_mask"]
    lengths = mask.sum(dim=1)
    prompts = mask.int().argmax(dim=1) + 1  # ids before the first response token
    assert 172 < lengths.float().mean() < 188
    assert lengths.min() >= 16
    assert lengths.max() <= 512
    assert 155 < prompts.float().mean() < 167
    assert prompts.min() >= 120
    assert prompts.max() <= 201
    for row in (0, 77):
        end = prompts[row] + lengths[row]
        assert (batch["input_ids"][row, : end - 1] >= 2).all()
        assert (batch["labels"][row, end - 1 :] == 0).all()
        assert mask[row, prompts[row] - 1 : end - 1].all()


def test_advantages_are_normalised_in_each_group_and_the_share_of_zero_groups_is_exact() -> None:
    batch = made_up_batch(
        vocabulary=264, sequences=160, tokens=12, response=4, group_size=16, zero_share=0.3
    )  # 3 of 10 groups
    groups = batch["advantages"].view(10, 16)
    zero = (groups == 0).all(dim=1)
    assert zero.sum() == 3
    assert (groups[~zero] != 0).all()
    torch.testing.assert_close(groups[~zero].mean(dim=1), torch.zeros(7), atol=1e-6, rtol=0)
    torch.testing.assert_close(groups[~zero].std(dim=1), torch.ones(7))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"sequences": 10, "group_size": 4}, "10 sequences do not make whole groups of 4"),
        ({"sequences": 4, "group_size": 1}, "a group has at least 2"),
        ({"tokens": 12, "response": 12}, "A response of 12 tokens does not fit into 12 columns"),
        ({"tokens": 12, "response": 0}, "1 to 11"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        made_up_batch(vocabulary=264, **sizes)


def test_every_published_model_has_its_own_configuration() -> None:
    assert len({published_config(name).to_json_string() for name in PUBLISHED}) == len(PUBLISHED)
