"""Checks of `scoring.py`: log-probabilities and entropies, from all logits at once and from blocks of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import Olmo2Config, Olmo2ForCausalLM

from a5lib.course.checking import checks, expect, expect_keys
from a5lib.course.exercises import Algo

NAN = math.nan
# three tokens with the probabilities 1/8, 2/8 and 5/8
EIGHTHS = torch.tensor([0.0, math.log(2), math.log(5)])
LOG_EIGHTHS = torch.tensor([math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)])
EIGHTHS_WORDS = "logits [0, ln 2, ln 5] (probabilities 1/8, 2/8, 5/8) at each position"
HALF_AND_QUARTERS = torch.tensor([math.log(2), 0.0, 0.0])  # probabilities 1/2, 1/4, 1/4
ENTROPY = 1.5 * math.log(2)  # 1/2 ln 2 + 2 * 1/4 ln 4
VOCABULARY = 97
TWO = ("log_probs", "token_entropy")
SHIFTED = "The labels were shifted; labels[t] is the label of position t already."


def tiny_model(bias: bool = False) -> Olmo2ForCausalLM:
    """A random OLMo-2 with 97 tokens; with `bias` its head adds one."""
    torch.manual_seed(0)
    config = Olmo2Config(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
                         bos_token_id=None, eos_token_id=1)  # fmt: skip
    model = Olmo2ForCausalLM(config).eval()
    if bias:
        model.lm_head = torch.nn.Linear(8, VOCABULARY, bias=True)
        torch.nn.init.normal_(model.lm_head.bias)
    return model


class Bigrams(torch.nn.Module):
    """A model whose next-token logits depend on the last token only. It remembers its named arguments."""

    def __init__(self) -> None:
        super().__init__()
        # after token 0: 1/8, 2/8, 5/8; after token 1: 5/8, 1/8, 2/8; after token 2: 2/8, 5/8, 1/8
        self.table = torch.nn.Parameter(torch.stack([EIGHTHS.roll(shift) for shift in range(3)]))
        self.arguments: dict[str, Any] = {}

    def forward(self, input_ids: Tensor, **arguments: Any) -> SimpleNamespace:
        self.arguments = arguments
        return SimpleNamespace(logits=self.table[input_ids])


def looks_like_logits(tensor: Tensor) -> bool:
    """[..., V], and no view: the head's weight transposed is one."""
    return tensor.ndim > 1 and tensor.shape[-1] == VOCABULARY and tensor._base is None


