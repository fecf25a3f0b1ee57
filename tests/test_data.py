"""GSM8K files, the order in which problems are drawn, and the download (from a server on this machine)."""

import json
import os
import random
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from a5lib.data import GSM8K_ROWS, BatchSampler, download_gsm8k, load_gsm8k
from a5lib.errors import UserError
from a5lib.records import Problem

SAMPLE = {"question": "How many?", "answer": "He has 1000+80=$<<1000+80=1080>>1,080\n#### 1,080"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(count):
    return [Problem(f"question {i}", "", str(i)) for i in range(count)]


def test_D01_gold_parsing(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [SAMPLE, {"question": "q", "answer": "2 - 9 = <<2-9=-7>>-7\n#### -7"}])
    assert load_gsm8k(path) == [
        Problem("How many?", "He has 1000+80=$1,080", "1080"),
        Problem("q", "2 - 9 = -7", "-7"),
    ]


@pytest.mark.skipif("A5_GSM8K" not in os.environ, reason="set A5_GSM8K to a folder with the files of `a5 data gsm8k`")
def test_D01_real_files():
    folder = Path(os.environ["A5_GSM8K"])
    questions = {}
    for split, commas, negative in (("train", 79, {"-7", "-47", "-12"}), ("test", 14, {"-10", "-3"})):
        path = folder / f"gsm8k-{split}.jsonl"
        problems = load_gsm8k(path)
        assert len(problems) == GSM8K_ROWS[split]
        assert all(re.fullmatch(r"-?\d+", problem.answer) for problem in problems)
        assert {problem.answer for problem in problems if problem.answer.startswith("-")} == negative
        raw = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
        assert all(text.count("####") == 1 for text in raw)
        assert sum("," in text.partition("####")[2] for text in raw) == commas
        assert not any("<<" in problem.rationale or "####" in problem.rationale for problem in problems)
        questions[split] = {problem.question for problem in problems}
    assert not questions["train"] & questions["test"]


def test_D03_limits(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [SAMPLE, SAMPLE | {"question": "second"}])
    assert load_gsm8k(path, max_examples=0) == [], "did zero still read a row?"
    assert [p.question for p in load_gsm8k(path, max_examples=1)] == ["How many?"]
    assert len(load_gsm8k(path, max_examples=9)) == 2
    with pytest.raises(ValueError, match="-1"):
        load_gsm8k(path, max_examples=-1)


def test_D03_order_is_shuffled_and_seeded():
    problems = numbered(100)
    first = BatchSampler(problems, 8, seed=0).next_batch()
    assert first == BatchSampler(problems, 8, seed=0).next_batch()
    assert first != problems[:8], "an unshuffled sampler trains on the file's beginning only"
    assert first != BatchSampler(problems, 8, seed=1).next_batch()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        ([json.dumps(SAMPLE), "{not json"], "Line 2 .* not JSON"),
        (["", "", "[" * 100_000], "Line 3 .* not JSON"),
        (["9" * 5000], "Line 1 .* not JSON"),
        (["[1]"], "Line 1 .* no text field `question`"),
        ([json.dumps({"question": "q"})], "Line 1 .* no text field `answer`"),
        ([json.dumps({"question": "q", "answer": 3})], "Line 1 .* no text field `answer`"),
        ([json.dumps(SAMPLE), json.dumps({"question": "q", "answer": "42"})], "Line 2 .* no answer after `####`"),
        ([json.dumps({"question": "q", "answer": "42\n#### "})], "Line 1 .* no answer after `####`"),
    ],
)
def test_bad_files_name_the_line(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_gsm8k(path)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(UserError, match=r"no file .*none.jsonl.*a5 data gsm8k"):
        load_gsm8k(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no file"):
        load_gsm8k(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(UserError, match="UTF-8"):
        load_gsm8k(path)


def test_windows_file_is_read(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SAMPLE).encode() + b"\r\n\r\n" + json.dumps(SAMPLE).encode())
    assert [p.answer for p in load_gsm8k(path)] == ["1080", "1080"]


@pytest.mark.parametrize(("count", "size"), [(10, 3), (7, 7), (8, 4), (5, 4), (3, 1), (1, 1)])
def test_epochs_have_no_repeats_and_batches_no_duplicates(count, size):
    problems = numbered(count)
    sampler = BatchSampler(problems, size, seed=3)
    batches = [sampler.next_batch() for _ in range(6 * count)]
    drawn = [problem for batch in batches for problem in batch]
    epochs = [drawn[start : start + count] for start in range(0, len(drawn), count)]
    for epoch in epochs:
        assert set(epoch) == set(problems), "an epoch must hold every problem once"
    assert all(len(set(batch)) == size for batch in batches), "a batch over the epoch's border repeats a prompt"
    if count >= 5:
        assert epochs[0] != epochs[1], "each epoch needs a fresh order"


def test_first_problem_of_an_epoch_is_uniform():
    problems = numbered(4)
    counts = dict.fromkeys(problems, 0)
    for seed in range(400):
        counts[BatchSampler(problems, 1, seed).next_batch()[0]] += 1
    assert all(60 <= count <= 140 for count in counts.values()), counts  # 100 each, standard deviation 8.7


def test_resume_is_exact():
    problems = numbered(11)
    for done in range(12):
        sampler = BatchSampler(problems, 4, seed=5)
        for _ in range(done):
            sampler.next_batch()
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = BatchSampler(problems, 4, seed=5)
        resumed.next_batch()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [resumed.next_batch() for _ in range(9)] == [sampler.next_batch() for _ in range(9)]


def test_sampler_does_not_touch_the_global_random_state():
    random.seed(0)
    before = random.getstate()
    BatchSampler(numbered(9), 4, seed=0).next_batch()
    assert random.getstate() == before


def test_resume_refuses_another_order():
    state = BatchSampler(numbered(10), 2, seed=0).state_dict()
    for other, name in (
        (BatchSampler(numbered(10), 2, seed=1), "seed"),
        (BatchSampler(numbered(10), 5, seed=0), "batch_size"),
        (BatchSampler(numbered(9), 2, seed=0), "problems"),
    ):
        with pytest.raises(UserError, match=name):
            other.load_state_dict(state)
    with pytest.raises(UserError, match="no batch's end"):
        BatchSampler(numbered(10), 2, seed=0).load_state_dict(state | {"position": 3})


@pytest.mark.parametrize("size", [0, -1, 6])
def test_sampler_refuses_sizes_that_cannot_be_drawn(size):
    with pytest.raises(UserError, match=f"batch of {size} prompts"):
        BatchSampler(numbered(5), size, seed=0)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder served on the loopback address: (folder, its url)."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def serve_gsm8k(folder, train_rows=GSM8K_ROWS["train"]):
    write_rows(folder / "train.jsonl", [SAMPLE] * train_rows)
    write_rows(folder / "test.jsonl", [SAMPLE] * GSM8K_ROWS["test"])


def test_download(server, tmp_path):
    served, url = server
    serve_gsm8k(served)
    paths = download_gsm8k(tmp_path / "new" / "data", url)
    assert {split: len(load_gsm8k(path)) for split, path in paths.items()} == {"train": 7473, "test": 1319}
    assert sorted(os.listdir(tmp_path / "new" / "data")) == ["gsm8k-test.jsonl", "gsm8k-train.jsonl"]
    (served / "train.jsonl").unlink()
    assert download_gsm8k(tmp_path / "new" / "data", url) == paths, "a complete file is not downloaded again"


def test_download_of_part_of_a_file_leaves_nothing(server, tmp_path):
    served, url = server
    serve_gsm8k(served, train_rows=7472)
    with pytest.raises(UserError, match="not the whole GSM8K train file of 7473 rows"):
        download_gsm8k(tmp_path / "data", url)
    assert os.listdir(tmp_path / "data") == []


def test_download_of_something_else_leaves_nothing(server, tmp_path):
    served, url = server
    (served / "train.jsonl").write_text("<html>Please log in</html>", encoding="utf-8")
    with pytest.raises(UserError, match="not the whole"):
        download_gsm8k(tmp_path / "data", url)
    assert os.listdir(tmp_path / "data") == []


def test_download_offline_says_so(server, tmp_path):
    _, url = server
    with pytest.raises(UserError, match=r"could not be downloaded .*404.*gsm8k-train.jsonl"):
        download_gsm8k(tmp_path / "data", url)
    with pytest.raises(UserError, match="connect to the network"):
        download_gsm8k(tmp_path / "data", "http://127.0.0.1:9")  # the discard port: nothing listens there


def test_download_keeps_what_it_did_not_write(server, tmp_path):
    served, url = server
    serve_gsm8k(served)
    write_rows(tmp_path / "gsm8k-train.jsonl", [SAMPLE])
    with pytest.raises(UserError, match="there already"):
        download_gsm8k(tmp_path, url)
    assert len(load_gsm8k(tmp_path / "gsm8k-train.jsonl")) == 1


def test_download_into_a_file_says_so(server, tmp_path):
    served, url = server
    serve_gsm8k(served)
    (tmp_path / "data").write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be written"):
        download_gsm8k(tmp_path / "data", url)
