"""The colocated backend on the fake engine, run by the real worker in a real process: order, guards and contents."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from a5lib.errors import UserError
from a5lib.prompts import load_prompt
from a5lib.rollouts.worker_process import WorkerError, worker_environment
from tests.vllm_tools import Rig, held, survivors, weights

pytestmark = pytest.mark.timeout(200)  # a worker starts in a second, or in many on a busy machine


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("fake"), context=64)
    rig.cycle()
    yield rig
    rig.backend.close()


@pytest.fixture
def rig(shared):
    """The backend at rest, with the weights it began with, and nothing written of earlier tests."""
    shared.weights = weights()
    shared.backend.release()
    shared.calls()
    shared.backend.events.clear()
    return shared


CYCLE = ["wake weights", "load", "wake kv_cache", "reset_prefix_cache", "generate", "sleep 2", "memory"]


def test_the_order_of_a_cycle(rig):
    rig.cycle()
    assert [line["call"] for line in rig.calls()] == CYCLE
    assert [event.call for event in rig.backend.events] == CYCLE
    assert all(event.seconds > 0 for event in rig.backend.events)


def test_V01_generation_needs_a_sync_after_every_sleep(rig):
    with pytest.raises(RuntimeError, match=r"before sync\(\): the weights are unknown"):
        rig.texts()
    before = rig.cycle()
    assert not any("!" in text for text in before), "the fake's answer from memory that nothing was written to"
    with pytest.raises(RuntimeError, match=r"before sync\(\)"):
        rig.texts()
    assert [line["call"] for line in rig.calls()] == CYCLE, "the engine was not even asked"
    assert rig.cycle(step=1) == before


def test_the_worker_itself_refuses_other_weights_than_the_trainer_means(rig):
    rig.backend.sync(rig.weights.items(), 3)
    rig.backend.synced_step = 4
    with pytest.raises(RuntimeError, match="holds the weights of step 3 and is to generate with those of 4"):
        rig.texts()
    rig.backend.synced_step = 3
    assert len(rig.texts()) == 4, "a refusal changes nothing"


def test_V02_every_step_generates_with_its_own_weights_and_nothing_is_read_from_disk(rig):
    first = rig.cycle(step=0)
    rig.weights = weights(1)
    second = rig.cycle(step=1)
    assert not set(first) & set(second), "the prefix cache, or the weights, are of the step before"
    rig.weights = weights()
    assert rig.cycle(step=2) == first
    assert [line["call"] for line in rig.calls()] == CYCLE * 3, "no call that could undo a load"


@pytest.mark.parametrize("changed", sorted(weights()))
def test_a_change_of_any_tensor_arrives(shared, changed):
    """Also of the parts of packed tensors, and of norms."""
    shared.weights = weights()
    before = shared.cycle()
    shared.weights[changed].view(-1)[-1] += 1.0
    assert not set(before) & set(shared.cycle(step=1))


def test_V16_everything_is_sent_again_after_every_sleep(rig):
    """There is no sending of a part, so nothing that a level-2 sleep threw away can be missing."""
    rig.backend.sync(rig.weights.items(), 0)
    rig.backend.sync(rig.weights.items(), 1)  # without a release in between: it sleeps first
    assert [line["call"] for line in rig.calls()] == [*CYCLE[:4], *CYCLE[5:], *CYCLE[:4]]
    only_one = [("model.norm.weight", rig.weights["model.norm.weight"])]
    with pytest.raises(ValueError, match=r"The given weights lack model\.embed_tokens\.weight and \d+ others\."):
        rig.backend.sync(only_one, 2)
    with pytest.raises(RuntimeError, match=r"before sync\(\)"):
        rig.texts()


def test_V16_no_sleep_while_the_engine_is_at_work(rig):
    rig.backend.sync(rig.weights.items(), 0)
    expected = rig.texts()
    rig.fault("generate", "slow")
    at_work, texts = threading.Event(), []
    thread = threading.Thread(target=lambda: texts.extend(rig.texts(progress=lambda _: at_work.set())))
    thread.start()
    assert at_work.wait(20)
    for call in (rig.backend.release, rig.backend.close, lambda: rig.backend.sync(rig.weights.items(), 1)):
        with pytest.raises(RuntimeError, match=r"was called while generate\(\) is at work in another thread; wait"):
            call()
    thread.join()
    assert texts == expected, "the generation was not disturbed"
    assert "sleep 2" not in [line["call"] for line in rig.calls()]
    rig.backend.release()


def test_V16_an_engine_that_is_busy_by_its_own_account_stays_awake(rig):
    rig.backend.sync(rig.weights.items(), 0)
    expected = rig.texts()
    rig.fault("sleep", "busy")
    with pytest.raises(RuntimeError, match="unfinished requests and cannot sleep"):
        rig.backend.release()
    assert rig.texts() == expected
    rig.backend.release()


def test_V06_each_prompt_is_sent_once_with_a_seed_for_each_completion(rig):
    rig.backend.sync(rig.weights.items(), 0)
    rig.texts(((5, 6), (7,)), n=4, temperature=1.0)
    call = next(line for line in rig.calls() if line["call"] == "generate")
    assert (call["prompts"], call["n"]) == (2, 4)
    seeds = [seed for of_prompt in call["seeds"] for seed in of_prompt]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_V12_the_stop_string_of_the_prompt_is_sent_and_kept(rig):
    rig.backend.sync(rig.weights.items(), 0)
    for prompt, ends in (("r1_zero", True), ("question_only", False)):
        stop = load_prompt(prompt).stop
        completion = rig.backend.generate([[5]], n=1, max_tokens=20, temperature=1.0, stop=stop, seed=0)[0]
        assert completion.text.endswith("</answer>") == ends
        assert completion.finish_reason == ("stop" if ends else "length")
        assert bytes(completion.token_ids).decode() == completion.text, "the ids are those that were sampled"
    assert [line["stop"] for line in rig.calls() if line["call"] == "generate"] == [["</answer>"], []]


def test_a_fault_of_the_progress_is_not_taken_for_the_workers(rig):
    def fail(count):
        raise ValueError("the bar's own fault")

    rig.backend.sync(rig.weights.items(), 0)
    with pytest.raises(ValueError, match="the bar's own fault") as caught:
        rig.texts(progress=fail)
    assert not isinstance(caught.value, WorkerError)
    assert len(rig.cycle()) == 4


def test_V14_fused_and_tied_weights_are_verified_where_the_engine_holds_them(tmp_path):
    """The engine keeps a copy of a tied head of its own; one that stays stale would go unseen under the embedding."""
    rig = Rig(tmp_path, tied=True)
    before = rig.cycle()
    rig.weights["model.embed_tokens.weight"] += 1.0
    assert not set(rig.cycle(step=1)) & set(before)
    rig.weights["model.embed_tokens.weight"] += 1.0
    rig.backend.release()
    rig.fault("load", "stale lm_head.weight")
    with pytest.raises(WorkerError, match=r"embed_tokens.weight has other values \(held as lm_head.weight\)\. Nothing"):
        rig.cycle(step=2)
    rig.cycle(step=2)
    rig.weights = {name: weight + 1.0 for name, weight in rig.weights.items()}
    rig.fault("load", "stale")
    with pytest.raises(WorkerError, match=r"step 3 .*has other values.*; and 16 more\. Nothing"):
        rig.cycle(step=3)
    rig.backend.close()


def test_V04_the_child_alone_loses_expandable_segments(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    before = dict(os.environ)
    rig = Rig(tmp_path)
    rig.cycle()
    assert rig.backend.facts["environment"] == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
        "PYTORCH_ALLOC_CONF": None,
    }
    assert dict(os.environ) == before
    rig.backend.close()


def environment_of(python, card=None, **variables):
    return worker_environment({"PYTHONPATH": "a", "PYTHONHOME": "b", "VIRTUAL_ENV": "c", **variables}, python, card)


def test_another_python_does_not_get_the_packages_of_the_trainers(tmp_path):
    """Another environment of the same installation is another Python, although both are links to one file."""
    folder = Path(sys.executable).parent
    other = tmp_path / "python"
    other.symlink_to(Path(sys.executable).resolve())
    pointers = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    assert not pointers & environment_of(str(other)).keys()
    assert not pointers & environment_of("python-that-is-not-there").keys()
    assert pointers <= environment_of(sys.executable).keys()
    assert pointers <= environment_of(f"{folder}/../{folder.name}/{Path(sys.executable).name}").keys()


@pytest.mark.parametrize(
    ("visible", "card", "seen"),
    [
        (None, None, None),
        (None, 0, None),
        ("2,3", 0, "2,3"),
        ("2,3", 1, "3"),
        (None, 1, "1"),
        ("GPU-a,GPU-b", 1, "GPU-b"),
    ],
)
def test_the_worker_sees_the_card_that_trains(visible, card, seen):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment_of(sys.executable, card, **variables).get("CUDA_VISIBLE_DEVICES") == seen


def test_V05_the_trainers_own_cache_is_emptied_before_the_engine_wakes(rig, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append([event.call for event in rig.backend.events]))
    rig.backend.sync(rig.weights.items(), 0)
    assert seen == [[]], "once, and before the first request"


GIB = 2**30


@pytest.mark.parametrize("missing", [0, 1])
def test_V05_a_start_looks_at_what_is_free_and_not_at_the_size_of_the_card(tmp_path, monkeypatch, missing):
    """A share of 0.5 of 16 GiB, and 1.5 GiB that vLLM takes even asleep. What torch keeps for later counts as free."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: ((19 * 2**29 if emptied else GIB) - missing, 16 * GIB))
    rig = Rig(tmp_path, memory_share=0.5)
    rig.backend.device = torch.device("cuda:0")
    if not missing:
        rig.backend.start()
        assert [line["call"] for line in rig.calls()] == ["hello", "sleep 2", "memory"]
        rig.backend.close()
        return
    with pytest.raises(
        UserError, match=r"^vLLM needs 9\.5 GiB of the card, but 9\.4 GiB are free; close what else uses"
    ):
        rig.backend.start()
    assert not (tmp_path / "pids").exists(), "nothing was started"
    rig.backend.close()