@contextmanager
def rows_of_logits() -> Iterator[list[int]]:
    """Collects how many rows of logits each tensor had that came to be, forward and backward."""
    rows: list[int] = []

    class Spy(TorchFunctionMode):
        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and looks_like_logits(result):
                rows.append(result.numel() // VOCABULARY)
            return result

    with Spy():
        yield rows


@contextmanager
def kept_logits() -> Iterator[list[int]]:
    """Collects the numbers of logits in the tensors that are kept for the backward pass."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if looks_like_logits(tensor):
            kept.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def expect_gradient(scored: Any, given: str) -> None:
    if not isinstance(scored, Tensor):
        expect("log_probs", scored, torch.zeros(0), given=given, likely="")
    likely = "The result was detached, or computed under no_grad: training needs its gradient."
    expect("log_probs.requires_grad", scored.requires_grad, True, given=given, likely=likely)


def expect_names(what: str, got: Any, entropy: bool) -> None:
    expect_keys(what, got, TWO if entropy else TWO[:1])
    expect("the names", sorted(got), sorted(TWO if entropy else TWO[:1]), given=f"return_token_entropy={entropy}",
           likely="token_entropy is returned only where it is asked for.")  # fmt: skip


@checks("log_probs_from_logits")
def label_minus_log_sum(algo: Algo) -> None:
    """The log-probability is the label's logit minus the logsumexp of all."""
    logits, labels = EIGHTHS.expand(3, 3), torch.tensor([1, 0, 2])
    got = algo.log_probs_from_logits(logits, labels)
    expect_names("log_probs_from_logits(...)", got, entropy=False)
    expect(
        "log_probs",
        got["log_probs"],
        LOG_EIGHTHS[[1, 0, 2]],
        given=f"{EIGHTHS_WORDS}, labels [1, 0, 2]",
        likely="Pick the logit of each label (gather), and subtract logsumexp over the last dimension.",
        mistakes={
            SHIFTED: LOG_EIGHTHS[[0, 2, 1]],
            "These are the logits of the labels: subtract logsumexp.": EIGHTHS[[1, 0, 2]],
            "These are probabilities, not their logarithms.": LOG_EIGHTHS[[1, 0, 2]].exp(),
            "The sign: the logarithm of a probability is below 0.": -LOG_EIGHTHS[[1, 0, 2]],
            "These are all log-probabilities: pick one for each label.": LOG_EIGHTHS.expand(3, 3),
            "This is the likeliest token at each position and not the label.": LOG_EIGHTHS[[2, 2, 2]],
        },
    )


@checks("log_probs_from_logits")
def temperature_divides_logits(algo: Algo) -> None:
    """The temperature divides the logits."""
    got = algo.log_probs_from_logits(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=0.5)
    expect_keys("log_probs_from_logits(...)", got, TWO[:1])
    expect(
        "log_probs",
        got["log_probs"],
        torch.tensor([-0.142932]),  # logits [4, 2, 0]: -ln(1 + e^-2 + e^-4)
        given="logits [2, 1, 0], label 0, temperature 0.5",
        likely="Divide the logits by the temperature before anything else.",
        mistakes={
            "The temperature divides the log-probabilities; it must divide the logits.": torch.tensor([-0.815212]),
            "The logits were multiplied by the temperature; divide them.": torch.tensor([-0.680267]),
            "The temperature is not used.": torch.tensor([-0.407606]),
        },
    )


@checks("log_probs_from_logits")
def entropy_of_the_distribution(algo: Algo) -> None:
    """The entropy is the mean of -log p under p, at the same temperature."""
    for temperature, right in ((1.0, ENTROPY), (0.5, 0.867563)):  # 0.5: p = 4/6, 1/6, 1/6: ln 6 - 4/6 ln 4
        logits = HALF_AND_QUARTERS.unsqueeze(0)
        got = algo.log_probs_from_logits(logits, torch.tensor([1]), True, temperature)
        expect_names("log_probs_from_logits(...)", got, entropy=True)
        expect(
            "token_entropy",
            got["token_entropy"],
            torch.tensor([right]),
            given=f"logits [ln 2, 0, 0] (probabilities 1/2, 1/4, 1/4 at temperature 1), temperature {temperature}",
            likely="The entropy is logsumexp(z) - sum(p z) with z = logits / temperature.",
            mistakes={
                "The sign: the entropy is -sum(p log p), never below 0.": torch.tensor([-right]),
                "The temperature is not used in the entropy.": torch.tensor([ENTROPY]),
                "This is in bits; use the natural logarithm.": torch.tensor([right / math.log(2)]),
                "This is sum(p z): subtract it from logsumexp(z).": torch.tensor([0.5 * math.log(2)]),
                "This is -log p of the label; the entropy is its mean over all tokens, weighted by p.": torch.tensor(
                    [2 * math.log(2)]
                ),
            },
        )


@checks("log_probs_from_logits")
def impossible_tokens(algo: Algo) -> None:
    """A token with logit -inf adds nothing, in value and gradient."""
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    given = "logits [0, 0, -inf], label 0"
    got = algo.log_probs_from_logits(logits, torch.tensor([0]), True)
    expect_keys("log_probs_from_logits(...)", got, TWO)
    likely = "Replace infinite logits by 0 in the product p z; p is 0 there."
    expect(
        "token_entropy",
        got["token_entropy"],
        torch.tensor([math.log(2)]),
        given=given,
        likely=likely,
        mistakes={"0 times -inf is NaN: replace the -inf before the product.": torch.tensor([NAN])},
    )
    expect_gradient(got["log_probs"], given)
    (got["log_probs"] + got["token_entropy"]).sum().backward()
    # both tokens have p = 1/2, where the entropy is flat; log p has the slopes 1 - 1/2 and -1/2
    expect(
        "the gradient",
        logits.grad,
        torch.tensor([[0.5, -0.5, 0.0]]),
        given=given,
        likely=likely,
        mistakes={
            "The gradient of 0 times -inf is NaN, too: replace the -inf before the product, not the result after it.": (
                torch.full((1, 3), NAN)
            )
        },
    )


@checks("log_probs_from_logits")
def float32_out_of_bf16(algo: Algo) -> None:
    """Logits in bf16 are turned to float32 before they are scored."""
    got = algo.log_probs_from_logits(torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0]), True)
    expect_keys("log_probs_from_logits(...)", got, TWO)
    given = "bf16 logits [0, 0], label 0"
    for name, right in zip(TWO, (-math.log(2), math.log(2)), strict=True):
        rounded = torch.tensor([right]).bfloat16().float()
        expect(
            name,
            got[name],
            torch.tensor([right]),
            given=given,
            likely="Turn the logits to float32 first.",
            mistakes={"Computed in bf16, which has two to three digits: turn the logits to float32 first.": rounded},
        )
        expect(f"the type of {name}", got[name].dtype, torch.float32, given=given, likely="The result is float32.")


