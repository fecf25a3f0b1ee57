"""Memory of an update, predicted: the ledger adds up the bytes on the card, by name, from a model's shape and a batch's
size alone.

It does not know the algorithm and measures nothing (`a5lib.recorder` does). What it leaves out: the driver's own memory
(some hundreds of MiB), gaps between allocations, and the temporaries of the optimizer's step, which come when the
activations are gone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from a5lib.config import HeadName, OptimizerState
from a5lib.errors import UserError

if TYPE_CHECKING:  # a ledger is made without torch and transformers, which take seconds to import
    from transformers import PreTrainedConfig

# Bytes of optimizer state per bfloat16 parameter: two moments, and a master copy or a compensation where there is one.
STATE_BYTES: Mapping[OptimizerState, int] = {"fp32": 12, "bf16": 4, "bf16_stochastic": 4, "bf16_kahan": 6}
STATE_BYTES_OF_FLOAT32 = 8  # a float32 parameter always has two float32 moments

# Bytes alive for each logit at the worst moment of scoring with `log_probs_from_logits`; notebook 06 counts them.
LOGIT_BYTES = 20


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model of the OLMo-2, Llama or Qwen kind, from which all bytes follow. Taught in notebook 09.

    Args:
        layers: decoder layers.
        hidden: numbers that describe a token between layers.
        intermediate: width inside a layer's feed-forward part.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than `heads` where several share one.
        vocabulary: rows of the embedding.
        tied: whether the head is the embedding's matrix.
        head_size: numbers of one head.
        vectors: parameters of one layer outside its seven matrices: norms and biases (None: OLMo-2's four norms).
        norm_first: whether a layer normalises its input (Llama, Qwen) and not its output (OLMo-2).
        head_norms: whether queries and keys are normalised head by head (Qwen3); OLMo-2 does it for all heads at once.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_size: int
    vectors: int | None = None
    norm_first: bool = False
    head_norms: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        """The shape of a causal language model, from its config alone; one layer is made without memory and counted.

        Raises:
            UserError: the model has other parts than these, such as experts or learned positions.

        >>> from transformers import Olmo2Config
        >>> ModelShape.of(Olmo2Config(vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=3,
        ...                           num_attention_heads=2, pad_token_id=0, eos_token_id=1)).parameters()
        2536
        """
        import torch
        from transformers import AutoModelForCausalLM

        unknown = UserError(
            f"The memory ledger cannot count {config.name_or_path or config.model_type!r}: it knows embedding, decoder "
            "layers of seven matrices, and head, as in OLMo-2, Llama and Qwen; use such a model."
        )
        small = copy.deepcopy(config)
        small.num_hidden_layers = 1
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:1]
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(small)
            layers = model.base_model.layers
        except (AttributeError, ValueError):  # no decoder layers there, or no causal language model
            raise unknown from None
        layer, heads = layers[0], config.num_attention_heads
        shape = cls(
            layers=1,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vectors=sum(p.numel() for p in layer.parameters() if p.dim() == 1),
            norm_first=hasattr(layer, "input_layernorm"),
            head_norms=hasattr(layer, "input_layernorm") and hasattr(layer.self_attn, "q_norm"),
        )
        if shape.parameters() != sum(p.numel() for p in model.parameters()):
            raise unknown
        return dataclasses.replace(shape, layers=config.num_hidden_layers)

    def layer_matrices(self) -> int:
        """Parameters of one decoder layer's matrices: four of attention, three of the feed-forward part."""
        return self.hidden * (2 * (self.heads + self.kv_heads) * self.head_size + 3 * self.intermediate)

    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: its matrices, norms and biases."""
        default = (self.heads + self.kv_heads) * self.head_size + 2 * self.hidden
        return self.layer_matrices() + (default if self.vectors is None else self.vectors)

    def parts(self) -> list[int]:
        """Parameters of each part that the layer-major pass visits: embedding, layers, and final norm with head."""
        matrix = self.vocabulary * self.hidden
        return [matrix, *[self.layer_parameters()] * self.layers, matrix + self.hidden]

    def parameters(self) -> int:
        """All parameters; a matrix that embedding and head share counts once.

        >>> OLMO2_1B.parameters()
        1484916736
        """
        return sum(self.parts()) - (self.vocabulary * self.hidden if self.tied else 0)

    def activation_bytes_per_token(self, bytes_per_weight: int = 2) -> int:
        """Bytes that one decoder layer keeps for its backward pass, for each token.

        In the weights' type: the layer's input, the rotated queries and keys, the values, the attention's result, the
        input of the feed-forward part, and four tensors inside that part. In float32: the input and the normalised
        values of four norms, a scale for each norm, and a log-sum for each head. A Llama or Qwen layer has two norms,
        whose normalised values are in the weights' type, and Qwen3 two small ones in each head.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        stored = 2 * self.hidden + 2 * queries + 2 * keys + 4 * self.intermediate
        float32 = 4 * self.hidden + 2 * queries + 2 * keys + 4 + self.heads
        if self.norm_first:
            stored += 2 * self.hidden
            float32 = 2 * self.hidden + 2 + self.heads
            if self.head_norms:
                stored += queries + keys
                float32 += queries + keys + self.heads + self.kv_heads
        return bytes_per_weight * stored + 4 * float32

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of keys and values that a generation engine caches for each token.

        >>> OLMO2_1B.kv_bytes_per_token()
        131072
        """
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_value


TOY = ModelShape(layers=4, hidden=128, intermediate=384, heads=4, kv_heads=4, vocabulary=832, tied=False, head_size=32)
"""The embedded toy model."""

OLMO2_1B = ModelShape(
    layers=16, hidden=2048, intermediate=8192, heads=16, kv_heads=16, vocabulary=100_352, tied=False, head_size=128
)
"""OLMo-2-0425-1B (OLMo et al. 2025, arXiv 2501.00656)."""


def state_bytes(optimizer_state: OptimizerState, bytes_per_weight: int = 2) -> int:
    """Bytes of AdamW's state a parameter.

    >>> state_bytes("fp32"), state_bytes("fp32", bytes_per_weight=4)
    (12, 8)
    """
    return STATE_BYTES_OF_FLOAT32 if bytes_per_weight == 4 else STATE_BYTES[optimizer_state]


def update_ledger(
    shape: ModelShape,
    *,
    sequences: int,
    length: int,
    microbatch: int,
    optimizer_state: OptimizerState = "bf16",
    recompute_layers: bool = True,
    head: HeadName = "blocks",
    head_block: int = 32,
    bytes_per_weight: int = 2,
) -> dict[str, int]:
    """Predicted bytes on the card during an update by the resident engine, by name; their sum predicts the peak.

    Weights, gradients and optimizer state stay on the card. With `recompute_layers` a layer keeps only its input and is
    recomputed in the backward pass. The head is scored for all positions at once ("full") or in blocks of positions
    ("blocks", "fused"). Taught in notebook 09; the other engine's ledger is `a5lib.engines.plan.plan_update`.

    Args:
        shape: the model.
        sequences: sequences in one update.
        length: tokens of each, prompt and padding included.
        microbatch: sequences that go through a layer together; at most `sequences` matter.
        optimizer_state: how AdamW keeps its state, as in `a5lib.optimizers`.
        recompute_layers: keep the inputs of layers alone.
        head: how the head is scored, as in `--head`.
        head_block: positions whose logits exist at one time, unless the head is "full".
        bytes_per_weight: 2 for bfloat16, 4 for float32.

    Returns:
        "weights", "gradients", "optimizer state", "gradient before it is added", "layer inputs", "layer at work" and
        "logits", in bytes, whole numbers.

    Raises:
        UserError: a size below 1, or a name that is not one of those above.

    >>> ledger = update_ledger(TOY, sequences=8, length=64, microbatch=2, bytes_per_weight=4)
    >>> ledger["weights"], ledger["layer inputs"]
    (4268544, 327680)
    """
    _check_ledger_arguments(sequences, length, microbatch, head_block, bytes_per_weight, optimizer_state, head)
    parameters = shape.parameters()
    tokens = min(microbatch, sequences) * length  # tokens that go through a layer together
    hidden_state = shape.hidden * bytes_per_weight  # bytes of one token between two layers
    kept = (shape.layers + 1) * tokens * hidden_state
    if not recompute_layers:
        kept = tokens * hidden_state  # the last hidden state; the inputs are part of what each layer keeps
    layers_at_work = 1 if recompute_layers else shape.layers
    positions = tokens if head == "full" else min(head_block, tokens)
    return {
        "weights": parameters * bytes_per_weight,
        "gradients": parameters * bytes_per_weight,
        "optimizer state": parameters * state_bytes(optimizer_state, bytes_per_weight),
        "gradient before it is added": max(shape.vocabulary, shape.intermediate) * shape.hidden * bytes_per_weight,
        "layer inputs": kept,
        "layer at work": layers_at_work * tokens * shape.activation_bytes_per_token(bytes_per_weight),
        "logits": positions * shape.vocabulary * LOGIT_BYTES,
    }


def _check_ledger_arguments(
    sequences: int,
    length: int,
    microbatch: int,
    head_block: int,
    bytes_per_weight: int,
    optimizer_state: str,
    head: str,
) -> None:
    sizes = {"sequences": sequences, "length": length, "microbatch": microbatch, "head_block": head_block}
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} is {size}; a ledger needs at least 1.")
    if bytes_per_weight not in (2, 4):
        raise UserError(f"bytes_per_weight is {bytes_per_weight}; give 2 for bfloat16 or 4 for float32.")
    if optimizer_state not in STATE_BYTES:
        raise UserError(f"Unknown optimizer_state {optimizer_state!r}; choose one of {', '.join(STATE_BYTES)}.")
    if head not in get_args(HeadName):
        raise UserError(f"Unknown head {head!r}; choose one of {', '.join(get_args(HeadName))}.")
