"""`a5 diagnose-backend`: cycles of the toy model through the real worker and the fake engine in it, what is written of
them, and what is said about it. Checks are made on rows written by hand, so that each of them can fail.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import a5lib.diagnose as module
from a5lib import cli
from a5lib.bench_update import written
from a5lib.course import load_algo
from a5lib.cycle_views import PHASES, WORK, Backend, checks, growth, newest, sheets
from a5lib.diagnose import Setting, diagnose_backend, made_up_advantages
from a5lib.engines.plan import GIB
from a5lib.engines.resident import ResidentEngine
from a5lib.errors import UserError
from a5lib.rollouts import vllm_backend
from a5lib.rollouts.vllm_backend import VllmColocated
from a5lib.runlog import read_jsonl
from tests.vllm_tools import held, survivors

pytestmark = [
    pytest.mark.reference,  # the loop's parts are timed, with the reference in them
    pytest.mark.timeout(200),  # a worker starts in a second, or in many on a busy machine
]

ENGINE = f"{Path(__file__).with_name('fake_vllm.py')}:ToyEngine"
SMALL = Setting(rollouts=8, max_tokens=16, device="cpu", vllm_python=Path(sys.executable))
COLOCATED: tuple[Backend, ...] = ("vllm-colocated",)
SYNC = ["wake weights", "load", "wake kv_cache", "reset_prefix_cache"]
STARTED = ["hello", "sleep 2", "memory"]


def use_fake(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    patch.setenv("A5_FAKE_VLLM", str(folder))
    patch.setattr(vllm_backend, "ENGINE", ENGINE)
    patch.setattr(module, "check_backend", lambda config: None)
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake engine that every worker of this test runs."""
    return use_fake(tmp_path / "fake", monkeypatch)


def run(output: Path, backends: tuple[Backend, ...], setting: Setting = SMALL, cycles: int = 3) -> tuple[bool, str]:
    """Whether all checks passed, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    passed = diagnose_backend(load_algo("solutions"), setting, backends, cycles, output, console)
    return passed, console.file.getvalue()  # type: ignore[attr-defined]


def calls(fake: Path) -> list[str]:
    return [json.loads(line)["call"] for line in (fake / "calls.jsonl").read_text().splitlines()]


def nothing_left(fake: Path, before: dict[str, int]) -> None:
    gc.collect()
    assert not survivors(json.loads((fake / "pids").read_text()))
    assert held() == before


# --- measured


class Measured:
    """One run of three cycles with each backend, and what the engine, the backend and the log saw of it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.fake, self.output = use_fake(folder / "fake", patch), folder / "out"
        self.order: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        for owner, names in ((ResidentEngine, ("release", "score", "accumulate", "step")),
                             (VllmColocated, ("start", "sync", "generate", "release", "close"))):  # fmt: skip
            for name in names:
                self.note(patch, owner, name)
        generate = module.generate

        def asked(config: Any, backend: Any, prompts: Any, stop: Any, number: int) -> Any:
            self.asked.append((copy.deepcopy(prompts), stop, number, config.group_size, config.max_tokens))
            return generate(config, backend, prompts, stop, number)

        patch.setattr(module, "generate", asked)
        before = held()
        self.passed, self.printed = run(self.output, ("transformers", "vllm-colocated", "vllm-alone"))
        nothing_left(self.fake, before)
        self.rows = read_jsonl(self.output / "rows.jsonl")

    def note(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        real = getattr(owner, name)

        def noted(this: Any, *args: Any, **options: Any) -> Any:
            who = "engine" if owner is ResidentEngine else "vllm"
            nothing = name == "score" and not args[0]["advantages"].any()
            self.order.append(f"{who}.{name}{' nothing' if nothing else ''}")
            return real(this, *args, **options)

        patch.setattr(owner, name, noted)

    def of(self, backend: Backend) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["backend"] == backend]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        return Measured(tmp_path_factory.mktemp("measured"), patch)


