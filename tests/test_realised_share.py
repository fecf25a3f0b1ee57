"""The measure of what arrives of an update, on cases worked out by hand, and the committed table against the code."""

import re
from pathlib import Path

import pytest
import torch

from a5lib.optimizers import STATE_PRECISIONS
from a5lib.realised_share import realised_share

TABLE = Path(__file__).parent.parent / "runs" / "optimizer-state" / "shares.txt"
STARTS = {
    "matrix, normal with std 0.02": 0.02 * torch.randn(1 << 15, generator=torch.Generator().manual_seed(1)),
    "norm weights, all 1": torch.ones(1 << 15),
}


def test_a_weight_of_1_keeps_all_of_the_update_in_its_state_or_nothing():
    """200 steps of at most 1e-6 stay below half the gap under 1, 0.00195."""
    start = torch.ones(500).bfloat16()
    plain, master = (realised_share(precision, 1e-6, start) for precision in ("bf16", "fp32"))
    assert (plain.share, plain.cosine, plain.moved, plain.kept) == (0.0, 0.0, 0.0, 0.0)
    assert (master.share, master.moved) == (0.0, 0.0)
    assert master.kept == pytest.approx(1.0, abs=1e-3), "the master is float32: a step is 8 of its gaps or more"


def test_a_first_step_arrives_in_whole_gaps():
    """The first step of Adam is the learning rate, up or down. Around 0.75 the gap is 2^-8: 1.6 of it become 2."""
    start = torch.full((4000,), 0.75).bfloat16()
    for gaps, stored in ((0.4, 0), (0.6, 1), (1.4, 1), (1.6, 2)):
        found = realised_share("bf16", gaps * 2**-8, start, steps=1)
        assert found.share == pytest.approx(stored / gaps, rel=1e-2)
        assert found.moved == pytest.approx(
            min(stored, 1), abs=1e-2
        )  # a gradient as small as eps moves its weight less
        assert found.cosine == pytest.approx(min(stored, 1), abs=1e-2)


def test_what_arrives_depends_on_the_seed_only_by_chance():
    start = STARTS["matrix, normal with std 0.02"].bfloat16()
    one, same, other = (realised_share("bf16_stochastic", 1e-5, start, steps=20, seed=seed) for seed in (0, 0, 1))
    assert one == same and one != other
    assert one.share == pytest.approx(other.share, abs=0.1)


def committed():
    """(start, learning rate, precision) -> stored, cosine, moved, kept, in the units of `Share`."""
    rows, part = {}, None
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"(.*), learning rate (.*)", line):
            part = heading[1], float(heading[2])
        elif part and line.split() and line.split()[0] in STATE_PRECISIONS:
            name, stored, cosine, moved, kept = line.split()
            rows[(*part, name)] = [
                float(x.rstrip("%")) / (100 if "%" in x else 1) for x in (stored, cosine, moved, kept)
            ]
    return rows


def test_the_committed_table_is_what_the_code_measures():
    rows = committed()
    assert len(rows) == len(STARTS) * 2 * len(STATE_PRECISIONS)
    for (start, lr, precision), expected in rows.items():
        found = realised_share(precision, lr, STARTS[start].bfloat16())
        # 32 times fewer weights: a weight near 1 that moves at random moves by 4000 of the steps at 1e-6
        tolerance = 0.35 if start.startswith("norm") and precision == "bf16_stochastic" else 0.02
        assert [found.share, found.cosine, found.moved, found.kept] == pytest.approx(expected, abs=tolerance)


def test_the_table_shows_why_fp32_is_the_default():
    rows = committed()
    kept = {row: values[-1] for row, values in rows.items()}
    assert min(share for row, share in kept.items() if row[-1] == "fp32") > 0.99
    assert max(share for row, share in kept.items() if row[-1] == "bf16") < 0.2, "plain bfloat16 would do as well"
    for start in STARTS:
        for lr in (1e-6, 1e-5):
            stochastic, master = rows[start, lr, "bf16_stochastic"], rows[start, lr, "fp32"]
            assert stochastic[0] > 0.98, "all of it arrives"
            assert start.startswith("norm") or stochastic[1] < master[1], "but with noise"