@checks("log_probs_from_logits")
def large_logits_keep_digits(algo: Algo) -> None:
    """Logits around 10,000 lose no digits."""
    got = algo.log_probs_from_logits(torch.full((1, 4), 1e4), torch.tensor([0]), True)
    expect_keys("log_probs_from_logits(...)", got, TWO)
    for name, right in zip(TWO, (-math.log(4), math.log(4)), strict=True):
        expect(name, got[name], torch.tensor([right]), given="four logits of 10,000, label 0",
               likely="Subtract the largest logit first: no probability changes, and small numbers keep their digits "
               "(float32 has about seven).")  # fmt: skip


@checks("log_probs_from_logits")
def gradient_of_log_prob(algo: Algo) -> None:
    """The gradient of a log-probability is (label or not) minus p."""
    logits = EIGHTHS.clone().unsqueeze(0).requires_grad_()
    given = f"{EIGHTHS_WORDS}, label 1"
    got = algo.log_probs_from_logits(logits, torch.tensor([1]))
    expect_keys("log_probs_from_logits(...)", got, TWO[:1])
    expect_gradient(got["log_probs"], given)
    got["log_probs"].sum().backward()
    expect("the gradient", logits.grad, torch.tensor([[-0.125, 0.75, -0.625]]), given=given,
           likely="Part of the computation was detached.")  # fmt: skip


@checks("get_response_log_probs")
def one_forward_pass(algo: Algo) -> None:
    """The model's logits at position t score labels[t]."""
    model = Bigrams()
    given = "a model whose logits after tokens 0 and 1 give p = [1/8, 2/8, 5/8] and [5/8, 1/8, 2/8]"
    got = algo.get_response_log_probs(model, torch.tensor([[0, 1]]), torch.tensor([[1, 2]]), False)
    expect_names("get_response_log_probs(...)", got, entropy=False)
    expect(
        "log_probs",
        got["log_probs"],
        torch.tensor([[math.log(2 / 8), math.log(2 / 8)]]),
        given=f"{given}; input_ids [[0, 1]], labels [[1, 2]]",
        likely="Call the model once, and hand its .logits and the labels to log_probs_from_logits.",
        mistakes={
            "The input ids were scored and not the labels.": torch.tensor([[math.log(1 / 8), math.log(1 / 8)]]),
            SHIFTED: torch.tensor([[math.log(2 / 8)]]),
        },
    )
    expect_gradient(got["log_probs"], given)
    got["log_probs"].sum().backward()
    # each row of the table was used once: (label or not) - p
    right = torch.tensor([[-1.0, 6.0, -5.0], [-5.0, -1.0, 6.0], [0.0, 0.0, 0.0]]) / 8
    expect("the gradient of the model", model.table.grad, right, given=given, likely="Part of the computation was "
           "detached.")  # fmt: skip


