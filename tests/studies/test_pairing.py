"""Responses are matched by content: in any order, under any numbering, and as often as they
occur.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.processes.workers import Workers
from mismatch_cli.processes.workers.reading import run_pass
from mismatch_cli.studies.pairing import RecognitionPass, TraceResponses, compared_rows, pair_up
from mismatch_cli.trace.reader import Trace
from tests.studies.compared import FLOAT32, write_rows

PAIR = PAIRS["mismatch"]


def responses_of(path) -> TraceResponses:
    (portions,) = run_pass([Trace.open(path)], RecognitionPass(PAIR), Workers()).responses.values()
    return TraceResponses.joined([groups for portion in portions for groups in portion])


def made(
    contents: list[int], rows: list[int] | None = None, prompts: list[int] | None = None
) -> TraceResponses:
    """Responses from numbers for their texts, row keys and prompts."""
    keys = np.arange(len(contents)) if rows is None else np.array(rows)
    prompt_S = np.array(contents) // 10 if prompts is None else np.array(prompts)
    return TraceResponses(
        prompt_S,
        np.array(contents, dtype=np.uint64),
        keys.astype(np.uint64),
        np.ones(len(contents), bool),
        np.zeros(len(contents), dtype=np.uint64),
    )


@pytest.fixture(scope="module")
def float32() -> TraceResponses:
    return responses_of(FLOAT32)


def test_a_trace_is_paired_with_itself(float32):
    pairing = pair_up(float32, float32)
    assert pairing.by == "tokens"
    assert pairing.partner_S.tolist() == list(range(len(float32)))


def test_any_order_any_sharding_and_any_numbering(tmp_path, float32, float32_rows):
    order = np.random.default_rng(0).permutation(len(float32_rows))
    shuffled = [float32_rows[i] for i in order]
    pairing = pair_up(
        float32, responses_of(write_rows(tmp_path / "a", shuffled, FLOAT32, shards=5))
    )
    assert pairing.by == "tokens"
    assert order[pairing.partner_S].tolist() == list(range(len(order)))
    renumbered = [
        row | {"prompt_id": 900 + row["prompt_id"], "step": 3, "sample_index": 7}
        for row in shuffled
    ]
    pairing = pair_up(float32, responses_of(write_rows(tmp_path / "b", renumbered, FLOAT32)))
    assert pairing.by == "tokens" and len(pairing.shared_prompts) == 24
    texts = [(row["prompt_ids"], row["response_ids"]) for row in float32_rows]
    assert [texts[order[partner]] for partner in pairing.partner_S] == texts


def test_equal_texts_with_equal_row_keys_match_first():
    first, other = made([10, 10, 10], rows=[1, 2, 3]), made([10, 10], rows=[3, 1])
    assert pair_up(first, other).partner_S.tolist() == [1, -1, 0]
    unknown = made([10, 10], rows=[8, 9])
    assert pair_up(first, unknown).partner_S.tolist() == [0, 1, -1]


def test_the_same_text_for_a_different_prompt_is_a_different_response(
    tmp_path, float32, float32_rows
):
    other = [row | {"prompt_ids": [*row["prompt_ids"], 1]} for row in float32_rows]
    pairing = pair_up(float32, responses_of(write_rows(tmp_path / "a", other, FLOAT32)))
    assert (
        pairing.by == "none" and pairing.shared_responses == 0 and len(pairing.shared_prompts) == 0
    )


@pytest.mark.parametrize(
    ("other", "by"),
    [
        ([11, 12, 21, 22], "tokens"),
        ([11, 12, 21, 29], "tokens"),  # 3 of 4
        ([11, 12, 28, 29], "prompts"),  # half is not most
        # Most of the first, but not of the other; 2 of 3 prompts
        ([11, 12, 21, 31, 32, 33, 34], "prompts"),
        ([41, 42, 31, 11], "none"),
    ],
)
def test_the_majority_of_both_decides(other, by):
    assert pair_up(made([11, 12, 21, 22]), made(other)).by == by


def test_independent_samples_of_the_same_prompts(float32):
    pairing = pair_up(float32, responses_of(bundled("traces/fp8-kv")))
    assert pairing.by == "prompts" and len(pairing.shared_prompts) == 24
    assert 0 < pairing.shared_responses < len(float32) / 2


def test_unscored_responses_are_not_paired(tmp_path, float32, float32_rows):
    rows = [row if i % 4 else row | {"logp_trainer": None} for i, row in enumerate(float32_rows)]
    other = responses_of(write_rows(tmp_path / "a", rows, FLOAT32))
    assert int(other.measured_S.sum()) == 72
    pairing = pair_up(float32, other)
    assert pairing.shared_responses == 72
    compared = compared_rows([float32, other], [pairing])
    assert [int(flags.sum()) for flags in compared] == [72, 72]


def test_three_traces_are_compared_on_what_all_paired_ones_have():
    first, second, third = (
        made([11, 12, 13, 14, 15]),
        made([15, 14, 13, 12]),
        made([12, 11, 13, 14]),
    )
    other = made([91, 92], prompts=[9, 9])
    pairings = [pair_up(first, trace) for trace in (second, third, other)]
    rows = compared_rows([first, second, third, other], pairings)
    assert [pairing.by for pairing in pairings] == ["tokens", "tokens", "none"]
    assert [flags.tolist() for flags in rows] == [
        [False, True, True, True, False],
        [False, True, True, True],
        [True, False, True, True],
        [True, True],
    ]


def test_three_traces_with_nothing_in_common_are_refused():
    first = made([11, 21, 31])
    pairings = [pair_up(first, made(contents)) for contents in ([11, 21], [21, 31], [11, 31])]
    others = [made([11, 21]), made([21, 31]), made([11, 31])]
    assert {pairing.by for pairing in pairings} == {"tokens"}
    with pytest.raises(MismatchError, match="two at a time"):
        compared_rows([first, *others], pairings)
    nothing = replace(first, measured_S=np.zeros(3, bool))
    assert pair_up(nothing, first).by == "none"
