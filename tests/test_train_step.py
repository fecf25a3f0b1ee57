"""The gradient of a batch: the same however it is split, equal to float64 loops, and one whole step on a real model."""

import copy
import math

import pytest
import torch

from a5lib.config import ALGORITHMS
from tests import fp64_reference
from tests.conftest import given
from tests.fakes import FixedLogits, WordTokenizer
from tests.helpers import tiny_olmo2

LENGTHS = [1, 4, 2, 3, 5, 1]  # response lengths of case L08
ADVANTAGES = [1.0, -0.5, 0.7, -1.2, 0.4, 2.0]


def ragged_batch(impl, lengths=LENGTHS, advantages=ADVANTAGES):
    """Prompts of 2 or 3 tokens with responses of the given lengths."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 97, (2 + row % 2,), generator=generator).tolist() for row in range(len(lengths))]
    responses = [torch.randint(2, 97, (n,), generator=generator).tolist() for n in lengths]
    batch = impl.pad_and_mask(prompts, responses, 0)
    return {**batch, "advantages": torch.tensor(advantages[: len(lengths)])}


def with_old_log_probs(impl, model, batch, spread=0.3):
    scored = impl.get_response_log_probs(model, batch["input_ids"], batch["labels"], False)["log_probs"].detach()
    noise = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1))
    return {**batch, "old_log_probs": scored + spread * noise}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def accumulate(impl, model, batch, *args, **kwargs):
    model.zero_grad(set_to_none=True)
    loss, metadata = impl.accumulate_gradients(model, batch, *args, **kwargs)
    return loss, metadata, gradients(model)


class GivenScores:
    """Stands for the model's scores: row r of the batch has input ids that are all r."""

    def __init__(self, log_probs, entropy):
        self.log_probs = torch.nn.Parameter(torch.tensor(log_probs))
        self.entropy = torch.tensor(entropy)
        self.rows, self.widths = [], []

    def __call__(self, model, input_ids, labels, return_token_entropy, temperature):
        rows, width = input_ids[:, 0], input_ids.shape[1]
        self.rows.append(rows.tolist())
        self.widths.append(width)
        return {"log_probs": self.log_probs[rows, :width], "token_entropy": self.entropy[rows, :width]}

    def batch(self, mask, advantages, **columns):
        rows, width = len(mask), len(mask[0])
        ids = torch.arange(rows).unsqueeze(1).expand(rows, width)
        mask = torch.tensor(mask, dtype=torch.bool)
        extra = {name: torch.tensor(values) for name, values in columns.items()}
        return {
            "input_ids": ids,
            "labels": ids,
            "response_mask": mask,
            "advantages": torch.tensor(advantages),
            **extra,
        }


@pytest.fixture
def any_model():
    return torch.nn.Linear(1, 1)


