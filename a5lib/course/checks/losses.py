"""Checks of `losses.py`: the loss of every token under five methods, and one number out of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from a5lib.course.checking import checks, expect, expect_keys, expect_pair
from a5lib.course.exercises import Algo

NAN = math.nan
TWO, HALF = math.log(2), -math.log(2)  # log-ratios of a probability that doubled, and of one that halved
METHODS = ("none", "noclip", "grpo", "gspo", "cispo")


def token_losses(
    algo: Algo,
    advantages: list[float],
    new: Tensor,
    method: str,
    old: Tensor | None = None,
    cliprange: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Call the student's function, and look at the kind of what it returns before its values are used."""
    what = f"compute_policy_gradient_loss(..., {method!r})"
    result = algo.compute_policy_gradient_loss(torch.tensor(advantages), new, method, old, cliprange, mask)
    loss, metadata = expect_pair(what, result)
    names = ["clipped", "clip_fraction"] + ["ratio"] * (method != "none")
    if isinstance(metadata, dict):
        expect("the keys missing in metadata", [name for name in names if name not in metadata], [],
               given=f'"{method}"', likely="Return the losses and a dict with these keys, too.")  # fmt: skip
    expect_keys("metadata", metadata, names)
    if not isinstance(loss, Tensor) or loss.shape != new.shape:
        expect("loss", loss, torch.zeros_like(new), given=f"log-probabilities {tuple(new.shape)}", likely="")
    expect(
        "the type of loss",
        loss.dtype,
        torch.float32,
        given=f"log-probabilities of type {new.dtype}",
        likely="Compute with `new`, `old` and `advantages`, which are float32, and not with the arguments themselves.",
    )
    return loss, metadata


def from_ratios(ratios: list[list[float]], log_prob: float = -1.0) -> tuple[Tensor, Tensor]:
    """New log-probabilities that are all `log_prob`, with gradient, and the old ones that give these ratios."""
    new = torch.full((len(ratios), len(ratios[0])), log_prob, requires_grad=True)
    return new, new.detach() - torch.tensor(ratios).log()


@checks("compute_policy_gradient_loss")
def negated_objective(algo: Algo) -> None:
    """With "none" the loss of a token is -A log p."""
    new = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    loss, _ = token_losses(algo, [2.0, -1.0], new, "none")
    expect(
        "loss",
        loss,
        torch.tensor([[2.0, 4.0], [-3.0, -4.0]]),
        given='"none", log-probabilities [[-1, -2], [-3, -4]], advantages [2, -1]',
        likely="Multiply the log-probability by the advantage of its row, and negate.",
        mistakes={
            "The sign: an optimizer makes the loss smaller, so the loss is the negated objective.": -torch.tensor(
                [[2.0, 4.0], [-3.0, -4.0]]
            ),
            "The advantages were spread over the columns: each belongs to a row, so its shape must be [B, 1].": (
                torch.tensor([[2.0, -2.0], [6.0, -4.0]])
            ),
            "The advantages are missing: this is -log p.": -new,
            "This is -A p: the policy gradient has the log-probability in it.": -torch.tensor([[2.0], [-1.0]])
            * new.exp(),
        },
    )


@checks("compute_policy_gradient_loss")
def gradient_reaches_the_policy(algo: Algo) -> None:
    """The gradient flows to the policy's log-probabilities."""
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = token_losses(algo, [2.0], new, "none")
    given = '"none", log-probabilities [[-1, -2]], advantage 2'
    expect("loss.requires_grad", loss.requires_grad, True, given=given, likely="The policy's log-probabilities were "
           "detached, or the loss was computed under no_grad.")  # fmt: skip
    loss.sum().backward()
    expect("the gradient", new.grad, torch.tensor([[-2.0, -2.0]]), given=given, likely="The slope of -A log p is -A.")


