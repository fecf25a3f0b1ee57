"""Checks of `train_step.py`: gradients of a batch in pieces, and one whole step.

Two small models stand in for a language model. `Table` holds the log-probability of each label as a parameter, so the
gradient at each token can be worked out by hand. `Bigram` is a real language model whose logits depend on one token.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from a5lib.course.checking import checks, expect, expect_error, expect_keys, expect_pair
from a5lib.course.exercises import Algo


class Table(nn.Module):
    """Log-probabilities [B, T] as a parameter; row r of a batch has input ids that are all r."""

    def __init__(self, log_probs: list[list[float]], entropy: list[list[float]] | None = None) -> None:
        super().__init__()
        self.log_probs = nn.Parameter(torch.tensor(log_probs))
        self.entropy = torch.ones_like(self.log_probs) if entropy is None else torch.tensor(entropy)
        self.rows: list[list[int]] = []
        self.widths: list[int] = []
        self.temperatures: list[float] = []

    def score(
        self, model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = True, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """As `get_response_log_probs`, and it notes what it was asked."""
        rows, width = input_ids[:, 0], input_ids.shape[1]
        self.rows.append(rows.tolist())
        self.widths.append(width)
        self.temperatures.append(temperature)
        return {"log_probs": self.log_probs[rows, :width], "token_entropy": self.entropy[rows, :width]}

    def gradient(self) -> Tensor:
        """The gradient, zeros where there is none."""
        return torch.zeros_like(self.log_probs) if self.log_probs.grad is None else self.log_probs.grad


def accumulate(
    algo: Algo,
    mask: list[list[int]],
    advantages: list[float],
    steps: int,
    *arguments: Any,
    table: Table | None = None,
    columns: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Table, Any, Any]:
    """Run `accumulate_gradients` on a table whose log-probabilities are all -1, unless another is given."""
    rows, width = len(mask), len(mask[0])
    table = Table([[-1.0] * width] * rows) if table is None else table
    ids = torch.arange(rows).unsqueeze(1).expand(rows, width)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "response_mask": torch.tensor(mask, dtype=torch.bool),
        "advantages": torch.tensor(advantages),
    } | (columns or {})
    got = algo.accumulate_gradients(table, batch, steps, *arguments, score=table.score, **options)
    loss, metadata = expect_pair("accumulate_gradients(...)", got)
    return table, loss, metadata


GRADIENT = "the gradient of the log-probabilities"
NO_BACKWARD = "There is no gradient: run backward on the loss of each microbatch."
TWICE = "The loss is divided twice: weigh it by its share of the batch, and do not divide by the microbatches too."
UNWEIGHED = "The mean of each microbatch is added as it is: weigh it by its share of the batch."
BY_COUNT = "The loss is divided by the number of microbatches: they differ in size, so weigh each by its share."


@checks("accumulate_gradients")
def one_microbatch(algo: Algo) -> None:
    """One microbatch: the loss and gradient of the whole batch."""
    given = 'mask [[1, 1], [1, 0]], advantages [2, -1], log-probabilities all -1, 1 step, "sequence"'
    table, loss, metadata = accumulate(algo, [[1, 1], [1, 0]], [2.0, -1.0], 1)
    expect(
        "loss",
        loss,
        torch.tensor(0.5),  # (2 - 1) / 2
        given=given,
        likely="Score, compute_policy_gradient_loss, aggregate_loss_across_microbatch, then weigh by rows / all rows.",
        mistakes={"The loss is not added up over the microbatches.": torch.tensor(0.0)},
    )
    expect(
        GRADIENT,
        table.gradient(),
        torch.tensor([[-0.5, -0.5], [0.5, 0.0]]),  # -2 / 2 tokens / 2 rows, and 1 / 1 / 2
        given=given,
        likely="Run backward on the loss.",
        mistakes={NO_BACKWARD: torch.zeros(2, 2)},
    )
    expect(
        "loss.requires_grad",
        loss.requires_grad,
        False,
        given=given,
        likely="The loss is returned with its graph, which keeps every activation in memory; add up `loss.detach()`.",
    )
    names = ["entropy", "clip_fraction", "trained_tokens", "skipped_sequences"]
    if isinstance(metadata, dict):
        expect("the keys missing in the metadata", [name for name in names if name not in metadata], [], given=given,
               likely="Return what sums.read() gives, and add \"skipped_sequences\".")  # fmt: skip
    expect_keys("the metadata", metadata, names)


@checks("accumulate_gradients")
def two_equal_microbatches(algo: Algo) -> None:
    """Two microbatches of one row give the gradient of the whole batch."""
    given = 'mask [[1, 1], [1, 0]], advantages [2, -1], 2 steps, "sequence"'
    table, loss, _ = accumulate(algo, [[1, 1], [1, 0]], [2.0, -1.0], 2)
    right = torch.tensor([[-0.5, -0.5], [0.5, 0.0]])
    expect(
        GRADIENT,
        table.gradient(),
        right,
        given=given,
        likely="A microbatch of b of the B rows weighs b / B.",
        mistakes={
            UNWEIGHED: right * 2,
            TWICE: right / 2,
            "Only the last microbatch is left: gradients are zeroed between microbatches.":
                torch.tensor([[0.0, 0.0], [0.5, 0.0]]),
            "Only the first microbatch was run.": torch.tensor([[-0.5, -0.5], [0.0, 0.0]]),
        },
    )  # fmt: skip
    expect(
        "loss",
        loss,
        torch.tensor(0.5),
        given=given,
        likely="The loss is the sum of the weighed losses.",
        mistakes={
            "The loss is that of the last microbatch alone.": torch.tensor(-0.5),
            UNWEIGHED: torch.tensor(1.0),
            TWICE: torch.tensor(0.25),
        },
    )


@checks("accumulate_gradients")
def uneven_microbatches(algo: Algo) -> None:
    """Three rows in two microbatches, 2 + 1: each row weighs the same."""
    given = '3 rows of one token, advantages [3, 3, 3], 2 steps (microbatches of at most 2 rows), "sequence"'
    table, loss, _ = accumulate(algo, [[1]] * 3, [3.0] * 3, 2)
    expect(
        "the rows in each microbatch",
        [len(rows) for rows in table.rows],
        [2, 1],
        given=given,
        likely="A microbatch has at most B / gradient_accumulation_steps rows, rounded up.",
        mistakes={"B / gradient_accumulation_steps is rounded down, which gives more microbatches.": [1, 1, 1]},
    )
    right = torch.tensor([[-1.0], [-1.0], [-1.0]])
    expect(
        GRADIENT,
        table.gradient(),
        right,
        given=given,
        likely="A microbatch of b of the B rows weighs b / B.",
        mistakes={
            BY_COUNT: torch.tensor([[-0.75], [-0.75], [-1.5]]),
            TWICE: right / 2,
            UNWEIGHED: torch.tensor([[-1.5], [-1.5], [-3.0]]),
        },
    )
    expect("loss", loss, torch.tensor(3.0), given=given, likely="The loss is the sum of the weighed losses.")


@checks("accumulate_gradients")
def token_means(algo: Algo) -> None:
    """ "token": every token of the batch weighs the same, also across microbatches."""
    given = 'rows of 3 and 1 tokens, advantages [1, 1], 2 steps, "token"'
    table, loss, _ = accumulate(algo, [[1, 1, 1], [1, 0, 0]], [1.0, 1.0], 2, "none", None, "token")
    expect(
        GRADIENT,
        table.gradient(),
        torch.tensor([[-0.25, -0.25, -0.25], [-0.25, 0.0, 0.0]]),  # 4 tokens
        given=given,
        likely="A microbatch of n of the N response tokens weighs n / N.",
        mistakes={
            "The token mean is weighed by rows, or divided by the number of microbatches; its share is n / N, in "
            "tokens.": torch.tensor([[-1 / 6, -1 / 6, -1 / 6], [-0.5, 0.0, 0.0]]),
            UNWEIGHED: torch.tensor([[-1 / 3, -1 / 3, -1 / 3], [-1.0, 0.0, 0.0]]),
        },
    )
    expect("loss", loss, torch.tensor(1.0), given=given, likely="The loss is the sum of the weighed losses.")


@checks("accumulate_gradients")
def constant_sums(algo: Algo) -> None:
    """ "constant": sums need no weight."""
    given = 'rows of 3 and 1 tokens, advantages [1, 1], 2 steps, "constant" with 10'
    table, _, _ = accumulate(algo, [[1, 1, 1], [1, 0, 0]], [1.0, 1.0], 2, "none", None, "constant", 10)
    right = torch.tensor([[-0.1, -0.1, -0.1], [-0.1, 0.0, 0.0]])
    expect(
        GRADIENT,
        table.gradient(),
        right,
        given=given,
        likely="Sums over tokens, divided by the constant, add up to that of the batch as they are.",
        mistakes={"A sum is weighed as if it were a mean; divided by a constant, it adds up as it is.": right / 2},
    )


@checks("accumulate_gradients")
def rows_without_gradient_are_skipped(algo: Algo) -> None:
    """Rows with advantage 0 or without a response token are not run."""
    mask = [[1, 1], [1, 1], [1, 0], [0, 0]]
    table, _, metadata = accumulate(algo, mask, [2.0, 0.0, -1.0, 1.0], 1)
    expect(
        "the rows that were scored",
        sorted(row for rows in table.rows for row in rows),
        [0, 2],
        given="mask [[1, 1], [1, 1], [1, 0], [0, 0]], advantages [2, 0, -1, 1]",
        likely="Keep the rows whose advantage is not 0 and whose mask has a True.",
        mistakes={
            "Nothing is skipped.": [0, 1, 2, 3],
            "Rows with advantage 0 are run, although their gradient is 0.": [0, 1, 2],
            "Rows without a response token are run.": [0, 2, 3],
            "Rows with a negative advantage are skipped; they teach as much.": [0],
        },
    )
    expect(
        'metadata["skipped_sequences"]',
        metadata["skipped_sequences"],
        0.25,
        given="advantages [2, 0, -1, 1]",
        likely="The share of all advantages that are exactly 0.",
        mistakes={"It is a share of the batch and not a number of rows.": 1.0},
    )


@checks("accumulate_gradients")
def denominators_stay_those_of_the_batch(algo: Algo) -> None:
    """Skipped rows still count in the denominators."""
    likely = "B and N are taken from the whole batch, before rows are dropped."
    kept = "The denominators count the kept rows only; a skipped row is a row with loss 0."
    for normalization, right, wrong, words in (
        ("sequence", [[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "2 rows"),
        ("token", [[-0.5, 0.0, 0.0], [0.0, 0.0, 0.0]], [[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "4 tokens"),
    ):
        table, *_ = accumulate(algo, [[1, 0, 0], [1, 1, 1]], [2.0, 0.0], 1, "none", None, normalization)
        expect(
            GRADIENT,
            table.gradient(),
            torch.tensor(right),
            given=f'rows of 1 and 3 tokens, advantages [2, 0], 1 step, "{normalization}": {words} in the batch',
            likely=likely,
            mistakes={kept: torch.tensor(wrong)},
        )


@checks("accumulate_gradients")
def nothing_left_gives_zeros(algo: Algo) -> None:
    """If all advantages are 0, the gradients are zeros and not None, so that the optimizer steps."""
    table, loss, _ = accumulate(algo, [[1], [1]], [0.0, 0.0], 1)
    given = "advantages [0, 0]"
    expect("loss", loss, torch.tensor(0.0), given=given, likely="No row is run, so the loss is 0.")
    expect(
        "the gradient",
        table.log_probs.grad,
        torch.zeros(2, 1),
        given=given,
        likely="Zeros are expected.",
        mistakes={
            "The gradient is None, and an optimizer leaves such parameters out; give each parameter zeros.": None
        },
    )


@checks("accumulate_gradients")
def gradients_are_only_added(algo: Algo) -> None:
    """Gradients are added to those already there; nothing is zeroed or clipped."""
    table = Table([[-1.0]])
    table.log_probs.grad = torch.tensor([[1.0]])
    accumulate(algo, [[1]], [8.0], 1, table=table)
    expect(
        GRADIENT,
        table.gradient(),
        torch.tensor([[-7.0]]),  # 1 - 8
        given="one token, advantage 8, and a gradient of 1 that is already there",
        likely="Run backward and nothing else: the caller zeroes, clips and steps.",
        mistakes={
            "The gradient was zeroed before: the caller does that.": torch.tensor([[-8.0]]),
            "The gradient was clipped here: the norm to clip is that of the whole batch.": torch.tensor([[-1.0]]),
            "The gradient was zeroed after.": torch.tensor([[0.0]]),
        },
        tolerance=1e-3,
    )


@checks("accumulate_gradients")
def old_log_probs_follow_their_rows(algo: Algo) -> None:
    """old_log_probs and rollout_log_probs are cut as the other columns: the same rows, the same width."""
    old = [[-2.0, -3.0], [-1.0, 0.0]]
    columns = {name: torch.tensor(old) for name in ("old_log_probs", "rollout_log_probs")}
    _, _, metadata = accumulate(algo, [[1, 1], [1, 0]], [1.0, 1.0], 2, "noclip", table=Table(old), columns=columns)
    expect(
        "ratio_min and ratio_max",
        [metadata.get("ratio_min"), metadata.get("ratio_max")],
        [1.0, 1.0],
        given='old_log_probs equal to the log-probabilities, 2 steps, "noclip": every ratio is 1',
        likely="old_log_probs of other rows were used: take the rows of the microbatch.",
    )
    expect(
        'metadata["kl_rollout"]',
        metadata.get("kl_rollout"),
        0.0,
        given="rollout_log_probs equal to the log-probabilities, 2 steps",
        likely="rollout_log_probs of other rows were used, or none: take the rows of the microbatch.",
    )


@checks("accumulate_gradients")
def losses_are_weighted_token_by_token(algo: Algo) -> None:
    """Where the batch has "loss_weights", each token's loss is multiplied by its own."""
    weights = {"loss_weights": torch.tensor([[2.0, 0.5, 9.0], [1.0, 0.25, 9.0]])}
    mask = [[1, 1, 0], [1, 1, 0]]
    _, loss, _ = accumulate(algo, mask, [1.0, 2.0], 2, "none", None, "constant", 1, columns=weights)
    expect(
        "the loss",
        loss,
        5.0,  # every log-probability is -1: 1 (2 + 0.5) + 2 (1 + 0.25)
        given="loss_weights 2 and 0.5, and 1 and 0.25, 2 steps, constant 1",
        mistakes={
            'The weights were left out: multiply the loss of each token by batch["loss_weights"] if it is there.': 6.0
        },
        likely='Multiply the loss of each token by its own entry of batch["loss_weights"], before the mean or the sum.',
    )


