"""The config: presets as defined, defaults by model, and one sentence for each thing that does not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from a5lib.config import ALGORITHMS, ResolvedConfig, TrainConfig, nearest, resolve
from a5lib.errors import UserError


def test_the_ten_presets_are_the_ten_rows_of_the_table() -> None:
    table = {  # baseline, normalizer, importance reweighting, aggregation, clip range, off-policy
        "grpo": ("mean", "std", "none", "sequence", None, False),
        "grpo_constant": ("mean", "std", "none", "constant", None, False),
        "dr_grpo": ("mean", "none", "none", "constant", None, False),
        "rft": ("none", "none", "none", "constant", None, False),
        "maxrl": ("mean", "mean", "none", "constant", None, False),
        "offpolicy_naive": ("mean", "std", "none", "sequence", None, True),
        "offpolicy_noclip": ("mean", "std", "noclip", "sequence", None, True),
        "offpolicy_clip": ("mean", "std", "grpo", "sequence", 0.2, True),
        "offpolicy_gspo": ("mean", "std", "gspo", "sequence", 3e-4, True),
        "cispo": ("mean", "std", "cispo", "sequence", 0.2, True),
    }
    assert {name: dataclasses.astuple(preset) for name, preset in ALGORITHMS.items()} == table


def test_L12_the_config_called_maxrl_runs_maxrl() -> None:
    assert resolve(TrainConfig(algorithm="maxrl")).preset.advantage_normalizer == "mean"


def test_defaults_of_the_assignment() -> None:
    config = resolve(TrainConfig(model="some/folder"))
    names = (
        "num_steps rollout_batch_size group_size train_batch_size learning_rate max_tokens train_examples val_examples "
        "eval_every max_grad_norm adam_beta1 adam_beta2 weight_decay temperature top_p"
    )
    got = tuple(getattr(config, name) for name in names.split())
    assert got == (200, 256, 8, 256, 1e-5, 512, 6400, 1024, 10, 1.0, 0.9, 0.95, 0.0, 1.0, 1.0)
    assert config.gradient_accumulation_steps == 32, "microbatches of 8"
    assert resolve(TrainConfig(model="x", low_memory=True)).gradient_accumulation_steps == 256, "microbatches of 1"


def test_off_policy_presets_train_on_8_and_divide_by_their_own_batch() -> None:
    config = resolve(TrainConfig(model="x", algorithm="offpolicy_clip"))
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 1)
    assert config.normalization_constant == 8 * 512


def test_a_given_clip_range_replaces_the_presets_own() -> None:
    assert resolve(TrainConfig(algorithm="cispo", cliprange=0.5)).preset.cliprange == 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"algorithm": "maxr1"}, ["'maxr1'", "did you mean 'maxrl'"]),
        ({"rollout_batch_size": 100}, ["--rollout-batch-size 100", "--group-size 8", "5 or 10"]),
        ({"algorithm": "offpolicy_clip", "train_batch_size": 24}, ["--train-batch-size 24", "16 or 32"]),
        ({"gradient_accumulation_steps": 24}, ["--gradient-accumulation-steps 24", "16 or 32"]),
        ({"gradient_accumulation_steps": 0}, ["--gradient-accumulation-steps is 0"]),
        ({"group_size": 1}, ["--group-size 1", "std"]),
        ({"group_size": 1, "algorithm": "dr_grpo"}, ["--group-size 1"]),
        ({"train_batch_size": 64}, ["--train-batch-size 64", "on-policy"]),
        ({"temperature": 0.0}, ["--temperature is 0"]),
        ({"top_p": 0.0}, ["--top-p is 0.0"]),
        ({"max_tokens": 0}, ["--max-tokens is 0", "at least 1"]),
        ({"learning_rate": float("nan")}, ["--learning-rate is nan"]),
        ({"learning_rate": float("inf")}, ["--learning-rate is inf"]),
        ({"cliprange": 0.0}, ["--cliprange is 0.0"]),
        ({"max_grad_norm": 0.0}, ["--max-grad-norm is 0.0"]),
        ({"adam_beta2": 1.0}, ["--adam-beta2 is 1.0"]),
        ({"generation_backend": "vllm-colocated", "temperature": 2.01}, ["--temperature is 2.01", "0.01 to 2"]),
        ({"generation_backend": "vllm-colocated", "temperature": 0.009}, ["--temperature is 0.009", "0.01 to 2"]),
        (
            {"generation_backend": "vllm-colocated", "top_p": 0.9, "temperature": 0.6},
            ["--top-p 0.9", "--temperature 0.6", "set one of them to 1", "--generation-backend transformers"],
        ),
        (
            {"generation_backend": "vllm-server", "vllm_python": Path("python")},
            ["--vllm-python does not go with --generation-backend vllm-server", "leave it out"],
        ),
        (
            {"rollout_quantization": "fp8"},
            ["--rollout-quantization fp8 needs --generation-backend vllm-colocated, and it is transformers"],
        ),
        ({"rollout_quantization": "fp8", "generation_backend": "vllm-server"}, ["and it is vllm-server"]),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(fields: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(TrainConfig(**fields))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_group_size_1_is_fine_without_a_baseline() -> None:
    assert resolve(TrainConfig(group_size=1, algorithm="rft")).group_size == 1


@pytest.mark.parametrize("fields", [{"temperature": 2.0}, {"temperature": 0.01}, {"top_p": 0.9}, {"temperature": 0.6}])
def test_what_vllm_samples_is_taken(fields: dict) -> None:
    assert resolve(TrainConfig(generation_backend="vllm-colocated", **fields))
    assert resolve(TrainConfig(temperature=3.0, top_p=0.5)), "transformers samples at any of them"


@pytest.mark.parametrize(
    "url",
    ["http://192.168.0.2:8000", "http://0.0.0.0:8000", "http://example.org", "https://127.0.0.1:8000", "127.0.0.1:8000",
     "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000?x", "http://a@127.0.0.1:8000", "http://127.0.0.1@b.org",
     "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://localhost.example.org:8000", "http://", ""],
)  # fmt: skip
def test_weights_are_sent_to_this_machine_alone(url: str) -> None:
    with pytest.raises(UserError, match=r"^--vllm-url is '.*'; it must be the address of a server on this machine"):
        resolve(TrainConfig(generation_backend="vllm-server", vllm_url=url))
    assert resolve(TrainConfig(vllm_url=url)), "nothing is sent there"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000/", "http://localhost:1", "http://[::1]:8000", "http://127.0.0.9"]
)
def test_a_server_on_this_machine_is_taken(url: str) -> None:
    assert resolve(TrainConfig(generation_backend="vllm-server", vllm_url=url)).measures_mismatch


def test_vllm_decodes_the_rollout_batch_side_by_side() -> None:
    def decoded(**fields: Any) -> int:
        return resolve(TrainConfig(generation_backend="vllm-colocated", **fields)).generation_batch_size

    assert decoded() == 128
    assert (decoded(model="some/folder"), decoded(rollout_batch_size=512)) == (256, 256)
    assert decoded(generation_batch_size=7) == 7


def test_a_run_scores_for_its_ratios_or_to_see_the_mismatch() -> None:
    assert [resolve(TrainConfig(algorithm=name)).scores for name in ("grpo", "offpolicy_clip")] == [False, True]
    assert resolve(TrainConfig(generation_backend="vllm-colocated")).scores
    assert resolve(TrainConfig(mismatch_correction="tis")).scores
    assert not resolve(TrainConfig(algorithm="offpolicy_clip")).measures_mismatch


def test_json_round_trip_keeps_every_field(tmp_path: Path) -> None:
    config = resolve(
        TrainConfig(train_file=tmp_path / "a b.jsonl", output_dir=tmp_path, cliprange=0.1, vllm_python=tmp_path)
    )
    assert ResolvedConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UserError, match="'colour'"):
        TrainConfig.from_json({"colour": "blue"})


def test_nearest_is_the_likely_typing_error() -> None:
    assert nearest("--learnin-rate", ["--seed", "--learning-rate", "--model"]) == "--learning-rate"
