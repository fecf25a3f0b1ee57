"""Log-probabilities and entropies: precision, temperature, padding, and the head in blocks against the whole."""

import logging
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from a5lib.course.checks.scoring import rows_of_logits
from tests.fakes import FixedLogits

INF = math.inf


def score_logits(impl, logits, labels, temperature=1.0):
    """Score given logits [T, V] through the public function; returns log-probs [T], entropy [T] and the model."""
    model = FixedLogits(logits.unsqueeze(0))
    ids = torch.tensor([labels])
    scored = impl.get_response_log_probs(model, ids, ids, True, temperature)
    return scored["log_probs"][0], scored["token_entropy"][0], model


@pytest.mark.parametrize(
    ("logits", "entropy"),
    [
        (torch.tensor([0.0, -INF]), 0.0),
        (torch.tensor([0.0, 0.0, -INF]), 0.693147),
        (torch.tensor([65504.0, -65504.0], dtype=torch.float16), 0.0),
        (torch.tensor([65504.0, 65504.0], dtype=torch.float16), 0.693147),
        (torch.tensor([1e4, 1e4, 1e4, 1e4]), 1.386294),
    ],
)
def test_S01_entropy_with_infinite_logits(impl, logits, entropy):
    log_probs, value, model = score_logits(impl, logits.unsqueeze(0), [0])
    assert value.item() == pytest.approx(entropy, abs=1e-6), "0 * -inf must count as 0"
    (value.sum() + log_probs.sum()).backward()
    assert model.logits.grad.isfinite().all(), "the gradient of 0 * -inf must be finite, too"


def test_entropy_and_its_gradient_against_float64(impl):
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    log_probs, entropy, model = score_logits(impl, logits, [3, 0, 10, 5, 5])
    entropy.sum().backward()
    exact = logits.double().requires_grad_()
    p = exact.softmax(-1)
    expected = -(p * p.log()).sum(-1)
    expected.sum().backward()
    torch.testing.assert_close(entropy.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.logits.grad[0].double(), exact.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(log_probs.double(), p.log()[range(5), [3, 0, 10, 5, 5]].detach(), rtol=1e-5, atol=1e-6)


def test_S03_temperature(impl):
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    by_hand = {0.5: -0.142932, 1.0: -0.407606}
    for temperature, expected in by_hand.items():
        value, _, _ = score_logits(impl, logits, [0], temperature)
        assert value.item() == pytest.approx(expected, abs=1e-6), "temperature divides the logits, not the log-probs"
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            score_logits(impl, logits, [0], temperature)


def test_S04_float32_out_of_bf16_logits(impl):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 50_000, generator=generator)).bfloat16()
    labels = [0, 1, 2, 3]
    value, _, _ = score_logits(impl, logits, labels)
    exact = logits.double().log_softmax(-1)[range(4), labels]
    assert value.dtype == torch.float32
    assert (value.double() - exact).abs().max() < 1e-4
    in_bf16 = logits.log_softmax(-1)[range(4), labels]
    assert (in_bf16.double() - exact).abs().max() > 1e-3, "the input no longer shows what bf16 loses"


def test_S04_ratio_of_stored_log_probs(impl):
    new, old = torch.tensor([[-10.03]]), torch.tensor([[-10.0]])
    _, metadata = impl.compute_policy_gradient_loss(torch.ones(1), new, "noclip", old)
    assert metadata["ratio"].item() == pytest.approx(0.97045, abs=1e-5)
    assert (new.bfloat16() - old.bfloat16()).exp().item() == 1.0, "stored in bf16 the ratio would be lost"


def test_labels_that_do_not_fit_the_logits(impl):
    with pytest.raises(ValueError, match="labels has shape"):
        impl.log_probs_from_logits(torch.zeros(4, 4, 12), torch.zeros(4, 2, dtype=torch.long))


def test_scores_of_a_real_model_against_its_own_logits(impl, tiny_model):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    labels = torch.tensor([[6, 7, 8, 96], [10, 11, 12, 0]])
    scored = impl.get_response_log_probs(tiny_model, ids, labels, True, temperature=0.7)
    log_p = (tiny_model.double()(ids).logits / 0.7).log_softmax(-1)
    assert scored["log_probs"].shape == scored["token_entropy"].shape == (2, 4)
    expected = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scored["log_probs"].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scored["token_entropy"].double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-5)
    assert set(impl.get_response_log_probs(tiny_model, ids, labels, False)) == {"log_probs"}