@pytest.mark.parametrize("normalization", ["sequence", "constant", "token"])
@pytest.mark.parametrize("method", ["none", "grpo", "gspo"])
@pytest.mark.parametrize(("rows", "steps"), [(6, 2), (6, 3), (6, 6), (5, 2), (6, 4), (6, 9)])
def test_L08_any_split_gives_the_same_gradient(impl, tiny_model, normalization, method, rows, steps):
    batch = with_old_log_probs(impl, tiny_model, ragged_batch(impl, LENGTHS[:rows]))
    arguments = (method, 0.2, normalization, 48)
    loss, metadata, whole = accumulate(impl, tiny_model, batch, 1, *arguments)
    split_loss, split_metadata, split = accumulate(impl, tiny_model, batch, steps, *arguments)
    assert split_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    for name, value in whole.items():
        torch.testing.assert_close(
            split[name], value, rtol=1e-4, atol=1e-6, msg=f"{name}: did you divide by the number of microbatches?"
        )
    assert split_metadata == pytest.approx(metadata, rel=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("in_blocks", [False, True])
def test_presets_against_float64_loops_through_a_real_model(impl, tiny_model, name, in_blocks):
    preset = ALGORITHMS[name]
    eps = preset.cliprange
    batch = with_old_log_probs(
        impl, tiny_model, ragged_batch(impl, [1, 4, 0, 3, 5, 6, 2], [1.0, -0.5, 0.7, 0.0, 0.4, -1.3, 2.0])
    )
    arguments = (preset.importance_reweighting_method, eps, preset.loss_normalization, 42)
    score = impl.get_response_log_probs_in_blocks if in_blocks else None
    loss, metadata, actual = accumulate(impl, tiny_model, batch, 3, *arguments, score=score)

    model = copy.deepcopy(tiny_model).double()
    model.zero_grad(set_to_none=True)
    log_probs = fp64_reference.next_token_log_probs(model, batch["input_ids"], batch["labels"])
    expected_loss = fp64_reference.batch_loss(
        log_probs,
        batch["old_log_probs"].double().tolist(),
        batch["response_mask"].tolist(),
        batch["advantages"].tolist(),
        *arguments,
    )
    expected_loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-4, abs=1e-6)
    for parameter_name, expected in gradients(model).items():
        error = (actual[parameter_name].double() - expected).norm() / expected.norm()
        assert error < 1e-4, f"{parameter_name}: relative error {error:.1e}"
    assert metadata["trained_tokens"] == 18, "4 of the 7 rows' 21 tokens, 3 in the row of advantage 0"
    assert metadata["skipped_sequences"] == pytest.approx(1 / 7)
    if eps is not None:
        assert 0 < metadata["clip_fraction"] < 1


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("normalization", ["sequence", "constant", "token"])
def test_each_tokens_loss_is_multiplied_by_its_weight(impl, any_model, normalization, steps):
    scores = GivenScores([[-1.0] * 3] * 2, [[1.0] * 3] * 2)
    weights = [[2.0, 0.5, 7.0], [1.5, 7.0, 7.0]]
    batch = scores.batch([[1, 1, 0], [1, 0, 0]], [2.0, -1.0], loss_weights=weights)
    loss, metadata = impl.accumulate_gradients(any_model, batch, steps, "none", None, normalization, 10, score=scores)
    # losses are 2 * 2 and 2 * 0.5 in the first row and -1 * 1.5 in the second; two rows, three tokens, constant 10
    by_hand = {"sequence": (5.0 / 2 - 1.5) / 2, "token": (5.0 - 1.5) / 3, "constant": (5.0 - 1.5) / 10}
    assert loss.item() == pytest.approx(by_hand[normalization])
    share = {"sequence": (1 / 4, 1 / 2), "token": (1 / 3, 1 / 3), "constant": (1 / 10, 1 / 10)}[normalization]
    by_hand = [[-2 * 2.0 * share[0], -2 * 0.5 * share[0], 0.0], [1.5 * share[1], 0.0, 0.0]]
    assert scores.log_probs.grad.tolist() == [pytest.approx(row) for row in by_hand]
    assert metadata["trained_tokens"] == 3, "the statistics do not know the weights"


@pytest.mark.parametrize("normalization", ["sequence", "constant", "token"])
def test_skipped_rows_stay_in_the_denominators(impl, any_model, normalization):
    scores = GivenScores([[-1.0] * 3] * 4, [[1.0] * 3] * 4)
    mask = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    batch = scores.batch(mask, [2.0, 0.0, -1.0, 1.0])
    loss, metadata = impl.accumulate_gradients(any_model, batch, 1, "none", None, normalization, 10, score=scores)
    assert scores.rows == [[0, 2]], "rows of advantage 0 and rows without tokens are not run"
    # losses are +2 on two tokens and -1 on one; four rows, 2 + 3 + 1 tokens, constant 10
    by_hand = {"sequence": (2.0 - 1.0 + 0 + 0) / 4, "token": (4.0 - 1.0) / 6, "constant": (4.0 - 1.0) / 10}
    assert loss.item() == pytest.approx(by_hand[normalization])
    first = {"sequence": -2.0 / 2 / 4, "token": -2.0 / 6, "constant": -2.0 / 10}[normalization]
    assert scores.log_probs.grad[0].tolist() == pytest.approx([first, first, 0.0])
    assert metadata["skipped_sequences"] == 0.25
    assert metadata["trained_tokens"] == 3


def test_a_batch_of_zero_advantages_still_makes_a_step(impl, tiny_model):
    batch = ragged_batch(impl, advantages=[0.0] * 6)
    loss, metadata, zeros = accumulate(impl, tiny_model, batch, 2)
    assert loss.item() == 0.0
    assert all(value.count_nonzero() == 0 for value in zeros.values())
    assert {k: v for k, v in metadata.items() if k != "kl_rollout"} == {
        "entropy": 0.0,
        "clip_fraction": 0.0,
        "ratio_min": 1.0,
        "ratio_max": 1.0,
        "trained_tokens": 0.0,
        "skipped_sequences": 1.0,
    }


def test_momentum_moves_on_through_a_batch_without_signal(impl):
    model, tokenizer = tiny_olmo2(vocab_size=97), WordTokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    arguments = (["q"] * 2, ["right", "wrong"], ["right"] * 2, 2)
    impl.grpo_train_step(model, tokenizer, optimizer, 1, 1.0, grade, *arguments)
    before = model.lm_head.weight.clone()
    impl.grpo_train_step(model, tokenizer, optimizer, 1, 1.0, lambda r, t: {"reward": 1.0}, *arguments)
    assert not torch.equal(model.lm_head.weight, before), "the step of a batch without signal was left out"
    assert optimizer.state[model.lm_head.weight]["step"] == 2


