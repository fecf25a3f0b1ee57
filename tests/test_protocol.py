"""The protocol's lines, and the worker's loop on the other end of a pair of sockets."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch

from a5lib.rollouts.checksums import Held
from a5lib.rollouts.protocol import VERSION, Connection, Garbage, Refusal
from a5lib.rollouts.worker_loop import WorkerLoop


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Connection(ours), theirs
    ours.close()
    theirs.close()


def test_messages_may_come_in_pieces_and_several_at_once(pair):
    connection, raw = pair
    text = json.dumps({"id": 1, "text": "ä" * 3}).encode() + b"\n"
    raw.sendall(text[:9])
    threading.Timer(0.1, raw.sendall, (text[9:] + b'{"id": 2}\n{"id": 3}\n',)).start()
    assert [connection.receive(5)["id"] for _ in range(3)] == [1, 2, 3]


def test_a_message_larger_than_any_buffer_goes_through(pair):
    connection, raw = pair
    message = {"id": 1, "ids": list(range(1_000_000))}
    thread = threading.Thread(target=Connection(raw).send, args=(message, 20))
    thread.start()
    assert connection.receive(20) == message
    thread.join()


@pytest.mark.parametrize("line", [b"INFO 12:00 loading\n", b"\xff\xfe\n", b"[1]\n", b"7\n", b"\n", b'{"id": 1\n'])
def test_what_is_no_object_in_a_line_is_garbage(pair, line):
    connection, raw = pair
    raw.sendall(line)
    with pytest.raises(Garbage, match="a line that begins with"):
        connection.receive(1)


def test_a_line_without_an_end_is_garbage_before_memory_is_full(pair, monkeypatch):
    monkeypatch.setattr("a5lib.rollouts.protocol.LONGEST_LINE", 1000)
    connection, raw = pair
    raw.sendall(b"x" * 5000)
    with pytest.raises(Garbage, match="more than 1000 bytes that begins with 'xxx"):
        connection.receive(1)


def test_silence_ends_in_time_in_both_directions(pair):
    connection, raw = pair
    raw.sendall(b'{"id"')  # half a line is silence too
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.receive(0.2)
    with pytest.raises(TimeoutError):
        connection.send({"text": "x" * 10**7}, 0.2)
    assert 0.4 <= time.monotonic() - began < 5


def test_the_other_sides_end_is_none_even_with_unread_bytes(pair):
    connection, raw = pair
    connection.send({"id": 1})
    raw.close()  # it has not read the message: the system calls that a reset
    assert connection.receive(1) is None


class Engine:
    """Notes what it is asked for."""

    verify_seconds = 0.25

    def __init__(self, asked):
        self.asked = asked

    def facts(self):
        return {"max_model_len": 16}

    def wake(self, tag):
        self.asked.append(tag)

    def load(self, slots, buffer, checksums):
        return [Held(slot.name, slot.shape, slot.dtype, checksums[slot.name], slot.name) for slot in slots]

    def generate(self, prompts, *, progress, **options):
        progress(len(prompts))
        return []

    def sleep(self, level):
        raise Refusal("Not now.")

    def memory(self):
        raise KeyError("card")

    def close(self):
        self.asked.append("close")


class Asker:
    """The trainer's side of a loop in a thread."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours)
        self.asked = []
        buffer = torch.zeros(8, dtype=torch.uint8)
        loop = WorkerLoop(Connection(theirs), buffer, lambda _: Engine(self.asked))
        self.thread = threading.Thread(target=lambda: (loop.serve(), theirs.close()))
        self.thread.start()

    def __call__(self, method, **arguments):
        self.connection.send({"id": method, "method": method, "seconds": 60, "arguments": arguments})
        return self.answer()

    def answer(self):
        answer = self.connection.receive(5)
        if answer is not None:
            del answer["id"]
        return answer

    def hello(self):
        return self("hello", version=VERSION, settings={}, slots=[["a", [2], "float32", 0]])


@pytest.fixture
def ask():
    asker = Asker()
    yield asker
    asker.connection.close()
    asker.thread.join(5)
    assert not asker.thread.is_alive()


def test_hello_comes_first_and_once(ask):
    assert ask("memory") == {"refused": "'memory' came before the first 'hello'."}
    assert ask("hello", version=VERSION + 1, settings={}, slots=[])["refused"].startswith("The trainer speaks version")
    assert ask.hello()["result"]["max_model_len"] == 16
    assert ask.hello() == {"refused": "'hello' came after the first 'hello'."}


def test_only_requests_of_the_protocol_reach_the_engine(ask):
    ask.hello()
    for name in ("facts", "close", "__init__", "do", "quit"):
        assert ask(name)["refused"].startswith(f"The worker knows no request '{name}'; it knows hello, wake")
    assert ask("wake", tag="weights") == {"result": None}
    assert ask.asked == ["weights"]


def test_generation_needs_the_weights_of_the_step_that_the_trainer_means(ask):
    ask.hello()
    options = dict(prompts=[[1], [2]])
    assert ask("generate", step=0, **options) == {
        "refused": "The worker holds the weights of step None and is to generate with those of 0."
    }
    assert ask("load", step=3, checksums={"a": 5}) == {
        "result": {"held": [["a", [2], "float32", 5, "a"]], "verify_seconds": 0.25}
    }
    assert "step 3 and is to generate with those of 4" in ask("generate", step=4, **options)["refused"]
    assert ask("generate", step=3, **options) == {"progress": 2}
    assert ask.answer() == {"result": []}


def test_refusals_and_failures_are_told_apart(ask, capfd):
    ask.hello()
    assert ask("sleep", level=2) == {"refused": "Not now."}
    assert ask("memory") == {"failed": "KeyError: 'card'"}
    assert "Traceback" in capfd.readouterr().err, "for the log"


def test_stop_closes_the_engine_and_ends_the_loop(ask):
    ask.hello()
    assert ask("stop") == {"result": None}
    assert ask.answer() is None
    assert ask.asked == ["close"]


def test_garbage_from_the_trainer_ends_the_loop_with_a_sentence(ask, capfd):
    ask.connection.end.sendall(b'{"method": "hello"}\n')
    assert ask.answer() is None
    assert "The trainer sent something that is no request: 'id'." in capfd.readouterr().out
