"""The backend over HTTP on a scripted server: what it sends, and what it says of a server that is not as it should be;
and the worker that vLLM loads, on a pretended vLLM of each version.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import a5lib
from a5lib.config import TrainConfig
from a5lib.course import load_algo
from a5lib.models import load_policy, load_tokenizer
from a5lib.rollouts import vllm_versions as versions
from a5lib.rollouts.checksums import Held, checksums, differences
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.rollouts.vllm_server import ServerError, VllmServer, serve_command
from a5lib.rollouts.vllm_server_worker import Receiver, ServerWorker, map_channel
from a5lib.rollouts.weight_channel import Slot, WeightChannel, channel_size, lay_out, views
from a5lib.runlog import read_jsonl
from a5lib.training import train
from tests.fake_server import ByteTokenizer, FakeServer
from tests.vllm_tools import weights

SYNC = ["a5_facts", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "a5_held",
        "/reset_prefix_cache", "/resume"]  # fmt: skip


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.close()


def backend_of(server, **options):
    return VllmServer(
        weights().items(), ByteTokenizer(), server.url, **{"model": "fake/model", "max_model_len": 64} | options
    )


@pytest.fixture
def backend(server):
    backend = backend_of(server)
    yield backend
    backend.close()


def generate(backend, prompts=((5, 6), (7,)), **options):
    arguments = {"n": 2, "max_tokens": 8, "temperature": 1.0, "seed": 0} | options
    return backend.generate([list(p) for p in prompts], **arguments)


def test_the_order_of_a_sync_and_what_the_server_does_meanwhile(server, backend):
    backend.sync(weights().items(), 0)
    assert server.log == SYNC
    assert not server.paused and not server.updating
    generate(backend)
    assert server.log[len(SYNC) :] == 4 * ["/v1/completions"] + ["a5_facts"]
    assert (backend.takes_card, backend.channel.slots[0].name) == (False, "model.embed_tokens.weight")


def test_an_update_that_another_trainer_left_open_is_finished_first(server, backend):
    server.updating = server.paused = True
    backend.sync(weights().items(), 0)
    assert server.log == [*SYNC[:2], "/finish_weight_update", *SYNC[2:]]
    assert len(generate(backend)) == 4


def test_V06_each_completion_is_a_request_with_a_seed_of_its_own(server, backend):
    backend.sync(weights().items(), 0)
    generate(backend, n=4, temperature=0.6, stop=["</answer>"])
    assert sorted(r["prompt"] for r in server.requests) == 4 * [[5, 6]] + 4 * [[7]]
    assert len({r["seed"] for r in server.requests}) == 8 and all(0 <= r["seed"] < 2**63 for r in server.requests)
    (same,) = {json.dumps({k: v for k, v in r.items() if k not in ("prompt", "seed")}) for r in server.requests}
    assert json.loads(same) == {
        "max_tokens": 8, "temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": ["</answer>"], "include_stop_str_in_output": True,
        "logprobs": 0, "return_token_ids": True,
    }, "what is left out comes from the model's generation_config.json"  # fmt: skip


def test_answers_that_overtake_each_other_are_put_in_order(server, backend):
    backend.sync(weights().items(), 0)
    expected = generate(backend, [[i] for i in range(8)])
    complete, delays = server.complete, iter([0.2, 0.0] * 8)

    def complete_late(body):
        time.sleep(next(delays))
        return complete(body)

    server.complete = complete_late
    assert generate(backend, [[i] for i in range(8)]) == expected


def test_no_more_is_asked_for_at_a_time_than_was_said(server):
    backend = backend_of(server, concurrency=3)
    backend.sync(weights().items(), 0)
    complete, at_once, seen, lock = server.complete, [0], [], threading.Lock()

    def counted(body):
        with lock:
            at_once[0] += 1
            seen.append(at_once[0])
        time.sleep(0.02)
        with lock:
            at_once[0] -= 1
        return complete(body)

    server.complete = counted
    generate(backend, n=6)
    assert max(seen) == 3
    backend.close()


# --- a server that is not as it should be


def sentence(backend, call=None, *, start=False):
    """What is said; how the server is to be started stands at its end where that is the remedy. Afterwards there is no
    generation without a sync.
    """
    with pytest.raises(ServerError) as caught:
        (call or backend.start)()
    said, beginning = str(caught.value), f"The vLLM server at {backend.url} "
    end = f" Start it with: {backend.command}" if start else " Look for the cause in what it printed last, then start "
    end += "" if start else "again (a run: with --resume)."
    assert said.startswith(beginning) and said.endswith(end) and "\n" not in said
    with pytest.raises(RuntimeError, match=r"before sync\(\)"):
        generate(backend)
    return said.removeprefix(beginning).removesuffix(end)


def test_no_server(server, backend):
    server.close()
    assert sentence(backend, start=True) == "is not there."


def test_another_program_at_the_port(server, backend):
    server.faults["a5_facts"] = (404, b"<html>no such page</html>")
    assert sentence(backend, start=True) == "is no vLLM server, or one without VLLM_SERVER_DEV_MODE=1."
    listener = socket.create_server(("127.0.0.1", 0))
    other = VllmServer(
        weights().items(), ByteTokenizer(), f"http://127.0.0.1:{listener.getsockname()[1]}", model="m",
        max_model_len=64, seconds={"ask": 0.2},
    )  # fmt: skip
    with listener:
        assert sentence(other) == "gave no answer to /collective_rpc for 0.2 s."
        listener.accept()[0].close()  # the one that has been given up
        speaker = threading.Thread(target=lambda: listener.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.6\r\n"))
        speaker.start()
        assert sentence(other).startswith("broke off /collective_rpc (")
        speaker.join()
    other.close()


def test_a_server_without_the_worker(server, backend):
    message = "Call to collective_rpc method failed: 'Worker' object has no attribute 'a5_facts'"
    server.faults["a5_facts"] = (500, {"error": {"message": message, "code": 500}})
    assert sentence(backend, start=True) == f"was started without --worker-extension-cls {versions.SERVER_WORKER}."


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"a5lib": "0.0.9"}, f"was started with the a5lib '0.0.9' and not {a5lib.__version__!r}."),
        ({"backend": None}, "was started with the backend None and not 'a5lib'."),
        ({"dtype": "float16"}, "was started with the dtype 'float16' and not 'float32'."),
        (
            {"logprobs_mode": "raw_logprobs"},
            "was started with the logprobs_mode 'raw_logprobs' and not 'processed_logprobs'.",
        ),
        ({"cards": 2}, "was started with the cards 2 and not 1."),
        ({"max_model_len": 63}, "takes 63 tokens, and this run has up to 64."),
    ],
)
def test_a_server_that_was_started_otherwise(server, backend, facts, said):
    server.facts |= facts
    assert sentence(backend, start=True) == said
    assert sentence(backend, lambda: backend.sync(weights().items(), 0), start=True) == said
    assert set(server.log) == {"a5_facts"}, "nothing was sent"


def test_a_worker_of_another_version(server, backend):
    del server.facts["cards"]
    assert sentence(backend, start=True) == "runs another version of a5lib's worker."
    server.faults["a5_facts"] = {"results": [{}, {}]}
    assert sentence(backend, start=True) == "gave no single answer to a5_facts; it must run on one card."


def test_raw_log_probs_are_wanted_where_top_p_is_below_1(server):
    backend = backend_of(server, top_p=0.9)
    assert sentence(backend, start=True).endswith("'processed_logprobs' and not 'raw_logprobs'.")
    server.facts["logprobs_mode"] = "raw_logprobs"
    backend.sync(weights().items(), 0)
    assert len(generate(backend, top_p=0.9)) == 4
    for options in ({"top_p": 1.0}, {"top_p": 0.9, "temperature": 0.6}, {"top_p": 0.9, "temperature": 2.5}):
        with pytest.raises(RuntimeError, match=r"vLLM|made for top-p 0\.9"):
            generate(backend, **options)
    backend.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing tensor", "model.layers.0.self_attn.k_proj.weight is missing."),
        ("unexpected tensor", "model.layers.9.extra.bias was not sent."),
        ("changed value", "has other values (held as model.layers.1.mlp.gate_up_proj.weight[12:24])."),
        ("wrong dtype", "model.norm.weight is bfloat16 [8] and should be float32 [8]."),
    ],
)
def test_V14_weights_that_did_not_arrive_are_named_and_the_server_stays_paused(server, backend, fault, said):
    backend.sync(weights().items(), 0)
    before = generate(backend)
    server.engine.due["load"] = fault
    what = sentence(backend, lambda: backend.sync(weights().items(), 1))
    assert what.startswith("serves fake/model and does not hold the weights of step 1 that it was sent: ")
    assert what.endswith(said)
    assert server.paused, "it would generate with wrong weights"
    backend.sync(weights().items(), 1)
    assert generate(backend) == before


def failed(message):
    return 500, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


@pytest.mark.parametrize("path", SYNC)
def test_a_fault_in_any_phase_of_a_sync(server, backend, path):
    backend.sync(weights().items(), 0)
    before = generate(backend)
    server.faults[path] = failed("EngineCore encountered an issue.")
    route = path if path.startswith("/") else "/collective_rpc"
    what = sentence(backend, lambda: backend.sync(weights().items(), 1))
    assert what == f"answered {route} with HTTP 500: EngineCore encountered an issue."
    backend.sync(weights().items(), 1)
    assert generate(backend) == before


def test_garbage_for_checksums_and_a_cache_that_is_not_reset(server, backend):
    server.faults["a5_held"] = {"results": [[["half a row"]]]}
    assert "sent garbage as its weights' checksums" in sentence(backend, lambda: backend.sync(weights().items(), 0))
    server.faults["/reset_prefix_cache"] = {"success": False}
    assert "did not reset its prefix cache" in sentence(backend, lambda: backend.sync(weights().items(), 0))
    assert server.paused
    server.faults["/reset_prefix_cache"] = b""  # 0.24 answers with nothing
    backend.sync(weights().items(), 0)


def choice(**changes):
    whole = {"token_ids": [65], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    return {"choices": [whole | changes]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, {"error": {"message": "max_tokens is too large."}}), "with HTTP 400: max_tokens is too large."),
        ((502, b"Bad Gateway"), "with HTTP 502: Bad Gateway."),
        ((404, {"detail": "Not Found"}), "with HTTP 404: Not Found."),
        (b"not JSON", "sent garbage as a completion: TypeError"),
        ({"choices": []}, "sent garbage as a completion: ValueError"),
        (choice(token_ids=None), "sent garbage as a completion: TypeError"),
        (choice(logprobs={"token_logprobs": [None]}), "sent garbage as a completion: TypeError"),
        (choice(token_ids=[65, 66]), "gave 1 log-probabilities for 2 tokens, and the finish reason 'stop'."),
        (choice(token_ids=[], logprobs={"token_logprobs": []}), "gave 0 log-probabilities for 0 tokens"),
        (choice(finish_reason="abort"), "and the finish reason 'abort'."),
        ("break", "broke off /v1/completions (RemoteDisconnected)."),
        ("hang", "gave no answer to /v1/completions for 0.5 s."),
    ],
)
def test_a_fault_of_one_completion(server, answer, said):
    backend = backend_of(server, seconds={"generate": 0.5})
    backend.sync(weights().items(), 0)
    before = generate(backend)
    server.faults["/v1/completions"] = answer
    assert said in sentence(backend, lambda: generate(backend))
    backend.sync(weights().items(), 1)
    assert generate(backend) == before
    backend.close()


def test_log_probs_that_are_not_finite(server, backend):
    backend.sync(weights().items(), 0)
    server.faults["/v1/completions"] = choice(logprobs={"token_logprobs": [float("nan")]})
    with pytest.raises(FloatingPointError, match="log-probabilities are not finite"):
        generate(backend)


def test_a_server_that_dies_at_work(server, backend):
    backend.sync(weights().items(), 0)
    server.engine.due["slow"] = 20
    killer = threading.Thread(target=lambda: (server.at_work.wait(), server.close()))
    server.complete = lambda body: (server.at_work.set(), server.gone.wait(), None)[-1]
    killer.start()
    with pytest.raises(ServerError, match=r"broke off /v1/completions|is not there"):
        generate(backend)
    killer.join()


@pytest.mark.parametrize("stamp", ["", "of another run"])
def test_weights_of_another_run_or_of_none_are_noticed(server, backend, stamp):
    """The server was started again, with random weights, or another trainer uses it."""
    backend.sync(weights().items(), 3)
    server.stamp = stamp
    assert sentence(backend, lambda: generate(backend)).startswith("no longer holds the weights of step 3: it was star")
    backend.sync(weights().items(), 3)
    assert len(generate(backend)) == 4


def test_an_interrupt_ends_the_requests_under_way(server, backend):
    backend.sync(weights().items(), 0)
    complete, first = server.complete, threading.Lock()

    def only_one_answers(body):
        if first.acquire(blocking=False):
            return complete(body)
        server.gone.wait()
        return None

    def interrupt(count):
        raise KeyboardInterrupt

    server.complete = only_one_answers
    began, threads = time.monotonic(), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        generate(backend, n=20, progress=interrupt)
    assert time.monotonic() - began < 5
    assert not [t for t in threading.enumerate() if t.name.startswith("a5-vllm-server")], "a thread waits on"
    assert threading.active_count() >= threads, "the scripted server's own threads are still there"


def test_what_has_been_closed_says_so(server, backend):
    backend.close()
    with pytest.raises(RuntimeError, match="has been closed; make a new one"):
        backend.sync(weights().items(), 0)


# --- the command


def test_the_command_starts_what_the_backend_wants(server):
    command = serve_command(
        "http://127.0.0.1:8001", model="my models/a", dtype="bfloat16", max_model_len=673, card=torch.device("cuda", 0),
        trust_remote_code=True,
    )  # fmt: skip
    words = shlex.split(command)
    assert words == [
        "CUDA_VISIBLE_DEVICES=1", "VLLM_SERVER_DEV_MODE=1", f"PYTHONPATH={Path(a5lib.__file__).parent.parent}",
        "vllm", "serve", "my models/a", "--host", "127.0.0.1", "--port", "8001", "--dtype", "bfloat16",
        "--max-model-len", "673", "--logprobs-mode", "processed_logprobs", "--load-format", "dummy",
        "--weight-transfer-config", '{"backend": "a5lib"}', "--worker-extension-cls", versions.SERVER_WORKER,
        "--trust-remote-code",
    ]  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES=0" in backend_of(server, device=torch.device("cuda", 1)).command, "the other one"
    module, _, name = versions.SERVER_WORKER.rpartition(".")
    assert getattr(sys.modules[module], name) is ServerWorker


# --- the worker


class Model(nn.Module):
    """Loads as vLLM's models do."""

    def __init__(self):
        super().__init__()
        for name, weight in weights().items():
            self.add(name.split("."), torch.zeros_like(weight))
        self.register_buffer("table", torch.arange(4.0))
        self.fault = None

    def add(self, path, weight):
        module = self
        for part in path[:-1]:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(path[-1], nn.Parameter(weight, requires_grad=False))

    def load_weights(self, pairs):
        for name, weight in pairs:
            self.get_parameter(name).copy_(weight)
        if self.fault == "moved":
            self.get_submodule("model.norm").weight = nn.Parameter(torch.ones(8))
        if self.fault == "changed":
            self.table[1] = 0


