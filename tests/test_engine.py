"""The resident engine against a plain PyTorch loop in float64, with and without --low-memory."""

from __future__ import annotations

import functools

import pytest
import torch

from a5lib.config import TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.engines.resident import ResidentEngine, by_length, used_width
from tests.helpers import tiny_olmo2

PROMPT = 4


def ragged_batch(rows: int = 8, longest: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (rows,), generator=generator)
    width = PROMPT + int(lengths.max()) - 1
    ids = torch.randint(2, 250, (rows, width + 1), generator=generator)
    position = torch.arange(1, width + 1)
    mask = (position >= PROMPT) & (position < PROMPT + lengths[:, None])
    ids[:, 1:][~(position < PROMPT + lengths[:, None])] = 0
    advantages = torch.randn(rows, generator=generator)
    advantages[2] = 0.0
    noise = 0.1 * torch.randn(rows, width, generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask, "advantages": advantages,
            "old_log_probs": noise - 5, "rollout_log_probs": noise - 5}  # fmt: skip


def engine(low_memory: bool = False, algorithm: str = "offpolicy_clip", seed: int = 0) -> ResidentEngine:
    config = resolve(TrainConfig(model="x", algorithm=algorithm, rollout_batch_size=8, group_size=4, train_batch_size=8,
                                 gradient_accumulation_steps=4, low_memory=low_memory, max_tokens=16))  # fmt: skip
    return ResidentEngine(tiny_olmo2(seed), config, load_algo("solutions"))