@checks("get_response_log_probs")
def entropy_and_temperature_passed_on(algo: Algo) -> None:
    """Entropy and temperature reach the scores."""
    model = Bigrams()
    with torch.no_grad():
        model.table[0] = HALF_AND_QUARTERS
    got = algo.get_response_log_probs(model, torch.tensor([[0]]), torch.tensor([[0]]), True, 0.5)
    expect_names("get_response_log_probs(...)", got, entropy=True)
    given = "logits [ln 2, 0, 0], label 0, temperature 0.5 (so p = 4/6, 1/6, 1/6)"
    likely = "Pass temperature and return_token_entropy on."
    expect("log_probs", got["log_probs"], torch.tensor([[math.log(4 / 6)]]), given=given, likely=likely,
           mistakes={"The temperature was not passed on.": torch.tensor([[-math.log(2)]])})  # fmt: skip
    expect("token_entropy", got["token_entropy"], torch.tensor([[0.867563]]), given=given, likely=likely)


@checks("get_response_log_probs")
def attention_mask_passed_on(algo: Algo) -> None:
    """Mask and positions reach the model, so that padding on the left changes nothing."""
    model = Bigrams()
    mask = torch.tensor([[0, 0, 1, 1]])
    ids = torch.tensor([[0, 0, 1, 2]])
    algo.get_response_log_probs(model, ids, ids, False, attention_mask=mask)
    expect(
        "the model's named arguments",
        model.arguments,
        {"attention_mask": mask, "position_ids": torch.tensor([[0, 0, 0, 1]])},
        given="attention_mask [[0, 0, 1, 1]]",
        likely="forward_arguments(model, attention_mask) gives what the model needs: pass it on with **.",
        mistakes={
            "attention_mask was not passed on: the model reads the padding on the left.": {},
            "The positions are missing, so they count the padding on the left: use forward_arguments.": {
                "attention_mask": mask
            },
        },
    )
    padded_like_alone(algo.get_response_log_probs)


def padded_like_alone(score: Callable[..., Any]) -> None:
    """Padding on the left, with an attention mask, must give the scores of the ids alone."""
    model = tiny_model()
    ids, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]])
    alone = score(model, ids, labels, False)
    pad, mask = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0, 0, 1, 1, 1]])
    padded = score(model, torch.cat([pad, ids], 1), torch.cat([pad, labels], 1), False, attention_mask=mask)
    for got in (alone, padded):
        expect_keys("the scores", got, TWO[:1])
    expect(
        "log_probs of the real tokens",
        padded["log_probs"][:, 2:],
        alone["log_probs"].detach(),
        given="ids [[5, 6, 7]] alone, and [[0, 0, 5, 6, 7]] with attention_mask [[0, 0, 1, 1, 1]]",
        likely="attention_mask was not passed on: use forward_arguments(model, attention_mask).",
        tolerance=1e-4,
    )


@checks("log_probs_in_blocks")
def every_position_scored(algo: Algo) -> None:
    """All positions are scored, also those of a shorter last block."""
    given = f"{EIGHTHS_WORDS} (the head is the identity), labels [1, 0, 2], block_size 2"
    got = algo.log_probs_in_blocks(EIGHTHS.expand(3, 3), torch.eye(3), torch.tensor([1, 0, 2]), 2)
    expect_names("log_probs_in_blocks(...)", got, entropy=False)
    expect(
        "log_probs",
        got["log_probs"],
        LOG_EIGHTHS[[1, 0, 2]],
        given=given,
        likely="Score block after block, and join the results in order.",
        mistakes={
            "The last block, which is shorter, is missing.": LOG_EIGHTHS[[1, 0]],
            "Only the last block was returned.": LOG_EIGHTHS[[2]],
            "Every block got the labels of the first one.": LOG_EIGHTHS[[1, 0, 1]],
        },
    )


