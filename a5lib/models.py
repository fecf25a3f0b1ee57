"""Load a policy: the embedded toy model, a folder, or a Hugging Face id, with its tokenizer, on a device, in a dtype.

Everything that can be wrong with a model is said here, in one sentence, before anything is trained. This module knows
nothing about prompts, rewards or training.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from a5lib.config import TOY
from a5lib.errors import UserError
from a5lib.progress import bars_are_off

TOY_MODEL_DIR = Path(__file__).parent / "toy_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

logger = logging.getLogger(__name__)


def select_device(name: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        UserError: the name is unknown or the device is not there.

    >>> select_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"Unknown device {name!r}; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Device {name!r} is not supported; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"Device {name!r} is not there: this torch sees no NVIDIA card; use --device cpu, or ask `a5 doctor`."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"Device {name!r} is not there; this machine has cuda:0 to cuda:{last}.")
    if device.type == "cuda":
        use_segments_that_grow()
        leave_out_cudnn_attention()
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())  # some of torch's functions want the number
    return device


def use_segments_that_grow() -> None:
    """Let torch's allocator grow one piece of the card's memory instead of asking for pieces that never fit again.

    A budget is then used up to its last percents. It takes effect where the card has not been used yet in this process,
    and leaves a setting of the user's own alone.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def leave_out_cudnn_attention() -> None:
    """Keep torch's `scaled_dot_product_attention` away from cuDNN's kernel, in this process.

    Torch prefers it on an H100, H200 or B200, and from torch 2.11 on its gradient of a masked bfloat16 attention can be
    NaN (pytorch issue 196678). The flash and the memory-efficient kernel stay.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 on the CPU and bfloat16 on a card for `auto`; otherwise the named type.

    >>> select_dtype("auto", torch.device("cpu"))
    torch.float32
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_policy(
    model: str = TOY,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and its tokenizer.

    A tokenizer without a padding token pads with its end-of-sequence token; masks never look at ids, so that is safe.

    Args:
        model: `toy`, a folder, or a Hugging Face id (which transformers downloads if it is not on this machine).
        device: as in `select_device`; with `auto` the toy model stays on the CPU, which is faster at its size.
        dtype: as in `select_dtype`.
        attention_implementation: `flash_attention_2` falls back to `sdpa`, with one warning, where it does not import.
        trust_remote_code: run Python code that the model repository ships.

    Raises:
        UserError: no config or tokenizer, no end-of-sequence token, weights that are missing or damaged, or a
        vocabulary smaller than the tokenizer's.
    """
    target = policy_device(model, device)
    source = _source(model)
    if attention_implementation == "flash_attention_2":
        attention_implementation = _flash_attention_or_sdpa()
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    try:
        with without_progress_bars() if model == TOY or bars_are_off() else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=select_dtype(dtype, target),
                attn_implementation=attention_implementation,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:
        raise UserError(
            f"The model {model!r} does not load ({_first_line(error)}); give a folder saved with save_pretrained."
        ) from error
    policy: PreTrainedModel = loaded[0]
    missing = loaded[1]["missing_keys"]
    if missing:
        raise UserError(f"The weights of {model!r} lack {min(missing)}, which would stay random; give them all.")
    _check_vocabulary(model, policy, tokenizer)
    nn.Module.to(policy, target)
    return policy.eval(), tokenizer


def policy_device(model: str, device: str) -> torch.device:
    """Where a policy goes: `select_device`, but with `auto` the toy model stays on the CPU.

    >>> policy_device("toy", "auto")
    device(type='cpu')
    """
    return select_device("cpu" if model == TOY and device == "auto" else device)


