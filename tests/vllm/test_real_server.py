"""A real vLLM server on the CPU, started with the command that the backend gives, against transformers with the same
weights in float32. It takes weights over vLLM's own API, and from the memory of this process.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from a5lib.models import TOY_MODEL_DIR, encode_prompt, load_policy, load_tokenizer
from a5lib.prompts import load_prompt
from a5lib.rollouts.vllm_server import ServerError, VllmServer
from a5lib.rollouts.worker_process import group_members
from a5lib.toy_problems import toy_problems
from tests.vllm.test_real_engine import PYTHON, STOP, Pair, perturb, reference_log_probs, same_greedy

START_SECONDS = 360.0

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="run by `make test-vllm`"),
    pytest.mark.timeout(420),  # a server starts in a minute, or in three on a busy machine
]

# What the CPU needs besides; `vllm serve` itself asks for a package of another name than that of the CPU's build.
ON_CPU = "--enforce-eager --kv-cache-memory-bytes 268435456 --no-enable-chunked-prefill --max-num-batched-tokens 4096"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def started(command: str, log: Path) -> subprocess.Popen[bytes]:
    """The server of a command for a shell, in a process group of its own."""
    words = shlex.split(command)
    first = words.index("vllm")
    variables = dict(word.split("=", 1) for word in words[:first])
    model, *rest = words[first + 2 :]
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *rest, *ON_CPU.split()],
            env={**os.environ, **ENVIRONMENT, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The toy model, here and in the server."""
    model, _ = load_policy("toy", device="cpu", dtype="float32")
    tokenizer = load_tokenizer("toy")
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    backend = VllmServer(
        model.named_parameters(), tokenizer, url, model=str(TOY_MODEL_DIR), max_model_len=256, concurrency=32
    )
    with pytest.raises(ServerError, match="is not there"):
        backend.start()
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = started(backend.command, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                backend.start()
                break
            except ServerError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
                time.sleep(0.5)
        pair = Pair(model.eval(), tokenizer, backend)  # type: ignore[arg-type]
        pair.server = server  # type: ignore[attr-defined]
        yield pair
    finally:
        backend.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if group_members(server.pid):
                os.killpg(server.pid, number)
                deadline = time.monotonic() + 15
                while group_members(server.pid) and time.monotonic() < deadline:
                    server.poll()
                    time.sleep(0.1)
        server.wait()


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    template = load_prompt("r1_zero")
    return [encode_prompt(pair.tokenizer, template.render(p.question)) for p in toy_problems("validation", 8)]


def test_a_server_generates_as_transformers_after_every_update(pair: Pair, prompts: list[list[int]]) -> None:
    before: list[list[int]] = []
    for update in range(3):
        pair.sync()
        ours, theirs = pair.greedy(prompts, 40, STOP)
        same_greedy(ours, theirs)
        tokens = [c.token_ids for c in ours]
        assert tokens != before, "the update was too small to be seen"
        assert update or any(c.text.endswith("</answer>") for c in ours), "the stop string was cut off"
        before = tokens
        perturb(pair.model, seed=update, size=0.3)


def test_log_probs_are_those_of_float32_and_seeds_repeat_tokens(pair: Pair, prompts: list[list[int]]) -> None:
    pair.sync()
    first, again, other = (
        pair.vllm.generate(prompts, n=4, max_tokens=30, temperature=0.6, seed=seed) for seed in (1, 1, 2)
    )
    differences = [
        abs(ours - theirs)
        for c in first
        for ours, theirs in zip(
            c.log_probs, reference_log_probs(pair.model, prompts[c.prompt_index], c, 0.6), strict=True
        )
    ]
    assert len(differences) > 200
    assert max(differences) < 1e-3, "before the temperature? of another token? of other weights?"
    assert [c.token_ids for c in first] == [c.token_ids for c in again], "a run cannot be repeated"
    assert [c.token_ids for c in first] != [c.token_ids for c in other]
    assert max(len({tuple(c.token_ids) for c in first[i : i + 4]}) for i in range(0, 32, 4)) > 1


def test_an_update_that_was_left_open_is_finished(pair: Pair, prompts: list[list[int]]) -> None:
    """As by a trainer that was killed; vLLM refuses to begin another one meanwhile."""
    pair.vllm._post("/pause?mode=abort")  # type: ignore[attr-defined]
    pair.vllm._post("/start_weight_update", {"is_checkpoint_format": False})  # type: ignore[attr-defined]
    pair.sync()
    same_greedy(*pair.greedy(prompts, 5))


def test_what_another_trainer_sends_is_noticed(pair: Pair, prompts: list[list[int]]) -> None:
    pair.sync()
    other = VllmServer(
        pair.model.named_parameters(), pair.tokenizer, pair.vllm.url, model="x", max_model_len=256  # type: ignore[attr-defined]
    )  # fmt: skip
    other.sync(pair.model.named_parameters(), 0)
    with pytest.raises(ServerError, match="no longer holds the weights of step"):
        pair.vllm.generate(prompts, n=1, max_tokens=4, temperature=0.0, seed=0)
    other.close()


def test_weights_that_do_not_fit_are_named_by_the_real_server(pair: Pair, prompts: list[list[int]]) -> None:
    changed = dict(pair.model.named_parameters())
    name = next(n for n in changed if "down_proj" in n)
    changed[name] = changed[name][:, :-1]
    other = VllmServer(
        changed.items(), pair.tokenizer, pair.vllm.url, model="x", max_model_len=256  # type: ignore[attr-defined]
    )  # fmt: skip
    with pytest.raises(ServerError, match=rf"serves .*toy_model and does not hold .*: {name} is float32 \[.*should"):
        other.sync(changed.items(), 0)
    other.close()
    pair.sync()
    same_greedy(*pair.greedy(prompts, 5))


def test_a_server_that_is_killed_at_work_is_one_sentence(pair: Pair, prompts: list[list[int]]) -> None:
    """The last test: there is no server afterwards."""
    pair.sync()
    server: subprocess.Popen[bytes] = pair.server  # type: ignore[attr-defined]

    def kill(count: int) -> None:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    threads = threading.active_count()
    with pytest.raises(ServerError, match=r"broke off /v1/completions \(\w+\)\. Look for the cause|is not there\."):
        pair.vllm.generate(prompts, n=8, max_tokens=100, temperature=1.0, seed=0, progress=kill)
    with pytest.raises(ServerError, match="is not there"):
        pair.vllm.sync(pair.model.named_parameters(), 9)
    assert threading.active_count() == threads
    deadline = time.monotonic() + 10
    while group_members(server.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_members(server.pid)
