"""The run folder: strict lines, rewinding, the frozen config, the repeating command, and the trackers."""

import dataclasses
import getpass
import json
import math
import os
import shlex
import socket
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from a5lib.config import TrainConfig, flag, resolve
from a5lib.errors import UserError
from a5lib.evaluation import Evaluation, Example
from a5lib.records import METRICS, Completion, MemorySample, Problem, Rollout
from a5lib.runlog import RunLog, describe_environment, read_config, read_jsonl, repeat_command

CONFIG = resolve(TrainConfig(output_dir=Path("somewhere/else")))


def evaluation(accuracy=0.5):
    example = Example("2 + 2?", "4", "\u4e8c\ud800 lone surrogate")
    return Evaluation(
        4, 2, 1.0, accuracy, (0.1, 0.9), {1: 0.5, 2: 0.75}, {"right": 4, "wrong": 3, "malformed": 1},
        0.875, 12.5, 20, 0.125, {"right": [example], "wrong": [], "malformed": []},
    )  # fmt: skip


def rollout():
    return Rollout(Problem("2 + 2?", "easy", "4"), [5, 6], Completion(0, [7, 8], "4\u2028!", "stop", [-0.5, -1.0]),
                   {"reward": 1.0}, 0.75)  # fmt: skip


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


# --- lines