@checks("accumulate_gradients")
def options_are_handed_on(algo: Algo) -> None:
    """The temperature reaches the scores, and cliprange the loss."""
    table, *_ = accumulate(algo, [[1]], [1.0], 1, temperature=0.5)
    expect(
        "the temperature that `score` got",
        table.temperatures,
        [0.5],
        given="temperature 0.5",
        likely="Hand `temperature` on to score(...).",
        mistakes={"The temperature is not handed on.": [1.0]},
    )
    _, _, metadata = accumulate(
        algo, [[1]], [1.0], 1, "grpo", 0.2, table=Table([[0.0]]), columns={"old_log_probs": torch.tensor([[-1.0]])}
    )
    expect(
        'metadata["clip_fraction"]',
        metadata["clip_fraction"],
        1.0,
        given='one token with ratio e = 2.718, advantage 1, "grpo", cliprange 0.2',
        likely="Hand method, old_log_probs, cliprange and the mask on to compute_policy_gradient_loss.",
    )


@checks("accumulate_gradients")
def metadata_over_tokens(algo: Algo) -> None:
    """The metadata are means over tokens, whatever the split."""
    table = Table([[-1.0, -1.0], [-1.0, -1.0]], entropy=[[1.0, 1.0], [4.0, 9.0]])
    _, _, metadata = accumulate(algo, [[1, 1], [1, 0]], [1.0, -1.0], 2, table=table)
    given = "entropies 1, 1 in one microbatch and 4 in the other"
    expect(
        'metadata["entropy"]',
        metadata["entropy"],
        2.0,  # (1 + 1 + 4) / 3
        given=given,
        likely="Give every microbatch to sums.add, and return what sums.read() gives.",
        mistakes={
            "It is the mean of the microbatches' means, not the mean over tokens.": 2.5,
            "The microbatches were not given to sums.add.": 0.0,
            "It is that of one microbatch alone.": 4.0,
        },
    )
    expect(
        'metadata["trained_tokens"]',
        metadata["trained_tokens"],
        3.0,
        given="2 response tokens and 1",
        likely="Give every microbatch to sums.add, once.",
    )


