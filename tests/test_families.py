"""The families that the layer-major engine knows, against the plain model; and what it refuses, in words."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from a5lib.engines.parts import take_apart
from a5lib.errors import UserError
from tests.engine_tools import (
    CPU,
    Batch,
    config,
    float64_norms,  # noqa: F401  a fixture
    gradients,
    layer_major,
    plain_gradients,
    plain_scores,
    plain_steps,
    ragged_batch,
    relative_error,
    resident,
)

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}


def build(kind: type[PreTrainedModel], settings: type[Any], **options: Any) -> PreTrainedModel:
    """A tiny model of a real class, every parameter moved from its first value: norms from ones, biases from zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(settings(**SIZES | options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def llama(**options: Any) -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig, **options)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "OLMo-2, with a padding token": lambda: build(Olmo2ForCausalLM, Olmo2Config, pad_token_id=0),
    "OLMo-2, tied": lambda: build(Olmo2ForCausalLM, Olmo2Config, pad_token_id=0, tie_word_embeddings=True),
    "Llama, grouped heads": llama,
    "Llama, tied, with a padding token": lambda: llama(tie_word_embeddings=True, pad_token_id=0),
    "Llama, one key head": lambda: llama(num_key_value_heads=1),
    "Llama, wide heads and biases": lambda: llama(head_dim=10, attention_bias=True, mlp_bias=True),
    "Llama, llama3 positions": lambda: llama(rope_parameters=LLAMA3),
    "Llama, yarn positions": lambda: llama(rope_parameters=YARN),
    "Llama, linear positions": lambda: llama(rope_parameters=LINEAR),
    "Qwen2, biases": lambda: build(Qwen2ForCausalLM, Qwen2Config),
    "Qwen2, tied": lambda: build(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True),
    "Qwen2, yarn positions": lambda: build(Qwen2ForCausalLM, Qwen2Config, rope_parameters=YARN),
    "Qwen3, norms on wide heads": lambda: build(Qwen3ForCausalLM, Qwen3Config, head_dim=16),
    "Qwen3, tied": lambda: build(Qwen3ForCausalLM, Qwen3Config, head_dim=16, tie_word_embeddings=True, pad_token_id=0),
}
families = pytest.mark.parametrize("name", FAMILIES)


@cache
def shared_batch() -> Batch:
    """Longer than the 16 positions that the scaled kinds of positions begin with."""
    return ragged_batch(llama(), longest=20)


def engine(model: PreTrainedModel, **plan: Any) -> Any:
    plan = {"longest": 25, "microbatch_tokens": 40, "kept": 2, "resident": frozenset({"layer 1"})} | plan
    return layer_major(model, config(max_tokens=20), **plan)


@families
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    model = FAMILIES[name]()
    this = engine(model.double())
    loss, _ = this.accumulate(shared_batch())
    wanted_loss, wanted = plain_gradients(model, shared_batch(), config(max_tokens=20))
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    actual = gradients(this)
    assert actual.keys() == wanted.keys()
    for key, gradient in actual.items():
        assert wanted[key].any(), f"{key} has no gradient, so nothing is tested"
        assert relative_error(gradient, wanted[key]) < 1e-12, key


@families
def test_scores_are_those_of_the_plain_model(name: str) -> None:
    model = FAMILIES[name]()
    scores = engine(model).score(shared_batch())
    with torch.no_grad():
        wanted = plain_scores(model.double(), shared_batch())
    trained = shared_batch()["response_mask"] & (shared_batch()["advantages"] != 0)[:, None]
    for values, exact in zip((scores["log_probs"], scores["token_entropy"]), wanted, strict=True):
        torch.testing.assert_close(values[trained].double(), exact[trained], rtol=0, atol=1e-5)


@families
def test_two_steps_are_those_of_the_plain_model(name: str) -> None:
    model = FAMILIES[name]()
    norms, weights = plain_steps(model, shared_batch(), config(max_tokens=20), count=2, lr=1e-3)
    this = engine(model.double())
    for norm in norms:
        this.accumulate(shared_batch())
        assert this.step(1e-3) == pytest.approx(norm, rel=1e-9)
    for key, weight in this.weights():
        torch.testing.assert_close(weight.detach(), weights[key], rtol=0, atol=1e-10, msg=key)


@families
def test_in_float32_both_engines_agree_to_rounding(name: str) -> None:
    model = FAMILIES[name]()
    this, other = engine(model), resident(model, config(max_tokens=20))
    for one in (this, other):
        one.accumulate(shared_batch())
    wanted = gradients(other)
    for key, gradient in gradients(this).items():
        assert relative_error(gradient, wanted[key]) < 1e-5, key


def embedding_gradient(model: PreTrainedModel) -> Tensor:
    this = engine(model.double())
    this.accumulate(shared_batch())
    return gradients(this)["model.embed_tokens.weight"]