def test_S02_metrics_over_tokens_and_not_over_padding(impl, any_model):
    mask = [[1, 1, 0], [1, 0, 0]]
    for steps in (1, 2):
        scores = GivenScores([[-1.0] * 3] * 2, [[1.0, 1, 9], [4.0, 9, 9]])
        batch = scores.batch(mask, [1.0, -1.0], rollout_log_probs=[[-1.5, -1.2, 5.0], [-0.5, 5.0, 5.0]])
        _, metadata = impl.accumulate_gradients(any_model, batch, steps, score=scores)
        assert metadata["entropy"] == pytest.approx(2.0), "2.5 would be the mean of the microbatches' means"
        # d = new - sampling: .5, .2, -.5; mean of exp(d) - 1 - d = (.148721 + .021403 + .106531) / 3
        assert metadata["kl_rollout"] == pytest.approx(0.092218, abs=1e-5)
        assert metadata["trained_tokens"] == 3
    assert batch["response_mask"].sum(dim=1).tolist() == [2, 1], "a length is a number of tokens"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_S02_ratios_and_clip_fraction_over_tokens(impl, any_model, steps):
    # ratios of the response tokens: 2 and .5 | 1 | 3; eps .1; advantages 1, -1, 1: clipped are the 2 and the 3
    new = torch.tensor([[2.0, 0.5, 100.0], [1.0, 100.0, 0.001], [3.0, 100.0, 100.0]]).log().tolist()
    scores = GivenScores(new, [[1.0] * 3] * 3)
    batch = scores.batch([[1, 1, 0], [1, 0, 0], [1, 0, 0]], [1.0, -1.0, 1.0], old_log_probs=[[0.0] * 3] * 3)
    _, metadata = impl.accumulate_gradients(any_model, batch, steps, "grpo", 0.1, score=scores)
    assert metadata["clip_fraction"] == pytest.approx(0.5), "tokens of all microbatches count alike"
    assert metadata["ratio_min"] == pytest.approx(0.5)
    assert metadata["ratio_max"] == pytest.approx(3.0)
    assert "kl_rollout" not in metadata


