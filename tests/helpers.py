"""Small real parts for the tests: an OLMo-2 model, a byte-level tokenizer, and the files of the exercises."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

from a5lib.course.stubs import BEGIN, END

ROOT = Path(__file__).parent.parent
FILES = sorted(path.name for path in (ROOT / "starter").glob("*.py"))


def read_exercise(package: str, file: str) -> str:
    """The text of a file of `starter/` or `solutions/`."""
    return (ROOT / package / file).read_text(encoding="utf-8")


def write_exercise(course: Path, file: str, name: str, region: str | None = None) -> None:
    """Fill one function of a copied starter, as a student would: with the reference's region or with these lines."""
    if region is None:
        solution = read_exercise("solutions", f"{file}.py")
        begin = solution.index("\n", solution.index(BEGIN, solution.index(f"def {name}("))) + 1
        region = solution[begin : solution.index(f"    {END}", begin)]
    path = course / "starter" / f"{file}.py"
    stub = path.read_text(encoding="utf-8")
    begin = stub.index("\n", stub.index(BEGIN, stub.index(f"def {name}("))) + 1
    path.write_text(stub[:begin] + region + stub[stub.index(f"    {END}", begin) :], encoding="utf-8")


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
