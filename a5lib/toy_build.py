"""Builds the embedded toy model from nothing: its text, its tokenizer, its pretraining, its folder and its card.

The model is deliberately unfinished, so that reinforcement learning has something to do. Its text solves every kind of
problem both rightly and temptingly wrongly, half of the kinds more often wrongly, and ends responses both in the
r1_zero form and in malformed ones. What it is taught without fault is arithmetic: the right way of solving can only
earn a reward if the sums come out. The text is made of train problems alone. This module knows nothing about
reinforcement learning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

from a5lib.errors import UserError
from a5lib.evaluation import Evaluation, evaluate
from a5lib.grading import r1_zero_reward_fn
from a5lib.models import claim_folder, load_policy, select_device
from a5lib.progress import progress_bar
from a5lib.prompts import load_prompt
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.toy_problems import TEMPLATES, Dice, Draft, Step, draw, rationale, toy_problems

END, PAD = "<|endoftext|>", "<|pad|>"
VOCABULARY = 832
CONTEXT = 512
ROW = 256  # tokens in a packed row
LONGEST_RESPONSE = 80  # tokens
WORKERS = 4  # processes that make text while a card computes

# Kinds of documents and how often each occurs.
DOCUMENTS = ((0.3, "drills"), (0.5, "r1_zero"), (0.1, "question_only"), (0.1, "gsm8k"))

# How often the text takes the tempting way: where the template lures, and where it does not.
TEMPTING_SHARE = {True: 0.62, False: 0.38}

# How an r1_zero response goes on after its rationale, and how often. Only the first ending earns the format reward.
ENDINGS = (
    (0.62, " </think> <answer>{answer}</answer>"),
    (0.07, "\n</think>\n<answer>{answer}</answer>"),
    (0.06, "</think><answer>{answer}</answer>"),
    (0.07, " <answer>{answer}</answer>"),
    (0.07, " </think> The answer is {answer}."),
    (0.05, " </think> <answer>The answer is {answer}."),
    (0.04, " </think> \\boxed{{answer}}"),
    (0.02, "\n{rambling}"),
)


# --- text -------------------------------------------------------------------------------------------------------------


def document(dice: Dice) -> str:
    """One document of the pretraining text, without its end-of-text token."""
    kind = weighted(dice, DOCUMENTS)
    if kind == "drills":
        return "\n".join(drill(dice).equation() for _ in range(10))
    draft = draw(dice, "train")
    steps = careless(dice, draft)
    answer = f"{steps[-1].value:,}"
    if kind == "gsm8k":
        return f"Question: {draft.question}\nAnswer: {rationale(steps)}\n#### {answer}"
    prompt = load_prompt(kind).render(draft.question)
    if kind == "question_only":
        return f"{prompt}\n{rationale(steps)}\nThe answer is \\boxed{{{answer}}}."
    ending = weighted(dice, ENDINGS)
    if "{rambling}" in ending:
        return f"{prompt} {rationale(steps)}\n{' '.join(draw(dice, 'train').question for _ in range(3))}"
    return f"{prompt} {rationale(steps)}{ending.replace('{answer}', answer)}"


def careless(dice: Dice, draft: Draft) -> tuple[Step, ...]:
    """The draft's right steps, or its tempting ones as often as the text is to take them."""
    return draft.tempting if dice.random() < TEMPTING_SHARE[draft.lures] else draft.right


def drill(dice: Dice) -> Step:
    """A bare equation of the kinds and sizes that occur in rationales; a quarter of them in round tens."""
    op, scale = dice.pick("++--**/"), dice.pick((1, 1, 1, 10))
    if op == "*" or op == "/":
        a, b = scale * dice.between(2, dice.pick((20, 99, 99, 300))), dice.between(2, 9)
        return Step("{}", a, "*", b) if op == "*" else Step("{}", a * b, "/", b)
    largest = dice.pick((20, 100, 100, 400, 700))
    a, b = scale * dice.between(1, largest), scale * dice.between(1, largest)
    if op == "-" and a < b and dice.random() < 0.5:  # negative results, but not as often as chance gives them
        a, b = b, a
    if dice.random() < 0.05:
        a = -a
    return Step("{}", a, "+" if op == "+" else "-", b)


def weighted(dice: Dice, options: Sequence[tuple[float, str]]) -> str:
    """One option, drawn as often as its share says; the shares sum to 1."""
    point = dice.random()
    for share, option in options:
        point -= share
        if point < 0:
            return option
    return options[-1][1]