@pytest.fixture
def channel():
    channel = WeightChannel(lay_out(weights().items()))
    channel.write(weights().items())
    yield channel
    channel.close()


def path_of(channel):
    return f"/proc/{os.getpid()}/fd/{channel.descriptor}"


def fields(channel):
    return [[slot.name, list(slot.shape), slot.dtype, slot.offset] for slot in channel.slots]


def worker_of(model, receiver):
    worker = ServerWorker()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.weight_transfer_engine = receiver
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="a", dtype=torch.bfloat16, max_model_len=512, logprobs_mode="processed_logprobs"
        ),
        weight_transfer_config=SimpleNamespace(backend="a5lib"),
        parallel_config=SimpleNamespace(world_size_across_dp=1),
    )
    return worker


def test_a_load_can_only_read_the_weights_that_are_the_trainers_own(channel, monkeypatch):
    """Written to, the server's mapping would end its process: the flags of the mapping during a load."""
    file, seen = str(os.fstat(channel.descriptor).st_ino), []

    def look(model, sent):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        seen.append(sorted(line[1] for line in lines if line[4] == file))

    monkeypatch.setattr(Model, "load_weights", look)
    Receiver(Model()).receive(path_of(channel), fields(channel), "stamp")
    assert seen == [["r--s", "rw-s"]], "the server's, and the trainer's in this very process"


