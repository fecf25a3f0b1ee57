"""Checkpoints: bit-exact contents, random states in a new process, interrupted saves, full disks and kill -9."""

import errno
import json
import os
import random
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from a5lib import checkpoints
from a5lib.checkpoints import capture_rng, latest_checkpoint, restore_rng, save_checkpoint
from a5lib.errors import UserError


def tensors(value):
    return {"model": {"w": torch.full((3, 4), float(value))}, "optimizer": {"0.step": torch.tensor(value)}}


def save(run_dir, step):
    return save_checkpoint(run_dir, step, tensors(step), {"step": step, "best": 0.1})


def kept(run_dir):
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def new_process(code, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=50, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- contents


def test_every_bit_comes_back(tmp_path):
    generator = torch.Generator().manual_seed(0)
    group = {
        "bytes": torch.arange(7, dtype=torch.uint8),  # an odd number of bytes before wider types
        "bf16": torch.randn(5, 3, generator=generator).bfloat16(),
        "transposed": torch.randn(2, 3, generator=generator).T,
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "double": torch.tensor([1.0, float("nan"), float("-inf")], dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
    }
    for dtype in (torch.float16, torch.int32, torch.int16, torch.int8):
        group[str(dtype)] = torch.tensor([-3, 5]).to(dtype)
    state = {"list": [1, 2.5, None], "text": "é", "tenth": 0.1}
    folder = save_checkpoint(tmp_path, 7, {"model": group, "rng": {}}, state)
    assert folder == tmp_path / "checkpoints" / "step-000007"
    loaded = latest_checkpoint(tmp_path)
    assert (loaded.step, loaded.state, loaded.skipped) == (7, state, [])
    assert loaded.tensors.keys() == {"model", "rng"}
    assert loaded.tensors["model"].keys() == group.keys()
    for name, value in group.items():
        have = loaded.tensors["model"][name]
        assert (have.dtype, have.shape) == (value.dtype, value.shape), name
        assert torch.equal(have.contiguous().reshape(-1).view(torch.uint8),
                           value.detach().contiguous().reshape(-1).view(torch.uint8)), name  # fmt: skip
    assert torch.equal(load_file(folder / "model.safetensors")["bf16"], group["bf16"]), "not a safetensors file"


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, 1, tensors(1), {"best": float("nan")})
    assert not (tmp_path / "checkpoints").exists()


def test_the_last_two_stay(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step)
    assert kept(tmp_path) == ["step-000015", "step-000020"]
    assert latest_checkpoint(tmp_path).tensors["optimizer"]["0.step"].item() == 20


def test_no_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no complete checkpoint.*without --resume"):
        latest_checkpoint(tmp_path)


# --- damage


def damage_truncate(folder):
    os.truncate(folder / "optimizer.safetensors", 20)


def damage_one_bit(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def damage_delete(folder):
    (folder / "model.safetensors").unlink()


def damage_no_manifest(folder):
    (folder / "manifest.json").unlink()


def damage_torn_manifest(folder):
    os.truncate(folder / "manifest.json", 10)


def damage_short_manifest(folder):
    (folder / "manifest.json").write_text('{"step": 3, "files": {}}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_truncate, r"optimizer\.safetensors has 20 bytes"),
        (damage_one_bit, r"content of model\.safetensors is not what was saved"),
        (damage_delete, r"model\.safetensors is missing"),
        (damage_no_manifest, "not finished"),
        (damage_torn_manifest, r"manifest\.json cannot be read"),
        (damage_short_manifest, r"does not list state\.json"),
    ],
)
def test_R04_a_damaged_newest_checkpoint_is_skipped_and_named(tmp_path, damage, says):
    for step in (1, 2, 3):
        folder = save(tmp_path, step)
    damage(folder)
    loaded = latest_checkpoint(tmp_path)
    assert loaded.step == loaded.state["step"] == 2
    assert torch.equal(loaded.tensors["model"]["w"], torch.full((3, 4), 2.0))
    assert len(loaded.skipped) == 1 and re.search(f"step-000003.*{says}", loaded.skipped[0]), loaded.skipped
    save(tmp_path, 3)  # the resumed run comes by again
    assert kept(tmp_path) == ["step-000002", "step-000003"]
    assert latest_checkpoint(tmp_path).step == 3


def test_when_all_are_damaged_each_is_named(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    damage_truncate(first)
    damage_delete(second)
    with pytest.raises(UserError, match=r"no complete checkpoint.*step-000002.*missing.*step-000001.*20 bytes"):
        latest_checkpoint(tmp_path)


def test_checkpoints_of_an_abandoned_future_go_and_the_two_before_stay(tmp_path):
    save(tmp_path, 10)
    damage_one_bit(save(tmp_path, 20))  # its sizes still look right
    save(tmp_path, 15)  # resumed from 10
    assert kept(tmp_path) == ["step-000010", "step-000015"]


# --- interrupted saves


def test_R04_an_exception_in_the_second_file_leaves_the_old_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    real = checkpoints._write_tensors

    def interrupted(path, group):
        if path.name == "optimizer.safetensors":
            raise KeyboardInterrupt
        return real(path, group)

    monkeypatch.setattr(checkpoints, "_write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3)
    assert kept(tmp_path) == ["step-000001", "step-000002"], "a half-written folder stayed, or an old one went"
    assert latest_checkpoint(tmp_path).step == 2


def test_R04_nothing_is_deleted_before_the_new_checkpoint_is_complete_and_flushed(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    events = []
    real_fsync, real_rename, real_rmtree = os.fsync, checkpoints.Path.rename, checkpoints.shutil.rmtree

    def fsync(descriptor):
        events.append(f"flush {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        real_fsync(descriptor)

    def rename(path, to):
        events.append(f"rename {path.name} {to.name}")
        return real_rename(path, to)

    def rmtree(path, **kwargs):
        events.append(f"delete {path.name}")
        real_rmtree(path, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoints.Path, "rename", rename)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", rmtree)
    save(tmp_path, 3)
    assert events[1:] == [
        "flush model.safetensors",
        "flush optimizer.safetensors",
        "flush state.json",
        "flush manifest.json",
        "flush .step-000003.unfinished",
        "rename .step-000003.unfinished step-000003",
        "flush checkpoints",
        "rename step-000001 .step-000001.removed",
        "delete .step-000001.removed",
    ]


def test_saving_a_step_again_never_leaves_it_without_a_complete_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    real = checkpoints.Path.rename
    for kill_at in (1, 2, 3):  # before the first rename, before the second, before the deletion

        def rename(path, to, calls=iter(range(1, 9)), kill_at=kill_at):  # noqa: B008
            if next(calls) == kill_at:
                raise KeyboardInterrupt
            return real(path, to)

        monkeypatch.setattr(checkpoints.Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
        assert latest_checkpoint(tmp_path).step == 2, f"killed at rename {kill_at}"
        monkeypatch.setattr(checkpoints.Path, "rename", real)
        save(tmp_path, 2)
        assert kept(tmp_path) == ["step-000001", "step-000002"]


def test_leftovers_of_a_kill_are_swept(tmp_path):
    save(tmp_path, 1)
    for name in (".step-000002.unfinished", ".step-000000.removed"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)
    assert kept(tmp_path) == ["step-000001", "step-000002"]


def test_a_file_that_the_system_cuts_off_is_a_sentence_and_the_old_checkpoint_stays(tmp_path):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(UserError, match=r"checkpoints: the file would be larger.*previous checkpoint is untouched"):
            save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(1 << 17)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept(tmp_path) == ["step-000001"]
    assert latest_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "not permitted")],
)
def test_disk_trouble_is_a_sentence(tmp_path, monkeypatch, code, says):
    save(tmp_path, 1)

    def fsync(descriptor):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*{says}"):
            save(tmp_path, 2)
    assert kept(tmp_path) == ["step-000001"]
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, "fsync", lambda d: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")))
        save(tmp_path, 2)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from a5lib.checkpoints import save_checkpoint, latest_checkpoint

run_dir, rounds = Path(sys.argv[1]), int(sys.argv[2])
random.seed(int(sys.argv[3]))
reported = step = 0
for _ in range(rounds):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            save_checkpoint(run_dir, step, {"model": {"w": torch.full((20_000,), float(step))}}, {"step": step})
            os.write(writer, b"%d " % step)
    os.close(writer)
    time.sleep(random.uniform(0.01, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reader, "rb") as pipe:
        reported = max([reported, *map(int, pipe.read().split())])
    hidden = [p.name for p in (run_dir / "checkpoints").glob(".*")]
    if not reported:
        continue
    loaded = latest_checkpoint(run_dir)
    assert loaded.step >= reported, f"step {reported} was reported as saved, but {loaded.step} is the newest"
    assert loaded.state["step"] == loaded.step and bool((loaded.tensors["model"]["w"] == loaded.step).all())
    assert not loaded.skipped, loaded.skipped
    print(loaded.step, reported, *hidden)
    step = loaded.step
assert reported > 0
"""


def test_kill_9_at_any_moment_loses_nothing_that_was_reported(tmp_path):
    lines = new_process(KILLED, tmp_path, 15, 0).splitlines()
    assert len(lines) >= 5
    assert any(".step-" in line for line in lines), "no kill hit a save midway, so this test showed nothing"


# --- random numbers

DRAW = """
import json, random, sys
import numpy as np, torch
draws = lambda: [
    [random.random() for _ in range(5)] + [random.gauss(0, 1)],
    np.random.rand(5).tolist() + [np.random.randn()],
    torch.rand(5).tolist() + torch.randn(3).tolist(),
]
"""
RESUMED = (
    DRAW
    + """
from a5lib.checkpoints import latest_checkpoint, restore_rng
checkpoint = latest_checkpoint(sys.argv[1])
restore_rng(checkpoint.tensors["rng"], checkpoint.state["rng"])
print(json.dumps(draws()))
"""
)


def test_R01_a_new_process_continues_every_random_stream(tmp_path):
    namespace = {}
    exec(DRAW, namespace)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    # An odd number of normal draws leaves half of a pair cached in Python's and NumPy's generators.
    random.gauss(0, 1), np.random.randn(), torch.randn(3)
    rng_tensors, rng_state = capture_rng()
    save_checkpoint(tmp_path, 3, {"rng": rng_tensors}, {"rng": rng_state})
    assert json.loads(new_process(RESUMED, tmp_path)) == namespace["draws"]()


@pytest.mark.parametrize(
    ("entry", "damage"),
    [
        ("python", lambda t, s: s["python"][1].pop()),
        ("python", lambda t, s: s.pop("python")),
        ("python", lambda t, s: s["python"][1].__setitem__(0, "x")),
        ("numpy", lambda t, s: t.pop("numpy")),
        ("numpy", lambda t, s: t.update(numpy=t["numpy"][:-1])),
        ("numpy", lambda t, s: t["numpy"].__setitem__(0, -1)),
        ("numpy", lambda t, s: s["numpy"].__setitem__(0, "PCG64")),
        ("numpy", lambda t, s: s["numpy"].__setitem__(1, 625)),
        ("torch", lambda t, s: t.update(torch=t["torch"][:-8])),
        ("torch", lambda t, s: t.update(torch=t["torch"].float())),
        ("cuda.99", lambda t, s: t.update({"cuda.99": t["torch"]})),
    ],
)
def test_R01_a_damaged_random_state_raises(entry, damage):
    rng_tensors, rng_state = capture_rng()
    damage(rng_tensors, rng_state)
    with pytest.raises(UserError, match=f"random state of {re.escape(entry)} cannot be restored"):
        restore_rng(rng_tensors, rng_state)
