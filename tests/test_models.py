"""Loading a policy: device, dtype, tokenizer, prompts' ids, and one sentence for each thing that can be wrong."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import AddedToken, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import a5lib.models as models
from a5lib.errors import UserError
from a5lib.models import (
    TOY_MODEL_DIR,
    claim_folder,
    convert_gguf,
    encode_prompt,
    load_policy,
    select_device,
    select_dtype,
    without_progress_bars,
)
from tests.conftest import given
from tests.helpers import tiny_olmo2, tiny_tokenizer

scored_prompt_ids = given("masks").encode_prompt


def saved(folder: Path, *, vocab_size: int = 264, tied: bool = False, tokenizer=None) -> Path:
    tiny_olmo2(vocab_size=vocab_size, tied=tied).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def refusal(model: Path | str, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_policy(str(model), device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the toy model


def test_the_toy_model_loads_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_policy(device="cpu")
    assert capfd.readouterr() == ("", ""), "a bar for a model that loads in a blink is noise"
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.decode(encode_prompt(tokenizer, "How many?")) == "How many?"


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_bars_of_transformers_are_as_they_were(shown: bool) -> None:
    before = transformers_logging.is_progress_bar_enabled()
    switch = {True: transformers_logging.enable_progress_bar, False: transformers_logging.disable_progress_bar}
    try:
        switch[shown]()
        with pytest.raises(KeyError), without_progress_bars():
            assert not transformers_logging.is_progress_bar_enabled()
            raise KeyError
        assert transformers_logging.is_progress_bar_enabled() == shown
    finally:
        switch[before]()


def test_bfloat16_when_asked() -> None:
    model, _ = load_policy(device="cpu", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# --- device and dtype


def test_auto_is_float32_on_the_cpu_and_bfloat16_on_a_card() -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda:0")
    assert [select_dtype("auto", cpu), select_dtype("auto", card)] == [torch.float32, torch.bfloat16]
    assert [select_dtype("bfloat16", cpu), select_dtype("float32", card)] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("cards", "name", "expected"),
    [(0, "auto", "cpu"), (2, "auto", "cuda:0"), (2, "cpu", "cpu"), (2, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1")],
)
def test_the_device_is_the_card_where_there_is_one(monkeypatch, cards: int, name: str, expected: str) -> None:
    pretend_cards(monkeypatch, cards)
    assert select_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("cards", "name", "words"),
    [
        (0, "cuda", "sees no NVIDIA card; use --device cpu"),
        (2, "cuda:2", "has cuda:0 to cuda:1"),
        (2, "mps", "'mps' is not supported"),
        (2, "gpu", "Unknown device 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(monkeypatch, cards: int, name: str, words: str) -> None:
    pretend_cards(monkeypatch, cards)
    with pytest.raises(UserError, match=words):
        select_device(name)


def pretend_cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)  # for the tests that follow
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_a_card_grows_in_place_unless_the_user_says_otherwise(monkeypatch, own: str | None) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(own, "max_split_size_mb:128")
    pretend_cards(monkeypatch, 1)
    before = dict(os.environ)
    assert select_device("cpu").type == "cpu" and dict(os.environ) == before
    select_device("cuda")
    added = {} if own else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert dict(os.environ) == before | added


def test_attention_on_a_card_is_not_that_of_cudnn() -> None:
    """In a process of its own, because the switch is the whole process's."""
    code = """
import torch
from a5lib.models import select_device
torch.cuda.is_available, torch.cuda.device_count, torch.cuda.current_device = lambda: True, lambda: 1, lambda: 0
cuda = torch.backends.cuda
for name in ("cpu", "cuda"):
    select_device(name)
    print(name, cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "cpu True True True\ncuda False True True\n"


def test_the_toy_model_stays_on_the_cpu_unless_a_card_is_asked_for(monkeypatch) -> None:
    pretend_cards(monkeypatch, 1)
    assert load_policy()[0].device == torch.device("cpu")


# --- flash attention


def test_X03_a_broken_flash_attn_gives_sdpa_and_one_warning(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "flash_attn.py").write_text('raise ImportError("undefined symbol: _ZN3c104cuda")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with caplog.at_level(logging.WARNING):
        model, _ = load_policy(device="cpu", attention_implementation="flash_attention_2")
    assert model.config._attn_implementation == "sdpa"
    assert [r.getMessage() for r in caplog.records if "flash_attn" in r.getMessage()] == [
        "flash_attn does not import (undefined symbol: _ZN3c104cuda); using sdpa instead."
    ]
    with torch.no_grad():
        assert model(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_a_flash_attn_that_imports_is_used(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert models._flash_attention_or_sdpa() == "flash_attention_2"


def test_eager_attention_is_passed_on() -> None:
    assert load_policy(device="cpu", attention_implementation="eager")[0].config._attn_implementation == "eager"


# --- folders


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_folder_loads_with_the_same_weights(tmp_path: Path, tied: bool) -> None:
    model, _ = load_policy(str(saved(tmp_path / "model", tied=tied)), device="cpu")
    for (name, a), (_, b) in zip(model.named_parameters(), tiny_olmo2(tied=tied).named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    whole = tiny_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole._tokenizer, eos_token="<eos>")
    _, loaded = load_policy(str(saved(tmp_path / "model", tokenizer=tokenizer)), device="cpu")
    assert loaded.pad_token_id == loaded.eos_token_id == 1


def test_a_missing_folder_is_not_taken_for_an_id(tmp_path: Path) -> None:
    assert "There is no model folder" in refusal(tmp_path / "none")
    assert "There is no model folder 'nonsense'" in refusal("nonsense")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file")


def test_an_id_that_does_not_load_is_one_sentence(monkeypatch) -> None:
    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    sentence = refusal("someone/some-model")
    assert "'someone/some-model' does not load (We couldn't connect to the hub.)" in sentence
    assert "network" in sentence


def edited(tmp_path: Path, name: str, text: str | bytes | None) -> Path:
    """A copy of the toy model with one file replaced, or without it."""
    folder = tmp_path / "model"
    shutil.copytree(TOY_MODEL_DIR, folder)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def toy_config(**changes) -> str:
    return json.dumps(json.loads((TOY_MODEL_DIR / "config.json").read_text()) | changes)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json .* is not JSON"),
        ("config.json", "[]", "does not load"),
        ("config.json", "{}", "does not load .*model_type"),
        ("config.json", toy_config(hidden_size=64), "does not load"),
        ("tokenizer.json", None, "tokenizer .* does not load"),
        ("tokenizer.json", "{}", "tokenizer .* does not load"),
        ("tokenizer_config.json", '{"tokenizer_class": "TokenizersBackend"}', "no end-of-sequence token"),
        ("model.safetensors", None, "does not load .*model.safetensors"),
        ("model.safetensors", b"\x08" + bytes(7), "does not load"),
    ],
)
def test_a_folder_that_lacks_something_is_named(tmp_path: Path, name: str, text, words: str) -> None:
    folder = edited(tmp_path, name, text)
    with pytest.raises(UserError, match=words) as caught:
        load_policy(str(folder), device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_any_tokenizer_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_olmo2().save_pretrained(folder)
    assert "has no tokenizer" in refusal(folder)


def test_weights_that_would_stay_random_are_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path, "config.json", toy_config(num_hidden_layers=6))
    assert "lack model.layers.4." in refusal(folder), "a policy with two random layers answers nonsense without a word"


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    sentence = refusal(saved(tmp_path / "model", vocab_size=200))
    assert "200 embedding rows" in sentence
    assert "258 tokens" in sentence


# --- the ids of a prompt


def with_bos(template: str, **names: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, which puts its special tokens around a text as the template says."""
    tokenizer = tiny_tokenizer()._tokenizer
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True)])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"} | names
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


