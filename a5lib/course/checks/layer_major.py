"""Checks of `layer_major.py`: the order of the pass, what it keeps, and its gradients.

The model is a real OLMo-2 with two layers and hidden states of four numbers, in float64. What is expected comes from
the plain backward pass on it, microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM

from a5lib.course.checking import Mistake, checks, expect
from a5lib.course.exercises import Algo

TWO = "two microbatches of one row: ids [[1, 2, 3]] and [[4, 2, 5]]; a model of two layers"
UNEVEN = "two microbatches of different sizes: two rows of three ids, and one row of two"


def tiny_model() -> Olmo2ForCausalLM:
    """Two layers, hidden states of 4 numbers, 6 tokens; norms that are not all ones."""
    config = Olmo2Config(
        vocab_size=6, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Olmo2ForCausalLM(config).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def two_microbatches() -> list[Tensor]:
    return [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 2, 5]])]


def uneven_microbatches() -> list[Tensor]:
    return [torch.tensor([[1, 2, 3], [3, 5, 2]]), torch.tensor([[4, 2]])]


def share_of(model: Olmo2ForCausalLM, microbatches: list[Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A loss: the mean over all rows of -log p of each row's ids, given the position itself. Any loss would do."""
    rows = sum(len(ids) for ids in microbatches)

    def loss_of(hidden: Tensor, m: int) -> Tensor:
        log_probs = model.lm_head(hidden).log_softmax(dim=-1)
        return -log_probs.gather(-1, microbatches[m].unsqueeze(-1)).sum() / rows

    return loss_of


@dataclass
class Call:
    """One run of a layer: which, whether with a graph, what went in, what came out, and the output's gradient."""

    layer: int
    graph: bool
    hidden: Tensor
    output: Tensor | None = None
    gradient: Tensor | None = None


class Watch:
    """Writes down every run of a layer while it is open."""

    def __init__(self, model: Olmo2ForCausalLM) -> None:
        self.model = model
        self.calls: list[Call] = []
        self.handles: list[Any] = []

    def __enter__(self) -> Watch:
        for index, layer in enumerate(self.model.model.layers):

            def before(module: Any, arguments: Any, index: int = index) -> None:
                self.calls.append(Call(index, torch.is_grad_enabled(), arguments[0].detach().clone()))

            def after(module: Any, arguments: Any, output: Tensor) -> None:
                call = self.calls[-1]
                call.output = output.detach().clone()
                if output.requires_grad:
                    output.register_hook(lambda gradient: setattr(call, "gradient", gradient.detach().clone()))

            self.handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()


def run(
    algo: Algo, model: Olmo2ForCausalLM, microbatches: list[Tensor], loss_of: Any = None, done: Any = None
) -> tuple[Any, Watch]:
    """The pass under watch, with two of torch's messages put into words."""
    model.zero_grad()
    given = TWO if len(microbatches[0]) == 1 else UNEVEN
    loss_of = share_of(model, microbatches) if loss_of is None else loss_of
    arguments = (model, microbatches, loss_of) if done is None else (model, microbatches, loss_of, done)
    try:
        with Watch(model) as watch:
            loss = algo.layer_major_backward(*arguments)
    except RuntimeError as error:
        words = {
            "implicitly created": "The gradient that is passed on is None: the kept input must have no graph of its "
            "own (embed runs under torch.no_grad() too), and must ask for its gradient before it runs again.",
            "does not require grad": "Something runs without a graph that must have one: head, way down or embedding.",
            "a second time": "Two backward passes go through one graph: run the layer anew for each microbatch.",
        }
        for part, likely in words.items():
            if part in str(error):
                raise Mistake("the pass", given, "no error", f"torch says: {error}", likely) from None
        raise
    return loss, watch


def plain(
    model: Olmo2ForCausalLM, microbatches: list[Tensor], only: int | None = None
) -> tuple[Watch, dict[str, Tensor]]:
    """The plain backward pass: microbatch by microbatch, all of them or one alone."""
    model.zero_grad()
    loss_of = share_of(model, microbatches)
    with Watch(model) as watch:
        for m, ids in enumerate(microbatches):
            if only in (None, m):
                loss_of(model.model(ids).last_hidden_state, m).backward()  # type: ignore[no-untyped-call]
    return watch, {name: gradient_of(parameter).clone() for name, parameter in model.named_parameters()}


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient, zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@checks("layer_major_backward")
def loss_is_the_sum(algo: Algo) -> None:
    """The loss is the sum of the microbatches' shares, a number without a graph."""
    shares = (1.0, 2.0)
    loss, _ = run(algo, tiny_model(), two_microbatches(), lambda hidden, m: 0 * hidden.sum() + shares[m])
    given = "two microbatches whose shares of the loss are 1.0 and 2.0"
    expect(
        "the loss", loss, 3.0, given=given, likely="Add up what loss_of gives for each microbatch.",
        mistakes={
            "This is the mean; the shares are weighted already, so add them up.": 1.5,
            "This is the last microbatch's share alone.": 2.0,
            "This is the first microbatch's share alone.": 1.0,
        },
    )  # fmt: skip
    expect(
        "loss.requires_grad", bool(getattr(loss, "requires_grad", False)), False, given=given,
        likely="The loss still holds its graph, and with it the head's tensors: detach it.",
    )  # fmt: skip