def test_the_worker_reads_the_channel_and_says_what_the_engine_holds(channel, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    model = Model()
    receiver = Receiver(model)
    worker = worker_of(model, receiver)
    receiver.receive(path_of(channel), fields(channel), "stamp")
    rows = json.loads(json.dumps(worker.a5_held(json.dumps(fields(channel)))))
    sent = checksums(weights().items())
    assert not differences(channel.slots, sent, [Held(n, tuple(s), d, c, w) for n, s, d, c, w in rows])
    assert worker.a5_facts() == {
        "a5lib": a5lib.__version__, "vllm": "0.32.0", "model": "a", "dtype": "bfloat16", "max_model_len": 512,
        "logprobs_mode": "processed_logprobs", "cards": 1, "backend": "a5lib", "stamp": "stamp",
        "update_is_open": False,
    }  # fmt: skip
    file = str(os.fstat(channel.descriptor).st_ino)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[4] == file]
    assert len(mapped) == 1, "the server keeps the memory of a trainer that may end"
    model.get_submodule("model.norm").weight.data[3] += 1
    rows = worker.a5_held(json.dumps(fields(channel)))
    assert differences(channel.slots, sent, [Held(*row) for row in rows]) == ["model.norm.weight has other values"]


@pytest.mark.parametrize(
    ("fault", "said"), [("moved", r"moved model\.norm\.weight; recorded"), ("changed", "changed or lost table;")]
)
def test_a_load_that_moves_a_parameter_or_changes_a_buffer_is_a_fault_and_has_no_stamp(channel, fault, said):
    model = Model()
    receiver = Receiver(model)
    receiver.receive(path_of(channel), fields(channel), "first")
    model.fault = fault
    with pytest.raises(RuntimeError, match=f"vLLM {said}"):
        receiver.receive(path_of(channel), fields(channel), "second")
    assert receiver.stamp == ""