def test_a_padding_token_in_a_prompt_gets_the_gradient_that_the_model_gives_it() -> None:
    """An embedding with a padding token leaves its row out; a head that shares the matrix does not."""
    assert (shared_batch()["input_ids"][:, 1] == 0).all(), "id 0 is in every prompt"
    assert embedding_gradient(llama())[0].any()
    assert not embedding_gradient(llama(pad_token_id=0))[0].any()
    assert embedding_gradient(llama(pad_token_id=0, tie_word_embeddings=True))[0].any()


def test_the_kind_of_positions_matters_in_these_tests() -> None:
    """A batch that is too short would not show a wrong scaling."""
    with torch.no_grad():
        scores = [
            plain_scores(llama(**options), shared_batch())[0]
            for options in ({}, {"rope_parameters": LLAMA3}, {"rope_parameters": YARN}, {"rope_parameters": LINEAR})
        ]
    for i, one in enumerate(scores):
        for other in scores[:i]:
            assert (one - other).abs().max() > 1e-3


def test_taking_apart_leaves_the_model_as_it_was() -> None:
    model = llama()
    before = model(torch.tensor([[5, 6, 7]])).logits
    parts = take_apart(model, CPU)
    assert [unit.name for unit in parts.units] == ["embedding", "layer 0", "layer 1", "layer 2", "head"]
    named = [(name, p) for unit in parts.units for name, p in zip(unit.names, unit.parameters, strict=True)]
    assert [name for name, _ in named] == [name for name, _ in model.named_parameters()]
    assert [unit.first for unit in parts.units] == [sum(u.numel for u in parts.units[:i]) for i in range(5)]
    assert sum(p.numel() for p in parts.layer.parameters()) == 0, "a layer without weights of its own"
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, before)


# --- what it refuses


def with_head_bias() -> PreTrainedModel:
    model = llama()
    model.lm_head = torch.nn.Linear(24, 260, bias=True)
    return model


def with_setting(**settings: Any) -> PreTrainedModel:
    model = llama()
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def with_a_narrow_layer() -> PreTrainedModel:
    model = llama()
    model.model.layers[1].mlp = build(LlamaForCausalLM, LlamaConfig, intermediate_size=16).model.layers[1].mlp
    return model


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 260}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "GPT-2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), r"its architecture 'gpt2'"),
    "Gemma 2": (lambda: build(Gemma2ForCausalLM, Gemma2Config, head_dim=8), r"its architecture 'gemma2'"),
    "Gemma 3": (lambda: build(Gemma3ForCausalLM, Gemma3TextConfig, head_dim=8), r"its architecture 'gemma3_text'"),
    "Mistral": (lambda: build(MistralForCausalLM, MistralConfig, sliding_window=8), r"its architecture 'mistral'"),
    "OLMo-3": (lambda: build(Olmo3ForCausalLM, Olmo3Config), r"its architecture 'olmo3'"),
    "Phi-3": (lambda: build(Phi3ForCausalLM, Phi3Config, pad_token_id=0), r"its architecture 'phi3'"),
    "Cohere": (lambda: build(CohereForCausalLM, CohereConfig), r"its architecture 'cohere'"),
    "Granite": (lambda: build(GraniteForCausalLM, GraniteConfig), r"its architecture 'granite'"),
    "Qwen2 with windows": (
        lambda: build(Qwen2ForCausalLM, Qwen2Config, **SLIDING),
        r"layers with sliding-window attention",
    ),
    "Qwen3 with windows": (
        lambda: build(Qwen3ForCausalLM, Qwen3Config, head_dim=16, **SLIDING),
        r"layers with sliding-window attention",
    ),
    "positions that grow": (lambda: llama(rope_parameters=DYNAMIC), r"positions of type 'dynamic'"),
    "a head with a bias": (with_head_bias, r"a head with a bias"),
    "a scale of the logits": (lambda: with_setting(logit_scale=0.25), r"the setting logit_scale"),
    "a soft cap": (lambda: with_setting(final_logit_softcapping=30.0), r"the setting final_logit_softcapping"),
    "dropout": (lambda: llama(attention_dropout=0.1), r"dropout in the attention"),
}


@pytest.mark.parametrize(("make", "missing"), REFUSED.values(), ids=REFUSED.keys())
def test_what_it_would_compute_wrongly_is_refused_by_name(make: Callable[[], PreTrainedModel], missing: str) -> None:
    model = make()
    sentence = rf"^The layer-major engine cannot train '{model.config.model_type}': it does not have {missing}"
    with pytest.raises(UserError, match=sentence) as refused:
        layer_major(model, config())
    assert "use --engine resident, which runs the model's own code" in str(refused.value)


def test_layers_of_different_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"cannot train 'llama': its layers differ in shape; use --engine resident"):
        layer_major(with_a_narrow_layer(), config())


def test_a_refusal_names_the_folder_of_the_model() -> None:
    model = llama(attention_dropout=0.1)
    model.config.name_or_path = "models/mine"
    with pytest.raises(UserError, match="cannot train 'models/mine': it does not have dropout"):
        layer_major(model, config())
