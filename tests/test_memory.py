"""The ledger: every expected number is worked out by hand in a comment, or counted on the real toy model."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from a5lib.course import load_algo
from a5lib.course.byte_counts import peak_bytes
from a5lib.engines.plan import UpdateSize, plan_update
from a5lib.errors import UserError
from a5lib.memory import OLMO2_1B, TOY, ModelShape, state_bytes, update_ledger
from a5lib.models import load_policy
from a5lib.synthetic import published_config

ROOT = Path(__file__).parent.parent
SMALL = dataclasses.replace(TOY, layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, vocabulary=10, head_size=2)
# of SMALL: queries 4, keys 2; attention 2*4*4 + 2*4*2 = 48; feed-forward 3*4*8 = 96; norms 4 + 2 + 4 + 4 = 14;
# a layer 158; embedding 40; norm and head 44; all 40 + 2 * 158 + 44 = 400


def test_parameters_of_known_models():
    # a layer: 4 * 2048^2 + 3 * 2048 * 8192 + 4 * 2048 = 67,117,056; 16 of them, 2 * 100,352 * 2048, and 2048
    assert OLMO2_1B.layer_parameters() == 67_117_056
    assert OLMO2_1B.parameters() == 1_484_916_736
    assert SMALL.layer_parameters() == 158
    assert SMALL.parameters() == 400
    assert dataclasses.replace(SMALL, tied=True).parameters() == 360, "a shared matrix counts once"


def test_the_toy_shape_is_the_toy_model():
    model, _ = load_policy("toy")
    assert TOY.parameters() == sum(p.numel() for p in model.parameters())
    body = model.model
    parts = [body.embed_tokens, *body.layers]
    assert TOY.parts()[:-1] == [sum(p.numel() for p in part.parameters()) for part in parts]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # a layer 4 * 4096^2 + 3 * 4096 * 11,008 + 4 * 4096 = 202,391,552; 32 of them and 2 * 100,352 * 4096 + 4096
        ("olmo2-7b", 7_298_617_344),
        # a layer 2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14,336 + 2 * 4096 = 218,112,000; 2 * 128,256 * 4096 + 4096
        ("llama3.1-8b", 8_030_261_248),
    ],
)
def test_a_shape_is_read_from_a_config(name, parameters):
    assert ModelShape.of(published_config(name)).parameters() == parameters


def test_the_shape_of_the_small_one_is_the_constant():
    assert ModelShape.of(published_config("olmo2-1b")).parameters() == OLMO2_1B.parameters()
    assert ModelShape.of(published_config("llama3.1-8b")).norm_first and not OLMO2_1B.norm_first


def test_bytes_of_every_entry_of_the_resident_engine():
    ledger = update_ledger(SMALL, sequences=6, length=5, microbatch=2, head_block=3)
    assert ledger == {
        "weights": 800,
        "gradients": 800,
        "optimizer state": 1600,  # two bf16 moments
        "gradient before it is added": 10 * 4 * 2,  # the embedding is the largest matrix
        "layer inputs": 3 * 10 * 4 * 2,  # two layers and the head, 2 x 5 tokens, 4 numbers of 2 bytes
        # a token: 2 bytes * (2*4 + 2*4 + 2*2 + 4*8 = 52) + 4 bytes * (4*4 + 2*4 + 2*2 + 4 + 2 = 34) = 240
        "layer at work": 10 * 240,
        "logits": 3 * 10 * 20,  # 3 positions, 10 tokens, 20 bytes
    }


def test_without_recomputation_every_layer_is_at_work():
    ledger = update_ledger(SMALL, sequences=6, length=5, microbatch=2, head_block=3, recompute_layers=False)
    assert ledger["layer at work"] == 2 * 10 * 240
    assert ledger["layer inputs"] == 10 * 4 * 2
    assert ledger["logits"] == 3 * 10 * 20, "the head is another switch"


def test_the_full_head_has_the_logits_of_all_positions():
    ledger = update_ledger(SMALL, sequences=6, length=5, microbatch=2, head_block=3, head="full")
    assert ledger["logits"] == 10 * 10 * 20
    assert ledger["layer at work"] == 10 * 240
    fused = update_ledger(SMALL, sequences=6, length=5, microbatch=2, head_block=3, head="fused")
    assert fused["logits"] == 3 * 10 * 20


@pytest.mark.parametrize(("state", "size"), [("fp32", 12), ("bf16", 4), ("bf16_stochastic", 4), ("bf16_kahan", 6)])
def test_bytes_of_optimizer_state(state, size):
    sizes = {"sequences": 1, "length": 1, "microbatch": 1}
    assert update_ledger(SMALL, **sizes, optimizer_state=state)["optimizer state"] == 400 * size
    float32 = update_ledger(SMALL, **sizes, optimizer_state=state, bytes_per_weight=4)
    assert float32["optimizer state"] == 400 * 8, "a float32 parameter has two float32 moments"
    assert float32["weights"] == 400 * 4
    assert (state_bytes(state), state_bytes(state, 4)) == (size, 8)


def test_a_microbatch_larger_than_the_batch_is_the_batch():
    assert update_ledger(SMALL, sequences=2, length=5, microbatch=8) == update_ledger(
        SMALL, sequences=2, length=5, microbatch=2
    )


@pytest.mark.parametrize("name", ["sequences", "length", "microbatch", "head_block"])
def test_a_size_below_one_is_refused(name):
    sizes = {"sequences": 1, "length": 1, "microbatch": 1} | {name: 0}
    with pytest.raises(UserError, match=f"{name} is 0"):
        update_ledger(SMALL, **sizes)


@pytest.mark.parametrize(("name", "value"), [("head", "chunked"), ("optimizer_state", "fp16"), ("bytes_per_weight", 3)])
def test_an_unknown_choice_is_refused(name, value):
    with pytest.raises(UserError, match=str(value)):
        update_ledger(SMALL, sequences=1, length=1, microbatch=1, **{name: value})


def saved_bytes(run, parameters):
    """Bytes of the tensors that autograd keeps while `run` runs, each storage once, parameters left out."""
    storages = {}
    known = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor stays, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_activations_are_those_that_autograd_keeps(dtype):
    model, _ = load_policy("toy")
    model = model.to(dtype)
    hidden = torch.randn(2, 64, 128, dtype=dtype, requires_grad=True)
    places = model.model.rotary_emb(hidden, torch.arange(64).unsqueeze(0))
    layer = model.model.layers[0]
    counted = saved_bytes(lambda: layer(hidden, position_embeddings=places), model.parameters())
    counted -= sum(t.untyped_storage().nbytes() for t in places)  # one table for all layers
    assert counted == 2 * 64 * TOY.activation_bytes_per_token(dtype.itemsize)


PASSES = {
    "plain": {"recompute_layers": False, "head": "full"},
    "recomputed": {},
}


@pytest.mark.reference
@pytest.mark.parametrize("way", PASSES)
def test_the_prediction_bounds_what_an_update_of_the_toy_takes(way):
    model, _ = load_policy("toy")
    algo = load_algo("solutions")
    parts = torch.randint(2, 832, (8, 65), generator=torch.Generator().manual_seed(0)).split(2)
    ids, labels = [p[:, :-1] for p in parts], [p[:, 1:] for p in parts]
    if way == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()

    def loss_of(hidden, m):
        if way == "plain":
            return -algo.log_probs_from_logits(model.lm_head(hidden), labels[m])["log_probs"].mean()
        return -algo.log_probs_in_blocks(hidden, model.lm_head.weight, labels[m])["log_probs"].mean()

    def run():
        for m in range(len(ids)):
            loss_of(model.model(ids[m], use_cache=False).last_hidden_state, m).backward()

    ledger = update_ledger(TOY, sequences=8, length=64, microbatch=2, bytes_per_weight=4, **PASSES[way])
    made = sum(size for name, size in ledger.items() if name not in ("weights", "optimizer state"))
    assert 0.7 * made < peak_bytes(run) < 1.02 * made


@pytest.mark.reference
def test_the_worked_answer_of_notebook_09_has_the_ledgers_numbers():
    answer = (ROOT / "solutions" / "answers.md").read_text(encoding="utf-8").split("## 09_fitting_the_card")[1]
    sizes = {"sequences": 32, "length": 1024, "microbatch": 1}
    plain = update_ledger(OLMO2_1B, **sizes, optimizer_state="fp32", recompute_layers=False, head="full")
    recomputed, bf16 = (update_ledger(OLMO2_1B, **sizes, optimizer_state=state) for state in ("fp32", "bf16"))
    plan = plan_update(OLMO2_1B, UpdateSize(32, 1024, 768), engine="layer_major", optimizer_state="fp32")
    expected = [*(sum(ledger.values()) for ledger in (plain, recomputed, bf16)), plan.peak()]
    assert re.findall(r"\| (\d+\.\d\d) \|", answer.split("## 10")[0]) == [f"{size / 2**30:.2f}" for size in expected]
    assert f"host memory, {sum(plan.host.values()) / 2**30:.2f} GiB with everything there" in answer
