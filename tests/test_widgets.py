"""The explorers follow their sliders, the board follows the run, its button stops it, and all do without ipywidgets."""

import dataclasses
import os
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import ipywidgets
import pytest
from jupyter_client import KernelManager

from a5lib import widgets
from a5lib.course import load_algo
from a5lib.errors import UserError
from a5lib.plots import Picture
from a5lib.widgets import (
    LiveBoard,
    advantage_explorer,
    clip_explorer,
    memory_explorer,
    precision_explorer,
    rollout_browser,
)
from tests.helpers import tiny_tokenizer
from tests.test_figures import rollout

EXPLORERS = {
    "advantage": lambda algo: advantage_explorer(algo),
    "clip": lambda algo: clip_explorer(algo),
    "precision": lambda algo: precision_explorer(),
    "memory": lambda algo: memory_explorer(),
}
CHANGES = {
    "advantage": [("responses", 4), ("right ones", 3), ("reward if wrong", 0.5)],
    "clip": [("ratio", 2.0), ("advantage", -1.0), ("clip range", 0.5)],
    "precision": [("weight", 8.0), ("log10 update", -2.0), ("direction", -1), ("updates", 50)],
    "memory": [
        ("sequences", 8), ("tokens of each", 256), ("AdamW state", "bf16"), ("decoded side by side", 64),
        ("budget (GiB)", 24), ("engine", "layer_major"), ("model", "toy"),
    ],
}  # fmt: skip
NAMES = {name: [description for description, _ in changes] for name, changes in CHANGES.items()} | {
    "memory": ["model", "sequences", "tokens of each", "AdamW state", "engine", "decoded side by side", "budget (GiB)"],
}


@pytest.fixture
def algo():
    return load_algo("solutions")


