"""The preflight without a card: refusals with numbers and a setting that really fits, and the speed of a link."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

import pytest
import torch

from a5lib import machine
from a5lib.engines import host
from a5lib.engines.plan import CONTEXT, GIB, MIB, DoesNotFit, UpdateSize, plan_update
from a5lib.errors import UserError
from a5lib.memory import OLMO2_1B
from a5lib.preflight import (
    HOST_RESERVE,
    Facts,
    check,
    checked_plan,
    host_needed,
    measure_link,
    pinning_warning,
    shortage,
    this_machine,
)
from a5lib.shapes import OLMO2_7B

ON_POLICY = UpdateSize(64, 671, 512, group=8)
OFF_POLICY = UpdateSize(8, 671, 512, scored=64, decoded=32, group=8)
FIELDS = {"--generation-batch-size": "decoded", "--train-batch-size": "sequences", "--max-tokens": "response"}


def refused(size: UpdateSize, facts: Facts, shape: Any = OLMO2_1B, **options: Any) -> str:
    with pytest.raises(UserError) as refusal:
        checked_plan(shape, size, facts, **options)
    return str(refusal.value)


def follow(sentence: str, size: UpdateSize, options: dict[str, Any]) -> tuple[UpdateSize, dict[str, Any]]:
    """Size and options after the advice in a sentence was taken."""
    words = shlex.split(re.search(r"use (.*?), which needs", sentence)[1].replace(" and ", " "))
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag == "--vram-budget":
            options = options | {"budget": int(float(value) * GIB)}
        elif flag in FIELDS:
            longest = size.longest - (size.response - int(value) if flag == "--max-tokens" else 0)
            size = dataclasses.replace(size, longest=longest, **{FIELDS[flag]: int(value)})
        else:
            options = options | {flag.removeprefix("--").replace("-", "_"): value}
    return size, options


# --- each shortage


@pytest.mark.parametrize(
    ("size", "facts", "options", "words"),
    [
        # the card is short: what the engine needs and what the budget is
        (OFF_POLICY, Facts(), {"budget": 6 * GIB}, ["'generate'", "6.0 GiB", "--generation-batch-size 16"]),
        (ON_POLICY, Facts(), {"budget": 16 * GIB, "engine": "resident", "head": "fused", "microbatch": 4},
         ["The resident engine needs 2", "16.0 GiB", "--optimizer-state bf16_stochastic"]),
        (ON_POLICY, Facts(), {"budget": 8 * GIB, "engine": "resident"}, ["8.0 GiB", "--engine layer_major"]),
        (ON_POLICY, Facts(), {"budget": 2 * GIB}, ["2.0 GiB", "--vram-budget"]),
        # another program has taken the card
        (ON_POLICY, Facts(card_free=5 * GIB), {"budget": 8 * GIB},
         ["takes 7.", "5.0 GiB are free", "--vram-budget 5,"]),
        # the host is short
        (ON_POLICY, Facts(host_free=20 * GIB), {"budget": 6 * GIB},
         ["of host memory", "20.0 GiB are free", "--optimizer-state bf16_kahan"]),
        (ON_POLICY, Facts(host_free=10 * GIB, card_free=24 * GIB),
         {"budget": 6 * GIB, "optimizer_state": "bf16_stochastic", "engine": "layer_major"},
         ["of host memory", "10.0 GiB are free"]),
        (ON_POLICY, Facts(host_free=8 * GIB, card_free=24 * GIB), {"budget": 6 * GIB, "optimizer_state": "bf16"},
         ["of host memory", "8.0 GiB are free", "--vram-budget"]),
    ],
)  # fmt: skip
def test_a_refusal_names_a_setting_that_really_fits(size, facts, options, words):
    sentence = refused(size, facts, **options)
    assert all(word in sentence for word in words), sentence
    assert sentence.count(". ") == 0 and sentence.endswith("."), "one sentence"
    size, options = follow(sentence, size, options)
    made = checked_plan(OLMO2_1B, size, facts, **options)
    needs = re.search(r"which needs ([\d.]+) GiB of the card and ([\d.]+) GiB of host memory", sentence)
    assert made.budget_needed() <= float(needs[1]) * GIB and host_needed(made) <= float(needs[2]) * GIB


def test_a_plan_that_fits_is_returned_as_it_is():
    options = {"budget": 8 * GIB, "optimizer_state": "bf16"}
    facts = Facts(host_free=64 * GIB, card_free=8 * GIB)
    assert checked_plan(OLMO2_1B, ON_POLICY, facts, **options) == plan_update(OLMO2_1B, ON_POLICY, **options)
    check(plan_update(OLMO2_1B, ON_POLICY, **options), facts)


def test_several_changes_together_where_none_alone_is_enough():
    facts, options = Facts(host_free=16 * GIB, card_free=6 * GIB), {"budget": 6 * GIB}
    long = UpdateSize(8, 4256, 4096, scored=8, decoded=8, group=8)
    sentence = refused(long, facts, **options)
    assert " and --" in sentence, sentence
    size, changed = follow(sentence, long, options)
    assert shortage(plan_update(OLMO2_1B, size, **changed), facts) is None


def test_where_nothing_fits_the_sentence_says_so():
    sentence = refused(ON_POLICY, Facts(host_free=2 * GIB, card_free=8 * GIB), OLMO2_7B, budget=8 * GIB)
    assert "no smaller setting fits either" in sentence and "2.0 GiB are free" in sentence


def test_the_batch_has_the_flag_of_its_command():
    small = UpdateSize(64, 20_160, 20_000, group=8)
    facts, options = Facts(host_free=30 * GIB), {"budget": 8 * GIB, "optimizer_state": "bf16_stochastic"}
    sentence = refused(small, facts, batch_flag="--rollout-batch-size", **options)
    assert "use --rollout-batch-size 32" in sentence or "use --rollout-batch-size 16" in sentence, sentence
    assert "--train-batch-size" not in sentence


def test_an_optimizer_state_that_changes_nothing_is_not_named():
    """A float32 parameter has two float32 moments, whatever is asked for."""
    sentence = refused(ON_POLICY, Facts(host_free=12 * GIB), budget=8 * GIB, bytes_per_weight=4, compiled=False)
    assert "--optimizer-state" not in sentence, sentence


def test_a_resident_engine_is_shown_its_own_switches_first():
    options = {"budget": 24 * GIB, "engine": "resident", "microbatch": 8, "recompute_layers": False, "head": "full",
               "optimizer_state": "bf16"}  # fmt: skip
    assert "use --low-memory, which needs" in refused(ON_POLICY, Facts(), **options)


def test_host_memory_of_a_run_without_a_card():
    made = plan_update(OLMO2_1B, ON_POLICY, engine="resident", on_card=False, bytes_per_weight=4)
    assert host_needed(made) == 1_484_916_736 * (4 + 4 + 8), "weights, gradients, two moments"
    with pytest.raises(UserError, match=r"needs 22.2 GiB of host memory, but 16.0 GiB are free; close other programs"):
        check(made, Facts(host_free=16 * GIB))
    on_card = plan_update(OLMO2_1B, ON_POLICY, engine="layer_major", optimizer_state="bf16")
    assert host_needed(on_card) == sum(on_card.host.values()) + HOST_RESERVE


def test_no_fact_refuses_nothing():
    check(plan_update(OLMO2_7B, ON_POLICY, engine="layer_major"), Facts())


def test_a_card_shared_with_nobody_fits_to_the_byte():
    made = plan_update(OLMO2_1B, ON_POLICY, budget=8 * GIB)
    check(made, Facts(card_free=made.budget_needed()))
    with pytest.raises(UserError, match="of the card"):
        check(made, Facts(card_free=made.budget_needed() - 1))


def test_a_refused_plan_is_a_user_error_with_its_smallest_plan():
    with pytest.raises(DoesNotFit) as refusal:
        plan_update(OLMO2_1B, ON_POLICY, budget=CONTEXT)
    assert isinstance(refusal.value, UserError)
    needed = refusal.value.plan.budget_needed()
    assert plan_update(OLMO2_1B, ON_POLICY, budget=needed).peak() == refusal.value.plan.peak()


# --- pinned and shared memory


def test_a_limit_of_pinned_memory_is_a_warning_with_numbers():
    made = plan_update(OLMO2_1B, ON_POLICY, budget=6 * GIB, optimizer_state="bf16")
    wanted = sum(made.host.values())
    assert pinning_warning(made, Facts()) is None
    assert pinning_warning(made, Facts(pinned_limit=wanted)) is None
    sentence = pinning_warning(made, Facts(pinned_limit=8 * GIB))
    assert "8.0 GiB" in sentence and "WSL2" in sentence and f"{-(-wanted * 10 // GIB) / 10:.1f} GiB" in sentence
    resident = plan_update(OLMO2_1B, ON_POLICY, engine="resident")
    assert pinning_warning(resident, Facts(pinned_limit=0)) is None, "it pins nothing"


def test_wsl2_pins_half_of_its_memory(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: (20 * GIB, 24 * GIB))
    kernel = dataclasses.make_dataclass("Kernel", ["release"])
    monkeypatch.setattr(machine.platform, "uname", lambda: kernel("5.15.167.4-microsoft-standard-WSL2"))
    assert machine.pinned_limit() == 12 * GIB
    monkeypatch.setattr(machine.platform, "uname", lambda: kernel("6.8.0-51-generic"))
    assert machine.pinned_limit() is None


def test_the_facts_of_this_machine(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: (20 * GIB, 24 * GIB))
    assert this_machine(torch.device("cpu")) == Facts(host_free=20 * GIB)
    cached = [2 * GIB]  # by torch, of an earlier run in this process
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB - sum(cached), 8 * GIB))
    monkeypatch.setattr(machine, "pinned_limit", lambda: 12 * GIB)
    assert this_machine(torch.device("cuda")) == Facts(20 * GIB, 7 * GIB, 12 * GIB)


# --- the link


def test_there_is_no_link_on_the_cpu():
    assert measure_link(torch.device("cpu")) is None


def test_the_memory_of_a_measured_copy_stays_pinned(monkeypatch):
    pins: list[bool] = []

    class Pinned(host.HostMemory):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            pins.append(True)

        def __del__(self) -> None:
            pins.clear()

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        assert pins, "the pin was given back before the copy"
        return 1.0

    monkeypatch.setattr(host, "HostMemory", Pinned)
    assert measure_link(torch.device("meta"), timed) is not None


def test_a_link_is_the_median_of_five_copies_each_way():
    copies: list[tuple[str, str, int]] = []
    # by kind of copy: the first is a warm-up; the median of the others is the third largest
    seconds = {"in": [9, 1, 5, 2, 4, 3], "out": [9, 8, 8, 6, 8, 8], "pageable": [9, 2, 2, 2, 2, 70]}

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        assert target.numel() == source.numel()
        copies.append((str(target.device), str(source.device), source.numel()))
        inward = target.device.type == "meta"
        kind = "pageable" if source.numel() == 64 * MIB else "in" if inward else "out"
        return seconds[kind].pop(0)

    link = measure_link(torch.device("meta"), timed)
    assert (link.inward, link.outward, link.pageable) == (256 * MIB / 3, 256 * MIB / 8, 64 * MIB / 2)
    assert (
        copies == [("meta", "cpu", 256 * MIB)] * 6 + [("cpu", "meta", 256 * MIB)] * 6 + [("meta", "cpu", 64 * MIB)] * 6
    )