@checks("compute_policy_gradient_loss")
def importance_ratio(algo: Algo) -> None:
    """With "noclip" the loss is -A w, where w is the new probability divided by the old one."""
    new, old = from_ratios([[2.0, 0.5]], log_prob=-2.0)
    given = (
        '"noclip", new log-probabilities [-2, -2], old ones [-2.6931, -1.3069] (p doubled, p halved), advantage 3, '
        "cliprange 0.2, which is not used here"
    )
    loss, metadata = token_losses(algo, [3.0], new, "noclip", old, 0.2)
    expect(
        "loss",
        loss,
        torch.tensor([[-6.0, -1.5]]),
        given=given,
        likely="The ratio is exp of the difference of the log-probabilities; the loss is -A times the ratio.",
        mistakes={
            "The ratio is upside down: it is new over old.": torch.tensor([[-1.5, -6.0]]),
            'The ratio is clipped; "noclip" takes it as it is.': torch.tensor([[-3.6, -1.5]]),
            "The sign: the loss is the negated objective.": torch.tensor([[6.0, 1.5]]),
            "The ratio is a difference of log-probabilities without exp.": torch.tensor([[-3 * TWO, -3 * HALF]]),
            "The log-probabilities were divided by each other: the ratio of probabilities is exp of the difference of "
            "their logarithms.": -3 * torch.tensor([[2 / (2 + TWO), 2 / (2 + HALF)]]),
            "This is w A log p: w itself has a gradient here, so the log-probability is not needed.": torch.tensor(
                [[12.0, 3.0]]
            ),
        },
    )
    expect("metadata['ratio']", metadata["ratio"], torch.tensor([[2.0, 0.5]]), given=given, likely="Store the ratio.")
    expect("metadata['ratio'].requires_grad", metadata["ratio"].requires_grad, False, given=given,
           likely="Detach the ratio before you store it: it is only logged.")  # fmt: skip
    expect("loss.requires_grad", loss.requires_grad, True, given=given, likely="The ratio was detached in the loss.")
    loss.sum().backward()
    expect("the gradient", new.grad, torch.tensor([[-6.0, -1.5]]), given=given,
           likely="The slope of -A w in log p is -A w.")  # fmt: skip


@checks("compute_policy_gradient_loss")
def no_gradient_to_the_old_policy(algo: Algo) -> None:
    """The old log-probabilities are constants."""
    new, old = from_ratios([[2.0]])
    old.requires_grad_()
    loss, _ = token_losses(algo, [1.0], new, "noclip", old)
    loss.sum().backward()
    expect("the gradient of old_log_probs", old.grad, None, given='"noclip", old_log_probs that require a gradient',
           likely="old_log_probs was not detached: use `old`, which is.")  # fmt: skip


@checks("compute_policy_gradient_loss")
def clipped_for_a_good_response(algo: Algo) -> None:
    """With "grpo" and A > 0 only ratios above 1 + eps are cut."""
    new, old = from_ratios([[2.0, 0.5, 1.1]])
    given = '"grpo", ratios [2, 0.5, 1.1], advantage 1, cliprange 0.2'
    loss, _ = token_losses(algo, [1.0], new, "grpo", old, 0.2)
    expect(
        "loss",
        loss,
        torch.tensor([[-1.2, -0.5, -1.1]]),  # -min(2, 1.2), -min(0.5, 0.8), -min(1.1, 1.1)
        given=given,
        likely="Take the smaller of A w and A clip(w, 1 - eps, 1 + eps), then negate.",
        mistakes={
            "The wrong side is clipped: it is the minimum of the two objectives, not the maximum.": torch.tensor(
                [[-2.0, -0.8, -1.1]]
            ),
            "Only the clipped objective is used; it must be the smaller of the clipped and the unclipped one.": (
                torch.tensor([[-1.2, -0.8, -1.1]])
            ),
            "Nothing is clipped.": torch.tensor([[-2.0, -0.5, -1.1]]),
            "The ratio was clipped to -eps and eps; the range lies around 1.": torch.tensor([[-0.2, -0.2, -0.2]]),
            "The sign: the loss is the negated objective.": torch.tensor([[1.2, 0.5, 1.1]]),
        },
    )
    loss.sum().backward()
    expect(
        "the gradient",
        new.grad,
        torch.tensor([[0.0, -0.5, -1.1]]),
        given=given,
        likely="A clipped token has no gradient; the others have -A w.",
    )