@pytest.fixture
def no_widgets(monkeypatch):
    for name in [m for m in sys.modules if m.partition(".")[0] == "ipywidgets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)


@pytest.fixture
def shown(monkeypatch):
    """What would be displayed in a notebook, with the updates of what has a display_id."""
    seen = []

    def display(what, display_id=False, raw=False):
        seen.append(what)
        return SimpleNamespace(update=lambda new, raw=False: seen.append(new)) if display_id else None

    monkeypatch.setattr(widgets, "_notebook_display", lambda: display)
    return seen


def parts(box):
    return [box, *(part for child in getattr(box, "children", ()) for part in parts(child))]


def control(box, name):
    return next(p for p in parts(box) if getattr(p, "description", None) == name)


def picture(box):
    return next(p for p in parts(box) if isinstance(p, ipywidgets.Image))


def words(box):
    return " ".join(p.value for p in parts(box) if isinstance(p, ipywidgets.HTML))


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_control_changes_the_picture_where_it_stands(algo, name):
    box = EXPLORERS[name](algo)
    assert [p.description for p in parts(box) if getattr(p, "description", "")] == NAMES[name]
    image = picture(box)
    assert bytes(image.value).startswith(b"\x89PNG")
    for description, value in CHANGES[name]:
        before = image.value
        control(box, description).value = value
        assert image.value != before, f"{description} changes nothing"
        assert words(box) == ""
    assert picture(box) is image and sum(isinstance(p, ipywidgets.Image) for p in parts(box)) == 1


def test_the_code_is_called_anew_and_its_faults_are_words():
    def fails(*args, **options):
        raise RuntimeError("<size mismatch>")

    code = SimpleNamespace(compute_group_normalized_rewards=lambda r, g, **options: (r, {}))
    box = advantage_explorer(code)
    before = picture(box).value
    code.compute_group_normalized_rewards = fails  # as if the file had been saved
    control(box, "responses").value = 5
    assert "RuntimeError: &lt;size mismatch&gt;" in words(box) and picture(box).layout.display == "none"
    code.compute_group_normalized_rewards = lambda r, g, **options: (3 * r, {})
    control(box, "responses").value = 8
    assert words(box) == "" and picture(box).layout.display is None and picture(box).value != before


def test_the_memory_explorer_says_what_does_not_fit_and_recovers():
    box = memory_explorer()
    assert [control(box, name).label for name in ("engine", "model", "AdamW state")] == ["choose", "olmo2-1b", "fp32"]
    control(box, "budget (GiB)").value = 3
    assert "but the budget is 3" in words(box) and picture(box).layout.display == "none"
    control(box, "decoded side by side").value = 0
    assert words(box) == "" and picture(box).layout.display is None, "the update alone fits"
    control(box, "engine").value = "resident"
    assert "choose --engine layer_major" in words(box)


@pytest.mark.parametrize("model", ["toy", "olmo2-1b", "olmo2-7b", "llama3.1-8b", "qwen3-14b"])
def test_the_memory_explorer_plans_every_model(model):
    box = memory_explorer()
    control(box, "budget (GiB)").value = 48
    control(box, "model").value = model
    assert words(box) == ""


@pytest.mark.parametrize("name", EXPLORERS)
def test_without_ipywidgets_an_explorer_is_a_figure_and_a_sentence(algo, no_widgets, capsys, name):
    assert isinstance(EXPLORERS[name](algo), Picture)
    said = capsys.readouterr().out
    assert "ipywidgets is not installed" in said and "_figure(" in said


def test_without_ipywidgets_faults_are_words_too(no_widgets, capsys):
    assert advantage_explorer(SimpleNamespace(compute_group_normalized_rewards=lambda *a, **o: None)) is None
    assert 'run check("advantages")' in capsys.readouterr().out


# --- rollouts


def graded(format_reward, answer_reward, text):
    rewards = {"reward": answer_reward, "format_reward": format_reward, "answer_reward": answer_reward}
    return rollout(rewards, text)


THREE = [graded(1.0, 1.0, "alpha"), graded(0.0, 0.0, "beta"), graded(1.0, 1.0, "gamma")]


def seen_text(box):
    page = words(box)
    return next(name for name in ("alpha", "beta", "gamma") if all(f">{c}</span>" in page for c in name))


def test_the_browser_pages_and_filters():
    box = rollout_browser(THREE, tiny_tokenizer())
    classes, colors = (p for p in parts(box) if isinstance(p, ipywidgets.ToggleButtons))
    assert [label for label, _ in classes.options] == ["all (3)", "right (2)", "malformed (1)"]
    page = control(box, "rollout")
    assert (seen_text(box), page.value, page.max) == ("alpha", 1, 3)
    control(box, "next").click()
    assert seen_text(box) == "beta"
    classes.value = "right"
    assert (seen_text(box), page.value, page.max) == ("alpha", 1, 2)
    control(box, "next").click()
    control(box, "next").click()
    assert (seen_text(box), page.value) == ("gamma", 2), "next stays on the last one"
    control(box, "previous").click()
    control(box, "previous").click()
    assert (seen_text(box), page.value) == ("alpha", 1)
    colors.value = "log_prob"
    assert "Colour: log-probability" in words(box)
    page.value = 2
    classes.value = "malformed"
    assert (seen_text(box), page.max) == ("beta", 1)


def test_the_browser_takes_lines_of_the_run_log_and_entropies():
    records = [dataclasses.asdict(r) for r in THREE]
    box = rollout_browser(records, tiny_tokenizer(), [None, None, [1.0] * 5])
    colors = [p for p in parts(box) if isinstance(p, ipywidgets.ToggleButtons)][1]
    colors.value = "entropy"
    assert "was not logged" in words(box)
    control(box, "rollout").value = 3
    assert "was not logged" not in words(box) and "Colour: entropy" in words(box)


def test_without_ipywidgets_the_browser_prints_one_of_each_class(no_widgets, capsys):
    assert rollout_browser(THREE, tiny_tokenizer()) is None
    said = capsys.readouterr().out
    assert "[a][l][p][h][a]" in said and "[b][e][t][a]" in said and "[g]" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([],), "no rollouts"), (([3],), "not int"), ((THREE, [[1.0]]), "1 entropies for 3 rollouts")],
)
def test_wrong_rollouts_are_one_sentence(arguments, message):
    records, *rest = arguments
    with pytest.raises(UserError, match=message):
        rollout_browser(records, tiny_tokenizer(), *rest)


# --- the live board


def metrics(step, **changes):
    return {
        "step": step, "reward_mean": 0.1 * step, "format_reward_mean": 0.5, "response_length_mean": 40.0,
        "response_length_max": 80, "entropy": 0.5 / step, "memory_generate": 2**29, "memory_update": 2**30,
        "seconds_step": 2.0, **changes,
    }  # fmt: skip


def test_the_board_updates_in_place_and_its_button_only_sets_the_flag(shown):
    board = LiveBoard(10, "GRPO")
    board.PATIENCE = 0.0
    board.show()
    (box,) = shown
    assert "GRPO: waiting for the first of 10 steps." in words(box)
    assert not any(isinstance(p, ipywidgets.Image) for p in parts(box)), "an empty picture looks broken"
    board.update(metrics(1))
    assert "step 1 of 10, right 10%, well formed 50%, about 18 s left" in words(box)
    image, first = picture(box), picture(box).value
    board.update(metrics(2))
    assert picture(box) is image and image.value != first and len(shown) == 1
    before = words(box), image.value
    control(box, "Stop after this step").click()
    assert board.stop.requested and (words(box), image.value) == before, "the callback runs in another thread"
    board.update(metrics(3))
    assert "stopping" in words(box)
    board.show()
    assert not board.stop.requested and len(shown) == 2 and picture(shown[1]).value == image.value


