"""Checkpoints from which a run continues exactly, and which a kill at any moment cannot spoil.

A checkpoint is a folder RUN/checkpoints/step-000010 with one safetensors file for each group of tensors, state.json,
and manifest.json, which lists the size and SHA-256 of the others and is written last. The folder is written under a
hidden name, every file and folder is flushed to the disk, and only then it gets its name. Nothing is pickled.

This file does not know what the tensors mean; the training loop decides what belongs in them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from a5lib.errors import UserError

KEEP = 2
REPLACED = ".replaced"  # end of the name of a checkpoint while another of the same step takes its place

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint as it was saved: group -> name -> tensor (on the CPU), and the JSON state.

    `skipped` has one sentence for each newer checkpoint that is incomplete or damaged; show them to the user.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    skipped: list[str]


def save_checkpoint(run_dir: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Save a checkpoint; when this returns, it is on the disk and complete.

    Afterwards the newest two complete checkpoints up to this step stay and the others go: those before them, those that
    were interrupted, and those of later steps, which a resumed run has left behind. Taught in notebook 11.

    Args:
        run_dir: the run folder.
        step: number of the rollout batch after which this is.
        tensors: group -> name -> tensor, any device; each group becomes GROUP.safetensors.
        state: JSON values, no NaN or infinity.

    Raises:
        UserError: the disk is full, read-only or not ours; the earlier checkpoints are untouched.
        ValueError: `state` is not strict JSON; nothing was written.
    """
    text = json.dumps(state, allow_nan=False).encode()
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step-{step:06d}"
    unfinished = folder / f".{target.name}.unfinished"
    with _disk_trouble(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover)
        try:
            unfinished.mkdir()
            manifest = {
                f"{group}.safetensors": _write_tensors(unfinished / f"{group}.safetensors", group_tensors)
                for group, group_tensors in tensors.items()
            }
            manifest["state.json"] = _write(unfinished / "state.json", [text])
            _write(unfinished / "manifest.json", [json.dumps({"step": step, "files": manifest}, indent=1).encode()])
            _sync_folder(unfinished)
            replaced = target.with_name(target.name + REPLACED)
            if target.exists():
                if replaced.exists():
                    _remove(replaced)
                target.rename(replaced)
            unfinished.rename(target)
            _sync_folder(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _prune(folder, target)
    return target


def latest_checkpoint(run_dir: Path) -> Checkpoint:
    """Load the newest complete checkpoint; every byte is compared with its manifest first. Taught in notebook 11.

    Raises:
        UserError: there is none; says why each candidate was refused.
    """
    folder = Path(run_dir) / "checkpoints"
    skipped: list[str] = []
    for candidate in _candidates(folder):
        try:
            files = _complete_files(candidate, digests=True)
            tensors = {path.stem: load_file(path) for path in files if path.suffix == ".safetensors"}
            state = json.loads((candidate / "state.json").read_text(encoding="utf-8"))
        except _Damaged as error:
            skipped.append(f"Checkpoint {candidate.name} was skipped: {error}.")
            continue
        return Checkpoint(_step(candidate), tensors, state, skipped)
    none = f"{folder} holds no complete checkpoint, so the run cannot be resumed; start it again without --resume."
    raise UserError(" ".join([none, *skipped]))


# --- random numbers


def capture_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every global random generator: Python, NumPy, torch on the CPU and on each CUDA device in use.

    Returns:
        Tensors (uint8, and int64 for NumPy's words) and JSON values, to be saved in a checkpoint.
    """
    version, words, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    tensors = {"numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors, {
        "python": [version, list(words), gauss],
        "numpy": [algorithm, int(position), int(has_gauss), float(cached_gaussian)],
    }


def restore_rng(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Put every generator back where `capture_rng` found it. Seed nothing afterwards.

    Raises:
        UserError: an entry is missing or damaged, or a CUDA device is not there; names it.
    """

    def restore_numpy() -> None:
        algorithm, position, has_gauss, cached_gaussian = state["numpy"]
        keys = tensors["numpy"].numpy()
        if keys.min() < 0 or keys.max() >= 1 << 32 or not 0 <= position <= 624:
            raise ValueError("a word or the position is out of range")
        np.random.set_state((algorithm, keys.astype(np.uint32), position, has_gauss, cached_gaussian))

    def restore_python() -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))

    def restore_cuda(name: str) -> None:
        device = int(name.removeprefix("cuda."))
        if device >= torch.cuda.device_count():
            raise ValueError(f"this machine has {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_rng_state(tensors[name], device)

    steps: dict[str, Callable[[], None]] = {
        "python": restore_python,
        "numpy": restore_numpy,
        "torch": lambda: torch.set_rng_state(tensors["torch"]),
    }
    for name in tensors:
        if name.startswith("cuda."):
            steps[name] = lambda name=name: restore_cuda(name)  # type: ignore[misc]
    for name, restore in steps.items():
        try:
            restore()
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
            raise UserError(
                f"The saved random state of {name} cannot be restored ({error}); an exact continuation needs it, so "
                "resume from another checkpoint."
            ) from error


# --- files


class _Damaged(Exception):
    """A folder that is no complete checkpoint; the message says what is wrong with it."""


def _write(path: Path, chunks: Any) -> dict[str, Any]:
    """Write and flush to the disk; returns the manifest entry of what was meant to be written."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A safetensors file, one tensor after another: the host never holds more than one copy of a tensor of the card.

    The format: length of the header (8 bytes, little-endian), the header as JSON, the bytes of the tensors. The widest
    types go first, so that every tensor is aligned.
    """
    header: dict[str, Any] = {}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    offset = 0
    for name, t in ordered:
        end = offset + t.numel() * t.element_size()
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little")
        yield text
        for _, t in ordered:
            if t.numel():
                yield t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return _write(path, chunks())


def _sync_folder(folder: Path) -> None:
    """Flush the folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a kill midway leaves no half of one under it."""
    hidden = folder.with_name(f".{folder.name}.removed")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _prune(folder: Path, newest: Path) -> None:
    keep = [newest]
    for candidate in _candidates(folder):
        if candidate in keep:
            continue
        try:
            if _step(candidate) < _step(newest) and len(keep) < KEEP:
                _complete_files(candidate, digests=False)
                keep.append(candidate)
                continue
        except _Damaged:
            pass
        _remove(candidate)


def _step(folder: Path) -> int:
    return int(folder.name.removesuffix(REPLACED).removeprefix("step-"))


def _candidates(folder: Path) -> list[Path]:
    """Folders that may be checkpoints, the newest first."""
    names = [p for p in folder.glob("step-*") if p.name.removesuffix(REPLACED).removeprefix("step-").isdigit()]
    return sorted(names, key=lambda p: (_step(p), not p.name.endswith(REPLACED)), reverse=True)


def _complete_files(folder: Path, *, digests: bool) -> list[Path]:
    """The files that the manifest lists, after comparing sizes and, when asked, SHA-256.

    Raises:
        _Damaged: says which file is wrong.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = {folder / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise _Damaged("it has no manifest.json, so it was not finished") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged("its manifest.json cannot be read") from error
    if folder / "state.json" not in files:
        raise _Damaged("its manifest.json does not list state.json")
    for path, (size, sha256) in files.items():
        if not path.is_file():
            raise _Damaged(f"{path.name} is missing")
        if path.stat().st_size != size:
            raise _Damaged(f"{path.name} has {path.stat().st_size} bytes where its manifest says {size}")
        if digests:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise _Damaged(f"the content of {path.name} is not what was saved")
    return list(files)


@contextmanager
def _disk_trouble(folder: Path) -> Iterator[None]:
    """Turn the errors of a full, read-only or forbidden disk into a sentence."""
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would be larger than is allowed",
        errno.EROFS: "the disk is read-only",
        errno.EACCES: "writing is not permitted",
        errno.EPERM: "writing is not permitted",
    }
    try:
        yield
    except OSError as error:
        if error.errno not in reasons:
            raise
        raise UserError(
            f"The checkpoint could not be saved in {folder}: {reasons[error.errno]}; the previous checkpoint is "
            "untouched, so make room or grant access and continue with --resume."
        ) from error