@checks("compute_policy_gradient_loss")
def clipped_for_a_bad_response(algo: Algo) -> None:
    """With "grpo" and A < 0 only ratios below 1 - eps are cut."""
    new, old = from_ratios([[2.0, 0.5, 1.1]])
    loss, _ = token_losses(algo, [-1.0], new, "grpo", old, 0.2)
    expect(
        "loss",
        loss,
        torch.tensor([[2.0, 0.8, 1.1]]),  # -min(-2, -1.2), -min(-0.5, -0.8), -min(-1.1, -1.1)
        given='"grpo", ratios [2, 0.5, 1.1], advantage -1, cliprange 0.2',
        likely="Take the smaller of A w and A clip(w, 1 - eps, 1 + eps), then negate.",
        mistakes={
            "The smaller of w and clip(w) was taken before the multiplication by A. Multiply first: a negative A turns "
            "the order round.": torch.tensor([[1.2, 0.5, 1.1]]),
            "Only the upper end 1 + eps is clipped; the lower end 1 - eps is missing.": torch.tensor([[2.0, 0.5, 1.1]]),
            "Only the clipped objective is used; it must be the smaller of the clipped and the unclipped one.": (
                torch.tensor([[1.2, 0.8, 1.1]])
            ),
        },
    )


@checks("compute_policy_gradient_loss")
def clip_flags(algo: Algo) -> None:
    """ "clipped" marks the response tokens whose loss the clipping changed."""
    mask = torch.tensor([[True, True, True, False]])
    for advantage, right in ((1.0, [True, False, False, False]), (-1.0, [False, True, False, False])):
        new, old = from_ratios([[2.0, 0.5, 1.1, 2.0]])
        given = f'"grpo", ratios [2, 0.5, 1.1, 2], the last one masked, advantage {advantage:.0f}, cliprange 0.2'
        _, metadata = token_losses(algo, [advantage], new, "grpo", old, 0.2, mask)
        expect(
            "metadata['clipped']",
            metadata["clipped"],
            torch.tensor([right]),
            given=given,
            likely="Compare the clipped objective with the unclipped one; clipping changes the loss where it is lower.",
            mistakes={
                "Masked positions are counted as clipped.": torch.tensor([[True, False, False, True]]),
                "Every ratio outside the range is marked; one side of it is not clipped, and which depends on the sign "
                "of A.": torch.tensor([[True, True, False, False]]),
                "Nothing is marked.": torch.zeros(1, 4, dtype=torch.bool),
            },
        )
        expect(
            "metadata['clip_fraction']",
            metadata["clip_fraction"],
            torch.tensor(1 / 3),
            given=given,
            likely="Divide the number of clipped tokens by the number of response tokens.",
            mistakes={"The share is over all positions: padding is in the divisor.": torch.tensor(0.25)},
        )


