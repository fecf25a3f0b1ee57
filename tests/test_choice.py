"""Which engine a run gets, and the cap that a budget puts on the card; the card is a stand-in."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from a5lib import machine
from a5lib.config import TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.engines import choice, host
from a5lib.engines.plan import CONTEXT, GIB, VLLM_ASLEEP, Plan
from a5lib.errors import UserError
from a5lib.rollouts import choice as backends
from a5lib.rollouts.choice import best_backend, check_backend, vllm_settings
from tests.helpers import tiny_olmo2

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
OLMO2_1B = tiny_olmo2().config.__class__(
    vocab_size=100_352, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=16, pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip


def plan(device=CPU, dtype=torch.bfloat16, free=40 * GIB, host=64 * GIB, **flags) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda card: (free, 80 * GIB))
        patch.setattr(machine, "host_memory", lambda: (host, host))
        patch.setattr(choice, "compiles", lambda device, dtype: device.type == "cuda")
        config = resolve(TrainConfig(model="x", optimizer_state="bf16", low_memory=True, **flags))
        return choice.plan_run(config, OLMO2_1B, 161, device, dtype)


def test_without_a_budget_the_cpu_gets_the_resident_engine_and_with_one_the_layer_major():
    assert plan().engine == "resident"
    assert plan(vram_budget=8).engine == "layer_major"
    assert plan(vram_budget=14, engine="resident").engine == "resident", "a name decides"
    assert plan(engine="layer_major").resident == frozenset(), "without a budget nothing stays"


@pytest.mark.parametrize("told", [False, True])
def test_a_run_that_failed_in_a_notebook_is_let_go(told, monkeypatch):
    """As in a notebook, the last exception is kept and its variables are looked at; with `told` it is a sentence that
    another exception has caused.
    """
    kept = []

    def run():
        engine = host.HostMemory(torch.device("cpu"))
        kept.append(weakref.ref(engine))
        step(engine)

    def step(engine):
        raise KeyboardInterrupt

    try:
        try:
            run()
        except KeyboardInterrupt as error:
            if told:
                raise UserError("stopped") from error
            raise
    except BaseException as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        for shown in (error, error.__cause__):
            for frame, _ in traceback.walk_tb(shown and shown.__traceback__):
                assert frame.f_locals
    gc.collect()
    assert kept[0]() is not None, "the exception holds the functions' variables"
    plan()
    assert kept[0]() is None
    plan()


def test_on_a_card_the_resident_engine_is_taken_where_it_fits_what_is_free():
    assert plan(CARD).engine == "resident"
    small = plan(CARD, free=10 * GIB)
    assert (small.engine, small.budget) == ("layer_major", 10 * GIB)
    assert small.compiled and not plan(CARD, free=10 * GIB, compile_layer=False).compiled


def test_the_plan_knows_the_largest_batch():
    made = plan(CARD, vram_budget=8, algorithm="offpolicy_clip", generation_batch_size=4)
    assert made.longest == 161 + 512 - 1, "the last token is a label only"
    assert made.card["score"] != made.card["load"], "an importance ratio needs old log-probabilities"
    assert "keys and values" in made.card["generate"]
    assert plan(CARD, vram_budget=12, generation_batch_size=4).card["score"].keys() <= made.card["score"].keys()


def test_the_plan_knows_vllm_and_that_its_rollouts_are_scored():
    made = plan(CARD, vram_budget=24, generation_backend="vllm-colocated")
    assert "vLLM's keys and values" in made.card["generate"] and "keys and values" not in made.card["generate"]
    assert made.card["score"] != made.card["load"], "the mismatch needs the trainer's log-probabilities"
    on_cpu = plan(generation_backend="vllm-colocated")
    assert not [name for name in on_cpu.card["generate"] if "vLLM" in name]
    assert on_cpu.host["weights for vLLM"] > 0 and made.host["weights for vLLM"] > 0, "the weight channel"
    assert "weights for vLLM" not in plan().host
    with pytest.raises(UserError, match=r"phase 'generate'.* use --generation-batch-size \d+, "):
        plan(CARD, vram_budget=6.5, generation_backend="vllm-colocated")


def test_vllm_gets_what_the_plan_gives_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(total_memory=80 * GIB))
    config = resolve(TrainConfig(generation_backend="vllm-colocated", vram_budget=24))
    made = plan(CARD, vram_budget=24, generation_backend="vllm-colocated")
    settings = vllm_settings(config, tiny_olmo2(), CARD, made)
    generate = made.card["generate"]
    assert settings["kv_cache_bytes"] == generate["vLLM's keys and values"]
    theirs = ("vLLM's weights", "vLLM's layer and logits at work", "vLLM's keys and values")
    assert settings["memory_share"] == pytest.approx(sum(generate[name] for name in theirs) / (80 * GIB))
    assert settings["max_model_len"] == 161 + 512


def test_eight_bits_leave_vllm_more_room_for_keys_and_values():
    fields = {"generation_backend": "vllm-colocated", "vram_budget": 12}
    full, eight = (plan(CARD, rollout_quantization=name, **fields).card["generate"] for name in ("none", "fp8"))
    assert eight["vLLM's weights"] < full["vLLM's weights"]
    assert eight["vLLM's keys and values"] > full["vLLM's keys and values"]
    assert sum(eight.values()) <= sum(full.values())
    config = resolve(TrainConfig(rollout_quantization="fp8", generation_backend="vllm-colocated"))
    settings = vllm_settings(config, tiny_olmo2(), CPU, plan(CPU, rollout_quantization="fp8", **fields))
    assert settings["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("fields", "capability", "sentence"),
    [
        (
            {},
            None,
            r"^--rollout-quantization fp8 needs bfloat16 weights, and these are float32; use --dtype bfloat16\.$",
        ),
        (
            {"device": "cuda"},
            (8, 6),
            r"^--rollout-quantization fp8 needs a card that .* this one's is 8\.6; leave it out",
        ),
        ({"device": "cuda"}, (8, 9), None),
        ({"dtype": "bfloat16"}, None, None),
    ],
)
def test_eight_bits_are_refused_before_any_work_where_they_cannot_be(fields, capability, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object())
    config = resolve(TrainConfig(rollout_quantization="fp8", generation_backend="vllm-colocated", **fields))
    if sentence is None:
        check_backend(config)
        return
    with pytest.raises(UserError, match=sentence):
        check_backend(config)


def test_a_budget_below_the_smallest_plan_is_one_sentence():
    with pytest.raises(UserError, match=r"^The layer-major engine needs .* GiB in the phase .* but the budget is 1.0"):
        plan(CARD, vram_budget=1)


def test_too_little_host_memory_is_refused_before_a_weight_is_read():
    with pytest.raises(UserError, match=r"^The layer-major engine needs .* GiB of host memory, but 8.0 GiB are free; "):
        plan(CARD, vram_budget=8, host=8 * GIB)


def test_a_budget_that_was_asked_for_is_a_hard_cap_on_the_card(monkeypatch):
    caps = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(total_memory=16 * GIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, card: caps.append((share, card.index))
    )
    monkeypatch.setattr(choice, "LayerMajorEngine", lambda *arguments: "engine")
    config = resolve(TrainConfig(vram_budget=8))
    made = Plan(longest=8, microbatch_tokens=16)
    assert choice.make_engine(tiny_olmo2(), config, load_algo("solutions"), made, CARD) == "engine"
    assert caps == [((8 * GIB - CONTEXT) / (16 * GIB), 0)], "torch wants the card's number"
    both = resolve(TrainConfig(vram_budget=8, generation_backend="vllm-colocated"))
    choice.make_engine(tiny_olmo2(), both, load_algo("solutions"), made, CARD)
    assert caps.pop() == ((8 * GIB - CONTEXT - VLLM_ASLEEP) / (16 * GIB), 0), "vLLM sleeps on the same card"
    choice.make_engine(tiny_olmo2(), resolve(TrainConfig()), load_algo("solutions"), made, CARD)
    assert caps[1:] == [(1.0, 0)], "what is free is no cap, and that of the run before is lifted"


@pytest.mark.parametrize(("card", "vllm"), [(False, False), (False, True), (True, False), (True, True)])
def test_vllm_is_the_best_backend_where_there_is_a_card_and_a_vllm(card, vllm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object() if vllm else None)
    config = TrainConfig(num_steps=3)
    chosen, why = best_backend(config)
    if card and vllm:
        assert (chosen.generation_backend, chosen.device, chosen.num_steps) == ("vllm-colocated", "cuda", 3)
        assert why == "vLLM generates, on the card that trains."
    else:
        assert chosen is config, "as it was asked for"
        assert why.startswith(f"transformers generates: {'--generation-backend' if card else 'there is no card.'}")


def test_a_wrong_python_is_not_chosen_and_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = TrainConfig()
    chosen, why = best_backend(config, Path("no-such-env/bin/python"))
    assert chosen is config
    assert why.startswith(
        "transformers generates: --vllm-python no-such-env/bin/python cannot be started (No such file"
    )
