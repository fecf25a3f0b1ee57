"""The real engine with one fault each. The worker loads these by the path of this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from a5lib.rollouts import vllm_versions
from a5lib.rollouts.protocol import Refusal
from a5lib.rollouts.vllm_engine import VllmEngine


class ForgetfulEngine(VllmEngine):
    """It leaves the prefix cache as it is for as long as the file `settings["forget"]` is there. While the file
    `settings["spoil"]` is there, a load finds other positions, and is refused with what is said of them.
    """

    def __init__(self, settings: Any) -> None:
        self.forget, self.spoil = Path(settings["forget"]), Path(settings["spoil"])
        super().__init__(settings)

    def load(self, *arguments: Any) -> Any:
        if not self.spoil.exists():
            return super().load(*arguments)
        name = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
        table = self._apply(lambda model: dict(model.named_buffers())[name])
        table[9] *= -1
        try:
            return super().load(*arguments)
        except RuntimeError as error:
            raise Refusal(str(error)) from error
        finally:
            table[9] *= -1

    def reset_prefix_cache(self) -> None:
        if self.forget.exists():
            self.fresh = True
        else:
            super().reset_prefix_cache()


class PackedHeadEngine(VllmEngine):
    """Its head computes with a packed copy, as vLLM's does by itself on the CPU; every weight can be loaded."""

    def __init__(self, settings: Any) -> None:
        from vllm.model_executor.layers import utils

        pack, switch_off = utils.dispatch_cpu_unquantized_gemm, vllm_versions.switch_off_packing

        def switch_off_but_for_the_head() -> None:
            switch_off()
            leave = utils.dispatch_cpu_unquantized_gemm
            utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: (leave if remove_weight else pack)(
                layer, remove_weight
            )

        vllm_versions.switch_off_packing = switch_off_but_for_the_head
        super().__init__(settings)


class LosingEngine(VllmEngine):
    """While the file `settings["forget"]` is there, a reload leaves out one matrix and reports success."""

    def __init__(self, settings: Any) -> None:
        forget, reload = Path(settings["forget"]), vllm_versions.reload

        def lose(llm: Any, weights: Any) -> None:
            left_out = "model.layers.1.self_attn.k_proj.weight" if forget.exists() else None
            reload(llm, [(name, weight) for name, weight in weights if name != left_out])

        vllm_versions.reload = lose
        super().__init__(settings)