@checks("compute_policy_gradient_loss")
def sequence_ratio(algo: Algo) -> None:
    """With "gspo" a response has one ratio, exp of its mean log-ratio, which is clipped as a token's in "grpo"."""
    new, old = from_ratios([[2.0, 8.0], [0.5, 0.5]])
    given = '"gspo", token ratios [[2, 8], [0.5, 0.5]], advantages [1, 1], cliprange 100'
    loss, _ = token_losses(algo, [1.0, 1.0], new, "gspo", old, 100.0, torch.ones(2, 2, dtype=torch.bool))
    expect(
        "loss",
        loss,
        torch.tensor([[-4.0, -4.0], [-0.5, -0.5]]),  # exp((ln 2 + ln 8) / 2) = sqrt(16) = 4
        given=given,
        likely="Average the log-ratios of a row, then exp; every token of the row has this ratio.",
        mistakes={
            "The log-ratios were summed; GSPO takes their mean.": torch.tensor([[-16.0, -16.0], [-0.25, -0.25]]),
            "The ratios were averaged; average the log-ratios, then exp.": torch.tensor([[-5.0, -5.0], [-0.5, -0.5]]),
            "Each token has its own ratio; GSPO has one for the response.": torch.tensor([[-2.0, -8.0], [-0.5, -0.5]]),
            "The mean is over the rows; it is over the tokens of a row.": torch.tensor([[-1.0, -2.0], [-1.0, -2.0]]),
            "The row's ratio was spread along the tokens of other rows: keep the mean as [B, 1].": torch.tensor(
                [[-4.0, -0.5], [-4.0, -0.5]]
            ),
        },
    )
    expect("loss.requires_grad", loss.requires_grad, True, given=given, likely="The ratio was detached in the loss.")
    loss.sum().backward()
    # each row: 2 tokens with loss -s, and each log-ratio has half of the mean: 2 * -s / 2 = -s
    expect("the gradient", new.grad, torch.tensor([[-4.0, -4.0], [-0.5, -0.5]]), given=given,
           likely="The gradient must flow through the mean to every token of the response.")  # fmt: skip
    new, old = from_ratios([[2.0, 8.0], [2.0, 8.0]])
    given = '"gspo", token ratios [2, 8] in both rows (a ratio of 4 for the response), advantages [1, -1], cliprange 1'
    loss, metadata = token_losses(algo, [1.0, -1.0], new, "gspo", old, 1.0, torch.ones(2, 2, dtype=torch.bool))
    expect(
        "loss",
        loss,
        torch.tensor([[-2.0, -2.0], [4.0, 4.0]]),  # -min(4, 2), -min(-4, -2)
        given=given,
        likely="Take the smaller of A s and A clip(s, 1 - eps, 1 + eps), then negate.",
        mistakes={
            'Nothing is clipped; "gspo" clips the ratio of the response.': torch.tensor([[-4.0, -4.0], [4.0, 4.0]]),
            "The wrong side is clipped: it is the minimum of the two objectives, not the maximum.": torch.tensor(
                [[-4.0, -4.0], [2.0, 2.0]]
            ),
            "Only the clipped objective is used; it must be the smaller of the clipped and the unclipped one.": (
                torch.tensor([[-2.0, -2.0], [2.0, 2.0]])
            ),
        },
    )
    expect("metadata['clipped']", metadata["clipped"], torch.tensor([[True, True], [False, False]]), given=given,
           likely="Where the ratio of a response is clipped, all its tokens are marked.")  # fmt: skip


