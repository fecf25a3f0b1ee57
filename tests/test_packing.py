"""Packing: every trained token once and a shared prompt once, and attention that sees what the plain model sees."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from a5lib.engines import attention
from a5lib.engines.attention import Packing, packed_attention
from a5lib.engines.packing import SEGMENTS, Microbatch, pack, trained_rows
from a5lib.engines.plan import SEGMENT_TOKENS
from tests.engine_tools import Batch, ragged_batch

LENGTHS = [9, 2, 5, 5, 1, 7]  # up to the last token that predicts


def batch_of(lengths: list[int], width: int = 12, prompts: str = "") -> Batch:
    """Row r holds the ids 100 r, 100 r + 1, ...; its last one or two tokens predict a response.

    Rows with the same letter in `prompts` begin with the same ids, those of the letter's first row, up to the token
    that predicts the first response token.
    """
    rows = len(lengths)
    place = torch.arange(width)
    ends = torch.tensor(lengths)[:, None]
    ids = 100 * torch.arange(rows)[:, None] + place
    mask = (place < ends) & (place >= ends - 2)
    labels = ids + 1
    for row, letter in enumerate(prompts):
        ids[row, : max(lengths[row] - 1, 1)] -= 100 * (row - prompts.index(letter))
    return {"input_ids": ids, "labels": labels, "response_mask": mask, "advantages": torch.ones(rows)}


def rows_of(microbatch: Microbatch) -> list[int]:
    return [int(first) // 100 for first in microbatch.ids[microbatch.positions == 0]]


# --- microbatches


def test_the_longest_rows_go_first_and_equal_ones_keep_their_order() -> None:
    microbatches = pack(batch_of(LENGTHS), 12)
    assert [rows_of(m) for m in microbatches] == [[0], [5, 2], [3, 1, 4]]
    assert [m.packing.lengths for m in microbatches] == [(9,), (7, 5), (5, 2, 1)]
    assert [m.packing.starts.tolist() for m in microbatches] == [[0, 9], [0, 7, 12], [0, 5, 7, 8]]
    assert all(m.packing.prompts is None and not m.packing.shared for m in microbatches)


def test_a_prompt_that_rows_share_is_there_once_and_goes_first() -> None:
    (only,) = pack(batch_of([6, 3, 6, 6, 6, 3], prompts="abacab"), 100)
    lengths = only.packing.lengths
    assert lengths == (5, 2, 1, 1, 1, 1, 1, 6), "prompts a and b, three answers to a, two to b, and row 3"
    assert only.packing.shared == ((0, range(2, 5)), (1, range(5, 7)))
    assert only.packing.prompts.tolist() == [0, 5, 7], "where the shared prompts begin, and where they end"
    assert only.packing.follows.tolist() == [7, 10, 12], "where the answers to each begin, and where they end"
    assert only.ids.tolist() == [0, 1, 2, 3, 4, 100, 101, 5, 205, 405, 102, 502, *range(300, 306)]
    assert only.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 5, 5, 2, 2, *range(6)]
    # Rows 0, 2, 4, 3, 1, 5: the last token of a prompt predicts the first response token of every row that shares it.
    assert only.answers.tolist() == [4, 7, 4, 8, 4, 9, 16, 17, 6, 10, 6, 11]
    assert only.labels.tolist() == [5, 6, 205, 206, 405, 406, 305, 306, 102, 103, 502, 503]


def test_a_group_that_does_not_fit_takes_its_prompt_along() -> None:
    batch = batch_of([6, 6, 6, 6], prompts="aaaa")
    microbatches = pack(batch, 7)
    assert [m.packing.lengths for m in microbatches] == [(5, 1, 1), (5, 1, 1)]
    assert sorted(torch.cat([m.cells for m in microbatches]).tolist()) == [4, 5, 16, 17, 28, 29, 40, 41]
    assert [m.packing.lengths for m in pack(batch, 1)] == [(6,)] * 4


def test_an_answer_of_one_token_needs_no_segment_of_its_own() -> None:
    """Its token is predicted by the prompt's last; nothing has to run behind it."""
    batch = batch_of([6, 6], prompts="aa")
    batch["response_mask"][1, 5] = False
    (only,) = pack(batch, 100)
    assert (only.packing.lengths, len(only.ids)) == ((5, 1, 0), 6)
    assert (only.answers.tolist(), only.cells.tolist()) == ([4, 5, 4], [4, 5, 16])


