"""The benchmark's peers against our own update, where their packages are installed; what they say where not."""

from __future__ import annotations

import functools
import importlib.util
import types

import pytest
import torch

from a5lib.config import TrainConfig, resolve
from a5lib.course import load_algo
from a5lib.errors import UserError
from a5lib.peers import PEERS, Update, bitsandbytes_paged, first_response_column, liger_grpo, microbatches, package
from a5lib.synthetic import made_up_batch, published_config, random_model

CONFIG = resolve(
    TrainConfig(model="tiny", rollout_batch_size=8, group_size=4, gradient_accumulation_steps=2, learning_rate=1e-3)
)


def batch(ragged: bool = True) -> dict[str, torch.Tensor]:
    """8 rows of at most 40 tokens; no advantage is 0."""
    return made_up_batch(vocabulary=264, sequences=8, tokens=40, response=24, group_size=4, ragged=ragged)


def model() -> torch.nn.Module:
    return random_model(published_config("tiny"), dtype=torch.float32)


def reference(given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients, then weights after torch's clipping and AdamW, of a plain float64 loop over rows."""
    plain = model().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for b in range(8):
        keep = given["response_mask"][b]
        log_probs = torch.log_softmax(plain(given["input_ids"][b][None]).logits[0], -1)
        new = log_probs.gather(-1, given["labels"][b][:, None])[:, 0][keep]
        (-given["advantages"][b].double() * new.mean() / 8).backward()
    gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    return gradients, {name: p.detach() for name, p in plain.named_parameters()}


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


LOSSES = [
    pytest.param("trl", marks=needs("trl", "accelerate", "datasets")),
    pytest.param("liger-loss", marks=needs("liger_kernel")),
    pytest.param("bitsandbytes-32", marks=needs("bitsandbytes")),
]


@pytest.mark.parametrize("name", LOSSES)
def test_a_peer_computes_the_update_of_a_plain_float64_loop(name: str) -> None:
    given, trained = batch(), model()
    peer = functools.partial(liger_grpo, layers=False, compiled=False) if name == "liger-loss" else PEERS[name]
    update: Update = peer(trained, given, CONFIG, load_algo("solutions"))
    gradients, weights = reference(given)
    update.accumulate()
    for parameter_name, parameter in trained.named_parameters():
        wanted = gradients[parameter_name]
        error = (parameter.grad.double() - wanted).norm() / wanted.norm()
        assert error < 1e-4, f"{parameter_name}: relative error {error:.1e}"
    norm = update.step()
    assert norm == pytest.approx(torch.stack([g.norm() for g in gradients.values()]).norm().item(), rel=1e-4)
    assert all(parameter.grad is None for parameter in trained.parameters())
    start = dict(model().named_parameters())
    for parameter_name, parameter in trained.named_parameters():
        taken, wanted = parameter.detach() - start[parameter_name], weights[parameter_name] - start[parameter_name]
        error = (taken.double() - wanted).norm() / wanted.norm()
        assert error < 2e-2, f"{parameter_name}: the step differs by {error:.1e}"


class FakeOffload:
    """What torchao's optimizer does, on the CPU: gradients leave the parameters as soon as they are complete."""

    def __init__(self, params, optimizer_class, *, offload_gradients: bool, **numbers) -> None:
        self.device = list(params)
        self.host = [torch.nn.Parameter(p.detach().clone()) for p in self.device]
        self.inner = optimizer_class(self.host, **numbers)
        self.arrivals = [0] * len(self.device)
        for i, p in enumerate(self.device):
            p.register_post_accumulate_grad_hook(functools.partial(self.leave, i, offload_gradients))

    def leave(self, i: int, offload: bool, p: torch.Tensor) -> None:
        self.arrivals[i] += 1
        self.host[i].grad = p.grad.clone()
        if offload:
            p.grad = None

    def step(self) -> None:
        self.inner.step()
        for p, host in zip(self.device, self.host, strict=True):
            p.data.copy_(host.data)

    def zero_grad(self) -> None:
        for p in self.device:
            p.grad = None


@pytest.mark.parametrize(("name", "passes"), [("torchao", 1), ("torchao-state", 2)])
def test_torchaos_offload_sees_every_gradient_whole(name: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeOffload] = []

    def offload(*arguments, **numbers) -> FakeOffload:
        made.append(FakeOffload(*arguments, **numbers))
        return made[0]

    monkeypatch.setattr("a5lib.peers.package", lambda module: types.SimpleNamespace(CPUOffloadOptimizer=offload))
    trained, given = model(), batch()
    update = PEERS[name](trained, given, CONFIG, load_algo("solutions"))
    gradients, _ = reference(given)
    update.accumulate()
    assert made[0].arrivals == [passes] * 25, "gradients that leave at once cannot be accumulated"
    for (parameter_name, _), host in zip(trained.named_parameters(), made[0].host, strict=True):
        wanted = gradients[parameter_name]
        assert (host.grad.double() - wanted).norm() / wanted.norm() < 1e-4, parameter_name
    before = trained.lm_head.weight.detach().clone()
    assert update.step() is None, "nothing is clipped"
    assert not torch.equal(before, trained.lm_head.weight)
    assert all(parameter.grad is None for parameter in trained.parameters())


def test_paged_state_that_does_not_fit_the_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = types.SimpleNamespace(device=torch.device("cuda"), num_parameters=lambda: 2**31)
    monkeypatch.setattr("a5lib.peers.package", lambda module: types.SimpleNamespace(optim=None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 24 * 2**30))
    with pytest.raises(UserError, match=r"16\.0 GiB of managed memory and 20\.0 GiB are free"):
        bitsandbytes_paged(asked, batch(), CONFIG, None, bits=32)


@needs("bitsandbytes")
def test_the_8_bit_optimizer_steps_where_the_gradient_says() -> None:
    trained, given = model(), batch()
    start = {name: p.detach().clone() for name, p in trained.named_parameters()}
    update = bitsandbytes_paged(trained, given, CONFIG, load_algo("solutions"))
    gradients, _ = reference(given)
    update.accumulate()
    update.step()
    name = "lm_head.weight"
    moved = trained.get_parameter(name).detach() - start[name]
    large = gradients[name].abs() > gradients[name].abs().median()
    assert (moved[large].sign() == -gradients[name][large].sign()).float().mean() > 0.99


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_missing_package_is_one_sentence_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}")

    trained = model()
    monkeypatch.setattr("a5lib.peers.importlib", types.SimpleNamespace(import_module=absent))
    with pytest.raises(UserError, match=r"does not import here .*pip install (trl|liger-kernel|torchao|bitsandbytes)$"):
        PEERS[name](trained, batch(), CONFIG, None)


def test_a_package_that_breaks_while_it_is_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> None:
        raise RuntimeError("built for another torch")

    monkeypatch.setattr("a5lib.peers.importlib", types.SimpleNamespace(import_module=broken))
    with pytest.raises(UserError, match=r"torchao does not import here \(RuntimeError: built for another torch\)"):
        package("torchao.optim")


def test_microbatches_hold_every_row_once_and_in_order() -> None:
    given = batch()
    parts = microbatches(given, CONFIG, torch.device("cpu"))
    assert [len(part["labels"]) for part in parts] == [4, 4]
    for name, column in given.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), column)


def test_the_first_response_column_is_that_of_the_shortest_prompt() -> None:
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)
    assert first_response_column({"response_mask": mask}) == 2
