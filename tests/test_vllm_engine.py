"""The engine over a pretended vLLM, whose model packs its weights as vLLM's do; the real one is run in tests/vllm."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from a5lib.rollouts import vllm_versions as versions
from a5lib.rollouts.checksums import checksums, differences
from a5lib.rollouts.fp8 import FP8
from a5lib.rollouts.protocol import Refusal
from a5lib.rollouts.vllm_engine import VllmEngine
from a5lib.rollouts.weight_channel import channel_size, lay_out, views
from tests.helpers import tiny_tokenizer

VOCABULARY = 260  # as many as the tokenizer has and two; the engine holds 320 rows
SETTINGS = {
    "model": "folder", "dtype": "float32", "max_model_len": 5000, "max_num_seqs": 8, "max_num_batched_tokens": 5000,
    "top_p": 1.0, "kv_cache_bytes": 2**20, "memory_share": 0.5, "trust_remote_code": False,
    "quantization": "none",
}  # fmt: skip


class Packed(nn.Module):
    """A linear layer whose rows are those of several."""

    def __init__(self, sizes, width):
        super().__init__()
        self.output_sizes = sizes
        self.weight = nn.Parameter(torch.zeros(sum(sizes), width), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(sum(sizes)), requires_grad=False)


class Rounded(nn.Module):
    """The same in eight bits, as on a card: it lies as [columns, rows], both filled up to multiples of 16."""

    def __init__(self, sizes, width):
        super().__init__()
        self.output_sizes = sizes
        self.output_size_per_partition, self.input_size_per_partition = sum(sizes), width
        self.weight = nn.Parameter(torch.zeros(16, 16).to(FP8).t(), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.ones(16, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(sum(sizes)), requires_grad=False)


class Vocabulary(nn.Module):
    """A table filled up to whole blocks of 64 rows."""

    def __init__(self, width):
        super().__init__()
        self.org_vocab_size = VOCABULARY
        self.weight = nn.Parameter(torch.full((320, width), 7.0), requires_grad=False)


class Model(nn.Module):
    """Names as in vLLM. `skips` are weights of the checkpoint that a load passes over without a word; those in
    `old_scales` it rounds, and leaves their scale as it was.
    """

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, tied, linear):
        super().__init__()
        self.embed_tokens = Vocabulary(8)
        self.layer = nn.Module()
        self.layer.qkv_proj = linear([8, 4, 4], 8)
        self.layer.gate_up_proj = linear([6, 6], 8)
        self.layer.register_buffer("_k_scale", torch.ones(()))
        self.rotary_emb = nn.Module()
        self.rotary_emb.register_buffer("cos_sin_cache", torch.arange(12.0).bfloat16().view(3, 4), persistent=False)
        self.norm = nn.LayerNorm(8, bias=False)
        self.lm_head = self.embed_tokens if tied else Vocabulary(8)
        self.skips, self.old_scales = set(), set()
        self.loaded = []

    def load_weights(self, weights):
        held = {part.name: part.values for part in versions.parts(self)}
        for name, weight in weights:
            self.loaded.append(name)
            if name not in self.skips:
                held[name].copy_(weight)

    def reload_weights(self, weights_iterator):
        held = {part.name: part for part in versions.parts(self)}
        for name, weight in weights_iterator:
            part = held[name]
            if part.scale is None:
                self.load_weights([(name, weight)])
            elif name not in self.skips:
                scale = weight.abs().amax(1, keepdim=True) / 448
                part.values.copy_((weight / scale).to(FP8))
                if name not in self.old_scales:
                    part.scale.copy_(scale)


class Llm:
    """What `VllmEngine` uses of vLLM's `LLM`. It remembers its calls."""

    made: Llm
    tied = False
    groups: ClassVar[list] = []  # process groups that were made before

    def __init__(self, **arguments):
        Llm.made = self
        self.groups = list(Llm.groups)
        self.arguments = arguments
        self.model = Model(self.tied, Rounded if arguments["quantization"] else Packed)
        self.model_config = SimpleNamespace(max_model_len=arguments["max_model_len"])
        self.calls = []
        self.unfinished = 0
        core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.llm_engine = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished, engine_core=core)
        self.change = {}

    def get_tokenizer(self):
        return tiny_tokenizer()

    def apply_model(self, function):
        return [function(self.model)]

    def collective_rpc(self, method, kwargs):
        return [getattr(self.model, method)(**kwargs)]

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags}")

    def reset_prefix_cache(self):
        return not self.unfinished

    def generate(self, requests, params, use_tqdm):
        self.requests, self.params = requests, params
        bar = use_tqdm(total=len(requests), desc="Processed prompts")
        outputs = []
        for _ in use_tqdm(requests, desc="Rendering prompts"):
            bar.update(1)
            logprobs = SimpleNamespace(token_ids=[70, 71, 259], logprobs=[-1.0, -0.5, -2.0])
            output = dict(token_ids=[70, 71, 259], logprobs=logprobs, finish_reason="stop") | self.change
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(**output)]))
        return outputs


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """In place of the module that is imported when an engine is made."""
    module = SimpleNamespace(__version__="0.32.0", LLM=Llm, SamplingParams=lambda **given: given)
    utils = SimpleNamespace(dispatch_cpu_unquantized_gemm=None)
    layers = SimpleNamespace(utils=utils)
    for name, value in {"vllm": module, "vllm.model_executor.layers": layers}.items():
        monkeypatch.setitem(__import__("sys").modules, name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(Llm, "tied", False)
    monkeypatch.setattr(Llm, "groups", [])
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **given: Llm.groups.append((backend, given))
    )
    module.utils = utils
    return module


