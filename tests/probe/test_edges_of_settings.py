"""The range of seeds."""

from __future__ import annotations

import pytest

from mismatch_cli.app.cli import run


@pytest.mark.parametrize(
    ("seed", "fault"),
    [(0, "engine"), (2**32 - 1, "engine"), (-1, "seed"), (2**32, "seed")],
)
def test_a_seed_has_32_bits(capsys, seed, fault):
    """A seed in range leaves the unknown engine to complain about."""
    assert run(["probe", "--seed", str(seed), "--engine", "none"]) == 2
    said = capsys.readouterr().err
    assert [name for name in ("engine", "seed") if f"--{name}" in said] == [fault]
