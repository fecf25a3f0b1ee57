"""The static figures of the notebooks: numbers in, a figure or a text out. The widgets put sliders on the same
functions.

What the exercises compute is drawn through `algo`, so a student's own code is what is seen. This file does not know
where the numbers come from, and does not measure anything. The look is that of `a5lib.plots`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from a5lib.cycle_views import PHASES
from a5lib.engines.plan import CONTEXT, Plan, what_stays
from a5lib.errors import UserError
from a5lib.optimizers import stochastic_round
from a5lib.plots import COLORS, DASHED, DOTTED, SOLID, Picture, label, look

HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "--", "||", "**")
GREY = "0.35"
FAR = 10  # a budget this many times the total is named, not drawn
TINY = 0.015  # buffers below this share of the longest bar are drawn together
PASS_COLUMNS = 32  # events in a row of pass_figure, at most
BUFFERS = {  # in a plan -> in its figure, from the left; a buffer that is not here comes after them
    "CUDA itself": "CUDA itself",
    "weights": "weights", "weights that stay": "weights",
    "optimizer state": "optimizer state", "optimizer state that stays": "optimizer state",
    "gradients": "gradients", "gradients that stay": "gradients",
    "visiting weights": "visiting weights and gradients",
    "visiting weights and gradients": "visiting weights and gradients",
    "hidden states": "hidden states", "layer inputs": "layer inputs",
    "layer at work": "layer or head at work", "head at work": "layer or head at work",
    "layer or head at work": "layer or head at work",
}  # fmt: skip

NORMALIZERS = {  # title -> baseline and normaliser
    "(r - mean) / std\ngrpo": ("mean", "std"),
    "r - mean\ndr_grpo": ("mean", "none"),
    "(r - mean) / mean\nmaxrl": ("mean", "mean"),
    "r\nrft": ("none", "none"),
}
OLD_PROBABILITY = 0.25  # of the token in clip_figure, under the policy that sampled it
HIGHEST_RATIO = 1 / OLD_PROBABILITY  # at which the token's probability is 1
TENANTS = ("trainer", "engine")
TRAINERS = ("leave", "write", "return", "score", "update", "rest")  # of PHASES; in the others the engine works
GIB = 2**30
CLIP_LOOKS = {"noclip": ("o", DOTTED), "grpo": ("s", SOLID), "cispo": ("D", DASHED)}


def advantage_figure(algo: Any, rewards: Sequence[float] | Tensor) -> Picture:
    """The advantages of one group's rewards under each baseline and normaliser, one panel each. Taught in notebook 04.

    Args:
        algo: has `compute_group_normalized_rewards`.
        rewards: of the G responses to one prompt.

    Raises:
        UserError: no rewards, one that is not a finite number, or advantages that are not G numbers.
    """
    values = [_number("a reward", r) for r in (rewards.tolist() if isinstance(rewards, Tensor) else rewards)]
    if not 1 <= len(values) <= 32:
        raise UserError(f"advantage_figure got {len(values)} rewards; give the rewards of one group, 1 to 32 numbers.")
    with look():
        figure = Picture(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(1, len(NORMALIZERS), sharey=True)
        for i, (ax, (title, (baseline, normalizer))) in enumerate(zip(panels, NORMALIZERS.items(), strict=True)):
            label(ax, title, "response and its reward", "advantage" if i == 0 else "")
            ax.axhline(0, color=GREY, linewidth=0.8)
            ax.grid(visible=False, axis="x")
            ax.set_xticks(range(len(values)), [f"{r:g}" for r in values])
            ax.set_xlim(-0.7, len(values) - 0.3)
            try:
                advantages = _advantages(algo, values, baseline, normalizer)
            except UserError:
                raise
            except ValueError as error:  # a group of one
                ax.text(0.5, 0.5, _wrapped(str(error)), transform=ax.transAxes, ha="center", va="center", fontsize=8)
                continue
            bars = ax.bar(range(len(values)), advantages, 0.7, color=COLORS[i], hatch=HATCHES[i], edgecolor="white")
            if len(values) <= 10:
                texts = [f"{a:.2f}".removesuffix(".00") for a in advantages]
                ax.bar_label(bars, texts, padding=2, fontsize=8, rotation=90 if len(values) > 5 else 0)
        low, high = panels[0].get_ylim()
        panels[0].set_ylim(min(1.35 * low, -0.5), max(1.2 * high, 1.0))  # room for the numbers at the bars
    return figure


def _advantages(algo: Any, rewards: list[float], baseline: str, normalizer: str) -> list[float]:
    result = algo.compute_group_normalized_rewards(
        torch.tensor(rewards), len(rewards), baseline=baseline, advantage_normalizer=normalizer
    )
    advantages = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(advantages, Tensor) or advantages.numel() != len(rewards):
        raise _wrong("compute_group_normalized_rewards", advantages, f"{len(rewards)} advantages", "advantages")
    return [float(a) for a in advantages.detach().reshape(-1)]


def clip_figure(algo: Any, ratio: float = 1.1, advantage: float = 1.0, cliprange: float = 0.2) -> Picture:
    """Loss of one token and its gradient with respect to the log-probability, against the ratio new / old.

    The token had the probability `OLD_PROBABILITY` when it was sampled. The gradient is what autograd makes of the
    loss. "noclip", "grpo" and "cispo" are drawn; the marks are at the chosen ratio. Taught in notebook 05.

    Args:
        algo: has `compute_policy_gradient_loss`.
        ratio: the chosen ratio, above 0 and at most `HIGHEST_RATIO`.
        advantage: of the token's response.
        cliprange: eps, from 0 to 1.

    Raises:
        UserError: a number is out of its range, or the loss has another shape or no gradient.
    """
    ratio, advantage = _number("ratio", ratio), _number("advantage", advantage)
    if not 0 < ratio <= HIGHEST_RATIO:
        raise UserError(f"ratio is {ratio:g}; choose one above 0 and at most {HIGHEST_RATIO:g}.")
    if not 0 <= _number("cliprange", cliprange) < 1:
        raise UserError(f"cliprange is {cliprange:g}; choose one from 0 to below 1.")
    grid = torch.linspace(0.02, max(2.0, min(1.1 * ratio, HIGHEST_RATIO)), 397).tolist()
    ratios = torch.tensor([*grid, ratio])
    with look():
        figure = Picture(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        label(left, "Loss of the token", "ratio: new / old probability", "loss")
        label(right, "Its gradient", "ratio: new / old probability", "d loss / d log-probability")
        for ax in (left, right):
            ax.axvspan(1 - cliprange, 1 + cliprange, color="0.93", zorder=0)
            ax.axvline(ratio, color=GREY, linewidth=0.8)
            ax.axhline(0, color=GREY, linewidth=0.8)
        for i, (method, (marker, style)) in enumerate(CLIP_LOOKS.items()):
            losses, gradients = token_losses(algo, method, ratios, advantage, cliprange)
            name = f"{method}: loss {losses[-1]:.3f}, gradient {gradients[-1]:.3f}"
            for ax, ys, text in ((left, losses, name), (right, gradients, None)):
                width = 4.0 - 1.2 * i  # where lines coincide, the wide ones show at the sides of the narrow ones
                ax.plot(grid, ys[:-1], style, color=COLORS[i], linewidth=width, label=text)
                ax.plot([ratio], [ys[-1]], marker, color=COLORS[i], markersize=11 - 2.5 * i, markeredgecolor="black")
        for handle, line in zip(
            figure.legend(loc="outside lower center", ncols=3, handlelength=3.5).get_lines(), CLIP_LOOKS, strict=True
        ):
            handle.set_marker(CLIP_LOOKS[line][0])
        figure.suptitle(
            f"ratio {ratio:.2f}, advantage {advantage:g}, clip range {cliprange:g} (grey band: {1 - cliprange:.3g} to "
            f"{1 + cliprange:.3g}), old probability {OLD_PROBABILITY:g}",
            fontsize=10,
        )
    return figure


def token_losses(
    algo: Any, method: str, ratios: Tensor, advantage: float, cliprange: float
) -> tuple[list[float], list[float]]:
    """Loss and gradient of a token at each ratio, float [N], through `algo.compute_policy_gradient_loss`."""
    old = torch.full_like(ratios, math.log(OLD_PROBABILITY))[None]  # [1, N]
    new = (old + ratios.log()).requires_grad_()
    result = algo.compute_policy_gradient_loss(
        torch.tensor([advantage]), new, method, old, cliprange, torch.ones_like(old, dtype=torch.bool)
    )
    loss = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(loss, Tensor) or loss.shape != new.shape:
        raise _wrong("compute_policy_gradient_loss", loss, f"a loss of shape {list(new.shape)}", "losses")
    if not loss.requires_grad:
        raise UserError(f'The loss of {method!r} has no gradient; is policy_log_probs detached? Run check("losses").')
    (gradient,) = torch.autograd.grad(loss.sum(), new, allow_unused=True)
    return loss.detach()[0].tolist(), [0.0] * len(ratios) if gradient is None else gradient[0].tolist()


def precision_figure(weight: float = 1.0, update: float = 1e-3, steps: int = 200) -> Picture:
    """What is stored of a weight after each of many equal updates, in four ways, against the exact line.

    Left the stored weight, right its distance from the exact one in units of the update. The four ways are those of
    `a5lib.optimizers.AdamW`. Taught in notebook 07.

    Args:
        weight: at the start; it is rounded to bfloat16 first.
        update: added at each step.
        steps: 1 to 5000.

    Raises:
        UserError: a number that is not finite, or steps out of range.
    """
    update = _number("update", update)
    if not 1 <= _number("steps", steps) <= 5000:
        raise UserError(f"steps is {steps:g}; choose 1 to 5000.")
    start = torch.tensor(_number("weight", weight)).bfloat16()
    xs = list(range(int(steps) + 1))
    exact = [start.item() + update * x for x in xs]
    towards = torch.tensor(math.copysign(math.inf, update)).bfloat16()
    gap = abs((torch.nextafter(start, towards) - start).item())
    with look():
        figure = Picture(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        label(left, "What is stored", "step", "weight")
        label(right, "Distance from the exact weight", "step", "stored - exact, in updates")
        left.plot(xs, exact, color="black", linewidth=1, label=f"exact: {exact[-1]:.6g}")
        looks = (("v", SOLID, 2.2), ("o", DOTTED, 1.8), ("s", DASHED, 1.3), ("D", SOLID, 1.2))
        for i, (name, stored) in enumerate(stored_weights(start, update, int(steps)).items()):
            marker, style, width = looks[i]
            off = [(s - e) / update if update else 0.0 for s, e in zip(stored, exact, strict=True)]
            for ax, ys, text in ((left, stored, f"{name}: {stored[-1]:.6g}"), (right, off, None)):
                ax.plot(xs, ys, style, color=COLORS[i], marker=marker, markersize=5, linewidth=width, label=text,
                        markevery=(i * len(xs) // 32, max(1, len(xs) // 8)))  # fmt: skip
        right.axhline(0, color="black", linewidth=1)
        for ax in (left, right):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.ticklabel_format(axis="y", useOffset=False)
        figure.legend(loc="outside lower center", ncols=3, title=f"After {int(steps)} steps")
        figure.suptitle(
            f"weight {start.item():g}, update {update:g}; the next bfloat16 number is {gap:.3g} away", fontsize=10
        )
    return figure


def stored_weights(start: Tensor, update: float, steps: int) -> dict[str, list[float]]:
    """The weight as stored before the first and after each step, by the way of storing it.

    Args:
        start: bfloat16 [].
        update: added at each step, in float32.
        steps: how many.
    """
    generator = torch.Generator().manual_seed(0)
    stored = {name: [start.item()] for name in ("bf16", "bf16, stochastic", "bf16, Kahan", "fp32 master copy")}
    nearest, stochastic, kahan, left_out = start, start, start, torch.zeros_like(start)
    master = start.float()
    for _ in range(steps):
        nearest = (nearest.float() + update).bfloat16()
        bits = torch.randint(1 << 16, (), dtype=torch.int32, generator=generator)
        stochastic = stochastic_round(stochastic.float() + update, bits)
        wanted = kahan.float() + left_out.float() + update
        kahan = wanted.bfloat16()
        left_out = (wanted - kahan.float()).bfloat16()
        master = master + update
        for values, value in zip(stored.values(), (nearest, stochastic, kahan, master), strict=True):
            values.append(value.item())
    return stored


def ledger_figure(ledger: Mapping[str, int], budget: int | None = None) -> Picture:
    """Bytes by name as a stack that is drawn apart, one row each, and the whole stack in the last row.

    Args:
        ledger: bytes by name, as `a5lib.memory.update_ledger` gives them.
        budget: of the card, in bytes; drawn as a line, or named where it lies far beyond the stack.

    Raises:
        UserError: an empty ledger, or bytes that are not a number of at least 0.
    """
    _check_bytes(ledger)
    total = sum(ledger.values())
    if budget is not None:
        _check_bytes({"budget": budget})
    far = budget is not None and budget > FAR * max(total, 1)  # the bars would be too narrow to see
    largest = total if budget is None or far else max(total, budget)
    unit, name = _unit(largest)
    with look():
        figure = Picture(figsize=(9, 1.3 + 0.33 * (len(ledger) + 1)), layout="constrained")
        ax = figure.subplots()
        verdict = "" if budget is None else f"; it {'fits' if total <= budget else 'does not fit'} into {_size(budget)}"
        label(ax, f"Predicted: {_size(total)} on the card{verdict}", name, "")
        reach = 1.2 * max(largest, 1) / unit
        base = 0.0
        for i, size in enumerate(ledger.values()):
            style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "hatch": HATCHES[i % len(HATCHES)],
                                     "edgecolor": "white", "linewidth": 0}  # fmt: skip
            width = size / unit
            ax.barh([i, len(ledger)], width, 0.72, base, **style)
            share = f"{_size(size)} ({size / max(total, 1):.0%})"
            outside = base + width + 0.15 * reach > reach  # then the text stands before the bar
            ax.text(base if outside else base + width, i, f" {share} ", va="center", ha="right" if outside else "left",
                    fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0}, zorder=3)  # fmt: skip
            base += width
        ax.text(base, len(ledger), f" {_size(total)}", va="center", ha="left", fontsize=8, weight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0}, zorder=3)  # fmt: skip
        ax.set_yticks(range(len(ledger) + 1), [*ledger, "all together"])
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set_xlim(0, reach)
        if far:
            ax.annotate("budget \N{RIGHTWARDS ARROW}", (1, 0), (-3, 2), xycoords="axes fraction", ha="right",
                        textcoords="offset points", fontsize=8)  # fmt: skip
        elif budget is not None:
            ax.axvline(budget / unit, color="black", linestyle=DASHED, linewidth=1.4, zorder=1.5)
            ax.annotate("budget", (budget / unit, 0), (3, 2), xycoords=("data", "axes fraction"),
                        textcoords="offset points", fontsize=8)  # fmt: skip
    return figure


def plan_figure(plan: Plan) -> Picture:
    """The bytes of a plan by phase, stacked, against its budget; below them those on the host. Taught in notebook 09.

    The card's bars begin with what CUDA takes before the first tensor, because a budget is for the whole card. Buffers
    that are too small to see are drawn as one.

    Args:
        plan: as `a5lib.engines.plan.plan_update` gives it.

    Raises:
        UserError: the plan has no bytes.
    """
    start = {"CUDA itself": CONTEXT} if plan.on_card else {}
    card = {phase: start | sizes for phase, sizes in plan.card.items()}
    _check_bytes({name: size for sizes in (*card.values(), plan.host) for name, size in sizes.items()})
    highest = max(sum(sizes.values()) for sizes in card.values())
    far = plan.budget is not None and plan.budget > FAR * highest  # the bars would be too narrow to see
    budget = "" if plan.budget is None else f"; the budget is {_size(plan.budget)}"
    looks = _buffer_looks([*card.values(), plan.host])
    with look():
        figure = Picture(figsize=(9, 4.6 if plan.host else 3.6), layout="constrained")
        ratios = (len(card), 1.3) if plan.host else (1.0,)
        axes = figure.subplots(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
        label(axes[0], f"Predicted on the card: at most {_size(highest)}{budget}", "", "")
        drawn = _stacked_rows(axes[0], card, looks, None if far else plan.budget)
        if plan.host:
            label(axes[1], f"Predicted on the host: {_size(sum(plan.host.values()))}", "", "")
            drawn |= _stacked_rows(axes[1], {"host": plan.host}, looks)
        handles = [Patch(label=name, linewidth=0, **style) for name, style in looks.items() if name in drawn]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=2.2, handleheight=1.3)
        title = f"{plan.engine.replace('_', '-')} engine; on the card: {what_stays(plan)}"
        figure.suptitle(_wrapped(title, 120), fontsize=10)
    return figure


def _buffer_looks(ledgers: Sequence[Mapping[str, int]]) -> dict[str, dict[str, Any]]:
    """Colour and hatch of every name that the figure of a plan has, from left to right."""
    known = dict.fromkeys(BUFFERS.values())
    others = {name: max(s.get(name, 0) for s in ledgers) for s in ledgers for name in s if name not in BUFFERS}
    largest_first = sorted(others, key=lambda name: -others[name])
    looks: dict[str, dict[str, Any]] = {
        name: {"facecolor": COLORS[i % len(COLORS)], "hatch": HATCHES[(i + i // len(COLORS)) % len(HATCHES)],
               "edgecolor": "white"} for i, name in enumerate([*known, *largest_first])
    }  # fmt: skip
    return looks | {"smaller buffers": {"facecolor": "0.6", "hatch": "", "edgecolor": "white"}}


def _stacked_rows(
    ax: Axes, rows: Mapping[str, Mapping[str, int]], looks: Mapping[str, Mapping[str, Any]], budget: int | None = None
) -> set[str]:
    """A bar for each row, stacked of its buffers, with the sum behind it; returns the names that were drawn."""
    longest = max(*(sum(sizes.values()) for sizes in rows.values()), budget or 0, 1)
    unit, unit_name = _unit(longest)
    highest = {name: max(sizes.get(name, 0) for sizes in rows.values()) for sizes in rows.values() for name in sizes}
    drawn = set()
    for i, sizes in enumerate(rows.values()):
        widths = dict.fromkeys(looks, 0)
        for name, size in sizes.items():
            small = highest[name] < TINY * longest
            widths["smaller buffers" if small else BUFFERS.get(name, name)] += size
        base = 0.0
        for name, size in widths.items():
            if size:
                ax.barh(i, size / unit, 0.72, base, linewidth=0, **looks[name])
                drawn.add(name)
            base += size / unit
        ax.text(base, i, f" {_size(sum(sizes.values()))} ", va="center", fontsize=8, zorder=3,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})  # fmt: skip
    if budget is not None:
        ax.axvline(budget / unit, color="black", linestyle=DASHED, linewidth=1.4, zorder=1.5)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.12 * longest / unit)
    ax.set_xlabel(unit_name)
    return drawn


def cycle_figure(
    phases: Sequence[tuple[str, int, int]], budget: int | None = None, title: str = "One cycle on one card"
) -> Picture:
    """Bytes on the card through the phases of one cycle: the trainer's, and the engine's on top. Taught in notebook 10.

    Args:
        phases: name, bytes of the trainer, bytes of the engine that generates.
        budget: of the card, in bytes; drawn as a line.
        title: says where the bytes come from.

    Raises:
        UserError: no phases, or bytes that are not a number of at least 0.
    """
    trainer = [size for _, size, _ in phases]
    engine = [size for _, _, size in phases]
    _check_bytes({f"{who} in phase {i}": size for who, sizes in (("trainer", trainer), ("engine", engine))
                  for i, size in enumerate(sizes, start=1)})  # fmt: skip
    totals = [t + e for t, e in zip(trainer, engine, strict=True)]
    unit, unit_name = _unit(max(*totals, budget or 0))
    with look():
        figure = Picture(figsize=(9, 3.6), layout="constrained")
        ax = figure.subplots()
        label(ax, title, "phase", f"on the card ({unit_name})")
        edges = range(len(phases) + 1)
        rows: tuple[tuple[str, list[int], list[int], int], ...] = (
            ("trainer", [0] * len(phases), trainer, 0), ("engine", trainer, totals, 1),
        )  # fmt: skip
        for who, low, high, i in rows:
            ax.stairs(
                [h / unit for h in high], edges, baseline=[x / unit for x in low], fill=True, label=who,
                facecolor=COLORS[i], edgecolor="white", hatch=(HATCHES[1], HATCHES[2])[i], linewidth=0,
            )  # fmt: skip
        ax.stairs([t / unit for t in totals], edges, color="black", linewidth=1.2)
        top = 1.15 * max(*totals, budget or 0, 1) / unit
        for i, total in enumerate(totals):
            height = total / unit
            on_line = budget is not None and 0 <= budget / unit - height < 0.08 * top  # then below the bar's edge
            ax.annotate(f"{height:.2f} {unit_name}", (i + 0.5, height), (0, -4 if on_line else 3), fontsize=8,
                        textcoords="offset points", ha="center", va="top" if on_line else "bottom",
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
            ax.axvline(i + 1, color="0.8", linewidth=0.6, zorder=0)
        if budget is not None:
            ax.axhline(budget / unit, color="black", linestyle=DASHED, label=f"budget {_size(budget)}")
        ax.set_xticks(
            [i + 0.5 for i in range(len(phases))], [_wrapped(name, max(6, 100 // len(phases))) for name, *_ in phases]
        )
        ax.set_xlim(0, len(phases))
        ax.set_ylim(0, top)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def timeline_figure(
    seconds: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = (), budget: int | None = None
) -> Picture:
    """A cycle as it was measured: who works when, and below it who holds how much of the card. Taught in notebook 10.

    Args:
        seconds: of each phase, as `a5 diagnose-backend` writes them; one begins when the one before it
            ends.
        samples: of memory, as `a5lib.recorder.MemoryRecorder` makes them in the trainer's process: `t` in seconds since
            the cycle began, `reserved` by its torch, and `card`, the use of the whole card, in bytes. What torch has
            not reserved there is drawn as the engine's: CUDA's contexts and other programs are in it.
        budget: of the card, in bytes; drawn as a line.

    Raises:
        UserError: there are no phases, or one has another name.
    """
    if not seconds or not seconds.keys() <= PHASES.keys():
        raise UserError(
            f"A timeline has the phases {', '.join(PHASES)}; give the seconds of some of these, not of "
            f"{', '.join(seconds.keys() - PHASES.keys()) or 'none'}."
        )
    order = [name for name in PHASES if name in seconds]
    looks: dict[str, dict[str, Any]] = {
        name: {"facecolor": COLORS[i % len(COLORS)], "hatch": HATCHES[(i + i // len(COLORS)) % len(HATCHES)],
               "edgecolor": "white"} for i, name in enumerate(order, start=len(TENANTS))
    }  # fmt: skip
    with look():
        figure = Picture(figsize=(9, 5.4 if samples else 3), layout="constrained")
        ratios = (1.0, 2.2) if samples else (1.0,)
        axes = figure.subplots(len(ratios), 1, height_ratios=ratios, sharex=True, squeeze=False)[:, 0]
        begin = 0.0
        for name in order:
            lane = TENANTS.index("trainer" if name in TRAINERS else "engine")
            axes[0].barh(lane, seconds[name], 0.72, begin, linewidth=0, **looks[name])
            begin += seconds[name]
        label(axes[0], f"One cycle: {begin:.2f} s", "", "")
        axes[0].set_yticks(range(len(TENANTS)), TENANTS)
        axes[0].set_ylim(len(TENANTS) - 0.5, -0.5)
        axes[0].grid(visible=False, axis="y")
        if samples:
            _draw_tenants(axes[1], samples, budget)
        axes[-1].set_xlabel("seconds")
        texts = {name: f"{name}: {f'{s:.3g}' if s >= 0.01 else '< 0.01'} s" for name, s in seconds.items()}
        handles = [Patch(label=texts[name], linewidth=0, **looks[name]) for name in order]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=2.2, handleheight=1.3)
    return figure


def _draw_tenants(ax: Axes, samples: Sequence[Mapping[str, Any]], budget: int | None) -> None:
    """The trainer's part of the card over time, and the engine's on top."""
    trainer = [sample["reserved"] / GIB for sample in samples]
    both = [sample["card"] / GIB for sample in samples]
    times = [sample["t"] for sample in samples]
    for who, low, high, i in (("trainer", [0.0] * len(both), trainer, 0), ("engine, contexts", trainer, both, 1)):
        ax.fill_between(times, low, high, step="post", label=who, facecolor=COLORS[i], edgecolor="white",
                        hatch=HATCHES[i + 1], linewidth=0)  # fmt: skip
    ax.step(times, both, where="post", color="black", linewidth=1.2)
    if budget is not None:
        ax.axhline(budget / GIB, color="black", linestyle=DASHED, label=f"budget {_size(budget)}")
    ax.set_ylim(0, 1.3 * max(*both, (budget or 0) / GIB))
    label(ax, f"Measured: at most {_size(max(both) * GIB)} of the card", "", "GiB")
    ax.legend(loc="upper right", ncols=3, fontsize=8)


LANES = {"in": "in from the host", "work": "work", "out": "out to the host"}


def pass_figure(events: Sequence[tuple[str, str, str]]) -> Picture:
    """What comes to the card, works and goes home, one after another, coloured by part. Taught in notebook 09.

    A box says which numbers travel, W for weights, G for a gradient, S for the optimizer's state, or the number of the
    microbatch whose hidden state travels or works.

    Args:
        events: lane ("in", "work" or "out"), part of the model, and what, as
            `a5lib.course.engine_events.engine_events` gives them.

    Raises:
        UserError: there are no events.
    """
    if not events:
        raise UserError("There are no events to draw; give what engine_events returned.")
    letters = {"weight": "W", "grad": "G"}
    parts = dict.fromkeys(part for _, part, _ in events)
    looks: dict[str, dict[str, Any]] = {
        part: {"facecolor": COLORS[i % len(COLORS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
        for i, part in enumerate(parts)
    }
    rows = -(-len(events) // PASS_COLUMNS)
    columns = -(-len(events) // rows)
    with look():
        figure = Picture(figsize=(9, 1.5 * rows + 0.6), layout="constrained")
        for row, ax in enumerate(figure.subplots(rows, 1, squeeze=False)[:, 0]):
            for x, (lane, part, what) in enumerate(events[row * columns : (row + 1) * columns], 1 + row * columns):
                y = list(LANES).index(lane)
                ax.barh(y, 0.94, 0.8, x - 0.47, linewidth=0, **looks[part])
                text = what if what.isdigit() else letters.get(what, "S")
                ax.text(x, y, text, ha="center", va="center", fontsize=8,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2})  # fmt: skip
            label(ax, "", "event" if row == rows - 1 else "", "")
            ax.set_yticks(range(len(LANES)), list(LANES.values()))
            ax.set_ylim(len(LANES) - 0.5, -0.5)
            ax.set_xlim(row * columns + 0.4, (row + 1) * columns + 0.6)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.grid(visible=False, axis="y")
        handles = [Patch(label=part, linewidth=0, **looks[part]) for part in parts]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(parts)), handleheight=1.3)
    return figure


# --- numbers and words


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {value!r}; give a number.") from None
    if not math.isfinite(number):
        raise UserError(f"{name} is {number}; give a finite number.")
    return number


def _check_bytes(sizes: Mapping[str, int]) -> None:
    if not sizes:
        raise UserError("There is nothing to draw; give at least one name with its bytes.")
    for name, size in sizes.items():
        if _number(f"the size of {name!r}", size) < 0:
            raise UserError(f"the size of {name!r} is {size}; give bytes of at least 0.")


def _wrong(function: str, got: Any, expected: str, exercise: str) -> UserError:
    what = f"a tensor of shape {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
    return UserError(f'{function} gave {what}, not {expected}; run check("{exercise}").')


def _unit(size: float) -> tuple[int, str]:
    """The unit in which the size is at least 1, for an axis.

    >>> _unit(3 * 2**30), _unit(5_000)
    ((1073741824, 'GiB'), (1024, 'KiB'))
    """
    names = ("bytes", "KiB", "MiB", "GiB")
    power = max(i for i in range(len(names)) if i == 0 or size >= 1024**i)
    return 1024**power, names[power]


def _size(size: float) -> str:
    """A number of bytes as a person reads it, with three digits.

    >>> _size(3 * 2**30), _size(12.34 * 2**20), _size(0)
    ('3.00 GiB', '12.3 MiB', '0 bytes')
    """
    unit, name = _unit(size)
    value = size / unit
    return f"{value:.{0 if unit == 1 or value >= 100 else 1 if value >= 10 else 2}f} {name}"


def _wrapped(text: str, width: int = 24) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))