def float64_gradients(batch: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradient of the clipped loss, mean over tokens then over rows, written straight from the formula."""
    model = tiny_olmo2(seed).double()
    total = torch.zeros((), dtype=torch.float64)
    rows = len(batch["advantages"])
    for b in range(rows):
        keep = batch["response_mask"][b]
        log_probs = torch.log_softmax(model(batch["input_ids"][b][None]).logits[0], -1)
        new = log_probs.gather(-1, batch["labels"][b][:, None])[:, 0][keep]
        w = (new - batch["old_log_probs"][b][keep].double()).exp()
        advantage = batch["advantages"][b].double()
        total = total - torch.minimum(advantage * w, advantage * w.clamp(0.8, 1.2)).mean() / rows
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("low_memory", [False, True])
def test_gradients_are_those_of_a_plain_float64_loop(low_memory: bool) -> None:
    batch = ragged_batch()
    this = engine(low_memory)
    this.accumulate(batch)
    expected = float64_gradients(batch)
    for name, parameter in this.model.named_parameters():
        error = (parameter.grad.double() - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("low_memory", [False, True])
def test_scores_are_those_of_each_row_alone(low_memory: bool) -> None:
    batch = ragged_batch()
    scores = engine(low_memory).score(batch)
    reference = tiny_olmo2().double()
    for b, keep in enumerate(batch["response_mask"]):
        if batch["advantages"][b] == 0:
            assert not scores["log_probs"][b].any(), "a row that no update runs is not scored"
            continue
        with torch.no_grad():
            log_probs = torch.log_softmax(reference(batch["input_ids"][b][None]).logits[0], -1)
        expected = log_probs.gather(-1, batch["labels"][b][:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        torch.testing.assert_close(scores["log_probs"][b][keep].double(), expected[keep], rtol=0, atol=1e-5)
        torch.testing.assert_close(scores["token_entropy"][b][keep].double(), entropy[keep], rtol=0, atol=1e-5)


def test_old_and_new_log_probs_are_equal_before_any_update_in_bfloat16() -> None:
    config = resolve(TrainConfig(model="x", algorithm="offpolicy_gspo", rollout_batch_size=16, group_size=4,
                                 train_batch_size=8, gradient_accumulation_steps=2, max_tokens=16))  # fmt: skip
    this = ResidentEngine(tiny_olmo2().bfloat16(), config, load_algo("solutions"))
    batch = ragged_batch(rows=16)
    batch["old_log_probs"] = this.score(batch)["log_probs"]
    for rows in torch.arange(16).split(8):
        _, stats = this.accumulate({name: values[rows] for name, values in batch.items()})
        assert (stats["ratio_min"], stats["ratio_max"], stats["clip_fraction"]) == (1.0, 1.0, 0.0), (
            "scored in other microbatches than it is trained in, a row rounds differently and GSPO clips it"
        )


def test_K01_low_memory_gives_no_warning_and_leaves_the_cache_flag(caplog: pytest.LogCaptureFixture) -> None:
    this = engine(low_memory=True)
    before = this.model.config.use_cache
    this.accumulate(ragged_batch())
    this.step(1e-3)
    assert this.model.config.use_cache == before, "generation would be slow from now on"
    assert not this.model.training
    assert "use_cache" not in caplog.text


def test_a_step_is_the_one_of_torch_adamw_with_a_clipped_gradient() -> None:
    batch = ragged_batch()
    this = engine()
    this.accumulate(batch)
    other = tiny_olmo2()
    for mine, parameter in zip(this.model.parameters(), other.parameters(), strict=True):
        parameter.grad = mine.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.AdamW(other.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    assert this.step(1e-3) == pytest.approx(norm.item(), rel=1e-5)
    for (name, mine), parameter in zip(this.model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter, rtol=1e-5, atol=1e-7, msg=name)
    assert all(p.grad is None for p in this.model.parameters()), "the next step would add to this gradient"


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    this = engine()
    this.accumulate(ragged_batch())
    this.step(1e-3)  # now there are moments
    before = [tensor.clone() for group in this.tensors().values() for tensor in group.values()]
    this.accumulate(ragged_batch())
    next(iter(this.model.parameters())).grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError):
        this.step(1e-3)
    after = [tensor for group in this.tensors().values() for tensor in group.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in this.model.parameters())


def test_a_loss_that_is_not_finite_names_its_row() -> None:
    batch = ragged_batch()
    batch["advantages"][5] = torch.inf
    with pytest.raises(FloatingPointError, match="row 5"):
        engine().accumulate(batch)


def test_a_fault_midway_leaves_no_part_of_a_gradient() -> None:
    this, undisturbed = engine(), engine()
    bad = ragged_batch()
    shortest = int(torch.where(trains(bad), bad["response_mask"].sum(1), 1000).argmin())
    bad["advantages"][shortest] = torch.inf  # rows go from the longest: others have been added already
    with pytest.raises(FloatingPointError, match=f"row {shortest} "):
        this.accumulate(bad)
    assert all(p.grad is None for p in this.model.parameters())
    for one in (this, undisturbed):
        one.accumulate(ragged_batch())
    assert this.step(1e-3) == undisturbed.step(1e-3)


def trains(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which rows are run."""
    return (batch["advantages"] != 0) & batch["response_mask"].any(dim=1)


def test_a_batch_without_advantages_still_takes_the_step() -> None:
    this = engine()
    this.accumulate(ragged_batch())
    this.step(1e-3)
    before = [p.detach().clone() for p in this.model.parameters()]
    loss, stats = this.accumulate({**ragged_batch(seed=1), "advantages": torch.zeros(8)})
    assert (loss, stats["skipped_sequences"]) == (0.0, 1.0)
    assert this.step(1e-3) == 0.0
    moved = [not torch.equal(a, b) for a, b in zip(before, this.model.parameters(), strict=True)]
    assert any(moved), "the moments of earlier steps still move the weights"


def test_tensors_restore_an_engine_bit_for_bit() -> None:
    first = engine()
    first.accumulate(ragged_batch())
    first.step(1e-3)
    saved = {group: {name: t.clone() for name, t in named.items()} for group, named in first.tensors().items()}
    second = engine(seed=7)
    second.load_tensors(saved)
    for this in (first, second):
        this.accumulate(ragged_batch(seed=2))
        this.step(1e-3)
    for (name, a), (_, b) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(a, b), name


def test_rows_go_from_the_longest_and_padding_is_cut() -> None:
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    assert by_length(mask).tolist() == [1, 0, 2]
    assert [used_width(mask), used_width(mask[2:])] == [3, 1]


@pytest.mark.parametrize("recompute_layers", [False, True])
def test_layers_behind_frozen_embeddings_get_their_gradient(recompute_layers: bool) -> None:
    config = resolve(TrainConfig(model="x", algorithm="offpolicy_clip", rollout_batch_size=8, group_size=4,
                                 train_batch_size=8, gradient_accumulation_steps=4, max_tokens=16,
                                 recompute_layers=recompute_layers))  # fmt: skip
    model = tiny_olmo2()
    model.get_input_embeddings().requires_grad_(False)
    this = ResidentEngine(model, config, load_algo("solutions"))
    batch = ragged_batch()
    this.accumulate(batch)
    expected = float64_gradients(batch)
    for name, parameter in this.model.named_parameters():
        if parameter.requires_grad:
            error = (parameter.grad.double() - expected[name]).norm() / expected[name].norm()
            assert error < 1e-5, name


def compiled_engine(dtype: torch.dtype = torch.float32) -> ResidentEngine:
    config = resolve(TrainConfig(model="x", algorithm="offpolicy_clip", rollout_batch_size=8, group_size=4,
                                 train_batch_size=8, gradient_accumulation_steps=4, recompute_layers=True, head="fused",
                                 max_tokens=16))  # fmt: skip
    return ResidentEngine(tiny_olmo2().to(dtype), config, load_algo("solutions"), compiled=True)


def even_batch() -> dict[str, torch.Tensor]:
    """Every microbatch has two rows: one alone would be compiled for itself."""
    batch = ragged_batch()
    batch["advantages"][2] = 1.0
    return batch


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's front and its graphs of forward and backward, without the code that takes a minute to make."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()


def test_compiled_layers_give_the_gradient_and_the_step_of_plain_ones(quick_compiler: None) -> None:
    batch = even_batch()
    this, plain = compiled_engine(), engine()
    for one in (this, plain):
        one.accumulate(batch)
    gradients = {name: p.grad for name, p in plain.model.named_parameters()}
    for name, parameter in this.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)
    for one in (this, plain):
        one.step(1e-3)
    weights = dict(plain.model.named_parameters())
    for name, parameter in this.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_same_codes_serve_every_length_and_scoring_too(quick_compiler: None) -> None:
    this = compiled_engine()
    for seed in range(3):
        batch = ragged_batch(seed=seed)
        this.accumulate(batch | {"old_log_probs": this.score(batch)["log_probs"]})
        this.step(1e-4)
    counters = torch._dynamo.utils.counters
    # A layer's with a graph and without, each for several rows and for one; AdamW's, for matrices and for vectors.
    assert 0 < counters["stats"]["unique_graphs"] <= 6
    assert not counters["graph_break"]


