"""The plan against numbers by hand, against what the engine allocates and sends on the CPU, and readings of a card."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from a5lib import optimizers
from a5lib.config import TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.engines import hidden, packing, plan
from a5lib.engines.host import Lane
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.plan import CONTEXT, GIB, MIB, PHASES, WORKSPACE, Plan, UpdateSize, plan_update, usable
from a5lib.engines.trip import Trip
from a5lib.errors import UserError
from a5lib.memory import OLMO2_1B, ModelShape
from a5lib.synthetic import published_config

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")

TINY = ModelShape(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, vocabulary=10, tied=False, head_size=2)
# queries 4, keys 2; attention 2*4*4 + 2*4*2 = 48; feed-forward 3*4*8 = 96; norms 4 + 2 + 4 + 4 = 14: a layer 158;
# embedding 40, norm and head 44: all 40 + 2 * 158 + 44 = 400


# --- numbers by hand


def by_hand(**options: Any) -> Plan:
    """Four rows of at most 5 tokens, float32, everything on the host: one microbatch of 20 tokens."""
    size = options.pop("size", UpdateSize(sequences=4, longest=5, response=3))
    options = {"engine": "layer_major", "bytes_per_weight": 4, "compiled": False, "on_card": False} | options
    return plan_update(TINY, size, **options)


def test_every_buffer_of_an_update_of_the_tiny_shape():
    assert by_hand().card["update"] == {
        "visiting weights and gradients": 2 * 2 * 158 * 4,  # two layers; more than embedding or head, 40 and 44
        "hidden states": (1 + 2) * 20 * 4 * 4,  # one microbatch of 20 tokens, 4 numbers each, and two on their way
        "token ids and positions": 20 * 40 + 2 * 5 * 2 * 4,  # five int64 a token; sines and cosines of 5 places
        "the batch and its scores": 4 * 5 * 48,
        # a token: 4 bytes * (2*4 + 2*4 + 2*2 + 4*8 = 52) + 4 bytes * (4*4 + 2*4 + 2*2 + 4 + 2 = 34) = 344 kept, keys
        # and values for one more head 2 * 2 * 4 = 16, and 4 bytes * (2*8 + 4*4) on the way; one matrix's gradient
        "layer at work": 20 * (344 + 16 + 128) + 4 * 8 * 4,
    }


def test_every_other_phase_of_the_tiny_shape():
    made = by_hand(optimizer_state="bf16")  # a float32 parameter has two float32 moments all the same
    assert set(made.card) == set(PHASES)
    assert made.card["load"] == made.card["save"] == made.card["generate"] == made.card["score"] == {}
    assert made.card["step"] == {
        "buckets": 3 * 158 * (4 + 4 + 8),  # three buckets as large as a layer: weight, gradient, two moments
        "AdamW's temporaries": 6 * 4 * 158,
    }
    assert made.host == {
        "weights": 1600,
        "gradients": 1600,
        "optimizer state": 3200,
        "layer inputs": 2 * 20 * 4 * 4,
    }


def test_scoring_has_room_for_weights_alone_and_waits_in_one_level():
    made = by_hand(size=UpdateSize(sequences=4, longest=5, response=3, scored=12))
    assert made.card["score"]["visiting weights"] == 2 * 158 * 4
    assert made.card["score"]["hidden states"] == (1 + 6) * 320, "three microbatches: two wait on the host"
    assert made.card["score"]["token ids and positions"] == 3 * 20 * 40 + 80
    assert made.card["score"]["the batch and its scores"] == 12 * 5 * 8
    assert made.host["layer inputs"] == (3 + 1) * 320, "the first layer's room holds all three microbatches"


def test_bytes_that_travel_in_an_update_of_the_tiny_shape():
    assert by_hand().traffic == {
        "score, in": 0,
        "score, out": 0,
        "pass, in": (2 * 316 + 40 + 44) * 4 + 2 * 320,  # layers twice, the ends once; the input of each layer
        "pass, out": 400 * 4 + 2 * 320,  # gradients; inputs
        "step, in": 400 * (4 + 4 + 8),
        "step, out": 400 * (4 + 8),
    }
    made = by_hand(size=UpdateSize(sequences=4, longest=5, response=3, scored=12))
    assert made.traffic["pass, in"] - by_hand().traffic["pass, in"] == 44 * 4, "a loss of ratios runs the head twice"
    # all weights once; two microbatches wait before each layer and the head; three updates share that
    assert made.traffic["score, in"] == (400 * 4 + 2 * 3 * 320) // 3
    assert made.traffic["score, out"] == 2 * 3 * 320 // 3


def test_transfer_time_is_the_slower_direction_of_each_part():
    traffic = {"score, in": 8, "score, out": 2, "pass, in": 10, "pass, out": 30, "step, in": 6, "step, out": 2}
    made = Plan(longest=1, microbatch_tokens=1, traffic=traffic)
    assert made.transfer_seconds(inward=2, outward=5) == 4 + 6 + 3


def test_the_resident_engine_by_phase():
    size = UpdateSize(sequences=4, longest=5, response=3, scored=8, decoded=2)
    made = plan_update(TINY, size, engine="resident", optimizer_state="fp32", microbatch=2)
    assert made.engine == "resident"
    held = {"libraries' workspace": WORKSPACE, "weights": 800, "optimizer state": 4800}
    assert made.card["load"] == made.card["save"] == held
    assert made.card["step"] == held | {"gradients": 800, "AdamW's temporaries": 3 * 4 * 2**21}
    assert made.card["generate"] == held | {
        "keys and values": 2 * 5 * 16 + 2 * 5 * 8,  # 2 rows of 5 tokens, 2 layers * 2 * 1 head * 2 numbers * 2 bytes
        "layer at work": 2 * 3 * 2 * (3 * 8 + 4 * 4),  # prompts of 3 tokens; more than 2 * 2 * 5 * 4 * 2 for attention
        "logits of the next tokens": 2 * 10 * 22,
    }
    assert made.host == {"weights while loading": 800}
    assert set(made.traffic.values()) == {0}
    assert made.microbatches == 2


@pytest.mark.parametrize(
    ("options", "worst"),
    [
        # two rows of 5 tokens; a layer keeps 2 * 52 + 4 * 34 = 240 bytes a token; its matrices' gradients are 3 * 64
        ({"head": "fused"}, {"layer at work": 10 * 240, "gradient before it is added": 3 * 4 * 8 * 2}),
        ({"head": "full", "recompute_layers": False},
         {"layer at work": 2 * 10 * 240, "gradient before it is added": 10 * 4 * 2, "logits": 10 * 10 * 20}),
    ],
)  # fmt: skip
def test_the_worst_moment_of_the_resident_engine(options, worst):
    size = UpdateSize(sequences=4, longest=5, response=3)
    made = plan_update(TINY, size, engine="resident", optimizer_state="bf16", microbatch=2, **options)
    inputs = (3 if options.get("recompute_layers", True) else 1) * 10 * 4 * 2
    kept = {"libraries' workspace": WORKSPACE, "weights": 800, "gradients": 800, "optimizer state": 1600}
    batch = 4 * 5 * 48  # ids, labels, mask, log-probabilities and what belongs to them, of each place
    assert made.card["update"] == kept | {"layer inputs": inputs, "the batch and its scores": batch} | worst


def test_a_large_head_in_blocks_is_worse_than_a_layer():
    size = UpdateSize(sequences=4, longest=5, response=3)
    shape = dataclasses.replace(TINY, vocabulary=1000)
    update = plan_update(shape, size, engine="resident", head_block=2).card["update"]
    assert (update["gradient before it is added"], update["logits"]) == (3 * 1000 * 4 * 2, 2 * 1000 * 20)
    assert "layer at work" not in update


def test_generation_needs_the_weights_again_where_they_live_on_the_host():
    size = UpdateSize(sequences=4, longest=5, response=3, decoded=2)
    made = plan_update(TINY, size, engine="layer_major")
    assert made.card["generate"]["weights to generate with"] == 800
    assert made.card["generate"]["keys and values"] == 240
    assert "weights to generate with" not in plan_update(TINY, size, engine="resident").card["generate"]


# --- budgets


SIZES = {
    "on-policy": UpdateSize(64, 672, 512, group=8),
    "large": UpdateSize(256, 672, 512),
    "off-policy": UpdateSize(8, 672, 512, scored=256, group=8),
    "odd": UpdateSize(13, 712, 512, scored=104),
    "long": UpdateSize(8, 8192, 8000, scored=8),
}
BUDGETS = [GIB * eighths // 8 for eighths in range(16, 24 * 8 + 1)]


def stays(made: Plan, shape: ModelShape) -> int:
    """Bytes that a plan keeps on the card from step to step, or through a pass."""
    if made.engine == "resident":
        return 10**15
    hidden_state = made.microbatch_tokens * shape.hidden * 2
    held = sum(size for name, size in made.card["load"].items() if "that stay" in name)
    kept = min(made.kept, made.microbatches) + made.card_levels * made.microbatches
    return held + kept * hidden_state


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_every_budget_is_kept_and_more_of_it_never_costs(name, state):
    size, last = SIZES[name], None
    for budget in BUDGETS:
        try:
            made = plan_update(OLMO2_1B, size, budget=budget, optimizer_state=state)
        except UserError:
            assert last is None, f"{budget / GIB} GiB is refused and less was not"
            continue
        assert made.peak() <= usable(budget)
        if last is not None:
            assert sum(made.traffic.values()) <= sum(last.traffic.values()), f"more is sent at {budget / GIB} GiB"
            assert made.microbatch_tokens >= last.microbatch_tokens or made.engine == "resident"
            assert stays(made, OLMO2_1B) >= stays(last, OLMO2_1B), f"less stays at {budget / GIB} GiB"
        last = made
    assert last is not None
    assert last.engine == ("resident" if state == "bf16" else "layer_major")


def test_less_than_one_layer_of_a_budget_lies_idle():
    for gib in (4, 6, 8, 10):
        made = plan_update(OLMO2_1B, SIZES["off-policy"], budget=gib * GIB, optimizer_state="fp32")
        assert usable(gib * GIB) - made.peak() < OLMO2_1B.layer_parameters() * (2 + 2 + 12)


@pytest.mark.parametrize("shape", [TINY, OLMO2_1B, dataclasses.replace(OLMO2_1B, tied=True)])
def test_small_steps_of_the_budget_around_the_smallest_that_fits(shape):
    size = UpdateSize(sequences=13, longest=300, response=200, scored=52)
    smallest = min((budget for budget in range(CONTEXT, 3 * GIB, 4 * MIB) if fits(shape, size, budget)), default=None)
    assert smallest is not None
    last = None
    for budget in range(smallest, smallest + 512 * MIB, 4 * MIB):
        made = plan_update(shape, size, budget=budget, engine="layer_major")
        assert made.peak() <= usable(budget)
        assert last is None or sum(made.traffic.values()) <= sum(last.traffic.values())
        last = made


def fits(shape: ModelShape, size: UpdateSize, budget: int, **options: Any) -> bool:
    try:
        plan_update(shape, size, budget=budget, **{"engine": "layer_major"} | options)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "layer_major", "budget": GIB}, ["layer-major", "in the phase 'update'", "1.0 GiB", "--max-tokens"]),
        ({"engine": "resident", "budget": 8 * GIB}, ["resident", "8.0 GiB", "--engine layer_major"]),
    ],
)
def test_a_refusal_says_what_is_needed_what_is_there_and_what_to_do(options, words):
    size = SIZES["on-policy"]
    with pytest.raises(UserError) as refusal:
        plan_update(OLMO2_1B, size, **options)
    sentence = str(refusal.value)
    assert all(word in sentence for word in words), sentence
    needed = float(re.search(r"needs ([\d.]+) GiB", sentence)[1])
    assert fits(OLMO2_1B, size, int(needed * GIB), engine=options["engine"]), "what it says is needed is not enough"
    assert not fits(OLMO2_1B, size, int((needed - 0.2) * GIB), engine=options["engine"]), "less would do"


def test_vllm_beside_the_layer_major_engine_by_hand():
    """Three rows of 200 tokens and one more; two blocks of 128 tokens a row, 16 bytes of keys and values a token."""
    kv = 2 * 2 * 1 * 2 * 2
    size = UpdateSize(sequences=4, longest=200, response=100, group=2, served=3, scored=8)
    made = by_hand(size=size, bytes_per_weight=2, on_card=True, budget=12 * GIB)
    work = plan.VLLM_TOKENS * 2 * (3 * 8 + 4 * 4) + 3 * 10 * 3 * 4
    assert made.card["generate"] == {
        "libraries' workspace": WORKSPACE,
        "vLLM, also asleep": 1536 * MIB,
        "vLLM's weights": 400 * 2,
        "vLLM's layer and logits at work": work,
        "vLLM's keys and values": (3 * 2 + 1) * 128 * kv,
    }
    assert all(made.card[phase]["vLLM, also asleep"] == 1536 * MIB for phase in PHASES)
    assert made.resident, "of a budget as large as this"
    lives = sum(158 for name in made.resident if name.startswith("layer")) + 84 * ("head" in made.resident)
    assert (made.host["what waits for vLLM"], made.host["weights for vLLM"]) == (lives * (2 + 12), lives * 2)
    once = by_hand(size=dataclasses.replace(size, scored=4), bytes_per_weight=2, on_card=True, budget=12 * GIB)
    assert not once.resident, "for one update a hand-over sends as much as is saved"


def test_a_vllm_server_takes_host_memory_for_the_weights_and_nothing_of_this_card():
    size = UpdateSize(sequences=4, longest=200, response=100, group=2, sent=True)
    without = dataclasses.replace(size, sent=False)
    options = {"bytes_per_weight": 2, "on_card": True, "budget": 12 * GIB}
    assert by_hand(size=size, **options).card == by_hand(size=without, **options).card
    lives = 400  # parameters, all on the card with that budget
    for engine in ("layer_major", "resident"):
        made = by_hand(size=size, engine=engine, **options)
        assert made.host == by_hand(size=without, engine=engine, **options).host | {"weights for vLLM": lives * 2}
    assert by_hand(size=size) == by_hand(size=without), "on the host they lie in the channel"


def test_vllm_in_eight_bits_by_hand(monkeypatch):
    """Of 400 parameters 2 * 144 are in matrices of layers: 4 * (2 * 2 + 2 * 1) * 2 of attention, 3 * 4 * 8 besides."""
    size = UpdateSize(sequences=4, longest=200, response=100, group=2, served=1, scored=8, eight_bits=True)
    options = {"bytes_per_weight": 2, "on_card": True, "budget": 12 * GIB}
    made = by_hand(size=size, **options)
    assert made.card["generate"]["vLLM's weights"] == 2 * 144 + (400 - 2 * 144) * 2
    assert (
        made.host["weights for vLLM"]
        == by_hand(size=dataclasses.replace(size, eight_bits=False), **options).host["weights for vLLM"]
    ), "they are sent whole"
    work = plan.VLLM_TOKENS * 2 * (3 * 8 + 4 * 4) + 10 * 3 * 4
    assert made.card["generate"]["vLLM's layer and logits at work"] == work
    monkeypatch.setattr(plan, "VLLM_TOKENS", 1)  # then loading takes more: gate and up, twice 4 * 8, and as much again
    made = by_hand(size=size, **options)
    assert made.card["generate"]["vLLM's layer and logits at work"] == 4 * 4 * 8 * 2 > 2 * (3 * 8 + 4 * 4) + 10 * 3 * 4
    float32 = by_hand(size=size, **(options | {"bytes_per_weight": 4}))
    assert float32.card["generate"]["vLLM's weights"] == 2 * 144 + (400 - 2 * 144) * 4


@pytest.mark.parametrize("engine", ["resident", "layer_major"])
def test_vllms_keys_and_values_take_the_room_that_is_left(engine):
    size = UpdateSize(sequences=64, longest=671, response=512, group=8, served=256)
    row = 6 * 128 * 131_072
    options = {"engine": engine, "optimizer_state": "bf16_stochastic", "microbatch": 1}
    made = {gib: plan_update(OLMO2_1B, size, budget=gib * GIB, **options) for gib in (20, 24, 80)}
    caches = {gib: p.card["generate"]["vLLM's keys and values"] for gib, p in made.items()}
    assert caches[80] == 256 * row + 128 * 131_072, "of all rows, and no more"
    assert 32 * row < caches[20] < caches[24] < caches[80]
    for gib, p in made.items():
        assert p.peak("generate") <= usable(gib * GIB)
    assert p.peak("generate") < usable(80 * GIB)
    if engine == "layer_major":
        assert made[20].peak("generate") == usable(20 * GIB), "the engine leaves all of the card to vLLM"
    least = dataclasses.replace(size, served=20)
    assert plan_update(OLMO2_1B, least, **options).card["generate"]["vLLM's keys and values"] == 20 * row + row // 6


def test_vllm_that_does_not_fit_is_refused_by_its_phase_and_fewer_rows_are_advised():
    size = UpdateSize(sequences=64, longest=671, response=512, group=8, served=256)
    with pytest.raises(UserError, match=r"in the phase 'generate', but the budget is 7.0 GiB"):
        plan_update(OLMO2_1B, size, budget=7 * GIB, optimizer_state="bf16_stochastic")


def test_what_generation_needs_is_refused_by_its_phase():
    size = UpdateSize(64, 672, 512, decoded=256)
    with pytest.raises(UserError, match=r"in the phase 'generate'.*--generation-batch-size"):
        plan_update(OLMO2_1B, size, budget=8 * GIB)


def test_without_a_budget_nothing_is_kept_and_pieces_are_large():
    made = plan_update(OLMO2_1B, UpdateSize(64, 672, 512), engine="layer_major")
    assert (made.kept, made.card_levels, made.resident) == (1, 0, frozenset())
    assert (made.microbatch_tokens, made.microbatches, made.head_block) == (5376, 8, 512)


@pytest.mark.parametrize("longest", [41, 128, 671, 700])
def test_compiled_code_gets_microbatches_that_its_compiler_need_not_pad(longest):
    for budget in (None, 4 * GIB, 8 * GIB):
        for sequences in (3, 64):
            size = UpdateSize(sequences, longest, longest - 20, group=sequences)
            plain = plan_update(OLMO2_1B, size, budget=budget, engine="layer_major", compiled=False)
            made = plan_update(OLMO2_1B, size, budget=budget, engine="layer_major")
            assert made.microbatch_tokens % plan.ALIGNED == 0 and made.microbatch_tokens >= longest
            if budget is None:
                assert 0 <= made.microbatch_tokens - plain.microbatch_tokens < plan.ALIGNED
                assert made.microbatches == plain.microbatches


@pytest.mark.parametrize("rows", [1, 5, 8, 24, 40])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_microbatches_are_counted_as_they_are_packed(rows, group):
    size = UpdateSize(rows, longest=30, response=18, group=group)  # a prompt of 13 tokens and 17 of its own
    ids = torch.randint(2, 50, (rows, 31), generator=torch.Generator().manual_seed(0))
    ids[:, :13] = torch.arange(rows)[:, None] // group
    mask = (torch.arange(30) >= 12).expand(rows, -1)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask, "advantages": torch.ones(rows)}
    for tokens in (30, 64, 100, 257, 10_000):
        n, count = plan._fullest(size, tokens)
        assert n <= max(30, tokens)
        packed = packing.pack(batch, n)
        assert len(packed) == count
        assert max(len(m.ids) for m in packed) <= n
        whole = rows * 30 if group == 1 else -(-rows // group) * 13 + rows * 17
        assert n <= whole, "room for more tokens than there are"


def test_what_waits_while_scoring_is_kept_before_layers_only_if_few_updates_share_it():
    once = plan_update(OLMO2_1B, UpdateSize(256, 672, 512, scored=256), budget=8 * GIB, engine="layer_major")
    assert once.kept_when_scoring == once.microbatches
    often = plan_update(OLMO2_1B, UpdateSize(8, 672, 512, scored=4096), budget=8 * GIB, engine="layer_major")
    never = plan_update(OLMO2_1B, UpdateSize(8, 672, 512), budget=8 * GIB, engine="layer_major")
    assert often.resident == never.resident and often.kept_when_scoring < 512 * often.microbatches


def test_the_plan_as_json():
    made = plan_update(OLMO2_1B, SIZES["on-policy"], budget=8 * GIB)
    values = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert values["engine"] == "layer_major" and values["budget_bytes"] == 8 * GIB
    assert values["card"]["update"] == made.card["update"] and values["host"] == made.host


# --- shapes of real models


FAMILIES = {
    "olmo2": (Olmo2Config, {}),
    "llama": (LlamaConfig, {}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
}


def config_of(family: str, tied: bool = False, **sizes: Any) -> PreTrainedConfig:
    kind, options = FAMILIES[family]
    base = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
                bos_token_id=None)  # fmt: skip
    return kind(**base | options | sizes, tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_a_shape_are_those_of_the_model(family, tied):
    model = AutoModelForCausalLM.from_config(config_of(family, tied))
    shape = ModelShape.of(model.config)
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    assert [shape.layer_parameters()] * 3 == [
        sum(p.numel() for p in layer.parameters()) for layer in model.model.layers
    ]
    assert shape.tied == tied and shape.norm_first == (family != "olmo2") and shape.head_norms == (family == "qwen3")


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2),
        Qwen3MoeConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                       num_experts=2, moe_intermediate_size=4, intermediate_size=8, head_dim=4),
        T5Config(vocab_size=20, d_model=8, num_layers=1, num_heads=2),
    ],
)  # fmt: skip
def test_a_model_of_other_parts_is_refused_by_name(config):
    with pytest.raises(UserError, match=f"cannot count '{config.model_type}'"):
        ModelShape.of(config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_layers_activations_are_those_that_autograd_keeps(family):
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="sdpa").bfloat16()
    rows = torch.randn(2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    places = model.model.rotary_emb(rows, torch.arange(64)[None])
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *places)}
    storages: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](rows, position_embeddings=places)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    assert counted == 2 * 64 * ModelShape.of(model.config).activation_bytes_per_token(2)


# --- what the engine allocates and sends on the CPU

LONGEST, ROWS = 32, 16


def full_batch(rows: int) -> dict[str, torch.Tensor]:
    """Rows that use every column and share no prompt: then microbatches are as full as the plan says."""
    ids = torch.randint(2, 50, (rows, LONGEST + 1), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(rows) + 2
    mask = (torch.arange(LONGEST) >= LONGEST - 28).expand(rows, -1)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask, "advantages": torch.ones(rows),
            "old_log_probs": torch.full((rows, LONGEST), -4.0)}  # fmt: skip


LAYERS = frozenset({"layer 0", "layer 1", "layer 2"})
CHOICES: list[dict[str, Any]] = [
    {},
    {"kept": 4, "kept_when_scoring": 8},
    {"kept": 3, "kept_when_scoring": 5, "resident": frozenset({"layer 0"})},
    {"kept": 2, "resident": LAYERS},
    {"resident": LAYERS | {"head", "embedding"}, "card_levels": 1},
    {"kept": 4, "card_levels": 3, "kept_when_scoring": 2},
    {"kept": 4, "card_levels": 3, "kept_when_scoring": 8},
    {"kept": 3, "card_levels": 2, "resident": frozenset({"layer 0", "layer 1"})},
]


def planned(config: PreTrainedConfig, algorithm: str, state: Any, choice: dict[str, Any]) -> Plan:
    """A plan of four microbatches of two rows, with its bytes."""
    shape = ModelShape.of(config)
    size = UpdateSize(8, LONGEST, 28, scored=ROWS if algorithm.startswith("off") else 0)
    made = Plan(longest=LONGEST, microbatch_tokens=64, microbatches=4, head_block=16, on_card=False, **choice)
    return dataclasses.replace(
        made,
        card=plan._card(made, shape, size, state, 4),
        host=plan._host(made, shape, size, state, 4),
        traffic=plan._traffic(made, shape, size, state, 4),
    )


def engine_of(config: PreTrainedConfig, algorithm: str, made: Plan, state: Any) -> LayerMajorEngine:
    model = AutoModelForCausalLM.from_config(config).eval()
    sizes = {"rollout_batch_size": ROWS if algorithm.startswith("off") else 8, "group_size": 4, "train_batch_size": 8}
    settings = resolve(TrainConfig(model="x", algorithm=algorithm, optimizer_state=state, max_tokens=28, **sizes))
    return LayerMajorEngine(model, settings, load_algo("solutions"), made, CPU)


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


CASES = [("olmo2", False, "grpo"), ("qwen3", True, "offpolicy_clip"), ("llama", False, "offpolicy_clip")]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("family", "tied", "algorithm"), CASES)
def test_every_buffer_has_the_planned_size(monkeypatch, family, tied, algorithm, choice):
    config = config_of(family, tied)
    made = planned(config, algorithm, "fp32", choice)
    trips: list[Trip] = []
    begin = Trip.__init__
    monkeypatch.setattr(Trip, "__init__", lambda self, *args: (begin(self, *args), trips.append(self))[0])
    engine = engine_of(config, algorithm, made, "fp32")

    kinds = {"weights": ["weight"], "gradients": ["grad"], "optimizer state": ["exp_avg", "exp_avg_sq"]}
    for stay, where in ((False, made.host), (True, made.card["load"])):
        units = [unit for unit in engine.parts.units if (unit.name in made.resident) == stay]
        for name, flats in kinds.items():
            allocated = nbytes(unit.flat[flat] for unit in units for flat in flats)
            planned_name = (
                name if not stay else f"{name} that stays" if name == "optimizer state" else f"{name} that stay"
            )
            assert allocated == where.get(planned_name, 0), name

    if algorithm != "grpo":
        engine.score(full_batch(ROWS))
        check_trip(trips[-1], made.card["score"], "visiting weights")
    engine.accumulate(full_batch(8))
    check_trip(trips[-1], made.card["update"], "visiting weights and gradients")
    assert nbytes(tensor for level in engine.levels.levels for tensor in level) == made.host["layer inputs"]

    taken: list[int] = []
    empty = engine.empty
    monkeypatch.setattr(engine, "empty", lambda n, dtype: (taken.append(n * dtype.itemsize), empty(n, dtype))[1])
    engine.step(1e-3)
    assert sum(taken) == made.card["step"].get("buckets", 0)


def check_trip(trip: Trip, planned: dict[str, int], visiting: str) -> None:
    assert trip.end_weight.untyped_storage().nbytes() == planned.get(visiting, 0)
    states = trip.hidden
    assert nbytes([*states.here, *(slot.buffer for slot in states.ring)]) == planned["hidden states"]
    on_card = [tensor for level in states.levels[: trip.engine.plan.card_levels] for tensor in level]
    assert nbytes(on_card if trip.keep_inputs else []) == planned.get("layer inputs", 0)
    held = [value for m in trip.microbatches for value in vars(m).values() if isinstance(value, torch.Tensor)]
    assert nbytes([*held, trip.cos, trip.sin]) <= planned["token ids and positions"]
    assert nbytes([*held, trip.cos, trip.sin]) >= 0.9 * planned["token ids and positions"]


class _Copies(TorchDispatchMode):
    """Adds up the bytes of what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.bytes += args[1].numel() * args[1].itemsize
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if "card_levels" not in choice])
@pytest.mark.parametrize(("family", "tied", "algorithm"), CASES)
def test_every_byte_that_travels_was_planned(monkeypatch, family, tied, algorithm, choice):
    config = config_of(family, tied)
    made = planned(config, algorithm, "fp32", choice)
    after, counts = Lane.after, {}

    @contextmanager
    def counted(self: Lane, *events: Any) -> Iterator[None]:
        with after(self, *events), counts.setdefault(id(self), _Copies()):
            yield

    monkeypatch.setattr(Lane, "after", counted)
    engine = engine_of(config, algorithm, made, "fp32")
    lanes = {"in": engine.lanes.inward, "out": engine.lanes.outward}

    def sent(part: str, share: int = 1) -> None:
        for way, lane in lanes.items():
            copied = counts.setdefault(id(lane), _Copies())
            assert copied.bytes // share == made.traffic[f"{part}, {way}"], f"{part}, {way}"
            copied.bytes = 0

    if algorithm != "grpo":
        engine.score(full_batch(ROWS))
        sent("score", share=ROWS // 8)
    engine.accumulate(full_batch(8))
    sent("pass")
    engine.step(1e-3)
    sent("step")


def test_numbers_that_are_written_twice_are_equal():
    assert (plan.RING, plan.RING_WHEN_KEPT) == (hidden.RING, hidden.RING_WHEN_KEPT)
    assert plan.ADAMW_BLOCK == optimizers.BLOCK


# --- readings of a card

LOG = json.loads((ROOT / "runs" / "plan-calibration" / "readings.json").read_text(encoding="utf-8"))
ANSWERS = 512 / 672  # share of the tokens that are responses, as in the benchmark's batch


def predictions(reading: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What was allocated already in each part of a reading, and what the formulas add, in bytes."""
    shape = dataclasses.replace(ModelShape.of(published_config(reading["model"])), layers=LOG["layers"])
    n, compiled = reading["microbatch_tokens"], reading["compiled"]
    size = UpdateSize(LOG["sequences"], LOG["tokens"], 512, scored=LOG["sequences"])
    count = LOG["sequences"] * LOG["tokens"] // n
    made = Plan(longest=LOG["tokens"], microbatch_tokens=n, microbatches=count, head_block=reading["head_block"],
                compiled=compiled)  # fmt: skip
    card = plan._card(made, shape, size, "bf16", 2)
    base = {phase: sum(size for name, size in card[phase].items() if "at work" not in name)
            for phase in ("score", "update")}  # fmt: skip
    added = {
        "up": plan._up(shape, n, 2, compiled),
        "head": plan._head(shape, n, int(n * ANSWERS), reading["head_block"], 2, compiled),
        "down": plan._down(shape, n, 2, compiled, segments=LOG["sequences"] + n // LOG["tokens"] + 1),
    }
    return {"up": base["score"], "head": base["update"], "down": base["update"]}, added


@pytest.mark.parametrize("reading", LOG["readings"], ids=lambda r: f"{r['model']}-{r['microbatch_tokens']}")
def test_the_formulas_give_the_peaks_that_were_read(reading):
    base, added = predictions(reading)
    within = 0.01 if reading["compiled"] else 0.05
    for part, predicted in added.items():
        if reading[part] is not None:
            read = base[part] + reading[part] * MIB
            assert abs(base[part] + predicted - read) < within * read, part


def test_the_embeddings_gradient_is_not_underestimated():
    made = Plan(longest=672, microbatch_tokens=128, head_block=16, compiled=False)
    wide = dataclasses.replace(OLMO2_1B, hidden=256, intermediate=256)  # a layer so small that the vocabulary is worst
    work = plan._card(made, wide, UpdateSize(1, 128, 100), "bf16", 2)["update"]
    assert work["embedding's gradient"] >= LOG["embedding_gradient_mib"] * MIB
    assert LOG["cublas_workspace_mib"] * MIB == plan.WORKSPACE


MEASURED = [
    row
    for row in map(json.loads, (ROOT / "runs/bench-update-h200/rows.jsonl").read_text(encoding="utf-8").splitlines())
    if row["error"] is None and row["plan"] is not None
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["variant"]["name"])
def test_peaks_of_the_benchmark_are_predicted_within_a_twentieth(row):
    variant, settings, used = row["variant"], row["variant"]["settings"], row["plan"]
    shape = ModelShape.of(published_config(variant["model"]))
    scored = variant["scoring"] or settings.get("algorithm", "grpo").startswith("offpolicy_")
    size = UpdateSize(variant["sequences"], variant["tokens"], variant["response"],
                      scored=variant["sequences"] if scored else 0, group=variant["group_size"])  # fmt: skip
    state, phase = settings.get("optimizer_state", "bf16"), "score" if variant["scoring"] else "update"
    if used["engine"] == "resident":
        rows = used["microbatch_tokens"] // used["longest"]
        made = plan_update(
            shape, size, engine="resident", optimizer_state=state, microbatch=rows, head_block=used["head_block"],
            recompute_layers=settings["recompute_layers"], head=settings["head"],
        )  # fmt: skip
        predicted = made.peak(phase)
    else:
        fields = {f.name: used[f.name] for f in dataclasses.fields(Plan) if f.name in used}
        made = Plan(**fields | {"resident": frozenset(used["resident"])})
        predicted = sum(plan._card(made, shape, size, state, 2)[phase].values())
    assert abs(predicted / row["phases"]["accumulate"]["allocated"] - 1) < 0.05


# --- speed


def test_a_plan_is_made_without_torch():
    code = "import sys, a5lib.engines.plan; print(*sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "", "importing these takes seconds"
