"""Whose code is tested, and a tiny real model.

`A5_IMPL=starter` tests the student's code and skips what is not written yet; without it the reference is tested.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads that wait for each other on busy cores are slow

import pytest

from a5lib.course import load_algo
from tests.fakes import WordTokenizer
from tests.helpers import tiny_olmo2

IMPL = os.environ.get("A5_IMPL", "solutions")


@pytest.fixture(scope="session")
def impl():
    """The exercise functions under test: the reference, or the student's; a mixture would test neither."""
    assert IMPL in ("solutions", "starter"), f"A5_IMPL={IMPL}: tests take starter or solutions, never a mixture"
    return load_algo(IMPL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except NotImplementedError as error:
        if IMPL != "starter":
            raise
        pytest.skip(f"not written yet: {error}")


@pytest.fixture
def tiny_model():
    """A real OLMo-2 with random weights, a vocabulary of 97 and an untied head."""
    return tiny_olmo2(vocab_size=97)


@pytest.fixture
def tiny_tied_model():
    """The same with the head tied to the embedding."""
    return tiny_olmo2(vocab_size=97, tied=True)


@pytest.fixture
def word_tokenizer():
    return WordTokenizer()
