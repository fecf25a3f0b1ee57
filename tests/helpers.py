"""Small real parts for the tests: an OLMo-2 model with random weights and a byte-level tokenizer."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level characters and nothing merged; `<pad>` is 0 and `<eos>` is 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i + 2 for i, c in enumerate(alphabet)} | {"<pad>": 0, "<eos>": 1}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_olmo2(seed: int = 0, *, vocab_size: int = 264, tied: bool = False) -> Olmo2ForCausalLM:
    """A real Olmo2ForCausalLM, 2 layers of width 64, in evaluation mode; every tensor, norms included, is perturbed.

    The vocabulary is larger than the tokenizer's, as OLMo-2's is.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Olmo2Config(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=160, pad_token_id=0, eos_token_id=1, bos_token_id=None,
            tie_word_embeddings=tied,
        )  # fmt: skip
        model = Olmo2ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
