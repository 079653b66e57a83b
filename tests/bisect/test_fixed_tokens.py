"""The tokens that all legs have in common: what one of them gives probability 0 counts in none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.bisect.experiments import AS_RECORDED, LEGS
from mismatch_cli.bisect.fixed_tokens import FixedTokens, choose
from mismatch_cli.bisect.legs import write_as_recorded
from mismatch_cli.places import bundled
from mismatch_cli.trace.manifest import VOCABULARY
from mismatch_cli.trace.reader import Trace

SOURCE = Trace.open(bundled("traces") / "bfloat16")


def written(folder: Path, manifest: dict, impossible: tuple[int, int] | None = None) -> None:
    """A leg of 12 responses; the token at (response, position) has probability 0."""
    tables = choose(SOURCE, 12)
    if impossible is not None:
        response, position = impossible
        rows = [np.array(row, dtype=np.float32) for row in tables[0]["logp_rollout"].to_pylist()]
        rows[response][position] = -np.inf
        index = tables[0].column_names.index("logp_rollout")
        tables[0] = tables[0].set_column(index, "logp_rollout", [rows])
    write_as_recorded(folder, tables, manifest, SOURCE.folder / VOCABULARY, equal=False)


@pytest.mark.parametrize("side", ["config", "trainer"])
def test_what_one_leg_gives_probability_0_counts_in_none(tmp_path, side):
    """Truncated by the sampler, or by the trainer alone."""
    cut = {"config": {"sampling": {"top_p": 0.9}}, "trainer": SOURCE.manifest["trainer"] | {"top_p": 0.9}}
    manifest = SOURCE.manifest | {side: cut[side]}
    written(tmp_path / LEGS / AS_RECORDED, manifest)
    written(tmp_path / LEGS / "other", manifest, impossible=(1, 3))
    tokens = FixedTokens.read(tmp_path / LEGS / AS_RECORDED)
    left = tokens.in_support(tmp_path / LEGS)
    assert np.flatnonzero(tokens.counts_T & ~left.counts_T).tolist() == [tokens.offset_S1[1] + 3]


def test_without_truncation_all_tokens_count(tmp_path):
    written(tmp_path / LEGS / AS_RECORDED, SOURCE.manifest)
    tokens = FixedTokens.read(tmp_path / LEGS / AS_RECORDED)
    assert tokens.in_support(tmp_path / LEGS) is tokens
    assert tokens.num_responses == sum(tokens.portions) == 12


def test_a_column_of_another_leg_is_laid_beside_by_its_keys(tmp_path):
    """A leg of the last portion alone, in another order."""
    written(tmp_path / LEGS / AS_RECORDED, SOURCE.manifest)
    tokens = FixedTokens.read(tmp_path / LEGS / AS_RECORDED)
    last = choose(SOURCE, 12)[-1]
    backwards = last.take(list(range(len(last)))[::-1])
    write_as_recorded(tmp_path / LEGS / "part", [backwards], SOURCE.manifest, Path("none"), equal=False)
    found_T = tokens.flat(tmp_path / LEGS / "part", "logp_rollout")
    whole_T = tokens.flat(tmp_path / LEGS / AS_RECORDED, "logp_rollout")
    read_T = np.isfinite(found_T)
    assert read_T.sum() == sum(map(len, last["response_ids"].to_pylist()))
    assert np.array_equal(found_T[read_T], whole_T[read_T])