def test_a_cycle_is_the_loops_order_of_calls_and_the_return_has_nothing_else_to_do(measured: Measured) -> None:
    plain = 3 * ["engine.accumulate", "engine.step"]
    turn = ["engine.release", "vllm.sync", "vllm.generate", "vllm.release"]
    cycle = [*turn, "engine.score nothing", "engine.score", "engine.accumulate", "engine.step"]
    alone = ["vllm.start", "vllm.sync", *3 * ["vllm.generate"], "vllm.close"]
    assert measured.order == [*plain, "engine.release", "vllm.start", *3 * cycle, "vllm.close", *alone]


def test_alone_never_sleeps_after_it_has_its_weights(measured: Measured) -> None:
    cycle = [*SYNC, "generate", "sleep 2", "memory"]
    alone = [*STARTED, *SYNC, *3 * ["generate"], "stop"]
    assert calls(measured.fake) == [*STARTED, *3 * cycle, "stop", *alone]


def test_every_backend_is_asked_the_same_and_each_cycle_something_new(measured: Measured) -> None:
    first, second, third = (measured.asked[i : i + 3] for i in (0, 3, 6))
    assert first == second == third
    prompts = [prompts for prompts, *_ in first]
    assert all(len(of_cycle) == 1 for of_cycle in prompts) and prompts[0] != prompts[1] != prompts[2]
    assert first[0][1:] == (("</answer>",), 1, 8, 16)


def test_rows_come_as_start_cycles_and_end_and_say_what_was_measured_where(measured: Measured) -> None:
    assert [(row["backend"], row["row"]) for row in measured.rows] == [
        (backend, kind)
        for backend in ("transformers", "vllm-colocated", "vllm-alone")
        for kind in ("start", "cycle", "cycle", "cycle", "end")
    ]
    start = measured.of("vllm-colocated")[0]
    assert start["setting"] == {
        "model": "toy", "parameters": 1_067_136, "dtype": "float32", "responses": 8, "group_size": 8,
        "prompt_tokens": None, "max_tokens": 16, "vram_budget": None, "optimizer_state": "fp32", "engine": None,
        "device": "cpu",
    }  # fmt: skip
    assert start["command"] == (
        "a5 diagnose-backend --backends vllm-colocated --cycles 3 --rollouts 8 --max-tokens 16 --device cpu "
        "--vllm-python PYTHON"
    )
    assert start["environment"]["vllm"]["vllm"] == "fake" and start["environment"]["torch"] == torch.__version__
    assert measured.of("transformers")[0]["environment"]["vllm"] is None
    assert sys.executable not in (measured.output / "rows.jsonl").read_text()
    assert start["weight_bytes"] == 4 * 1_067_136
    assert measured.of("vllm-colocated")[-1]["orphans"] == []


def test_seconds_add_up_to_the_cycle_and_units_are_those_of_their_names(measured: Measured) -> None:
    vllm = [*SYNC, "leave", "write", "verify", "generate", "sleep", "return", "score", "update", "rest"]
    parts = {"transformers": {"load", "generate", "sleep", "update", "rest"}, "vllm-colocated": set(vllm),
             "vllm-alone": {"generate"}}  # fmt: skip
    assert set(vllm) == set(PHASES), "the table knows every phase"
    for row in measured.rows:
        if row["row"] != "cycle":
            continue
        assert set(row["seconds"]) == parts[row["backend"]]
        assert all(seconds >= 0 for seconds in row["seconds"].values()), row["seconds"]
        assert sum(row["seconds"].values()) == pytest.approx(row["cycle_seconds"])
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]["generate"])
        assert 8 <= row["tokens"] <= 8 * 16
        memory = row["memory"]
        assert memory["card"] is None and 10**8 < memory["trainer"] < 10**10, "bytes"
        assert memory["worker"] == (None if row["backend"] == "transformers" else 1)
        if row["backend"] != "transformers":
            assert memory["shared"] >= 4 * 1_067_136
        if row["backend"] != "vllm-alone":
            assert row["grad_norm"] > 0, "no update was taken"
    for row in measured.of("vllm-colocated")[1:4]:
        assert row["mismatch_mean"] < 1e-4, "the worker generated with other weights"


