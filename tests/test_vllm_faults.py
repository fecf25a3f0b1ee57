"""What a real engine will not do on demand: the fake one fails in every way, run by the real worker in a real process.

After each fault one sentence says what happened and quotes the worker's log, nothing is left behind, and the next start
works.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from a5lib.errors import UserError
from a5lib.rollouts.protocol import VERSION
from a5lib.rollouts.worker_process import WorkerError
from tests.helpers import ROOT
from tests.vllm_tools import Rig, held, is_alive, survivors

pytestmark = pytest.mark.timeout(200)  # a worker starts in a second, or in many on a busy machine

IDLE = {}  # what this process held before the rig's worker was started


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """One backend for all: every test breaks its worker, and so the next one shows that another start works."""
    rig = Rig(tmp_path_factory.mktemp("fake"))
    IDLE.update(held())
    yield rig
    rig.backend.close()


@pytest.fixture
def short(rig, monkeypatch):
    """Requests may take two seconds, and the trainer waits hardly longer than the worker."""
    for method in ("load", "generate"):
        monkeypatch.setitem(rig.backend.seconds, method, 2.0)


def sentence(rig, method, kind):
    """A cycle in which the fault happens, on a worker that has done one without; returns what is said of it."""
    before = rig.cycle()
    first = rig.pids()
    rig.fault(method, kind)
    with pytest.raises(WorkerError) as caught:
        rig.cycle(step=1)
    assert not survivors(first), "a process of the worker outlived it"
    assert held() == IDLE, "the trainer still holds something of the worker"
    assert rig.backend.synced_step is None
    with pytest.raises(RuntimeError, match=r"before sync\(\)"):
        rig.texts()
    assert rig.cycle() == before, "the next start gives what the first gave"
    assert rig.pids() != first
    said = str(caught.value)
    assert f"The last lines of {rig.folder}/run/vllm-worker.log:\n    " in said
    return said


PHASES = ("wake weights", "load", "wake kv_cache", "reset_prefix_cache", "generate", "sleep", "memory")


@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_in_any_phase(rig, phase):
    said = sentence(rig, phase, "exit")
    assert f"The vLLM worker died during '{phase.split()[0]}'." in said
    assert f"    fake engine: exit in {phase}" in said
    assert said.endswith("    The worker ended: exit code 3.")


def test_a_crash_at_the_start(tmp_path):
    before = held()
    rig = Rig(tmp_path)
    idle = held()
    rig.fault("hello", "exit")
    with pytest.raises(WorkerError, match="died during 'hello'") as caught:
        rig.cycle()
    assert str(caught.value).endswith("    fake engine: exit in hello\n    The worker ended: exit code 3.")
    assert not survivors(rig.pids())
    assert held() == idle
    assert len(rig.cycle()) == 4
    rig.backend.close()
    assert not survivors(rig.pids())
    assert held() == before, "close() frees the channel too"


def test_a_refusal_at_the_start_ends_with_one_full_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("a5lib.rollouts.vllm_backend.VERSION", VERSION + 1)
    rig = Rig(tmp_path)
    with pytest.raises(WorkerError, match=rf"did not start: The trainer .* worker version {VERSION}\. Nothing of it"):
        rig.backend.start()
    rig.backend.close()


def test_an_exception_of_the_engine_comes_with_its_traceback(rig):
    said = sentence(rig, "load", "raise")
    assert "The vLLM worker failed during 'load': ZeroDivisionError: scripted." in said
    assert "in load" in said and "fake_vllm.py" in said


def test_a_prefix_cache_that_is_not_reset_ends_the_worker(rig):
    said = sentence(rig, "reset_prefix_cache", "in use")
    assert said.startswith("The vLLM worker kept keys and values of older weights: Blocks are in use. Nothing of it")


def test_an_answer_of_the_engine_that_is_not_of_the_agreed_form(rig):
    assert "failed during 'load': TypeError: Held" in sentence(rig, "load", "malformed")


def test_a_crash_in_native_code_leaves_its_stack(rig):
    said = sentence(rig, "generate", "crash")
    assert "died during 'generate'" in said
    assert "in generate" in said, "faulthandler names the frames"
    assert said.endswith("The worker ended: killed by SIGSEGV.")


def test_the_engine_is_killed(rig):
    said = sentence(rig, "generate", "killed")
    assert "died during 'generate'" in said
    assert said.endswith("The worker ended: killed by SIGKILL.")


@pytest.mark.parametrize("victim", ["engine", "guard"])
def test_a_worker_that_is_killed_while_it_sleeps(rig, victim):
    before = rig.cycle()
    first = rig.pids()
    os.kill(first[victim], signal.SIGKILL)
    while is_alive(first["engine"]):  # the guard's end takes it along, a moment later
        time.sleep(0.01)
    with pytest.raises(WorkerError, match="died during 'wake'"):
        rig.cycle()
    rig.backend.release()  # as a loop does that cleans up: there is nothing to do
    assert not survivors(first)
    assert held() == IDLE
    assert rig.cycle() == before


def test_the_guard_is_killed(rig):
    assert "died during 'generate'" in sentence(rig, "generate", "guard killed")


@pytest.mark.parametrize(("method", "kind"), [("load", "hang"), ("generate", "native hang")])
def test_a_hang_ends_in_time_and_shows_where(rig, short, method, kind):
    """A native hang keeps Python's lock, so that no thread of the worker's Python could end it."""
    said = sentence(rig, method, kind)
    assert f"gave no sign of life for 2 s during '{method}'" in said
    assert f"in {method}" in said and "fake_vllm.py" in said, "the stack of the hung thread"


def test_a_worker_that_does_not_even_end_itself(rig, short):
    rig.backend.sync(rig.weights.items(), 0)
    first = rig.pids()
    for name in ("guard", "engine"):
        os.kill(first[name], signal.SIGSTOP)
    with pytest.raises(WorkerError, match="gave no sign of life for 2 s during 'generate'"):
        rig.texts()
    assert not survivors(first)


def test_progress_is_a_sign_of_life(rig, short):
    expected = rig.cycle()
    rig.fault("generate", "slow")  # takes longer than the limit, and says so ten times
    assert rig.cycle() == expected


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("garbage", "sent garbage during 'load': a line that begins with '\\x80 INFO vllm says hello'"),
        ("garbage list", "sent garbage during 'load': a line that begins with '[1, 2]'"),
        ("garbage number", "sent garbage during 'load': an answer to another request, {'id': 999, 'result': None}"),
    ],
)
def test_garbage_on_the_connection(rig, kind, words):
    assert words in sentence(rig, "load", kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("malformed", "sent garbage during 'generate': KeyError 'token_ids'"),
        ("too few", "sent garbage during 'generate': ValueError 3 completions and not 4"),
        ("aborted", "log-probabilities and end 'abort'"),
    ],
)
def test_completions_that_are_not_what_was_asked_for(rig, kind, words):
    assert words in sentence(rig, "generate", kind)


MISMATCHES = {
    "missing tensor": "model.layers.0.self_attn.k_proj.weight is missing",
    "unexpected tensor": "model.layers.9.extra.bias was not sent",
    "wrong checksum": "model.norm.weight has other values",
    "wrong dtype": "model.norm.weight is bfloat16 [8] and should be float32 [8]",
    "wrong shape": "model.norm.weight is float32 [8, 1] and should be float32 [8]",
    "changed value": "model.layers.1.mlp.up_proj.weight has other values "
    "(held as model.layers.1.mlp.gate_up_proj.weight[12:24])",
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_V14_weights_that_are_not_what_was_sent_are_named_before_a_token_is_generated(rig, kind):
    rig.cycle()
    rig.calls()
    said = sentence(rig, "load", kind)
    assert f"does not hold the weights of step 1 that it was sent: {MISMATCHES[kind]}. Nothing" in said
    calls = [line["call"] for line in rig.calls()]
    failed = calls.index("load", calls.index("load") + 1)  # the second cycle's
    assert calls[failed + 1] == "hello", "after the load came nothing but another start"


def test_an_engine_that_writes_to_the_weights_dies_before_they_change(rig):
    """They can be the trainer's own: the layer-major engine keeps them there."""
    said = sentence(rig, "load", "write")
    assert "died during 'load'" in said and "SIGSEGV" in said


