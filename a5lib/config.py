"""What a run is: one flat frozen dataclass, one sentence a field, and the ten algorithm presets.

Every field is a flag of `a5 train`. A field that is `None` takes its value from `TOY_DEFAULTS` when the model is the
embedded toy model and from `ASSIGNMENT_DEFAULTS` otherwise; `resolve` fills them in and checks what can be checked
without touching a file. This module knows nothing about torch, files or devices.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from a5lib.errors import UserError

TOY = "toy"

Baseline = Literal["mean", "none"]
AdvantageNormalizer = Literal["std", "none", "mean"]
ImportanceReweighting = Literal["none", "noclip", "grpo", "gspo", "cispo"]
LossNormalization = Literal["sequence", "constant"]
OptimizerState = Literal["fp32", "bf16", "bf16_stochastic", "bf16_kahan"]
EngineName = Literal["resident", "layer_major"]
HeadName = Literal["full", "blocks", "fused"]
BackendName = Literal["transformers", "vllm-colocated", "vllm-server"]


@dataclass(frozen=True)
class Algorithm:
    """One row of the preset table: how rewards become advantages and advantages become a loss (notebooks 04 and 05)."""

    baseline: Baseline = "mean"
    advantage_normalizer: AdvantageNormalizer = "std"
    importance_reweighting_method: ImportanceReweighting = "none"
    loss_normalization: LossNormalization = "sequence"
    cliprange: float | None = None
    off_policy: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(),
    "grpo_constant": Algorithm(loss_normalization="constant"),
    "dr_grpo": Algorithm(advantage_normalizer="none", loss_normalization="constant"),
    "rft": Algorithm(baseline="none", advantage_normalizer="none", loss_normalization="constant"),
    "maxrl": Algorithm(advantage_normalizer="mean", loss_normalization="constant"),
    "offpolicy_naive": Algorithm(off_policy=True),
    "offpolicy_noclip": Algorithm(importance_reweighting_method="noclip", off_policy=True),
    "offpolicy_clip": Algorithm(importance_reweighting_method="grpo", cliprange=0.2, off_policy=True),
    "offpolicy_gspo": Algorithm(importance_reweighting_method="gspo", cliprange=3e-4, off_policy=True),
    "cispo": Algorithm(importance_reweighting_method="cispo", cliprange=0.2, off_policy=True),
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run. The help text of each flag is the string under its field."""

    model: str = TOY
    """`toy` for the embedded model, a folder with a Hugging Face model, or an id (downloaded unless it is here)."""
    trust_remote_code: bool = False
    """Allow Python code that a model repository ships to run; leave it off."""
    device: str = "auto"
    """`auto` (the NVIDIA card if there is one, but the CPU for the toy model), `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters: `auto` is float32 on the CPU and bfloat16 on a card."""
    attention_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of transformers; `flash_attention_2` falls back to `sdpa` with a warning where it is missing."""

    algorithm: str = "grpo"
    """Preset: grpo, grpo_constant, dr_grpo, rft, maxrl, offpolicy_(naive, noclip, clip, gspo) or cispo."""
    cliprange: float | None = None
    """Clip width epsilon of the importance ratio (default: the preset's own)."""
    num_steps: int | None = None
    """Rollout batches to train on (toy 30, otherwise 200)."""
    seed: int = 0
    """Seed of data order, sampling and stochastic rounding."""

    train_file: Path | None = None
    """Training problems, GSM8K JSONL (default: the embedded problems)."""
    val_file: Path | None = None
    """Validation problems, GSM8K JSONL (default: the embedded problems)."""
    train_examples: int | None = None
    """Training problems to use (toy 4096, otherwise 6400)."""
    val_examples: int | None = None
    """Validation problems to use (toy 256, otherwise 1024)."""
    prompt: str = "r1_zero"
    """`r1_zero`, `r1_zero_three_shot`, `question_only`, or a text file that contains `{question}`."""
    grader: Literal["auto", "r1_zero", "r1_zero_lenient", "question_only"] = "auto"
    """Reward function: `auto` is the one that belongs to the named prompt; a prompt file needs it named."""

    rollout_batch_size: int | None = None
    """Responses generated before each round of updates (toy 128, otherwise 256)."""
    group_size: int = 8
    """Responses to each prompt."""
    max_tokens: int | None = None
    """Longest response in tokens (toy 80, otherwise 512)."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are scored at the same one."""
    top_p: float = 1.0
    """Nucleus sampling mass; 1 samples from the whole distribution."""
    generation_backend: BackendName = "transformers"
    """What generates the rollouts: `transformers`, vLLM in a process of its own that takes turns with the trainer on
    the same card (`vllm-colocated`), or a vLLM server that you have started on another (`vllm-server`)."""
    vllm_python: Path | None = None
    """The Python that has vLLM, such as vllm-env/bin/python (default: the one that trains)."""
    vllm_url: str = "http://127.0.0.1:8000"
    """Where the server of `vllm-server` answers, on this machine."""
    rollout_quantization: Literal["none", "fp8"] = "none"
    """`fp8` lets `vllm-colocated` keep its linear layers' weights in eight bits, rounded anew at every sync: half the
    memory, and log-probabilities farther from the trainer's."""
    generation_batch_size: int | None = None
    """Responses decoded side by side; lower it when generation runs out of memory (toy 256, otherwise 32, with vLLM the
    rollout batch up to 256)."""
    mismatch_correction: Literal["none", "tis"] = "none"
    """`tis` multiplies each token's loss by min(p / q, 2): p is its probability by the trainer and q by what generated
    it (truncated importance sampling)."""

    train_batch_size: int | None = None
    """Responses in one optimizer step (on-policy: the rollout batch; off-policy: 8)."""
    gradient_accumulation_steps: int | None = None
    """Microbatches in one optimizer step (default: so that a microbatch has 8 responses, with --low-memory 1)."""
    engine: EngineName | None = None
    """What holds weights, gradients and optimizer state: `resident` keeps all on the device, `layer_major` on the host
    and runs layer by layer (default: resident if it fits the card and no --vram-budget asks for less)."""
    vram_budget: float | None = None
    """GiB of the card that the run may use, all included; on the CPU it chooses the layer-major engine (default: what
    is free)."""
    compile_layer: bool | None = None
    """Layer-major engine: compile the layer, the head's blocks and AdamW; resident engine with --recompute-layers and
    --head fused: the layers and AdamW (default: bfloat16 on a card with Triton)."""
    low_memory: bool = False
    """Sets --recompute-layers, --head blocks and one response a microbatch: less memory, more time."""
    recompute_layers: bool | None = None
    """Resident engine: keep only the inputs of layers and run them again in the backward pass (default: as
    --low-memory)."""
    head: HeadName | None = None
    """Resident engine: score all positions at once (`full`), in checkpointed blocks (`blocks`), or in blocks without a
    graph (`fused`, the engines' own code) (default: full, with --low-memory blocks)."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW (toy 5e-4, otherwise 1e-5)."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0 (the s-th step of W uses s/W of it)."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    adam_beta1: float = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: float = 0.95
    """AdamW's decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    optimizer_state: OptimizerState = "fp32"
    """Precision of AdamW's state for bfloat16 parameters: `fp32` keeps a float32 master copy, so no update is lost."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""

    eval_every: int | None = None
    """Rollout batches between validations (0: only before and after)."""
    eval_samples: int | None = None
    """Sampled responses to each problem in the first and last validation (toy 8, otherwise 1)."""
    save_every: int = 10
    """Rollout batches between checkpoints (0: none)."""
    save_final: bool = True
    """Save the trained model in Hugging Face format at the end."""
    log_rollouts_every: int | None = None
    """Rollout batches between written rollouts (0: only the first; toy 10, otherwise 40)."""
    output_dir: Path | None = None
    """Run folder; must be new or empty (default: runs/ALGORITHM-seedN-TIME)."""
    tracker: Literal["none", "trackio", "wandb", "tensorboard"] = "none"
    """Send the metrics to a tracker as well; its package must be installed."""

    @property
    def preset(self) -> Algorithm:
        """The algorithm preset, with this run's clip range in place of the preset's own where one was given."""
        preset = ALGORITHMS[self.algorithm]
        return preset if self.cliprange is None else dataclasses.replace(preset, cliprange=self.cliprange)

    def to_json(self) -> dict[str, Any]:
        """Every field, in order, as JSON values (paths as text)."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`; an unknown field is an error that names it."""
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise UserError(f"The config has the unknown field {unknown[0]!r}; expected only fields of TrainConfig.")
        paths = {"train_file", "val_file", "output_dir", "vllm_python"}
        fields: dict[str, Any] = {k: Path(v) if k in paths and v is not None else v for k, v in values.items()}
        return cls(**fields)


@dataclass(frozen=True)
class ResolvedConfig(TrainConfig):
    """A `TrainConfig` with every default filled in; made by `resolve`, frozen in the run folder."""

    num_steps: int = 0
    train_examples: int = 0
    val_examples: int = 0
    rollout_batch_size: int = 0
    max_tokens: int = 0
    train_batch_size: int = 0
    gradient_accumulation_steps: int = 0
    recompute_layers: bool = False
    head: HeadName = "full"
    learning_rate: float = 0.0
    eval_every: int = 0
    eval_samples: int = 0
    generation_batch_size: int = 0
    log_rollouts_every: int = 0

    @property
    def measures_mismatch(self) -> bool:
        """Whether each rollout batch is scored once, for the trainer's log-probabilities beside those of generation."""
        return self.generation_backend != "transformers" or self.mismatch_correction != "none"

    @property
    def scores(self) -> bool:
        """Whether each rollout batch is scored before its first update."""
        return self.measures_mismatch or self.preset.importance_reweighting_method != "none"

    @property
    def normalization_constant(self) -> int:
        """Z of the presets that divide the summed loss by a constant: train batch times longest response."""
        return self.train_batch_size * self.max_tokens


TOY_DEFAULTS: dict[str, Any] = {
    "num_steps": 30,
    "train_examples": 4096,
    "val_examples": 256,
    "rollout_batch_size": 128,
    "max_tokens": 80,
    "learning_rate": 5e-4,
    "eval_every": 10,
    "eval_samples": 8,
    "generation_batch_size": 256,
    "log_rollouts_every": 10,
}
ASSIGNMENT_DEFAULTS: dict[str, Any] = {
    "num_steps": 200,
    "train_examples": 6400,
    "val_examples": 1024,
    "rollout_batch_size": 256,
    "max_tokens": 512,
    "learning_rate": 1e-5,
    "eval_every": 10,
    "eval_samples": 1,
    "generation_batch_size": 32,
    "log_rollouts_every": 40,
}
OFF_POLICY_TRAIN_BATCH_SIZE = 8
VLLM_BATCH_SIZE = 256  # sequences that vLLM decodes side by side at most, unless another number is asked for
MICROBATCH_SIZE = 8

# A resumed run may change these; every other field must be what it was.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "num_steps",
        "eval_every",
        "save_every",
        "save_final",
        "log_rollouts_every",
        "tracker",
        "generation_batch_size",
        "vram_budget",
        "vllm_python",
        "vllm_url",
    }
)


