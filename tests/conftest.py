"""Whose code is tested, what is skipped, and a tiny real model.

`A5_IMPL=starter` tests the student's code and skips what is not written yet; without it the reference is tested. On a
branch without `solutions/` the student's code is tested by default, and what needs the reference is skipped.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads that wait for each other on busy cores are slow

import importlib
import sys

import pytest

from a5lib.course import blank, load_algo
from a5lib.course.exercises import MissingPackage, has_reference, stub_called
from tests.fakes import WordTokenizer
from tests.helpers import FILES, read_exercise, tiny_olmo2

IMPL = os.environ.get("A5_IMPL") or ("solutions" if has_reference() else "starter")
NO_REFERENCE = "needs solutions/, which is not in this version of the course"


@pytest.fixture(scope="session")
def impl():
    """The exercise functions under test: the reference, or the student's; a mixture would test neither."""
    assert IMPL in ("solutions", "starter"), f"A5_IMPL={IMPL}: tests take starter or solutions, never a mixture"
    return load_algo(IMPL)


def given(file):
    """A file of the exercises under test, for the helper functions that come with it."""
    return importlib.import_module(f"{IMPL}.{file}")


def pytest_configure(config):
    config.addinivalue_line("markers", "reference: the test needs solutions/ and is skipped where that is absent")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("reference") and not has_reference():
            item.add_marker(pytest.mark.skip(reason=NO_REFERENCE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from skipping_what_is_not_here())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from skipping_what_is_not_here())


def skipping_what_is_not_here():
    try:
        return (yield)
    except NotImplementedError as error:
        if IMPL != "starter" or not stub_called(error):
            raise
        pytest.skip(f"not written yet: {error}")
    except MissingPackage:
        if has_reference():
            raise
        pytest.skip(NO_REFERENCE)


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


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of both packages, untouched stubs, that a test may change; they are imported from there."""
    if not has_reference():
        pytest.skip(NO_REFERENCE)
    folder = tmp_path / "course"
    for package in ("starter", "solutions"):
        (folder / package).mkdir(parents=True)
        for file in FILES:
            text = read_exercise("solutions", file)
            (folder / package / file).write_text(blank(text) if package == "starter" else text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    for name in exercise_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("A5_IMPL", raising=False)
    yield folder
    for name in exercise_modules():
        del sys.modules[name]  # monkeypatch puts those of the repository back
    importlib.invalidate_caches()


def exercise_modules():
    return [name for name in sys.modules if name.partition(".")[0] in ("starter", "solutions")]