def test_the_worker_opens_weight_channels_alone(channel, tmp_path):
    file = (tmp_path / "a5lib-secret").open("w+b")
    file.truncate(2**20)
    here = f"/proc/{os.getpid()}/fd"
    for path in ("/proc/1/fd/0", f"{here}/{file.fileno()}", f"{here}/9999", str(tmp_path / "a5lib-secret")):
        with pytest.raises(RuntimeError, match="is no weight channel of 64 bytes here; trainer and server must run on"):
            map_channel(path, 64)
    with pytest.raises(RuntimeError, match="is no weight channel of"):
        map_channel(path_of(channel), len(channel.buffer) + 2**20)
    file.close()
    buffer = map_channel(path_of(channel), 64)
    assert torch.equal(buffer[: len(channel.buffer)], channel.buffer)


def pretended_vllm(monkeypatch, version, on_cpu):
    """The classes that a transfer backend is made of, as the version has them; returns how vLLM makes and calls it."""
    made = {}

    class Engine:
        def __init__(self, *arguments):
            assert len(arguments) == {"0.24": 3, "0.32": 4}[version]
            self.model = arguments[-1]

    def register(name, engine):
        made[name] = engine

    class Info:
        pass

    base = SimpleNamespace(WeightTransferEngine=Engine, WeightTransferInitInfo=Info, WeightTransferUpdateInfo=Info)
    factory = SimpleNamespace(WeightTransferEngineFactory=SimpleNamespace(register_engine=register))
    transfer, platforms = ModuleType("transfer"), ModuleType("platforms")
    transfer.base, transfer.factory = base, factory
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", transfer)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return made