@checks("accumulate_gradients")
def loss_that_is_not_finite(algo: Algo) -> None:
    """A loss that is not finite is refused, and its rows are named, before backward."""
    table = Table([[-1.0], [math.nan]])
    given = "log-probabilities [[-1], [nan]], 1 step"
    expect_error(
        lambda: accumulate(algo, [[1], [1]], [1.0, 1.0], 1, table=table),
        FloatingPointError,
        given=given,
        likely="Call check_finite with the microbatch's loss and its rows, before backward.",
        words="row 1 of the batch",
    )
    expect(
        GRADIENT,
        table.gradient(),
        torch.zeros(2, 1),
        given=given,
        likely="backward ran before check_finite, so the gradient is spoilt.",
    )


@checks("accumulate_gradients")
def padding_is_cut_off(algo: Algo) -> None:
    """Rows go from long to short, and columns after a microbatch's last response token are cut off."""
    mask = [[0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    table, *_ = accumulate(algo, mask, [1.0] * 4, 2)
    given = "6 columns; the last response token of the rows is in column 1, 4, 2 and 3, counted from 0; 2 steps"
    expect(
        "the rows of the microbatches",
        table.rows,
        [[1, 3], [2, 0]],
        given=given,
        likely="Sort the kept rows by the column of their last response token, longest first.",
        mistakes={
            "The rows are not sorted by length.": [[0, 1], [2, 3]],
            "The rows go from short to long; the longest come first, so that memory runs out at once or never.":
                [[0, 2], [3, 1]],
        },
    )  # fmt: skip
    expect(
        "the width of the microbatches",
        table.widths,
        [5, 3],
        given=given,
        likely="Keep the columns up to the last response token of the microbatch's longest row, and that column too.",
        mistakes={
            "Nothing is cut off.": [6, 6],
            "The width is that of the whole batch; each microbatch has its own.": [5, 5],
            "The column of the last response token is cut off too.": [4, 2],
        },
    )


WORDS = {"q": 1, "a": 2, "b": 3}  # 0 is the padding


class Words:
    """Encodes the words of WORDS."""

    pad_token_id, eos_token_id = 0, 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The words' ids."""
        return [WORDS[word] for word in text.split()]


class Bigram(nn.Module):
    """The logits of the next of four tokens depend on the last token alone, and are all 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)
        nn.init.zeros_(self.table.weight)

    def forward(self, input_ids: Tensor) -> Any:
        """An object with `.logits` [B, T, 4]."""
        return SimpleNamespace(logits=self.table(input_ids))


class Step:
    """One `grpo_train_step` of a `Bigram` with SGD and learning rate 1: prompt q twice, responses a and b, a is right.

    Without a normaliser the advantages are 1/2 and -1/2. Each log-probability is log(1/4), so its gradient with respect
    to the logits after q is (one at the token) - 1/4, and the batch's loss has -1/4 for a and 1/4 for b.
    """

    GIVEN = "prompts q, q; responses a, b; rewards 1, 0; four tokens of probability 1/4; no normaliser; SGD with lr 1"

    def __init__(
        self, algo: Algo, steps: int = 1, max_grad_norm: float | None = None, leftover: bool = False, **options: Any
    ) -> None:
        self.model = Bigram()
        weight = self.model.table.weight
        if leftover:
            weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.count = 0
        optimizer.register_step_post_hook(self._counted)
        arguments: dict[str, Any] = {
            "reward_fn": lambda response, truth: {"reward": float(response == truth)},
            "repeated_prompts": ["q", "q"],
            "rollout_responses": ["a", "b"],
            "repeated_ground_truths": ["a", "a"],
            "group_size": 2,
            "advantage_normalizer": "none",
        }
        got = algo.grpo_train_step(self.model, Words(), optimizer, steps, max_grad_norm, **arguments | options)
        self.loss, self.metadata = expect_pair("grpo_train_step(...)", got)
        self.moved = weight.detach()[WORDS["q"]]  # the logits after q: 0 before the step

    def __repr__(self) -> str:
        return "a step, and no error"

    def _counted(self, *_: Any) -> None:
        self.count += 1


MOVED = "the logits after q, which were 0"
RIGHT = torch.tensor([0.0, 0.0, 0.25, -0.25])
RAW = torch.tensor([-0.125, -0.125, 0.375, -0.125])  # rewards 1 and 0 in place of 1/2 and -1/2


@checks("grpo_train_step")
def one_step(algo: Algo) -> None:
    """One step raises the logit of the right response and lowers that of the wrong one."""
    step = Step(algo)
    expect(
        MOVED,
        step.moved,
        RIGHT,
        given=Step.GIVEN,
        likely="Tokens, rewards, advantages, gradients, clip, step, in this order.",
        mistakes={
            "The optimizer did not step.": torch.zeros(4),
            "The optimizer stepped twice.": RIGHT * 2,
            "The rewards were used in place of the advantages.": RAW,
            "The step goes the wrong way.": -RIGHT,
            "advantage_normalizer is not handed on.": RIGHT * math.sqrt(2),  # std of 1 and 0 is 1 / sqrt(2)
        },
    )
    names = ["reward_mean", "zero_variance_groups", "entropy", "skipped_sequences", "grad_norm"]
    if isinstance(step.metadata, dict):
        expect("the keys missing in the metadata", [name for name in names if name not in step.metadata], [],
               given=Step.GIVEN, likely="Put the metadata of rewards, advantages and gradients, and \"grad_norm\", "
               "into one dict.")  # fmt: skip
    expect_keys("the metadata", step.metadata, names)
    expect('metadata["reward_mean"]', step.metadata["reward_mean"], 0.5, given=Step.GIVEN, likely="Rewards of 1 and 0.")


@checks("grpo_train_step")
def old_gradients_are_zeroed(algo: Algo) -> None:
    """Gradients from before are not used, and none are left afterwards."""
    step = Step(algo, leftover=True)
    expect(
        MOVED,
        step.moved,
        RIGHT,
        given=Step.GIVEN + "; a gradient of 1 everywhere is left from before",
        likely="Set the gradients to None before accumulate_gradients.",
        mistakes={"The gradients are not zeroed before: those left over were added.": RIGHT - 1.0},
    )
    expect(
        "the gradient afterwards",
        step.model.table.weight.grad,
        None,
        given=Step.GIVEN,
        likely="The gradients are not zeroed after the step. Set them to None: zeros take memory, too.",
    )


@checks("grpo_train_step")
def one_optimizer_step(algo: Algo) -> None:
    """The optimizer steps once, however many microbatches there are, and also without a signal."""
    step = Step(algo, steps=2)
    expect(
        MOVED,
        step.moved,
        RIGHT,
        given=Step.GIVEN + "; 2 microbatches",
        likely="All microbatches first, then one step.",
        mistakes={
            "The optimizer steps at every microbatch: it steps once, after all of them.": RIGHT * 2,
            "The gradient is divided by gradient_accumulation_steps, which accumulate_gradients has done.": RIGHT / 2,
        },
    )
    expect(
        "the number of optimizer steps", step.count, 1, given="2 microbatches", likely="Step once, after all of them."
    )
    step = Step(algo, rollout_responses=["a", "a"])
    expect(
        "the number of optimizer steps",
        step.count,
        1,
        given="two right responses, so both advantages are 0",
        likely="The step of a batch without a signal was left out; momentum and decay are still due.",
    )


@checks("grpo_train_step")
def clipping_comes_before_the_step(algo: Algo) -> None:
    """The norm of the whole gradient is clipped, before the step, and the norm before clipping is reported."""
    given = Step.GIVEN + "; 2 microbatches, max_grad_norm 0.1"
    step = Step(algo, steps=2, max_grad_norm=0.1)
    # the norm is sqrt(2) / 4 = 0.353553; 0.25 * 0.1 / 0.353553 = 0.0707107
    expect(
        MOVED,
        step.moved,
        torch.tensor([0.0, 0.0, 0.0707107, -0.0707107]),
        given=given,
        likely="Clip once, between accumulate_gradients and the step.",
        mistakes={
            "Nothing was clipped before the step: clip_gradients comes between accumulate_gradients and step.": RIGHT
        },
    )
    expect(
        'metadata["grad_norm"]',
        step.metadata.get("grad_norm"),
        0.353553,
        given=given,
        likely="It is what clip_gradients returns.",
        mistakes={"It is the norm after clipping; the norm before tells more.": 0.1},
    )


@checks("grpo_train_step")
def arguments_are_handed_on(algo: Algo) -> None:
    """Baseline, eps, loss normalisation, method, old_log_probs and cliprange are handed on."""
    step = Step(algo, baseline="none")
    expect(
        "loss",
        step.loss,
        torch.tensor(0.693147),  # -log(1/4) / 2
        given=Step.GIVEN + '; baseline "none", so the advantages are 1 and 0',
        likely="Hand baseline and advantage_normalizer on to compute_group_normalized_rewards.",
        mistakes={
            "baseline is not handed on.": torch.tensor(0.0),
            "The mean is over the rows that were run: mend accumulate_gradients first.": torch.tensor(1.386294),
        },
    )
    expect("loss.requires_grad", step.loss.requires_grad, False, given=Step.GIVEN, likely="Return the loss detached.")
    step = Step(algo, advantage_normalizer="std", advantage_eps=1.0)
    expect(
        MOVED,
        step.moved,
        RIGHT * 0.585786,  # 1 / (1 / sqrt(2) + 1)
        given=Step.GIVEN.replace("no normaliser", 'normaliser "std" with eps 1'),
        likely="Hand advantage_eps and advantage_normalizer on to compute_group_normalized_rewards.",
        mistakes={"advantage_eps is not handed on.": RIGHT * math.sqrt(2)},
    )
    step = Step(algo, loss_normalization="constant", normalization_constant=4)
    expect(
        MOVED,
        step.moved,
        RIGHT / 2,
        given=Step.GIVEN + '; loss_normalization "constant" with 4',
        likely="Hand loss_normalization and normalization_constant on to accumulate_gradients.",
        mistakes={"loss_normalization is not handed on.": RIGHT},
    )
    old = torch.tensor([[1 / 8], [1 / 4]]).log()
    step = Step(algo, importance_reweighting_method="grpo", old_log_probs=old, cliprange=0.2)
    given = Step.GIVEN + '; method "grpo", old probabilities 1/8 and 1/4, cliprange 0.2'
    likely = "Hand the method, old_log_probs (in the batch) and cliprange on to accumulate_gradients."
    expect('metadata["ratio_max"]', step.metadata.get("ratio_max"), 2.0, given=given, likely=likely,
           mistakes={"The method is not handed on.": 1.0})  # fmt: skip
    expect('metadata["clip_fraction"]', step.metadata.get("clip_fraction"), 0.5, given=given, likely=likely)


@checks("grpo_train_step")
def mixed_groups_are_refused(algo: Algo) -> None:
    """A group that mixes prompts is refused."""
    expect_error(
        lambda: Step(algo, repeated_prompts=["q", "a"]),
        ValueError,
        given="repeated_prompts q, a with group_size 2",
        likely="Hand the prompts on to compute_group_normalized_rewards as prompt_ids; it then refuses mixed groups.",
        words="mixes prompts",
    )