def test_more_codes_than_torch_keeps_by_itself_are_kept(quick_compiler: None) -> None:
    """Past its limit torch runs layers plain, which rounds otherwise: then a ratio is not 1."""
    this, batch = compiled_engine(torch.bfloat16), ragged_batch()
    with torch._dynamo.config.patch(recompile_limit=1):
        _, metadata = this.accumulate(batch | {"old_log_probs": this.score(batch)["log_probs"]})
    assert (metadata["ratio_min"], metadata["ratio_max"]) == (1.0, 1.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_compiled_scores_are_to_the_bit_those_of_the_update(quick_compiler: None) -> None:
    this, batch = compiled_engine(torch.bfloat16), even_batch()
    batch["old_log_probs"] = this.score(batch)["log_probs"]
    _, metadata = this.accumulate(batch)
    assert (metadata["ratio_min"], metadata["ratio_max"]) == (1.0, 1.0)


def test_layers_run_their_own_code_outside_of_scoring_and_updates(quick_compiler: None) -> None:
    this, batch = compiled_engine(), even_batch()
    layers = list(this.model.base_model.layers)
    this.score(batch)
    assert not any("forward" in vars(layer) for layer in layers)
    with pytest.raises(FloatingPointError):
        this.accumulate(batch | {"old_log_probs": torch.full_like(batch["old_log_probs"], torch.nan)})
    assert not any("forward" in vars(layer) for layer in layers)
    assert not this.model.training
