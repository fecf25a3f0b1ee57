"""The toy problems (splits, arithmetic, variety), the toy model as it lies in the package, and its builder in small."""

import hashlib
import json
import re
from random import Random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from a5lib import toy_build, toy_problems
from a5lib.data import load_gsm8k
from a5lib.errors import UserError
from a5lib.evaluation import evaluate
from a5lib.grading import r1_zero_reward_fn
from a5lib.models import TOY_MODEL_DIR
from a5lib.prompts import load_prompt
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.toy_problems import SPLITS, TEMPLATES, Dice, Step, draw, to_gsm8k_json

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
EQUATION = re.compile(r"(-?[0-9,]+)([-+*/])(-?[0-9,]+)=(-?[0-9,]+)")

# The answer of each template, from the numbers in the order in which its question names them.
ANSWERS = {
    "more_than": lambda a, b: a - b,
    "fewer_than": lambda a, b: a + b,
    "colder": lambda a, b: a - b,
    "boxes": lambda a, b: a * b,
    "share": lambda a, b: a / b,
    "boxes_then_gives": lambda a, b, c: a * b - c,
    "change": lambda a, price, paid: paid - a * price,
    "weeks_of_days": lambda a, weeks: 7 * a * weeks,
    "together": lambda a, b: 2 * a + b,
    "times_as_many": lambda a, b: a * (b + 1),
    "half_price": lambda a, b: a * b / 2,
    "discount": lambda price, percent: price * (100 - percent) / 100,
    "elevator": lambda a, down, up: a - down + up,
    "bills": lambda a, bills, each: a - bills * each,
    "empty_seats": lambda rows, seats, empty: rows * (seats - empty),
    "give_then_share": lambda a, kept, friends: (a - kept) / friends,
    "wages": lambda a, b, c: a * b * c,
    "saving": lambda cost, each, weeks: cost - each * weeks,
    "ages": lambda a, b, c: a + b + c,
    "round_trips": lambda miles, days: 2 * miles * days,
    "leaks": lambda a, b, hours: a - b * hours,
    "two_kinds": lambda a, b, c, d: a * b + c * d,
    "legs": lambda hens, two, cows, four: hens * two + cows * four,
    "average": lambda a, b, c: (a + b + c) / 3,
    "quiz": lambda won, rounds_won, lost, rounds_lost: won * rounds_won - lost * rounds_lost,
    "two_sorts_of_boxes": lambda a, b, c, d, e: a * b + c * d - e,
    "profit": lambda a, b, c, d, e: a * b + c * d - e,
}


def number(text):
    return int(text.replace(",", ""))


def numbers_of(question):
    return [number(n) for n in re.findall(r"[0-9]+(?:,[0-9]{3})*", question)]


def drafts(split, count, seed=0):
    dice = Dice(Random(seed))
    return [draw(dice, split) for _ in range(count)]


def without_names(question):
    """A question's kind and numbers: its words less those that a template fills in freely."""
    words = {*toy_problems.NAMES, *toy_problems.THINGS, *toy_problems.GROUPS, *toy_problems.GOODS, *toy_problems.PLACES}
    return re.sub("|".join(rf"\b{word}\b" for word in sorted(words)), "_", question)


# --- problems ---------------------------------------------------------------------------------------------------------


def test_splits_share_no_problem_under_any_name():
    kinds = {split: {without_names(p.question) for p in toy_problems.toy_problems(split, 4096)} for split in SPLITS}
    for one in SPLITS:
        for other in SPLITS:
            if one != other:
                assert not kinds[one] & kinds[other], f"{one} and {other} share a problem: is the split left to chance?"


def test_problems_are_distinct_and_a_longer_list_continues_a_shorter_one():
    long = toy_problems.toy_problems("train", 4096)
    assert len({without_names(p.question) for p in long}) == 4096, "problems are counted twice"
    assert toy_problems.toy_problems("train", 100) == long[:100]
    assert toy_problems.toy_problems("train", 100, seed=1) != long[:100], "the seed changes nothing"


