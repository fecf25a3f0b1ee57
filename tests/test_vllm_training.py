"""Training with colocated vLLM: whole runs of the toy model through the real worker and the fake engine in it, which
generates with the weights that it was sent.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import a5lib.rollouts.choice as backends
import a5lib.training as training
from a5lib.config import TrainConfig
from a5lib.course import load_algo
from a5lib.engines.layer_major import LayerMajorEngine
from a5lib.engines.resident import ResidentEngine
from a5lib.errors import UserError
from a5lib.records import METRICS
from a5lib.rollouts import vllm_backend
from a5lib.rollouts.vllm_backend import VllmColocated
from a5lib.rollouts.worker_process import WorkerError
from a5lib.runlog import read_config, read_jsonl
from a5lib.training import train
from tests.vllm_tools import held, survivors

pytestmark = [
    pytest.mark.reference,  # the loop is tested, on the reference
    pytest.mark.timeout(200),  # a worker starts in a second, or in many on a busy machine
]

ENGINE = f"{Path(__file__).with_name('fake_vllm.py')}:ToyEngine"
HOST_TO_HOST = 0.015  # GiB: room for one layer of the toy model at a time
CYCLE = ["wake weights", "load", "wake kv_cache", "reset_prefix_cache", "generate", "sleep 2", "memory"]
SMALL = TrainConfig(
    num_steps=3, rollout_batch_size=16, group_size=4, max_tokens=40, train_examples=16, val_examples=3, eval_samples=1,
    eval_every=0, save_every=1, device="cpu", generation_backend="vllm-colocated", vllm_python=Path(sys.executable),
    save_final=False,
)  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake engine that every worker of this test runs; nothing of it may be left at the end."""
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.setenv("A5_FAKE_VLLM", str(folder))
    monkeypatch.setattr(vllm_backend, "ENGINE", ENGINE)
    monkeypatch.setattr(backends, "check_backend", lambda config: None)
    monkeypatch.setattr(training, "check_backend", lambda config: None)
    return folder


def run(folder: Path, say: Any = lambda sentence: None, on_step: Any = None, **fields: Any) -> training.Summary:
    config = dataclasses.replace(SMALL, output_dir=folder, **fields)
    return train(config, load_algo("solutions"), say=say, on_step=on_step)


def resume(folder: Path, **fields: Any) -> training.Summary:
    config = dataclasses.replace(read_config(folder), **fields)
    return train(config, load_algo("solutions"), resume=True, say=lambda sentence: None)


def calls(fake: Path) -> list[str]:
    """What the engine was asked for since the last look."""
    lines = [json.loads(line)["call"] for line in (fake / "calls.jsonl").read_text().splitlines()]
    (fake / "calls.jsonl").write_text("")
    return lines


def nothing_left(fake: Path, before: dict[str, int]) -> None:
    gc.collect()
    assert not survivors(json.loads((fake / "pids").read_text()))
    assert held() == before


