"""The command line as a person meets it: real commands on the toy model, and one sentence for each bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

import a5lib.bench
import a5lib.bench_update
import a5lib.bench_variants
import a5lib.cli
import a5lib.data
import a5lib.doctor
import a5lib.models
import a5lib.probe
import a5lib.training
from a5lib.cli import COMMANDS, EvaluateFlags, TrainFlags, as_config, main, one_sentence, parse
from a5lib.config import TrainConfig, flag
from a5lib.course.exercises import has_reference, load_algo
from a5lib.data import GSM8K_ROWS, download_gsm8k, load_gsm8k
from a5lib.errors import UserError
from a5lib.models import TOY_MODEL_DIR
from a5lib.toy_problems import toy_problems
from tests.conftest import NO_REFERENCE
from tests.helpers import tiny_olmo2, tiny_tokenizer

SMALL = (
    "train --num-steps 2 --rollout-batch-size 4 --group-size 2 --train-batch-size 4 --train-examples 4 "
    "--val-examples 2 --eval-samples 2 --max-tokens 24 --device cpu"
)


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str


def a5(command: str = "", *words: str | Path) -> Result:
    """Run `a5`; the first argument is split into words, the others are one word each."""
    if command.startswith(("train", "bench", "probe")) and "--help" not in command and not has_reference():
        pytest.skip(NO_REFERENCE)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main([*command.split(), *map(str, words)])
    assert isinstance(stop.value.code, int)
    return Result(stop.value.code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that what a command writes by itself lands there and is seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A5_IMPL", "solutions")
    return tmp_path


def refused(command: str, *words: str | Path) -> str:
    """The sentence; the exit code is 2, standard error is that one line, and nothing below this folder changed."""
    before = contents(Path.cwd())
    result = a5(command, *words)
    assert (result.code, result.out) == (2, ""), result
    lines = [line for line in result.err.split("\n") if "Loading weights" not in line]  # the bar of transformers
    assert lines[1:] == [""], result.err
    assert "Traceback" not in result.err
    assert contents(Path.cwd()) == before, "a refused command wrote something"
    return lines[0]


# --- bad input


def test_a_quoted_log_keeps_its_lines_and_the_sentence_has_one(here, monkeypatch) -> None:
    def fail(argv):
        raise UserError("The worker  ended.\nThe last lines of its log:", ["RuntimeError: no  kernel", "exit code 1"])

    monkeypatch.setattr(a5lib.cli, "run", fail)
    result = a5("train")
    assert result.code == 2
    assert result.err == (
        "The worker ended. The last lines of its log:\n    RuntimeError: no  kernel\n    exit code 1\n"
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        # commands and flags
        ("trian", ["'trian'", "'a5 train'", "a5 --help"]),
        ("toy biuld", ["problems or build"]),
        ("data", ["gsm8k"]),
        ("train --learnin-rate 1", ["--learnin-rate", "did you mean --learning-rate"]),
        ("train --no-save-finale", ["did you mean --no-save-final?"]),
        ("evaluate --modl toy", ["did you mean --model"]),
        ("plot run --outptu x.png", ["did you mean --output"]),
        ("doctor --verbose", ["no flag --verbose"]),
        ("toy build out --setps 3", ["did you mean --steps"]),
        ("data gsm8k folder other", ["'other'"]),
        ("train extra", ["'extra'"]),
        ("train --save-final maybe", ["'maybe'", "switch"]),
        # values
        ("train --num-steps", ["--num-steps needs a value"]),
        ("train --num-steps --seed 3", ["--num-steps needs a value"]),
        ("train --num-steps two", ["--num-steps is 'two'; it must be a whole number"]),
        ("train --seed 1.5", ["--seed is '1.5'; it must be a whole number"]),
        ("train --learning-rate abc", ["--learning-rate is 'abc'; it must be a number"]),
        ("train --temperature it's", ["""--temperature is "it's"; it must be a number"""]),
        ("train --dtype float16", ["--dtype is 'float16'; choose from 'auto', 'float32', 'bfloat16'"]),
        ("train --generation-backend nothing", ["--generation-backend is 'nothing'", "'vllm-colocated'"]),
        ("train --generation-backend vllm-colocated", ["needs vLLM, which this Python", "--vllm-python"]),
        ("train --generation-backend vllm-colocated --vllm-python no/python", ["no/python cannot be started"]),
        (
            f"train --generation-backend vllm-colocated --vllm-python {sys.executable}",
            [f"{sys.executable} has no vLLM; install it there"],
        ),
        ("train --num-steps -3", ["--num-steps is -3"]),
        # numbers that do not fit together
        ("train --algorithm maxr1", ["'maxr1'", "did you mean 'maxrl'"]),
        ("train --rollout-batch-size 100", ["--rollout-batch-size 100", "--group-size 8", "5 or 10"]),
        ("train --algorithm cispo --train-batch-size 24", ["--train-batch-size 24", "16 or 32"]),
        ("train --group-size 1", ["--group-size 1", "std", "--algorithm rft"]),
        ("train --train-examples 8", ["16 prompts", "8 problems"]),
        # files
        ("train --train-file none.jsonl", ["no file none.jsonl", "a5 data gsm8k"]),
        ("train --train-file empty.jsonl", ["empty.jsonl is empty"]),
        ("train --train-file text.jsonl", ["Line 2 of text.jsonl is not JSON"]),
        ("train --val-file unmarked.jsonl", ["Line 2 of unmarked.jsonl", "####"]),
        ("train --prompt r1_zer", ["'r1_zer'", "did you mean 'r1_zero'"]),
        ("train --prompt no-question.txt", ["{question} 0 times"]),
        ("train --prompt prompt.txt", ["prompt.txt does not say", "--grader r1_zero"]),
        ("evaluate --prompt prompt.txt", ["prompt.txt does not say", "--grader r1_zero"]),
        # models and devices
        ("train --model none/at/all", ["no model folder 'none/at/all'"]),
        ("train --model used", ["'used' has no config.json"]),
        ("train --device cuda", ["sees no NVIDIA card", "--device cpu"]),
        ("train --max-tokens 600", ["--max-tokens 600 does not fit", "leaves", "or fewer"]),
        ("evaluate --max-tokens 600 --val-examples 2", ["--max-tokens 600 does not fit"]),
        # run folders
        ("train --output-dir used", ["--output-dir used is not empty", "--resume used"]),
        ("train --output-dir empty.jsonl/run", ["cannot be made (Not a directory)", "--output-dir"]),
        ("train --resume", ["--resume needs the folder of a run"]),
        ("train --resume --seed 3", ["--resume needs the folder of a run"]),
        ("train --resume=used", ["used is not a run folder"]),
        ("plot", ["at least one run folder"]),
        ("plot used", ["used has no metrics.jsonl"]),
        ("plot memory", ["a5 plot memory lacks RUN"]),
        ("plot memory used", ["used has no memory.jsonl"]),
        # the other commands' numbers and paths
        ("evaluate --val-examples 0", ["--val-examples is 0"]),
        ("evaluate --samples 0", ["--samples is 0"]),
        ("evaluate --temperature nan", ["--temperature is nan"]),
        ("evaluate --temperature -1", ["--temperature is -1.0"]),
        ("evaluate --top-p 0", ["--top-p is 0.0"]),
        ("evaluate --max-tokens 0", ["--max-tokens is 0"]),
        ("evaluate --output none/result.json", ["none/result.json cannot be written"]),
        ("evaluate --output used", ["used cannot be written"]),
        ("bench toy --steps 1", ["--steps is 1"]),
        ("bench update --variants hast", ["'hast'", "did you mean 'host'"]),
        ("bench update --updates 0", ["--updates is 0"]),
        ("probe --model tiny --vram-budget 0", ["--vram-budget is 0"]),
        ("probe --model tiny --sequences 3", ["3"]),
        ("toy problems", ["a5 toy problems lacks FILE"]),
        ("toy problems out.jsonl --split tests", ["'tests'", "'tuning'"]),
        ("toy problems out.jsonl --count 0", ["--count is 0"]),
        ("toy problems out.jsonl --count 9999999", ["5,000"]),
        ("toy problems used", ["used cannot be written (Is a directory)"]),
        ("toy build", ["a5 toy build lacks OUT"]),
        ("toy build used", ["used is not empty"]),
        ("toy build empty.jsonl/below", ["cannot be made (Not a directory)"]),
        ("model from-gguf", ["a5 model from-gguf lacks FILE and OUT"]),
        ("model from-gguf m.gguf", ["a5 model from-gguf lacks OUT"]),
        ("model from-gguf m.gguf out", ["no GGUF file m.gguf"]),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(here: Path, monkeypatch, command: str, words: list[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    good = '{"question": "How many?", "answer": "Two. #### 2"}\n'
    for name, text in {
        "empty.jsonl": "",
        "text.jsonl": good + "How many?\n",
        "unmarked.jsonl": good + '{"question": "How many?", "answer": "Two."}\n',
        "no-question.txt": "Answer me.",
        "prompt.txt": "{question}\nAnswer:",
    }.items():
        (here / name).write_text(text)
    (here / "used").mkdir()
    (here / "used" / "mine.txt").write_text("mine")
    sentence = refused(command)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("config", "has no config.json"),
        ("tokenizer", "has no tokenizer"),
        ("end", "has no end-of-sequence token"),
        ("rows", "200 embedding rows but its tokenizer has 258 tokens"),
    ],
)
def test_a_model_folder_that_lacks_something(here: Path, lacking: str, words: str) -> None:
    folder, tokenizer = here / "model", tiny_tokenizer()
    model = tiny_olmo2(vocab_size=200 if lacking == "rows" else 264)
    model.config.max_position_embeddings = 1024  # the prompts fit
    model.save_pretrained(folder)
    if lacking == "end":
        tokenizer.eos_token = None
    if lacking != "tokenizer":
        tokenizer.save_pretrained(folder)
    if lacking == "config":
        (folder / "config.json").unlink()
    assert words in refused("train --model model --device cpu")
    assert words in refused("evaluate --model model --device cpu")


def test_a_message_of_several_lines_is_printed_as_one(here: Path, monkeypatch) -> None:
    def broken(**options: Any) -> None:
        raise a5lib.models.UserError("The disk\n  is full.")

    monkeypatch.setattr(a5lib.doctor, "diagnose", broken)
    assert refused("doctor") == "The disk is full."


def test_what_tyro_says_otherwise_is_still_one_line() -> None:
    boxed = "╭─ Parsing error ─╮\n│ Something new   │\n│ happened.       │\n╰─────────────────╯\n"
    assert one_sentence("plot", boxed) == (
        "a5 plot: Parsing error Something new happened; `a5 plot --help` explains the flags."
    )


# --- flags


def test_the_flags_people_know() -> None:
    words = (
        "--model m --no-trust-remote-code --algorithm dr_grpo --num-steps 7 --seed 3 --learning-rate 2e-5 "
        "--rollout-batch-size 64 --group-size 4 --train-batch-size 32 --gradient-accumulation-steps 2 --cliprange 0.3 "
        "--train-examples 100 --val-examples 50 --max-tokens 90 --temperature 0.9 --top-p 0.8 --low-memory "
        "--attention-implementation flash_attention_2 --generation-backend transformers --eval-every 5 --save-every 6 "
        "--no-save-final --output-dir out --train-file t.jsonl --val-file v.jsonl --prompt question_only "
        "--grader r1_zero --device cpu --dtype bfloat16 --warmup-steps 4"
    )
    flags = parse("train", TrainFlags, words.split(), TrainFlags())
    assert as_config(flags) == TrainConfig(
        model="m", trust_remote_code=False, algorithm="dr_grpo", num_steps=7, seed=3, learning_rate=2e-5,
        rollout_batch_size=64, group_size=4, train_batch_size=32, gradient_accumulation_steps=2, cliprange=0.3,
        train_examples=100, val_examples=50, max_tokens=90, temperature=0.9, top_p=0.8, low_memory=True,
        attention_implementation="flash_attention_2", generation_backend="transformers", eval_every=5, save_every=6,
        save_final=False, output_dir=Path("out"), train_file=Path("t.jsonl"), val_file=Path("v.jsonl"),
        prompt="question_only", grader="r1_zero", device="cpu", dtype="bfloat16", warmup_steps=4,
    )  # fmt: skip
    assert parse("train", TrainFlags, ["--resume", "run"], TrainFlags()).resume == Path("run")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TrainConfig)])
def test_every_field_of_the_config_is_a_flag(field: str) -> None:
    for words, value in samples(field):
        flags = parse("train", TrainFlags, words, TrainFlags())
        assert getattr(flags, field) == value
        assert dataclasses.replace(flags, **{field: getattr(TrainFlags(), field)}) == TrainFlags()


def samples(field: str) -> list[tuple[list[str], Any]]:
    """Command-line words that set the field, and the value they mean."""
    kind = typing.get_type_hints(TrainConfig)[field]
    optional = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    if optional:
        kind = typing.get_args(kind)[0]
    name = flag(field)
    if kind is bool and optional:
        return [([name, "True"], True), ([name, "False"], False)]
    if kind is bool:
        return [([name], True), ([name.replace("--", "--no-", 1)], False)]
    if typing.get_origin(kind) is Literal:
        return [([name, choice], choice) for choice in typing.get_args(kind)]
    value = {int: 37, float: 0.375, str: "word", Path: Path("a/path")}[kind]
    return [([name, str(value)], value), ([f"{name}={value}"], value)]


def test_help_lists_commands_and_flags_and_runs_nothing(here: Path) -> None:
    overview = a5("--help")
    assert overview == a5(), "no words ask for help"
    assert overview.code == 0
    assert all(f"a5 {name}" in overview.out for name in COMMANDS)
    train = a5("train --help")
    assert (train.code, train.err) == (0, "")
    assert all(flag(f.name) in train.out for f in dataclasses.fields(TrainConfig))
    evaluate = a5("evaluate -h")
    assert all(flag(f.name) in evaluate.out for f in dataclasses.fields(EvaluateFlags))
    for name in COMMANDS:
        result = a5(f"{name} --help")
        assert result.code == 0
        assert f"usage: a5 {name}" in result.out
    assert not list(here.iterdir())


# --- train, resume, plot


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("runs") / "small run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A5_IMPL", "solutions")
        return folder, a5(SMALL, "--output-dir", folder)


def copy_of(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


def test_train_leaves_a_run_folder_and_says_where(trained) -> None:
    folder, result = trained
    assert result.code == 0, result.err
    names = "config.json command.txt environment.json metrics.jsonl evaluations.jsonl curves.png model checkpoints"
    assert set(names.split()) <= {p.name for p in folder.iterdir()}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for words in ("before", "after step 2", "greedy", "(95 %)", f"Curves: {folder / 'curves.png'}", "command.txt"):
        assert words in result.out, words
    for record in (json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()):
        assert f"{100 * record['accuracy']:.1f} %" in result.out


def test_zero_steps_give_an_evaluation_and_no_curves(here: Path) -> None:
    result = a5(f"{SMALL} --num-steps 0 --no-save-final --save-every 0 --output-dir run")
    assert result.code == 0, result.err
    assert "before" in result.out
    assert "after step" not in result.out
    assert not (here / "run" / "curves.png").exists()


def test_resume_continues_and_refuses_what_may_not_change(here: Path, trained) -> None:
    run = copy_of(trained[0], here / "run")
    sentence = refused("train --resume run --learning-rate 0.1 --device cpu")
    assert "--learning-rate was 0.0005" in sentence
    assert "--group-size was 2" in refused("train --group-size=4 --resume=run")
    assert "--output-dir other does not go with --resume" in refused("train --resume run --output-dir other")
    result = a5("train --num-steps 3 --resume run")
    assert result.code == 0, result.err
    assert "Continuing after step 2 of 3" in result.out
    assert "after step 3" in result.out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == [1, 2, 3]


def test_ctrl_c_stops_after_the_step_and_says_how_to_continue(here: Path, monkeypatch) -> None:
    combine = a5lib.training.combine_updates

    def interrupted(updates):
        os.kill(os.getpid(), signal.SIGINT)
        return combine(updates)

    monkeypatch.setattr(a5lib.training, "combine_updates", interrupted)
    result = a5(f"{SMALL} --output-dir run")
    assert result.code == 130
    assert "Stopped after step 1. Continue with: " in result.out
    assert "a5 train --resume run\n" in result.out
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert a5("train --resume run").code == 0


def test_ctrl_c_elsewhere_is_code_130_and_one_sentence(here: Path, monkeypatch) -> None:
    def interrupted(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(a5lib.doctor, "diagnose", interrupted)
    result = a5("doctor")
    assert result.code == 130
    assert result.err.startswith("Interrupted")
    assert result.err.count("\n") == 1


def test_plot_draws_several_runs(here: Path, trained) -> None:
    run = trained[0]
    assert a5("plot", run).code == 0
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert a5("plot", run, copy_of(run, here / "other"), "--output", "both.svg").code == 0
    assert "<svg" in (here / "both.svg").read_text()
    assert "cannot be written to both.xyz" in refused("plot", run, "--output", "both.xyz")
    assert "cannot be written to none/a.png" in refused("plot", run, "--output", "none/a.png")


def test_plot_memory_draws_what_the_run_recorded(here: Path, trained) -> None:
    run = trained[0]
    records = [json.loads(line) for line in (run / "memory.jsonl").read_text().splitlines()]
    assert {r["step"] for r in records} == {1, 2} and {"generate", "update"} <= {r["phase"] for r in records}
    assert all(r["host"] > 2**20 and r["t"] >= 0 for r in records)
    assert a5("plot memory", run).code == 0
    assert (here / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written to memory.xyz" in refused("plot memory", run, "--output", "memory.xyz")


# --- evaluate


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_evaluate_counts_classes_and_shows_examples(here: Path) -> None:
    result = a5("evaluate --val-examples 24 --temperature 0 --device cpu --output result.json")
    assert result.code == 0, result.err
    saved = strict((here / "result.json").read_text())
    counts = saved["counts"]
    assert sum(counts.values()) == 24
    assert min(counts["right"], counts["wrong"]) > 0, "the toy model gets some of these right and some wrong"
    assert saved["accuracy"] == counts["right"] / 24
    low, high = saved["interval"]
    assert low < saved["accuracy"] < high
    assert f"accuracy {100 * saved['accuracy']:.1f} % ({100 * low:.1f}-{100 * high:.1f}, n=24)" in result.out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    assert [[row[0], row[1]] for row in cells] == [
        ["right", str(counts["right"])],
        ["well formed, wrong answer", str(counts["wrong"])],
        ["malformed", str(counts["malformed"])],
    ]
    shown = " ".join(result.out.split())
    for kind in ("right", "wrong"):
        for example in saved["examples"][kind][:2]:
            assert " ".join(example["question"].split()) in shown
            assert f"[right answer: {example['answer']}]" in shown
    assert f"{100 * saved['truncated_share']:.1f} % cut off" in shown
    assert {k: saved[k] for k in ("model", "prompt", "reward", "max_tokens", "seed", "temperature")} == {
        "model": "toy", "prompt": "r1_zero", "reward": "r1_zero", "max_tokens": 80, "seed": 0, "temperature": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["r1_zero", "r1_zero_three_shot", "question_only"])
def test_evaluate_takes_the_three_prompts(here: Path, prompt: str) -> None:
    result = a5(f"evaluate --prompt {prompt} --val-examples 3 --samples 2 --max-tokens 24 --show 0 --device cpu")
    assert result.code == 0, result.err
    reward = "question_only" if prompt == "question_only" else "r1_zero"
    assert f"prompt {prompt}, reward {reward}" in result.out
    assert "n=3 x 2" in result.out
    assert "pass@2" in result.out
    assert "right answer" not in result.out, "--show 0 shows no examples"


def test_evaluate_takes_a_trained_model_a_file_and_a_prompt_of_ones_own(here: Path, trained) -> None:
    (here / "prompt.txt").write_text("Q: {question}\nA:")
    assert a5("toy problems problems.jsonl --count 3").code == 0
    command = "evaluate --val-file problems.jsonl --prompt prompt.txt --grader question_only --max-tokens 8 --model"
    result = a5(command, trained[0] / "model")
    assert result.code == 0, result.err
    assert "prompt prompt.txt, reward question_only" in result.out
    assert "n=3" in result.out


def test_a_full_disk_keeps_the_result_on_the_screen(here: Path, monkeypatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = a5("evaluate --val-examples 2 --max-tokens 4 --device cpu --output result.json")
    assert result.code == 2
    assert "accuracy" in result.out
    assert "result.json cannot be written (No space left on device)" in result.err


# --- the other commands


@pytest.mark.parametrize("level", ["ok", "warn", "fail"])
def test_doctor_fails_only_where_something_is_broken(here: Path, monkeypatch, level: str) -> None:
    real = a5lib.doctor.diagnose()
    result = a5("doctor")
    assert result.code == int(any(f.level == "fail" for f in real))
    assert all(f.subject in result.out for f in real)
    monkeypatch.setattr(a5lib.doctor, "diagnose", lambda **options: [dataclasses.replace(real[0], level=level)])
    assert a5("doctor").code == int(level == "fail")


def test_bench_runs_on_the_toy_model(here: Path, monkeypatch) -> None:
    smaller = functools.partial(a5lib.bench.bench, prompts=2, group_size=2)
    monkeypatch.setattr(a5lib.bench, "bench", smaller)
    result = a5("bench toy --steps 2 --rounds 1")
    assert result.code == 0, result.err
    assert "transformers.generate" in result.out
    assert "seconds a step" in result.out
    assert not list(here.iterdir())


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("it broke", 1)])
def test_bench_update_hands_its_flags_on_and_says_by_its_code_whether_a_variant_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: str | None, code: int
) -> None:
    given: dict[str, Any] = {}

    def recorded(names: tuple[str, ...], output: Path, **options: Any) -> list[dict[str, Any]]:
        given.update(options, names=names, output=output)
        return [{"error": None}, {"error": error}]

    monkeypatch.setattr(a5lib.bench_update, "bench_update", recorded)
    command = "bench update --variants host peers --output out --model tiny --sequences 4 --tokens 42 --updates 3"
    assert a5(command).code == code
    assert (given["names"], given["output"], given["updates"], given["warmups"]) == (
        ("host", "peers"), Path("out"), 3, None
    )  # fmt: skip
    row = given["change"](a5lib.bench_variants.VARIANTS[0])
    assert (row.model, row.sequences, row.tokens) == ("tiny", 4, 42)


def test_probe_passes_on_a_tiny_model_and_fails_by_its_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = a5("probe --model tiny --sequences 4 --tokens 21 --device cpu")
    assert (result.code, result.out.splitlines()[-1]) == (0, "PASS")
    monkeypatch.setattr(a5lib.probe, "LEARNING_RATES", (0.0, 0.0))
    result = a5("probe --model tiny --sequences 4 --tokens 21 --device cpu")
    assert (result.code, result.out.splitlines()[-1]) == (1, "FAIL")
    assert not list(here.iterdir())


def test_toy_problems_are_gsm8k_lines(here: Path) -> None:
    result = a5("toy problems problems.jsonl --split validation --count 5 --seed 2")
    assert (result.code, result.out) == (0, "Wrote 5 problems to problems.jsonl.\n")
    written = load_gsm8k(here / "problems.jsonl")
    assert [p.answer for p in written] == [p.answer for p in toy_problems("validation", 5, 2)]


def test_toy_build_writes_a_model_that_loads(here: Path) -> None:
    result = a5("toy build out --steps 2 --rows 2 --documents 40 --validation 2 --device cpu")
    assert result.code == 0, result.err
    assert {p.name for p in TOY_MODEL_DIR.iterdir()} == {p.name for p in (here / "out").iterdir()}
    assert a5("evaluate --model out --val-examples 2 --max-tokens 4 --device cpu").code == 0


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_gsm8k_offline_is_one_sentence(here: Path, monkeypatch) -> None:
    offline = functools.partial(download_gsm8k, url=f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(a5lib.data, "download_gsm8k", offline)
    (here / "data").mkdir()
    sentence = refused("data gsm8k")
    assert "could not be downloaded" in sentence
    assert "data/gsm8k-train.jsonl" in sentence


def test_gsm8k_names_the_files_it_wrote(here: Path, monkeypatch) -> None:
    source = here / "source"
    source.mkdir()
    for split, rows in GSM8K_ROWS.items():
        (source / f"{split}.jsonl").write_text('{"question": "How many?", "answer": "#### 2"}\n' * rows)
    monkeypatch.setattr(a5lib.data, "download_gsm8k", functools.partial(download_gsm8k, url=source.as_uri()))
    result = a5("data gsm8k folder")
    assert result.code == 0, result.err
    assert "--train-file folder/gsm8k-train.jsonl --val-file folder/gsm8k-test.jsonl" in result.out
    assert len(load_gsm8k(here / "folder" / "gsm8k-test.jsonl")) == GSM8K_ROWS["test"]


def test_gguf_without_its_packages_is_one_sentence(here: Path, monkeypatch) -> None:
    (here / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(a5lib.models, "find_spec", lambda name: None)
    assert "pip install gguf accelerate" in refused("model from-gguf m.gguf out")


def test_gguf_names_the_folder_it_wrote(here: Path, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(a5lib.models, "convert_gguf", lambda *words: asked.append(words))
    result = a5("model from-gguf m.gguf out --dtype float32")
    assert (result.code, asked) == (0, [(Path("m.gguf"), Path("out"), "float32")])
    assert "a5 evaluate --model out" in result.out


# --- a process of its own


def process(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m a5lib` in another folder, from this source tree."""
    root = str(Path(__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root, "A5_IMPL": "solutions", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "a5lib", *words], cwd=folder, env=env, text=True, **options)