@checks("layer_major_backward")
def layer_by_layer(algo: Algo) -> None:
    """Up without a graph and down with one, all microbatches go through a layer before the next layer."""
    _, watch = run(algo, tiny_model(), two_microbatches())
    up = watch.calls[:4]
    expect(
        "layers in the order in which they run on the way up", [call.layer for call in up], [0, 0, 1, 1], given=TWO,
        likely="On the way up each layer runs once for each microbatch.",
        mistakes={
            "Each microbatch goes through all layers: the loop over layers must be the outer one.": [0, 1, 0, 1],
            "No layer runs.": [],
        },
    )  # fmt: skip
    expect(
        "whether a graph is made, for each run on the way up", [call.graph for call in up], [False] * 4, given=TWO,
        likely="The way up needs no graph at all: torch.no_grad().",
        mistakes={"A graph is kept on the way up, and with it what every layer saves; this is what the pass avoids.":
                  [True] * 4},
    )  # fmt: skip
    down = watch.calls[4:]
    expect(
        "layers in the order in which they run on the way down", [call.layer for call in down], [1, 1, 0, 0], given=TWO,
        likely="On the way down each layer runs again, once for each microbatch.",
        mistakes={
            "The way down starts at the first layer; the gradient comes from the last.": [0, 0, 1, 1],
            "No layer runs again on the way down, so nothing can go back through it.": [],
            "Each microbatch goes down through all layers: the loop over layers must be the outer one.": [1, 0, 1, 0],
        },
    )  # fmt: skip
    expect(
        "whether a graph is made, for each run on the way down", [call.graph for call in down], [True] * 4, given=TWO,
        likely="The way down needs a graph: it lies outside torch.no_grad().",
    )  # fmt: skip


@checks("layer_major_backward")
def way_down(algo: Algo) -> None:
    """On the way down a layer gets the input that it had on the way up, and the gradient of its own output."""
    model = tiny_model()
    _, watch = run(algo, model, two_microbatches())
    right, _ = plain(model, two_microbatches())
    for layer in (1, 0):
        right_calls = [call for call in right.calls if call.layer == layer]
        inputs = [call.hidden[0, 0] for call in right_calls]
        outputs = [call.output[0, 0] for call in right_calls if call.output is not None]
        got = [call.hidden[0, 0] for call in watch.calls[4:] if call.layer == layer]
        if len(got) == 2 and torch.allclose(got[0], inputs[1]) and torch.allclose(got[1], inputs[0]):
            got.reverse()  # the last microbatch first is as good
        expect(
            f"the first token's hidden state that goes into layer {layer} on the way down, for both microbatches",
            got, inputs, given=TWO, likely="Keep what goes into each layer, for each microbatch.",
            mistakes={
                "This is what comes out of the layer: keep what goes in.": outputs,
                "Both are microbatch 0's.": [inputs[0]] * 2,
                "Both are microbatch 1's.": [inputs[1]] * 2,
            },
            tolerance=1e-8,
        )  # fmt: skip
    for layer in (1, 0):
        right_calls = [call for call in right.calls if call.layer == layer]
        got_calls = [call for call in watch.calls[4:] if call.layer == layer]
        wanted = [call.gradient[0, 0] for call in right_calls if call.gradient is not None]
        gradients: list[Any] = []
        for call in right_calls:  # in the order of the microbatches, whichever order they came down in
            fits = [c for c in got_calls if torch.allclose(c.hidden, call.hidden)]
            gradients.append(fits[0].gradient[0, 0] if fits and fits[0].gradient is not None else None)
        expect(
            f"the gradient at the first token of layer {layer}'s output, for both microbatches",
            gradients, wanted, given=TWO,
            likely="Pass on the gradient of the input that the layer above had, for this microbatch." if layer == 0
            else "It comes from the head: final_norm, then loss_of, then the gradient of the last layer's output.",
            mistakes={
                "Both are microbatch 0's: keep one gradient for each microbatch.": [wanted[0]] * 2,
                "Both are microbatch 1's: keep one gradient for each microbatch.": [wanted[1]] * 2,
                "They are exchanged between the microbatches.": wanted[::-1],
                "They are divided by the number of microbatches; loss_of gives shares that add up already.":
                    [gradient / 2 for gradient in wanted],
                "Nothing goes back through the layer.": [None, None],
            },
            tolerance=1e-8,
        )  # fmt: skip


