"""What only a card shows: the compiled engines, one with its own attention kernel, against the plain engine."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, Olmo2Config

from a5lib.config import TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.engines.choice import compiles
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.plan import Plan
from a5lib.engines.resident import ResidentEngine
from a5lib.models import select_device
from a5lib.synthetic import made_up_batch, random_model

CARD = torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiles(CARD, torch.bfloat16),
    reason="needs a card of capability 8.0 or newer",
)


@pytest.mark.parametrize("tokens", [1191, 1216])  # a multiple of 64, as plans choose, and a number that is not even
@pytest.mark.parametrize("family", [Olmo2Config, LlamaConfig])
def test_compiled_gradients_on_shared_prompts_are_those_of_the_plain_engine(family: type, tokens: int) -> None:
    """Each tensor's within what bfloat16 sums in another order differ by; a wrong row of the attention is far off."""
    shape = family(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=1, eos_token_id=2,
        bos_token_id=None,
    )  # fmt: skip
    model = random_model(shape, dtype=torch.bfloat16)
    batch = made_up_batch(vocabulary=500, sequences=16, tokens=130, response=90, group_size=4, seed=0)
    config = resolve(
        TrainConfig(
            model="toy", algorithm="grpo", rollout_batch_size=16, train_batch_size=16, group_size=4, max_tokens=90,
            engine="resident", head="fused", dtype="bfloat16",
        )
    )  # fmt: skip
    algo = load_algo()
    plain = ResidentEngine(copy.deepcopy(model).to(CARD), config, algo)
    plain.accumulate(batch)
    expected = {name: p.grad.float() for name, p in plain.model.named_parameters() if p.grad is not None}

    plan = Plan(longest=130, microbatch_tokens=tokens, kept=1, head_block=128, bucket=1 << 20, compiled=True)
    engine = LayerMajorEngine(model, dataclasses.replace(config, engine="layer_major"), algo, plan, CARD)
    engine.accumulate(batch)
    torch.cuda.synchronize()
    found = {
        name: grad.to(CARD).float()
        for unit in engine.parts.units
        for name, grad in zip(unit.names, unit.views(unit.flat["grad"]), strict=True)
    }
    assert found.keys() == expected.keys()
    far = {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items()}
    assert max(far.values()) < 0.1, max(far.items(), key=lambda item: item[1])


def test_the_gradient_of_masked_attention_is_finite() -> None:
    """On the numbers of pytorch issue 196678: scores near -120 in 704 places, where cuDNN's kernel gave NaN."""
    card = select_device("cuda:0")
    generator = torch.Generator(card).manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 1, 704, 64, device=card, dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -960.0  # times 1 / sqrt(64)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = torch.ones(704, 704, dtype=torch.bool, device=card).tril()[None, None]
    scaled_dot_product_attention(q, k, v, attn_mask=mask).backward(grad)
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))


@pytest.mark.parametrize("family", [Olmo2Config, LlamaConfig])
def test_compiled_layers_of_the_resident_engine(family: type) -> None:
    """The gradient is the plain one's, and scores are to the bit those of the update, on rows of many lengths."""
    shape = family(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=1, eos_token_id=2,
        bos_token_id=None,
    )  # fmt: skip
    model = random_model(shape, dtype=torch.bfloat16).to(CARD)
    batch = made_up_batch(vocabulary=500, sequences=16, tokens=130, response=90, group_size=4, seed=0, ragged=True)
    config = resolve(
        TrainConfig(
            model="toy", algorithm="offpolicy_clip", rollout_batch_size=16, train_batch_size=16, group_size=4,
            max_tokens=90, gradient_accumulation_steps=4, engine="resident", head="fused", recompute_layers=True,
            dtype="bfloat16",
        )
    )  # fmt: skip
    algo = load_algo()
    gradients = []
    for compiled in (False, True):
        engine = ResidentEngine(copy.deepcopy(model), config, algo, compiled=compiled)
        _, metadata = engine.accumulate(batch | {"old_log_probs": engine.score(batch)["log_probs"]})
        assert (metadata["ratio_min"], metadata["ratio_max"]) == (1.0, 1.0)
        gradients.append({name: p.grad.float() for name, p in engine.model.named_parameters() if p.grad is not None})
    expected, found = gradients
    assert found.keys() == expected.keys()
    far = {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items()}
    assert max(far.values()) < 0.1, max(far.items(), key=lambda item: item[1])