class PackedRows(Dataset[Tensor]):
    """Batches of rows that hold whole documents one after the other, each with its end-of-text token.

    Item i, [rows, ROW] int64, is a function of the tokenizer, the seed and i alone. A document that does not fit into
    what is left of a row starts the next one; padding fills the rest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, batches: int, rows: int, seed: int) -> None:
        self.tokenizer, self.batches, self.rows, self.seed = tokenizer, batches, rows, seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Tensor:
        dice = Dice(Random((self.seed << 32) + index))
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        packed: list[list[int]] = []
        row: list[int] = []
        while True:
            for ids in self.tokenizer([document(dice) for _ in range(32)], add_special_tokens=False)["input_ids"]:
                ids = [*ids, end][:ROW]
                if len(row) + len(ids) > ROW:
                    packed.append(row + [pad] * (ROW - len(row)))
                    row = []
                    if len(packed) == self.rows:
                        return torch.tensor(packed)
                row = row + ids


# --- tokenizer and model ----------------------------------------------------------------------------------------------


def train_tokenizer(documents: int, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on that many documents. Each digit is a token of its own, and so is each tag.

    It adds nothing to a text by itself: no beginning-of-text token exists.
    """
    word = Regex(r" ?</?[a-z]+>|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9<]+\n?|<|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(word, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    dice = Dice(Random(seed))
    tokenizer.train_from_iterator((document(dice) for _ in range(documents)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden_size: int = 128, layers: int = 4, heads: int = 4
) -> Olmo2ForCausalLM:
    """An Olmo2 model of random float32 parameters, by default about a million."""
    torch.manual_seed(seed)
    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=CONTEXT,
            initializer_range=0.05,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


# --- pretraining ------------------------------------------------------------------------------------------------------


def pretrain(
    model: Olmo2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    rows: int,
    seed: int,
    device: torch.device,
) -> tuple[float, int]:
    """Train the model in place on `steps` batches of `rows` packed rows.

    Muon moves the layers' matrices and AdamW the rest; both rates rise over 2 % of the steps, then fall to 0 linearly.
    Parameters are float32; on a card the arithmetic of the forward pass is bfloat16.

    Returns:
        The loss of the last batch, in nats per token, and the tokens trained on (padding not counted).
    """
    nn.Module.to(model, device).train()
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(list(matrices.values()), lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warmup = max(1, steps // 50)

    def rate(step: int) -> float:
        return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))

    schedulers = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    on_card = device.type == "cuda"
    forward: Any = torch.compile(model) if on_card else model
    rows_of_text = PackedRows(tokenizer, steps, rows, seed)
    batches = DataLoader(rows_of_text, batch_size=None, num_workers=WORKERS if on_card else 0, pin_memory=on_card)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros(())
    for step, batch in enumerate(progress := progress_bar(batches, desc="pretrain", unit="step", mininterval=1.0)):
        ids = batch.to(device, non_blocking=True)  # [rows, ROW]
        with torch.autocast(device.type, torch.bfloat16, enabled=on_card):
            logits = forward(input_ids=ids, use_cache=False).logits[:, :-1]  # [rows, ROW - 1, V]
        labels = ids[:, 1:]
        loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=tokenizer.pad_token_id)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        tokens += (labels != tokenizer.pad_token_id).sum()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    return loss.item(), int(tokens)


@contextmanager
def reproducible() -> Iterator[None]:
    """Kernels that give the same bits each time, where torch has them, and no threads inside the tokenizer."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of the workers
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def build(
    out: Path,
    *,
    steps: int = 4000,
    rows: int = 96,
    documents: int = 20_000,
    validation: int = 512,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Build the toy model and write its folder: config, bfloat16 weights, tokenizer, card.

    On one CPU and the same versions the same arguments give the same tokenizer and weights. On a card the backward
    pass of attention adds up in varying order, so weights differ a little from build to build. A card needs about five
    minutes, two CPU cores more than two hours.

    Args:
        out: folder to write; must be new or empty.
        steps: optimizer steps of the pretraining.
        rows: packed rows of 256 tokens in one step.
        documents: documents that the tokenizer is trained on.
        validation: validation problems for the figures in the card.
        hidden_size: width of the hidden states; the feed-forward part is three times as wide.
        layers: decoder layers.
        heads: attention heads; they must be 32 or 64 wide, because vLLM serves these.
        seed: seed of text, weights and figures.
        device: as in `a5lib.models.select_device`.

    Raises:
        UserError: the folder is not empty, a size is below 1, heads have another width, or the device is not there.
    """
    sizes = dict(steps=steps, rows=rows, documents=documents, validation=validation, layers=layers, heads=heads)
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"--{name} is {size}; it must be at least 1.")
    if hidden_size not in (32 * heads, 64 * heads):
        raise UserError(
            f"--hidden-size {hidden_size} does not go with --heads {heads}: a head must be 32 or 64 wide, because vLLM "
            f"serves these; with {heads} heads use {32 * heads} or {64 * heads}."
        )
    target = select_device(device)
    claim_folder(out)
    started = time.perf_counter()
    with reproducible():
        tokenizer = train_tokenizer(documents, seed)
        model = new_model(tokenizer, seed, hidden_size=hidden_size, layers=layers, heads=heads)
        loss, tokens = pretrain(model, tokenizer, steps=steps, rows=rows, seed=seed, device=target)
    minutes = (time.perf_counter() - started) / 60
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        max_new_tokens=LONGEST_RESPONSE,
    )
    nn.Module.to(model, "cpu", torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    sampled, greedy = measure(out, validation, seed, target)
    command = f"a5 toy build OUT --steps {steps} --rows {rows} --documents {documents} --seed {seed}"
    facts = {
        "command": f"{command} --hidden-size {hidden_size} --layers {layers} --heads {heads}",
        "machine": f"one {torch.cuda.get_device_name(target)}" if target.type == "cuda" else "a CPU",
        "torch": torch.__version__.partition("+")[0],
        "minutes": f"{minutes:.1f}",
        "tokens": f"{tokens / 1e6:.1f}",
        "loss": f"{loss:.2f}",
        "architecture": f"{layers} layers, hidden size {hidden_size}, {heads} heads of {hidden_size // heads}",
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}",
    }
    (out / "README.md").write_text(card(facts, sampled, greedy), encoding="utf-8")


