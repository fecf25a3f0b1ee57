"""The layer-major pass against the plain backward pass, in float64, and for the reference bit for bit in float32."""

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from a5lib.course import load_algo
from a5lib.models import load_policy
from tests.conftest import IMPL, given

ALGO = load_algo(IMPL)
embed, final_norm = given("layer_major").embed, given("layer_major").final_norm
part_parameters, run_layer = given("layer_major").part_parameters, given("layer_major").run_layer


def small_model(dtype=torch.float64, tied=False, attention="sdpa"):
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        attn_implementation=attention,
        dtype=dtype,
    )
    model = Olmo2ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms of ones would hide a norm that is left out
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def loss_of_labels(model, batches, rows):
    """The mean over `rows` sequences of the summed cross-entropy, as a share of each microbatch."""

    def loss_of(hidden, m):
        logits = model.lm_head(hidden[:, :-1])
        return (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batches[m][:, 1:].flatten(), reduction="sum") / rows
        )

    return loss_of


def plain_gradients(model, batches, loss_of):
    model.zero_grad()
    losses = []
    for m, ids in enumerate(batches):
        loss = loss_of(model.model(ids).last_hidden_state, m)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), {name: p.grad.clone() for name, p in model.named_parameters()}


def uneven_batches(vocabulary=19):
    return [torch.randint(1, vocabulary, shape) for shape in [(2, 7), (1, 4), (3, 9)]]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float64_gradients_are_those_of_the_plain_backward_pass(tied, attention):
    model = small_model(tied=tied, attention=attention)
    batches = uneven_batches()
    loss_of = loss_of_labels(model, batches, rows=6)
    right_loss, right = plain_gradients(model, batches, loss_of)
    model.zero_grad()
    loss = ALGO.layer_major_backward(model, batches, loss_of)
    assert abs(loss - right_loss) < 1e-12 and not loss.requires_grad
    for name, parameter in model.named_parameters():
        scale = right[name].abs().max()
        assert (parameter.grad - right[name]).abs().max() <= 1e-12 * scale, f"{name} differs"
        assert scale > 0, f"{name} has no gradient to compare"


@pytest.mark.skipif(IMPL == "starter", reason="another order of the microbatches is as good")
def test_float32_gradients_of_the_toy_model_are_the_same_bits():
    model, _ = load_policy("toy")
    batches = uneven_batches(vocabulary=832)
    loss_of = loss_of_labels(model, batches, rows=6)
    _, right = plain_gradients(model, batches, loss_of)
    model.zero_grad()
    ALGO.layer_major_backward(model, batches, loss_of)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, right[name]), f"{name} was summed in another order"


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_that_is_reported_done_gets_no_more_gradient(tied):
    model = small_model(tied=tied)
    batches = uneven_batches()
    loss_of = loss_of_labels(model, batches, rows=6)
    _, right = plain_gradients(model, batches, loss_of)
    model.zero_grad()
    on_host, names = {}, {id(p): name for name, p in model.named_parameters()}
    done = []

    def send(part):
        done.append(part)
        for parameter in part_parameters(model, part):
            on_host[names[id(parameter)]], parameter.grad = parameter.grad, None

    ALGO.layer_major_backward(model, batches, loss_of, send)
    assert done == ["head", "layer 2", "layer 1", "layer 0", "embedding"]
    assert all(p.grad is None for p in model.parameters()), "a gradient came after its part was reported"
    assert on_host.keys() == right.keys(), "a parameter belongs to no part"
    for name, gradient in right.items():
        torch.testing.assert_close(on_host[name], gradient, rtol=1e-12, atol=1e-14)


def test_gradients_are_added_to_those_that_are_there():
    model = small_model()
    batches = uneven_batches()
    loss_of = loss_of_labels(model, batches, rows=6)
    _, right = plain_gradients(model, batches, loss_of)
    ALGO.layer_major_backward(model, batches, loss_of)
    assert torch.allclose(model.model.norm.weight.grad, 2 * right["model.norm.weight"])


def test_the_given_steps_are_the_models_forward_pass():
    model = small_model()
    ids = uneven_batches()[0]
    hidden = embed(model, ids)
    for index in range(3):
        hidden = run_layer(model, index, hidden)
    torch.testing.assert_close(final_norm(model, hidden), model.model(ids).last_hidden_state, rtol=1e-12, atol=1e-12)


def test_no_microbatch_is_refused():
    with pytest.raises(ValueError, match="no microbatch"):
        ALGO.layer_major_backward(small_model(), [], lambda hidden, m: hidden.sum())
