"""The benchmark of one update: what its rows ask for, what is measured, and the record and table that come of it."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import a5lib.bench_update as module
from a5lib.bench_update import (
    TorchAdamW,
    bench_update,
    choose,
    config_of,
    count_work,
    derived,
    force_padding,
    latest_rows,
    markdown,
    measure,
    plan_of,
    run_row,
)
from a5lib.bench_variants import GROUPS, PIECES, VARIANTS, Variant, shrunk
from a5lib.errors import UserError
from a5lib.peers import PEERS, Update
from a5lib.recorder import MemoryRecorder
from a5lib.runlog import read_jsonl
from a5lib.synthetic import PUBLISHED, made_up_batch, published_config, random_model

BY_NAME = {v.name: v for v in VARIANTS}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def reference_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A5_IMPL", "solutions")


def small(name: str) -> Variant:
    return dataclasses.replace(shrunk(BY_NAME[name], "tiny", 8, 21), warmups=1, updates=2)


# --- the rows


def test_names_are_unique_and_every_row_resolves_to_a_config_of_one_whole_batch() -> None:
    assert len(BY_NAME) == len(VARIANTS)
    for variant in VARIANTS:
        assert variant.model in PUBLISHED
        assert variant.peer is None or variant.peer in PEERS
        config = config_of(variant)
        assert config.train_batch_size == config.rollout_batch_size == variant.sequences, variant.name
        if variant.microbatch is not None:
            assert config.train_batch_size // config.gradient_accumulation_steps == variant.microbatch, variant.name
    assert {v.peer for v in VARIANTS} - {None} == set(PEERS)


def test_the_ablation_has_each_piece_alone_and_each_left_out() -> None:
    rows = {v.name.removeprefix("ablation-"): v for v in VARIANTS if v.group == "ablation"}
    assert set(rows) == {"none", "all", *(f"{way}-{p}" for way in ("only", "without") for p in PIECES)}

    def switches(v: Variant) -> tuple[bool, ...]:
        s = v.settings
        return (v.microbatch == 1, s["recompute_layers"], s["head"] == "blocks", v.adamw == "ours",
                s["optimizer_state"] == "bf16")  # fmt: skip

    for i, piece in enumerate(PIECES):
        assert switches(rows[f"only-{piece}"]) == tuple(j == i for j in range(5))
        assert switches(rows[f"without-{piece}"]) == tuple(j != i for j in range(5))
    assert switches(rows["none"]) == (False,) * 5
    assert switches(rows["all"]) == (True,) * 5


def test_rows_are_chosen_by_name_and_by_group_in_the_tables_order() -> None:
    assert [v.name for v in choose(["scoring", "host"])] == ["host", "scoring"]
    assert {v.group for v in choose(["peers"])} == {"peers"}
    assert choose(["all"]) == list(VARIANTS)
    assert choose(["none"]) == []
    with pytest.raises(UserError, match=r"Unknown variant 'pears'; did you mean 'peers'\?.*ablation.*ragged-host"):
        choose(["host", "pears"])


def test_a_shrunk_row_keeps_the_share_of_the_response_and_fits_its_groups() -> None:
    row = shrunk(BY_NAME["ragged-padded"], "tiny", 4, 89)
    assert (row.model, row.sequences, row.tokens, row.response) == ("tiny", 4, 89, 64)
    assert (row.group_size, row.microbatch) == (4, 4)
    assert shrunk(BY_NAME["host"], None, None, None) == BY_NAME["host"]


# --- one row


def test_the_work_of_an_update_is_that_of_the_formula() -> None:
    model = random_model(published_config("tiny"))
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[0, 4:7], mask[1, 2:10], mask[2, 5:9] = True, True, True
    batch = {"response_mask": mask, "advantages": torch.tensor([1.0, -1.0, 0.0])}  # the third row is not run
    tokens, counting, pairs = 7 + 10, 3 + 8, 49 // 2 + 100 // 2
    layers = 104_000 - 2 * 264 * 64  # all but embedding and head
    flops = 6 * layers * tokens + 6 * 264 * 64 * counting + 12 * 2 * 64 * pairs
    assert count_work(model, batch) == {
        "tokens_run": tokens,
        "tokens_that_count": counting,
        "model_flops": pytest.approx(flops, rel=1e-3),  # pairs are rounded once, not for each row
    }
    assert 3 * count_work(model, batch, scoring=True)["model_flops"] == count_work(model, batch)["model_flops"]


def test_forced_padding_runs_every_row_at_full_width() -> None:
    batch = made_up_batch(
        vocabulary=264, sequences=8, tokens=40, response=24, group_size=4, ragged=True, zero_share=0.5
    )
    forced = force_padding(batch)
    assert (forced["advantages"] != 0).all()
    assert forced["response_mask"][:, -1].all()
    assert torch.equal(forced["response_mask"][:, :-1], batch["response_mask"][:, :-1])
    kept = batch["advantages"] != 0
    assert torch.equal(forced["advantages"][kept], batch["advantages"][kept])
    assert forced["advantages"][~kept].abs().max() < 1e-20
    assert not batch["response_mask"][:, -1].all(), "the batch itself is as it was"


def test_warm_ups_are_not_in_the_seconds_but_in_the_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)) ** 2)  # no two spans are the same
    recorder = MemoryRecorder(CPU)
    real, peaks = recorder.stop, iter([9, 1, 2, 3, 4, 5])
    monkeypatch.setattr(recorder, "stop", lambda p: dataclasses.replace(real(p), card_peak_bytes=next(peaks)))
    calls: list[str] = []

    def half(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    seconds, phases, losses, norms = measure(Update(lambda: half("a"), lambda: half("s")), 1, 2, recorder)
    assert calls == ["a", "s"] * 3
    assert (losses, norms) == ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0])
    assert len(seconds["accumulate"]) == len(seconds["step"]) == len(seconds["total"]) == 2
    assert seconds["total"] == [a + s for a, s in zip(seconds["accumulate"], seconds["step"], strict=True)]
    assert phases["accumulate"]["allocated"] == 9
    assert phases["step"]["allocated"] == 5
    assert phases["step"]["card"] is None


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(5, 3, generator=generator).to(dtype), torch.randn(7, generator=generator).to(dtype)]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return made


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_adamw_behind_our_face_is_torchs_adamw(foreach: bool) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    numbers = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = TorchAdamW(ours, foreach=foreach, master=False, **numbers)
    reference = torch.optim.AdamW(theirs, foreach=foreach, **numbers)
    optimizer.step(grad_scale=0.5)
    for p in theirs:
        p.grad.mul_(0.5)
    reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_master_copy_keeps_steps_that_bfloat16_rounds_away() -> None:
    weights = [torch.ones(4, dtype=torch.bfloat16)]
    optimizer = TorchAdamW(weights, foreach=True, master=True, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(1, 41):
        weights[0].grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
        if step == 1:
            assert (weights[0] == 1).all(), "one step of 1e-4 is less than half a gap of bfloat16"
    # 40 steps of 1e-4 are 0.004, which rounds to the next number below 1: 1 - 2**-8.
    assert (weights[0] == 1 - 2**-8).all()


def test_rates_and_errors_follow_from_the_rows_own_figures() -> None:
    row = {
        "phases": {
            "accumulate": {"allocated": 100, "reserved": 150, "card": 400, "host": 7},
            "step": {"allocated": 80, "reserved": 160, "card": None, "host": 9},
        },
        "seconds": {"total": [4.0, 2.0, 3.0]},
        "matmul_flop_per_s": 50.0, "predicted": {"accumulate": 104, "step": 90}, "tokens_run": 30,
        "tokens_that_count": 12, "model_flops": 75,
    }  # fmt: skip
    assert derived(row) == {
        "peak_allocated": 100, "peak_reserved": 160, "peak_host": 9, "peak_card": 400,
        "predicted_bytes": 104, "predicted_error": pytest.approx(0.04), "median_seconds": 3.0,
        "tokens_per_second": 10.0, "counting_tokens_per_second": 4.0, "utilisation": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["published", "resident", "ragged-padded", "ablation-none", "host", "clip", "scoring"])
def test_a_row_runs_on_a_tiny_model_and_its_record_is_strict_json(name: str) -> None:
    row = run_row(small(name), "cpu")
    assert json.loads(json.dumps(row, allow_nan=False)) == json.loads(json.dumps(row))
    assert row["error"] is None
    assert row["parameters"] == 104_000
    assert len(row["seconds"]["total"]) == 2
    assert len(row["loss"]) == 3
    assert row["tokens_run"] == 8 * 21 or name.startswith("ragged")
    assert row["link_gb_per_s"] is None
    assert 0 < row["utilisation"] < 1
    assert all(norm > 0 for norm in row["grad_norm"]) if name != "scoring" else row["grad_norm"] == [None] * 3


def test_a_plan_predicts_each_half_where_it_knows_what_is_run() -> None:
    def predicted(name: str, **changes: Any) -> dict[str, int] | None:
        return run_row(dataclasses.replace(small(name), warmups=0, updates=1, **changes), "cpu")["predicted"]

    host, resident = predicted("host"), predicted("resident")
    assert host is not None
    assert resident is not None
    assert min(*host.values(), *resident.values()) > 0
    assert predicted("published") is None, "torch's own AdamW is not in the plan"
    scoring = predicted("scoring")
    assert scoring is not None
    assert scoring["accumulate"] < host["accumulate"], "scoring needs no gradient"


def test_a_budget_row_asks_the_plan_for_that_budget_and_a_host_row_for_none() -> None:
    for name, budget in (("budget-6", 6.0), ("host", None)):
        plan = plan_of(BY_NAME[name], config_of(BY_NAME[name]), CPU, torch.bfloat16)
        assert plan.budget == (None if budget is None else budget * 2**30)
        assert plan.engine == "layer_major"
        assert bool(plan.resident) == (budget is not None), "what has room on the card stays there"


def test_the_same_inputs_give_every_engine_the_same_first_loss_and_norm() -> None:
    rows = [run_row(dataclasses.replace(small(n), warmups=0, updates=1), "cpu") for n in ("published", "host")]
    assert rows[0]["loss"][0] == pytest.approx(rows[1]["loss"][0], abs=1e-6)
    assert rows[0]["grad_norm"][0] == pytest.approx(rows[1]["grad_norm"][0], rel=1e-5)


# --- all rows


def run(tmp_path: Path, *names: str, **options) -> tuple[list[dict], str]:
    out = io.StringIO()
    change = options.pop("change", lambda v: shrunk(v, "tiny", 8, 21))
    rows = bench_update(
        names, tmp_path / "out", device="cpu", warmups=0, updates=1, console=Console(file=out, width=200),
        change=change, **options,
    )  # fmt: skip
    return rows, out.getvalue()


def test_every_row_has_a_process_a_record_and_a_line_in_the_table_also_where_it_fails(tmp_path: Path) -> None:
    def change(variant: Variant) -> Variant:
        if variant.name == "scoring":  # a fault inside the row
            return dataclasses.replace(shrunk(variant, "tiny", 8, 21), response=50)
        return shrunk(variant, "tiny", 8, 21)

    rows, text = run(tmp_path, "published", "scoring", change=change)
    assert [row["error"] is None for row in rows] == [True, False]
    assert "A response of 50 tokens does not fit into 21 columns" in rows[1]["error"]
    assert "1/2 published" in text
    assert "resident as published" in text
    assert rows == read_jsonl(tmp_path / "out" / "rows.jsonl")
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| resident as published |" in page
    assert "layer-major, scoring alone: A response of 50" in page
    assert "Traceback" in (tmp_path / "out" / "logs" / "scoring.txt").read_text()


def test_a_row_that_takes_too_long_is_given_up_and_the_next_one_runs(tmp_path: Path) -> None:
    def change(variant: Variant) -> Variant:
        variant = shrunk(variant, "tiny", 8, 21)
        return dataclasses.replace(variant, minutes=1e-5) if variant.name == "host" else variant

    rows, _ = run(tmp_path, "host", "published", change=change)
    assert rows[0]["error"] == "given up after 1e-05 minutes"
    assert rows[1]["error"] is None


def test_a_process_that_dies_is_a_row_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = "import os, sys; sys.stdin.readline(); print('something broke', file=sys.stderr, flush=True); os._exit(7)"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", dying))
    rows, _ = run(tmp_path, "host")
    assert rows[0]["error"] == "the process ended without a result (exit code 7): something broke"
    killed = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", killed))
    rows, _ = run(tmp_path, "host", "published")  # the second is dead before the first is measured
    assert all("killed, as when the host's memory runs out" in row["error"] for row in rows)


def test_a_process_that_hangs_at_its_imports_holds_up_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = """
import json, os, sys, time
if os.readlink("/proc/self/fd/2").endswith("published.txt"): time.sleep(100)  # its log says who it is
print("imported", flush=True)
request = json.loads(sys.stdin.readline())
sys.stdin.readline()
open(request["result"], "w").write(json.dumps({"variant": request["variant"], "error": "measured"}))
"""
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", hanging))

    def change(variant: Variant) -> Variant:
        return dataclasses.replace(variant, minutes=0.05)

    rows, _ = run(tmp_path, "host", "published", change=change)
    assert [row["error"] for row in rows] == ["measured", "given up after 0.05 minutes"]


def test_a_row_that_nobody_waits_for_any_more_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    monkeypatch.setattr(module.sys, "stdin", io.StringIO("measure\n"))
    module._wait_for_a_word()
    assert ended == []
    module._wait_for_a_word()
    assert ended == [0]


SLOW_IMPORT = """
import json, sys, time
def note(word): open(sys.argv[1], "a").write(word + "\\n")
time.sleep(0.3)
note("imported")
print("imported", flush=True)
request = json.loads(sys.stdin.readline())
note("built")
sys.stdin.readline()
note("measured")
open(request["result"], "w").write(json.dumps({"variant": request["variant"], "error": "nothing is measured here"}))
"""


def test_a_row_is_measured_when_the_next_ones_imports_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import takes a core, and a processor that shares its cores holds up a card."""
    notes = tmp_path / "notes"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", SLOW_IMPORT, str(notes)))
    rows, _ = run(tmp_path, "host", "published", "resident")
    assert [row["error"] for row in rows] == ["nothing is measured here"] * 3
    said = notes.read_text().split()
    imported, measured = ([i for i, word in enumerate(said) if word == what] for what in ("imported", "measured"))
    assert imported[1] < measured[0] < imported[2] < measured[1] < measured[2]