def test_the_table_holds_all_backends_and_no_check_can_fail_without_a_card(measured: Measured) -> None:
    assert measured.passed
    for words in ("toy on cpu: 8 responses of up to 16 tokens", "every tensor verified", "8.33 times", "vLLM fake",
                  "not judged: hand-over takes", "there is no card", "there are 3", "ok: the worker left no process",
                  "vllm-colocated, cycle 3 of 3"):  # fmt: skip
        assert words in measured.printed, words
    page = (measured.output / "table.md").read_text()
    assert "| seconds | transformers | vllm-colocated | vllm-alone |" in page


def test_random_weights_go_through_a_budget_and_leave_no_folder_and_an_orphan_is_named(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "group_members", lambda group: [4711, 4712])
    setting = Setting(
        model="tiny", rollouts=8, prompt_tokens=21, max_tokens=16, vram_budget=0.02, device="cpu", vllm_python=None
    )
    before = held()
    passed, printed = run(tmp_path / "out", COLOCATED, setting, cycles=2)
    nothing_left(fake, before)
    assert not passed and "FAIL: the worker left 2 process(es): 4711, 4712." in printed
    start, first, second, end = read_jsonl(tmp_path / "out" / "rows.jsonl")
    assert start["plan"]["engine"] == "layer_major" and start["setting"]["prompt_tokens"] == 21
    assert first["tokens"] > 0.9 * 8 * 16, "hardly a response of random weights ends by itself"
    assert second["mismatch_mean"] < 1e-4
    assert end["orphans"] == [4711, 4712]
    settings = json.loads((fake / "settings.json").read_text())
    assert settings["max_model_len"] == 21 + 16 and not Path(settings["model"]).exists()