@checks("layer_major_backward")
def gradients_of_every_part(algo: Algo) -> None:
    """Final norm, head, layers and embedding have the gradient of all microbatches."""
    model = tiny_model()
    run(algo, model, two_microbatches())
    got = {name: gradient_of(parameter).clone() for name, parameter in model.named_parameters()}
    right, first, second = (plain(model, two_microbatches(), only)[1] for only in (None, 0, 1))
    last_norm = "post_feedforward_layernorm.weight"
    parts = {  # what it is, in which parameter, and what to say if it has no gradient
        "the final norm's gradient": (
            "model.norm.weight", "The final norm has no gradient: run it with a graph, before loss_of."
        ),
        "the gradient of the head's row for token 2": ("lm_head.weight", "The head has no gradient."),
        "the gradient of layer 1's last norm": (f"model.layers.1.{last_norm}", "Layer 1 has no gradient."),
        "the gradient of layer 0's last norm": (f"model.layers.0.{last_norm}", "Layer 0 has no gradient."),
        "the gradient of the embedding's row for token 2": (
            "model.embed_tokens.weight", "The embedding has no gradient: it is the last part on the way down."
        ),
    }  # fmt: skip
    for what, (name, none) in parts.items():
        mine, whole, of_first, of_last = (
            t[name] if t[name].ndim == 1 else t[name][2] for t in (got, right, first, second)
        )
        expect(
            what, mine, whole, given=TWO, tolerance=1e-8,
            likely="Go back through this part once for each microbatch, with the gradient of that microbatch.",
            mistakes={
                none: torch.zeros_like(whole),
                "This is the last microbatch's gradient alone: gradients of microbatches add up.": of_last,
                "This is the first microbatch's gradient alone: gradients of microbatches add up.": of_first,
                "It is divided by the number of microbatches; loss_of gives shares that add up already.": whole / 2,
            },
        )  # fmt: skip
    norm = model.model.norm.weight
    norm.grad = torch.ones_like(norm)
    algo.layer_major_backward(model, two_microbatches(), share_of(model, two_microbatches()))
    expect(
        "the final norm's gradient", norm.grad, 1 + right["model.norm.weight"], given=f"{TWO}; it has gradients of 1",
        tolerance=1e-8, likely="Gradients are added to those already there; the caller zeroes them.",
    )  # fmt: skip


@checks("layer_major_backward")
def uneven_microbatches_are_exact(algo: Algo) -> None:
    """With microbatches of different sizes every gradient is that of the plain backward pass."""
    model = tiny_model()
    _, right = plain(model, uneven_microbatches())
    run(algo, model, uneven_microbatches())
    for name, parameter in model.named_parameters():
        difference = (gradient_of(parameter) - right[name]).abs().max().item()
        expect(
            f"the largest difference from loss.backward() in {name}", difference, 0.0, given=UNEVEN, tolerance=1e-9,
            likely="If a check above fails, mend that first. Nothing in the pass may depend on the size of a "
            "microbatch: rows and lengths differ.",
        )  # fmt: skip


@checks("layer_major_backward")
def parts_are_reported_when_complete(algo: Algo) -> None:
    """on_layer_done is called once for each part, when its gradients are complete."""
    model = tiny_model()
    reported: list[str] = []
    norms = {"head": "model.norm.weight", "layer 1": "model.layers.1.post_feedforward_layernorm.weight",
             "layer 0": "model.layers.0.post_feedforward_layernorm.weight",
             "embedding": "model.embed_tokens.weight"}  # fmt: skip
    at_report: dict[str, Tensor] = {}

    def done(name: str) -> None:
        reported.append(name)
        if name in norms:
            at_report[name] = gradient_of(model.get_parameter(norms[name])).clone()

    run(algo, model, two_microbatches(), done=done)
    expect(
        "the parts that were reported", reported, list(norms), given=TWO,
        likely="Report the head, then the layers from the last to the first, then the embedding: each once, after its "
        "last microbatch.",
        mistakes={
            "on_layer_done is never called.": [],
            "Parts are reported once for each microbatch; they are complete after the last one only.":
                [name for name in norms for _ in range(2)],
            "The head is not reported.": list(norms)[1:],
            "The embedding is not reported.": list(norms)[:-1],
        },
    )  # fmt: skip
    for name, parameter in norms.items():
        at_end = gradient_of(model.get_parameter(parameter))  # whether it is right, other checks ask
        difference = (at_report[name] - at_end).abs().max().item()
        expect(
            f"what was still missing in {parameter} when {name!r} was reported", difference, 0.0, given=TWO,
            tolerance=1e-9, likely="The part is reported before its last microbatch has come back through it.",
        )  # fmt: skip
