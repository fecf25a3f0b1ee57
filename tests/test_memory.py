"""The ledger: every expected number is worked out by hand in a comment, or counted on the real toy model."""

import dataclasses

import pytest
import torch

from a5lib import doctor
from a5lib.course import load_algo
from a5lib.course.byte_counts import peak_bytes
from a5lib.errors import UserError
from a5lib.memory import OLMO2_1B, STATE_BYTES, TOY, host_ledger, update_ledger
from a5lib.models import load_policy
from starter.layer_major import part_parameters

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


def test_without_recomputation_every_layer_is_at_work_and_all_logits_exist():
    ledger = update_ledger(SMALL, sequences=6, length=5, microbatch=2, low_memory=False)
    assert ledger["layer at work"] == 2 * 10 * 240
    assert ledger["layer inputs"] == 10 * 4 * 2
    assert ledger["logits"] == 10 * 10 * 20


def test_layer_major_holds_two_parts_and_all_layer_inputs():
    ledger = update_ledger(SMALL, sequences=6, length=5, microbatch=2, head_block=3, engine="layer_major")
    assert ledger["weights"] == ledger["gradients"] == 2 * (158 + 158), "the two largest neighbours are two layers"
    assert ledger["optimizer state"] == 400 * 4, "a model smaller than the buckets is there as a whole"
    assert ledger["layer inputs"] == 4 * 30 * 4 * 2, "two layers, the head, and the gradient on its way down"
    assert ledger["layer at work"] == 10 * 240
    big = update_ledger(OLMO2_1B, sequences=8, length=672, microbatch=1, engine="layer_major")
    assert big["weights"] == 2 * (67_117_056 + 100_352 * 2048 + 2048), "the head and the last layer"
    assert big["optimizer state"] == 3 * 4_194_304 * 4


@pytest.mark.parametrize(("state", "size"), [("fp32", 12), ("bf16", 4), ("bf16_stochastic", 4), ("bf16_kahan", 6)])
def test_bytes_of_optimizer_state(state, size):
    sizes = {"sequences": 1, "length": 1, "microbatch": 1}
    assert update_ledger(SMALL, **sizes, optimizer_state=state)["optimizer state"] == 400 * size
    float32 = update_ledger(SMALL, **sizes, optimizer_state=state, bytes_per_weight=4)
    assert float32["optimizer state"] == 400 * 8, "a float32 parameter has two float32 moments"
    assert float32["weights"] == 400 * 4
    assert sum(host_ledger(SMALL, optimizer_state=state).values()) == 400 * (4 + size)


def test_a_microbatch_larger_than_the_batch_is_the_batch():
    assert update_ledger(SMALL, sequences=2, length=5, microbatch=8) == update_ledger(
        SMALL, sequences=2, length=5, microbatch=2
    )


@pytest.mark.parametrize("name", ["sequences", "length", "microbatch", "head_block"])
def test_a_size_below_one_is_refused(name):
    sizes = {"sequences": 1, "length": 1, "microbatch": 1} | {name: 0}
    with pytest.raises(UserError, match=f"{name} is 0"):
        update_ledger(SMALL, **sizes)


@pytest.mark.parametrize(
    ("name", "value"), [("engine", "layered"), ("optimizer_state", "fp16"), ("bytes_per_weight", 3)]
)
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
    "plain": {"low_memory": False},
    "recomputed": {},
    "layer by layer": {"engine": "layer_major"},
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

    def drop(name):
        for parameter in part_parameters(model, name):
            parameter.grad = None

    def run():
        if way == "layer by layer":
            algo.layer_major_backward(model, ids, loss_of, drop)
        else:
            for m in range(len(ids)):
                loss_of(model.model(ids[m], use_cache=False).last_hidden_state, m).backward()

    ledger = update_ledger(TOY, sequences=8, length=64, microbatch=2, bytes_per_weight=4, **PASSES[way])
    made = sum(size for name, size in ledger.items() if name not in ("weights", "optimizer state"))
    assert 0.7 * made < peak_bytes(run) < 1.02 * made


def test_the_doctor_counts_as_the_ledger_does():
    # It must run where torch is missing, so it has numbers of its own.
    assert OLMO2_1B.parameters() == doctor.OLMO2_1B_PARAMETERS
    assert {state: 4 + STATE_BYTES[state] for state in doctor.BYTES_PER_PARAMETER} == doctor.BYTES_PER_PARAMETER