def fake_row(name: str, seconds: float, allocated: int, card: int | None = None, predicted: int | None = None) -> dict:
    phase = {"allocated": allocated, "reserved": allocated, "card": card, "host": 1}
    row = {
        "variant": dataclasses.asdict(BY_NAME[name]), "error": None, "cap_bytes": None,
        "predicted": None if predicted is None else {"accumulate": predicted, "step": 0},
        "seconds": {"accumulate": [seconds / 2], "step": [seconds / 2], "total": [seconds]},
        "phases": {"accumulate": phase}, "tokens_run": 1000, "tokens_that_count": 500, "model_flops": 10**12,
        "matmul_flop_per_s": 5e12, "link_gb_per_s": {"to_card": 54.0, "to_host": 50.0},
        "environment": {"a5lib": "1", "python": "3", "torch": "2", "transformers": "5", "cards": [{"name": "Card X"}],
                        "packages": {"trl": "9"} if name.startswith("peer") else {}},
    }  # fmt: skip
    return row | derived(row)


def test_new_records_are_added_and_the_newest_of_a_name_counts(tmp_path: Path) -> None:
    rows = [fake_row("scoring", 1.0, 2**30), fake_row("host", 3.0, 2**30), fake_row("host", 2.0, 2**30)]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(r["variant"]["name"], r["median_seconds"]) for r in latest_rows(tmp_path / "out")] == [
        ("host", 2.0), ("scoring", 1.0)
    ]  # fmt: skip
    ran, text = run(tmp_path, "none")
    assert ran == []
    assert "layer-major, scoring alone" in text
    assert len(read_jsonl(tmp_path / "out" / "rows.jsonl")) == 3
    assert "layer-major, scoring alone" in (tmp_path / "out" / "table.md").read_text()


