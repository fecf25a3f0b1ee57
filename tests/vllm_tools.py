"""A colocated backend on the fake engine, and what /proc says of the processes and memory that it leaves."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import torch

from a5lib.rollouts.vllm_backend import VllmColocated

ENGINE = f"{Path(__file__).with_name('fake_vllm.py')}:FakeEngine"


def weights(seed=0, *, tied=False):
    """Random float32 weights under a checkpoint's names: two layers of width 8, and no norm that is all ones."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (97, 8), "model.norm.weight": (8,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (8, 8) for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (12, 8) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (8, 12), f"{layer}.norm.weight": (8,)}
    if not tied:
        shapes["lm_head.weight"] = (97, 8)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


class Rig:
    """A backend on the fake engine, and the files by which the two talk to the test."""

    def __init__(self, folder, *, tied=False, seconds=None, python=None, **settings):
        self.folder = folder
        self.weights = weights(tied=tied)
        self.backend = VllmColocated(
            self.weights.items(), {"folder": str(folder), **settings}, folder / "run",
            engine=ENGINE, seconds=seconds, python=python,
        )  # fmt: skip

    def cycle(self, step=0, **options):
        """Sync, generate greedily to two prompts, release: the texts."""
        self.backend.sync(self.weights.items(), step)
        texts = self.texts(**options)
        self.backend.release()
        return texts

    def texts(self, prompts=((5, 6, 7), (8,)), *, n=2, temperature=0.0, seed=0, **options):
        arguments = {"max_tokens": 8, "temperature": temperature, "seed": seed, **options}
        return [c.text for c in self.backend.generate([list(p) for p in prompts], n=n, **arguments)]

    def fault(self, method, kind):
        """Let it happen once, at the next call of the method."""
        (self.folder / "fault.json").write_text(json.dumps({"method": method, "kind": kind}))

    def calls(self):
        """What the engine was asked for since the last look."""
        path = self.folder / "calls.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("")
        return lines

    def pids(self):
        """The worker's two processes, and the child that its engine started."""
        return json.loads((self.folder / "pids").read_text())


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def survivors(pids, seconds=10.0):
    """Those of the processes that live on for so long."""
    deadline = time.monotonic() + seconds
    while (left := [name for name, pid in pids.items() if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def held():
    """What this process holds that a worker could leave behind: sockets, anonymous files, mappings, shared files."""
    gc.collect()  # what earlier tests have left is not counted
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the one that listed them
            continue
    with open("/proc/self/maps") as maps:
        mapped = sum("a5lib-weights" in line for line in maps)
    return {
        "sockets": sum(link.startswith("socket:") for link in links),
        "files": sum("a5lib-weights" in link or "vllm-worker.log" in link for link in links),
        "mappings": mapped,
        "/dev/shm": sum("a5lib-weights" in name for name in os.listdir("/dev/shm")),
    }