@checks("compute_policy_gradient_loss")
def sequence_ratio_without_padding(algo: Algo) -> None:
    """Padding does not enter the mean of "gspo", and an empty response is no division by 0."""
    new, old = from_ratios([[2.0, 8.0, 64.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    loss, metadata = token_losses(algo, [1.0, 1.0], new, "gspo", old, 100.0, mask)
    expect(
        "loss of the two response tokens",
        loss[0, :2],
        torch.tensor([-4.0, -4.0]),
        given='"gspo", token ratios [2, 8, 64], the last one padding, advantage 1, cliprange 100',
        likely="Sum the log-ratios of the response tokens and divide by how many there are.",
        mistakes={
            "The mean is over padding too: divide by the number of response tokens, not by T.": torch.full(
                (2,), -(16 ** (1 / 3))
            ),
            "The log-ratio of the padding enters the mean.": torch.full((2,), -(1024 ** (1 / 3))),
            "The log-ratio of the padding enters the sum.": torch.full((2,), -32.0),
        },
    )
    expect(
        "metadata['ratio'] of the empty response",
        metadata["ratio"][1],
        torch.ones(3),
        given='"gspo" and a response without tokens',
        likely="Its mean log-ratio counts as 0, so its ratio is 1.",
        mistakes={"0 / 0 is NaN: divide by at least 1.": torch.full((3,), NAN)},
    )


@checks("compute_policy_gradient_loss")
def capped_constant_weight(algo: Algo) -> None:
    """With "cispo" log p is weighted by a capped ratio that is a constant."""
    new, old = from_ratios([[2.0, 0.5]])
    given = '"cispo", log-probabilities [-1, -1], ratios [2, 0.5], advantage 1, cliprange 0.2'
    loss, metadata = token_losses(algo, [1.0], new, "cispo", old, 0.2)
    expect(
        "loss",
        loss,
        torch.tensor([[1.2, 0.5]]),  # -min(2, 1.2) * 1 * -1, -0.5 * 1 * -1
        given=given,
        likely="The loss is -weight * A * log p with weight = min(w, 1 + eps).",
        mistakes={
            "The log-probability is missing: this is -weight * A.": torch.tensor([[-1.2, -0.5]]),
            "The weight is also clipped from below; CISPO only caps it.": torch.tensor([[1.2, 0.8]]),
            "The weight is not capped at 1 + eps.": torch.tensor([[2.0, 0.5]]),
            "The sign: the loss is the negated objective.": torch.tensor([[-1.2, -0.5]]),
        },
    )
    expect("loss.requires_grad", loss.requires_grad, True, given=given, likely="Detach the weight, not the loss.")
    loss.sum().backward()
    expect(
        "the gradient",
        new.grad,
        torch.tensor([[-1.2, -0.5]]),
        given=given,
        likely="The slope of -weight * A * log p is -weight * A, also where the weight is capped.",
        mistakes={
            # the slope of -w A log p is -A w (log p + 1) = 0 at log p = -1; the cap has no slope
            "The weight has a gradient; it must be a constant (detach it).": torch.tensor([[-1.2, 0.0]]),
            "A capped token has no gradient here; in CISPO it keeps one.": torch.tensor([[0.0, -0.5]]),
        },
    )
    expect("metadata['clipped']", metadata["clipped"], torch.tensor([[True, False]]), given=given,
           likely="A token is clipped where its ratio is above 1 + eps.")  # fmt: skip
    new, old = from_ratios([[2.0, 0.5]])
    loss, _ = token_losses(algo, [-2.0], new, "cispo", old, 0.2)
    expect("loss", loss, torch.tensor([[-2.4, -1.0]]), given=given.replace("advantage 1", "advantage -2"),
           likely="The cap of the weight does not depend on the sign of A.")  # fmt: skip


@checks("compute_policy_gradient_loss")
def masked_positions_do_no_harm(algo: Algo) -> None:
    """An infinite log-probability at a masked position leaves loss and gradient finite."""
    mask = torch.tensor([[True, False]])
    for method in METHODS:
        for name, padding in (("new", (-math.inf, -1.0)), ("old", (-1.0, -math.inf)), ("both", (-math.inf, -math.inf))):
            new = torch.tensor([[-1.0, padding[0]]], requires_grad=True)
            old = torch.tensor([[-1.0, padding[1]]])
            given = f'"{method}", ratio 1, advantage 1, and a masked position with log-probability -inf ({name})'
            loss, _ = token_losses(algo, [1.0], new, method, old, 0.2, mask)
            expect("loss.isfinite()", loss.isfinite(), torch.tensor([[True, True]]), given=given,
                   likely="Replace what is masked before you compute with it: inf times 0 is NaN.")  # fmt: skip
            torch.where(mask, loss, 0.0).sum().backward()
            expect(
                "the gradient",
                new.grad,
                torch.tensor([[-1.0, 0.0]]),
                given=given,
                likely="Replace the masked positions with torch.where before exp.",
                mistakes={
                    "Masked after exp: infinity times 0 is NaN. Replace masked positions before it.": torch.tensor(
                        [[-1.0, NAN]]
                    ),
                    "A masked position made all gradients NaN: replace it before exp.": torch.tensor([[NAN, NAN]]),
                },
            )


@checks("compute_policy_gradient_loss")
def far_policies_stay_finite(algo: Algo) -> None:
    """A log-ratio of 200 gives a finite ratio."""
    new, old = torch.tensor([[0.0]], requires_grad=True), torch.tensor([[-200.0]])
    for method in ("noclip", "grpo", "gspo", "cispo"):
        _, metadata = token_losses(algo, [1.0], new, method, old, 0.2, torch.tensor([[True]]))
        expect(
            "metadata['ratio']",
            metadata["ratio"],
            torch.tensor([[math.exp(20.0)]]),
            given=f'"{method}", a token with log-ratio 200',
            likely="Clamp the log-ratio to -20 and 20 before exp.",
            mistakes={
                "exp(200) is infinite in float32: clamp the log-ratio to -20 and 20 before exp.": torch.tensor(
                    [[math.inf]]
                )
            },
        )


@checks("compute_policy_gradient_loss")
def low_precision_input(algo: Algo) -> None:
    """Log-probabilities in bf16 are computed with in float32."""
    new, old = torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.03125]], dtype=torch.bfloat16)
    for method in ("none", "noclip"):
        loss, _ = token_losses(algo, [1.0], new, method, old)
        right = {"none": 1.0, "noclip": -math.exp(0.03125)}[method]
        expect(
            "loss",
            loss,
            torch.tensor([[right]]),
            given=f'"{method}", bf16 log-probabilities -1 (new) and -1.03125 (old)',
            likely="Compute with `new` and `old`, which are float32.",
            mistakes={
                "The ratio was computed in bf16, which loses its digits: use `new` and `old`, which are float32.": (
                    torch.tensor([[-1.03125]])
                )
            },
        )