def test_a_line_is_on_the_disk_when_the_call_returns(tmp_path):
    log = RunLog(tmp_path, CONFIG)
    log.metrics({"step": 1, "loss": -0.5, "reward_histogram": [3, 0, 1], "learning_rate": np.float64(1e-5)})
    log.metrics({"step": 2, "loss": 0.25})
    log.evaluation(2, "greedy", evaluation())
    expected = [
        {"step": 1, "loss": -0.5, "reward_histogram": [3, 0, 1], "learning_rate": 1e-5},
        {"step": 2, "loss": 0.25},
    ]
    assert lines(tmp_path / "metrics.jsonl") == expected, "not flushed?"
    (line,) = lines(tmp_path / "evaluations.jsonl")
    assert {"step", "kind"} | {f.name for f in dataclasses.fields(Evaluation)} == line.keys()
    assert (line["step"], line["kind"], line["pass_at_k"]) == (2, "greedy", {"1": 0.5, "2": 0.75})
    log.sync()
    log.close()


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"step": 1, "los": 0.1}, "'los' is not a metric"),
        ({"loss": 0.1}, "no step"),
        ({"step": 1, "loss": math.nan}, "metric loss is nan"),
        ({"step": 1, "ratio_max": math.inf}, "metric ratio_max is inf"),
        ({"step": 1, "reward_histogram": [1, math.nan]}, "metric reward_histogram is nan"),
        ({"step": 1, "entropy": torch.tensor(1.0)}, "metric entropy is Tensor"),
        ({"step": 1, "entropy": None}, "metric entropy is NoneType"),
    ],
)
def test_what_is_no_metric_is_refused_by_name_and_leaves_no_half_line(tmp_path, record, says):
    with RunLog(tmp_path, CONFIG) as log:
        with pytest.raises(ValueError, match=says):
            log.metrics(record)
        log.metrics({"step": 1, "loss": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_every_metric_can_be_logged(tmp_path):
    with RunLog(tmp_path, CONFIG) as log:
        log.metrics(dict.fromkeys(METRICS, 1))
    assert lines(tmp_path / "metrics.jsonl")[0].keys() == METRICS.keys()


def test_a_third_kind_of_evaluation_is_refused(tmp_path):
    with RunLog(tmp_path, CONFIG) as log, pytest.raises(ValueError, match="expected 'sampled' or 'greedy'"):
        log.evaluation(1, "beam", evaluation())


def test_rollouts_are_one_line_each_with_every_field(tmp_path):
    with RunLog(tmp_path, CONFIG) as log:
        path = log.rollouts(10, [rollout(), rollout()])
    assert path == tmp_path / "rollouts" / "step-000010.jsonl"
    records = read_jsonl(path)
    assert len(records) == 2
    assert records[0] == dataclasses.asdict(rollout())


def sample(t, step, phase="update"):
    return MemorySample(t, step, phase, allocated=5, reserved=6, card=None, host=7)


def test_samples_of_memory_are_one_line_each_with_every_field(tmp_path):
    with RunLog(tmp_path, CONFIG) as log:
        log.memory([sample(0.25, 1), sample(0.3, 1)])
        log.memory([sample(0.5, 1, "save")])
        written = lines(tmp_path / "memory.jsonl")
    first = {"t": 0.25, "step": 1, "phase": "update", "allocated": 5, "reserved": 6, "card": None, "host": 7}
    assert written == [first, first | {"t": 0.3}, first | {"t": 0.5, "phase": "save"}]


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"run log in .* cannot be written"):
        RunLog(tmp_path / "missing", CONFIG)
    log = RunLog(tmp_path, CONFIG)
    (tmp_path / "rollouts").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot be written"):
        log.rollouts(1, [])


# --- reading and rewinding


def test_a_torn_last_line_is_left_out_and_a_bad_line_before_it_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2: expected one JSON object"):
        read_jsonl(path)
    assert read_jsonl(tmp_path / "missing.jsonl") == []


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    with RunLog(tmp_path, CONFIG) as log:
        log.evaluation(0, "sampled", evaluation())
        for step in (1, 2, 3):
            log.metrics({"step": step, "loss": float(step)})
            log.evaluation(step, "sampled", evaluation())
            log.rollouts(step, [rollout()])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    before = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with RunLog(tmp_path, CONFIG, keep_until=2) as log:
        log.metrics({"step": 3, "loss": 3.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == "".join(before[:2]) + '{"step": 3, "loss": 3.5}\n', "a step was logged twice, or a torn line stayed"
    assert [r["step"] for r in read_jsonl(tmp_path / "evaluations.jsonl")] == [0, 1, 2]
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]


def test_in_a_continued_run_the_seconds_of_memory_go_on(tmp_path):
    with RunLog(tmp_path, CONFIG) as log:
        log.memory([sample(1.0, 1), sample(2.5, 1), sample(4.0, 2)])
    with RunLog(tmp_path, CONFIG, keep_until=1) as log:
        log.memory([sample(0.125, 2)])
    kept = [(r["step"], r["t"]) for r in read_jsonl(tmp_path / "memory.jsonl")]
    assert kept == [(1, 1.0), (1, 2.5), (2, 2.625)], "step 2 was taken again, 0.125 s after the new start"


# --- what is frozen


def test_the_config_comes_back_with_the_folder_it_is_in(tmp_path):
    RunLog(tmp_path, CONFIG).close()
    assert read_config(tmp_path).to_json() == {**CONFIG.to_json(), "output_dir": str(tmp_path)}
    assert "somewhere" not in "".join(p.read_text() for p in tmp_path.iterdir())


def test_no_run_folder_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"not a run folder: it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)


def test_the_environment_tells_versions_and_machine_and_nothing_private(tmp_path):
    RunLog(tmp_path, CONFIG, whose="7 of 11 yours").close()
    text = (tmp_path / "environment.json").read_text()
    record = json.loads(text)
    assert record["torch"] == torch.__version__
    assert record["exercise_code"] == "7 of 11 yours"
    assert record["threads"] == torch.get_num_threads()
    assert record["cores"] >= 1 and record["memory_gib"] > 0 and record["cpu"]
    for private in (socket.gethostname(), str(Path.home()), str(Path.cwd()), sys.prefix):
        assert private not in text
    words = {word for value in record.values() for word in str(value).split()}
    assert getpass.getuser() not in words
    assert not any(word.startswith("/") for word in words)


def test_resuming_elsewhere_keeps_the_first_environment_and_adds_the_second(tmp_path, monkeypatch):
    RunLog(tmp_path, CONFIG).close()
    first = json.loads((tmp_path / "environment.json").read_text())
    RunLog(tmp_path, CONFIG, keep_until=3).close()
    assert json.loads((tmp_path / "environment.json").read_text()) == first
    changed = describe_environment() | {"torch": "9.9"}
    monkeypatch.setattr("a5lib.runlog.describe_environment", lambda: changed)
    for _ in range(2):
        RunLog(tmp_path, CONFIG, keep_until=5).close()
    record = json.loads((tmp_path / "environment.json").read_text())
    assert [(r["after_step"], r["torch"]) for r in record.pop("resumed")] == [(5, "9.9")]
    assert record == first


def parse(command):
    """The config that a command's flags stand for, read without the command line's own parser."""
    words = shlex.split(command)
    assert words[:2] == ["a5", "train"]
    fields = {flag(f.name): f for f in dataclasses.fields(TrainConfig)}
    values, rest = {}, iter(words[2:])
    for word in rest:
        if word in fields and isinstance(fields[word].default, bool):
            values[fields[word].name] = True
        elif word.startswith("--no-") and "--" + word[5:] in fields:
            values[fields["--" + word[5:]].name] = False
        else:
            kind = fields[word].type.split(" |")[0]
            values[fields[word].name] = {"int": int, "float": float, "Path": Path}.get(kind, str)(next(rest))
    return TrainConfig(**values)


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "a5 train"),
        ({"output_dir": Path("x")}, "a5 train"),
        ({"seed": 2, "low_memory": True}, "a5 train --seed 2 --low-memory"),
        ({"num_steps": 30, "learning_rate": 5e-4}, "a5 train"),
        ({"num_steps": 3, "save_final": False}, "a5 train --num-steps 3 --no-save-final"),
        ({"algorithm": "offpolicy_clip", "cliprange": 0.3}, "a5 train --algorithm offpolicy_clip --cliprange 0.3"),
        ({"rollout_batch_size": 64}, "a5 train --rollout-batch-size 64"),
        (
            {"model": "my models/x; rm", "train_file": Path("data/it's.jsonl"), "learning_rate": 5e-4},
            "a5 train --model 'my models/x; rm' --train-file 'data/it'\"'\"'s.jsonl' --learning-rate 0.0005",
        ),
        (
            {"rollout_batch_size": 16, "algorithm": "cispo", "train_batch_size": 4, "gradient_accumulation_steps": 4},
            None,
        ),
        ({"rollout_batch_size": 24, "group_size": 3, "warmup_steps": 5, "optimizer_state": "bf16_kahan"}, None),
    ],
)
def test_the_command_repeats_the_run(tmp_path, changes, command):
    config = resolve(TrainConfig(**changes))
    if command is not None:
        assert repeat_command(config) == command
    assert resolve(parse(repeat_command(config))) == dataclasses.replace(config, output_dir=None)
    RunLog(tmp_path, config).close()
    assert (tmp_path / "command.txt").read_text() == repeat_command(config) + "\n"


