"""A real vLLM on the CPU that rounds linear weights to eight bits at each sync; the trainer computes in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from a5lib.models import TOY_MODEL_DIR, encode_prompt, load_policy, load_tokenizer
from a5lib.prompts import load_prompt
from a5lib.rollouts.fp8 import FP8
from a5lib.rollouts.mismatch import ROUNDING
from a5lib.rollouts.vllm_backend import VllmColocated
from a5lib.rollouts.worker_process import WorkerError
from a5lib.toy_problems import toy_problems
from tests.vllm.test_real_engine import ENGINES, PYTHON, llama_folder, new_llama, perturb, reference_log_probs, settings

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="run by `make test-vllm`"),
    pytest.mark.timeout(300),
]
__all__ = ["llama_folder"]  # a fixture
IN_EIGHT_BITS = {"dtype": "bfloat16", "quantization": "fp8"}


def test_weights_are_rounded_anew_at_every_sync_and_the_mismatch_is_that_of_eight_bits(tmp_path: Path) -> None:
    """The toy model, OLMo-2. Trainer and engine are as far apart as eight bits are, whatever the update was."""
    model, _ = load_policy("toy", device="cpu", dtype="bfloat16")
    tokenizer, template = load_tokenizer("toy"), load_prompt("r1_zero")
    prompts = [encode_prompt(tokenizer, template.render(p.question)) for p in toy_problems("validation", 16)]
    with VllmColocated(
        model.named_parameters(), settings(TOY_MODEL_DIR, max_model_len=256, **IN_EIGHT_BITS), tmp_path, python=PYTHON
    ) as vllm:
        texts = []
        for step in range(3):
            vllm.release()
            vllm.sync(model.named_parameters(), step)
            completions = vllm.generate(prompts, n=4, max_tokens=60, temperature=1.0, stop=["</answer>"], seed=0)
            differences = [
                abs(ours - theirs)
                for c in completions
                for ours, theirs in zip(
                    c.log_probs, reference_log_probs(model, prompts[c.prompt_index], c, 1.0), strict=True
                )
            ]
            assert len(differences) > 500
            mean = sum(differences) / len(differences)
            # this model is surer of its tokens than the one behind `ROUNDING`; bfloat16 alone gives it 7e-4
            assert 1e-3 < mean < 1e-2 < ROUNDING[FP8], "not rounded? other weights?"
            texts.append([c.text for c in completions])
            perturb(model, seed=step, size=0.05)
        assert texts[0] != texts[1] != texts[2], "an update makes no difference"

        name, write = "model.layers.3.mlp.up_proj.weight", vllm.channel.write
        vllm.channel.write = lambda *given: (sums := write(*given)) | {name: sums[name] + 1}  # type: ignore[method-assign]
        with pytest.raises(
            WorkerError, match=r"up_proj\.weight has other values \(held as .*gate_up_proj\.weight\[384:"
        ):
            vllm.sync(model.named_parameters(), 3)


def test_a_weight_that_a_reload_leaves_out_is_found_in_a_tied_model(llama_folder: Path) -> None:
    """A Llama with a tied head and biases, whose names vLLM packs by itself."""
    model = new_llama(llama_folder).bfloat16()
    forget = llama_folder / "leave-out"
    with VllmColocated(
        model.named_parameters(), settings(llama_folder, forget=str(forget), **IN_EIGHT_BITS), llama_folder,
        python=PYTHON, engine=f"{ENGINES}:LosingEngine",
    ) as vllm:  # fmt: skip
        for step in range(3):
            vllm.release()
            vllm.sync(model.named_parameters(), step)
            perturb(model, seed=step, size=0.2)
        vllm.generate([[3, 4, 5]], n=1, max_tokens=4, temperature=0.0, seed=0)
        forget.touch()
        with pytest.raises(
            WorkerError, match=r"1\.self_attn\.k_proj\.weight has other values \(held as .*\[128:192\]\)"
        ):
            vllm.sync(model.named_parameters(), 3)