def nearest(word: str, choices: list[str] | tuple[str, ...]) -> str:
    """The choice that looks most like `word`.

    >>> nearest("maxr1", list(ALGORITHMS))
    'maxrl'
    """
    return max(choices, key=lambda c: difflib.SequenceMatcher(None, word, c).ratio())


def resolve(config: TrainConfig) -> ResolvedConfig:
    """Fill in every `None` that has a default and check that the numbers fit together.

    Raises:
        UserError: the first thing that does not fit, with the nearest value that would.

    >>> resolve(TrainConfig(algorithm="offpolicy_clip")).train_batch_size
    8
    >>> resolve(TrainConfig(model="some/folder")).learning_rate
    1e-05
    """
    if config.algorithm not in ALGORITHMS:
        guess = nearest(config.algorithm, list(ALGORITHMS))
        raise UserError(
            f"Unknown algorithm {config.algorithm!r}; did you mean {guess!r}? Choose from {', '.join(ALGORITHMS)}."
        )
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    defaults = dict(TOY_DEFAULTS if config.model == TOY else ASSIGNMENT_DEFAULTS)
    if config.generation_backend != "transformers":
        defaults["generation_batch_size"] = min(
            VLLM_BATCH_SIZE, config.rollout_batch_size or defaults["rollout_batch_size"]
        )
    values |= {name: value for name, value in defaults.items() if values[name] is None}
    if values["train_batch_size"] is None:
        off_policy = ALGORITHMS[config.algorithm].off_policy
        values["train_batch_size"] = OFF_POLICY_TRAIN_BATCH_SIZE if off_policy else values["rollout_batch_size"]
    if values["gradient_accumulation_steps"] is None:
        microbatch = 1 if config.low_memory else math.gcd(values["train_batch_size"], MICROBATCH_SIZE)
        values["gradient_accumulation_steps"] = values["train_batch_size"] // max(microbatch, 1)
    if values["recompute_layers"] is None:
        values["recompute_layers"] = config.low_memory
    if values["head"] is None:
        values["head"] = "blocks" if config.low_memory else "full"
    resolved = ResolvedConfig(**values)
    _check_numbers(resolved)
    _check_batches(resolved)
    if resolved.generation_backend != "transformers":
        _check_vllm(resolved)
    if resolved.rollout_quantization != "none" and resolved.generation_backend != "vllm-colocated":
        raise UserError(
            f"--rollout-quantization {resolved.rollout_quantization} needs --generation-backend vllm-colocated, and it "
            f"is {resolved.generation_backend}; set it so, or leave the quantization out."
        )
    return resolved


