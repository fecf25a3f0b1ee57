"""The README in both languages: commands parse, paths exist, defaults, metrics and arithmetic are those of the code.

Code blocks are the same in both; in a `text` block the annotations are translated and the paths are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import shlex
from pathlib import Path
from statistics import median

import pytest

from a5lib import cli
from a5lib.bench_update import latest_rows
from a5lib.bench_variants import VARIANTS
from a5lib.cards import LINKS, SHARE, USUAL_LINK
from a5lib.cli import COMMANDS, FLAGS, TrainFlags, parse
from a5lib.config import ALGORITHMS, ASSIGNMENT_DEFAULTS, MAY_CHANGE_ON_RESUME, TOY_DEFAULTS, TrainConfig, flag
from a5lib.cycle_views import PHASES, PUBLISHED_RATIO, PUBLISHED_SECONDS, checks, growth, newest
from a5lib.engines.parts import FAMILIES
from a5lib.engines.plan import GIB, gib
from a5lib.errors import UserError
from a5lib.memory import OLMO2_1B, STATE_BYTES
from a5lib.plan_command import card_rows, make_request
from a5lib.preflight import host_needed
from a5lib.records import METRICS
from a5lib.runlog import EVALUATIONS_FILE, MEMORY_FILE, METRICS_FILE, PLAN_FILE, read_jsonl

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "README.zh.md")
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}

# What a run or a user makes, so that it is named here and is not in the repository.
GENERATED = re.compile(
    r"\.venv(/.*)?|data(/.*)?|runs/(first|diagnose-backend|ALGORITHM-seedN-TIME)(/.*)?|metrics\.jsonl|status\.json|tuning\.jsonl|first\.png|curves\.png"
)
PATH = re.compile(r"[\w.\-]+(/[\w.\-]+)*/?")
ENDINGS = (".py", ".md", ".txt", ".toml", ".yml", ".json", ".jsonl", ".png", "/")
both = pytest.mark.parametrize("page", PAGES)


def blocks(page):
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", TEXT[page], re.MULTILINE | re.DOTALL)


def prose(page):
    return re.sub(r"^```.*?^```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)


def inline_code(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


def table_rows(text):
    """The cells of each table row below a heading row; an escaped bar belongs to its cell."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def section(page, number):
    """The text below the heading of that number, from 0, down to the next heading."""
    return re.split(r"^#+ .*$", prose(page), flags=re.MULTILINE)[number + 1]


def heading_number(words):
    titles = re.findall(r"^#+ (.*)$", prose("README.md"), re.MULTILINE)
    return titles.index(words)


def metrics_rows(page):
    return table_rows(re.search(r"<!-- metrics -->\n(.*?)<!-- /metrics -->", TEXT[page], re.DOTALL)[1])[1:]


def a5_commands(page):
    """The arguments of each `a5` line in the bash blocks, lines that end in a backslash joined."""
    lines = [
        line
        for language, content in blocks(page)
        if language == "bash"
        for line in content.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line)[1:] for line in lines if re.match(r"(\S*/)?a5 ", line)]


def parse_without_running(arguments):
    words = next((n for n in (2, 1) if " ".join(arguments[:n]) in COMMANDS), 0)
    assert words, f"`a5 {' '.join(arguments)}` is no command; there are {list(COMMANDS)}"
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name in FLAGS:
        return parse(name, FLAGS[name], rest, FLAGS[name]())

    @functools.wraps(COMMANDS[name])
    def only_parsed(*args, **kwargs):
        return 0

    return parse(name, only_parsed, rest)


def arguments_of(console_line):
    return shlex.split(console_line.removeprefix("$ a5 "))


CONSOLE = [(command, answer) for language, content in blocks("README.md") if language == "console"
           for command, answer in re.findall(r"^(\$ a5 .*)\n(.*)$", content, re.MULTILINE)]  # fmt: skip


@both
def test_every_a5_line_parses(page):
    commands = a5_commands(page)
    assert len(commands) > 10, "the blocks were not found"
    for arguments in commands:
        try:
            parse_without_running(arguments)
        except UserError as error:
            pytest.fail(f"a5 {' '.join(arguments)}: {error}")


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--sead", "1"], ["toy problems", "x", "--split", "test"]])
def test_a_wrong_line_would_be_noticed(arguments):
    with pytest.raises((UserError, AssertionError)):
        parse_without_running(" ".join(arguments).split())


