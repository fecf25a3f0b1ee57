"""The layer-major pass: one layer at a time, every microbatch through it, up without a graph and down with one.

The gradients are those of the usual pass, which goes microbatch by microbatch through all layers. What changes is when
a layer is needed, and when its gradient is complete. This file does not know rewards, optimizers or devices.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Olmo2ForCausalLM
from transformers.masking_utils import create_causal_mask


def embed(model: Olmo2ForCausalLM, input_ids: Tensor) -> Tensor:
    """The input of layer 0: float [b, T, H] from ids int64 [b, T]. Given, not an exercise."""
    return model.model.embed_tokens(input_ids)


def run_layer(model: Olmo2ForCausalLM, index: int, hidden: Tensor) -> Tensor:
    """The output of decoder layer `index`, float [b, T, H], from its input of the same shape. Given, not an exercise.

    Positions are counted from 0, and every token sees itself and those before it, as `model(input_ids)` does it without
    an attention mask. Padding on the right is therefore allowed, padding on the left is not.
    """
    positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)  # [1, T]
    mask = create_causal_mask(
        config=model.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions
    )
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    output: Tensor = model.model.layers[index](
        hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary
    )
    return output


def final_norm(model: Olmo2ForCausalLM, hidden: Tensor) -> Tensor:
    """The last hidden states, float [b, T, H], from the last layer's output. The head takes these. Given."""
    output: Tensor = model.model.norm(hidden)
    return output


def part_parameters(model: Olmo2ForCausalLM, name: str) -> list[torch.nn.Parameter]:
    """The parameters whose gradients are complete when `layer_major_backward` reports `name`. Given, not an exercise.

    A matrix that the head shares with the embedding belongs to the embedding, where its last gradient comes from.

    Args:
        name: "head" (final norm and head), "layer 0", "layer 1" and so on, or "embedding".
    """
    if name == "embedding":
        return list(model.model.embed_tokens.parameters())
    if name == "head":
        head = [p for p in model.lm_head.parameters() if p is not model.model.embed_tokens.weight]
        return [*model.model.norm.parameters(), *head]
    return list(model.model.layers[int(name.removeprefix("layer "))].parameters())


def layer_major_backward(
    model: Olmo2ForCausalLM,
    microbatches: list[Tensor],
    loss_of: Callable[[Tensor, int], Tensor],
    on_layer_done: Callable[[str], None] | None = None,
) -> Tensor:
    """Add the gradient of the batch's loss to the parameters, layer by layer instead of microbatch by microbatch.

    - Up, without a graph: embed every microbatch; then, layer by layer, run every microbatch through the layer. Keep
      each layer's inputs, and the last layer's outputs.
    - Head: for each microbatch, norm and loss with a graph; the gradient with respect to the last layer's output.
    - Down, from the last layer to the first: for each microbatch, run the layer again from its kept input, now with a
      graph; go back through it with the gradient of its output; keep the gradient of its input.
    - Embedding: run it again and go back through it, for each microbatch.

    Layers are recomputed as in gradient checkpointing (Chen et al. 2016, arXiv 1604.06174); only the order is new. The
    gradients are those of `loss.backward()` on the whole batch, to rounding. Taught in notebook 09.

    Args:
        model: an OLMo-2 model whose parameters all take gradients.
        microbatches: M tensors of ids, int64 [b, T]; b and T may differ between them. Padding on the right only.
        loss_of: called as `loss_of(last_hidden, m)` with the last hidden states after the final norm, float [b, T, H],
            of microbatch m; returns its share of the batch's loss, float []. The shares add up to the loss, so nothing
            has to be divided here. The head is inside it.
        on_layer_done: called as `on_layer_done(name)` as soon as all gradients of a part are complete: "head", then
            "layer L-1" to "layer 0", then "embedding" (see `part_parameters`). None: nobody asks.

    Returns:
        The batch's loss, float [], without a graph.

    Raises:
        ValueError: there is no microbatch.
    """
    if not microbatches:
        raise ValueError("There is no microbatch; give at least one tensor of ids.")
    report = on_layer_done or (lambda name: None)
    layers = range(len(model.model.layers))
    ### BEGIN YOUR CODE: up with kept inputs, head, down with recomputation, embedding (notebook 09)
    raise NotImplementedError("up with kept inputs, head, down with recomputation, embedding (notebook 09)")
    ### END YOUR CODE