def _check_numbers(config: ResolvedConfig) -> None:
    at_least_one = ("rollout_batch_size", "group_size", "max_tokens", "train_batch_size", "generation_batch_size",
                    "eval_samples", "train_examples", "val_examples")  # fmt: skip
    at_least_zero = ("num_steps", "eval_every", "save_every", "log_rollouts_every", "warmup_steps", "temperature",
                     "weight_decay", "learning_rate", "seed")  # fmt: skip
    for names, least in ((at_least_one, 1), (at_least_zero, 0)):
        for name in names:
            value = getattr(config, name)
            if not least <= value < math.inf:  # also catches NaN
                raise UserError(f"{flag(name)} is {value}; it must be a number of at least {least}.")
    for name, low, high in (("top_p", 0.0, 1.0), ("adam_beta1", 0.0, 1.0), ("adam_beta2", 0.0, 1.0)):
        value = getattr(config, name)
        inside = low < value <= high if name == "top_p" else low <= value < high
        if not inside:
            raise UserError(f"{flag(name)} is {value}; it must lie between {low} and {high}.")
    for name in ("max_grad_norm", "adam_eps", "vram_budget"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag(name)} is {value}; it must be greater than 0.")
    if config.cliprange is not None and not config.cliprange > 0:
        raise UserError(f"--cliprange is {config.cliprange}; it must be greater than 0.")
    if config.temperature == 0:
        raise UserError("--temperature is 0; training needs samples that differ, so choose a value above 0, such as 1.")