@checks("log_probs_in_blocks")
def shape_of_the_labels(algo: Algo) -> None:
    """The result has the shape of the labels, also for no labels at all."""
    labels = torch.tensor([[1, 0, 2], [2, 2, 0]])
    got = algo.log_probs_in_blocks(EIGHTHS.expand(2, 3, 3), torch.eye(3), labels, 4, True)
    expect_names("log_probs_in_blocks(...)", got, entropy=True)
    given = f"{EIGHTHS_WORDS}, labels [[1, 0, 2], [2, 2, 0]], block_size 4"
    expect("log_probs", got["log_probs"], LOG_EIGHTHS[labels], given=given, likely="Flatten [B, T] to positions, and "
           "give the result the labels' shape at the end.")  # fmt: skip
    right = torch.full((2, 3), 0.900256)  # -(1/8 ln 1/8 + 2/8 ln 2/8 + 5/8 ln 5/8)
    expect("token_entropy", got["token_entropy"], right, given=given, likely="Return the entropies as well.")
    empty = algo.log_probs_in_blocks(torch.zeros(0, 3), torch.eye(3), torch.zeros(0, dtype=torch.int64), 4)
    expect_keys("log_probs_in_blocks(...)", empty, TWO[:1])
    expect("log_probs", empty["log_probs"], torch.zeros(0), given="no positions", likely="An empty batch is allowed.")


@checks("log_probs_in_blocks")
def bias_and_temperature(algo: Algo) -> None:
    """The head's bias and the temperature are used."""
    got = algo.log_probs_in_blocks(torch.zeros(1, 3), torch.eye(3), torch.tensor([1]), 4, head_bias=EIGHTHS)
    expect_keys("log_probs_in_blocks(...)", got, TWO[:1])
    expect("log_probs", got["log_probs"], LOG_EIGHTHS[[1]], given="hidden states of 0, head_bias [0, ln 2, ln 5]",
           likely="logits = hidden_states @ head_weight.T + head_bias.",
           mistakes={"The bias is forgotten.": torch.tensor([math.log(1 / 3)])})  # fmt: skip
    hidden = HALF_AND_QUARTERS.unsqueeze(0)
    got = algo.log_probs_in_blocks(hidden, torch.eye(3), torch.tensor([0]), 4, True, 0.5)
    expect_keys("log_probs_in_blocks(...)", got, TWO)
    given = "logits [ln 2, 0, 0], label 0, temperature 0.5 (so p = 4/6, 1/6, 1/6)"
    expect("log_probs", got["log_probs"], torch.tensor([math.log(4 / 6)]), given=given, likely="Pass it on.",
           mistakes={"The temperature was not passed on.": torch.tensor([-math.log(2)])})  # fmt: skip


@checks("log_probs_in_blocks")
def gradients_of_the_whole(algo: Algo) -> None:
    """The gradients are those of the computation without blocks."""
    hidden = EIGHTHS.expand(3, 3).clone().requires_grad_()
    weight = torch.eye(3).requires_grad_()
    given = f"{EIGHTHS_WORDS} (the head is the identity), labels [1, 0, 2], block_size 2"
    got = algo.log_probs_in_blocks(hidden, weight, torch.tensor([1, 0, 2]), 2)
    expect_keys("log_probs_in_blocks(...)", got, TWO[:1])
    expect_gradient(got["log_probs"], given)
    got["log_probs"].sum().backward()
    right = torch.eye(3)[[1, 0, 2]] - LOG_EIGHTHS.exp()  # the label or not, minus p
    likely = "Blocks are for memory; no part of them may be detached."
    expect("the gradient of hidden_states", hidden.grad, right, given=given, likely=likely)
    expect("the gradient of head_weight", weight.grad, right.T @ EIGHTHS.expand(3, 3), given=given, likely=likely)


@checks("log_probs_in_blocks")
def no_logits_kept(algo: Algo) -> None:
    """No logits are kept for the backward pass, and at most one block of them exists."""
    hidden = torch.ones(2, 10, 4, requires_grad=True)
    weight = torch.ones(VOCABULARY, 4, requires_grad=True)
    given = f"two rows of 10 positions, {VOCABULARY} tokens, block_size 5"
    with rows_of_logits() as rows, kept_logits() as kept:
        got = algo.log_probs_in_blocks(hidden, weight, torch.arange(20).reshape(2, 10), 5)
        expect_keys("log_probs_in_blocks(...)", got, TWO[:1])
        expect_gradient(got["log_probs"], given)
        got["log_probs"].sum().backward()
    expect("the most rows of logits in one tensor", max(rows, default=0), 5, given=given,
           likely="Apply the head inside the block, to the hidden states of this block only.",
           mistakes={"A block has block_size columns of every row; split the positions of all rows.": 10})  # fmt: skip
    expect("numbers kept for the backward pass", sum(kept), 0, given=given,
           likely="The logits of every block are kept: head and score must both be in the function that is "
           "checkpointed.")  # fmt: skip


