"""A scripted engine for the vLLM worker, with the face of `VllmEngine`: it keeps its weights packed as vLLM does, and
does wrong on demand what a real engine does wrong by accident. The real worker runs it, in a process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from a5lib.rollouts.checksums import Held, checksums
from a5lib.rollouts.protocol import Refusal
from a5lib.rollouts.weight_channel import views

PACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
          "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class FakeEngine:
    """Settings: `folder` for its files, `context`, `card_kept`: bytes of a pretended card that it keeps asleep.

    folder/fault.json holds one fault, {"method": ..., "kind": ...}; it happens once, at the next call of that method.
    folder/calls.jsonl receives a line for each call, and folder/pids the process ids of the worker and its child.
    """

    def __init__(self, settings):
        self.folder = Path(settings["folder"])
        self.settings = settings
        self.weights = {}  # the engine's name -> tensor, packed ones included
        self.awake = {"weights", "kv_cache"}
        self.cache = {}  # prompt -> the state of the weights that its keys and values came from
        print("fake engine: started", flush=True)
        child = subprocess.Popen(["sleep", "600"])
        (self.folder / "pids").write_text(
            json.dumps({"engine": os.getpid(), "guard": os.getppid(), "child": child.pid})
        )
        self.called("hello")

    def facts(self):
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        return {"max_model_len": self.settings.get("context", 64), "vllm": "fake", "torch": torch.__version__,
                "device": "cpu", "card_free": self.settings.get("card_free"), "argv": sys.argv,
                "environment": {name: os.environ.get(name) for name in names}}  # fmt: skip

    def wake(self, tag):
        self.called(f"wake {tag}", method="wake")
        self.awake.add(tag)

    def load(self, slots, buffer, checksums):
        fault = self.called("load")
        sent = views(slots, buffer)
        if HEAD not in sent and EMBEDDING in sent:
            sent[HEAD] = sent[EMBEDDING]  # tied, and the engine keeps its own packed copy of the head
        if fault == "write":
            buffer[0] ^= 1
        parts = {}
        for name, tensor in sent.items():
            parts.setdefault(self.own_name(name), []).append((name, tensor))
        places = {}  # (the engine's name, the trainer's) -> (first row, last row)
        for own, members in parts.items():
            row = 0
            for name, tensor in members:
                rows = len(tensor) if tensor.dim() else 0
                places[own, name] = (row, row + rows)
                row += rows
            if fault in ("stale", f"stale {own}") and own in self.weights:
                continue  # every call succeeds, and the old values stay
            self.weights[own] = torch.cat([t for _, t in members]) if len(members) > 1 else members[0][1].clone()
        if fault == "changed value":
            self.weights["model.layers.1.mlp.gate_up_proj.weight"].view(torch.int32)[-1, 3] ^= 1  # one bit
        began = time.perf_counter()
        held = self.held(sent, places)
        self.verify_seconds = time.perf_counter() - began
        if fault == "missing tensor":
            held = [row for row in held if row.name != "model.layers.0.self_attn.k_proj.weight"]
        if fault == "unexpected tensor":
            held.append(Held("model.layers.9.extra.bias", (3,), "float32", 5, "model.layers.9.extra.bias"))
        if fault == "wrong checksum":
            held = [row._replace(checksum=row.checksum ^ 1) if row.name == "model.norm.weight" else row for row in held]
        if fault == "wrong dtype":
            held = [row._replace(dtype="bfloat16") if row.name == "model.norm.weight" else row for row in held]
        if fault == "wrong shape":
            held = [row._replace(shape=(*row.shape, 1)) if row.name == "model.norm.weight" else row for row in held]
        return [["half a row"]] if fault == "malformed" else held

    def held(self, sent, places):
        """What is in the engine's memory, read there: rows of packed tensors under the trainer's names."""
        rows = []
        for (own, name), (first, last) in places.items():
            whole = self.weights[own]
            packed = len([1 for other, _ in places if other == own]) > 1
            tensor = whole[first:last] if packed else whole
            theirs = EMBEDDING if name == HEAD and EMBEDDING in sent and sent[HEAD] is sent[EMBEDDING] else name
            dtype = str(tensor.dtype).removeprefix("torch.")
            where = f"{own}[{first}:{last}]" if packed else own
            rows.append(Held(theirs, tuple(tensor.shape), dtype, checksums([("", tensor)])[""], where))
        return rows

    @staticmethod
    def own_name(name):
        for part, packed in PACKED.items():
            name = name.replace(f".{part}.", f".{packed}.")
        return name

    def reset_prefix_cache(self):
        if self.called("reset_prefix_cache") == "in use":
            raise Refusal("Blocks are in use.")
        self.cache.clear()

    def generate(self, prompts, *, n, max_tokens, temperature, top_p, stop, seeds, progress):
        fault = self.called("generate", prompts=len(prompts), n=n, stop=stop, seeds=seeds)
        if fault == "slow":
            for _ in range(10):
                time.sleep(0.2)
                progress(0)
        state = self.state()
        answers = []
        for prompt, of_prompt in zip(prompts, seeds, strict=True):
            cached = self.cache.setdefault(tuple(prompt), state)
            for seed in of_prompt:
                answers.append(self.completion(cached, prompt, seed if temperature else 0, max_tokens, stop))
                progress(1)
        if fault == "too few":
            answers.pop()
        if fault == "not finite":
            answers[1]["log_probs"][0] = float("nan")
        if fault == "malformed":
            del answers[-1]["token_ids"]
        if fault == "aborted":
            answers[-1]["finish_reason"] = "abort"
        return answers

    def completion(self, state, prompt, seed, max_tokens, stop):
        """One character a token: letters that depend on weights, prompt and seed, and the stop string if it fits."""
        if self.awake != {"weights", "kv_cache"} or not self.weights:
            text = "!" * max_tokens  # what vLLM answers from memory that nothing was written to
        else:
            digest = hashlib.sha256(f"{state} {prompt} {seed}".encode()).hexdigest()
            text = digest.translate(str.maketrans("0123456789", "ghijklmnop"))[: min(max_tokens, 8)]
        text = text[: max_tokens - len(stop[0])] + stop[0] if stop and len(stop[0]) < max_tokens else text
        reason = "stop" if stop and text.endswith(stop[0]) else "length"
        ids = list(text.encode())
        return {"token_ids": ids, "log_probs": [-(i % 7) / 4 for i in ids], "text": text, "finish_reason": reason}

    def state(self):
        return str(sorted(checksums(self.weights.items()).items()))

    def sleep(self, level):
        if self.called(f"sleep {level}", method="sleep") == "busy":
            raise Refusal("The engine has unfinished requests and cannot sleep.")
        self.awake.clear()
        for tensor in self.weights.values():
            tensor.view(torch.uint8).fill_(0x21)  # level 2 keeps no weights

    def memory(self):
        taken = self.called("memory") or "taken 0"  # bytes, by whomever
        free = self.settings.get("card_free")
        free = None if free is None else free - int(taken.split()[1])
        return {"card_free": None if free is None else free - self.settings.get("card_kept", 0), "card_total": free,
                "host": 1}  # fmt: skip

    def close(self):
        self.called("stop")

    def called(self, call, method=None, **more):
        """Note the call, and return the fault that is due, unless it has happened here already."""
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"call": call, **more}) + "\n")
        path = self.folder / "fault.json"
        fault = json.loads(path.read_text()) if path.exists() else {}
        if not fault or fault["method"] not in (call, method):
            return None
        path.unlink()
        kind = fault["kind"]
        print(f"fake engine: {kind} in {call}", flush=True)
        if kind == "hang":
            time.sleep(600)
        if kind == "native hang":
            ctypes.PyDLL(None).sleep(600)  # keeps Python's lock, so no other thread of Python runs
        if kind == "raise":
            raise ZeroDivisionError("scripted")
        if kind == "exit":
            os._exit(3)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "guard killed":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if kind.startswith("garbage"):
            line = {"garbage": b"\x80 INFO vllm says hello\n", "garbage number": b'{"id": 999, "result": null}\n',
                    "garbage list": b"[1, 2]\n"}[kind]  # fmt: skip
            os.write(int(sys.argv[sys.argv.index("--connection") + 1]), line)
        return kind


class ToyEngine(FakeEngine):
    """The fake with the model itself behind it, so that a run can learn from what it generates. Its files lie in the
    folder that the environment names.
    """

    def __init__(self, settings):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        folder = os.environ["A5_FAKE_VLLM"]
        super().__init__({**settings, "folder": folder, "context": settings["max_model_len"]})
        (self.folder / "settings.json").write_text(json.dumps(settings))
        for name in ("a5lib", "a5lib.rollouts"):  # bare in a worker; here their contents are wanted
            del sys.modules[name]
        sys.path.insert(0, str(Path(__file__).parent.parent))
        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(settings["model"])
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["dtype"]))
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])

    def load(self, slots, buffer, checksums):
        held = super().load(slots, buffer, checksums)
        with torch.no_grad():
            for name, tensor in views(slots, buffer).items():
                self.model.get_parameter(name).copy_(tensor)
        return held

    def generate(self, prompts, *, n, seeds, progress, **options):
        from a5lib.rollouts.transformers_backend import TransformersRollouts

        fault = self.called("generate", prompts=len(prompts), n=n)
        backend = TransformersRollouts(self.model, self.tokenizer)
        backend.sync(self.model.named_parameters(), 0)
        completions = backend.generate(prompts, n=n, seed=seeds[0][0], progress=progress, **options)
        shift = 0.5 if fault == "shifted" else 0.0
        return [
            {"token_ids": c.token_ids, "log_probs": [p - shift for p in c.log_probs], "text": c.text,
             "finish_reason": c.finish_reason}
            for c in completions
        ]  # fmt: skip

    def sleep(self, level):
        super().sleep(level)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