@pytest.mark.parametrize(("kept", "fine"), [(3 * 2**29, True), (3 * 2**29 + 1, False)])
def test_V05_an_engine_that_keeps_the_card_while_it_sleeps_is_found_out(tmp_path, kept, fine):
    rig = Rig(tmp_path, card_free=15 * 2**30, card_kept=kept)
    if fine:
        assert len(rig.cycle()) == 4
        rig.backend.close()
    else:
        with pytest.raises(WorkerError, match=r"sleeps, but 1\.50 GiB less of the card are free than before"):
            rig.backend.sync(rig.weights.items(), 0)
        assert not survivors(rig.pids())


@pytest.mark.parametrize("while_it_slept", [True, False])
def test_V05_what_others_take_while_the_engine_sleeps_is_not_its_own(tmp_path, monkeypatch, while_it_slept):
    """The trainer's kernels and optimizer come to the card after the engine has started."""
    rig = Rig(tmp_path, card_free=15 * GIB, card_kept=GIB, memory_share=0.5)
    write = rig.backend.channel.write
    monkeypatch.setattr(rig.backend.channel, "write", lambda given, device: write(given))
    free = [15 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (free[0], 16 * GIB))
    rig.backend.device = torch.device("cuda:0")
    rig.backend.start()
    free[0] = 14 * GIB - 2 * GIB * while_it_slept
    rig.fault("memory", f"taken {2 * GIB}")
    if while_it_slept:
        assert len(rig.cycle()) == 4
        free[0] = 14 * GIB
        assert len(rig.cycle()) == 4, "and what goes is not counted for it"
        rig.backend.close()
    else:
        with pytest.raises(WorkerError, match=r"sleeps, but 3\.00 GiB less of the card are free than before"):
            rig.cycle()