@pytest.mark.parametrize(("command", "answer"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_the_bad_inputs_get_the_printed_sentences(command, answer):
    with pytest.raises(UserError) as error:
        cli.run(arguments_of(command))
    assert str(error.value) == answer


@both
def test_every_inline_command_and_flag_exists(page):
    fields = {f.name for target in FLAGS.values() for f in dataclasses.fields(target)}
    fields |= {name for command in COMMANDS.values() for name in inspect.signature(command).parameters}
    known = {flag(name) for name in fields} | {flag(f"no_{name}") for name in fields} | {"--help"}
    for code in inline_code(page):
        words = code.split()
        if words[0] == "a5" and words[1:2] not in ([], ["..."]):
            assert " ".join(words[1:2]) in COMMANDS or " ".join(words[1:3]) in COMMANDS, f"`{code}` is no command"
        for word in words:
            assert not word.startswith("--") or word.rstrip(",.:;)") in known, f"{page} names {word}, which is no flag"


@both
def test_every_setting_is_named_in_its_group(page):
    named = set(re.findall(r"`(--[a-z0-9-]+)`", section(page, heading_number("Flags"))))
    missing = [flag(f.name) for f in dataclasses.fields(TrainFlags) if flag(f.name) not in named]
    assert not missing, f"{page}: the flags {missing} are in no group"


@both
def test_defaults_are_those_of_the_code(page):
    rows = [row for row in table_rows(section(page, heading_number("Flags"))) if len(row) == 3][1:]
    shown = {name.strip("`").removeprefix("--").replace("-", "_"): (toy, other) for name, toy, other in rows}
    assert set(shown) == set(TOY_DEFAULTS) == set(ASSIGNMENT_DEFAULTS)
    for name, (toy, other) in shown.items():
        assert (float(toy), float(other)) == (TOY_DEFAULTS[name], ASSIGNMENT_DEFAULTS[name]), flag(name)
    assert TrainConfig().group_size == 8
    assert f"{TOY_DEFAULTS['num_steps']} " in section(page, heading_number("What to expect"))


@both
def test_presets_are_those_of_the_code(page):
    rows = table_rows(section(page, heading_number("Presets")))[1:]
    assert [re.match(r"`(\w+)`", row[0])[1] for row in rows] == list(ALGORITHMS)
    for (name, algorithm), (_, advantage, objective, aggregation) in zip(ALGORITHMS.items(), rows, strict=True):
        assert (aggregation == "sum / Z") == (algorithm.loss_normalization == "constant"), name
        if algorithm.cliprange is not None:
            assert float(re.search(r"eps ([\de.-]+)", objective)[1]) == algorithm.cliprange, name
        if "grpo`" not in advantage:
            assert ("- mu" in advantage) == (algorithm.baseline == "mean"), name
            assert ("/ (sigma" in advantage) == (algorithm.advantage_normalizer == "std"), name
            assert ("/ (mu" in advantage) == (algorithm.advantage_normalizer == "mean"), name


@both
def test_what_may_change_on_resume(page):
    named = set(re.findall(r"`(--[a-z-]+)`", section(page, heading_number("Resume and Ctrl-C")))) - {"--resume"}
    # the folder of a resumed run is the one that --resume names
    assert named == {flag(name) for name in MAY_CHANGE_ON_RESUME - {"output_dir"}}


HARDWARE = "What runs on which hardware, and why"
ROWS = {row["variant"]["name"]: row for row in latest_rows(ROOT / "runs" / "bench-update-h200")}
SIZES = (6, 8, 10, 12, 16, 24, 32)  # GB, the rows of the hardware table


def wide_rows(text, width):
    """The rows of the tables of so many columns, without their headings."""
    rows = [row for row in table_rows(text) if len(row) == width]
    assert rows, f"there is no table of {width} columns"
    return rows[1:]


@functools.cache
def planned(optimizer_state="fp32", sizes=SIZES, **options):
    request = make_request(optimizer_state=optimizer_state)
    return card_rows(dataclasses.replace(request, options=request.options | options), sizes)


@both
def test_the_hardware_table_is_the_plan(page):
    """Also: nothing but the row without a card is measured."""
    none, *rows = wide_rows(section(page, heading_number(HARDWARE)), 9)
    assert len(rows) == len(SIZES)
    for (machine, engine, layers, inputs, decoded, card, host, copies, source), row in zip(
        rows, planned(), strict=True
    ):
        plan = row.plan
        assert re.match(r"\d+ GB", machine)[0] == f"{row.gigabytes} GB"
        assert engine == plan.engine.replace("_", "-")
        whole = "head" in plan.resident
        assert layers == (none[2] if whole else str(sum(name.startswith("layer") for name in plan.resident))), machine
        assert inputs == str(plan.card_levels), machine
        assert decoded == str(row.decoded), machine
        assert card == f"{plan.budget_needed() / GIB:.1f}", machine
        assert host == f"{host_needed(plan) / GIB:.1f}", machine
        assert copies == f"{row.seconds:.2f}", machine
        assert source in ("predicted", "预测"), machine
    bench = (ROOT / "runs" / "toy-bench.txt").read_text(encoding="utf-8")
    assert none[6] == f"{float(re.search(r'resident.*?([0-9.]+) MiB', bench)[1]) / 2**10:.1f}"


@both
def test_the_text_around_the_hardware_table_is_the_plan(page):
    text = section(page, heading_number(HARDWARE))
    request = make_request()
    for figure in (request.size.sequences, request.size.longest, request.shape.layers, request.size.decoded):
        assert re.search(rf"\b{figure}\b", text), figure
    assert f"{100 * SHARE:.1f} %" in text
    assert f"{LINKS[USUAL_LINK] / 1e9:.0f}" in text and "PCIe {}.0 x{}".format(*USUAL_LINK) in text
    assert planned()[0].decoded == 8 and "`--generation-batch-size 8`" in text
    for state in ("fp32", "bf16_kahan", "bf16_stochastic"):
        (row,) = planned(state, (8,))
        assert f"{host_needed(row.plan) / GIB:.1f} GiB" in text, state
    low = {"microbatch": 1, "recompute_layers": True, "head": "blocks", "engine": "resident"}  # --low-memory
    for state, size in (("fp32", 32), ("bf16_stochastic", 16)):
        (row,) = planned(state, (size,), **low)
        assert f"{row.plan.budget_needed() / GIB:.1f} GiB" in text, state
    per_token = request.shape.kv_bytes_per_token(2)
    assert f"{per_token // 2**10} KiB" in text
    assert f"{750 * per_token / 2**20:.0f} MiB" in text
    for responses in (256, 32):
        assert f"{responses * 750 * per_token / 2**30:.1f} GiB" in text


@both
def test_the_measured_rows_are_those_of_the_log(page):
    """In the order of their seconds, ours in bold, and with the ratios that follow."""
    text = section(page, heading_number("Measured: one update"))
    same = [row for row in ROWS.values() if row["variant"]["group"] in ("engines", "peers")]
    same.sort(key=lambda row: row["median_seconds"])
    assert all(row["error"] is None for row in same)
    fastest, smallest = same[0]["median_seconds"], min(row["peak_allocated"] for row in same)
    shown = wide_rows(text, 6)
    assert len(shown) == len(same)
    for (words, *figures), row in zip(shown, same, strict=True):
        name, seconds, peak = row["variant"]["name"], row["median_seconds"], row["peak_allocated"]
        assert words.startswith("**") == (row["variant"]["peer"] is None), name
        library = {"trl": "TRL", "liger": "Liger", "torchao": "torchao", "bnb": "bitsandbytes"}.get(
            name.removeprefix("peer-").partition("-")[0], ""
        )
        assert library in words and ("fp32" in words) == (name == "host-fp32"), name
        assert ("layer-major" in words) == name.startswith("host"), name
        expected = [seconds, seconds / fastest, peak / GIB, peak / smallest, row["peak_card"] / GIB]
        assert figures == [f"{value:.2f}" for value in expected], name
    counts = [len(row["seconds"]["total"]) for row in same]
    assert re.search(rf"{min(counts)} (to|到) {max(counts)} ", text)
    variants = {(r["variant"]["sequences"], r["variant"]["tokens"], r["variant"]["group_size"]) for r in same}
    assert variants == {(64, 672, 8)}
    assert {row["tokens_run"] for row in same} == {43008} and "43,008" in text
    assert {row["variant"]["microbatch"] for row in same if row["variant"]["peer"]} == {8, None}
    assert ROWS["peer-torchao"]["variant"]["microbatch"] is None, "it takes all sequences at once"


@both
def test_the_large_and_the_ragged_row_are_those_of_the_log(page):
    text = section(page, heading_number("Measured: one update"))
    large, middle, ragged = ROWS["llama3.1-8b"], ROWS["olmo2-7b"], ROWS["ragged-host"]
    for (_, *figures), row in zip(wide_rows(text, 5), (large, middle, ragged), strict=True):
        assert figures == [
            f"{row['median_seconds']:.2f}", f"{row['peak_allocated'] / GIB:.2f}", f"{row['peak_host'] / GIB:.1f}",
            f"{row['tokens_per_second']:,.0f}",
        ]  # fmt: skip
        assert row["variant"]["settings"] == {"engine": "layer_major"} and row["cap_bytes"] is None
    variant = large["variant"]
    assert (variant["sequences"], variant["tokens"]) == (8, 20480) and "20,480" in text
    assert (variant["warmups"], len(large["seconds"]["total"])) == (1, 1)
    assert (middle["variant"]["sequences"], middle["variant"]["tokens"]) == (64, 672) and "OLMo-2-1124-7B" in text
    variant = ragged["variant"]
    assert (variant["sequences"], variant["group_size"], variant["response"]) == (160, 16, 512)
    assert variant["zero_share"] == 0.3, "3 of 10 groups"
    assert f"{ragged['tokens_that_count']:,}" in text and f"{ragged['counting_tokens_per_second']:,.0f}" in text


@both
def test_versions_card_and_link_are_those_of_the_log(page):
    text = section(page, heading_number("Measured: one update"))
    assert {card["name"] for row in ROWS.values() for card in row["environment"]["cards"]} == {"NVIDIA H200"}
    assert "NVIDIA H200" in text
    environment = ROWS["peer-trl"]["environment"]
    packages = environment["packages"]
    versions = {"torch": environment["torch"], "transformers": environment["transformers"], "TRL": packages["trl"],
                "Liger": packages["liger-kernel"], "torchao": packages["torchao"],
                "bitsandbytes": packages["bitsandbytes"]}  # fmt: skip
    for name, version in versions.items():
        assert f"{name} {version}" in text
    log = (ROOT / "runs" / "bench-update-h200" / "table.md").read_text(encoding="utf-8")
    assert "host to card 54.8 GB/s, card to host 54.7 GB/s" in log and "55 GB/s" in text
    errors = [abs(row["predicted_error"]) for row in ROWS.values() if row["predicted_error"] is not None]
    assert len(errors) > 5 and max(errors) < 0.05 and "5 %" in text
    cores = {name: row["environment"]["cores"] for name, row in ROWS.items()}
    assert cores.pop("llama3.1-8b") == 16 and set(cores.values()) == {32}
    assert re.search(r"\b32 (processor cores|个处理器核心)", text) and re.search(r"\b16\s+(cores|个核心)", text)


@both
def test_the_rows_with_a_budget_are_those_of_the_log(page):
    text = section(page, heading_number("Measured: one update"))
    pairs = [("host", "batch-8")] + [(f"budget-{n}", f"batch-8-budget-{n}") for n in (4, 6, 8, 12)]
    for (budget, *figures), pair in zip(wide_rows(text, 7), pairs, strict=True):
        expected = []
        for row in (ROWS[name] for name in pair):
            expected += [row["median_seconds"], row["peak_allocated"] / GIB, row["peak_card"] / GIB]
            asked = row["variant"]["settings"].get("vram_budget")
            assert asked is None or (budget == f"{asked:.0f} GiB" and row["peak_card"] <= asked * GIB), budget
        assert figures == [f"{value:.2f}" for value in expected], budget
        assert [ROWS[name]["variant"]["sequences"] for name in pair] == [64, 8]
    for name in ("ragged-resident", "ragged-padded"):
        assert f"{ROWS[name]['counting_tokens_per_second']:,.0f}" in text, name


@both
def test_the_engine_that_is_not_chosen_is_the_faster_one(page):
    """The figures beside the rule of choice, and how they were measured."""
    layers, resident = ROWS["budget-12"], ROWS["resident"]
    (paragraph,) = (p for p in TEXT[page].split("\n\n") if p.startswith(("**Which engine.**", "**用哪个引擎。**")))
    assert layers["median_seconds"] < resident["median_seconds"]
    assert f"{resident['peak_card'] / GIB:.1f} GiB" in paragraph and layers["variant"]["settings"]["vram_budget"] == 12
    asked = resident["variant"]["settings"]
    assert (asked["recompute_layers"], asked["head"]) == (True, "fused")
    assert re.findall(r"\d\.\d\d", paragraph) == [f"{row['median_seconds']:.2f}" for row in (layers, resident)]


@both
def test_the_probes_have_passed(page):
    text = section(page, heading_number("Measured: one update"))
    logs = {int(path.stem.removeprefix("budget-")): path.read_text() for path in (ROOT / "runs/probe").glob("*.txt")}
    assert re.search(r"`a5 probe`.*? 4(, |、)6(, |、)8 (and|和) 16 GiB", text) and sorted(logs) == [4, 6, 8, 16]
    for budget, log in logs.items():
        assert log.startswith(f"$ a5 probe --vram-budget {budget}\n") and log.endswith("\nPASS\n") and "FAIL" not in log


def test_every_row_of_the_benchmark_has_been_measured():
    """With the settings that it has now: a row of an older variant does not pass under its name."""
    now = [json.loads(json.dumps(dataclasses.asdict(variant))) for variant in VARIANTS]
    assert now == [ROWS[variant["name"]]["variant"] for variant in now] and len(ROWS) == len(now)
    assert all(row["error"] is None for row in ROWS.values())


def test_the_same_inputs_gave_every_engine_and_library_the_same_gradient():
    """Its norm before any update, to what bfloat16 and each library's own order of sums leave."""
    first: dict[tuple, dict[str, float]] = {}
    for name, row in ROWS.items():
        variant = row["variant"]
        if row["grad_norm"][0] is not None:
            key = variant["model"], variant["sequences"], variant["tokens"], variant["ragged"]
            first.setdefault(key, {})[name] = row["grad_norm"][0]
    assert sum(len(norms) > 1 for norms in first.values()) == 4
    for norms in first.values():
        assert max(norms.values()) / min(norms.values()) < 1.01, norms


@both
def test_a_turn_with_vllm_takes_what_its_bytes_take(page):
    """Also: the row that says "at least" has the copies of the same plan."""
    text = section(page, heading_number("Training with vLLM on the same card"))
    plans = {}
    for state in ("fp32", "bf16_stochastic"):
        request = make_request(model="olmo2-1b", generation_backend="vllm-colocated", optimizer_state=state)
        plans[state] = request.plan(budget=15 * GIB)
        assert gib(host_needed(plans[state])) in text, state
        assert not plans[state].resident, "what lives on the card would have to leave it and come back"
    cache = plans["fp32"].card["generate"]["vLLM's keys and values"] / GIB
    assert re.search(rf"\b{cache:.1f}\s+GiB", text)
    weights, speed = 2 * OLMO2_1B.parameters(), LINKS[USUAL_LINK]
    rows = wide_rows(section(page, heading_number("What each phase should take")), 4)
    moved = [row for row in rows if f"{weights / GIB:.2f} GiB" in row[2]]
    assert [row[1] for row in moved] == 2 * [f"{weights / speed:.2f}"]
    assert f" {plans['fp32'].transfer_seconds(speed, speed):.2f}" in rows[-1][1]
    assert rows[7][2].split()[0] == str(request.size.served) and str(request.size.response) in rows[7][2]


def cycles(budget):
    """The runs of the backends under that many GiB, by name, from the committed log."""
    (group,) = newest(read_jsonl(ROOT / "runs" / f"diagnose-backend-{budget}" / "rows.jsonl"))
    assert {(run.start["setting"]["vram_budget"], run.start["setting"]["device"]) for run in group.values()} == {
        (budget, "NVIDIA H200")
    }
    return group


@both
def test_the_seconds_of_the_phases_are_those_of_the_log(page):
    """Also: a phase that should take less than so much did."""
    text = section(page, heading_number("What each phase should take"))
    rows, run = wide_rows(text, 4), cycles(16)["vllm-colocated"]
    phases = [name for name in PHASES if name not in ("reset_prefix_cache", "update", "rest")]
    together = {"wake kv_cache": "reset_prefix_cache", "score": "update"}  # two phases in one row
    seconds = [
        median(steady["seconds"][name] + steady["seconds"].get(together.get(name), 0) for steady in run.steady)
        for name in phases
    ]
    assert [row[3] for row in rows] == [f"{run.start['seconds']:.0f}"] + [f"{s:.3f}" for s in seconds]
    assert {name for row in run.steady for name in row["seconds"]} == set(PHASES)
    for (_, should, *_), measured in zip(rows[1:], seconds, strict=True):
        if re.search("under 0.1|不到 0.1", should):
            assert measured < 0.1
    assert f"{run.start['link_gb_per_s']['to_card']:.0f} GB/s" in text and len(run.steady) == 9


@both
def test_the_cycles_on_a_card_are_those_of_the_logs(page):
    text = section(page, heading_number("What a cycle takes"))
    shown = wide_rows(text, 7)
    assert [row[0] for row in shown] == ["8 GiB", "12 GiB", "16 GiB"]
    for budget, *figures in shown:
        group = cycles(int(budget.removesuffix(" GiB")))
        run = group["vllm-colocated"]
        setting = run.start["setting"]
        assert (setting["responses"], setting["max_tokens"]) == ((256, 512) if budget == "16 GiB" else (128, 256))
        assert len(run.steady) == 9
        speeds = [run.start["weight_bytes"] / s / 1e9 for s in run.phase("load")]
        assert figures == [
            f"{median(run.hand_overs()):.2f}", f"{median(run.phase('verify')):.2f}", f"{median(speeds):.1f}",
            f"{run.median('tokens_per_second'):,.0f}", f"{run.median('cycle_seconds'):.2f}", f"{run.peak() / GIB:.2f}",
        ]  # fmt: skip
        assert all(check.passed for check in checks(group)) and run.end["orphans"] == []
        for kind in ("card", "trainer", "worker", "shared"):
            assert f"{100 * growth(run, kind):.1f}" in ("0.0", "-0.0"), kind


@both
def test_the_three_ways_to_generate_are_those_of_the_log(page):
    text = section(page, heading_number("What a cycle takes"))
    group, shown = cycles(16), wide_rows(text, 6)
    assert list(group) == ["vllm-colocated", "vllm-alone", "transformers"]

    def spread(values):
        return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

    for (words, *figures), (name, run) in zip(shown, group.items(), strict=True):
        assert ("vLLM" in words) == name.startswith("vllm") and len(run.steady) >= 3
        whole = "-" if name == "vllm-alone" else spread([row["cycle_seconds"] for row in run.steady])
        tokens = f"{run.median('tokens_per_second'):,.0f}"
        peak = f"{run.peak() / GIB:.2f}"
        assert figures == [f"{run.start['side_by_side']}", spread(run.phase("generate")), tokens, whole, peak], name
    ours, alone, plain = group.values()
    assert f"{plain.median('cycle_seconds') / ours.median('cycle_seconds'):.2f}" in text
    assert f"{100 * ours.median('tokens_per_second') / alone.median('tokens_per_second'):.0f} %" in text
    assert all(str(figure) in text for figure in (*PUBLISHED_SECONDS, PUBLISHED_RATIO))


@both
def test_the_run_with_vllm_is_that_of_the_log(page):
    text = section(page, heading_number("A run with vLLM on the card"))
    folder = ROOT / "runs" / "toy-32m-vllm"
    metrics, tests = read_jsonl(folder / METRICS_FILE), read_jsonl(folder / EVALUATIONS_FILE)
    ends = {(row["step"], row["kind"]): row for row in tests if row["step"] in (0, 100)}
    for (_, *figures), step in zip(wide_rows(text, 5), (0, 100), strict=True):
        sampled, greedy = ends[step, "sampled"], ends[step, "greedy"]
        low, high = (100 * bound for bound in sampled["interval"])
        assert figures == [
            f"{100 * sampled['accuracy']:.1f} % ({low:.1f}-{high:.1f})", f"{100 * greedy['accuracy']:.1f} %",
            f"{100 * sampled['pass_at_k']['8']:.1f} %", f"{100 * sampled['format_share']:.1f} %",
        ]  # fmt: skip
        assert sampled["problems"] == greedy["problems"] == 256
    assert [row["step"] for row in metrics] == list(range(1, 101))
    assert f" {sum(row['seconds_step'] for row in metrics):.0f} " in text
    assert f" {sum(row['seconds_generate'] for row in metrics):.0f} " in text
    memory = read_jsonl(folder / MEMORY_FILE)
    card = max(row["card"] for row in memory)
    assert f"{card / GIB:.1f} GiB" in text and card < 16 * GIB
    eight_bits = read_jsonl(ROOT / "runs" / "toy-32m-vllm-fp8" / METRICS_FILE)
    for rows in (metrics, eight_bits):
        assert f"{median(row['mismatch_mean'] for row in rows):.4f}" in text
    assert f"{median(row['mismatch_mean'] for row in metrics[: len(eight_bits)]):.4f}" in text and len(eight_bits) == 3
    assert f" {memory[0]['t']:.0f} " in text, "seconds before the first batch"
    equal = [row["zero_variance_groups"] for row in metrics[25:]]
    assert 0.75 < sum(equal) / len(equal) < 0.85 and re.search("four of five|五组中有四组", text)


@both
def test_the_run_with_vllm_is_made_by_the_commands_shown(page):
    """The model's card and the run's own record have them too; the page leaves out how often the run was saved."""
    folder = ROOT / "runs" / "toy-32m-vllm"
    build, train = (c for c in a5_commands(page) if "toy-32m" in c)
    record = shlex.split((folder / "command.txt").read_text(encoding="utf-8"))[1:]
    shown, recorded = (
        dataclasses.asdict(parse_without_running(words)) | dict.fromkeys(("save_every", "save_final"))
        for words in (train, record)
    )
    assert shown == recorded
    card = (folder / "model-card.md").read_text(encoding="utf-8")
    (made,) = re.findall(r"`(a5 toy build .*?)`", card)
    given, recorded = dict(zip(build[3::2], build[4::2], strict=True)), dict(re.findall(r"(--\S+) (\S+)", made))
    assert build[:3] == ["toy", "build", "toy-32m"] and given.items() <= recorded.items()
    text = section(page, heading_number("A run with vLLM on the card"))
    assert "in 2.0 minutes" in card and re.search("two minutes|两分钟", text)


@both
def test_the_bytes_of_each_optimizer_state_add_up(page):
    text = section(page, heading_number("Fitting the card"))
    assert f"{OLMO2_1B.parameters():,}" in text
    rows = wide_rows(text, 8)
    assert [re.match(r"`(\w+)`", row[0])[1] for row in rows] == list(STATE_BYTES)
    for name, *parts, total, size in rows:
        assert sum(map(int, parts)) == int(total), name
        assert f"{int(total) * OLMO2_1B.parameters() / 2**30:.1f} GiB" == size, name
        assert int(total) == 4 + STATE_BYTES[re.match(r"`(\w+)`", name)[1]], name


@both
def test_the_realised_shares_are_those_of_the_log(page):
    log = (ROOT / "runs" / "optimizer-state" / "shares.txt").read_text(encoding="utf-8")
    assert "after 200 steps" in log
    shown = {row[0].strip("`"): row[1:] for row in wide_rows(section(page, heading_number("Fitting the card")), 3)}
    assert list(shown) == list(STATE_BYTES)
    for column, rate in enumerate(("1e-06", "1e-05")):
        block = re.search(rf"^matrix[^\n]*learning rate {rate}\n(.*?)(\n\n|\Z)", log, re.MULTILINE | re.DOTALL)[1]
        for state, stored in re.findall(r"^ +(\w+) +([\d.]+)%", block, re.MULTILINE):
            assert shown[state][column] == f"{stored} %", (state, rate)


@both
def test_the_families_are_those_of_the_engine(page):
    text = section(page, heading_number("Fitting the card"))
    assert all(name in text for name in FAMILIES.values())
    assert len(FAMILIES) == 4, "the section on limits counts them"


@both
def test_every_command_is_in_the_table_of_commands(page):
    named = re.findall(r"`a5 ([^`]+)`", section(page, heading_number("Commands")))
    assert sorted(named) == sorted(COMMANDS)


def test_the_listing_of_a_run_folder_names_every_record():
    listing = next(content for language, content in blocks("README.md") if "runs/first/" in content)
    for name in (METRICS_FILE, EVALUATIONS_FILE, MEMORY_FILE, PLAN_FILE, "config.json", "command.txt"):
        assert f" {name} " in listing, name


def test_the_metrics_table_is_the_code():
    assert metrics_rows("README.md") == [[f"`{name}`", words] for name, words in METRICS.items()]


def test_the_chinese_metrics_table_has_the_same_names_in_the_same_order():
    rows = metrics_rows("README.zh.md")
    assert [row[0] for row in rows] == [f"`{name}`" for name in METRICS]
    assert all(len(row) == 2 and re.search("[\u4e00-\u9fff]", row[1]) for row in rows)


@pytest.mark.reference  # it names files of solutions/
@both
def test_every_path_exists(page):
    for code in inline_code(page):
        is_path = PATH.fullmatch(code) and (code.endswith(ENDINGS) or code.startswith(".ci/"))
        if is_path and not GENERATED.fullmatch(code):
            assert (ROOT / code).exists(), f"{page} names `{code}`, which is not in the repository"
    for target in re.findall(r"\]\(([^)]+)\)", TEXT[page]):
        there = target.startswith("https://") or (ROOT / target).exists()
        assert there, f"{page} links to {target}, which is not in the repository"
    for word in re.findall(r"(?:tests|runs/toy)[\w./-]+", "\n".join(content for _, content in blocks(page))):
        module = ROOT / f"{word.replace('.', '/')}.py"  # as in `python -m tests.notebook_tools`
        there = (ROOT / word).exists() or module.exists()
        assert there, f"a command of {page} names {word}, which is not in the repository"


def tree(page):
    """The paths of the annotated file tree, from the indentation."""
    content = next(content for language, content in blocks(page) if language == "text" and "a5lib/" in content)
    paths, folder = [], ""
    for line in content.splitlines():
        entry = re.fullmatch(r"( *)(\S+) {2,}(\S.*)", line)
        if entry is None:
            assert re.fullmatch(r"  \(.*\)", line), f"a line of the tree is neither a file nor a layer: {line!r}"
            continue
        if not entry[1]:
            folder = entry[2] if entry[2].endswith("/") else ""
        paths.append((folder if entry[1] else "") + entry[2])
    return paths


@pytest.mark.reference
@both
def test_the_file_tree_is_complete(page):
    paths = tree(page)
    assert not [path for path in paths if not (ROOT / path).exists()]
    folders = ("a5lib", "a5lib/engines", "solutions")
    files = [p.relative_to(ROOT).as_posix() for folder in folders for p in (ROOT / folder).glob("*.py")]
    assert not set(files) - set(paths), f"{page}: no line for {sorted(set(files) - set(paths))}"
    assert len(paths) == len(set(paths))


def test_both_pages_have_the_same_shape():
    english, chinese = (TEXT[page] for page in PAGES)
    levels = [re.findall(r"^(#+) ", prose(page), re.MULTILINE) for page in PAGES]
    assert levels[0] == levels[1], "a heading is missing or of another level"
    assert [len(row) for row in table_rows(english)] == [len(row) for row in table_rows(chinese)]
    assert len(re.findall(r"^- ", english, re.MULTILINE)) == len(re.findall(r"^- ", chinese, re.MULTILINE))


def test_both_pages_have_the_same_code():
    english, chinese = (blocks(page) for page in PAGES)
    assert [language for language, _ in english] == [language for language, _ in chinese]
    for (language, one), (_, other) in zip(english, chinese, strict=True):
        if language == "text":
            one, other = (re.findall(r"^( *[\w./-]+)", text, re.MULTILINE) for text in (one, other))
        assert one == other


def test_both_pages_have_the_same_figures_and_code_words():
    """Each number of a section, and each piece of inline code, stands in both languages."""
    for number, _ in enumerate(re.findall(r"^#+ ", prose("README.md"), re.MULTILINE)):
        english, chinese = (section(page, number) for page in PAGES)
        for pattern in (r"`[^`\n]+`", r"(?<![A-Za-z0-9_.,-])\d[\d,.]*\d|(?<![A-Za-z0-9_.,-])\d"):
            one, other = (sorted(set(re.findall(pattern, text))) for text in (english, chinese))
            assert one == other, f"section {number}: {set(one) ^ set(other)} stands in one language only"


@both
def test_the_figures_of_the_base_are_those_of_the_logs(page):
    records = read_jsonl(ROOT / "runs" / "toy-grpo-seed0" / "evaluations.jsonl")
    counts = next(r["counts"] for r in records if r["step"] == 0 and r["kind"] == "greedy")
    assert counts == {"right": 115, "wrong": 141, "malformed": 0}, "mend the section on what the gain consists of"
    text = section(page, heading_number("What the gain consists of"))
    assert all(str(counts[kind]) in text for kind in ("right", "wrong"))


@both
def test_no_place_is_left_to_fill_in(page):
    assert not re.findall(r"@@\w+@@", TEXT[page])