def test_python_m_a5lib_is_a5(tmp_path: Path) -> None:
    words = "evaluate --val-examples 2 --max-tokens 8 --device cpu --output result.json"
    done = process(tmp_path, *words.split(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert strict((tmp_path / "result.json").read_text())["problems"] == 2


def test_python_m_a5lib_refuses_in_one_sentence(tmp_path: Path) -> None:
    done = process(tmp_path, "evaluate", "--modl", "toy", capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["train --help", "--help", "toy problems p.jsonl"])
def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path, words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = process(tmp_path, *words.split(), stdout=pipe, stderr=subprocess.PIPE)
    assert done.stderr == ""


def test_a_stub_that_a_run_needs_is_found_before_a_model_is_loaded(here: Path, course: Path, monkeypatch) -> None:
    monkeypatch.setenv("A5_IMPL", "starter")
    monkeypatch.setattr(a5lib.training, "load_policy", None)
    sentence = refused(f"{SMALL} --output-dir run")
    assert sentence.startswith("pad_and_mask is not written yet; write it in starter/masks.py (notebook 02 teaches it)")
    for command in ("bench toy", "bench update --variants published", "probe --model tiny"):
        assert refused(command) == sentence
    assert "--num-steps is -3" in refused("train --num-steps -3"), "flags come first"


def test_a_stub_that_is_called_all_the_same_is_one_sentence(here: Path, course: Path, monkeypatch) -> None:
    monkeypatch.setenv("A5_IMPL", "starter")
    monkeypatch.setattr(a5lib.doctor, "diagnose", lambda **options: load_algo().pad_and_mask([[1]], [[2]], 0))
    assert refused("doctor").startswith("pad_and_mask is not written yet; write it in starter/masks.py")

    def fault(**options: Any) -> None:
        raise NotImplementedError("'log_softmax' not implemented for 'Long'")

    monkeypatch.setattr(a5lib.doctor, "diagnose", fault)
    with pytest.raises(NotImplementedError):
        main(["doctor"])


def test_the_default_length_gives_way_to_a_short_context(here: Path) -> None:
    a5(f"{SMALL} --num-steps 1 --output-dir run")
    result = a5("evaluate --model run/model --val-examples 2 --max-tokens 16")
    assert result.code == 0
    result = a5("evaluate --model run/model --val-examples 1 --prompt r1_zero_three_shot")
    assert result.code == 0, "512 tokens do not fit behind the prompt; what the context leaves does"
