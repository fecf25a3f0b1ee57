"""What `vllm serve` needs to take weights from a trainer; `vllm_server.serve_command` gives the whole command.

vLLM imports this file in its own process before it makes the model, and then its weight-transfer API has one more
backend, `a5lib`. Its own two, `nccl` and `ipc`, need vLLM in the trainer's Python, a card on both sides, and for `ipc`
pickled handles; and none of them tells the trainer what the engine holds afterwards. This one reads the trainer's
weight channel, host memory of the same machine, and the trainer can ask for the checksum of every tensor.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from a5lib import __version__
from a5lib.rollouts import vllm_versions as versions
from a5lib.rollouts.vllm_engine import check_own_memory, held, load, own_memory
from a5lib.rollouts.weight_channel import CHANNEL_NAME, as_slots, attach, channel_size, seal, views


class Receiver:
    """Loads the weights of a trainer's channel into a model of vLLM's.

    Args:
        model: as vLLM made it; its parameters stay where they are now, and its buffers as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.own = own_memory(model)
        self.stamp = ""

    def receive(self, channel: str, slots: list[list[Any]], stamp: str) -> None:
        """Load every tensor that fits; `ServerWorker.a5_held` shows the others.

        The memory is mapped for this call alone: a server that lives on does not keep that of a trainer that ended.

        Args:
            channel: path of the channel's descriptor, /proc/PID/fd/NUMBER.
            slots: the fields of each `Slot`.
            stamp: of this load; `ServerWorker.a5_facts` gives it back.

        Raises:
            RuntimeError: there is no such channel here, or vLLM computes with other memory than its own.
        """
        self.stamp = ""
        laid_out = as_slots(slots)
        buffer = map_channel(channel, channel_size(laid_out))
        seal(buffer)
        load(self.model, laid_out, views(laid_out, buffer))
        check_own_memory(self.model, self.own)
        self.stamp = stamp


class ServerWorker:
    """What vLLM's worker gets beside its own methods; asked for over HTTP, through `/collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def a5_facts(self) -> dict[str, Any]:
        """What this server is, and how it was started."""
        import vllm

        model, transfer = self.vllm_config.model_config, self.vllm_config.weight_transfer_config
        return {
            "a5lib": __version__,
            "vllm": vllm.__version__,
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "cards": self.vllm_config.parallel_config.world_size_across_dp,
            "backend": None if transfer is None else transfer.backend,
            "update_is_open": versions.update_is_open(self),
            "stamp": getattr(self.weight_transfer_engine, "stamp", ""),
        }

    def a5_held(self, slots: str) -> list[list[Any]]:
        """The fields of `Held` for every tensor of the model, as it is at this moment.

        Args:
            slots: what the trainer sent, as in `Receiver.receive`, as JSON: vLLM takes text alone.
        """
        laid_out = as_slots(json.loads(slots))
        with torch.no_grad():
            rows = held(self.model_runner.get_model(), laid_out)
        return [[row.name, list(row.shape), row.dtype, row.checksum, row.held_as] for row in rows]


def map_channel(channel: str, size: int) -> Tensor:
    """The trainer's channel as uint8 [bytes of the channel], shared; of another process, and no other file.

    Raises:
        RuntimeError: the path leads to no channel of this size.
    """
    descriptor = -1
    with suppress(OSError):
        if CHANNEL_NAME in os.readlink(channel):
            descriptor = os.open(channel, os.O_RDWR)
    try:
        if descriptor < 0 or os.fstat(descriptor).st_size < size:
            raise RuntimeError(
                f"{channel} is no weight channel of {size} bytes here; trainer and server must run on one machine, as "
                "one user, and not in different containers"
            )
        return attach(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


if "vllm" in sys.modules:  # this is vLLM's process
    versions.prepare_server(Receiver)