# Two responses: four tokens with loss 1, and one token with loss 3 followed by padding that holds 99.
RAGGED = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 99.0, 99.0, 99.0]])
RAGGED_MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
RAGGED_WORDS = "losses [[1, 1, 1, 1], [3, 99, 99, 99]], mask [[1, 1, 1, 1], [1, 0, 0, 0]]"
OF_SEQUENCE, OF_TOKEN = torch.tensor(2.0), torch.tensor(1.4)
WITH_PADDING = "The mean is over padding too: divide by the number of response tokens."


@checks("aggregate_loss_across_microbatch")
def mean_of_means(algo: Algo) -> None:
    """ "sequence" is the mean over the tokens of a response, then over the responses."""
    expect(
        "the loss",
        algo.aggregate_loss_across_microbatch(RAGGED, RAGGED_MASK, "sequence"),
        OF_SEQUENCE,  # (4 / 4 + 3 / 1) / 2
        given=f'"sequence", {RAGGED_WORDS}',
        likely="Average each row over its own tokens, then average the rows.",
        mistakes={
            "This is the mean over all tokens, so the long response weighs more: average each row first.": OF_TOKEN,
            WITH_PADDING: torch.tensor(0.875),  # (4 / 4 + 3 / 4) / 2
            "The mask is not used.": torch.tensor(38.0),  # (4 / 4 + 300 / 4) / 2
            "The rows were summed, not averaged.": torch.tensor(4.0),
            "The tokens of a row were summed, not averaged.": torch.tensor(3.5),
        },
    )


@checks("aggregate_loss_across_microbatch")
def mean_over_all_tokens(algo: Algo) -> None:
    """ "token" is the mean over all response tokens of the batch."""
    expect(
        "the loss",
        algo.aggregate_loss_across_microbatch(RAGGED, RAGGED_MASK, "token"),
        OF_TOKEN,  # (4 + 3) / 5
        given=f'"token", {RAGGED_WORDS}',
        likely="Divide the sum of all response tokens by their number.",
        mistakes={
            'This is "sequence": each row was averaged first.': OF_SEQUENCE,
            WITH_PADDING: torch.tensor(0.875),  # 7 / 8
            "The mask is not used.": torch.tensor(38.0),
        },
    )


