"""The shapes of published models by name, so that a plan for them needs no download and no config file.

`tests/test_plan_command.py` compares each with the number of parameters that was published.
"""

from __future__ import annotations

from collections.abc import Mapping

from a5lib.memory import OLMO2_1B, TOY, ModelShape


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, intermediate=inner, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary,
        tied=tied, head_size=hidden // heads, vectors=2 * hidden, norm_first=True,
    )  # fmt: skip


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelShape:
    biases = hidden + 2 * kv_heads * hidden // heads
    return ModelShape(
        layers=layers, hidden=hidden, intermediate=inner, heads=heads, kv_heads=kv_heads, vocabulary=151_936,
        tied=True, head_size=hidden // heads, vectors=2 * hidden + biases, norm_first=True,
    )  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, intermediate=inner, heads=heads, kv_heads=8, vocabulary=151_936, tied=tied,
        head_size=128, vectors=2 * hidden + 2 * 128, norm_first=True, head_norms=True,
    )  # fmt: skip


OLMO2_7B = ModelShape(
    layers=32, hidden=4096, intermediate=11_008, heads=32, kv_heads=32, vocabulary=100_352, tied=False, head_size=128
)

SHAPES: Mapping[str, tuple[str, ModelShape]] = {
    "toy": ("toy", TOY),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", _llama(576, 1536, 30, 9, 3, 49_152, True)),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", _llama(960, 2560, 32, 15, 5, 49_152, True)),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", _qwen2(896, 4864, 24, 14, 2)),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B", _qwen2(1536, 8960, 28, 12, 2)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, True)),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B", _llama(2048, 8192, 16, 32, 8, 128_256, True)),
    "olmo2-1b": ("allenai/OLMo-2-0425-1B", OLMO2_1B),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", _qwen3(2048, 6144, 28, 16, True)),
    "llama3.2-3b": ("meta-llama/Llama-3.2-3B", _llama(3072, 8192, 28, 24, 8, 128_256, True)),
    "qwen3-4b": ("Qwen/Qwen3-4B", _qwen3(2560, 9728, 36, 32, True)),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", OLMO2_7B),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B", _llama(4096, 14_336, 32, 32, 8, 128_256, False)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _qwen3(4096, 12_288, 36, 32, False)),
    "qwen3-14b": ("Qwen/Qwen3-14B", _qwen3(5120, 17_408, 40, 40, False)),
}
"""Name -> Hugging Face id and shape, by their published configurations, the smallest first."""


def published_shape(name: str) -> tuple[str, ModelShape] | None:
    """Id and shape by name, id, or the id's last part, in any case; None for every other model.

    >>> published_shape("OLMo-2-0425-1B")[0], published_shape("qwen3-8b")[1].parameters()
    ('allenai/OLMo-2-0425-1B', 8190735360)
    """
    for short, (model_id, shape) in SHAPES.items():
        if name.lower() in (short, model_id.lower(), model_id.lower().rpartition("/")[2]):
            return model_id, shape
    return None
