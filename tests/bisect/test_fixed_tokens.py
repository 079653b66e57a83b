"""The tokens that all legs share: one without a number in any leg counts in none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.bisect.experiments import AS_RECORDED, LEGS
from mismatch_cli.bisect.fixed_tokens import FixedTokens, choose
from mismatch_cli.bisect.legs import write_as_recorded
from mismatch_cli.trace.manifest import VOCABULARY
from mismatch_cli.trace.reader import Trace

SOURCE = Trace.open(bundled("traces") / "bfloat16")


def written(folder: Path, unknown: tuple[int, int, float] | None = None) -> None:
    """Write a leg of 12 responses, with `unknown` = (response, position, value)."""
    tables = choose(SOURCE, 12)
    if unknown is not None:
        response, position, value = unknown
        rows = [np.array(row, dtype=np.float32) for row in tables[0]["logp_rollout"].to_pylist()]
        rows[response][position] = value
        index = tables[0].column_names.index("logp_rollout")
        tables[0] = tables[0].set_column(index, "logp_rollout", [rows])
    write_as_recorded(folder, tables, SOURCE.manifest, SOURCE.folder / VOCABULARY, equal=False)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_token_without_a_number_in_one_leg_counts_in_none(tmp_path, value):
    """A token excluded by truncation or from an environment; a response that a leg has not read
    still counts.
    """
    written(tmp_path / LEGS / AS_RECORDED)
    written(tmp_path / LEGS / "other", unknown=(1, 3, value))
    tokens = FixedTokens.read(tmp_path / LEGS / AS_RECORDED)
    other_T, unread_T = (
        tokens.flat(tmp_path / LEGS / "other", "logp_rollout"),
        np.full(len(tokens.counts_T), np.nan),
    )
    unread_T[: tokens.offset_S1[1]] = -1.0
    left = tokens.known_to([other_T, unread_T])
    assert np.flatnonzero(tokens.counts_T & ~left.counts_T).tolist() == [tokens.offset_S1[1] + 3]
    assert tokens.num_responses == sum(tokens.portions) == 12


def test_a_column_of_another_leg_is_aligned_by_key(tmp_path):
    """A leg of only the last portion, in another order."""
    written(tmp_path / LEGS / AS_RECORDED)
    tokens = FixedTokens.read(tmp_path / LEGS / AS_RECORDED)
    last = choose(SOURCE, 12)[-1]
    backwards = last.take(list(range(len(last)))[::-1])
    write_as_recorded(
        tmp_path / LEGS / "part", [backwards], SOURCE.manifest, Path("none"), equal=False
    )
    found_T = tokens.flat(tmp_path / LEGS / "part", "logp_rollout")
    whole_T = tokens.flat(tmp_path / LEGS / AS_RECORDED, "logp_rollout")
    read_T = np.isfinite(found_T)
    assert read_T.sum() == sum(map(len, last["response_ids"].to_pylist()))
    assert np.array_equal(found_T[read_T], whole_T[read_T])