def test_the_table_has_figures_units_and_the_ledgers_error() -> None:
    page = markdown([fake_row("host", 2.0, 2 * 2**30, 3 * 2**30, int(2.1 * 2**30))])
    line = next(line for line in page.splitlines() if line.startswith("| layer-major"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["layer-major, bf16 state, everything on the host", "2.00", "2.10 (+5.0 %)", "2.00", "3.00",
                     "2.000 (2.000-2.000, 1)", "1.000 + 1.000", "500", "250", "10.0 %"]  # fmt: skip
    assert "Card X; a5lib 1, python 3, torch 2, transformers 5" in page
    assert "host to card 54.0 GB/s, card to host 50.0 GB/s, matrix product 5.0 TFLOP/s" in page


def test_the_ratios_begin_with_the_fastest_whoever_that_is() -> None:
    rows = [fake_row("host", 2.0, 2 * 2**30, 4 * 2**30), fake_row("peer-trl", 1.0, 8 * 2**30, 12 * 2**30),
            fake_row("clip", 0.1, 1)]  # fmt: skip
    page = markdown(rows)
    ratios = page[page.index("## Ratios") :].splitlines()[4:6]
    assert ratios == ["| TRL: fused LM head, fused AdamW | 1.00 | 4.00 | 3.00 |",
                      "| layer-major, bf16 state, everything on the host | 2.00 | 1.00 | 1.00 |"]  # fmt: skip
    assert "## Ratios" not in markdown(rows[:1]), "without a peer there is nothing to compare"


def test_bad_numbers_and_folders_are_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(UserError, match="--updates is 0; it must be at least 1"):
        bench_update(["host"], tmp_path / "out", updates=0)
    with pytest.raises(UserError, match="--warmups is -1"):
        bench_update(["host"], tmp_path / "out", warmups=-1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="choose another --output"):
        bench_update(["host"], tmp_path / "file" / "out")


def test_groups_are_words_for_the_command_line() -> None:
    assert all(" " not in word for word in (*GROUPS, *BY_NAME))
