"""The head in blocks: against the full logits in float64, at its edges, and with an eye on its largest tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from a5lib.heads import blocks, fused_log_probs, head_sweep, score_block, score_block_with_gradient

TOKENS, WIDTH, VOCABULARY = 7, 6, 11
BLOCKS = (1, 3, 7, 100)


def case(tokens: int = TOKENS, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Hidden states, the head's weight, labels, and dL/dlogp, with a mask's zeros among the last."""
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(tokens, WIDTH, generator=generator)).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    coefficients = torch.randn(tokens, generator=generator)
    coefficients[1::3] = 0.0
    return hidden, weight, labels, coefficients


def full_path(
    hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and the gradients of sum(c logp), from all logits at once, in float64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    scores = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    log_probs = scores.gather(-1, labels[:, None])[:, 0]
    (log_probs * coefficients.double()).sum().backward()
    entropy = -torch.where(scores.isfinite(), scores.exp() * scores, 0.0).sum(-1)
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


# --- S06: every block gives what the full logits give


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("block", BLOCKS)
def test_S06_blocks_give_the_values_and_gradients_of_the_full_logits(block: int, temperature: float) -> None:
    hidden, weight, labels, coefficients = case()
    expected = full_path(hidden, weight, labels, coefficients, temperature)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = fused_log_probs(hidden, weight, labels, temperature=temperature, block=block)
    (log_probs * coefficients).sum().backward()
    for actual, wanted in zip((log_probs, entropy, hidden.grad, weight.grad), expected, strict=True):
        close(actual, wanted)
    assert not entropy.requires_grad, "the entropy is a statistic; its gradient is not computed"


@pytest.mark.parametrize("block", BLOCKS)
def test_S06_one_sweep_gives_the_same_where_the_derivative_is_known(block: int) -> None:
    hidden, weight, labels, coefficients = case()
    expected = full_path(hidden, weight, labels, coefficients, 0.7)
    weight_grad = torch.ones_like(weight)  # what other microbatches left here
    actual = head_sweep(
        hidden, weight, labels, temperature=0.7, block=block, coefficients=coefficients, weight_grad=weight_grad
    )
    for tensor, wanted in zip((*actual, weight_grad - 1), expected, strict=True):
        close(tensor, wanted)


def test_the_sweep_in_float64_is_exact_to_1e_12() -> None:
    hidden, weight, labels, coefficients = case(dtype=torch.float64)
    weight_grad = torch.zeros_like(weight)
    actual = head_sweep(
        hidden, weight, labels, block=3, coefficients=coefficients.double(), weight_grad=weight_grad, temperature=0.7
    )
    for tensor, wanted in zip((*actual, weight_grad), full_path(*case(dtype=torch.float64), 0.7), strict=True):
        close(tensor, wanted, 1e-12)


def test_S06_a_tied_weight_gets_the_sum_of_both_gradients() -> None:
    _, weight, labels, coefficients = case()
    ids = torch.tensor([0, 3, 3, 5, 0, 1, 10])

    def loss_of(table: Tensor, score: Any) -> Tensor:
        hidden = torch.nn.functional.embedding(ids, table).tanh()
        return (score(hidden, table) * coefficients.to(table.dtype)).sum()

    exact = weight.double().requires_grad_()
    loss_of(exact, lambda h, w: torch.log_softmax(h @ w.T, -1)[torch.arange(TOKENS), labels]).backward()
    weight.requires_grad_()
    loss_of(weight, lambda h, w: fused_log_probs(h, w, labels, block=3)[0]).backward()
    close(weight.grad, exact.grad)


def test_S06_no_tokens_give_nothing_and_a_gradient_of_zeros() -> None:
    hidden, weight, labels, _ = case(tokens=0)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = fused_log_probs(hidden, weight, labels)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad.shape == (0, WIDTH) and not weight.grad.any()


def test_S06_logits_in_place_of_hidden_states_are_refused_in_words() -> None:
    _, weight, labels, _ = case()
    with pytest.raises(ValueError, match="pass the last hidden states, not the logits"):
        fused_log_probs(torch.randn(TOKENS, VOCABULARY), weight, labels)


def test_labels_of_any_shape_keep_it() -> None:
    hidden, weight, labels, coefficients = case(tokens=6)
    expected = full_path(hidden, weight, labels, coefficients)
    log_probs, entropy = fused_log_probs(hidden.view(2, 3, WIDTH), weight.requires_grad_(), labels.view(2, 3))
    assert log_probs.shape == entropy.shape == (2, 3)
    close(log_probs.flatten(), expected[0])
    close(entropy.flatten(), expected[1])


def test_two_backward_passes_add_up() -> None:
    hidden, weight, labels, coefficients = case()
    _, _, _, once = full_path(hidden, weight, labels, coefficients)
    weight.requires_grad_()
    for _ in range(2):
        log_probs, _ = fused_log_probs(hidden, weight, labels, block=3)
        (log_probs * coefficients).sum().backward()
    close(weight.grad, 2 * once)


# --- numbers that are hard


def test_S03_the_temperature_divides_the_logits() -> None:
    logits, label = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    assert score_block(logits, label, 0.5)[0].item() == pytest.approx(-0.142932, abs=1e-6), "it divides no log-prob"
    assert score_block(logits, label, 1.0)[0].item() == pytest.approx(-0.407606, abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([0.0, -math.inf], 0.0), ([0.0, 0.0, -math.inf], math.log(2)), ([65504.0, -65504.0], 0.0)],
)
def test_S01_a_token_without_probability_adds_no_entropy(logits: list[float], expected: float) -> None:
    dtype = torch.float16 if logits[0] > 1 else torch.float32
    values, label = torch.tensor([logits], dtype=dtype), torch.tensor([0])
    log_probs, entropy, gradient = score_block_with_gradient(values, label, torch.tensor([1.0]), 1.0)
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    assert log_probs.item() == pytest.approx(-expected, abs=1e-6)
    assert gradient.isfinite().all()
    assert gradient[0, -1] == 0, "a logit of -inf takes no part"


