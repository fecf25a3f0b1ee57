"""The loop on the embedded toy model: every preset, exact resume after a kill, interrupts, and faults."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import a5lib.engines.choice as choice
import a5lib.engines.layer_major as layer_major
import a5lib.optimizers as optimizers
import a5lib.rollouts.choice as backends
import a5lib.training as training
from a5lib.cli import TrainFlags, as_config, default_train_flags, parse
from a5lib.config import ALGORITHMS, TrainConfig
from a5lib.course import load_algo
from a5lib.engines.layer_major import Trip
from a5lib.errors import UserError
from a5lib.records import METRICS
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.runlog import read_config, read_jsonl
from a5lib.training import StopRequest, due, stop_between_steps, stream_seed, train

pytestmark = pytest.mark.reference  # the loop is tested, on the reference

SMALL = TrainConfig(
    num_steps=3, rollout_batch_size=16, group_size=4, max_tokens=48, train_examples=16, val_examples=3, eval_samples=2,
    eval_every=2, save_every=1, device="cpu",
)  # fmt: skip
TIMING = ("seconds_", "memory_", "_per_second")


HOST_TO_HOST = 0.015  # GiB: room for one layer of the toy model at a time


def small(folder: Path, **fields: Any) -> TrainConfig:
    return dataclasses.replace(SMALL, output_dir=folder, **fields)


def run(config: TrainConfig, **options: Any) -> training.Summary:
    return train(config, load_algo("solutions"), say=lambda sentence: None, **options)


def resumed(folder: Path, **fields: Any) -> TrainConfig:
    return dataclasses.replace(read_config(folder), output_dir=folder, **fields)


def outcome(folder: Path) -> tuple[list[dict], list[dict]]:
    """Metrics without what a clock or the machine decides, and evaluations."""
    metrics = [
        {k: v for k, v in record.items() if not any(part in k for part in TIMING)}
        for record in read_jsonl(folder / "metrics.jsonl")
    ]
    return metrics, read_jsonl(folder / "evaluations.jsonl")


def assert_same_run(one: Path, other: Path) -> None:
    assert outcome(one) == outcome(other)
    last = sorted(p.name for p in (one / "checkpoints").iterdir())[-1]
    for group in ("model", "optimizer", "rng"):
        a, b = (load_file(folder / "checkpoints" / last / f"{group}.safetensors") for folder in (one, other))
        assert a.keys() == b.keys()
        different = [name for name in a if not torch.equal(a[name], b[name])]
        assert not different, f"{group}: {different[:3]} differ after resume"
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_preset_trains_three_steps(algorithm: str, tmp_path: Path) -> None:
    config = small(tmp_path / "run", algorithm=algorithm, eval_every=0, save_every=0, save_final=False)
    if ALGORITHMS[algorithm].off_policy:
        config = dataclasses.replace(config, train_batch_size=8)
    before = {name: p.clone() for name, p in training.load_policy(device="cpu")[0].named_parameters()}
    trained = {}

    class Engine(choice.ResidentEngine):
        def step(self, learning_rate: float) -> float:
            norm = super().step(learning_rate)
            trained.update({name: p.detach().clone() for name, p in self.model.named_parameters()})
            return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "ResidentEngine", Engine)
        summary = run(config)
    metrics = read_jsonl(summary.run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert [m["optimizer_steps"] for m in metrics] == ([2, 4, 6] if ALGORITHMS[algorithm].off_policy else [1, 2, 3])
    here = {name for name in METRICS if not name.startswith("mismatch")}
    assert all(set(m) == here for m in metrics), "a line of metrics has every metric but those of another engine"
    assert max(m["grad_norm"] for m in metrics) > 0, "no step had a gradient: choose another seed for this test"
    assert any(not torch.equal(before[name], trained[name]) for name in before)
    if ALGORITHMS[algorithm].importance_reweighting_method != "none":
        assert any(m["ratio_max"] != 1 for m in metrics), "the second update of a rollout batch is off-policy"


@pytest.mark.parametrize("algorithm", ["grpo", "offpolicy_gspo"])
def test_the_layer_major_engine_trains_as_the_resident_one(algorithm: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"algorithm": algorithm, "eval_every": 0, "save_every": 0}
    if algorithm == "offpolicy_gspo":
        fields |= {"train_batch_size": 8}
    run(small(tmp_path / "resident", **fields))
    run(small(tmp_path / "layers", vram_budget=HOST_TO_HOST, **fields))
    plan = json.loads((tmp_path / "layers" / "plan.json").read_text())
    assert (plan["engine"], plan["resident"]) == ("layer_major", []), "the budget leaves everything on the host"
    one, other = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("resident", "layers"))
    assert len(one) == 3
    for a, b in zip(one, other, strict=True):
        for name in METRICS:
            if not name.startswith(("seconds", "memory", "mismatch")) and not name.endswith("per_second"):
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), f"{name} of step {a['step']}"
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("resident", "layers")]
    for name, weight in weights[0].items():
        # Adam divides by the root of the second moment: where a gradient is near 0, rounding moves a weight by lr.
        assert (weight - weights[1][name]).abs().max() < 3 * 5e-4, name
        assert (weight - weights[1][name]).norm() < 1e-4 * weight.norm(), name


@pytest.mark.parametrize(
    ("algorithm", "budget"),
    [("grpo", None), ("offpolicy_clip", None), ("grpo", HOST_TO_HOST), ("offpolicy_clip", HOST_TO_HOST)],
)
def test_R06_six_steps_are_three_a_kill_and_three(algorithm: str, budget: float | None, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"algorithm": algorithm, "num_steps": 6, "optimizer_state": "bf16_stochastic"}
    if budget is not None:
        fields |= {"vram_budget": budget, "dtype": "bfloat16"}
    if algorithm == "offpolicy_clip":
        fields |= {"train_batch_size": 8, "warmup_steps": 9, "dtype": "bfloat16"}
    whole, cut = tmp_path / "whole", tmp_path / "cut run"
    run(small(whole, **fields))
    config = small(cut, **fields)
    program = (
        "import json, os, signal, sys\n"
        "from a5lib.config import TrainConfig\n"
        "from a5lib.course import load_algo\n"
        "from a5lib.training import train\n"
        "config = TrainConfig.from_json(json.loads(sys.argv[1]))\n"
        "die = lambda m: os.kill(os.getpid(), signal.SIGKILL) if m['step'] == 4 else None\n"
        "train(config, load_algo('solutions'), on_step=die)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, json.dumps(config.to_json())], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-500:]
    newest = cut / "checkpoints" / "step-000004" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])  # the disk lost the end of it: continue from step 3
    run(resumed(cut), resume=True)
    assert_same_run(whole, cut)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(small(whole, num_steps=3, eval_every=0))
    run(small(cut, num_steps=2, eval_every=0))
    run(resumed(cut, num_steps=3), resume=True)
    assert outcome(whole)[0] == outcome(cut)[0]


def test_a_changed_field_is_refused_by_name(tmp_path: Path) -> None:
    run(small(tmp_path / "run", num_steps=1))
    with pytest.raises(UserError, match=r"--learning-rate was 0\.0005 .* cannot become 0\.1"):
        run(resumed(tmp_path / "run", learning_rate=0.1), resume=True)
    run(resumed(tmp_path / "run", num_steps=2, save_every=5, eval_every=0), resume=True)


def test_the_first_thing_after_resume_is_a_sync_of_the_restored_weights(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "run"
    run(small(folder, num_steps=2))
    saved = load_file(folder / "checkpoints" / "step-000002" / "model.safetensors")
    calls: list[tuple[str, Any]] = []

    class Recording(TransformersRollouts):
        def sync(self, weights, step):
            weights = dict(weights)
            calls.append(("sync", step, all(torch.equal(weights[n].detach(), saved[n]) for n in saved)))
            super().sync(weights.items(), step)

        def generate(self, *args, **kwargs):
            calls.append(("generate", None, None))
            return super().generate(*args, **kwargs)

    monkeypatch.setattr(backends, "TransformersRollouts", Recording)
    run(resumed(folder, num_steps=3), resume=True)
    assert calls[0] == ("sync", 2, True), "rollouts after resume must come from the restored weights"
    assert [name for name, *_ in calls[:4]] == ["sync", "generate"] * 2, "a sync before every generation"


def test_the_run_folder_holds_what_the_readme_lists(tmp_path: Path) -> None:
    summary = run(small(tmp_path / "run", num_steps=2, log_rollouts_every=2))
    folder = summary.run_dir
    assert (summary.finished, summary.step, summary.whose) == (True, 2, "0 of 19 yours")
    names = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    assert {"config.json", "environment.json", "command.txt", "metrics.jsonl", "evaluations.jsonl",
            "rollouts/step-000001.jsonl", "rollouts/step-000002.jsonl", "model/model.safetensors",
            "model/tokenizer.json"} <= names  # fmt: skip
    assert len([n for n in names if n.startswith("checkpoints/step-") and n.count("/") == 1]) == 2
    rollout = read_jsonl(folder / "rollouts" / "step-000002.jsonl")[0]
    assert len(rollout["completion"]["token_ids"]) == len(rollout["completion"]["log_probs"])
    kinds = [(e["step"], e["kind"], e["samples"]) for e in read_jsonl(folder / "evaluations.jsonl")]
    assert kinds == [(0, "sampled", 2), (0, "greedy", 1), (2, "sampled", 2), (2, "greedy", 1)]


def test_the_written_command_repeats_the_run(tmp_path: Path) -> None:
    run(small(tmp_path / "a", num_steps=2, eval_every=0, save_every=0, algorithm="dr_grpo", seed=3))
    words = (tmp_path / "a" / "command.txt").read_text().split()
    assert words[:2] == ["a5", "train"]
    flags = parse("train", TrainFlags, words[2:], TrainFlags())
    run(dataclasses.replace(as_config(flags), output_dir=tmp_path / "b"))
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_resume_takes_the_runs_own_config_as_defaults(tmp_path: Path) -> None:
    run(small(tmp_path / "run", num_steps=1))
    args = ["--resume", str(tmp_path / "run"), "--num-steps", "2"]
    flags = parse("train", TrainFlags, args, default_train_flags(args))
    assert as_config(flags) == resumed(tmp_path / "run", num_steps=2)


def test_validation_does_not_change_the_training(tmp_path: Path) -> None:
    run(small(tmp_path / "often", eval_every=1, save_every=0))
    run(small(tmp_path / "never", eval_every=0, save_every=0))
    assert outcome(tmp_path / "often")[0] == outcome(tmp_path / "never")[0]


def test_an_interrupt_finishes_the_step_saves_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []

    def interrupt(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    config = small(tmp_path / "run", num_steps=4, save_every=0)
    summary = train(config, load_algo("solutions"), on_step=interrupt, say=said.append)
    assert (summary.finished, summary.step) == (False, 2), "the step in which the signal arrives is finished"
    assert any("interrupt again to drop" in sentence for sentence in said)
    assert signal.getsignal(signal.SIGINT) is before
    assert run(resumed(tmp_path / "run"), resume=True).finished
    whole = tmp_path / "whole"
    run(small(whole, num_steps=4, save_every=0))
    assert outcome(whole)[0] == outcome(tmp_path / "run")[0]


def test_an_interrupt_in_the_last_validation_costs_no_step(tmp_path: Path, monkeypatch) -> None:
    calls: list[int] = []
    evaluate = training.evaluate

    def interrupted(*args: Any, **kwargs: Any):
        calls.append(1)
        if len(calls) == 3:  # after the sampled and the greedy one before training
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(training, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(small(tmp_path / "run", num_steps=2, eval_every=0, save_every=10))
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir(), (
        "the last step must be saved before it is judged"
    )
    assert run(resumed(tmp_path / "run"), resume=True).finished
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_second_interrupt_drops_the_step() -> None:
    with pytest.raises(KeyboardInterrupt), stop_between_steps(lambda sentence: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)


def test_a_button_stops_after_the_step_and_the_run_continues(tmp_path: Path) -> None:
    stop = StopRequest()

    def press(metrics: dict[str, Any]) -> None:
        thread = threading.Thread(target=lambda: setattr(stop, "requested", True))  # as a widget's callback would
        thread.start()
        thread.join()

    summary = run(small(tmp_path / "run", save_every=0, eval_every=0), stop=stop, on_step=press)
    assert (summary.finished, summary.step) == (False, 2), "pressed after step 1, so step 2 is the last one"
    assert run(resumed(tmp_path / "run"), resume=True).finished
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_an_interrupt_asks_where_the_button_asks_and_a_pressed_button_does_not_drop_the_step() -> None:
    stop = StopRequest(requested=True)
    with stop_between_steps(lambda sentence: None, stop) as request:
        assert request is stop
        os.kill(os.getpid(), signal.SIGINT)  # the first interrupt, though the button was pressed before it
    stop = StopRequest()
    with stop_between_steps(lambda sentence: None, stop):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested


def test_outside_the_main_thread_there_is_no_handler() -> None:
    seen: list[StopRequest] = []

    def body() -> None:
        with stop_between_steps(lambda sentence: None) as stop:
            seen.append(stop)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [StopRequest(requested=False)]


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoint(tmp_path: Path, monkeypatch) -> None:
    score = choice.ResidentEngine.accumulate
    folder = tmp_path / "run"

    def poisoned(self, batch):
        if (folder / "checkpoints" / "step-000001").exists():
            batch = {**batch, "advantages": torch.full_like(batch["advantages"], torch.inf)}
        return score(self, batch)

    monkeypatch.setattr(choice.ResidentEngine, "accumulate", poisoned)
    with pytest.raises(UserError, match=r"Step 2, sequences 0 to 15.*not finite in row .*checkpoint is untouched"):
        run(small(folder))
    monkeypatch.undo()
    assert run(resumed(folder), resume=True).finished, "the last good checkpoint continues"


def test_a_gradient_that_is_not_finite_names_the_step(tmp_path: Path, monkeypatch) -> None:
    step = choice.ResidentEngine.step

    def poisoned(self, learning_rate):
        next(iter(self.model.parameters())).grad.fill_(torch.nan)
        return step(self, learning_rate)

    monkeypatch.setattr(choice.ResidentEngine, "step", poisoned)
    with pytest.raises(UserError, match=r"Step 1, sequences 0 to 15: .*the step was not taken"):
        run(small(tmp_path / "run"))


def test_weights_that_are_not_finite_are_found_in_generation(tmp_path: Path, monkeypatch) -> None:
    load = training.load_policy

    def damaged(*args: Any, **kwargs: Any):
        model, tokenizer = load(*args, **kwargs)
        next(iter(model.parameters())).data.fill_(torch.nan)
        return model, tokenizer

    monkeypatch.setattr(training, "load_policy", damaged)
    with pytest.raises(UserError, match=r"Validation after step 0: The model's logits are not finite"):
        run(small(tmp_path / "run"))


@pytest.mark.parametrize("part", ["accumulate", "step"])
def test_a_card_that_is_full_midway_is_one_sentence_and_the_run_goes_on(part: str, tmp_path: Path, monkeypatch) -> None:
    fields: dict[str, Any] = {"vram_budget": HOST_TO_HOST, "eval_every": 0}
    run(small(tmp_path / "whole", **fields))
    calls = 0
    real = Trip.down if part == "accumulate" else optimizers.adamw_update

    def full(*args, **options):
        nonlocal calls
        calls += 1
        if calls == (2 if part == "accumulate" else 3):  # in the second step; in the first one, with weights half done
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(*(Trip, "down", full) if part == "accumulate" else (layer_major, "adamw_update", full))
        words = (
            r"Step \d, sequences 0 to 15: the card's memory is full; the last checkpoint is .*--resume.*--vram-budget"
        )
        with pytest.raises(UserError, match=words):
            run(small(tmp_path / "cut", **fields))
    assert calls > 1
    run(resumed(tmp_path / "cut"), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_full_card_is_the_same_sentence_with_the_resident_engine(tmp_path: Path, monkeypatch) -> None:
    def full(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(choice.ResidentEngine, "accumulate", full)
    with pytest.raises(UserError, match=r"Step 1, sequences 0 to 15: the card's memory is full.*--vram-budget"):
        run(small(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints").is_dir(), "step 0 is saved, so that the run can be resumed"
    with pytest.raises(UserError, match=r"no checkpoint was kept; start anew with a smaller --vram-budget") as error:
        run(small(tmp_path / "unsaved", save_every=0))
    assert "--resume" not in str(error.value), "there is nothing to resume"


def test_other_problems_and_a_step_that_has_passed_are_refused_on_resume(tmp_path: Path) -> None:
    problem = {"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(problem | {"question": f"What is 1 + 1, {i}?"}) + "\n" for i in range(8)))
    run(small(tmp_path / "run", num_steps=2, train_file=file, train_examples=8, eval_every=0))
    with pytest.raises(UserError, match="--num-steps 1 is below step 2"):
        run(resumed(tmp_path / "run", num_steps=1), resume=True)
    file.write_text("".join(json.dumps(problem | {"question": f"What is 2 + 2, {i}?"}) + "\n" for i in range(8)))
    with pytest.raises(UserError, match="problems of --train-file are not those"):
        run(resumed(tmp_path / "run", num_steps=3), resume=True)


def test_a_finished_run_is_not_judged_again(tmp_path: Path) -> None:
    run(small(tmp_path / "run", num_steps=1))
    before = read_jsonl(tmp_path / "run" / "evaluations.jsonl")
    run(resumed(tmp_path / "run"), resume=True)
    assert read_jsonl(tmp_path / "run" / "evaluations.jsonl") == before


def test_an_interrupt_in_the_first_validation_can_be_resumed(tmp_path: Path, monkeypatch) -> None:
    def interrupted(*args: Any, **kwargs: Any):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(small(tmp_path / "run", num_steps=1))
    monkeypatch.undo()
    assert run(resumed(tmp_path / "run"), resume=True).finished
    kinds = [(e["step"], e["kind"]) for e in read_jsonl(tmp_path / "run" / "evaluations.jsonl")]
    assert kinds == [(0, "sampled"), (0, "greedy"), (1, "sampled"), (1, "greedy")]


def test_an_interrupt_in_the_last_step_stops_before_the_validation(tmp_path: Path, monkeypatch) -> None:
    generate = TransformersRollouts.generate

    def interrupt(self, *args: Any, **kwargs: Any):
        if self.synced_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(TransformersRollouts, "generate", interrupt)
    summary = run(small(tmp_path / "run", num_steps=2, eval_every=0))
    assert (summary.finished, summary.step) == (False, 2)
    monkeypatch.undo()
    assert run(resumed(tmp_path / "run"), resume=True).finished


def test_a_save_that_fails_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(UserError, match="No space left on device"):
        run(small(tmp_path / "run", num_steps=1))
    monkeypatch.undo()
    assert run(resumed(tmp_path / "run"), resume=True).finished


def test_an_output_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty.*--resume"):
        run(small(tmp_path / "run"))
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"
    with pytest.raises(UserError, match="cannot be made"):
        run(small(tmp_path / "run" / "mine.txt" / "deeper"))


def test_a_response_that_cannot_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--max-tokens 500 does not fit.*or fewer"):
        run(small(tmp_path / "run", max_tokens=500))
    assert not (tmp_path / "run").exists()


def test_streams_of_random_numbers_are_apart() -> None:
    seeds = {stream_seed(seed, stream, step) for seed in range(3) for stream in (1, 2) for step in range(50)}
    assert len(seeds) == 300
    assert all(0 <= s < 2**63 for s in seeds)
    assert [due(6, 3), due(7, 3), due(7, 0)] == [True, False, False]