@checks("get_response_log_probs_in_blocks")
def same_as_the_whole(algo: Algo) -> None:
    """Values and gradients are those of the model's own logits."""
    model, ids, labels = tiny_model(), torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[6, 7, 8, 9, 1]])
    p = (model(ids).logits / 0.7).log_softmax(dim=-1)
    right = p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(p.exp() * p).sum(dim=-1)
    right.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    given = "a tiny OLMo-2, input_ids [[5, 6, 7, 8, 9]], labels [[6, 7, 8, 9, 1]], temperature 0.7, block_size 2"
    got = algo.get_response_log_probs_in_blocks(model, ids, labels, True, 0.7, block_size=2)
    expect_names("get_response_log_probs_in_blocks(...)", got, entropy=True)
    plain = model(ids).logits.log_softmax(dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expect("log_probs", got["log_probs"], right, given=given, tolerance=1e-4,
           likely="Use model.base_model(...).last_hidden_state and the head of model.get_output_embeddings().",
           mistakes={"The temperature was not passed on.": plain})  # fmt: skip
    expect("token_entropy", got["token_entropy"], entropy, given=given, likely="Pass it on.", tolerance=1e-4)
    expect_gradient(got["log_probs"], given)
    got["log_probs"].sum().backward()
    for name, parameter in model.named_parameters():
        expect(f"the gradient of {name}", parameter.grad, gradients[name], given=given, tolerance=1e-3,
               likely="Run the body with gradients, once, and detach nothing.")  # fmt: skip


@checks("get_response_log_probs_in_blocks")
def never_all_logits(algo: Algo) -> None:
    """The logits of all positions never exist at one time, and the body runs once."""
    model, ids = tiny_model(), torch.arange(2, 14).reshape(1, 12)
    runs: list[int] = []
    model.base_model.register_forward_hook(lambda *_: runs.append(1))
    with rows_of_logits() as rows:
        got = algo.get_response_log_probs_in_blocks(model, ids, ids, False, block_size=5)
        expect_names("get_response_log_probs_in_blocks(...)", got, entropy=False)
        expect_gradient(got["log_probs"], "a tiny OLMo-2")
        got["log_probs"].sum().backward()
    given = "a tiny OLMo-2, 12 positions, block_size 5"
    expect("the most rows of logits in one tensor", max(rows, default=0), 5, given=given,
           likely="All logits came to be: run model.base_model, not the model, and pass block_size on.")  # fmt: skip
    expect("the number of runs of the body", len(runs), 1, given=given, likely="The body is needed once; only the head "
           "works in blocks.")  # fmt: skip


@checks("get_response_log_probs_in_blocks")
def bias_and_padding(algo: Algo) -> None:
    """The head's bias is used, and padding on the left changes nothing."""
    model, ids = tiny_model(bias=True), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        right = model(ids).logits.log_softmax(dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        hidden = model.base_model(ids).last_hidden_state
        forgotten = (hidden @ model.lm_head.weight.T).log_softmax(dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    got = algo.get_response_log_probs_in_blocks(model, ids, ids, False)
    expect_keys("get_response_log_probs_in_blocks(...)", got, TWO[:1])
    expect("log_probs", got["log_probs"], right, given="a tiny OLMo-2 whose head has a bias", tolerance=1e-4,
           likely="logits = hidden_states @ head.weight.T + head.bias.",
           mistakes={"The bias is forgotten: pass it on as head_bias.": forgotten})  # fmt: skip
    padded_like_alone(algo.get_response_log_probs_in_blocks)