def outcome(folder: Path) -> list[dict[str, Any]]:
    timing = ("seconds_", "memory_", "_per_second")
    return [
        {k: v for k, v in record.items() if not any(part in k for part in timing)}
        for record in read_jsonl(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("budget", [None, HOST_TO_HOST])
def test_V02_three_steps_with_the_trainers_weights_their_order_and_what_is_left(
    budget: float | None, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights go the same way whichever engine trains; from the layer-major one they are not even copied."""
    order: list[str] = []
    engine = ResidentEngine if budget is None else LayerMajorEngine

    def note(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def noted(self: Any, *args: Any, **options: Any) -> Any:
            order.append(f"{'engine' if owner is engine else 'vllm'}.{name}")
            if name == "sync":
                away = [w for n, w in args[0] if w.data_ptr() != self.channel.tensors[n].data_ptr()]
                assert bool(away) == (budget is None)
                args = (engines[0].weights(), *args[1:])
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, noted)

    for name in ("release", "score", "step"):
        note(engine, name)
    for name in ("start", "sync", "generate", "release", "close"):
        note(VllmColocated, name)
    engines: list[Any] = []
    make = training.make_engine
    monkeypatch.setattr(training, "make_engine", lambda *a, **k: engines.append(make(*a, **k)) or engines[-1])
    before = held()
    run(tmp_path / "run", vram_budget=budget)
    turn = ["engine.release", "vllm.sync", "vllm.generate", "vllm.release"]
    step = [*turn, "engine.score", "engine.step"]
    assert order == ["engine.release", "vllm.start", *2 * turn, *3 * step, *2 * turn, "vllm.close"]
    assert calls(fake) == ["hello", "sleep 2", "memory", *7 * CYCLE, "stop"], "two validations before and after"
    engines.clear()
    nothing_left(fake, before)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(set(line) == set(METRICS) for line in metrics)
    assert all(line["mismatch_mean"] < 1e-4 and line["mismatch_ess"] > 0.9999 for line in metrics)
    assert max(line["grad_norm"] for line in metrics) > 0
    assert "fake engine: started" in (tmp_path / "run" / "vllm-worker.log").read_text()


def test_greedy_answers_are_those_of_transformers_and_the_settings_those_of_the_run(fake: Path, tmp_path: Path) -> None:
    run(tmp_path / "vllm", num_steps=1)
    run(tmp_path / "plain", num_steps=0, generation_backend="transformers", vllm_python=None)
    greedy = [
        next(r for r in read_jsonl(tmp_path / name / "evaluations.jsonl") if r["kind"] == "greedy")
        for name in ("vllm", "plain")
    ]
    assert greedy[0] == greedy[1]
    settings = json.loads((fake / "settings.json").read_text())
    assert (settings["dtype"], settings["max_num_seqs"], settings["top_p"]) == ("float32", 16, 1.0)
    assert settings["max_model_len"] <= 512 and (Path(settings["model"]) / "config.json").exists()
    assert settings["kv_cache_bytes"] == 17 * 128 * 4096, "of 16 rows in blocks of 128 tokens, and one more"


def test_a_worker_that_dies_in_step_2_is_one_sentence_and_the_run_goes_on(fake: Path, tmp_path: Path) -> None:
    before = held()

    def kill_in_the_next_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 1:
            (fake / "fault.json").write_text(json.dumps({"method": "generate", "kind": "killed"}))

    with pytest.raises(
        WorkerError, match=r"^The vLLM worker died during 'generate'\. Nothing of it .* --resume"
    ) as caught:
        run(tmp_path / "cut", on_step=kill_in_the_next_step)
    del caught
    nothing_left(fake, before)
    assert [line["step"] for line in read_jsonl(tmp_path / "cut" / "metrics.jsonl")] == [1]
    assert resume(tmp_path / "cut", vllm_python=None).finished
    nothing_left(fake, before)
    run(tmp_path / "whole")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole"), "bit for bit, whenever the worker was started"


def test_an_interrupt_during_generation_leaves_nothing(fake: Path, tmp_path: Path) -> None:
    before = held()
    generate = VllmColocated.generate

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if self.synced_step == 1:
            signal.raise_signal(signal.SIGINT)
            options["progress"] = lambda count: signal.raise_signal(signal.SIGINT)
        return generate(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(VllmColocated, "generate", interrupted)
        run(tmp_path / "run")
    nothing_left(fake, before)
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_an_engine_that_does_not_start_is_said_before_any_work(fake: Path, tmp_path: Path) -> None:
    (fake / "fault.json").write_text(json.dumps({"method": "hello", "kind": "raise"}))
    said: list[str] = []
    before = held()
    with pytest.raises(WorkerError, match="failed during 'hello': ZeroDivisionError: scripted") as caught:
        run(tmp_path / "run", say=said.append)
    del caught
    nothing_left(fake, before)
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()
    assert any("vllm-worker.log" in sentence for sentence in said)
    assert resume(tmp_path / "run", num_steps=0).finished


def test_a_batch_without_a_trained_row_has_no_mismatch_and_none_that_is_usual(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every response gets the same reward, so no row has an advantage and none is scored."""
    nothing = dict.fromkeys(("reward", "format_reward", "answer_reward"), 0.0)
    for name in training.REWARD_FUNCTIONS:
        monkeypatch.setitem(training.REWARD_FUNCTIONS, name, lambda text, answer: nothing)
    watched: list[float] = []
    monkeypatch.setattr(training.MismatchWatch, "jump", lambda watch, mean: watched.append(mean))
    run(tmp_path / "run", num_steps=1, mismatch_correction="tis")
    (line,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["zero_variance_groups"] == 1 and watched == []
    assert set(line) == {name for name in METRICS if not name.startswith("mismatch")}


def test_a_mismatch_that_jumps_is_said_and_weighed_by_hand(fake: Path, tmp_path: Path) -> None:
    """The engine reports every log-probability 0.5 too low in step 2: each weight is exp(0.5)."""

    def shift_the_next_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 1:
            (fake / "fault.json").write_text(json.dumps({"method": "generate", "kind": "shifted"}))

    said: list[str] = []
    weights: list[Any] = []
    accumulate = ResidentEngine.accumulate

    def seen(self: Any, batch: Any) -> Any:
        weights.append(batch["loss_weights"][batch["response_mask"] & (batch["advantages"] != 0)[:, None]])
        return accumulate(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResidentEngine, "accumulate", seen)
        run(tmp_path / "run", say=said.append, on_step=shift_the_next_step, mismatch_correction="tis", seed=1)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(weights[1]), "no advantage: choose another seed"
    assert weights[1].tolist() == pytest.approx([1.648721] * len(weights[1]), abs=1e-4)
    assert weights[0].tolist() == pytest.approx([1.0] * len(weights[0]), abs=1e-4)
    assert [line["mismatch_mean"] > 0.1 for line in metrics] == [False, True, False]
    assert metrics[1]["mismatch_mean"] == pytest.approx(0.5, abs=1e-4)
    assert metrics[1]["mismatch_ess"] == pytest.approx(1.0, abs=1e-4), "weights that are all the same lose nothing"
    (sentence,) = [s for s in said if "nats a token" in s]
    assert sentence.startswith("Step 2: ")


def test_V09_foreign_users_of_the_card_are_said_before_a_plan_is_refused(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise UserError("too little is free")

    said: list[str] = []
    monkeypatch.setattr(training, "other_users", lambda device: f"others hold {device}")
    monkeypatch.setattr(training, "plan_run", refuse)
    with pytest.raises(UserError, match="too little is free"):
        run(tmp_path / "run", say=said.append)
    assert said == ["others hold cpu"]