def test_V08_two_workers_start_at_once_and_no_port_is_used(rig, tmp_path):
    other = Rig(tmp_path)
    texts = []
    thread = threading.Thread(target=lambda: texts.extend(other.cycle()))
    thread.start()
    expected = rig.cycle()
    thread.join()
    assert texts == expected
    for pids in (rig.pids(), other.pids()):
        assert all(psutil.Process(pid).net_connections("inet") == [] for pid in pids.values())
    other.backend.close()
    assert not survivors(other.pids())
    assert len(rig.cycle()) == 4, "the end of one does not touch the other"


def test_V17_a_system_without_anonymous_files(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    before = held()
    rig = Rig(tmp_path)
    assert len(rig.cycle()) == 4
    rig.backend.close()
    assert held() == before


class NoFile(io.StringIO):
    """As a notebook's sys.stdout: it can be written to and has no file descriptor (StringIO's raises as well)."""


def test_it_starts_from_a_notebook(tmp_path, monkeypatch):
    for name in ("stdout", "stderr", "stdin"):
        monkeypatch.setattr(sys, name, NoFile())
    threads = torch.get_num_threads()
    rig = Rig(tmp_path)
    rig.backend.sync(rig.weights.items(), 0)
    rig.texts(temperature=1.0)
    rig.backend.close()
    assert torch.get_num_threads() == threads
    assert sys.stdout.getvalue() == sys.stderr.getvalue() == "", "what the worker prints is in its log"
    assert "fake engine: started" in (tmp_path / "run" / "vllm-worker.log").read_text()


def test_what_has_been_closed_says_so(tmp_path):
    rig = Rig(tmp_path)
    with rig.backend as backend:
        backend.sync(rig.weights.items(), 0)
    with pytest.raises(RuntimeError, match="has been closed; make a new one"):
        backend.sync(rig.weights.items(), 1)


def test_a_fork_that_ends_does_not_take_the_worker_with_it(rig):
    rig.cycle()
    if (fork := os.fork()) == 0:
        rig.backend._worker._end()  # as at the end of its interpreter
        os._exit(0)
    os.waitpid(fork, 0)
    time.sleep(0.3)
    assert survivors(rig.pids(), seconds=0) == ["engine", "guard", "child"]
    assert len(rig.cycle()) == 4