# --- trackers


class Recorder(types.ModuleType):
    """Stands in for a tracker's package and records what it was given."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []
        self.SummaryWriter = lambda **k: self._record("init", k)

    def _record(self, what, arguments):
        self.calls.append((what, arguments))
        return self

    def init(self, **arguments):
        return self._record("init", arguments)

    def log(self, numbers, step):
        self._record("log", (step, numbers))

    def add_scalar(self, key, value, step):
        self._record("log", (step, {key: value}))

    def finish(self):
        self._record("finish", None)

    close = finish


@pytest.mark.parametrize(
    ("name", "module"), [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_tracker_gets_the_numbers_and_is_closed(tmp_path, monkeypatch, name, module):
    package = Recorder(module)
    monkeypatch.setitem(sys.modules, module, package)
    with RunLog(tmp_path, dataclasses.replace(CONFIG, tracker=name)) as log:
        log.metrics({"step": 1, "loss": 0.5, "reward_histogram": [1, 2]})
        log.evaluation(1, "sampled", evaluation(0.25))
    kinds = [what for what, _ in package.calls]
    assert kinds == ["init", "log", "log", "finish"]
    assert [a for what, a in package.calls if what == "log"] == [
        (1, {"loss": 0.5}),
        (1, {"validation_accuracy_sampled": 0.25}),
    ]
    if name != "tensorboard":
        assert package.calls[0][1]["name"] == tmp_path.name
        assert package.calls[0][1]["config"]["algorithm"] == "grpo"


def test_a_missing_tracker_is_a_sentence_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    with pytest.raises(UserError, match=r"--tracker wandb needs the package wandb.*pip install wandb"):
        RunLog(tmp_path, dataclasses.replace(CONFIG, tracker="wandb"))
    assert os.listdir(tmp_path) == []
