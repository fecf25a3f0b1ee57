"""Sliders on the static figures of `a5lib.figures`, a browser of rollouts, and a live board for a training run.

Every explorer draws with the function of the static figure, and calls `algo` anew at each change, so that an exercise
file that was saved is seen without a new kernel. A picture is replaced where it stands. Without ipywidgets each shows
the static figure, or text, and says how to get the sliders.

JupyterLab hands a widget's message to the kernel while a cell runs, in another thread. The board's button therefore
only sets a flag, and nothing here uses pyplot.
"""

from __future__ import annotations

import html
import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from a5lib.config import EngineName, OptimizerState
from a5lib.engines.plan import UpdateSize, plan_update
from a5lib.errors import UserError
from a5lib.figures import HIGHEST_RATIO, advantage_figure, clip_figure, plan_figure, precision_figure
from a5lib.plots import COLORS, MARKERS, Picture, Run, draw_entropy, draw_length, draw_memory, draw_rewards, look
from a5lib.records import Rollout
from a5lib.rollout_views import as_rollout, rollout_class, rollout_html, rollout_text
from a5lib.shapes import SHAPES
from a5lib.training import StopRequest

NO_WIDGETS = "There are no sliders here, because ipywidgets is not installed (pip install ipywidgets). {instead}"
GIB = 2**30


def advantage_explorer(algo: Any) -> Any:
    """Sliders for the rewards of a group; its advantages under each normaliser. Taught in notebook 04."""

    start = {"group_size": 8, "right": 2, "wrong_reward": 0.0}

    def draw(group_size: int, right: int, wrong_reward: float) -> Picture:
        right = min(right, group_size)
        return advantage_figure(algo, [1.0] * right + [wrong_reward] * (group_size - right))

    def controls(w: Any) -> dict[str, Any]:
        return {
            "group_size": w.IntSlider(start["group_size"], 1, 16, description="responses"),
            "right": w.IntSlider(start["right"], 0, 16, description="right ones"),
            "wrong_reward": w.FloatSlider(
                start["wrong_reward"], min=0.0, max=1.0, step=0.1, description="reward if wrong"
            ),
        }

    return _explorer(draw, controls, start, "advantage_figure(algo, rewards)")


def clip_explorer(algo: Any) -> Any:
    """Sliders for ratio, advantage and clip range; loss and gradient of a token. Taught in notebook 05."""
    start = {"ratio": 1.1, "advantage": 1.0, "cliprange": 0.2}

    def controls(w: Any) -> dict[str, Any]:
        return {
            "ratio": w.FloatSlider(start["ratio"], min=0.05, max=HIGHEST_RATIO, step=0.05, description="ratio"),
            "advantage": w.FloatSlider(start["advantage"], min=-2.0, max=2.0, step=0.25, description="advantage"),
            "cliprange": w.FloatSlider(start["cliprange"], min=0.0, max=0.9, step=0.05, description="clip range"),
        }

    def draw(ratio: float, advantage: float, cliprange: float) -> Picture:
        return clip_figure(algo, ratio, advantage, cliprange)

    return _explorer(draw, controls, start, "clip_figure(algo, ratio, advantage, cliprange)")


def precision_explorer() -> Any:
    """Sliders for a weight, the update and the number of updates; what is stored. Taught in notebook 07."""

    start: dict[str, Any] = {"weight": 1.0, "exponent": -3.0, "sign": 1, "steps": 200}

    def draw(weight: float, exponent: float, sign: int, steps: int) -> Picture:
        return precision_figure(weight, sign * 10.0**exponent, steps)

    def controls(w: Any) -> dict[str, Any]:
        return {
            "weight": w.SelectionSlider(
                options=[0.01, 0.1, 0.5, 1.0, 2.0, 8.0], value=start["weight"], description="weight"
            ),
            "exponent": w.FloatSlider(start["exponent"], min=-6.0, max=-1.0, step=0.25, description="log10 update"),
            "sign": w.Dropdown(options=[("up", 1), ("down", -1)], value=start["sign"], description="direction"),
            "steps": w.IntSlider(start["steps"], 10, 1000, step=10, description="updates"),
        }

    return _explorer(draw, controls, start, "precision_figure(weight, update, steps)")