def test_numbers_that_are_not_finite_stop_the_run_as_they_do_in_training(rig):
    rig.cycle()
    rig.fault("generate", "not finite")
    with pytest.raises(FloatingPointError, match="not finite"):
        rig.cycle()
    assert len(rig.cycle()) == 4, "the worker did nothing wrong and goes on"


def test_a_python_that_is_not_there(tmp_path):
    rig = Rig(tmp_path, python=f"{tmp_path}/no/python")
    idle = held()
    with pytest.raises(UserError, match=r"no/python cannot be started .*--vllm-python must be the path"):
        rig.cycle()
    assert held() == idle
    rig.backend.close()


def test_a_python_without_torch(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without site-packages
    python.chmod(0o755)
    rig = Rig(tmp_path, python=str(python))
    with pytest.raises(WorkerError, match=r"(?s)died during 'hello'.*No module named 'torch'"):
        rig.cycle()
    rig.backend.close()


# --- the trainer's end, however it ends

TRAINER = """
import os, signal, sys, time
from pathlib import Path
from tests.vllm_tools import Rig
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background hand down an ignored one
rig = Rig(Path(sys.argv[1]))
rig.cycle()
if sys.argv[2] == "fork" and os.fork() == 0:  # a child that has inherited the trainer's end of the connection
    time.sleep(60)
    os._exit(0)
if sys.argv[2] == "exception":
    raise ValueError("not the worker's fault")
if sys.argv[2] == "leave":
    sys.exit()
rig.fault("generate", "hang")
print("ready", flush=True)
rig.cycle()
"""


@pytest.fixture
def trainer(tmp_path):
    """Starts a trainer of its own in a process group of its own, which is ended at the end."""
    started = []

    def start(how):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TRAINER), str(tmp_path), how], cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process, lambda: json.loads((tmp_path / "pids").read_text())

    yield start
    for process in started:
        if process.poll() is None or is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("how", ["exception", "leave"])