def test_an_interrupt_leaves_the_rows_that_were_finished_and_no_process(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held()
    generate = VllmColocated.generate

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if self.synced_step == 2:
            options["progress"] = lambda count: signal.raise_signal(signal.SIGINT)
        return generate(self, *args, **options)

    monkeypatch.setattr(VllmColocated, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", COLOCATED)
    nothing_left(fake, before)
    assert [(row["row"], row.get("cycle")) for row in read_jsonl(tmp_path / "out" / "rows.jsonl")] == [
        ("start", None), ("cycle", 1)
    ]  # fmt: skip


def test_made_up_rewards_give_every_response_a_gradient() -> None:
    advantages = made_up_advantages(load_algo("solutions"), SMALL.config("transformers"))
    assert len(advantages) == 8 and (advantages != 0).all() and advantages.sum() == pytest.approx(0, abs=1e-5)


def test_alone_vllm_gets_what_the_layer_major_engine_leaves_it_and_the_trainers_context_stays() -> None:
    setting = Setting(model="olmo2-1b", vram_budget=16.0)
    assert setting.config("vllm-colocated").vram_budget == 16.0
    alone = setting.config("vllm-alone")
    assert (alone.vram_budget, alone.engine) == (16.0, "layer_major")


@pytest.mark.parametrize(
    ("setting", "cycles", "words"),
    [
        (SMALL, 1, "--cycles is 1; it must be at least 2"),
        (Setting(model="tiny", prompt_tokens=1024, device="cpu"), 2, "--prompt-tokens is 1024"),
        (Setting(model="tiny", prompt_tokens=1000, max_tokens=25, device="cpu"), 2, "use --max-tokens 24 or fewer"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(setting: Setting, cycles: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run(tmp_path / "out", ("transformers",), setting, cycles)
    assert not (tmp_path / "out" / "table.md").exists()


def test_without_vllm_or_a_folder_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs vLLM, which this Python .* --vllm-python"):
        run(tmp_path / "out", ("transformers", "vllm-colocated"), Setting(device="cpu"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="choose another --output"):
        run(tmp_path / "file" / "out", ("transformers",))


# --- read: rows written by hand

COMMON = {"leave": 0.125, "load": 0.25, "verify": 0.0625, "sleep": 0.03125, "rest": 0.5, "update": 4.0}


def rows_of(backend: Backend, generate: list[float], began: str = "one", **setting: Any) -> list[dict[str, Any]]:
    """A run with these seconds of generation, 100 tokens each, one row a cycle."""
    chosen = {"model": "olmo2-1b", "parameters": 1_484_916_736, "device": "NVIDIA H200", "vram_budget": 16,
              "responses": 256, "max_tokens": 512}  # fmt: skip
    memory = {"card": 12 * GIB, "allocated": 0, "reserved": 9 * GIB, "trainer": 20 * GIB, "worker": 4 * GIB,
              "shared": 3 * GIB}  # fmt: skip
    versions = {"a5lib": "0", "python": "3", "torch": "2", "transformers": "5", "vllm": None}
    name = {"backend": backend, "began": began}
    start = {"row": "start", **name, "setting": {**chosen, **setting}, "weight_bytes": 3 * 10**9, "seconds": 60.0,
             "side_by_side": 256, "environment": versions, "link_gb_per_s": None, "memory": memory}  # fmt: skip
    cycles = [
        {"row": "cycle", **name, "cycle": i, "seconds": {**COMMON, "generate": seconds},
         "cycle_seconds": sum(COMMON.values()) + seconds, "tokens": 100, "tokens_per_second": 100 / seconds,
         "memory": dict(memory)}
        for i, seconds in enumerate(generate, start=1)
    ]  # fmt: skip
    return [start, *cycles, {"row": "end", **name, "orphans": []}]


def judged(rows: list[dict[str, Any]], words: str) -> bool | None:
    """How the one check whose words begin so has come out."""
    (group,) = newest(rows)
    (found,) = [check for check in checks(group) if check.words.startswith(words)]
    return found.passed


def test_medians_leave_the_first_cycle_out_and_the_ratio_is_theirs() -> None:
    fast = rows_of("vllm-colocated", [90.0, 1.0, 2.0, 6.0])
    slow = rows_of("transformers", [95.0, 40.0, 30.0, 20.0])
    (group,) = newest([*slow, *fast])
    run = group["vllm-colocated"]
    assert run.median("cycle_seconds") == 2.0 + sum(COMMON.values())
    assert statistics.median(run.hand_overs()) == 0.125 + 0.25 + 0.0625 + 0.03125
    assert set(COMMON) - set(WORK) == {"leave", "load", "verify", "sleep"}
    page = "\n".join(written(sheets([group])))
    ratio = (30 + sum(COMMON.values())) / (2 + sum(COMMON.values()))
    assert f"takes {ratio:.2f} times as long" in page and "171.9 s and 20.6 s, RTX 5070 Ti" in page
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in page.splitlines()}
    assert cells["generation"] == ["30.000", "2.000 |"]
    assert cells["whole cycle"] == ["34.969 (24.969-44.969)", "6.969 (5.969-10.969) |"]
    assert cells["GB/s of weights in"] == ["12.00", "12.00 |"]
    assert cells["tokens/s of generation"] == ["3", "50 |"]
    assert cells["the card, most"] == ["12.000", "12.000 |"]


def test_the_newest_run_of_a_backend_counts_and_other_settings_stand_apart() -> None:
    rows = [
        *rows_of("vllm-colocated", [1.0, 1.0, 1.0], "one"), *rows_of("vllm-colocated", [3.0, 3.0, 3.0], "two"),
        *rows_of("vllm-colocated", [9.0], "interrupted")[:-1], *rows_of("transformers", [5.0, 5.0], "three"),
        *rows_of("transformers", [7.0, 7.0], "four", vram_budget=8),
    ]  # fmt: skip
    first, second = newest(rows)
    assert {name: run.start["began"] for name, run in first.items()} == {
        "vllm-colocated": "two", "transformers": "three"
    }  # fmt: skip
    assert [run.start["began"] for run in second.values()] == ["four"]


def test_a_hand_over_of_more_than_half_a_second_fails() -> None:
    rows = rows_of("vllm-colocated", [2.0, 2.0, 2.0, 2.0])
    assert judged(rows, "hand-over takes 0.469 s") is True
    for row in rows[2:4]:
        row["seconds"]["verify"] += 0.05
    assert judged(rows, "hand-over takes 0.519 s") is False
    assert judged(rows_of("vllm-colocated", [2.0, 2.0], device="cpu"), "hand-over") is None


def test_less_than_60_percent_of_the_speed_alone_fails() -> None:
    alone = rows_of("vllm-alone", [1.0, 1.0, 1.0])
    assert judged([*rows_of("vllm-colocated", [1.0, 1.6, 1.6]), *alone], "generation reaches 62 %") is True
    assert judged([*rows_of("vllm-colocated", [1.0, 1.7, 1.7]), *alone], "generation reaches 59 %") is False


@pytest.mark.parametrize("where", [0, 1, 3], ids=["the start", "the first cycle", "a later one"])
def test_a_peak_above_the_budget_fails_whenever_it_was_and_says_by_how_much(where: int) -> None:
    rows = rows_of("vllm-colocated", [2.0, 2.0, 2.0])
    assert judged(rows, "both tenants took 12.00 GiB of the card at most, 4.00 less than the 16 allowed") is True
    rows[where]["memory"] = {**rows[where]["memory"], "card": int(16.25 * GIB)}
    assert judged(rows, "both tenants took 16.25 GiB of the card at most, 0.25 more than the 16 allowed") is False


@pytest.mark.parametrize(
    ("kind", "words"), [("card", "the card:"), ("trainer", "the trainer's"), ("worker", "the worker's host"),
                        ("shared", "shared memory")]
)  # fmt: skip
def test_memory_that_grows_by_1_percent_from_cycle_3_to_10_fails(kind: str, words: str) -> None:
    rows = rows_of("vllm-colocated", [2.0] * 10)
    assert judged(rows, words) is True
    rows[1]["memory"][kind] = 1  # the first cycles may still grow
    before = rows[3]["memory"][kind]
    rows[10]["memory"][kind] = int(before * 1.009)
    assert judged(rows, f"{words} +0.90 %" if kind == "card" else words) is True
    rows[10]["memory"][kind] = int(before * 1.0101)
    assert judged(rows, words) is False
    (group,) = newest(rows)
    assert growth(group["vllm-colocated"], kind) == pytest.approx(0.0101, rel=1e-3)


def test_growth_is_not_judged_on_few_cycles_nor_where_there_is_no_card() -> None:
    assert judged(rows_of("vllm-colocated", [2.0] * 9), "growth is judged from 10 cycles on") is None
    rows = rows_of("vllm-colocated", [2.0] * 10)
    for row in rows[:-1]:
        row["memory"] = {**row["memory"], "card": None}
    (group,) = newest(rows)
    words = [check.words for check in checks(group)]
    assert not any(line.startswith("the card") for line in words) and "there is no card" in " ".join(words)


def test_processes_that_are_left_fail_and_a_run_without_an_end_is_not_judged() -> None:
    rows = rows_of("vllm-colocated", [2.0, 2.0])
    assert judged(rows, "the worker left no process") is True
    assert judged(rows[:-1], "the run did not come to its end") is None
    rows[-1]["orphans"] = [77]
    assert judged(rows, "the worker left 1 process(es): 77") is False


def test_nothing_is_checked_of_transformers_alone() -> None:
    (group,) = newest(rows_of("transformers", [2.0, 2.0]))
    assert checks(group) == []


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_command_hands_its_flags_on_and_says_by_its_code_whether_a_check_failed(
    monkeypatch: pytest.MonkeyPatch, passed: bool, code: int
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(module, "diagnose_backend", lambda algo, *rest: given.extend(rest) or passed)
    command = "diagnose-backend --backends vllm-colocated vllm-alone --cycles 10 --model olmo2-1b --vram-budget 8"
    assert cli.run(command.split()) == code
    assert given[:4] == [
        Setting(model="olmo2-1b", vram_budget=8.0), ("vllm-colocated", "vllm-alone"), 10,
        Path("runs/diagnose-backend"),
    ]  # fmt: skip