def test_problems_are_the_same_everywhere():
    text = json.dumps([to_gsm8k_json(p) for split in SPLITS for p in toy_problems.toy_problems(split, 50, seed=7)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digest == "cfe8fd67a717499b", "the problems changed: build the toy model and the committed runs again"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_answers_follow_from_the_question(template):
    dice = Dice(Random(3))
    for _ in range(200):
        draft = template.draw(dice)
        expected = ANSWERS[template.name](*numbers_of(draft.question))
        assert draft.problem().answer == str(int(expected)) and expected == int(expected), draft.question
        assert draft.tempting[-1].value != expected, f"the tempting way is right: {draft.question}"


def test_every_line_of_a_rationale_is_one_true_equation():
    for draft in drafts("train", 3000):
        for steps in (draft.right, draft.tempting):
            for line in toy_problems.rationale(steps).splitlines():
                [(a, op, b, c)] = EQUATION.findall(line)
                assert OPERATIONS[op](number(a), number(b)) == number(c), line
                for n in (a, b, c):
                    assert n == f"{number(n):,}", f"{n} in {line!r} has its commas in the wrong places"
        assert draft.problem().answer == str(draft.right[-1].value)


def test_problems_vary():
    problems = toy_problems.toy_problems("validation", 2000)
    answers = [int(p.answer) for p in problems]
    assert sum(a < 0 for a in answers) > 0.05 * 2000, "too few negative answers"
    assert sum(abs(a) >= 1000 for a in answers) > 0.05 * 2000, "too few answers with commas"
    assert {p.rationale.count("\n") + 1 for p in problems} == {1, 2, 3, 4}
    assert len(set(answers)) > 500
    assert len(TEMPLATES) >= 20 and abs(sum(t.lures for t in TEMPLATES) - len(TEMPLATES) / 2) <= 1
    drawn = {(d.template, d.numbers) for d in drafts("validation", 8000)}
    distinct = {t.name: sum(template == t.name for template, _ in drawn) for t in TEMPLATES}
    assert min(distinct.values()) >= 25, f"a template with few validation problems teaches nothing: {distinct}"


def test_gsm8k_records_load_as_the_problems_they_came_from(tmp_path):
    problems = toy_problems.toy_problems("tuning", 300)
    path = tmp_path / "tuning.jsonl"
    path.write_text("".join(json.dumps(to_gsm8k_json(p)) + "\n" for p in problems), encoding="utf-8")
    assert load_gsm8k(path) == problems


def test_too_many_problems_and_unknown_splits_are_refused():
    with pytest.raises(UserError, match="there are enough different ones for 5,000"):
        toy_problems.toy_problems("validation", 5001)
    with pytest.raises(UserError, match="train, tuning, validation"):
        toy_problems.toy_problems("test", 1)


def test_a_division_with_a_remainder_is_an_error():
    with pytest.raises(AssertionError, match="7/2"):
        _ = Step("{}", 7, "/", 2).value


# --- the model in the package -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy():
    return AutoModelForCausalLM.from_pretrained(TOY_MODEL_DIR), AutoTokenizer.from_pretrained(TOY_MODEL_DIR)


def test_model_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in TOY_MODEL_DIR.iterdir()}
    assert set(files) == {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                          "tokenizer_config.json"}  # fmt: skip
    assert sum(files.values()) <= 4_000_000


def test_model_is_an_olmo2_that_other_engines_serve(toy):
    model, tokenizer = toy
    config = model.config
    assert type(model).__name__ == "Olmo2ForCausalLM"
    assert config.hidden_size // config.num_attention_heads in (32, 64), "vLLM refuses this head size"
    assert not config.tie_word_embeddings
    assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 5_000_000
    assert model.dtype == torch.bfloat16
    assert config.vocab_size == len(tokenizer)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == config.pad_token_id == tokenizer.pad_token_id


def test_tokenizer_round_trips_and_splits_digits_and_tags(toy):
    _, tokenizer = toy
    texts = ["1,234.5 - 67", " <think> a </think> <answer>-5</answer>", "naïve  \n\n 数学 <b", "x\ty"]
    texts += [to_gsm8k_json(p)["answer"] for p in toy_problems.toy_problems("validation", 100)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234")) == list("1234"), "each digit is one token"
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert len(tokenizer.encode(f" {tag}")) == 1
    assert len(tokenizer.encode("</answer>")) == 1
    for id in range(len(tokenizer)):
        assert len(re.findall("[0-9]", tokenizer.decode([id]))) <= 1, "a token of several digits"
    prompt = load_prompt("r1_zero").render("How many?")
    assert tokenizer.encode(prompt) == tokenizer.encode(prompt, add_special_tokens=False), "special tokens were added"
    assert len(tokenizer.encode(prompt)) < 60, "the preamble costs time in every rollout"


def test_good_responses_fit_the_longest_response(toy):
    _, tokenizer = toy
    problems = toy_problems.toy_problems("validation", 1000)
    good = [f" {p.rationale} </think> <answer>{int(p.answer):,}</answer>" for p in problems]
    assert all(r1_zero_reward_fn(text, p.answer)["reward"] == 1 for text, p in zip(good, problems, strict=True))
    lengths = [len(tokenizer.encode(text)) for text in good]
    assert max(lengths) <= toy_build.LONGEST_RESPONSE
    assert sum(lengths) / len(lengths) < 42


def test_base_model_is_unfinished_as_its_card_says(toy):
    model, tokenizer = toy
    backend = TransformersRollouts(model.float(), tokenizer)
    backend.sync((), 0)
    problems = toy_problems.toy_problems("validation", 64)
    prompt = load_prompt("r1_zero")

    def at(temperature, samples):
        return evaluate(backend, tokenizer, problems, prompt, r1_zero_reward_fn, max_tokens=toy_build.LONGEST_RESPONSE,
                        temperature=temperature, samples=samples, seed=0)  # fmt: skip

    sampled, greedy = at(1.0, 4), at(0.0, 1)
    assert 0.2 < sampled.accuracy < 0.42  # 30 % on 512 problems
    assert 0.5 < sampled.format_share < 0.7
    assert sampled.pass_at_k[4] > 0.6
    assert greedy.accuracy <= 0.65
    assert greedy.accuracy < sampled.pass_at_k[4], "nothing for reinforcement learning to find"


# --- the builder ------------------------------------------------------------------------------------------------------


def test_committed_tokenizer_is_what_the_command_trains(tmp_path, toy):
    tokenizer = toy_build.train_tokenizer(documents=20_000, seed=0)
    assert tokenizer.get_vocab() == toy[1].get_vocab(), "the text changed: build the toy model again"


def test_pretraining_text_holds_no_validation_problem():
    held_out = {without_names(p.question) for s in ("tuning", "validation") for p in toy_problems.toy_problems(s, 5000)}
    dice = Dice(Random(5))
    questions = []
    for text in (toy_build.document(dice) for _ in range(4000)):
        questions += re.findall(r"^(?:User: |Question: |)(.*[?])$", text, re.MULTILINE)
    assert len(questions) > 2000
    assert not held_out & {without_names(question) for question in questions}


def test_pretraining_text_is_wrong_and_malformed_as_often_as_it_says():
    dice = Dice(Random(0))
    shares = {}
    for lures in (True, False):
        of_kind = [d for d in drafts("train", 4000) if d.lures == lures]
        shares[lures] = sum(toy_build.careless(dice, d) == d.tempting for d in of_kind) / len(of_kind)
    assert shares[True] == pytest.approx(0.62, abs=0.04) and shares[False] == pytest.approx(0.38, abs=0.04)
    responses = [d.partition("Assistant: <think>")[2] for d in (toy_build.document(dice) for _ in range(4000))]
    formats = [r1_zero_reward_fn(r, "0")["format_reward"] for r in responses if r]
    assert sum(formats) / len(formats) == pytest.approx(0.62, abs=0.04)
    assert sum(share for share, _ in toy_build.ENDINGS) == pytest.approx(1)
    assert sum(share for share, _ in toy_build.DOCUMENTS) == pytest.approx(1)


def test_packed_rows_hold_whole_documents_and_depend_on_seed_and_index_alone(toy):
    _, tokenizer = toy
    batches = toy_build.PackedRows(tokenizer, 10, 8, seed=3)
    batch = batches[4]
    assert batch.shape == (8, toy_build.ROW) and len(batches) == 10
    assert torch.equal(batch, toy_build.PackedRows(tokenizer, 10, 8, seed=3)[4])
    assert not torch.equal(batch, batches[5])
    assert not torch.equal(batch, toy_build.PackedRows(tokenizer, 10, 8, seed=4)[4])
    for row in batch.tolist():
        used = row[: row.index(tokenizer.pad_token_id)] if tokenizer.pad_token_id in row else row
        assert used[-1] == tokenizer.eos_token_id or len(used) == toy_build.ROW, "a document was cut"
        assert set(row[len(used) :]) <= {tokenizer.pad_token_id}


def test_build_in_small_writes_a_model_twice_alike(tmp_path, capsys):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        toy_build.build(folder, steps=3, rows=2, documents=300, validation=2, seed=1, device="cpu")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        one, two = ((folder / name).read_bytes() for folder in folders)
        assert one == two, f"{name} differs between two builds with one seed"
    card = (folders[0] / "README.md").read_text(encoding="utf-8")
    assert "a5 toy build OUT --steps 3 --rows 2 --documents 300 --seed 1" in card and "on a CPU" in card
    assert AutoModelForCausalLM.from_pretrained(folders[0]).dtype == torch.bfloat16
    with pytest.raises(UserError, match="is not empty"):
        toy_build.build(folders[0], steps=1, device="cpu")
    with pytest.raises(UserError, match="--rows is 0"):
        toy_build.build(tmp_path / "three", rows=0, device="cpu")


def test_a_larger_toy_model_has_heads_that_vllm_serves(tmp_path):
    small = dict(steps=1, rows=1, documents=300, validation=2, device="cpu")
    toy_build.build(tmp_path / "large", hidden_size=192, layers=2, heads=3, **small)
    config = AutoConfig.from_pretrained(tmp_path / "large")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (192, 2, 3)
    card = (tmp_path / "large" / "README.md").read_text(encoding="utf-8")
    assert "2 layers, hidden size 192, 3 heads of 64" in card and "--hidden-size 192 --layers 2 --heads 3" in card
    with pytest.raises(UserError, match=r"--hidden-size 192 does not go with --heads 12: .* use 384 or 768"):
        toy_build.build(tmp_path / "other", hidden_size=192, heads=12, **small)
    assert not (tmp_path / "other").exists()


def test_pretraining_lowers_the_loss():
    tokenizer = toy_build.train_tokenizer(300, seed=0)
    loss = {}
    for steps in (1, 12):
        model = toy_build.new_model(tokenizer, seed=0)
        loss[steps], tokens = toy_build.pretrain(
            model, tokenizer, steps=steps, rows=4, seed=0, device=torch.device("cpu")
        )
        assert 0.6 * steps * 4 * 256 < tokens < steps * 4 * 256, "padding is not to be counted"
    assert loss[12] < loss[1] - 1