@pytest.mark.parametrize(("version", "on_cpu"), [("0.24", False), ("0.32", False), ("0.32", True)])
def test_both_versions_get_a_transfer_backend(version, on_cpu, monkeypatch):
    made, switched, received = pretended_vllm(monkeypatch, version, on_cpu), [], []
    monkeypatch.setattr(versions, "switch_off_packing", lambda: switched.append(True))
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)

    class Noted:
        stamp = "of the load"

        def __init__(self, model):
            self.model = model

        def receive(self, *arguments):
            received.append((self.model, *arguments))

    versions.prepare_server(Noted)
    assert switched == ([True] if on_cpu else [])
    assert os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == (None if on_cpu else "0")
    (engine_class,) = made.values()
    assert list(made) == ["a5lib"]
    engine = engine_class(*{"0.24": ("config", "parallel"), "0.32": ("config", "vllm", "device")}[version], "model")
    update = engine.update_info_cls(channel="/proc/1/fd/2", slots=[["a", [1], "float32", 0]], stamp="s")
    if version == "0.24":
        engine.receive_weights(update, load_weights=None)
    else:
        engine.start_weight_update()
        engine.receive_weights(update)
        engine.finish_weight_update()
    assert received == [("model", "/proc/1/fd/2", [["a", [1], "float32", 0]], "s")]
    assert engine.stamp == "of the load"
    engine.shutdown()