@checks("aggregate_loss_across_microbatch")
def sum_over_a_constant(algo: Algo) -> None:
    """ "constant" is the sum over all response tokens, divided by the constant."""
    expect(
        "the loss",
        algo.aggregate_loss_across_microbatch(RAGGED, RAGGED_MASK, "constant", 10),
        torch.tensor(0.7),  # (4 + 3) / 10
        given=f'"constant" with 10, {RAGGED_WORDS}',
        likely="Divide the sum of all response tokens by normalization_constant, and by nothing else.",
        mistakes={
            "normalization_constant is not used: this is the sum.": torch.tensor(7.0),
            'normalization_constant is not used: this is "token".': OF_TOKEN,
            'normalization_constant is not used: this is "sequence".': OF_SEQUENCE,
            "The sum was also divided by the number of responses.": torch.tensor(0.35),
            "Sums were divided by lengths before the constant: leave out the lengths.": torch.tensor(0.4),
            "The mask is not used.": torch.tensor(30.4),
        },
    )


@checks("aggregate_loss_across_microbatch")
def response_without_tokens(algo: Algo) -> None:
    """A response without tokens counts as 0 and is no division by 0."""
    losses, mask = torch.tensor([[2.0, 2.0], [5.0, 5.0]]), torch.tensor([[1, 1], [0, 0]])
    expect(
        "the loss",
        algo.aggregate_loss_across_microbatch(losses, mask, "sequence"),
        torch.tensor(1.0),
        given='"sequence", losses [[2, 2], [5, 5]], mask [[1, 1], [0, 0]]',
        likely="(2 + 0) / 2: the empty response is one of the two.",
        mistakes={
            "0 / 0 is NaN: divide by at least 1.": torch.tensor(NAN),
            "The empty response was left out; it counts as 0 in the mean over rows.": torch.tensor(2.0),
        },
    )
    expect(
        "the loss",
        algo.aggregate_loss_across_microbatch(losses, torch.zeros(2, 2), "token"),
        torch.tensor(0.0),
        given='"token", no response token at all',
        likely="Nothing to average counts as 0.",
        mistakes={"0 / 0 is NaN: divide by at least 1.": torch.tensor(NAN)},
    )


@checks("aggregate_loss_across_microbatch")
def excluded_whatever_it_holds(algo: Algo) -> None:
    """What the mask excludes may be infinite or NaN."""
    losses = torch.tensor([[1.0, NAN], [3.0, math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    for name, right in (("sequence", 2.0), ("token", 2.0), ("constant", 0.4)):
        total = algo.aggregate_loss_across_microbatch(losses, mask, name, 10)
        expect(
            "the loss",
            total,
            torch.tensor(right),
            given=f'"{name}" (constant 10), losses [[1, NaN], [3, inf]], mask [[True, False], [True, False]]',
            likely="Replace what is masked, do not multiply it.",
            mistakes={
                "NaN times 0 is NaN: replace the masked losses (torch.where), do not multiply by the mask.": (
                    torch.tensor(NAN)
                )
            },
        )


@checks("aggregate_loss_across_microbatch")
def gradient_of_each_token(algo: Algo) -> None:
    """The gradient of a token is its weight, and padding has none."""
    losses = RAGGED.clone().requires_grad_()
    total = algo.aggregate_loss_across_microbatch(losses, RAGGED_MASK, "sequence")
    expect("the loss", total, OF_SEQUENCE, given=RAGGED_WORDS, likely="Average each row, then the rows.")
    expect("loss.requires_grad", total.requires_grad, True, given=RAGGED_WORDS, likely="The result was detached.")
    total.backward()
    expect("the gradient", losses.grad, torch.tensor([[0.125] * 4, [0.5, 0.0, 0.0, 0.0]]), given=RAGGED_WORDS,
           likely="1 / (2 rows * 4 tokens) in the first row, 1 / (2 * 1) in the second.")  # fmt: skip