def memory_explorer() -> Any:
    """Will it fit my card? Sliders for an update's sizes and a budget; the plan, or why there is none. Taught in
    notebook 09.
    """
    start: dict[str, Any] = {
        "model": "olmo2-1b", "sequences": 64, "length": 512, "optimizer_state": "fp32", "engine": "choose",
        "decoded": 16, "budget": 8,
    }  # fmt: skip

    def draw(model: str, sequences: int, length: int, decoded: int, engine: str, budget: int, **state: Any) -> Picture:
        size = UpdateSize(sequences, length, 3 * length // 4, scored=sequences, decoded=decoded)
        chosen: Any = None if engine == "choose" else engine
        return plan_figure(plan_update(SHAPES[model][1], size, budget=budget * GIB, engine=chosen, **state))

    def controls(w: Any) -> dict[str, Any]:
        def steps(options: list[int], name: str, words: str) -> Any:
            return w.SelectionSlider(options=options, value=start[name], description=words)

        return {
            "model": w.Dropdown(options=list(SHAPES), value=start["model"], description="model"),
            "sequences": steps([2**i for i in range(10)], "sequences", "sequences"),
            "length": steps([2**i for i in range(6, 15)], "length", "tokens of each"),
            "optimizer_state": w.Dropdown(
                options=get_args(OptimizerState), value=start["optimizer_state"], description="AdamW state"
            ),
            "engine": w.Dropdown(
                options=[(name.replace("_", "-"), name) for name in ("choose", *get_args(EngineName))],
                value=start["engine"], description="engine",
            ),
            "decoded": steps([0, 8, 16, 32, 64, 128, 256], "decoded", "decoded side by side"),
            "budget": steps([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 80, 141], "budget", "budget (GiB)"),
        }  # fmt: skip

    return _explorer(draw, controls, start, "plan_figure(plan_update(shape, UpdateSize(...), budget=...))")


def rollout_browser(
    rollouts: Sequence[Rollout | Mapping[str, Any]],
    tokenizer: Any,
    entropies: Sequence[Sequence[float] | None] | None = None,
) -> Any:
    """Page through rollouts by class, right, wrong or malformed, with tokens coloured as chosen. Taught in notebook 02.

    Args:
        rollouts: Rollouts, or the lines of a run's rollouts/step-*.jsonl.
        tokenizer: that of the model which sampled them.
        entropies: of each response token of each rollout, in nats, where they are known.

    Raises:
        UserError: there are no rollouts, one is none, or `entropies` has another length.
    """
    records = [as_rollout(r) for r in rollouts]
    if not records:
        raise UserError("There are no rollouts to show; give at least one.")
    if entropies is not None and len(entropies) != len(records):
        raise UserError(f"There are {len(entropies)} entropies for {len(records)} rollouts; give one list for each.")
    classes = {"all": list(range(len(records)))}
    for name in ("right", "wrong", "malformed", "not graded"):
        members = [i for i, r in enumerate(records) if rollout_class(r) == name]
        if members:
            classes[name] = members
    w = _ipywidgets()
    if w is None:
        firsts = [members[0] for name, members in classes.items() if name != "all"]
        print(NO_WIDGETS.format(instead="Here is the first rollout of each class."))
        print(*(f"\n{'-' * 20}\n{rollout_text(records[i], tokenizer)}" for i in firsts), sep="\n")
        return None
    chosen = w.ToggleButtons(options=[(f"{name} ({len(members)})", name) for name, members in classes.items()])
    color_by = w.ToggleButtons(options=[("mask", "mask"), ("log-probability", "log_prob"), ("entropy", "entropy")])
    page = w.IntSlider(1, 1, len(records), description="rollout")
    before, after = w.Button(description="previous"), w.Button(description="next")
    text = w.HTML()

    def redraw(change: Any = None) -> None:
        i = classes[chosen.value][page.value - 1]
        entropy = entropies[i] if entropies is not None else None
        text.value = rollout_html(records[i], tokenizer, color_by.value, entropy)

    def choose(change: Any) -> None:
        page.unobserve(redraw, names="value")  # one redraw, not one for each of the two changes
        page.value, page.max = 1, len(classes[chosen.value])
        page.observe(redraw, names="value")
        redraw()

    def turn(by: int) -> None:
        page.value = min(max(page.value + by, 1), page.max)

    chosen.observe(choose, names="value")
    color_by.observe(redraw, names="value")
    page.observe(redraw, names="value")
    before.on_click(lambda button: turn(-1))
    after.on_click(lambda button: turn(1))
    redraw()
    return w.VBox([chosen, color_by, w.HBox([before, page, after]), text])


class LiveBoard:
    """The curves of a training run while it runs, and a button that stops it after the step. Taught in notebook 11.

        board = LiveBoard(config.num_steps)
        board.show()
        train(config, algo, on_step=board.update, stop=board.stop)

    Curves are redrawn so seldom that drawing takes at most about a fifth of the time; the text is new at every step.
    Without ipywidgets the notebook's own stop button does the same as the board's.

    Args:
        total_steps: of the run; the curves' axis ends there.
        title: over the text.

    Raises:
        UserError: total_steps is not a whole number of at least 1.
    """

    PATIENCE = 4.0  # times the seconds of the last drawing that pass before the next

    def __init__(self, total_steps: int, title: str = "") -> None:
        if not isinstance(total_steps, int) or total_steps < 1:
            raise UserError(f"total_steps is {total_steps!r}; give a whole number of at least 1.")
        self.total_steps = total_steps
        self.title = title
        self.stop = StopRequest()
        self.metrics: list[dict[str, Any]] = []
        self._next_drawing = -math.inf
        self._put_text: Callable[[str], object] = lambda text: None
        self._put_picture: Callable[[Picture], object] = lambda picture: None

    def show(self) -> None:
        """Show the board below this cell. A stop that was asked for before is forgotten."""
        self.stop.requested = False
        self._next_drawing = -math.inf
        display, w = _notebook_display(), _ipywidgets()
        if display is None:
            self._put_text = print
        elif w is None:
            self._show_displays(display)
        else:
            self._show_widgets(w, display)
        self._put_text(self.text())
        if self.metrics:
            self._put_picture(self.figure())

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl, as `train(on_step=...)` gives it."""
        self.metrics.append(dict(metrics))
        self._put_text(self.text())
        began = time.perf_counter()
        last = self.stop.requested or self._step() >= self.total_steps
        if last or began >= self._next_drawing:
            self._put_picture(self.figure())
            now = time.perf_counter()
            self._next_drawing = now + self.PATIENCE * (now - began)

    def figure(self) -> Picture:
        """The curves so far."""
        run = Run("", COLORS[0], MARKERS[0], self.metrics, [])
        with look():
            figure = Picture(figsize=(9, 5), layout="constrained")
            panels = zip(
                figure.subplots(2, 2).flat, (draw_rewards, draw_length, draw_entropy, draw_memory), strict=True
            )
            for ax, draw in panels:
                draw(ax, [run])
                ax.set_xlim(0, self.total_steps + 0.5)
        return figure

    def text(self) -> str:
        """Step, reward, format and the time left, in one line."""
        head = f"{self.title}: " if self.title else ""
        if not self.metrics:
            return f"{head}waiting for the first of {self.total_steps} steps."
        now = self.metrics[-1]
        parts = [f"step {self._step()} of {self.total_steps}"]
        for name, shown in (("reward_mean", "right"), ("format_reward_mean", "well formed")):
            if name in now:
                parts.append(f"{shown} {now[name]:.0%}")
        left = self.total_steps - self._step()
        seconds = [m["seconds_step"] for m in self.metrics[-10:] if "seconds_step" in m]
        if left <= 0:
            parts.append("all steps are done")
        elif self.stop.requested:
            parts.append("stopping; the step is saved and the run can be continued")
        elif seconds:
            parts.append(f"about {_duration(left * statistics.fmean(seconds))} left")
        return head + ", ".join(parts) + "."

    def _step(self) -> int:
        return int(self.metrics[-1].get("step", len(self.metrics))) if self.metrics else 0

    def _show_displays(self, display: Callable[..., Any]) -> None:
        texts: Any = display({"text/plain": self.text()}, raw=True, display_id=True)
        display({"text/plain": "To stop after the step, press the notebook's stop button (■) once."}, raw=True)
        pictures: list[Any] = []

        def put_picture(figure: Picture) -> None:
            if pictures:
                pictures[0].update(figure)
            else:
                pictures.append(display(figure, display_id=True))

        self._put_text = lambda text: texts.update({"text/plain": text}, raw=True)
        self._put_picture = put_picture

    def _show_widgets(self, w: Any, display: Callable[..., Any]) -> None:
        words, picture = w.HTML(), w.Image(format="png")
        button = w.Button(description="Stop after this step", icon="stop", layout=w.Layout(width="auto"))
        button.on_click(lambda pressed: setattr(self.stop, "requested", True))
        # ipykernel 7.4 hands a click to the thread that last spoke to the button: to this one, which trains. Without
        # its note of that, the click goes where JupyterLab sends it, to a thread that is free.
        getattr(button.comm, "__dict__", {}).pop("_reply_subshell_id", None)
        note = w.HTML("If the button does not answer, press the notebook's own stop button (■) once.")
        box = w.VBox([words, w.HBox([button, note])])

        def put_picture(figure: Picture) -> None:
            picture.value = figure.png()
            if picture not in box.children:  # an empty picture would look broken
                box.children += (picture,)

        self._put_text = lambda text: setattr(words, "value", f"<b>{html.escape(text)}</b>")
        self._put_picture = put_picture
        display(box)


def _explorer(
    draw: Callable[..., Picture], controls: Callable[[Any], dict[str, Any]], start: dict[str, Any], call: str
) -> Any:
    """Controls over the picture that `draw` makes of their values. A message stands in place of a picture that failed.

    Args:
        draw: takes a value for each control, by name.
        controls: makes the controls, by name, from the module ipywidgets.
        start: their first values, which are drawn where there are no widgets.
        call: how to draw the same without sliders.
    """
    w = _ipywidgets()
    if w is None:
        print(NO_WIDGETS.format(instead=f"Draw other values with {call}."))
        try:
            return draw(**start)
        except Exception as error:
            print(_words(error))
            return None
    named = controls(w)
    picture, message = w.Image(format="png"), w.HTML()
    box = w.VBox([*_rows(w, list(named.values())), message, picture])

    def redraw(change: Any = None) -> None:
        try:
            picture.value = draw(**{name: control.value for name, control in named.items()}).png()
            message.value = ""
        except Exception as error:  # of a student's code, or numbers that do not go together
            message.value = f"<b>{html.escape(_words(error))}</b>"
        picture.layout.display = "none" if message.value else None

    for control in named.values():
        control.style.description_width = "initial"
        control.observe(redraw, names="value")
    redraw()
    return box


def _rows(w: Any, controls: list[Any]) -> list[Any]:
    """The controls, three in a row."""
    return [w.HBox(controls[i : i + 3]) for i in range(0, len(controls), 3)]


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _duration(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> _duration(8.4), _duration(95), _duration(7300)
    ('8 s', '2 min', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _ipywidgets() -> Any:
    """The module ipywidgets, or None where it cannot be imported."""
    try:
        return importlib.import_module("ipywidgets")
    except ImportError:
        return None


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's `display`, or None outside a notebook's kernel."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    return display if getattr(get_ipython(), "kernel", None) is not None else None