BOS, EOS = 258, 1


@pytest.mark.parametrize(
    ("template", "names", "text", "front", "back"),
    [
        ("<bos> $A", {}, "p", [BOS], []),
        ("<bos> $A", {}, "<bos>p", [BOS], []),
        ("<bos> $A <eos>", {}, "p", [BOS], []),
        ("<bos> $A <eos>", {}, "<bos>p", [BOS], []),
        ("$A <eos>", {}, "p", [], []),
        ("$A", {}, "p", [], []),
        ("$A", {}, "<bos>p", [BOS], []),
        ("$A", {}, "p<eos>", [], [EOS]),  # the writer of the prompt put it there
        ("<eos> $A", {"bos_token": "<eos>"}, "p", [EOS], []),
        ("$A <eos>", {"bos_token": "<eos>"}, "p", [], []),
    ],
)
def test_M04_at_most_one_start_token_and_no_end_token(template, names, text, front, back) -> None:
    tokenizer = with_bos(template, **names)
    ids = encode_prompt(tokenizer, text)
    assert ids == [*front, *tokenizer.encode("p", add_special_tokens=False), *back]
    assert ids == scored_prompt_ids(text, tokenizer), "the trainer would score other ids than the engine had"


def test_M04_the_toy_prompts_are_what_the_reference_encodes() -> None:
    _, tokenizer = load_policy(device="cpu")
    for text in ("How many? 1,200.\n", "<think> 3*4=12 </think>", "<|endoftext|>x", ""):
        assert encode_prompt(tokenizer, text) == scored_prompt_ids(text, tokenizer)


# --- folders to write, and GGUF


def test_a_folder_to_write_must_be_new_or_empty(tmp_path: Path) -> None:
    claim_folder(tmp_path / "a" / "b")
    claim_folder(tmp_path / "a" / "b")
    for used in (tmp_path / "a", Path(__file__)):
        with pytest.raises(UserError, match="is not empty"):
            claim_folder(used)
    with pytest.raises(UserError, match="cannot be made"):
        claim_folder(Path(__file__) / "below")


def test_gguf_says_what_is_missing(tmp_path: Path, monkeypatch) -> None:
    file, out = tmp_path / "m.gguf", tmp_path / "out"
    with pytest.raises(UserError, match="There is no GGUF file"):
        convert_gguf(file, out)
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf accelerate"):
        convert_gguf(file, out)
    assert not out.exists(), "nothing is written before everything is there"
    monkeypatch.setattr(models, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"m\.gguf does not load"):
        convert_gguf(file, out)
    (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        convert_gguf(file, out)
    assert (out / "mine").read_text() == "mine"


def test_gguf_becomes_a_folder_that_loads(tmp_path: Path, monkeypatch) -> None:
    """Reading GGUF is transformers' part, so a model stands in for what it reads; what we write is real."""
    file, out = tmp_path / "m.gguf", tmp_path / "out"
    file.write_bytes(b"GGUF")
    read = tiny_olmo2()
    read.config.quantization_config = {"quant_method": "gguf"}  # as transformers leaves it there
    with monkeypatch.context() as patch:
        patch.setattr(models, "find_spec", lambda name: object())
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: read)
        patch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: tiny_tokenizer())
        convert_gguf(file, out, "float32")
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full_disk)
        with pytest.raises(UserError, match="No space left on device"):
            convert_gguf(file, tmp_path / "other")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    model, tokenizer = load_policy(str(out), device="cpu")
    assert len(tokenizer) == 258
    for (name, a), (_, b) in zip(model.named_parameters(), tiny_olmo2().named_parameters(), strict=True):
        assert torch.equal(a, b), name


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")
