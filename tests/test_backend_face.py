"""What every generation backend does alike: the same tests over transformers, colocated vLLM and a vLLM server.

vLLM is the scripted engine here, in the real worker and behind the real HTTP client; transformers is itself.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from a5lib.errors import UserError
from a5lib.rollouts.transformers_backend import TransformersRollouts
from a5lib.rollouts.vllm_server import VllmServer
from tests.fake_server import ByteTokenizer, FakeServer
from tests.helpers import tiny_olmo2, tiny_tokenizer
from tests.vllm_tools import Rig, held, weights

PROMPTS = [[5, 6, 7], [8], [9, 10]]


class Transformers:
    context = 160

    def __init__(self, folder):
        self.model, self.asked = tiny_olmo2(seed=3), 0
        self.model.register_forward_pre_hook(self.count)
        self.backend = TransformersRollouts(self.model, tiny_tokenizer())
        self.weights = dict(self.model.named_parameters())

    def count(self, *_):
        self.asked += 1

    def close(self):
        self.backend.close()


class Colocated:
    context = 64

    def __init__(self, folder):
        self.rig = Rig(folder, context=self.context)
        self.backend, self.weights = self.rig.backend, self.rig.weights

    @property
    def asked(self):
        return sum(event.call == "generate" for event in self.backend.events)

    def close(self):
        self.backend.close()


class Server:
    context = 64

    def __init__(self, folder):
        self.server, self.weights = FakeServer(context=self.context), weights()
        self.backend = VllmServer(
            self.weights.items(), ByteTokenizer(), self.server.url, model="fake/model", max_model_len=self.context
        )

    @property
    def asked(self):
        return len(self.server.requests)

    def close(self):
        self.backend.close()
        self.server.close()


@pytest.fixture(scope="module", params=[Transformers, Colocated, Server], ids=lambda kind: kind.__name__.lower())
def shared(request, tmp_path_factory):
    face = request.param(tmp_path_factory.mktemp("face"))
    face.sync = lambda step=0: face.backend.sync(face.weights.items(), step)
    yield face
    face.close()


@pytest.fixture
def face(shared):
    """The backend at rest."""
    shared.backend.release()
    shared.backend.synced_step = None
    return shared


def generate(face, prompts=PROMPTS, **options):
    return face.backend.generate(prompts, **{"n": 4, "max_tokens": 8, "temperature": 1.0, "seed": 0} | options)


def ids(completions):
    return [tuple(c.token_ids) for c in completions]


def test_V01_generation_needs_a_sync(face):
    asked = face.asked
    with pytest.raises(RuntimeError, match=r"generate\(\) was called before sync\(\): the weights are unknown; call s"):
        generate(face)
    assert face.asked == asked, "the engine was asked"
    face.backend.start()
    face.backend.start()
    with pytest.raises(RuntimeError, match=r"before sync\(\)"):
        generate(face)
    face.sync()
    assert len(generate(face)) == 12


def test_completions_come_prompt_by_prompt_with_a_log_prob_for_each_token(face):
    face.sync()
    completions = generate(face)
    assert [c.prompt_index for c in completions] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    for c in completions:
        assert 1 <= len(c.token_ids) == len(c.log_probs) <= 8
        assert all(isinstance(i, int) for i in c.token_ids) and all(p <= 0 for p in c.log_probs)
        assert c.finish_reason in ("stop", "length") and isinstance(c.text, str)
    backwards = generate(face, PROMPTS[::-1], temperature=0.0, n=1)
    assert ids(backwards) == ids(generate(face, temperature=0.0, n=1))[::-1], "a completion of another prompt"


def test_V02_every_sync_brings_all_weights(face):
    face.sync()
    first = generate(face)
    name = "model.norm.weight"
    with torch.no_grad():
        face.weights[name] *= -1.0
        face.backend.release()
        face.sync(1)
        second = generate(face)
        face.weights[name] *= -1.0
    assert ids(second) != ids(first), "the weights, or cached keys and values, are of the step before"
    face.backend.release()
    face.sync(2)
    assert generate(face) == first


def test_V06_the_completions_of_a_group_differ_and_a_seed_repeats_them(face):
    face.sync()
    first = generate(face, seed=1)
    assert len(set(ids(first))) == 12, "one random stream for the whole group gives identical responses"
    assert generate(face, seed=1) == first
    assert ids(generate(face, PROMPTS[:1], seed=1)) == ids(first)[:4], "a completion depends on the other prompts"
    assert not set(ids(generate(face, seed=2))) & set(ids(first)), "the next step must not repeat this step's responses"


def test_at_temperature_0_the_seed_makes_no_difference(face):
    face.sync()
    greedy = generate(face, temperature=0.0)
    assert greedy == generate(face, temperature=0.0, seed=9)
    assert len(set(ids(greedy))) == 3, "one response to each prompt"


def test_V11_prompts_that_are_too_long_are_named_before_the_engine_is_asked(face):
    face.sync()
    asked, context = face.asked, face.context
    both = rf"number 1, 2, do not fit: prompt 2 has {context} tokens and the context is {context}; "
    with pytest.raises(UserError, match=both):
        generate(face, [[3] * 5, [3] * (context - 3), [3] * context], max_tokens=4)
    with pytest.raises(UserError, match=r"number 1, do not fit: .* use --max-tokens 3 or fewer, or shorter prompts"):
        generate(face, [[3] * 5, [3] * (context - 3)], max_tokens=4)
    with pytest.raises(UserError, match="Prompt 1 has no tokens"):
        generate(face, [[3], []])
    assert face.asked == asked
    assert len(generate(face, [[3] * (context - 4)], n=1, max_tokens=4)) == 1, "exactly the context fits"


def test_V12_the_stop_string_is_kept(face):
    face.sync()
    whole = generate(face, PROMPTS[:1], n=1, temperature=0.0)[0]
    assert whole.finish_reason == "length"
    stop = whole.text[2:4]
    ended = generate(face, PROMPTS[:1], n=1, temperature=0.0, stop=[stop])[0]
    assert (ended.text[-2:], ended.finish_reason) == (stop, "stop")


def test_progress_sums_up_and_its_own_fault_comes_through(face):
    counts = []
    face.sync()
    completions = generate(face, progress=counts.append)
    assert sum(counts) == 12 and min(counts) >= 0

    def fail(count):
        raise ZeroDivisionError("the bar's own fault")

    with pytest.raises(ZeroDivisionError, match="the bar's own fault"):
        generate(face, progress=fail)
    face.backend.release()
    face.sync()
    assert generate(face) == completions, "the backend goes on"


def test_the_callers_random_state_is_left_alone(face):
    def states():
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    face.sync()
    generate(face)
    face.backend.release()
    assert states() == before


def test_the_channel_is_none_or_holds_every_weight(face):
    channel = face.backend.channel
    assert channel is None or {n: t.shape for n, t in channel.tensors.items()} == {
        n: w.shape for n, w in face.weights.items()
    }
    assert isinstance(face.backend.takes_card, bool)


@pytest.mark.parametrize("kind", [Transformers, Colocated, Server])
def test_release_and_close_are_harmless_at_any_time(kind, tmp_path):
    before = held()
    face = kind(tmp_path)
    face.backend.release()
    face.backend.sync(face.weights.items(), 0)
    face.backend.release()
    face.backend.release()
    for _ in range(2):
        face.backend.close()
        face.backend.release()
    face.close()
    assert held() == before, "shared memory, sockets or files are left"