def load_config(model: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model alone: what a plan needs, without a weight.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(_source(model), trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise UserError(
            f"The config of {model!r} does not load ({_first_line(error)}); give a folder saved with save_pretrained."
        ) from error


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without a padding token pads with its end-of-sequence token.

    Raises:
        UserError: it does not load, or has no end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(_source(model), trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise UserError(
            f"The tokenizer of {model!r} does not load ({_first_line(error)}); give a folder with its files, or an id "
            "and a network."
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"The tokenizer of {model!r} has no end-of-sequence token; set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a prompt: those of its text, behind what the tokenizer puts in front of a text, and nothing after it.

    What goes in front, such as a beginning-of-sequence token, is not put there again where the text begins with it. An
    end token would tell the model that there is nothing left to say. The same ids go to the engine and to the trainer.
    Taught in notebook 02.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    dressed = list(tokenizer.encode(text))
    for size in range(1, len(dressed) - len(ids) + 1):
        front = dressed[:size]
        if dressed[size : size + len(ids)] == ids and ids[:size] != front:
            return front + ids
    return ids


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence the progress bars of transformers, which say nothing about a model that loads in a blink."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def claim_folder(folder: Path, what: str = "The folder", *, otherwise: str = "choose a new one") -> None:
    """Make a folder to write into; it must be new or empty. `what` names it and `otherwise` is the advice if it is not.

    Raises:
        UserError: it holds something or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{what} {folder} is not empty; {otherwise}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{what} {folder} cannot be made ({error.strerror}); choose another one.") from error


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save in Hugging Face format, complete or not at all: `AutoModelForCausalLM.from_pretrained(folder)` loads it.

    Raises:
        UserError: the disk or the model's own checks refuse; an older model in the folder is untouched.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        with without_progress_bars():
            model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"The model cannot be saved in {folder} ({error}); make room and try again.") from error


def _source(model: str) -> str:
    """What transformers is given for a model; refuses what cannot be one."""
    source = str(TOY_MODEL_DIR) if model == TOY else model
    _check_source(model, source)
    return source


def _check_source(model: str, source: str) -> None:
    folder = Path(source)
    if not folder.exists():
        looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1
        if looks_local:
            raise UserError(
                f"There is no model folder {model!r}; give `toy`, an existing folder, or an id such as "
                "allenai/OLMo-2-0425-1B."
            )
        return
    if not folder.is_dir():
        raise UserError(f"The model {model!r} is a file; give the folder that holds config.json and the weights.")
    if not (folder / "config.json").is_file():
        raise UserError(f"The model folder {model!r} has no config.json; give a folder saved with save_pretrained.")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"config.json in the model folder {model!r} is not JSON; save the model again.") from None
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"The model folder {model!r} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save it there too."
        )


def _check_vocabulary(model: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = cast(nn.Embedding, policy.get_input_embeddings()).num_embeddings
    if rows < len(tokenizer):
        raise UserError(
            f"The model {model!r} has {rows} embedding rows but its tokenizer has {len(tokenizer)} tokens; "
            "use the tokenizer that belongs to the model."
        )


def _flash_attention_or_sdpa() -> str:
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        logger.warning("flash_attn does not import (%s); using sdpa instead.", _first_line(error))
        return "sdpa"
    return "flash_attention_2"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def convert_gguf(file: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Write the model in a GGUF file as a Hugging Face folder, weights in `dtype`.

    transformers reads GGUF with the packages gguf and accelerate. What it loads does not save itself, so the weights
    are copied into a fresh model of the same config.

    Raises:
        UserError: the file or a package is missing, the file does not load, or `out` is not empty or not writable.
    """
    if not file.is_file():
        raise UserError(f"There is no GGUF file {file}; give the path of one.")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(f"Reading GGUF needs {' and '.join(missing)}; install with: pip install {' '.join(missing)}")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    claim_folder(out)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:
        raise UserError(f"{file} does not load ({_first_line(error)}); give a GGUF file of a known model.") from error
    vars(loaded.config).pop("quantization_config", None)  # or vLLM takes the folder for a GGUF file
    fresh = AutoModelForCausalLM.from_config(loaded.config).to(select_dtype(dtype, torch.device("cpu")))
    fresh.load_state_dict(loaded.state_dict())
    save_model(fresh, tokenizer, out)