def test_S04_scores_of_bfloat16_logits_are_float32_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50_000, generator=generator).bfloat16()
    labels = torch.tensor([0, 1, 2, 49_999])
    exact = torch.log_softmax(logits.double(), dim=-1)
    log_probs, entropy = score_block(logits, labels, 1.0)
    assert log_probs.dtype == entropy.dtype == torch.float32
    error = (log_probs.double() - exact[torch.arange(4), labels]).abs().max()
    assert error < 1e-5, f"{error:.1e}: softmax in bfloat16 errs by 5e-3"
    assert (entropy.double() + (exact.exp() * exact).sum(-1)).abs().max() < 1e-4


def test_the_likeliest_and_the_unlikeliest_token_keep_their_digits() -> None:
    logits = torch.tensor([[30000.0, 29999.0, -30000.0]])
    exact = torch.log_softmax(logits.double(), dim=-1)[0]
    for label in range(3):
        log_prob = score_block(logits, torch.tensor([label]), 1.0)[0].item()
        assert log_prob == pytest.approx(exact[label].item(), rel=1e-6)


def test_a_large_head_in_float32_stays_within_1e_5_of_float64() -> None:
    hidden, weight, labels, coefficients = case(tokens=64, scale=8.0)
    expected = full_path(hidden, weight, labels, coefficients)
    weight_grad = torch.zeros_like(weight)
    actual = head_sweep(hidden, weight, labels, block=16, coefficients=coefficients, weight_grad=weight_grad)
    for tensor, wanted in zip((*actual, weight_grad), expected, strict=True):
        assert (tensor.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_bfloat16_rounds_the_gradient_once_and_never_the_scores() -> None:
    hidden, weight, labels, coefficients = case(dtype=torch.bfloat16)
    logits = hidden @ weight.T  # rounded to bfloat16, as the sampler's are
    exact = torch.log_softmax(logits.double(), dim=-1)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, _ = fused_log_probs(hidden, weight, labels, block=100)
    assert log_probs.dtype == torch.float32
    close(log_probs, exact[torch.arange(TOKENS), labels])
    (log_probs * coefficients).sum().backward()
    hot = torch.nn.functional.one_hot(labels, VOCABULARY)
    back = ((hot - exact.exp()) * coefficients.double()[:, None]).bfloat16()
    assert torch.equal(hidden.grad, back @ weight) and torch.equal(weight.grad, back.T @ hidden)


# --- memory


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


@pytest.mark.parametrize("way", ["forward and backward", "one sweep"])
def test_no_tensor_is_larger_than_a_block_of_logits(way: str) -> None:
    tokens, width, vocabulary, block = 40, 3, 50, 4
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with Largest() as largest:
        if way == "one sweep":
            head_sweep(
                hidden.detach(), weight.detach(), labels, block=block, coefficients=torch.ones(tokens),
                weight_grad=torch.zeros(vocabulary, width),
            )  # fmt: skip
        else:
            fused_log_probs(hidden, weight, labels, block=block)[0].sum().backward()
    assert largest.numel == block * vocabulary, f"{largest.numel} elements; all logits are {tokens * vocabulary}"


@pytest.mark.parametrize(("count", "size"), [(1, 1), (7, 3), (9, 3), (10, 100), (672, 32), (1000, 128)])
def test_blocks_cover_everything_once_and_none_is_too_large(count: int, size: int) -> None:
    cut = blocks(count, size)
    assert [i for at in cut for i in range(count)[at]] == list(range(count))
    assert max(at.stop - at.start for at in cut) <= size
    assert len(cut) == -(-count // size)
