"""A scripted `vllm serve`: the HTTP routes that `VllmServer` uses, over the scripted engine, in a thread of the test.

What comes in is loaded by the real reader of the weight channel. It does wrong on demand what a real server does wrong
by accident.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from a5lib import __version__
from a5lib.rollouts.vllm_server_worker import map_channel
from a5lib.rollouts.weight_channel import Slot, channel_size
from tests.fake_vllm import FakeEngine


class ServedEngine(FakeEngine):
    """The scripted engine without a process of its own."""

    def __init__(self):
        self.weights, self.cache, self.due = {}, {}, {}
        self.awake = {"weights", "kv_cache"}

    def called(self, call, method=None, **more):
        return self.due.pop(call, None)


class ByteTokenizer:
    """Bytes are tokens, as with the scripted engine."""

    def __len__(self):
        return 256

    def decode(self, ids, **_):
        return bytes(ids).decode()


class FakeServer:
    """It answers at `url` until `close`.

    Attributes:
        facts: what `a5_facts` gives, beside what changes.
        log: every path that was asked for, with the method of an RPC.
        requests: the bodies of the completions that were asked for.
        faults: path or method -> what happens at its next call: "hang", "break", an HTTP status with its body, or the
            body of an answer.
    """

    def __init__(self, context=64, logprobs_mode="processed_logprobs"):
        self.engine = ServedEngine()
        self.facts = {
            "a5lib": __version__, "vllm": "fake", "model": "fake/model", "dtype": "float32", "max_model_len": context,
            "logprobs_mode": logprobs_mode, "cards": 1, "backend": "a5lib",
        }  # fmt: skip
        self.log, self.requests, self.faults = [], [], {}
        self.stamp, self.rows = "", []
        self.paused = self.updating = False
        self.at_work = threading.Event()  # a completion has been asked for
        self.gone = threading.Event()
        self.server = Listener(("127.0.0.1", 0), type("Handler", (Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self):
        """Harmless when repeated."""
        self.gone.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, path, body):
        """Status and content of the answer to a request."""
        route, _, query = path.partition("?")
        name = body["method"] if route == "/collective_rpc" else route
        self.log.append(name)
        fault = self.faults.pop(name, None) if name in self.faults else None
        if fault == "hang":
            self.gone.wait()
        if fault == "break":
            return None
        if fault is not None:
            return fault if isinstance(fault, tuple) else (200, fault)
        if route == "/v1/completions":
            return self.complete(body)
        if route == "/pause":
            assert query == "mode=abort"
            self.paused = True
        if route == "/resume":
            self.paused = False
        if route == "/start_weight_update":
            assert self.paused and not self.updating and body == {"is_checkpoint_format": False}
            self.updating = True
        if route == "/update_weights":
            assert self.updating
            self.load(**body["update_info"])
        if route == "/finish_weight_update":
            assert self.updating
            self.updating = False
        if route == "/reset_prefix_cache":
            self.engine.reset_prefix_cache()
            return 200, {"success": True}
        if route == "/collective_rpc":
            return 200, {"results": [getattr(self, name)(*body["args"])]}
        return 200, {"message": "done"}

    def load(self, channel, slots, stamp):
        laid_out = [Slot(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in slots]
        buffer = map_channel(channel, channel_size(laid_out))
        self.rows = self.engine.load(laid_out, buffer, {})
        self.stamp = stamp

    def a5_facts(self):
        return {**self.facts, "update_is_open": self.updating, "stamp": self.stamp}

    def a5_held(self, slots):
        assert json.loads(slots)
        return [list(row) for row in self.rows]

    def complete(self, body):
        assert not self.paused, "a real server would let it wait"
        self.requests.append(body)
        self.at_work.set()
        self.gone.wait(self.engine.due.get("slow", 0))
        engine, prompt, stop = self.engine, body["prompt"], body["stop"]
        state = engine.cache.setdefault(tuple(prompt), engine.state())
        row = engine.completion(state, prompt, body["seed"] if body["temperature"] else 0, body["max_tokens"], stop)
        choice = {
            "token_ids": row["token_ids"], "logprobs": {"token_logprobs": row["log_probs"]}, "text": "unused",
            "finish_reason": row["finish_reason"],
        }  # fmt: skip
        return 200, {"choices": [choice]}


class Listener(ThreadingHTTPServer):
    request_queue_size = 256  # connections that wait to be taken; Python's own is 5


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size) or "null")
        answer = self.fake.answer(self.path, body)
        if answer is None:
            return  # the connection is closed without a word
        status, content = answer
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