def trained(tied=False, seed=0):
    """A policy's weights by the names of its checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens.weight": (VOCABULARY, 8), "layer.q_proj.weight": (8, 8), "layer.k_proj.weight": (4, 8),
        "layer.v_proj.weight": (4, 8), "layer.q_proj.bias": (8,), "layer.k_proj.bias": (4,), "layer.v_proj.bias": (4,),
        "layer.gate_proj.weight": (6, 8), "layer.up_proj.weight": (6, 8), "layer.gate_proj.bias": (6,),
        "layer.up_proj.bias": (6,), "norm.weight": (8,), "lm_head.weight": (VOCABULARY, 8),
    }  # fmt: skip
    if tied:
        del shapes["lm_head.weight"]
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load(engine, weights):
    """Load, and compare as the trainer does."""
    slots = lay_out(weights.items())
    buffer = torch.empty(channel_size(slots), dtype=torch.uint8)
    for name, place in views(slots, buffer).items():
        place.copy_(weights[name])
    sums = checksums(weights.items())
    return differences(slots, sums, engine.load(slots, buffer, sums))


def generate(engine, **changes):
    arguments = dict(n=2, max_tokens=9, temperature=1.0, top_p=1.0, stop=["</a>"], seeds=[[5, 6], [7, 8]])
    return engine.generate([[1, 2], [3]], progress=lambda count: None, **(arguments | changes))


def ready(**changes):
    engine = VllmEngine(SETTINGS | changes)
    assert load(engine, trained()) == []
    engine.reset_prefix_cache()
    return engine


def test_every_weight_is_read_back_under_its_own_name() -> None:
    engine, weights = VllmEngine(SETTINGS), trained()
    assert load(engine, weights) == []
    held = {part.name: (part.held_as, part.values) for part in versions.parts(Llm.made.model)}
    assert held.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(held[name][1], weight)
    assert held["layer.v_proj.weight"][0] == "layer.qkv_proj.weight[12:16]"
    assert held["layer.up_proj.bias"][0] == "layer.gate_up_proj.bias[6:12]"
    assert held["lm_head.weight"][0] == "lm_head.weight[0:260]"


def test_a_tied_head_is_read_back_as_a_second_place_of_the_embedding(monkeypatch) -> None:
    monkeypatch.setattr(Llm, "tied", True)
    engine, weights = VllmEngine(SETTINGS), trained(tied=True)
    slots = lay_out(weights.items())
    rows = engine.load(slots, torch.zeros(channel_size(slots), dtype=torch.uint8), checksums(weights.items()))
    places = [row.held_as for row in rows if row.name == "embed_tokens.weight"]
    assert places == ["embed_tokens.weight[0:260]", "lm_head.weight[0:260]"]
    assert not engine.verified, "these are zeros"
    assert load(engine, weights) == []


def test_an_engine_that_keeps_a_head_of_its_own_is_found_where_the_policy_has_one_table() -> None:
    assert load(VllmEngine(SETTINGS), trained(tied=True)) == [
        "lm_head.weight was not sent (held as lm_head.weight[0:260])"
    ]


def test_a_weight_that_a_load_passes_over_is_named_and_nothing_is_generated() -> None:
    engine = ready()
    Llm.made.model.skips = {"layer.k_proj.weight"}
    assert load(engine, trained(seed=1)) == [
        "layer.k_proj.weight has other values (held as layer.qkv_proj.weight[8:12])"
    ]
    engine.reset_prefix_cache()
    with pytest.raises(Refusal, match="not verified"):
        generate(engine)


def test_a_weight_that_does_not_fit_is_named_and_not_loaded() -> None:
    engine, weights = VllmEngine(SETTINGS), trained()
    weights |= {"norm.weight": torch.ones(9), "layer.q_proj.bias": torch.ones(8, dtype=torch.float64)}
    weights["layer.x_proj.weight"] = torch.ones(2)
    assert load(engine, weights) == [
        "layer.x_proj.weight is missing",
        "layer.q_proj.bias is float32 [8] and should be float64 [8] (held as layer.qkv_proj.bias[0:8])",
        "norm.weight is float32 [8] and should be float32 [9]",
    ]
    assert not {"norm.weight", "layer.q_proj.bias", "layer.x_proj.weight"} & set(Llm.made.model.loaded)


def test_weights_of_eight_bits_are_judged_by_what_was_sent() -> None:
    engine, weights = VllmEngine(SETTINGS | {"quantization": "fp8"}), trained()
    assert Llm.made.arguments["quantization"] == "fp8_per_channel"
    assert load(engine, weights) == []
    held = {part.name: part for part in versions.parts(Llm.made.model)}
    assert held.keys() == weights.keys(), "a scale is no weight of its own"
    rounded = {name for name, part in held.items() if part.scale is not None}
    assert rounded == {f"layer.{name}_proj.weight" for name in ["q", "k", "v", "gate", "up"]}
    assert not rounded & set(Llm.made.model.loaded), "copied into the rounded weight, and not rounded"
    part = held["layer.up_proj.weight"]
    assert (part.held_as, part.values.shape, part.scale.shape) == ("layer.gate_up_proj.weight[6:12]", (6, 8), (6, 1))
    assert load(engine, trained(seed=1)) == []


@pytest.mark.parametrize("fault", ["skips", "old_scales"])
def test_an_old_weight_of_eight_bits_or_an_old_scale_is_named_and_nothing_is_generated(fault) -> None:
    engine = ready(quantization="fp8")
    getattr(Llm.made.model, fault).add("layer.k_proj.weight")
    assert load(engine, trained(seed=1)) == [
        "layer.k_proj.weight has other values (held as layer.qkv_proj.weight[8:12])"
    ]
    engine.reset_prefix_cache()
    with pytest.raises(Refusal, match="not verified"):
        generate(engine)


def test_a_channel_that_changed_on_the_way_is_found_though_the_engine_rounded_it_rightly() -> None:
    engine, weights = VllmEngine(SETTINGS | {"quantization": "fp8"}), trained()
    slots, sums = lay_out(weights.items()), checksums(weights.items())
    buffer = torch.zeros(channel_size(slots), dtype=torch.uint8)
    changed = weights["layer.v_proj.weight"].clone()
    changed[0, 0] += 1e-6  # far less than a step of eight bits
    for name, place in views(slots, buffer).items():
        place.copy_(changed if name == "layer.v_proj.weight" else weights[name])
    assert differences(slots, sums, engine.load(slots, buffer, sums)) == [
        "layer.v_proj.weight has other values (held as layer.qkv_proj.weight[12:16])"
    ]


def test_a_weight_of_eight_bits_that_does_not_fit_is_named_and_not_loaded() -> None:
    engine, weights = VllmEngine(SETTINGS | {"quantization": "fp8"}), trained()
    weights["layer.q_proj.weight"] = torch.ones(8, 9)
    assert load(engine, weights) == [
        "layer.q_proj.weight is float8_e4m3fn [8, 8] and should be float32 [8, 9] (held as layer.qkv_proj.weight[0:8])"
    ]


class OldMapper:
    """The mapper of 0.24: it renames."""

    def apply_list(self, names):
        return [name.removeprefix("model.") for name in names if name != "unused"]


class NewMapper(OldMapper):
    """The mapper of 0.32: unless asked for the renaming alone, it maps to the packed names as well."""

    def apply_list(self, names):
        return [name.replace("q_proj", "qkv_proj") for name in super().apply_list(names)]

    def get_rename_mapper(self):
        return OldMapper()


@pytest.mark.parametrize("mapper", [OldMapper(), NewMapper()])
def test_a_checkpoint_with_other_names_is_verified_under_its_own(mapper, monkeypatch) -> None:
    monkeypatch.setattr(Model, "hf_to_vllm_mapper", mapper, raising=False)
    load_own = Model.load_weights
    monkeypatch.setattr(Model, "load_weights", lambda self, weights: load_own(
        self, [(name.removeprefix("model."), weight) for name, weight in weights]))  # fmt: skip
    engine = VllmEngine(SETTINGS)
    assert load(engine, {f"model.{name}": weight for name, weight in trained().items()}) == []
    assert versions.engine_name(Llm.made.model, "unused") is None


def copy_of(parameter):
    return nn.Parameter(parameter.detach().clone(), requires_grad=False)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            lambda m: setattr(m.layer.qkv_proj, "cpu_linear", lambda *_: None),
            "computes layer.qkv_proj with packed copies",
        ),
        (lambda m: setattr(m.norm, "weight", nn.Parameter(torch.empty(0))), "left norm.weight empty"),
        (lambda m: setattr(m.norm, "weight", copy_of(m.norm.weight)), "moved norm.weight"),
        (
            lambda m: m.rotary_emb.cos_sin_cache[2, 1].add_(1),
            r"changed or lost rotary_emb\.cos_sin_cache; a buffer comes with no load\.",
        ),
        (lambda m: delattr(m.layer, "_k_scale"), r"changed or lost layer\._k_scale;"),
    ],
)
def test_weights_that_are_not_what_the_engine_computes_with_are_found(fault, sentence) -> None:
    engine = VllmEngine(SETTINGS)
    fault(Llm.made.model)
    with pytest.raises(RuntimeError, match=sentence):
        load(engine, trained())


@pytest.mark.parametrize("kind", ["dynamic", "longrope", {"full_attention": "dynamic"}])
def test_positions_whose_table_depends_on_the_length_may_change(kind, monkeypatch) -> None:
    monkeypatch.setattr(nn.Module, "rope_type", "default", raising=False)
    engine = VllmEngine(SETTINGS)
    Llm.made.model.rotary_emb.cos_sin_cache.zero_()
    with pytest.raises(RuntimeError, match="changed or lost"):
        load(engine, trained())
    monkeypatch.setattr(nn.Module, "rope_type", kind)
    engine = VllmEngine(SETTINGS)
    Llm.made.model.rotary_emb.cos_sin_cache.zero_()
    assert load(engine, trained()) == []


def test_packing_is_switched_off_before_the_model_is_made(vllm) -> None:
    VllmEngine(SETTINGS)
    layer = nn.Linear(2, 2)
    vllm.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.cpu_linear is nn.functional.linear and layer.weight.numel() == 4
    del vllm.utils.dispatch_cpu_unquantized_gemm
    with pytest.raises(RuntimeError, match=r"packs weights in a way .* use 0\.24\.x and 0\.32\.x"):
        VllmEngine(SETTINGS)


@pytest.mark.parametrize(("card", "backend"), [(False, "gloo"), (True, "nccl")])
def test_V08_the_process_group_is_there_before_vllm_would_look_for_a_port(card, backend, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 40))
    VllmEngine(SETTINGS)
    ((name, given),) = Llm.made.groups
    assert (name, given["rank"], given["world_size"]) == (backend, 0, 1)
    assert isinstance(given["store"], torch.distributed.HashStore), "in memory: no port, and no file"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_version_that_was_not_tried_is_said(vllm, capsys) -> None:
    VllmEngine(SETTINGS)
    assert capsys.readouterr().out == ""
    vllm.__version__ = "0.50.1"
    VllmEngine(SETTINGS)
    assert capsys.readouterr().out == "a5lib knows vLLM 0.24.x and 0.32.x; this is 0.50.1, untried.\n"


def test_each_completion_is_a_request_with_its_own_seed_and_keeps_its_stop_string() -> None:
    engine, finished = ready(), []
    rows = engine.generate([[1, 2], [3]], n=2, max_tokens=9, temperature=0.5, top_p=1.0, stop=["EF"],
                           seeds=[[5, 6], [7, 8]], progress=finished.append)  # fmt: skip
    llm = Llm.made
    assert [r["prompt_token_ids"] for r in llm.requests] == [[1, 2], [1, 2], [3], [3]]
    assert [p["seed"] for p in llm.params] == [5, 6, 7, 8]
    assert llm.params[0] == {
        "seed": 5, "max_tokens": 9, "temperature": 0.5, "top_p": 1.0, "stop": ["EF"], "logprobs": 0,
        "include_stop_str_in_output": True, "detokenize": True, "flat_logprobs": True,
    }  # fmt: skip
    assert sum(finished) == 4
    text = tiny_tokenizer().decode([70, 71])
    assert len(text) == 2
    assert rows == 4 * [
        {"token_ids": [70, 71, 259], "log_probs": [-1.0, -0.5, -2.0], "text": text, "finish_reason": "stop"}
    ]
    generate(engine, stop=[text[0]])
    assert generate(engine, stop=["zz", text[0]])[0]["text"] == text[0], "cut after the stop string that ends first"
    generate(engine, stop=[])
    assert not llm.params[0]["detokenize"]


@pytest.mark.parametrize("change", [{"finish_reason": "abort"}, {"token_ids": [70, 71]}])
def test_an_output_that_is_no_whole_completion_is_an_error(change) -> None:
    engine = ready()
    Llm.made.change = change
    with pytest.raises(RuntimeError, match="log-probabilities for"):
        generate(engine)


def test_log_probs_are_taken_after_the_temperature_and_before_top_p() -> None:
    assert ready().llm.arguments["logprobs_mode"] == "processed_logprobs"
    engine = ready(top_p=0.9)
    assert engine.llm.arguments["logprobs_mode"] == "raw_logprobs"
    generate(engine, top_p=0.9)
    generate(engine, top_p=0.9, temperature=0)
    with pytest.raises(Refusal, match=r"temperature 0\.7 needs top-p 1"):
        generate(engine, top_p=0.9, temperature=0.7)
    with pytest.raises(Refusal, match=r"made for top-p 0\.9 and cannot serve 1;"):
        generate(engine, top_p=1.0)
    for temperature in (0.001, 2.5):
        with pytest.raises(Refusal, match=f"does not sample at temperature {temperature}"):
            generate(engine, top_p=0.9, temperature=temperature)


def test_every_step_in_the_wrong_order_is_refused() -> None:
    engine = VllmEngine(SETTINGS)
    with pytest.raises(Refusal, match="not verified"):
        generate(engine)
    load(engine, trained())
    with pytest.raises(Refusal, match="prefix cache may hold"):
        generate(engine)
    engine.reset_prefix_cache()
    generate(engine)
    load(engine, trained())
    with pytest.raises(Refusal, match="prefix cache may hold"):
        generate(engine)
    Llm.made.unfinished = 3
    with pytest.raises(Refusal, match=r"^vLLM did not reset its prefix cache; it says that blocks of it are in use\.$"):
        engine.reset_prefix_cache()
    with pytest.raises(Refusal, match="busy: 3 completions are unfinished"):
        engine.sleep(2)
    Llm.made.unfinished = 0
    engine.sleep(2)
    with pytest.raises(Refusal, match="asleep"):
        load(engine, trained())
    engine.wake("weights")
    load(engine, trained())
    with pytest.raises(Refusal, match="no room"):
        engine.reset_prefix_cache()
    with pytest.raises(Refusal, match="no room"):
        generate(engine)
    engine.sleep(2)
    with pytest.raises(Refusal, match='Wake "weights" before "kv_cache"'):
        engine.wake("kv_cache")
    engine.wake("weights")
    load(engine, trained())
    with pytest.raises(Refusal, match="no 'scheduling' to wake"):
        engine.wake("scheduling")
    engine.wake("kv_cache")
    engine.reset_prefix_cache()
    generate(engine)


def test_sleep_on_the_cpu_is_noted_and_skipped(capsys) -> None:
    engine = ready()
    engine.sleep(2)
    engine.sleep(2)
    engine.wake("weights")
    assert capsys.readouterr().out == "Sleep level 2 exists on a card only; this engine keeps its memory.\n"
    assert Llm.made.calls == []
    assert Llm.made.arguments["enable_sleep_mode"] is False and Llm.made.arguments["enforce_eager"] is True
    assert Llm.made.arguments["enable_chunked_prefill"] is False
    assert Llm.made.arguments["max_num_batched_tokens"] == 5000, "a longest prompt must fit whole"
    assert engine.facts() == {
        "max_model_len": 5000, "vllm": "0.32.0", "torch": torch.__version__, "device": "cpu", "card_free": None,
    }  # fmt: skip
    memory = engine.memory()
    assert memory["card_free"] is memory["card_total"] is None and memory["host"] > 2**26
    engine.close()
    assert Llm.made.calls == ["shutdown"]


def test_on_a_card_the_engine_sleeps_when_it_has_finished_and_wakes_by_tag(monkeypatch) -> None:
    for name, value in {
        "is_available": lambda: True, "mem_get_info": lambda: (30, 40), "get_device_name": lambda: "a card",
        "synchronize": lambda: Llm.made.calls.append("wait"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    engine = VllmEngine(SETTINGS)
    assert engine.facts()["card_free"] == 30 and engine.facts()["device"] == "a card"
    assert (engine.memory()["card_free"], engine.memory()["card_total"]) == (30, 40)
    assert Llm.made.arguments["enable_sleep_mode"] is True and Llm.made.arguments["enforce_eager"] is False
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "TORCH_COMPILE_DISABLE" not in os.environ
    for _ in range(2):
        engine.sleep(2)
        engine.wake("weights")
        load(engine, trained())
        engine.wake("kv_cache")
        engine.wake("kv_cache")
    engine.close()
    assert Llm.made.calls == 2 * ["wait", "sleep 2", "wake ['weights']", "wait", "wake ['kv_cache']"] + ["shutdown"]
