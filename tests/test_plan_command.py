"""`a5 plan` as a person meets it, and the tables of cards and published models behind it."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from a5lib import machine, plan_command
from a5lib.cards import CARDS, COMMON_SIZES, LINKS, find_card
from a5lib.cli import main
from a5lib.config import TrainConfig
from a5lib.engines.choice import plan_run
from a5lib.engines.plan import CONTEXT, GIB, PHASES, UpdateSize, plan_update
from a5lib.errors import UserError
from a5lib.memory import ModelShape
from a5lib.models import load_policy
from a5lib.plan_command import card_rows, find_shape, find_target, make_request, print_cards, print_plan
from a5lib.preflight import Link
from a5lib.shapes import SHAPES, published_shape
from a5lib.synthetic import published_config
from tests.helpers import tiny_olmo2

ROOT = Path(__file__).parent.parent
REAL_OWN_CARD = plan_command.own_card


@pytest.fixture(autouse=True)
def no_card_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "own_card", lambda: None)
    monkeypatch.setattr(machine, "host_memory", lambda: (64 * GIB, 64 * GIB))


def a5(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `a5 plan`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    return int(str(stop.value.code)), out.getvalue(), err.getvalue()


def printed(draw: Any, *arguments: Any) -> str:
    """What a function prints to a wide console, in one line."""
    console = Console(width=200, record=True, file=io.StringIO())
    draw(*arguments, console)
    return " ".join(console.export_text().split())


# --- the command


def test_the_plan_of_the_1b_model_on_8_gib():
    text = printed(print_plan, make_request(), "8")
    request = make_request()
    made = request.plan(budget=8 * GIB)
    assert "OLMo-2-0425-1B, 1,484,916,736 parameters, on a card of 8 GiB" in text
    assert "256 sequences of at most 671 tokens" in text, "a prompt of 160 and 512 tokens; the last is a label only"
    for name in {name for buffers in made.card.values() for name, size in buffers.items() if size > GIB // 50}:
        assert name in text
    sums = [f"{(CONTEXT + made.peak(phase)) / GIB:.2f}" for phase in PHASES]
    assert re.search(r"all together │ " + " │ ".join(map(re.escape, sums)), text), text
    assert f"{made.budget_needed() / GIB:.2f} of 8.00 GiB" in text
    assert "Choice: the layer-major engine" in text and f"{made.microbatch_tokens:,} tokens" in text
    assert f"optimizer state {made.host['optimizer state'] / GIB:.2f}" in text and "64.0 GiB free: it fits" in text
    inward = sum(size for name, size in made.traffic.items() if name.endswith("in"))
    assert f"{inward / 1e9:.1f} GB travel to the card" in text
    assert "assumed" in text and "measured" not in text
    for speed in set(LINKS.values()):
        assert f"{speed / 1e9:.1f} │ {made.transfer_seconds(speed, speed):.2f}" in text


def test_a_host_that_is_too_small_is_said_with_what_would_fit(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: (20 * GIB, 24 * GIB))
    text = printed(print_plan, make_request(), "8")
    assert "20.0 GiB free, too little; use --optimizer-state bf16_kahan, which needs" in text
    monkeypatch.setattr(machine, "host_memory", lambda: (2 * GIB, 4 * GIB))
    assert "too little; no smaller setting fits either" in printed(print_plan, make_request(), "8")


def test_what_fits_nowhere_is_one_sentence_with_the_nearest_setting():
    code, out, err = a5("--vram", "6")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert all(word in err for word in ("'generate'", "6.0 GiB", "use --generation-batch-size 16, which needs")), err
    assert a5("--vram", "6", "--generation-batch-size", "16")[0] == 0
    larger = re.search(r"use --vram ([\d.]+),", a5("--vram", "2")[2])[1]
    assert a5("--vram", larger)[0] == 0, "the budget that it names is too small"


def test_a_resident_engine_sends_nothing_and_prints_no_table_of_links():
    text = printed(print_plan, make_request(model="toy", sequences=8), "24")
    assert "Choice: the resident engine" in text and "On the card stays: everything" in text
    assert "PCIe" not in text and "travel" not in text


def test_an_old_card_computes_without_a_compiler():
    assert "bfloat16 by emulation only" in printed(print_plan, make_request(model="qwen3-0.6b"), "T4")
    assert "emulation" not in printed(print_plan, make_request(model="qwen3-0.6b"), "3060 12GB")


def test_the_cards_own_link_is_marked():
    text = printed(print_plan, make_request(), "4060")
    assert "5.0 x4 or 4.0 x8 or 3.0 x16 (RTX 4060, 8 GB) │ 12.5" in text


def test_with_a_card_here_its_link_is_measured_and_its_free_memory_is_the_budget(monkeypatch):
    monkeypatch.setattr(plan_command, "own_card", lambda: ("NVIDIA RTX 4070", 10 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan_command, "measure_link", lambda device: Link(20e9, 10e9, 7e9))
    text = printed(print_plan, make_request(), None)
    made = make_request().plan(budget=10 * GIB)
    assert "on this machine's NVIDIA RTX 4070" in text and "of 10.00 GiB" in text
    assert f"{made.transfer_seconds(20e9, 10e9):.2f} s at the 20.0 and 10.0 GB/s measured here" in text
    assert "pageable memory: 7.0 GB/s" in text and "assumed" not in text


@pytest.mark.parametrize(
    ("visible", "card"),
    [
        (None, "card 0"),
        ("1,0", "card 1"),
        ("GPU-two-b", "card 1"),
        ("GPU-two", "card 1"),
        ("", None),
        ("-1", None),
        ("7", None),
        ("GPU-three", None),
    ],
)
def test_the_card_planned_for_is_the_first_that_a_run_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, card: str | None
) -> None:
    driver = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda i: f"card {i}", nvmlDeviceGetUUID=lambda i: ("GPU-one-a", "GPU-two-b")[i],
        nvmlDeviceGetMemoryInfo=lambda i: types.SimpleNamespace(free=5 * GIB),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert REAL_OWN_CARD() == (None if card is None else (card, 5 * GIB))


def test_a_row_for_each_common_card():
    request = make_request()
    rows = card_rows(request)
    assert [row.gigabytes for row in rows] == list(COMMON_SIZES)
    assert [row.decoded for row in rows] == sorted(row.decoded for row in rows), "more decode side by side on more"
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    for row in rows:
        assert row.plan.budget_needed() <= 0.975 * row.gigabytes * GIB
        more = UpdateSize(256, 671, 512, decoded=2 * row.decoded, group=8)
        if row.decoded < 32:
            with pytest.raises(UserError):
                plan_update(request.shape, more, budget=int(0.975 * row.gigabytes * GIB), **request.options)
    text = printed(print_cards, request)
    for row in rows:
        assert re.search(rf"{row.gigabytes} GB │ layer-major │ \d+ of 16 │ {row.decoded} │", text)


def test_a_card_that_is_too_small_has_a_row_that_says_what_is_needed():
    row = card_rows(make_request(model="llama3.1-8b"), [8])[0]
    assert row.plan is None and re.fullmatch(r"needs \d+\.\d GiB", row.short)
    assert row.short in printed(print_cards, make_request(model="llama3.1-8b"))
    trained = card_rows(make_request(model="llama3.1-8b", generation_batch_size=0), [8])[0]
    assert trained.plan is not None, "without generation the 8B model trains on 8 GB"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model tooy --vram 8", ["'tooy'", "did you mean 'toy'", "qwen3-8b"]),
        ("--model none/at/all --vram 8", ["no model folder 'none/at/all'"]),
        ("--vram 0", ["--vram is 0"]),
        ("--vram rtx9999", ["'rtx9999' is unknown", "did you mean 'RTX", "--vram 8"]),
        ("--vram 4061", ["'4061'", "'RTX 4060'"]),
        ("--vram 3060", ["RTX 3060 comes with 8 or 12 GB", "'RTX 3060 12GB'"]),
        ("--vram 4060-24GB", ["no RTX 4060 with 24 GB", "comes with 8 GB"]),
        ("", ["no NVIDIA card here", "--vram 8"]),
        ("--vram 8 --cards", ["leave --vram out"]),
        ("--vram 8 --sequences 0", ["--sequences is 0"]),
        ("--vram 8 --max-tokens -1", ["--max-tokens is -1"]),
        ("--vram 8 --generation-batch-size -1", ["--generation-batch-size is -1; it must be at least 0"]),
        ("--vram 8 --algorithm maxr1", ["did you mean 'maxrl'"]),
        ("--vram 8 --engine other", ["--engine is 'other'", "'resident'"]),
        ("--vram", ["--vram needs a value"]),
    ],
)
def test_bad_input_is_one_sentence(words, expected):
    code, out, err = a5(*words.split())
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    assert all(word in err for word in expected), err


@pytest.mark.parametrize("words", [["--vram", "8"], ["--cards", "--model", "llama3.1-8b"], ["--vram", "2"]])
def test_it_is_fast_because_it_imports_neither_torch_nor_transformers(words):
    code = (
        "import sys\nfrom a5lib.cli import main\n"
        f"try: main(['plan', *{words!r}])\nexcept SystemExit: pass\n"
        "print(*sorted({'torch', 'transformers', 'vllm', 'matplotlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.splitlines()[-1] == ""


# --- what is planned


def test_a_folder_is_planned_from_its_config(tmp_path):
    model = tiny_olmo2()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    name, shape = find_shape(str(tmp_path / "model"))
    assert name == str(tmp_path / "model") and shape == ModelShape.of(model.config)


@pytest.mark.parametrize("algorithm", ["grpo", "offpolicy_clip", "offpolicy_naive", "cispo"])
def test_the_batch_is_that_of_a_training_run(algorithm):
    """Against the plan of `a5 train`, whose sizes come from the resolved config."""
    from a5lib.config import resolve

    config = resolve(TrainConfig(model="x", algorithm=algorithm))
    model_config = published_config("olmo2-1b")
    run = plan_run(config, model_config, 160, torch.device("cpu"), torch.bfloat16)
    request = make_request(algorithm=algorithm)
    ours = request.plan(engine="resident", on_card=False)
    assert request.size.scored == (256 if config.preset.importance_reweighting_method != "none" else 0)
    assert (ours.longest, ours.microbatch_tokens, ours.microbatches) == (
        run.longest,
        run.microbatch_tokens,
        run.microbatches,
    )
    assert ours.card["update"] == run.card["update"]
    assert request.size.decoded == config.generation_batch_size and request.size.group == config.group_size


def test_sizes_that_are_given_are_taken():
    size = make_request(
        algorithm="offpolicy_clip", sequences=512, prompt_tokens=100, max_tokens=50, generation_batch_size=7
    ).size
    assert size == UpdateSize(512, 149, 50, scored=512, decoded=7, group=8)
    assert make_request(sequences=4).size == UpdateSize(4, 671, 512, decoded=4, group=4)


def test_vllm_is_planned_as_in_a_training_run(monkeypatch):
    """Its rows are those of a rollout batch, which is scored, so that the mismatch can be measured."""
    from a5lib.config import resolve

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (16 * GIB, 16 * GIB))
    monkeypatch.setattr(machine, "host_memory", lambda: (64 * GIB, 64 * GIB))
    monkeypatch.setattr("a5lib.engines.choice.compiles", lambda device, dtype: True)
    config = resolve(TrainConfig(model="x", generation_backend="vllm-colocated", vram_budget=15))
    run = plan_run(config, published_config("olmo2-1b"), 160, torch.device("cuda", 0), torch.bfloat16)
    request = make_request(generation_backend="vllm-colocated")
    assert request.size == UpdateSize(256, 671, 512, scored=256, served=256, group=8)
    assert request.plan(budget=15 * GIB) == run
    text = printed(print_plan, request, "15")
    assert "256 responses decoded side by side by vLLM" in text and "vLLM's keys and values" in text
    assert make_request(generation_backend="vllm-colocated", sequences=16).size.served == 16
    sent = make_request(generation_backend="vllm-server").size
    assert sent == UpdateSize(256, 671, 512, scored=256, group=8, sent=True)


def test_a_small_card_lets_vllm_decode_fewer_rows():
    rows = card_rows(make_request(generation_backend="vllm-colocated"), (6, 16))
    assert rows[0].decoded < 256 == rows[1].decoded


# --- cards


@pytest.mark.parametrize(
    ("text", "name", "gigabytes", "gib"),
    [
        ("RTX 5070 Ti", "RTX 5070 Ti", 16, 15.6),
        ("4060", "RTX 4060", 8, 7.8),
        ("3060 12GB", "RTX 3060", 12, 11.7),
        ("rtx 4060 ti 16 gb", "RTX 4060 Ti", 16, 15.6),
        ("T4", "T4", 16, 14.6),
        ("a100 80GB", "A100", 80, 79.1),
        ("NVIDIA A100-SXM4-40GB", "A100", 40, 39.4),
        ("NVIDIA H100 80GB HBM3", "H100", 80, 79.1),
        ("H200", "H200", 141, 139.8),
        ("A10G", "A10G", 24, 22.0),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop", 8, 7.8),
        ("nvidia geforce gtx 1080 ti", "GTX 1080 Ti", 11, 10.725),
    ],
)
def test_cards_by_the_names_people_write(text, name, gigabytes, gib):
    card = find_card(text)
    assert (card.name, card.gigabytes) == (name, gigabytes)
    assert card.memory == int(gib * GIB)
    assert find_target(text).budget == card.memory


def test_every_card_is_found_by_its_own_name():
    for card in CARDS:
        assert find_card(f"{card.name} {card.gigabytes}GB") == card
        assert card.link in LINKS
        assert 0.9 * card.gigabytes <= card.memory / GIB <= card.gigabytes


@pytest.mark.parametrize(("text", "gib"), [("8", 8), ("7.5", 7.5), ("12GB", 12), (" 24 GiB ", 24), ("141", 141)])
def test_a_number_is_so_many_gib(text, gib):
    assert find_target(text).budget == int(gib * GIB)


# --- published models

PUBLISHED_COUNTS = {
    "toy": 1_067_136,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "llama3.2-1b": 1_235_814_400,
    "olmo2-1b": 1_484_916_736,
    "qwen3-1.7b": 1_720_574_976,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-4b": 4_022_468_096,
    "olmo2-7b": 7_298_617_344,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_that_were_published(name):
    assert SHAPES[name][1].parameters() == PUBLISHED_COUNTS[name]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, published_config(name)) for name in ("olmo2-1b", "olmo2-7b", "llama3.1-8b")),
        ("llama3.2-1b", LlamaConfig(vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                    num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)),
        ("smollm2-135m", LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                                     num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)),
        ("qwen2.5-1.5b", Qwen2Config(vocab_size=151_936, hidden_size=1536, intermediate_size=8960,
                                     num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                                     tie_word_embeddings=True)),
        ("qwen3-8b", Qwen3Config(vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
                                 num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                                 tie_word_embeddings=False)),
    ],
)  # fmt: skip
def test_a_built_in_shape_is_that_of_the_config(name, config):
    assert ModelShape.of(config) == ModelShape(**vars(SHAPES[name][1]) | {"vectors": ModelShape.of(config).vectors})
    assert ModelShape.of(config).layer_parameters() == SHAPES[name][1].layer_parameters()


def test_the_toy_shape_is_that_of_the_embedded_model():
    assert SHAPES["toy"][1].parameters() == sum(p.numel() for p in load_policy("toy")[0].parameters())


def test_models_by_name_id_and_last_part():
    for name, (model_id, shape) in SHAPES.items():
        for written in (name, name.upper(), model_id, model_id.split("/")[-1].lower()):
            assert published_shape(written) == (model_id, shape)
    assert published_shape("someone/OLMo-2-0425-1B") is None, "another's model may have another shape"
