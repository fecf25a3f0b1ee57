"""The stand-in for vLLM of notebook 10: it computes what transformers does, and its faults are those of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from a5lib.course import stand_in_engine
from a5lib.models import load_policy
from a5lib.rollouts.protocol import Refusal
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.rollouts.vllm_backend import VllmColocated
from a5lib.rollouts.worker_process import WorkerError
from tests.vllm_tools import survivors

ENGINE = f"{stand_in_engine.__file__}:StandInEngine"
KEY, HEAD = "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"
OPTIONS = {"n": 2, "max_tokens": 40, "stop": ["</answer>"], "seed": 3}


@pytest.fixture(scope="module")
def toy():
    return load_policy("toy", device="cpu")


def settings(model, **more):
    return {
        "model": model.config.name_or_path, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "top_p": 1.0,
        "kv_cache_bytes": 2**24, "memory_share": 0.2, "trust_remote_code": False,
        "quantization": "none", **more,
    }  # fmt: skip


def prompts(tokenizer):
    return [tokenizer.encode(f"Tom has {n} hens. How many legs are there?\n") for n in (3, 5)]


def test_after_every_sync_it_says_what_transformers_says(toy, tmp_path: Path) -> None:
    model, tokenizer = toy
    plain = TransformersRollouts(model, tokenizer)
    shifted = {name: weight + 0.01 * torch.ones_like(weight) for name, weight in model.named_parameters()}
    with VllmColocated(model.named_parameters(), settings(model), tmp_path, engine=ENGINE) as backend:
        for weights in (dict(model.named_parameters()), shifted):
            model.load_state_dict(weights)
            backend.sync(model.named_parameters(), 0)
            plain.sync(model.named_parameters(), 0)
            ours, theirs = (b.generate(prompts(tokenizer), temperature=0.0, **OPTIONS) for b in (backend, plain))
            assert [c.text for c in ours] == [c.text for c in theirs]
            assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            sampled = [c.text for c in backend.generate(prompts(tokenizer), temperature=1.0, **OPTIONS)]
            assert len(set(sampled)) > 2, "each completion has a stream of its own"
            backend.release()
        pid = {"engine": backend.facts["pid"]}
    assert not survivors(pid)


def test_a_lost_and_a_changed_weight_are_named_and_the_next_sync_starts_anew(toy, tmp_path: Path) -> None:
    model, _ = toy
    faults = {KEY: "lost", HEAD: "changed"}
    with VllmColocated(model.named_parameters(), settings(model, faults=faults), tmp_path, engine=ENGINE) as backend:
        with pytest.raises(WorkerError) as caught:
            backend.sync(model.named_parameters(), 4)
        sentence = str(caught.value)
        assert f"{KEY} has other values (held as model.layers.1.self_attn.qkv_proj.weight[128:256])" in sentence
        assert f"{HEAD} has other values" in sentence and "step 4" in sentence and "model.norm" not in sentence
        del backend.settings["faults"]
        backend.sync(model.named_parameters(), 4)


def test_its_prefix_cache_is_a_real_one(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reset it goes on from keys and values of the old weights."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model, tokenizer = toy
    engine = stand_in_engine.StandInEngine(settings(model))
    arguments = dict(n=1, max_tokens=8, temperature=0.0, top_p=1.0, stop=[], seeds=[[1]], progress=lambda count: None)

    def answer(scale: float) -> list[float]:
        engine.llm.load_weights([(name, scale * weight) for name, weight in model.named_parameters()])
        engine.verified = True
        (row,) = engine.generate(prompts(tokenizer)[:1], **arguments)
        return row["log_probs"]

    with pytest.raises(Refusal, match="older weights; reset it"):
        answer(1.0)
    engine.reset_prefix_cache()
    first, stale = answer(1.0), answer(0.5)
    assert stale[0] == first[0] and stale[1:] != first[1:]
    engine.reset_prefix_cache()
    assert answer(0.5)[0] != stale[0]


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"quantization": "fp8"}])
def test_it_refuses_what_it_would_not_do(setting, toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="top-p 1 and unquantized"):
        stand_in_engine.StandInEngine(settings(toy[0], **setting))
