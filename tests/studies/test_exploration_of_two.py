"""Two runs token by token: what the page has is in both traces, by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.report.explorer import explorer_view
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.exploration import passages as passages_module
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.trace.reader import Trace
from tests.report.payload import Payload
from tests.studies.compared import FLOAT32, Row, rows_of, shifted, write_rows

FP8 = bundled("traces") / "fp8-kv"
MISSING, UNMASKED = 3, 5  # places of tokens that one trace lacks
KEY = ("step", "prompt_id", "sample_index")


def exploration_of(*folders: Path) -> Exploration | None:
    return analyse_comparison([Trace.open(folder) for folder in folders]).exploration()


def existing(*folders: Path) -> Exploration:
    explored = exploration_of(*folders)
    assert explored is not None
    return explored


def with_tokens(row: Row, name: str, places: Sequence[int], value: object) -> Row:
    return row | {name: [value if t in places else v for t, v in enumerate(row[name])]}


def changed_row(number: int, row: Row) -> Row:
    """π lower by up to 1 nat; one token not scored in every third row, one masked in others."""
    row = shifted(row, number / 100)
    if number % 3 == 0:
        return with_tokens(row, "logp_trainer", [MISSING], float("nan"))
    masked = row | {"loss_mask": [True] * len(row["logp_trainer"])}
    return with_tokens(masked, "loss_mask", [UNMASKED], False)


@pytest.fixture(scope="module")
def rows_b(float32_rows: list[Row]) -> list[Row]:
    """The rows of the second trace in the order of the first; the last ten are missing."""
    return [changed_row(n, row) for n, row in enumerate(float32_rows[:-10])]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, rows_b: list[Row]) -> Path:
    order = np.random.default_rng(1).permutation(len(rows_b))
    folder = tmp_path_factory.mktemp("other") / "trace"
    return write_rows(folder, [rows_b[n] for n in order], FLOAT32, shards=3)


@pytest.fixture(scope="module")
def explored(other: Path) -> Exploration:
    return existing(FLOAT32, other)


def columns(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """log μ and d at equal weights of all tokens, flat."""
    logq_T = np.array([logq for row in rows for logq in row["logp_rollout"]], dtype=np.float32)
    logps = [row.get("logp_recomputed") or row["logp_trainer"] for row in rows]
    return logq_T, np.array([logp for row in logps for logp in row], dtype=np.float32) - logq_T


def counted(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> np.ndarray:
    """Tokens that count in both traces."""
    masks = [row.get("loss_mask") or [True] * len(row["logp_trainer"]) for row in rows_b]
    in_mask_T = np.array([is_kept for mask in masks for is_kept in mask])
    return np.isfinite(columns(rows_a)[1]) & np.isfinite(columns(rows_b)[1]) & in_mask_T


def test_the_same_tokens_have_the_gap_of_both_runs(
    float32_rows: list[Row], rows_b: list[Row], explored: Exploration
) -> None:
    rows_a = float32_rows[:-10]
    tokens = explored.tokens
    assert explored.paired and not explored.judged and len(explored.response_S) == len(rows_a)
    assert [tuple(row[name] for name in KEY) for row in rows_a] == list(
        zip(
            explored.response_S.step.tolist(),
            explored.response_S.prompt_id.tolist(),
            explored.response_S.sample_index.tolist(),
            strict=True,
        )
    )
    for rows, logq_T, logp_T in (
        (rows_a, tokens.logq_T, tokens.logp_T),
        (rows_b, tokens.logq_b_T, tokens.logp_b_T),
    ):
        expected_logq_T, expected_d_T = columns(rows)
        assert logq_T is not None and logp_T is not None
        np.testing.assert_array_equal(logq_T, expected_logq_T)
        np.testing.assert_array_equal(logp_T - logq_T, expected_d_T)
    assert tokens.logp_b_T is not None and np.isnan(tokens.logp_b_T).sum() > 10
    assert not np.isnan(tokens.logp_T).any()


def test_lists_lead_with_the_largest_of_the_tokens_that_count_in_both(
    float32_rows: list[Row], rows_b: list[Row], explored: Exploration
) -> None:
    rows_a = float32_rows[:-10]
    (_, d_T), (_, d_b_T) = columns(rows_a), columns(rows_b)
    counted_T = counted(rows_a, rows_b)
    sizes = {"change": np.abs(d_b_T - d_T), "gap": np.abs(d_T), "gap_b": np.abs(d_b_T)}
    assert [each.name for each in explored.lists] == list(sizes)
    for each in explored.lists:
        size_T = sizes[each.name]
        assert each.population == np.count_nonzero(counted_T)
        assert counted_T[each.token_U].all()
        largest = np.sort(size_T[counted_T])[::-1][: len(each.token_U)]
        np.testing.assert_array_equal(size_T[each.token_U], largest)
    index_T = np.repeat(np.arange(len(rows_a)), [len(row["logp_trainer"]) for row in rows_a])
    absolute_S = np.bincount(index_T[counted_T], np.abs(d_T[counted_T]), len(rows_a))
    np.testing.assert_allclose(explored.response_S.absolute, absolute_S, rtol=1e-5)


def test_an_excluded_token_is_no_leader_of_the_change(
    tmp_path: Path, float32_rows: list[Row]
) -> None:
    rows = [with_tokens(row, "logp_trainer", [1], -np.inf) for row in float32_rows]
    explored = existing(FLOAT32, write_rows(tmp_path / "trace", rows, FLOAT32))
    tokens = explored.tokens
    assert tokens.logp_b_T is not None and np.isneginf(tokens.logp_b_T).any()
    first = explored.lists[0].token_U[:20]
    assert np.isfinite(tokens.logp_b_T[first]).all()


def test_windows_hold_the_same_as_a_whole_page(
    other: Path, explored: Exploration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passages_module, "MOST_TOKENS", 1000)
    few = existing(FLOAT32, other)
    assert len(few.tokens.text_T) <= 1000 < few.total_tokens == len(explored.tokens.text_T)
    first_S = np.cumsum(explored.passage_P.tokens) - explored.passage_P.tokens
    token_T = np.concatenate(
        [first_S[response] + start + np.arange(n) for response, start, n in few.passage_P.tolist()]
    )
    for name in ("logq_T", "logp_T", "logq_b_T", "logp_b_T"):
        np.testing.assert_array_equal(
            getattr(few.tokens, name), getattr(explored.tokens, name)[token_T]
        )


def test_the_payload_names_the_runs_and_colours_the_change(
    rows_b: list[Row], explored: Exploration, other: Path
) -> None:
    view = explorer_view(explored)
    payload = Payload(view.data)
    runs = [FLOAT32.name, other.parent.name]
    assert payload.head["runs"] == runs and payload.head["traces"] == runs[:1]
    assert payload.head["paired"] and payload.head["colour"] == "change"
    assert f"largest |log π − log μ| in {runs[1]}" in [
        each["title"] for each in payload.head["lists"]
    ]
    logq_b_T, d_b_T = columns(rows_b)
    np.testing.assert_allclose(payload.column("logq_b"), logq_b_T, rtol=2**-10, atol=1e-6)
    np.testing.assert_allclose(payload.column("d_b"), d_b_T, rtol=2**-9, atol=1e-6)
    assert "that both traces have" in view.text and "no recorded setting differs" in view.text


def pooled_rows() -> tuple[list[Row], list[Row]]:
    """The rows of both bundled traces to their common prompts, in file order."""
    both = rows_of(FLOAT32), rows_of(FP8)
    prompts = [{tuple(row["prompt_ids"]) for row in rows} for rows in both]
    common = prompts[0] & prompts[1]
    first, other = ([row for row in rows if tuple(row["prompt_ids"]) in common] for rows in both)
    return first, other


def test_other_samples_are_pooled_as_two_traces_of_the_common_prompts() -> None:
    explored = existing(FLOAT32, FP8)
    first, other = pooled_rows()
    assert not explored.paired and explored.runs == explored.traces == ("float32", "fp8-kv")
    assert explored.response_S.trace_index.tolist() == [0] * len(first) + [1] * len(other)
    logq_T, d_T = columns([*first, *other])
    np.testing.assert_array_equal(explored.tokens.logq_T, logq_T)
    np.testing.assert_array_equal(explored.tokens.logp_T - explored.tokens.logq_T, d_T)
    expected = [row["prompt_id"] for row in (*first, *other)]
    assert explored.response_S.prompt_id.tolist() == expected  # the same ids in both
    view = explorer_view(explored)
    head = Payload(view.data).head
    assert head["runs"] == ["float32", "fp8-kv"] and not head["paired"] and head["colour"] == "d"
    assert " float32 → fp8-kv: rollout.kv_cache_dtype float32 → fp8, " in view.text
    assert view.text.count("→ bfloat16") == 2 and " more. π is" in view.text


def test_prompts_with_other_ids_are_numbered_in_the_order_of_the_first_trace(
    tmp_path: Path,
) -> None:
    rows = [row | {"prompt_id": 900 - row["prompt_id"]} for row in rows_of(FP8)]
    explored = existing(FLOAT32, write_rows(tmp_path / "trace", rows[::-1], FP8, shards=2))
    first, other = pooled_rows()
    distinct = dict.fromkeys(tuple(row["prompt_ids"]) for row in first)
    number = {prompt: n for n, prompt in enumerate(distinct)}
    expected = [number[tuple(row["prompt_ids"])] for row in (*first, *other[::-1])]
    assert explored.response_S.prompt_id.tolist() == expected


def repeated(rows: Sequence[Row], seed: int, count: int) -> list[Row]:
    """The first `count` rows with a second log π, which differs from the first by noise."""
    rng = np.random.default_rng(seed)

    def with_noise(row: Row) -> Row:
        logp_T = np.array(row["logp_trainer"])
        again_T = np.minimum(0, logp_T + rng.normal(0, 0.1, len(logp_T)))
        return row | {"logp_trainer_repeat": again_T.tolist()}

    once = [row | {"logp_trainer_repeat": None} for row in rows[count:]]
    return [*map(with_noise, rows[:count]), *once]


def floor_of(folder: Path, *sides: Sequence[Row]) -> Exploration:
    """The exploration of two traces under the pair `floor`."""
    traces = [
        Trace.open(write_rows(folder / str(side) / "trace", rows, FLOAT32))
        for side, rows in enumerate(sides)
    ]
    explored = analyse_comparison(traces, "floor").exploration()
    assert explored is not None
    view = explorer_view(explored)
    assert "π is the trainer again, and μ the trainer." in view.text
    assert explored.tokens.ranks is None and "logq" in Payload(view.data)
    return explored


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.concatenate([row[name] for row in rows]).astype(np.float32)


def test_the_floor_of_both_runs_is_on_the_same_tokens(
    tmp_path: Path, float32_rows: list[Row]
) -> None:
    count = 40
    sides = [repeated(float32_rows, seed, count) for seed in (0, 1)]
    explored = floor_of(tmp_path, *sides)
    tokens = explored.tokens
    assert explored.paired and explored.total_responses == count
    pairs = ((tokens.logq_T, tokens.logp_T), (tokens.logq_b_T, tokens.logp_b_T))
    for (logq_T, logp_T), rows in zip(pairs, sides, strict=True):
        np.testing.assert_array_equal(logq_T, column(rows[:count], "logp_trainer"))
        np.testing.assert_array_equal(logp_T, column(rows[:count], "logp_trainer_repeat"))


def test_the_floor_of_other_samples_is_side_by_side(tmp_path: Path) -> None:
    sides = [repeated(rows, seed, len(rows)) for seed, rows in enumerate(pooled_rows())]
    explored = floor_of(tmp_path, *sides)
    rows = [row for side in sides for row in side]
    assert not explored.paired and explored.total_responses == len(rows)
    np.testing.assert_array_equal(explored.tokens.logq_T, column(rows, "logp_trainer"))
    np.testing.assert_array_equal(explored.tokens.logp_T, column(rows, "logp_trainer_repeat"))


def test_every_response_is_heard_of_twice(other: Path) -> None:
    for folder in (other, FP8):
        analysis = analyse_comparison([Trace.open(FLOAT32), Trace.open(folder)])
        heard: list[int] = []
        explored = analysis.exploration(heard.append)
        assert explored is not None
        assert sum(heard) == 2 * analysis.explored_responses == 2 * explored.total_responses


def test_only_two_paired_traces_are_explored(other: Path) -> None:
    assert exploration_of(FLOAT32, bundled("traces") / "moe") is None
    assert exploration_of(FLOAT32, other, FP8) is None
