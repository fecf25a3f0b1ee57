"""A causal language model taken apart: embedding, decoder layers, and final norm with head.

The layer-major engine runs these parts one by one and therefore has to know how they fit together. It knows three
families; every other model is refused by name, because a part that is put together wrongly trains wrongly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from a5lib.engines.attention import ATTENTION
from a5lib.errors import UserError

FAMILIES = {"olmo2": "OLMo-2", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ROTARY = ("default", "linear", "llama3", "yarn")  # the angles of a position do not depend on the sequence's length


class Unit:
    """Parameters that travel together. Each kind of number (weight, grad, optimizer state) is one flat tensor, at the
    unit's home: the host or the card.
    """

    def __init__(self, name: str, named: list[tuple[str, nn.Parameter]], first: int) -> None:
        self.name = name
        self.first = first  # index of its first element in the whole model
        self.names = [key for key, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for parameter in self.parameters]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.numel = sum(sizes)
        self.flat: dict[str, Tensor] = {}

    def settle(
        self,
        empty: Callable[[int, torch.dtype], Tensor],
        state: dict[str, torch.dtype],
        weights: Callable[[list[str], int, torch.dtype], Tensor] | None = None,
    ) -> None:
        """Allocate the flat tensors with `empty(numel, dtype)`, the weights' with `weights(names, numel, dtype)` where
        it is given; move the weights in, and start the state at zero.
        """
        dtype = self.parameters[0].dtype if self.parameters else torch.float32
        home = empty(self.numel, dtype) if weights is None else weights(self.names, self.numel, dtype)
        self.flat = {"weight": home, "grad": empty(self.numel, dtype)}
        for parameter, view in zip(self.parameters, self.views(self.flat["weight"]), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        for name, kind in state.items():
            self.flat[name] = empty(self.numel, kind).zero_()
        if "master" in state:
            self.flat["master"].copy_(self.flat["weight"])

    def rehouse(self, homes: dict[str, Tensor]) -> None:
        """Take these flat tensors, which hold the same numbers, for its own; the parameters follow."""
        self.flat = homes
        for parameter, view in zip(self.parameters, self.views(homes["weight"]), strict=True):
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view of a flat tensor for each parameter, in its shape."""
        return [
            flat[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]


@dataclass
class Parts:
    """The parts of a model, and modules without weights of their own that run any layer's weights.

    `layer` is one decoder layer and `norm` the final norm, both to be dressed with a unit's weights (see `dress`);
    `tied` says that the head's matrix is the embedding's.
    """

    embedding: Unit
    layers: list[Unit]
    head: Unit
    tied: bool
    layer: nn.Module
    norm: nn.Module
    rotary: nn.Module
    padding_idx: int

    @property
    def units(self) -> list[Unit]:
        """All units in the model's order of parameters."""
        return [self.embedding, *self.layers, self.head]


def take_apart(model: PreTrainedModel, device: torch.device) -> Parts:
    """The parts of a model, its undressed modules on `device`.

    Raises:
        UserError: the model has something that this engine would not compute; names it.
    """
    refuse_unknown(model)
    core: Any = model.base_model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first = 0

    def unit(name: str, modules: list[nn.Module], without: nn.Parameter | None = None) -> Unit:
        nonlocal first
        named = [(names[id(p)], p) for m in modules for p in m.parameters() if p is not without]
        made = Unit(name, named, first)
        first += made.numel
        return made

    lm_head: Any = model.get_output_embeddings()
    tied = lm_head.weight is core.embed_tokens.weight
    return Parts(
        embedding=unit("embedding", [core.embed_tokens]),
        layers=[unit(f"layer {i}", [layer]) for i, layer in enumerate(core.layers)],
        head=unit("head", [core.norm, lm_head], without=core.embed_tokens.weight if tied else None),
        tied=tied,
        layer=undressed(core.layers[0], device, packed=True),
        norm=undressed(core.norm, device),
        rotary=copy.deepcopy(core.rotary_emb).to(device),
        padding_idx=-1 if core.embed_tokens.padding_idx is None else core.embed_tokens.padding_idx,
    )


def refuse_unknown(model: PreTrainedModel) -> None:
    """Raise a UserError, naming what is missing, for a model that the layer-major engine does not compute."""
    config = model.config
    kind = config.model_type
    head = model.get_output_embeddings()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    scaled = [n for n in ("final_logit_softcapping", "logit_scale", "logits_scaling", "residual_multiplier")
              if getattr(config, n, None) not in (None, 1, 1.0)]  # fmt: skip
    lacks = [
        (kind not in FAMILIES, f"its architecture {kind!r}; it knows {', '.join(FAMILIES.values())}"),
        ("sliding_attention" in (getattr(config, "layer_types", None) or ()), "layers with sliding-window attention"),
        (rope.get("rope_type", "default") not in ROTARY, f"positions of type {rope.get('rope_type')!r}"),
        (getattr(head, "bias", None) is not None, "a head with a bias"),
        (bool(scaled), f"the setting {scaled[0] if scaled else ''}"),
        (bool(getattr(config, "attention_dropout", 0)), "dropout in the attention"),
    ]
    for missing, what in lacks:
        if missing:
            raise UserError(
                f"The layer-major engine cannot train {config.name_or_path or kind!r}: it does not have {what}; use "
                "--engine resident, which runs the model's own code."
            )
    core: Any = model.base_model
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in core.layers]
    if any(shape != shapes[0] for shape in shapes):
        raise UserError(
            f"The layer-major engine cannot train {config.name_or_path or kind!r}: its layers differ in shape; use "
            "--engine resident, which runs the model's own code."
        )


def undressed(module: nn.Module, device: torch.device, *, packed: bool = False) -> nn.Module:
    """A copy of a module whose parameters are empty; with `packed` its attention is the packed one."""
    parameters = [parameter for parameter in module.parameters()]
    empty: dict[int, Any] = {id(p): nn.Parameter(torch.empty(0, dtype=p.dtype, device=device)) for p in parameters}
    bare: Any = copy.deepcopy(module, empty)  # the memo stands in for the parameters, so that they are not copied
    for child in bare.modules():
        if packed and hasattr(child, "config"):
            child.config._attn_implementation = ATTENTION
    return cast(nn.Module, bare.eval())


def dress(module: nn.Module, weights: list[Tensor], grads: list[Tensor] | None = None) -> None:
    """Give a module these weights, and let its gradients be added to `grads`; None: it keeps no gradient."""
    for i, (parameter, weight) in enumerate(zip(module.parameters(), weights, strict=True)):
        parameter.grad = None
        parameter.data = weight
        parameter.grad = None if grads is None else grads[i]
        parameter.requires_grad_(grads is not None)


def undress(module: nn.Module) -> None:
    """Take the weights off, so that nothing holds the memory they lie in."""
    for parameter in module.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