def _check_vllm(config: ResolvedConfig) -> None:
    """What vLLM would refuse, or do otherwise without a word, is said before it starts."""
    if not 0.01 <= config.temperature <= 2:
        raise UserError(
            f"--temperature is {config.temperature:g}, but vLLM samples at 0.01 to 2 alone; choose one of these, or "
            "--generation-backend transformers."
        )
    if config.top_p < 1 and config.temperature != 1:
        raise UserError(
            f"--top-p {config.top_p:g} does not go with --temperature {config.temperature:g} here, because vLLM gives "
            "log-probabilities before the temperature or after top-p; set one of them to 1, or use "
            "--generation-backend transformers."
        )
    if config.generation_backend == "vllm-server":
        _check_server(config)


def _check_server(config: ResolvedConfig) -> None:
    """Weights go to programs of this machine alone, and the server has a Python of its own."""
    try:
        address = urlsplit(config.vllm_url)
        host = address.hostname or ""
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
        plain = config.vllm_url.rstrip("/") == f"http://{address.netloc}" and "@" not in address.netloc
        fits = here and plain and address.port != 0
    except ValueError:  # no address, or no port
        fits = False
    if not fits:
        raise UserError(
            f"--vllm-url is {config.vllm_url!r}; it must be the address of a server on this machine, such as "
            "http://127.0.0.1:8000."
        )
    if config.vllm_python is not None:
        raise UserError(
            "--vllm-python does not go with --generation-backend vllm-server, which has been started by you; leave it "
            "out."
        )


def _check_batches(config: ResolvedConfig) -> None:
    _check_divides(config, "rollout_batch_size", "group_size")
    _check_divides(config, "rollout_batch_size", "train_batch_size")
    _check_divides(config, "train_batch_size", "gradient_accumulation_steps")
    preset = config.preset
    if config.group_size == 1 and preset.baseline == "mean":
        raise UserError(
            f"--group-size 1 leaves {config.algorithm!r} without a signal, because a reward is compared with the mean "
            f"(normalizer: {preset.advantage_normalizer}) of its group; use --group-size 2 or more, or --algorithm rft."
        )
    if not preset.off_policy and config.train_batch_size != config.rollout_batch_size:
        raise UserError(
            f"--train-batch-size {config.train_batch_size} is smaller than --rollout-batch-size "
            f"{config.rollout_batch_size}, which makes updates off-policy, but {config.algorithm!r} is on-policy; make "
            "them equal or choose an offpolicy_ preset or cispo."
        )


def _check_divides(config: ResolvedConfig, whole: str, part: str) -> None:
    total, size = getattr(config, whole), getattr(config, part)
    if not size >= 1:
        raise UserError(f"{flag(part)} is {size}; it must be at least 1.")
    if total % size == 0:
        return
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = max((d for d in divisors if d <= size), default=1)
    above = min((d for d in divisors if d >= size), default=total)
    near = f"{below}" if below == above else f"{below} or {above}"
    raise UserError(
        f"{flag(whole)} {total} is not divisible by {flag(part)} {size}; the nearest {flag(part)} is {near}."
    )


def flag(name: str) -> str:
    """The command-line flag of a config field.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.replace("_", "-")
