"""What differs between versions of vLLM, and what is private in it: what a new version can break is in this file.

It was written from the sources of 0.24.0 and 0.32.0. `import vllm` takes seconds and happens inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from a5lib.rollouts.fp8 import FP8

KNOWN = ("0.24.", "0.32.")  # beginnings of the versions that this was written for
# vLLM's name for linear weights of eight bits with a scale for each row: packed ones then round as if alone. Its "fp8"
# has one scale for all, and 0.32 no longer makes that by itself.
FP8_ROWS = "fp8_per_channel"
# What a server is started with, so that it takes weights from a trainer: the class for --worker-extension-cls, and the
# backend of its weight-transfer API.
SERVER_WORKER, TRANSFER_BACKEND = "a5lib.rollouts.vllm_server_worker.ServerWorker", "a5lib"


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


def make_process_group(card: bool) -> None:
    """Make torch's process group, of this process alone and without port or file, before vLLM would make one.

    vLLM looks for a free TCP port and takes it later (0.24), when another program can have it, or writes a file to the
    temporary folder, which a killed process leaves there (0.32).

    Args:
        card: whether the engine will run on a card.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens at a port that the system gives it
    torch.distributed.init_process_group(
        "nccl" if card else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


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


class Part(NamedTuple):
    """A weight as the engine holds it: a view of that memory, and the scale of each row where it has eight bits.

    `name` is the one in the engine as if nothing were packed, `held_as` says where it is held.
    """

    name: str
    held_as: str
    values: Tensor
    scale: Tensor | None = None


def parts(model: nn.Module) -> Iterator[Part]:
    """Every weight as the engine holds it, packed ones taken apart. A parameter that has two names, as a tied head,
    comes twice.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    parameter: Tensor
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        above, _, own = path.rpartition(".")
        module = model.get_submodule(path)
        scale: Tensor | None = None
        if leaf == "weight_scale":
            continue  # comes with its weight
        if parameter.dtype == FP8:  # lies as [columns, rows], and on a card filled up to multiples of 16
            rows, columns = cast(int, module.output_size_per_partition), cast(int, module.input_size_per_partition)
            parameter, scale = parameter.t()[:rows, :columns], cast(Tensor, module.weight_scale)[:rows]
        if own in packed and hasattr(module, "output_sizes"):
            sizes = list(cast(list[int], module.output_sizes))
            if sum(sizes) != len(parameter) or len(sizes) != len(packed[own]):
                yield Part(name, name, parameter)  # in a form that is not known here; its shape will be objected to
                continue
            scales = [None] * len(sizes) if scale is None else scale.split(sizes)
            first = 0
            for part, piece, its_scale in zip(packed[own], parameter.split(sizes), scales, strict=True):
                last = first + len(piece)
                yield Part(f"{above}.{part}.{leaf}", f"{name}[{first}:{last}]", piece, its_scale)
                first = last
        elif hasattr(module, "org_vocab_size"):
            vocabulary = cast(int, module.org_vocab_size)  # rows beyond it fill the last block up
            rows_used = "" if len(parameter) == vocabulary else f"[0:{vocabulary}]"
            yield Part(name, name + rows_used, parameter[:vocabulary])
        else:
            yield Part(name, name, parameter, scale)


def constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that never change once a model has been made: rotary tables, scales. No load brings them. Left out
    are the tables of transformers that depend on the length of what is generated.
    """
    for name, buffer in model.named_buffers():
        kind = str(getattr(model.get_submodule(name.rpartition(".")[0]), "rope_type", ""))
        if "dynamic" not in kind and "longrope" not in kind:
            yield name, buffer


def prepare_server(make_receiver: Callable[[nn.Module], Any]) -> None:
    """Prepare vLLM's process for a model that takes weights: before the model is made.

    vLLM's weight-transfer API gets one more backend, for which `/update_weights` calls the receiver's `receive` with
    what the trainer sent. 0.24 makes a backend with three arguments and passes a loader to `receive_weights`; 0.32
    makes it with four, and lets it start and finish.

    Args:
        make_receiver: called with the model once vLLM has made it.
    """
    from vllm.distributed.weight_transfer import base, factory
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        switch_off_packing()
    else:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # as in `prepare_environment`

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        channel: str
        slots: list[list[Any]]
        stamp: str

    class TransferEngine(base.WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def __init__(self, config: Any, *rest: Any) -> None:
            super().__init__(config, *rest)
            self.receiver = make_receiver(self.model)

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None: ...

        def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
            self.receiver.receive(update_info.channel, update_info.slots, update_info.stamp)

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            raise NotImplementedError("a5lib's trainer sends no weights through vLLM.")

        @property
        def stamp(self) -> str:
            return str(self.receiver.stamp)

    factory.WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, TransferEngine)


def reload(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load into an engine that rounds its weights: module by module a load's tensors take the place of the engine's,
    are filled and rounded, and copied into the engine's own, which stay where they are.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def update_is_open(worker: Any) -> bool:
    """Whether the weight-transfer API was started and not finished, as by a trainer that ended in between."""
    return bool(getattr(worker, "_weight_update_active", False))


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