def test_V09_no_process_outlives_a_trainer_that_ends(trainer, how):
    process, pids = trainer(how)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == (1 if how == "exception" else 0), errors
    assert not survivors(pids())


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_V09_no_process_outlives_a_trainer_that_a_signal_ends_while_the_engine_hangs(trainer, end):
    process, pids = trainer("hang")
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(end)
    process.wait(timeout=20)
    assert not survivors(pids())
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in process.stderr.read()


def test_V09_no_process_outlives_a_killed_trainer_whose_fork_lives_on(trainer):
    """The fork keeps the trainer's end of the connection open, so the worker cannot see its end there."""
    process, pids = trainer("fork")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait(timeout=20)
    assert not survivors(pids())
    os.killpg(process.pid, signal.SIGKILL)  # the fork


def test_an_interrupt_during_a_request_ends_the_worker_and_the_next_start_works(rig):
    """Otherwise the answer that comes later would be taken for that of the next request."""
    before = rig.cycle()
    first = rig.pids()

    def interrupt(count):
        raise KeyboardInterrupt

    rig.backend.sync(rig.weights.items(), 1)
    with pytest.raises(KeyboardInterrupt):
        rig.texts(progress=interrupt)
    assert not survivors(first)
    assert held() == IDLE
    assert rig.cycle() == before


def test_the_worker_outlives_the_thread_that_started_it(tmp_path):
    """A signal at the parent's death, as Linux has it, would come at the end of the thread."""
    rig = Rig(tmp_path)
    thread = threading.Thread(target=rig.cycle)
    thread.start()
    thread.join()
    time.sleep(0.5)
    first = rig.pids()
    assert len(rig.cycle()) == 4
    assert rig.pids() == first
    rig.backend.close()
    assert not survivors(first)
    rig.backend.close()  # again: harmless