# --- a whole run


class ToyServer(FakeServer):
    """The scripted server with the toy model behind it, so that a run can learn from what it generates."""

    def __init__(self, **options):
        super().__init__(**options)
        self.model, _ = load_policy("toy", device="cpu", dtype="float32")
        self.turn = threading.Lock()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()

    def load(self, channel, slots, stamp):
        super().load(channel, slots, stamp)
        laid_out = [Slot(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in slots]
        with torch.no_grad():
            for name, tensor in views(laid_out, map_channel(channel, channel_size(laid_out))).items():
                self.model.get_parameter(name).copy_(tensor)

    def complete(self, body):
        with self.turn:
            backend = TransformersRollouts(self.model, load_tokenizer("toy"))
            backend.sync([], 0)
            (made,) = backend.generate(
                [body["prompt"]], n=1, max_tokens=body["max_tokens"], temperature=body["temperature"],
                seed=body["seed"], stop=body["stop"],
            )  # fmt: skip
        return 200, choice(
            token_ids=made.token_ids, logprobs={"token_logprobs": made.log_probs}, finish_reason=made.finish_reason
        )


@pytest.mark.reference
@pytest.mark.parametrize("budget", [None, 0.015])
def test_a_run_trains_with_a_server_whichever_engine_it_has(budget, tmp_path):
    server = ToyServer(context=512)
    config = TrainConfig(
        num_steps=2, rollout_batch_size=16, group_size=4, max_tokens=40, train_examples=16, val_examples=2,
        eval_samples=1, eval_every=0, save_every=0, save_final=False, device="cpu", vram_budget=budget,
        output_dir=tmp_path / "run", generation_backend="vllm-server", vllm_url=server.url,
    )  # fmt: skip
    said = []
    train(config, load_algo("solutions"), say=said.append)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    assert metrics[1]["mismatch_mean"] < 1e-4, "generated with other weights than those that train"
    order = [name for name in server.log if name != "/v1/completions"]
    assert order == ["a5_facts", *6 * [*SYNC, "a5_facts"]], "two validations before, two steps, two validations after"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert ("weights for vLLM" in plan["host"]) == (budget is None), "the layer-major engine's lie in the channel"
    server.close()
    with pytest.raises(ServerError, match=r"is not there\. Start it with: VLLM_SERVER_DEV_MODE=1 .*toy_model"):
        train(dataclasses.replace(config, output_dir=tmp_path / "again"), load_algo("solutions"), say=said.append)
