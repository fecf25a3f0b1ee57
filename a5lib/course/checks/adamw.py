"""Checks of `adamw.py`: the update in float32, stochastic rounding, and a step in each of the four precisions.

One weight and one gradient are enough: AdamW treats every element alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from a5lib.course.checking import checks, expect, expect_keys
from a5lib.course.exercises import Algo

UP = 1.0 + 1 / 128  # the bfloat16 number after 1
DOWN = 1.0 - 1 / 256  # the bfloat16 number before 1
UNCHANGED = (
    "The weight did not change: change the tensor that you are given (`weight.sub_(...)`); `weight = ...` makes "
    "another one."
)


def update(
    algo: Algo, weight: float, grad: float, moments: tuple[float, float], step: int, **options: Any
) -> list[Any]:
    """`adamw_update` on tensors of one element, with lr 0.1: weight, gradient and moments afterwards."""
    tensors = [torch.tensor([value]) for value in (weight, grad, *moments)]
    algo.adamw_update(*tensors, step=step, lr=0.1, **options)
    return tensors


@checks("adamw_update")
def first_step_is_the_learning_rate(algo: Algo) -> None:
    """The first step moves the weight by the learning rate, against the gradient."""
    # m = 0.5 and v = 1.25; corrected 5 and 25; 5 / sqrt(25) = 1
    weight, *_ = update(algo, 1.0, 5.0, (0.0, 0.0), 1)
    expect(
        "weight",
        weight,
        torch.tensor([0.9]),
        given="weight 1, gradient 5, moments 0, step 1, lr 0.1, betas (0.9, 0.95)",
        likely="Correct both moments for their start at 0, divide the first by the root of the second, subtract.",
        mistakes={
            UNCHANGED: torch.tensor([1.0]),
            "The bias correction is missing: both moments start at 0 and are too small at first.":
                torch.tensor([0.955279]),
            "Only the first moment has its bias correction.": torch.tensor([0.552786]),
            "Only the second moment has its bias correction.": torch.tensor([0.99]),
            "The bias corrections are exchanged: beta1 belongs to the first moment.": torch.tensor([0.717157]),
            "The second moment is corrected after the root; there the correction needs a root too.":
                torch.tensor([0.977639]),
            "The step goes along the gradient, so the loss would rise.": torch.tensor([1.1]),
            "The bias correction is one step ahead: `step` is the number of this step, from 1.":
                torch.tensor([0.926503]),
        },
    )  # fmt: skip


@checks("adamw_update")
def moments_are_moving_averages(algo: Algo) -> None:
    """The moments are moving averages of the gradient and of its square."""
    given = "moments 1 and 4, gradient 3, betas (0.9, 0.95), step 2"
    _, _, exp_avg, exp_avg_sq = update(algo, 1.0, 3.0, (1.0, 4.0), 2)
    swapped = "beta1 and beta2 are swapped: beta1 belongs to the first moment."
    turned = "beta and 1 - beta are exchanged: beta is the share of the old moment that stays."
    unweighted = "The new part lacks its factor 1 - beta."
    unchanged = "The moment did not change: change the tensor that you are given, in place."
    corrected = "The stored moment must not be bias-corrected: the correction is for this step's division only."
    # 0.9 * 1 + 0.1 * 3 = 1.2
    expect(
        "exp_avg",
        exp_avg,
        torch.tensor([1.2]),
        given=given,
        likely="m <- beta1 m + (1 - beta1) g, in place.",
        mistakes={
            swapped: torch.tensor([1.1]),
            turned: torch.tensor([2.8]),
            unweighted: torch.tensor([3.9]),
            unchanged: torch.tensor([1.0]),
            corrected: torch.tensor([1.2 / 0.19]),
        },
    )
    # 0.95 * 4 + 0.05 * 9 = 4.25
    expect(
        "exp_avg_sq",
        exp_avg_sq,
        torch.tensor([4.25]),
        given=given,
        likely="v <- beta2 v + (1 - beta2) g^2, in place.",
        mistakes={
            swapped: torch.tensor([4.5]),
            turned: torch.tensor([8.75]),
            unweighted: torch.tensor([12.8]),
            unchanged: torch.tensor([4.0]),
            "The second moment averages the square of the gradient.": torch.tensor([3.95]),
            corrected: torch.tensor([4.25 / 0.0975]),
        },
    )


@checks("adamw_update")
def a_later_step_uses_its_number(algo: Algo) -> None:
    """At a later step the correction is smaller: it uses the step's number."""
    # m = 1.2, v = 4.25; corrected 1.2 / 0.19 = 6.3158 and 4.25 / 0.0975 = 43.5897; 6.3158 / 6.6022 = 0.956612
    weight, grad, *_ = update(algo, 1.0, 3.0, (1.0, 4.0), 2)
    expect(
        "weight",
        weight,
        torch.tensor([0.904339]),
        given="weight 1, gradient 3, moments 1 and 4, step 2, lr 0.1, betas (0.9, 0.95)",
        likely="The correction of step t divides by 1 - beta^t.",
        mistakes={
            UNCHANGED: torch.tensor([1.0]),
            "The bias correction is that of step 1: it needs beta to the power `step`.": torch.tensor([0.869842]),
            "The bias correction is one step ahead: `step` is the number of this step, from 1.":
                torch.tensor([0.918882]),
            "The bias correction is missing.": torch.tensor([0.941791]),
            "The step uses the moments from before this gradient.": torch.tensor([0.917829]),
        },
    )  # fmt: skip
    expect(
        "grad",
        grad,
        torch.tensor([3.0]),
        given="gradient 3",
        likely="The gradient was changed; only weight and moments may change.",
    )