@pytest.mark.parametrize("tokens", [1, 8, 12, 17, 1000])
def test_every_trained_token_is_there_once_with_its_label_and_place(tokens: int) -> None:
    batch = ragged_batch()
    trained = batch["response_mask"] & (batch["advantages"] != 0)[:, None]
    microbatches = pack(batch, tokens)
    cells = torch.cat([m.cells for m in microbatches])
    assert sorted(cells.tolist()) == trained.flatten().nonzero().flatten().tolist()
    for m in microbatches:
        assert torch.equal(m.labels, batch["labels"].flatten()[m.cells])
        assert torch.equal(m.ids[m.answers], batch["input_ids"].flatten()[m.cells])
        assert torch.equal(m.positions[m.answers], m.cells % batch["labels"].shape[1])
        assert sum(m.packing.lengths) == len(m.ids) == len(m.positions) == m.packing.starts[-1]
        assert max(m.packing.lengths) <= m.packing.longest


def test_a_microbatch_holds_at_most_its_tokens_or_one_longer_row() -> None:
    for tokens in range(1, 31):
        for m in pack(batch_of(LENGTHS, prompts="abcbca"), tokens):
            assert len(m.ids) <= tokens or len(set((m.cells // 12).tolist())) == 1


def test_M09_padding_is_not_packed_whatever_it_holds() -> None:
    narrow, wide = batch_of(LENGTHS, width=9), batch_of(LENGTHS, width=40)
    for m, n in zip(pack(narrow, 12), pack(wide, 12), strict=True):
        assert torch.equal(m.ids, n.ids) and torch.equal(m.labels, n.labels)


def test_rows_without_advantage_or_response_are_left_out() -> None:
    batch = batch_of(LENGTHS)
    batch["advantages"][2] = 0.0
    batch["response_mask"][4] = False
    assert trained_rows(batch).tolist() == [0, 1, 3, 5]
    assert sorted(row for m in pack(batch, 12) for row in rows_of(m)) == [0, 1, 3, 5]
    assert pack({**batch, "advantages": torch.zeros(6)}, 12) == []


def test_a_mask_of_numbers_counts_like_one_of_truth_values() -> None:
    batch = batch_of(LENGTHS)
    for m, n in zip(pack(batch, 12), pack({**batch, "response_mask": batch["response_mask"].int()}, 12), strict=True):
        assert torch.equal(m.cells, n.cells) and torch.equal(m.answers, n.answers)


def test_a_hole_in_the_response_is_run_but_not_trained() -> None:
    batch = batch_of([6])
    batch["response_mask"][0] = torch.tensor([0, 0, 1, 0, 0, 1] + [0] * 6, dtype=torch.bool)
    (only,) = pack(batch, 12)
    assert (len(only.ids), only.answers.tolist(), only.cells.tolist()) == (6, [2, 5], [2, 5])


def test_a_part_of_a_batch_finds_its_places_in_the_whole() -> None:
    batch = ragged_batch()
    width = batch["labels"].shape[1]
    half = {name: values[4:] for name, values in batch.items()}
    cells = torch.cat([m.shifted(4 * width).cells for m in pack(half, 100)])
    assert torch.equal(batch["labels"].flatten()[cells], torch.cat([m.labels for m in pack(half, 100)]))


# Twelve tokens of room; the second batch has far shorter rows than the plan foresaw.
@pytest.mark.parametrize("prompts", ["", "aaaabb"])
@pytest.mark.parametrize("lengths", [LENGTHS, [2] * 6, [1], [12, 12], [10, 1]])
def test_filled_microbatches_have_one_shape(lengths: list[int], prompts: str) -> None:
    for m in pack(batch_of(lengths, prompts=prompts[: len(lengths)]), 12, fixed=True, longest=12):
        assert len(m.ids) == len(m.positions) == 12
        assert len(m.packing.starts) == SEGMENTS + 1, "code compiled for one shape would be compiled again"
        assert m.packing.longest == 12 and m.packing.lengths is None
        assert (m.packing.starts[0], m.packing.starts[-1]) == (0, 12)
        sizes = m.packing.starts.diff()
        assert sizes.min() >= 0 and sizes.max() <= 12
        for cut in (m.packing.prompts, m.packing.follows):
            assert cut is None or len(cut) == SEGMENTS + 1


def test_short_rows_do_not_make_more_segments_than_the_plan_has_memory_for() -> None:
    rows, tokens = 150, 40 * SEGMENT_TOKENS
    several = [len(m.packing.starts) - 1 for m in pack(batch_of([2] * rows), tokens, fixed=True, longest=tokens)]
    assert several == [64] * 4, "40, 40, 40 and 30 rows and what fills: all are laid out for 64"
    shared = pack(batch_of([3] * rows, prompts="a" * rows), tokens, fixed=True, longest=tokens)
    assert [len(m.answers) for m in shared] == [78, 78, 78, 66], "39 rows of 2: one of the 40 is the prompt"
    assert len(pack(batch_of([2] * rows), tokens)) == 1, "one by one, segments cost nothing"


@pytest.mark.parametrize("prompts", ["", "abcbca"])
def test_filling_counts_for_nothing_and_starts_segments_of_its_own(prompts: str) -> None:
    batch = batch_of(LENGTHS, prompts=prompts)
    for m, filled in zip(pack(batch, 12), pack(batch, 12, fixed=True, longest=12), strict=True):
        for name in ("answers", "labels", "cells"):
            assert torch.equal(getattr(m, name), getattr(filled, name)), name
        assert torch.equal(filled.ids[: len(m.ids)], m.ids)
        cut = m.packing.starts
        assert torch.equal(filled.packing.starts[: len(cut)], cut), "a row would attend to what fills the microbatch"
        assert len(m.ids) == 12 or filled.positions[len(m.ids)] == 0
        if m.packing.prompts is not None:
            shared = len(m.packing.prompts)
            assert torch.equal(filled.packing.prompts[:shared], m.packing.prompts)
            assert torch.equal(filled.packing.follows[:shared], m.packing.follows)


# --- attention

SCALE = 0.3
# Two shared prompts, two answers to the first, three to the second (one of them empty), and a row that shares nothing.
SHARED = Packing(
    starts=torch.tensor([0, 3, 5, 7, 8, 10, 10, 11, 15], dtype=torch.int32),
    prompts=torch.tensor([0, 3, 5], dtype=torch.int32),
    follows=torch.tensor([5, 8, 11], dtype=torch.int32),
    longest=4,
    lengths=(3, 2, 2, 1, 2, 0, 1, 4),
    shared=((0, range(2, 4)), (1, range(4, 7))),
)
# What each of the 15 tokens may see.
SEEN = [[0], [0, 1], [0, 1, 2], [3], [3, 4]]
SEEN += [[0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 2, 7], [3, 4, 8], [3, 4, 8, 9], [3, 4, 10]]
SEEN += [[11], [11, 12], [11, 12, 13], [11, 12, 13, 14]]


def heads(dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, list[Tensor]]:
    """A module with two query heads for a key head, and a query [1, 4, 15, 8], key and value [1, 2, 15, 8]."""
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    shapes = [(1, 4, 15, 8), (1, 2, 15, 8), (1, 2, 15, 8)]
    return module, [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def by_definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[1, n, heads, D], token by token and head by head."""
    out = torch.empty(1, 15, 4, 8, dtype=query.dtype)
    for head in range(4):
        for place, seen in enumerate(SEEN):
            weights = torch.softmax(SCALE * (key[0, head // 2, seen] @ query[0, head, place]), dim=0)
            out[0, place, head] = weights @ value[0, head // 2, seen]
    return out


def values_and_gradients(packing: Packing | None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The attention and its gradients for a fixed way back; by definition without a packing."""
    module, tensors = heads(dtype)
    if packing is None:
        out = by_definition(*tensors)
    else:
        out, _ = packed_attention(module, *tensors, None, scaling=SCALE, packing=packing)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).sin().view(out.shape))
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def test_attention_stays_within_a_segment_and_the_prompt_before_it() -> None:
    for actual, expected in zip(values_and_gradients(SHARED), values_and_gradients(None), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def plain_flash(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,
                causal: bool, scaling: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the card's kernel gives; what it does not write holds NaN."""
    out, log_sum = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan, dtype=q.dtype)
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        assert b - a <= longest_q and d - c <= longest_k
        scores = scaling * torch.einsum("qhd,khd->hqk", q[a:b], k[c:d])
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -math.inf)
        log_sum[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[c:d])
    return out, log_sum


def plain_flash_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, starts_q: Tensor,
                     starts_k: Tensor, longest_q: int, longest_k: int, causal: bool,
                     scaling: float) -> list[Tensor]:  # fmt: skip
    """Dao et al. 2022, algorithm 4, segment by segment; what it does not write holds NaN."""
    dq, dk, dv = (torch.full_like(tensor, math.nan) for tensor in (q, k, v))
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        scores = scaling * torch.einsum("qhd,khd->hqk", q[a:b], k[c:d])
        p = (scores - log_sum[:, a:b, None]).exp()
        if causal:
            p = p.tril()
        dp = torch.einsum("qhd,khd->hqk", grad[a:b], v[c:d])
        ds = scaling * p * (dp - (grad[a:b] * out[a:b]).sum(-1).t()[:, :, None])
        dv[c:d] = torch.einsum("hqk,qhd->khd", p, grad[a:b])
        dq[a:b], dk[c:d] = torch.einsum("hqk,khd->qhd", ds, k[c:d]), torch.einsum("hqk,qhd->khd", ds, q[a:b])
    return [dq, dk, dv]


@pytest.mark.parametrize("empty", [0, 5])
def test_prompt_and_answer_computed_apart_are_merged_right(empty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's path with plain kernels, also with empty segments at the end as in filled microbatches."""
    monkeypatch.setattr(attention, "_flash", plain_flash)
    monkeypatch.setattr(attention, "_flash_back", plain_flash_back)
    longer: dict[str, Any] = {
        name: torch.cat([cut, cut[-1:].expand(empty)]) for name, cut in vars(SHARED).items() if isinstance(cut, Tensor)
    }
    packing = replace(SHARED, **longer, lengths=None, shared=())
    for actual, expected in zip(values_and_gradients(packing), values_and_gradients(None), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # the merge is done in float32


def kernel_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, starts_q: Tensor,
                starts_k: Tensor, longest_q: int, longest_k: int, dropout: float, causal: bool, seed: Tensor,
                offset: Tensor, *, scale: float) -> tuple[Tensor, ...]:  # fmt: skip
    """The card's kernel, which takes the rows of `log_sum` for neighbours without looking."""
    assert dropout == 0
    rows = log_sum.as_strided(log_sum.shape, (log_sum.shape[1], 1))
    return tuple(plain_flash_back(grad, q, k, v, out, rows, starts_q, starts_k, longest_q, longest_k, causal, scale))


def test_the_kernel_gets_its_log_sums_without_the_gaps_that_compiled_code_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel_back)
    q, k, v, grad = torch.randn(4, 6, 2, 8, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    out, log_sum = plain_flash(q, k, v, starts, starts, 4, 4, True, SCALE)
    apart = torch.full((2, 32), math.nan)[:, :6].copy_(log_sum)
    expected = plain_flash_back(grad, q, k, v, out, log_sum, starts, starts, 4, 4, True, SCALE)
    for sums in (log_sum, apart):
        actual = attention._flash_back(grad, q, k, v, out, sums, starts, starts, 4, 4, True, SCALE)
        torch.testing.assert_close(actual, tuple(expected), rtol=0, atol=0)


@pytest.mark.parametrize("fixed", [False, True])
def test_packing_needs_one_thread_only(fixed: bool) -> None:
    """torch's operations on the CPU may wait for all cores, and a card would wait with them: none is called."""
    called: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    batch = batch_of(LENGTHS, prompts="abcbca")
    with Listen():
        microbatches = pack(batch, 12, fixed=fixed)
    assert len(microbatches) > 1
    assert set(called) <= {"aten.detach.default", "aten.lift_fresh.default"}  # views, as of a tensor's own numpy()