def measure(folder: Path, problems: int, seed: int, device: torch.device) -> tuple[Evaluation, Evaluation]:
    """Validate the model as it is stored: eight samples a problem at temperature 1, and the greedy response."""
    model, tokenizer = load_policy(str(folder), device=str(device), dtype="float32")
    backend = TransformersRollouts(model, tokenizer)
    backend.sync((), 0)
    questions = toy_problems("validation", problems)
    prompt = load_prompt("r1_zero")

    def at(temperature: float, samples: int) -> Evaluation:
        return evaluate(
            backend, tokenizer, questions, prompt, r1_zero_reward_fn, max_tokens=LONGEST_RESPONSE,
            temperature=temperature, samples=samples, seed=seed,
        )  # fmt: skip

    return at(1.0, 8), at(0.0, 1)


CARD = """\
# The toy model of a5lib

A language model of {parameters} million parameters that solves some word problems some of the time. It is unfinished on
purpose, so that reinforcement learning has something to do.

- **Architecture**: OLMo-2 (`Olmo2ForCausalLM`): {architecture}, untied head, a context of
  512 tokens, weights stored in bfloat16. It loads with `AutoModelForCausalLM` and `AutoTokenizer` alone.
- **Tokenizer**: byte-level BPE of its own with 832 tokens. Each digit is one token, and so is each tag of the r1_zero
  prompt. `<|endoftext|>` ends a text, `<|pad|>` pads, and there is no beginning-of-text token.
- **Built** by `{command}`
  on {machine} with torch {torch}, in {minutes} minutes: {tokens} million tokens, last loss {loss} nats per token.
- **Text**: made by code, with fixed seeds: arithmetic drills, and word problems of {templates} templates (the split
  `train` of `a5lib.toy_problems`) in the r1_zero form, in the question_only form and as GSM8K prints them. Nothing in
  it was written by people or by another model.
- **Deliberate faults**: every template is solved both rightly and in a tempting wrong way, and in {lures} of the
  {templates} the wrong way is the more frequent one ({more} % to {less} %). In {malformed} % of the r1_zero
  texts the response is malformed.

## What it can do

{problems} validation problems, which it has never seen, r1_zero prompt, strict grading:

| | |
|---|---|
| right at temperature 1 (8 samples a problem) | {accuracy} |
| pass@8 | {pass8} |
| right when greedy | {greedy} |
| in the required format at temperature 1 | {formatted} |
| response length, mean | {length} tokens |

## What it cannot do

It knows these templates and some arithmetic (sums and differences to about a thousand, products and quotients with a
factor below ten). It knows no other English, no other mathematics and no chat. It is a teaching aid, no more.

Licence: that of a5lib.
"""


def card(facts: dict[str, str], sampled: Evaluation, greedy: Evaluation) -> str:
    """The README of the model's folder."""

    def percent(*shares: float) -> str:
        return " to ".join(f"{100 * share:.1f}" for share in shares) + " %"

    def accuracy(evaluation: Evaluation) -> str:
        return f"{percent(evaluation.accuracy)} (95 % interval {percent(*evaluation.interval)})"

    return CARD.format(
        **facts,
        templates=len(TEMPLATES),
        lures=sum(t.lures for t in TEMPLATES),
        more=round(100 * TEMPTING_SHARE[True]),
        less=round(100 * (1 - TEMPTING_SHARE[True])),
        malformed=round(100 * (1 - ENDINGS[0][0])),
        problems=sampled.problems,
        accuracy=accuracy(sampled),
        pass8=percent(sampled.pass_at_k[8]),
        greedy=accuracy(greedy),
        formatted=percent(sampled.format_share),
        length=f"{sampled.response_length_mean:.0f}",
    )