@checks("adamw_update")
def eps_is_outside_the_root(algo: Algo) -> None:
    """eps is added to the root of the corrected second moment."""
    # corrected moments 1 and 1: 1 / (1 + 1) = 0.5
    weight, *_ = update(algo, 1.0, 1.0, (0.0, 0.0), 1, eps=1.0)
    expect(
        "weight",
        weight,
        torch.tensor([0.95]),
        given="weight 1, gradient 1, moments 0, step 1, lr 0.1, eps 1",
        likely="First correct, then take the root, then add eps.",
        mistakes={
            UNCHANGED: torch.tensor([1.0]),
            "eps is inside the root: it is added after the root is taken.": torch.tensor([0.929289]),
            "eps is not used.": torch.tensor([0.9]),
            "eps is added before the bias correction, which then makes it larger.": torch.tensor([0.981726]),
        },
    )


@checks("adamw_update")
def decay_is_decoupled(algo: Algo) -> None:
    """Weight decay shrinks the weight itself; the moments do not see it."""
    given = "weight 4, gradient 0, moments 0, step 1, lr 0.1, weight_decay 0.5"
    weight, _, exp_avg, _ = update(algo, 4.0, 0.0, (0.0, 0.0), 1, weight_decay=0.5)
    expect(
        "weight",
        weight,
        torch.tensor([3.8]),  # 4 (1 - 0.1 * 0.5)
        given=given,
        likely="w <- w - lr lambda w.",
        mistakes={
            "The decay is coupled into the gradient: in AdamW it acts on the weight directly.": torch.tensor([3.9]),
            "The decay lacks its factor lr.": torch.tensor([2.0]),
            "weight_decay is not used, or the weight is not changed in place.": torch.tensor([4.0]),
            "The decay makes the weight larger.": torch.tensor([4.2]),
        },
    )
    expect("exp_avg", exp_avg, torch.tensor([0.0]), given=given, likely="The decay is coupled into the gradient.")
    weight, *_ = update(algo, 4.0, 1.0, (0.0, 0.0), 1, weight_decay=0.5)
    expect(
        "weight",
        weight,
        torch.tensor([3.7]),  # 4 * 0.95 - 0.1
        given="weight 4, gradient 1, moments 0, step 1, lr 0.1, weight_decay 0.5",
        likely="The decay and the step are two separate changes of the weight.",
        mistakes={"The decay comes first, then the step.": torch.tensor([3.705])},
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@checks("round_stochastically")
def exact_values_stay(algo: Algo) -> None:
    """A value that bfloat16 holds exactly does not change."""
    given = "values [1, -0.5, 0, 0.0078125], which bfloat16 holds exactly"
    values = torch.tensor([1.0, -0.5, 0.0, 1 / 128])
    got = algo.round_stochastically(values, generator())
    expect(
        "the result",
        got,
        values.clone(),
        given=given,
        likely="The lower 16 bits of these values are 0; noise below 2^16 must not carry into the upper ones.",
        mistakes={
            "The sum has 64 bits: torch.randint gives int64 unless you ask for dtype=torch.int32.":
                values.view(torch.int32).long().view(torch.float32),
        },
    )  # fmt: skip
    expect(
        "the type of the result",
        got.dtype,
        torch.bfloat16,
        given=given,
        likely="Convert at the end: `.bfloat16()`.",
    )


@checks("round_stochastically")
def only_the_two_neighbours_occur(algo: Algo) -> None:
    """A value becomes one of its two bfloat16 neighbours, and both occur."""
    got = algo.round_stochastically(torch.full((2000,), 1 + 0.25 / 128), generator())
    expect("the number of results", got.numel(), 2000, given="2000 values", likely="Keep the shape of the values.")
    seen = sorted(set(got.float().tolist()))
    expect(
        "the values that occur",
        seen,
        [1.0, UP],
        given="2000 times 1 + 0.25/128, a quarter of the way from 1 to the next bfloat16 number, 1.0078",
        likely="The noise spans exactly the 16 bits that are cut off: 0 to 2^16 - 1.",
        mistakes={
            "Every value went down: is there noise, does it span all 16 lower bits, and is it drawn for each element?":
                [1.0],
            "Every value went up: the noise must be uniform from 0 to 2^16 - 1, drawn for each element.": [UP],
            "The noise is too large: it spans more than the 16 bits that are cut off.": [1.0, UP, 1 + 2 / 128],
            "The noise is not only below the upper 16 bits: a value went below both its neighbours.":
                [1 - 1 / 256, 1.0, UP],
        },
    )  # fmt: skip


@checks("round_stochastically")
def up_with_the_right_probability(algo: Algo) -> None:
    """A value goes up with the probability that makes the mean right."""
    n = 20_000  # the standard error of the share is 0.003; the tolerance is five of them
    for sign in (1.0, -1.0):
        got = algo.round_stochastically(torch.full((n,), sign * (1 + 0.25 / 128)), generator())
        away = (got.float().abs() > 1).float().mean().item()
        expect(
            "the share that went away from 0",
            away,
            0.25,
            given=f"{n} times {'' if sign > 0 else '-'}(1 + 0.25/128), a quarter of the way to the next number",
            likely="The probability must be the fraction that is cut off, so the noise must be uniform.",
            mistakes={
                "The value was rounded to nearest after the noise was added: cut the lower half off instead.": 0.75,
                "Up and down are equally likely, wherever the value lies.": 0.5,
                "It is always rounded away from 0.": 1.0,
                "It is never rounded away from 0.": 0.0,
            },
            tolerance=0.015,
        )


@checks("round_stochastically")
def the_generator_decides(algo: Algo) -> None:
    """The random bits come from the generator, and no others are used."""
    values = torch.full((64,), 1 + 0.5 / 128)
    source = generator(0)
    first, second = algo.round_stochastically(values, source), algo.round_stochastically(values, source)
    torch.manual_seed(1)
    again = algo.round_stochastically(values, generator(0))
    expect(
        "the second result equal to the first",
        torch.equal(first, again),
        True,
        given="the same 64 values twice, each time with a new generator of seed 0",
        likely="The random bits do not come from `generator`; hand it to torch.randint.",
    )
    expect(
        "the second result equal to the first",
        torch.equal(first, second),
        False,
        given="the same 64 values twice, with one generator",
        likely="The noise is the same at each call: do not seed the generator in the function.",
    )


def take(algo: Algo, precision: str, count: int, elements: int = 1, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """`count` steps of weights that start at 1, with gradient 1 and lr 0.001: each step should subtract 0.001."""
    weight, state = torch.ones(elements, dtype=torch.bfloat16), dict[str, Any]()
    for _ in range(count):
        algo.adamw_step(weight, torch.ones(elements, dtype=torch.bfloat16), state, precision, **{"lr": 1e-3} | options)
    expect_keys("the state after a step", state, ["step", "exp_avg", "exp_avg_sq"])
    return weight, state


def given_steps(count: int, precision: str) -> str:
    steps = "1 step" if count == 1 else f"{count} steps"
    return f'weight 1, gradient 1, lr 0.001, {steps}, "{precision}"; the neighbour below 1 is 0.9961'


@checks("adamw_step")
def steps_are_counted(algo: Algo) -> None:
    """Steps are counted from 1, and the update gets the number of this step."""
    given = 'weight 1, gradient 1, lr 0.5, 1 step, "bf16"'
    weight, state = take(algo, "bf16", 1, lr=0.5)
    expect(
        'state["step"]',
        state["step"],
        1,
        given=given,
        likely="Add 1 at each call, once.",
        mistakes={"The step is not counted.": 0, "The step is counted twice.": 2},
    )
    expect(
        "weight",
        weight,
        torch.tensor([0.5]),
        given=given,
        likely="Widen weight and moments to float32, call adamw_update, and store the result in the weight.",
        mistakes={
            "The result was not stored in the weight; `weight = ...` makes another tensor.": torch.tensor([1.0]),
            # m / 0.19 over the root of v / 0.0975 is 0.735: 1 - 0.3675 = 0.6325, in bfloat16 0.6328
            "adamw_update got the number of the next step.": torch.tensor([0.632812]),
        },
    )
    _, state = take(algo, "bf16", 3)
    expect('state["step"]', state["step"], 3, given="3 steps", likely="Add 1 at each call.")


@checks("adamw_step")
def settings_are_handed_on(algo: Algo) -> None:
    """lr, betas, eps and weight decay reach the update."""
    given = 'weight 1, gradient 1, lr 0.5, betas (0.5, 0.5), eps 1, weight_decay 0.5, 1 step, "bf16"'
    weight, state = take(algo, "bf16", 1, lr=0.5, betas=(0.5, 0.5), eps=1.0, weight_decay=0.5)
    expect(
        "weight",
        weight,
        torch.tensor([0.5]),  # 1 - 0.5 * 0.5 = 0.75; 0.75 - 0.5 * 1 / (1 + 1) = 0.5
        given=given,
        likely="Hand lr, betas, eps and weight_decay on to adamw_update, in this order.",
        mistakes={
            "weight_decay is not handed on.": torch.tensor([0.75]),
            "eps is not handed on.": torch.tensor([0.25]),
        },
    )
    expect(
        'state["exp_avg"]',
        state["exp_avg"],
        torch.tensor([0.5]),
        given=given,
        likely="Store the moments that adamw_update changed.",
        mistakes={
            "betas are not handed on.": torch.tensor([0.1001]),  # 0.1 in bfloat16
            "The moments are not stored.": torch.tensor([0.0]),
        },
        tolerance=1e-3,
    )


def expect_type(state: dict[str, Any], name: str, right: torch.dtype, precision: str) -> None:
    expect(
        f'the type of state["{name}"]',
        state[name].dtype,
        right,
        given=f'1 step, "{precision}"',
        likely=f'The moments are in the wrong dtype: "{precision}" keeps them as new_state made them.',
    )


@checks("adamw_step")
def fp32_keeps_a_master(algo: Algo) -> None:
    """fp32: updates collect in the master, and the weight is the master rounded."""
    weight, state = take(algo, "fp32", 4)
    given = given_steps(4, "fp32")
    expect_keys("the state after a step", state, ["master"])
    expect(
        'state["master"]',
        state["master"],
        torch.tensor([0.996]),
        given=given,
        likely="Update the master in place.",
        mistakes={
            "The master is not used: it must be what adamw_update changes.": torch.tensor([1.0]),
            "The master was overwritten with the rounded weight.": torch.tensor([DOWN]),
        },
    )
    expect(
        "weight",
        weight,
        torch.tensor([DOWN]),  # 0.996 lies between 0.9922 and 0.9961
        given=given,
        likely="The weight is the master, rounded to nearest.",
        mistakes={"The master is not used: the weight was widened again at each step, and the updates were lost.":
                  torch.tensor([1.0])},
    )  # fmt: skip
    expect_type(state, "exp_avg", torch.float32, "fp32")
    expect_type(state, "exp_avg_sq", torch.float32, "fp32")
    # 1 - 0.95^4 = 0.18549375
    expect(
        'state["exp_avg_sq"]',
        state["exp_avg_sq"],
        torch.tensor([0.185494]),
        given=given,
        likely="In this precision the moments never pass through bfloat16.",
        mistakes={"The moments are not stored.": torch.tensor([0.0])},
    )


@checks("adamw_step")
def bf16_loses_small_updates(algo: Algo) -> None:
    """bf16: weight and moments are stored rounded to nearest, so small updates are lost."""
    weight, state = take(algo, "bf16", 4)
    given = given_steps(4, "bf16")
    expect(
        "weight",
        weight,
        torch.tensor([1.0]),  # 0.999 is nearer to 1 than to 0.9961, at every step
        given=given,
        likely="This precision keeps nothing but the rounded weight; the loss of the update is the point.",
        mistakes={
            "The updates are kept somewhere: this precision has the bfloat16 weight alone.": torch.tensor([DOWN])
        },
    )
    expect_type(state, "exp_avg", torch.bfloat16, "bf16")
    expect_type(state, "exp_avg_sq", torch.bfloat16, "bf16")
    # 1 - 0.9^4 = 0.3439, within two roundings
    expect(
        'state["exp_avg"]',
        state["exp_avg"],
        torch.tensor([0.3439]),
        given=given,
        likely="Widen the stored moments, update them, store them again.",
        mistakes={"The moments are not stored.": torch.tensor([0.0])},
        tolerance=4e-3,
    )


@checks("adamw_step")
def stochastic_moves_the_right_share(algo: Algo) -> None:
    """bf16_stochastic: the right share of the weights moves, and the second moment is rounded so too."""
    n = 4000
    given = f'{n} weights of 1, gradient 1, lr 0.001, "bf16_stochastic"; the neighbour below 1 is 0.9961'
    weight, state = take(algo, "bf16_stochastic", 1, n)
    # 0.001 of a gap of 0.0039 is 0.256; the standard error is 0.007
    expect(
        "the share of the weights that became 0.9961 in 1 step",
        (weight == DOWN).float().mean().item(),
        0.256,
        given=given,
        likely="Store the weight with round_stochastically.",
        mistakes={"The weight is rounded to nearest: all updates are lost.": 0.0},
        tolerance=0.03,
    )
    # v = 0.05 lies between the bfloat16 numbers 0.0498 and 0.0500
    expect(
        'the number of different values in state["exp_avg_sq"]',
        len(set(state["exp_avg_sq"].float().tolist())),
        2,
        given=given + "; the second moment is 0.05, between 0.0498 and 0.0500",
        likely="The second moment is rounded stochastically too.",
        mistakes={"The second moment is rounded to nearest: it needs stochastic rounding too.": 1},
    )
    expect_type(state, "exp_avg_sq", torch.bfloat16, "bf16_stochastic")
    weight, _ = take(algo, "bf16_stochastic", 2, n)
    expect(
        "the share of the weights that moved in both of 2 steps",
        (weight == 1 - 2 / 256).float().mean().item(),
        0.0655,  # 0.256^2
        given=given,
        likely="Use the generator of the state; each step draws new bits from it.",
        mistakes={"The same weights move at each step: a new generator at each step repeats its bits.": 0.256},
        tolerance=0.03,
    )


@checks("adamw_step")
def kahan_keeps_what_rounding_left_out(algo: Algo) -> None:
    """bf16_kahan: the compensation holds what the rounding left out, and the next step adds it."""
    weight, state = take(algo, "bf16_kahan", 1)
    expect_keys("the state after a step", state, ["compensation"])
    expect(
        'state["compensation"]',
        state["compensation"],
        torch.tensor([-0.001]),  # 0.999 - 1
        given=given_steps(1, "bf16_kahan"),
        likely="The compensation is the float32 result minus the weight as it was stored.",
        mistakes={
            "The compensation has the wrong sign: it is the float32 result minus the stored weight.":
                torch.tensor([0.001]),
            "The compensation is never stored.": torch.tensor([0.0]),
        },
    )  # fmt: skip
    weight, state = take(algo, "bf16_kahan", 4)
    expect(
        "weight",
        weight,
        torch.tensor([DOWN]),
        given=given_steps(4, "bf16_kahan"),
        likely="The update starts from weight + compensation.",
        mistakes={
            "The compensation is not added to the weight before the update.": torch.tensor([1.0]),
            "The compensation was computed from the old weight: store the new weight first, then subtract it.":
                torch.tensor([1 - 3 / 256]),
        },
    )  # fmt: skip
    expect(
        "weight + compensation",
        weight.float() + state["compensation"].float(),
        torch.tensor([0.996]),
        given=given_steps(4, "bf16_kahan"),
        likely="Weight and compensation together are the float32 result, nearly.",
        tolerance=3e-5,
    )
