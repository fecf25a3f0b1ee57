"""What differs between versions of vLLM, and what is private in it: what a new version can break is in this file.

It was written from the sources of 0.24.0 and 0.32.0. `import vllm` takes seconds and happens inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

KNOWN = ("0.24.", "0.32.")  # beginnings of the versions that this was written for


def known() -> str:
    """The same in words.

    >>> known()
    '0.24.x and 0.32.x'
    """
    return " and ".join(f"{version}x" for version in KNOWN)


def prepare_environment(card: bool) -> None:
    """Set what vLLM reads when it is imported. What is set already stays, but for the first.

    Args:
        card: whether the engine will run on a card.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where functions reach its model
    wanted = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # the trainer has fetched what there is to fetch
    if card:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it would be compiled first, and knows no seed per completion
    else:
        wanted["TORCH_COMPILE_DISABLE"] = "1"  # sampling would be compiled, with the C++ compiler of the system
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer computes on the same cores
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def switch_off_packing() -> None:
    """Let linear layers on the CPU compute with their weights, and not with packed copies that a load would not reach.

    vLLM packs after loading and leaves the weight empty; a tied head keeps its weight and computes with the copy.
    """
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError(f"This vLLM packs weights in a way that a5lib does not know; use {known()}.")

    def leave_unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = leave_unpacked  # each layer imports it when it needs it


def packed_layers(model: nn.Module) -> list[str]:
    """Layers that compute with something else than their weights."""
    plain = nn.functional.linear
    return [name for name, module in model.named_modules() if getattr(module, "cpu_linear", plain) is not plain]


def engine_name(model: nn.Module, name: str) -> str | None:
    """The name that a weight of the checkpoint has in the engine, before it is packed with others (None: unused).

    Models written for vLLM have the checkpoint's names, or a mapper. From 0.32 on the mapper also maps to the packed
    names, unless asked for the renaming alone.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    renamed: list[str] = mapper.apply_list([name])
    return renamed[0] if renamed else None


def parts(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Every weight as the engine holds it, packed ones taken apart.

    Yields:
        (name in the engine as if nothing were packed, where it is held, a view of that memory). A parameter that has
        two names, as a tied head, comes twice.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        above, _, own = path.rpartition(".")
        module = model.get_submodule(path)
        if own in packed and hasattr(module, "output_sizes"):
            sizes = list(cast(list[int], module.output_sizes))
            if sum(sizes) != len(parameter) or len(sizes) != len(packed[own]):
                yield name, name, parameter  # in a form that is not known here; its shape will be objected to
                continue
            rows = 0
            for part, piece in zip(packed[own], parameter.split(sizes), strict=True):
                yield f"{above}.{part}.{leaf}", f"{name}[{rows}:{rows + len(piece)}]", piece
                rows += len(piece)
        elif hasattr(module, "org_vocab_size"):
            vocabulary = cast(int, module.org_vocab_size)  # rows beyond it fill the last block up
            rows_used = "" if len(parameter) == vocabulary else f"[0:{vocabulary}]"
            yield name, name + rows_used, parameter[:vocabulary]
        else:
            yield name, name, parameter


def unfinished(llm: Any) -> int:
    """Completions that the engine still has to finish."""
    return int(llm.llm_engine.get_num_unfinished_requests())


def shut_down(llm: Any) -> None:
    """End the engine in order: its threads, its card memory."""
    llm.llm_engine.engine_core.shutdown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class FinishedBar:
    """Stands where vLLM has its progress bar, and passes on how many completions have just finished.

    vLLM divides by the elapsed time, so a disabled bar of tqdm will not do. From 0.32 on it wraps the prompts in a
    second bar, which is iterated over.

    Args:
        progress: called with the number.
    """

    def __init__(self, progress: Callable[[int], object]) -> None:
        self.progress = progress
        self.n = 0
        self.format_dict = {"elapsed": 1.0}
        self.postfix = ""

    def __call__(self, iterable: Any = None, **_: Any) -> Any:
        return self if iterable is None else iterable

    def update(self, count: int) -> None:
        self.n += count
        self.progress(count)

    def refresh(self) -> None: ...

    def close(self) -> None: ...