def test_padding_is_cut_off_and_rows_go_by_length(impl, any_model):
    scores = GivenScores([[-1.0] * 6] * 4, [[1.0] * 6] * 4)
    mask = [[0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    impl.accumulate_gradients(any_model, scores.batch(mask, [1.0, 1.0, 1.0, 1.0]), 2, score=scores)
    assert scores.rows == [[1, 3], [2, 0]]
    assert scores.widths == [5, 3], "columns after a microbatch's last response token cost time and change nothing"


def test_gradients_are_added_to_those_already_there(impl, tiny_model):
    batch = ragged_batch(impl)
    _, _, once = accumulate(impl, tiny_model, batch, 2)
    impl.accumulate_gradients(tiny_model, batch, 2)
    for name, value in gradients(tiny_model).items():
        torch.testing.assert_close(value, 2 * once[name])


def test_temperature_reaches_the_scores(impl, tiny_model):
    batch = ragged_batch(impl)
    _, hot, _ = accumulate(impl, tiny_model, batch, 2, temperature=2.0)
    _, cold, _ = accumulate(impl, tiny_model, batch, 2, temperature=0.5)
    assert hot["entropy"] > cold["entropy"]


def test_a_loss_that_is_not_finite_names_its_rows(impl, any_model):
    log_probs = [[-1.0, -1.0], [-1.0, math.nan], [-1.0, -math.inf], [math.nan, math.nan]]
    scores = GivenScores(log_probs, [[1.0] * 2] * 4)
    batch = scores.batch([[1, 1], [1, 1], [1, 1], [1, 1]], [1.0, 1.0, 1.0, 0.0])
    with pytest.raises(FloatingPointError, match="row 1, 2 of the batch"):
        impl.accumulate_gradients(any_model, batch, 1, score=scores)
    assert scores.log_probs.grad is None, "backward ran before the check"


def test_bad_arguments(impl, any_model):
    scores = GivenScores([[-1.0]], [[1.0]])
    batch = scores.batch([[1]], [1.0])
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        impl.accumulate_gradients(any_model, batch, 0, score=scores)
    with pytest.raises(ValueError, match="old_log_probs"):
        impl.accumulate_gradients(any_model, batch, 1, "grpo", 0.2, score=scores)


PROMPTS = ["Hello there"] * 2 + ["How many"] * 2
RESPONSES = ["right", "quite wrong", "right answer here", "wrong"]


def grade(response, truth):
    return {
        "reward": float(response.startswith(truth)),
        "format_reward": 1.0,
        "answer_reward": float(response.startswith(truth)),
    }


def step_arguments():
    return grade, PROMPTS, RESPONSES, ["right"] * 4, 2


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e9])
def test_one_step_is_the_exercises_in_order(impl, tiny_model, word_tokenizer, max_grad_norm):
    by_hand = copy.deepcopy(tiny_model)
    optimizer = torch.optim.SGD(tiny_model.parameters(), lr=0.1)
    loss, metadata = impl.grpo_train_step(tiny_model, word_tokenizer, optimizer, 2, max_grad_norm, *step_arguments())
    assert all(p.grad is None for p in tiny_model.parameters())
    assert loss.shape == ()
    assert not loss.requires_grad

    batch = impl.tokenize_prompt_and_output(PROMPTS, RESPONSES, word_tokenizer)
    advantages, _ = impl.compute_group_normalized_rewards(torch.tensor([1.0, 0.0, 1.0, 0.0]), 2)
    log_probs = impl.get_response_log_probs(by_hand, batch["input_ids"], batch["labels"], False)["log_probs"]
    per_token, _ = impl.compute_policy_gradient_loss(advantages, log_probs)
    expected = impl.aggregate_loss_across_microbatch(per_token, batch["response_mask"])
    expected.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in by_hand.parameters()))
    scale = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / norm)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert metadata["grad_norm"] == pytest.approx(norm, rel=1e-4), "the norm that is logged is that before clipping"
    for (name, actual), parameter in zip(tiny_model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(
            actual, parameter - 0.1 * scale * parameter.grad, rtol=1e-4, atol=1e-6, msg=f"{name} after the step"
        )
    assert metadata["reward_mean"] == 0.5
    assert metadata["format_reward_mean"] == 1.0
    assert metadata["zero_variance_groups"] == 0.0
    assert metadata["trained_tokens"] == 7


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_raises_what_it_should(impl, tiny_model, word_tokenizer, name):
    """After a few steps on the same batch the rewarded responses are more probable than before."""
    preset = ALGORITHMS[name]
    batch = impl.tokenize_prompt_and_output(PROMPTS, RESPONSES, word_tokenizer)

    def margin():
        scored = impl.get_response_log_probs(tiny_model, batch["input_ids"], batch["labels"], False)["log_probs"]
        means = (scored * batch["response_mask"]).sum(1) / batch["response_mask"].sum(1)
        return (means[0] - means[1] + means[2] - means[3]).item(), scored.detach()

    before, old = margin()
    optimizer = torch.optim.SGD(tiny_model.parameters(), lr=0.02)
    for _ in range(3):
        impl.grpo_train_step(
            tiny_model,
            word_tokenizer,
            optimizer,
            2,
            1.0,
            *step_arguments(),
            preset.baseline,
            1e-6,
            preset.advantage_normalizer,
            preset.importance_reweighting_method,
            old,
            preset.cliprange,
            preset.loss_normalization,
            16,
        )
    assert margin()[0] > before, "is the sign of the loss right?"


def test_any_module_with_logits_is_a_model(impl):
    model = FixedLogits(torch.zeros(4, 4, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    responses = ["right", "wrong", "right", "wrong"]
    impl.grpo_train_step(model, WordTokenizer(), optimizer, 1, None, grade, PROMPTS, responses, ["right"] * 4, 2)
    assert model.logits.grad is None
    assert model.logits.count_nonzero() > 0


def test_interleaved_groups_are_refused(impl, tiny_model, word_tokenizer):
    optimizer = torch.optim.SGD(tiny_model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="mixes prompts"):
        impl.grpo_train_step(
            tiny_model, word_tokenizer, optimizer, 1, 1.0, grade, ["a", "b"] * 2, RESPONSES, ["right"] * 4, 2
        )


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nothing_changes_when_a_number_is_not_finite(impl, tiny_model, word_tokenizer, where):
    optimizer = torch.optim.AdamW(tiny_model.parameters(), lr=0.1)
    if where == "loss":
        with torch.no_grad():
            tiny_model.lm_head.weight[0, 0] = math.nan
    else:
        tiny_model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    before = copy.deepcopy(tiny_model.state_dict())
    with pytest.raises(FloatingPointError, match="loss" if where == "loss" else "gradient norm"):
        impl.grpo_train_step(tiny_model, word_tokenizer, optimizer, 2, 1.0, *step_arguments())
    for name, value in tiny_model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert not optimizer.state
    assert all(p.grad is None for p in tiny_model.parameters())


def test_without_algo_the_package_of_the_function_is_used(tiny_model, word_tokenizer, impl):
    other = copy.deepcopy(tiny_model)
    results = []
    for step, model in ((given("train_step").grpo_train_step, tiny_model), (impl.grpo_train_step, other)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append(step(model, word_tokenizer, optimizer, 2, 1.0, *step_arguments())[0].item())
    assert results[0] == pytest.approx(results[1], abs=1e-6)