@pytest.mark.parametrize("in_blocks", [False, True])
def test_M09_padding_does_not_matter(impl, tiny_model, in_blocks):
    score = impl.get_response_log_probs_in_blocks if in_blocks else impl.get_response_log_probs
    ids, labels, pad = [5, 6, 7], [6, 7, 8], [0] * 5

    def run(ids, labels, attention_mask=None):
        mask = None if attention_mask is None else torch.tensor([attention_mask])
        tiny_model.zero_grad()
        scored = score(tiny_model, torch.tensor([ids]), torch.tensor([labels]), True, attention_mask=mask)
        real = scored["log_probs"][0][[i for i, label in enumerate(labels) if label]]
        real.sum().backward()
        assert all(p.grad.isfinite().all() for p in tiny_model.parameters()), "padding made the gradient NaN"
        return real.detach()

    alone = run(ids, labels)
    for name, padded in {
        "right": run(ids + pad, labels + pad),
        "right, with mask": run(ids + pad, labels + pad, [1] * 3 + [0] * 5),
        "left": run(pad + ids, pad + labels, [0] * 5 + [1] * 3),
    }.items():
        torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5, msg=f"padding on the {name} changed the scores")
    assert (run(pad + ids, pad + labels) - alone).abs().max() > 1e-3, "without a mask left padding must show"


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("block_size", [1, 3, 7, 100])
@pytest.mark.parametrize("tied", [False, True])
def test_S06_blocks_equal_the_whole(impl, tiny_model, tiny_tied_model, tied, block_size):
    model = tiny_tied_model if tied else tiny_model
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    ids = torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(1))
    ids, labels = ids[:, :-1], ids[:, 1:]  # T = 7
    weights = torch.randn(2, 7, generator=torch.Generator().manual_seed(2))

    def run(score, **arguments):
        model.zero_grad()
        scored = score(model, ids, labels, True, 0.8, **arguments)
        ((scored["log_probs"] + 0.5 * scored["token_entropy"]) * weights).sum().backward()
        return {name: value.detach() for name, value in scored.items()}, gradients(model)

    whole, whole_gradients = run(impl.get_response_log_probs)
    blocks, block_gradients = run(impl.get_response_log_probs_in_blocks, block_size=block_size)
    assert whole.keys() == blocks.keys()
    for name, value in whole.items():
        torch.testing.assert_close(blocks[name], value, rtol=1e-5, atol=1e-5)
    for name, value in whole_gradients.items():
        torch.testing.assert_close(block_gradients[name], value, rtol=1e-5, atol=1e-5)
    only = impl.get_response_log_probs_in_blocks(model, ids, labels, False, block_size=block_size)
    assert set(only) == {"log_probs"}


@pytest.mark.parametrize("shape", [(7,), (0,), (2, 0), (2, 3)])
def test_S06_block_shapes_bias_and_no_positions(impl, shape):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator)
    labels = torch.randint(0, 11, shape, generator=generator)
    blocks = impl.log_probs_in_blocks(hidden, weight, labels, 3, True, head_bias=bias)
    whole = impl.log_probs_from_logits(hidden @ weight.T + bias, labels, True)
    for name, value in whole.items():
        assert blocks[name].shape == shape
        torch.testing.assert_close(blocks[name], value)
    if labels.numel():
        expected = torch.autograd.grad(whole["log_probs"].sum(), [hidden, weight])
        torch.testing.assert_close(torch.autograd.grad(blocks["log_probs"].sum(), [hidden, weight]), expected)


def test_S06_logits_instead_of_hidden_states(impl):
    weight, labels = torch.zeros(97, 8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="logits, not hidden states"):
        impl.log_probs_in_blocks(torch.zeros(2, 97), weight, labels, 4)
    with pytest.raises(ValueError, match="no hidden states of this model"):
        impl.log_probs_in_blocks(torch.zeros(2, 9), weight, labels, 4)
    with pytest.raises(ValueError, match="labels has shape"):
        impl.log_probs_in_blocks(torch.zeros(3, 8), weight, labels, 4)
    with pytest.raises(ValueError, match="block_size"):
        impl.log_probs_in_blocks(torch.zeros(2, 8), weight, labels, 0)
    with pytest.raises(ValueError, match="temperature"):
        impl.log_probs_in_blocks(torch.zeros(2, 8), weight, labels, 4, temperature=0.0)


def test_blocks_of_another_architecture(impl):
    """GPT-2 keeps its body under another name, ties the head, and has absolute positions."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    whole = impl.get_response_log_probs(model, ids, ids, True)
    blocks = impl.get_response_log_probs_in_blocks(model, ids, ids, True, block_size=3)
    for name, value in whole.items():
        torch.testing.assert_close(blocks[name], value)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    left = torch.tensor([[0, 0, 5, 6, 7, 8]])
    for score in (impl.get_response_log_probs, impl.get_response_log_probs_in_blocks):
        padded = score(model, left, left, False, attention_mask=mask)["log_probs"][:, 2:]
        torch.testing.assert_close(padded, whole["log_probs"], msg="did positions count the padding on the left?")


def test_blocks_never_hold_the_logits_of_all_positions(impl, tiny_model):
    ids = torch.arange(40).reshape(2, 20)
    with rows_of_logits() as rows:
        scored = impl.get_response_log_probs_in_blocks(tiny_model, ids, ids, True, block_size=6)
        scored["log_probs"].sum().backward()
    assert rows, "no logits were seen"
    assert max(rows) <= 6, "logits of more than one block of positions existed at a time"


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale"])
def test_blocks_refuse_models_that_change_their_logits(impl, tiny_model, name):
    setattr(tiny_model.config, name, 30.0)
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match=name):
        impl.get_response_log_probs_in_blocks(tiny_model, ids, ids, False)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_K01_checkpointing_keeps_no_cache_and_leaves_the_config(impl, tiny_model, in_blocks, caplog):
    score = impl.get_response_log_probs_in_blocks if in_blocks else impl.get_response_log_probs
    ids, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]])
    plain = score(tiny_model, ids, labels, False)["log_probs"]
    plain.sum().backward()
    expected = gradients(tiny_model)
    tiny_model.zero_grad()

    before = tiny_model.config.use_cache
    assert before is True
    tiny_model.gradient_checkpointing_enable()
    tiny_model.train()
    outputs = []
    hook = tiny_model.base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        score(tiny_model, ids, labels, False)["log_probs"].sum().backward()
    finally:
        library.removeHandler(caplog.handler)
        hook.remove()
    assert outputs[0].past_key_values is None, "a key-value cache was kept while layers are recomputed"
    assert "use_cache" not in caplog.text
    for name, value in gradients(tiny_model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    tiny_model.eval()
    tiny_model.generate(ids, max_new_tokens=2, do_sample=False)
    assert tiny_model.config.use_cache is before, "generation afterwards would be slow"
