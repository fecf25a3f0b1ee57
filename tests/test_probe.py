"""The capacity probe: it passes on a working engine, and each fault that it looks for makes it fail."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import a5lib.probe as module
from a5lib.config import TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.errors import UserError
from a5lib.models import TOY_MODEL_DIR
from a5lib.probe import Probe, check_norms, digests, held_to, print_probe, probe
from a5lib.synthetic import published_config, random_model

PHASES = ["load", "score", "update 1", "step 1", "update 2", "step 2"]


def small(**options: Any) -> Probe:
    return probe(load_algo("solutions"), **{"model": "tiny", "sequences": 4, "tokens": 21, "device": "cpu"} | options)


def words(found: Probe) -> dict[str, str]:
    return {name: text for name, (_, text) in found.checks.items()}


@pytest.mark.parametrize("engine", ["resident", "layer_major"])
def test_a_tiny_model_passes_with_every_tensor_counted(engine: str) -> None:
    found = small(engine=engine)
    assert found.passed, words(found)
    assert [phase.name for phase in found.phases] == PHASES
    assert words(found)["gradients"] == "25 of 25 gradients finite and not zero"
    assert words(found)["moments"] == "50 of 50 moments finite and not zero"
    assert words(found)["weights"] == "25 of 25 parameters changed"


@pytest.mark.parametrize("state", ["bf16", "bf16_stochastic", "bf16_kahan", "fp32"])
def test_it_passes_in_bfloat16_where_a_norm_of_1_needs_a_large_step(state: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "select_dtype", lambda name, device: torch.bfloat16)
    found = small(optimizer_state=state)
    assert found.passed, words(found)


def test_a_models_own_weights_are_probed_too() -> None:
    found = small(model=str(TOY_MODEL_DIR))
    assert found.passed, words(found)


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, Any], None]) -> Probe:
    """A probe whose engine is made faulty by `fault(model, engine)` as soon as it is built."""
    build = module._build

    def faulty(*arguments: Any) -> Any:
        built = build(*arguments)
        fault(built[0], built[1])
        return built

    monkeypatch.setattr(module, "_build", faulty)
    return small(engine="resident")


def test_a_frozen_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    found = with_fault(monkeypatch, lambda model, engine: model.get_parameter(name).requires_grad_(False))
    assert not found.passed
    assert words(found)["gradients"] == f"24 of 25 gradients finite and not zero; not {name}"
    assert words(found)["moments"] == f"48 of 50 moments finite and not zero; not exp_avg of {name} and 1 more"
    assert words(found)["weights"] == f"24 of 25 parameters changed; not {name}"


def test_a_gradient_of_zeros_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.norm.weight"
    found = with_fault(monkeypatch, lambda model, engine: model.get_parameter(name).register_hook(torch.zeros_like))
    assert words(found)["gradients"] == f"24 of 25 gradients finite and not zero; not {name}"
    assert not found.passed


def test_a_gradient_that_is_not_finite_is_a_failure_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    found = with_fault(monkeypatch, lambda m, e: m.get_parameter(name).register_hook(lambda g: g * float("nan")))
    assert not found.passed
    assert name in words(found)["gradients"]
    assert [phase.name for phase in found.phases] == PHASES[:4]


def test_weights_that_do_not_move_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEARNING_RATES", (0.0, 0.0))
    found = small()
    assert not found.passed
    assert words(found)["weights"].startswith("0 of 25 parameters changed; not model.embed_tokens.weight and 24 more")
    assert all(fine for name, (fine, _) in found.checks.items() if name != "weights")


def test_running_out_of_memory_fails_with_a_sentence_and_the_phases_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: Any, engine: Any) -> None:
        def accumulate(batch: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a lot.")

        monkeypatch.setattr(engine, "accumulate", accumulate)

    found = with_fault(monkeypatch, fault)
    assert not found.passed
    assert found.checks == {"memory": (False, "the card ran out of memory: CUDA out of memory")}
    assert [phase.name for phase in found.phases] == PHASES[:3]


def test_a_norm_of_zero_or_infinity_fails() -> None:
    assert check_norms([1.0, 2.0]) == (True, "gradient norms 1, 2")
    assert not check_norms([1.0, 0.0])[0]
    assert not check_norms([float("inf"), 1.0])[0]


def test_a_probe_without_checks_has_not_passed() -> None:
    assert not Probe(small().plan).passed


def test_a_fingerprint_changes_with_one_bit() -> None:
    model = random_model(published_config("tiny"))
    before = digests(model)
    assert before == digests(model)
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 0.01
    changed = {name for name, digest in digests(model).items() if digest != before[name]}
    assert changed == {"lm_head.weight"}


def test_the_two_updates_are_those_of_the_off_policy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fault(model: Any, engine: Any) -> None:
        real = engine.accumulate

        def accumulate(batch: Any) -> Any:
            seen.append(batch)
            return real(batch)

        monkeypatch.setattr(engine, "accumulate", accumulate)
        seen.append(engine.config)

    with_fault(monkeypatch, fault)
    config, first, second = seen
    assert config.preset == resolve(TrainConfig(algorithm="offpolicy_gspo")).preset
    assert len(first["labels"]) == len(second["labels"]) == 4
    assert not torch.equal(first["labels"], second["labels"])
    assert (second["old_log_probs"][second["response_mask"]] < 0).all(), "scored before the first step"


def test_a_budget_that_is_no_size_or_more_than_the_card_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--vram-budget is 0"):
        small(vram_budget=0)
    card = type("Card", (), {"total_memory": 8 * 2**30})
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    with (
        pytest.raises(UserError, match=r"--vram-budget is 9 GiB and this card has 8\.0"),
        held_to(9, torch.device("cuda")),
    ):
        pass
    with held_to(2, torch.device("cuda")):
        assert not fractions, "the cap is set where the engine is made"
    assert fractions == [1.0], "what comes after the probe is not held"


def test_the_verdict_is_printed_with_the_phases(tmp_path: Path) -> None:
    out = io.StringIO()
    found = small()
    print_probe(found, Console(file=out, width=100))
    assert all(phase in out.getvalue() for phase in PHASES)
    assert out.getvalue().rstrip().endswith("PASS")
    found.checks["weights"] = (False, "24 of 25 parameters changed; not x")
    out = io.StringIO()
    print_probe(found, Console(file=out, width=100))
    assert "FAIL 24 of 25 parameters changed; not x" in out.getvalue()
    assert out.getvalue().rstrip().endswith("FAIL")