def test_the_board_draws_seldom_but_always_the_last_step(shown):
    board = LiveBoard(3)
    board.PATIENCE = 1e6
    board.show()
    (box,) = shown
    board.update(metrics(1))
    first = picture(box).value
    board.update(metrics(2))
    assert picture(box).value == first and "step 2 of 3" in words(box)
    board.update(metrics(3))
    assert picture(box).value != first and "all steps are done" in words(box)


def test_the_board_shows_the_metrics(shown):
    board = LiveBoard(10)
    for step in (1, 2):
        board.update(metrics(step))
    rewards, length, entropy, memory = board.figure().axes
    assert [list(line.get_ydata()) for line in rewards.lines] == [[10, 20], [50, 50]]
    assert list(length.lines[0].get_ydata()) == [40, 40] and list(entropy.lines[0].get_ydata()) == [0.5, 0.25]
    assert list(memory.lines[-1].get_ydata()) == [1, 1] and memory.get_ylabel() == "GiB"
    assert not shown, "what was not shown draws nothing"
    board.update({})
    assert board.text() == "step 3 of 10, about 14 s left."


def test_without_ipywidgets_the_board_is_a_figure_that_is_replaced(shown, no_widgets):
    board = LiveBoard(10)
    board.PATIENCE = 0.0
    board.show()
    assert "waiting" in shown[0]["text/plain"] and "notebook's stop button" in shown[1]["text/plain"]
    board.update(metrics(1))
    board.update(metrics(2))
    texts = [what["text/plain"] for what in shown if isinstance(what, dict)]
    assert texts[-1].startswith("step 2 of 10") and sum(isinstance(what, Picture) for what in shown) == 2


def test_outside_a_notebook_the_board_prints_lines(capsys):
    board = LiveBoard(2)
    board.show()
    board.update(metrics(1))
    assert capsys.readouterr().out == (
        "waiting for the first of 2 steps.\nstep 1 of 2, right 10%, well formed 50%, about 2 s left.\n"
    )


@pytest.mark.parametrize("steps", [0, -1, 2.5, None])
def test_a_board_needs_steps(steps):
    with pytest.raises(UserError, match="total_steps"):
        LiveBoard(steps)


# --- in a kernel, as JupyterLab does it


@contextmanager
def kernel(folder):
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env=os.environ | {"OMP_NUM_THREADS": "1"})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=40)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def wait_for(client, found, seconds=40):
    """The first message on the kernel's public channel that `found` accepts."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        message = client.get_iopub_msg(timeout=end - time.monotonic())
        assert message["msg_type"] != "error", message["content"]
        if found(message):
            return message
    raise AssertionError("the kernel did not say what was expected")


def test_the_button_stops_a_cell_that_runs(tmp_path):
    """The click arrives in a subshell, as from JupyterLab 4.6, while the loop below holds the main thread."""
    with kernel(tmp_path) as client:
        client.execute(
            "import time\nfrom a5lib.widgets import LiveBoard\nboard = LiveBoard(1000)\nboard.show()\n"
            "step = 0\nwhile not board.stop.requested and step < 300:\n"
            "    step += 1\n    board.update({'step': step, 'entropy': 1 / step})\n    time.sleep(0.1)\n"
            "print('stopped by', 'the button' if board.stop.requested else 'the limit')"
        )
        is_button = lambda m: m["content"].get("data", {}).get("state", {}).get("_model_name") == "ButtonModel"  # noqa: E731
        opened = wait_for(client, lambda m: m["msg_type"] == "comm_open" and is_button(m))
        wait_for(client, lambda m: m["msg_type"] == "comm_msg")  # the loop is running
        client.control_channel.send(client.session.msg("create_subshell_request"))
        subshell = client.get_control_msg(timeout=20)["content"]["subshell_id"]
        content = {
            "comm_id": opened["content"]["comm_id"],
            "data": {"method": "custom", "content": {"event": "click"}},
        }
        message = client.session.msg("comm_msg", content)
        message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)
        said = wait_for(client, lambda m: m["msg_type"] == "stream" and "stopped by" in m["content"]["text"])
        assert "the button" in said["content"]["text"]
