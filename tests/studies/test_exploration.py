"""Traces token by token: a page counts what `clipstats` counts, and shows what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.metrics.clipping.masked_slice import Needs, apply_masks
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.report.explorer import explorer_view
from mismatch_cli.rules.algorithms.algorithm import keep_T
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.sliders import slider_positions
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.exploration import explore as explore_module
from mismatch_cli.studies.exploration import leaders as leaders_module
from mismatch_cli.studies.exploration import passages as passages_module
from mismatch_cli.studies.exploration import token_survey as survey_module
from mismatch_cli.studies.exploration.explore import explore
from mismatch_cli.studies.exploration.explored import NOT_JUDGED, BlockedLevels, Exploration
from mismatch_cli.studies.exploration.slider_levels import STAYS
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace import writer
from mismatch_cli.trace.reader import Trace
from tests.metrics.clipping.world import (
    ALL,
    EVERYTHING,
    PLAIN,
    found_in,
    plain_algorithms,
    simple,
    without,
    world,
)
from tests.studies.written import long_batch, write_trace

NOTHING = Needs(advantages=False, recomputed=False, top_k=0)
LONG = (1500, 40, 2500)  # of three responses whose windows do not meet


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("run") / "trace", world(0, 24), world(1, 24))


@pytest.fixture(scope="module")
def explored(trace: Trace) -> Exploration:
    return existing(analyse_clipping([trace], ALL).exploration())


def existing(exploration: Exploration | None) -> Exploration:
    assert exploration is not None
    return exploration


def judged_by(exploration: Exploration, name: str, sign: str = "") -> BlockedLevels:
    return next(
        judged for judged in exploration.judged if (judged.algorithm, judged.sign) == (name, sign)
    )


def share(judged: BlockedLevels, position: int | None = None) -> float:
    """The blocked share of the judged tokens of the traces, as the page's script counts it.

    Where the page has all tokens, it is also that of their levels.
    """
    place = judged.published if position is None else position
    return float(judged.blocked[:, place].sum() / judged.judged.sum())


def share_of_levels(judged: BlockedLevels, position: int) -> float:
    level_T = judged.level_T[judged.level_T != NOT_JUDGED]
    return float(np.mean(level_T > position))


def test_every_algorithm_blocks_the_tokens_that_its_masks_block(explored: Exploration) -> None:
    assert [judged.algorithm for judged in explored.judged] == [algorithm.name for algorithm in ALL]
    total, batches = 0, [world(seed, 24) for seed in (0, 1)]
    batch_values = found_in(batches, EVERYTHING, ALL)
    for batch in batches:
        for (masked,) in apply_masks(batch, EVERYTHING, ALL, batch_values):
            tokens = masked.gaps.index_N[masked.judged_N]
            for judged, algorithm in zip(explored.judged, ALL, strict=True):
                level_T = judged.level_T[total : total + batch.num_tokens]
                assert np.array_equal(np.flatnonzero(level_T != NOT_JUDGED), tokens)
                kept_N = keep_T(algorithm, masked.policies, masked.advantage_N)[masked.judged_N]
                assert np.array_equal(level_T[tokens] <= judged.published, kept_N), algorithm.name
        total += batch.num_tokens
    assert total == len(explored.tokens.text_T)


def test_every_column_that_an_algorithm_may_need_is_read(tmp_path: Path) -> None:
    """A column that is not read would remove all algorithms from the page."""
    batch = world(0, 24)
    averaged = replace(batch, logp_average_T=batch.logp_recomputed_T)
    names = ("grpo-clip-higher", "ppo-ewma", "top-entropy", "ppo", "dppo-topk-tv-recompute")
    trace = write_trace(tmp_path / "trace", averaged)
    exploration = existing(
        analyse_clipping([trace], [parse_algorithm(name) for name in names]).exploration()
    )
    assert [judged.algorithm for judged in exploration.judged] == list(names)


def test_the_share_is_what_clipstats_prints(trace: Trace, explored: Exploration) -> None:
    rows = analyse_clipping([trace], ALL).to_json()["algorithms"]
    assert_counted_as_in(rows, explored)


def assert_counted_as_in(rows: Sequence[dict[str, Any]], exploration: Exploration) -> None:
    """The shares of `clipstats`, in all and by the sign of A, to the token."""
    assert [row["name"] for row in rows] == [judged.algorithm for judged in exploration.judged]
    for row, judged in zip(rows, exploration.judged, strict=True):
        shares = {"all": share(judged)}
        for sign, name in enumerate(("positive", "negative")):
            shares[name] = judged.blocked[sign, judged.published] / judged.judged[sign]
        for name, value in shares.items():
            assert row["blocked"][name]["value"] == pytest.approx(value, abs=1e-12), row["name"]


def test_the_counts_are_of_all_tokens_whatever_fits(
    trace: Trace, explored: Exploration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passages_module, "MOST_TOKENS", 300)
    few = existing(analyse_clipping([trace], ALL).exploration())
    assert len(few.tokens.text_T) <= 300 < few.total_tokens == len(explored.tokens.text_T)
    assert_counted_as_in(analyse_clipping([trace], ALL).to_json()["algorithms"], few)
    token_U = places_in(explored, few)
    for judged, of_all in zip(few.judged, explored.judged, strict=True):
        assert np.array_equal(judged.blocked, of_all.blocked)
        assert np.array_equal(judged.level_T, of_all.level_T[token_U])


def places_in(whole: Exploration, some: Exploration) -> np.ndarray:
    """The tokens of a page among those of one that has all."""
    first_S = np.cumsum(whole.passage_P.tokens) - whole.passage_P.tokens
    return np.concatenate(
        [
            first_S[response] + np.arange(start, start + tokens)
            for response, start, tokens in some.passage_P.tolist()
        ]
    )


@pytest.mark.parametrize("place", [0, 5, -9, -1])
def test_a_slider_moved_is_clipstats_with_these_thresholds(
    trace: Trace, explored: Exploration, place: int
) -> None:
    """Thresholds typed as the page shows them, together with the algorithms that decide which
    tokens are judged.
    """
    movable = [judged for judged in explored.judged if len(judged.thresholds) > 1]
    fixed = [a for a in ALL if not a.masks or any(mask.scope for mask in a.masks)]
    assert len(movable) == len(ALL) - len(fixed)
    lines = {judged.algorithm: typed(judged, place) for judged in movable}
    moved = tuple(parse_algorithm(spec) for spec in lines.values())
    needy = tuple(algorithm for algorithm in ALL if algorithm.name.endswith("-recompute"))
    rows = {
        row["name"]: row
        for row in analyse_clipping([trace], (*moved, *needy)).to_json()["algorithms"]
    }
    for judged in movable:
        position = range(len(judged.thresholds))[place]
        expected = rows[lines[judged.algorithm]]["blocked"]["all"]["value"]
        assert share(judged, position) == pytest.approx(expected, abs=1e-12), lines[
            judged.algorithm
        ]


def typed(judged: BlockedLevels, place: int) -> str:
    return f"{judged.algorithm}:" + ",".join(
        f"{name}={value:.9g}" for name, value in judged.thresholds[place].items()
    )


def test_positions_go_from_strict_to_loose_through_the_published_one(explored: Exploration) -> None:
    for judged, algorithm in zip(explored.judged, ALL, strict=True):
        shares = [share(judged, position) for position in range(len(judged.thresholds))]
        of_levels = [share_of_levels(judged, place) for place in range(len(judged.thresholds))]
        assert shares == pytest.approx(of_levels, abs=1e-12)
        assert shares == sorted(shares, reverse=True), judged.algorithm
        assert slider_positions(algorithm)[judged.published][0] is algorithm
        for low, high in zip(judged.thresholds, judged.thresholds[1:], strict=False):
            looser = {
                name: low[name] > high[name] if name == "band_low" else low[name] < high[name]
                for name in low
            }
            assert all(looser.values()), judged.algorithm


def test_in_a_long_trace_only_the_compared_thresholds_move(
    trace: Trace, explored: Exploration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mismatch_cli.studies.clipping.MOST_LEVELS", 5 * explored.total_tokens)
    analysis = analyse_clipping([trace], ALL)
    exploration = existing(analysis.exploration())
    moving = {algorithm.masks for algorithm in analysis.compared}
    for judged, every, algorithm in zip(exploration.judged, explored.judged, ALL, strict=True):
        assert share(judged) == share(every)
        if algorithm.masks in moving:
            assert judged.moves and judged.thresholds == every.thresholds
            continue
        assert judged.thresholds == every.thresholds[every.published :][:1]
        assert judged.unmoved == (STAYS if every.moves else every.unmoved)
        blocked_T = (every.level_T > every.published) & (every.level_T != NOT_JUDGED)
        np.testing.assert_array_equal(judged.level_T == 1, blocked_T)
    few = existing(analyse_clipping([trace], ALL[:5]).exploration())
    assert not [judged for judged in few.judged if judged.unmoved == STAYS]


def test_a_mask_whose_share_does_not_fall_is_shown_as_decided(tmp_path: Path, trace: Trace) -> None:
    """A user's own mask, which blocks ratios near its threshold."""
    file = tmp_path / "near.py"
    file.write_text(
        "from mismatch_cli import Decision\n"
        "def trust_region(compared, advantage_T, *, near: float = 1.0):\n"
        "    away_T = abs(compared.ratio_T - near)\n"
        "    return Decision(away_T > 0.1, away_T)\n",
        encoding="utf-8",
    )
    algorithm = parse_algorithm(str(file))
    (judged,) = existing(analyse_clipping([trace], (algorithm,)).exploration()).judged
    assert (len(judged.thresholds), judged.published) == (1, 0)
    assert judged.unmoved == "not ordered by its threshold"
    assert 0 < share(judged) < 1 and share(judged) == share_of_levels(judged, 0)
    (row,) = analyse_clipping([trace], (algorithm,)).to_json()["algorithms"]
    assert share(judged) == row["blocked"]["all"]["value"]


def test_without_advantages_each_algorithm_is_judged_for_both_signs(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 40), without=("advantage",))
    analysis = analyse_clipping([trace], ALL)
    exploration, rows = existing(analysis.exploration()), analysis.to_json()["algorithms"]
    assert exploration.tokens.advantage_T is None and len(exploration.judged) == 2 * sum(
        not a.batch_masks for a in ALL
    )
    for row in rows:
        for of_sign, (sign, key) in enumerate(((">", "positive"), ("<", "negative"))):
            judged = judged_by(exploration, row["name"], sign)
            assert share(judged) == pytest.approx(row["blocked"][key]["value"], abs=1e-12)
            assert judged.judged[1 - of_sign] == 0 < judged.judged[of_sign]


def test_a_gap_is_explored_at_equal_weights_and_judged_at_the_current_trainer(
    tmp_path: Path, trace: Trace
) -> None:
    """`report` is about the mismatch, a mask about the current trainer."""
    exploration = existing(analyse_mismatch([trace], worst=3).exploration())
    assert (exploration.pair.name, exploration.judged_alike) == ("mismatch", False)
    pair = (parse_algorithm("grpo-clip-higher"), parse_algorithm("dppo-binary-tv"))
    rows = analyse_clipping([trace], pair).to_json()["algorithms"]
    assert [share(judged) for judged in exploration.judged] == pytest.approx(
        [row["blocked"]["all"]["value"] for row in rows]
    )
    absent = ("logp_recomputed", "topk_logp_recomputed")
    equal = write_trace(tmp_path / "trace", world(0, 40), without=absent, equal_weights=True)
    assert existing(analyse_mismatch([equal], worst=3).exploration()).judged_alike


def test_ranks_are_those_of_the_tokens_in_lists(trace: Trace, explored: Exploration) -> None:
    ranks = explored.tokens.ranks
    assert ranks is not None and ranks.logq_UK.shape == (len(ranks.token_U), 5)
    listed = {token for each in explored.lists for token in each.token_U.tolist()}
    assert ranks.token_U.tolist() == sorted(listed)
    batches = list(trace.batches())
    for name, recorded_UK in (("rollout", ranks.logq_UK), ("trainer", ranks.logp_UK)):
        topk = np.concatenate([getattr(batch, f"topk_logp_{name}_TK") for batch in batches])
        np.testing.assert_array_equal(recorded_UK, topk[ranks.token_U, :5])
    ids = np.concatenate([batch.topk_ids_TK for batch in batches])[ranks.token_U, :5]
    decode = trace.vocabulary.decode
    assert ranks.text_UK == [[decode([token]) for token in row] for row in ids.tolist()]


def test_lists_are_of_the_whole_trace(
    trace: Trace, explored: Exploration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of all tokens in order, and samples of all that the compared algorithms block."""
    lists = {each.name: each for each in explored.lists}
    assert list(lists) == ["gap", "probability", "only", "blocked"]
    batches = list(trace.batches())
    logq_T = np.concatenate([batch.logp_rollout_T for batch in batches])
    logp_T = np.concatenate([batch.logp_trainer_T for batch in batches])
    mask_T = np.concatenate([batch.loss_mask_T for batch in batches])
    sizes = {"gap": np.abs(logp_T - logq_T), "probability": np.abs(np.exp(logp_T) - np.exp(logq_T))}
    for name, size_T in sizes.items():
        counted_T = np.where(mask_T & np.isfinite(size_T), size_T, 0)
        largest = np.sort(counted_T)[::-1][: len(lists[name].token_U)]
        assert counted_T[lists[name].token_U] == pytest.approx(largest, rel=1e-5)
        assert lists[name].population == np.count_nonzero(mask_T & np.isfinite(logp_T))
    a, b = (blocked(judged_by(explored, name)) for name in explored.compared)
    for name, member_T in {"only": a ^ b, "blocked": a | b}.items():
        assert sorted(lists[name].token_U.tolist()) == np.flatnonzero(member_T).tolist()
    monkeypatch.setattr(leaders_module, "LEADERS", 40)
    for few in existing(analyse_clipping([trace], ALL).exploration()).lists:
        assert few.token_U.tolist() == lists[few.name].token_U[:40].tolist()
        assert few.population == lists[few.name].population


def blocked(judged: BlockedLevels) -> np.ndarray:
    """Whether each token is blocked at the algorithm's own thresholds."""
    return (judged.level_T != NOT_JUDGED) & (judged.level_T > judged.published)


def test_lists_without_members_are_left_out(tmp_path: Path, trace: Trace) -> None:
    exploration = existing(explore([trace], PAIRS["total"], (), NOTHING, {}))
    assert [each.name for each in exploration.lists] == ["gap", "probability"]
    one = analyse_clipping([trace], (parse_algorithm("grpo-clip-higher"),)).exploration()
    assert [each.name for each in existing(one).lists] == ["gap", "probability", "blocked"]
    equal = simple([[-1.0, -2.0]], [[-1.0, -2.0]], [1.0])
    same = explore([write_trace(tmp_path / "trace", equal)], PAIRS["total"], (), NOTHING, {})
    assert existing(same).lists == ()


def test_several_traces_with_different_top_k(tmp_path: Path) -> None:
    """Twenty ranks in one, three in the other, and a third without any: each token has what its
    trace has.
    """
    recorded = [world(0, 12), world(1, 12, top_k=3), without_topk(world(2, 12))]
    traces = [
        write_trace(tmp_path / str(n) / "trace", batch, seed=n) for n, batch in enumerate(recorded)
    ]
    algorithms = (parse_algorithm("dppo-topk-tv:k=3"), *ALL[:3])
    analysis = analyse_clipping(traces[:2], algorithms)
    exploration = existing(analysis.exploration())
    assert exploration.response_S.trace_index.tolist() == [0] * 12 + [1] * 12
    assert_counted_as_in(analysis.to_json()["algorithms"], exploration)
    mixed = existing(explore(traces, PAIRS["total"], ALL[2:3], PLAIN, {}))
    ranks, first = mixed.tokens.ranks, recorded[0].num_tokens
    assert ranks is not None and ranks.token_U.max() < first + recorded[1].num_tokens
    assert np.isfinite(ranks.logq_UK[ranks.token_U < first]).all()
    short_UK = ranks.logq_UK[ranks.token_U >= first]
    assert np.isfinite(short_UK[:, :3]).all() and np.isnan(short_UK[:, 3:]).all()
    assert [Path(name).name for name in mixed.traces] == ["0", "1", "2"]


def without_topk(batch: TokenBatch) -> TokenBatch:
    return without(
        batch,
        "topk_ids_TK",
        "topk_logp_rollout_TK",
        "topk_logp_trainer_TK",
        "topk_logp_recomputed_TK",
    )


def test_a_shard_that_lacks_a_column_is_shown_and_not_judged(tmp_path: Path) -> None:
    batches = (
        world(0, 12),
        without(world(1, 12), "logp_recomputed_T"),
        without(world(2, 12), "logp_trainer_T"),
    )
    trace = write_trace(tmp_path / "trace", *batches)
    analysis = analyse_clipping([trace], ALL)
    exploration = existing(analysis.exploration())
    assert exploration.total_responses == 24
    first = batches[0].num_tokens
    for judged, row in zip(exploration.judged, analysis.to_json()["algorithms"], strict=True):
        assert (judged.level_T[first:] == NOT_JUDGED).all()
        assert share(judged) == pytest.approx(row["blocked"]["all"]["value"], abs=1e-12)


def test_tokens_without_usable_values(tmp_path: Path) -> None:
    """Out of support, not measured, masked, without advantage, and a response without tokens."""
    no = float("nan")
    batch = simple(
        [[-1.0, -1.0, -1.0, -1.0], [], [-0.5, -0.5]],
        [[-np.inf, no, -3.0, -3.0], [], [-0.5, -9.0]],
        [-1.0, 1.0, 0.0],
        loss_mask_T=np.array([True, True, False, True, True, True]),
    )
    exploration = existing(
        explore(
            [write_trace(tmp_path / "trace", batch)], PAIRS["total"], plain_algorithms(), PLAIN, {}
        )
    )
    assert exploration.passage_P.tolist() == [(0, 0, 4), (1, 0, 0), (2, 0, 2)]
    of_response = {
        name: exploration.response_S[name].tolist() for name in ("absolute", "signed", "largest")
    }
    assert of_response == {"absolute": [2, 0, 8.5], "signed": [-2, 0, -8.5], "largest": [2, 0, 8.5]}
    clip = judged_by(exploration, "grpo-clip-higher")
    assert [int(level > clip.published) for level in clip.level_T[[0, 3]]] == [1, 1]
    assert (clip.level_T[[1, 2, 4, 5]] == NOT_JUDGED).all()
    assert exploration.tokens.ranks is None and exploration.tokens.entropy_T is None


def test_windows_have_the_levels_of_complete_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks on whole responses, on batches and on single tokens."""
    names = ("gspo", "cppo", "ppo-mis", "m2po", "dppo-binary-tv", "trm-avg", "vaco", "ppo-opsm")
    algorithms = tuple(map(parse_algorithm, names))
    trace = write_trace(tmp_path / "trace", long_batch(LONG), long_batch(LONG, 1))
    whole = existing(analyse_clipping([trace], algorithms).exploration())
    monkeypatch.setattr(passages_module, "MOST_TOKENS", 1500)
    few = existing(analyse_clipping([trace], algorithms).exploration())
    assert len(few.tokens.text_T) <= 1500 and not few.whole_P.all() and len(few.passage_P) > 5
    token_U = places_in(whole, few)
    for judged, of_all in zip(few.judged, whole.judged, strict=True):
        assert np.array_equal(judged.blocked, of_all.blocked)
        assert np.array_equal(judged.level_T, of_all.level_T[token_U]), judged.algorithm
    for name in ("logq_T", "logp_T", "advantage_T"):
        np.testing.assert_array_equal(
            getattr(few.tokens, name), getattr(whole.tokens, name)[token_U]
        )
    assert list(few.tokens.text_T) == [whole.tokens.text_T[token] for token in token_U.tolist()]
    assert few.response_S.tobytes() == whole.response_S.tobytes()


def test_profiles_are_of_responses_that_are_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passages_module, "MOST_TOKENS", 1500)
    batch = long_batch(LONG)
    trace = write_trace(tmp_path / "trace", batch)
    exploration = existing(explore([trace], PAIRS["total"], (), NOTHING, {}))
    assert exploration.profile_response_R.tolist() == [0, 2] and exploration.profile_RB.shape == (
        2,
        48,
    )
    assert batch.logp_trainer_T is not None
    d_T = np.abs(batch.logp_trainer_T - batch.logp_rollout_T)
    for response, profile_B in zip([0, 2], exploration.profile_RB, strict=True):
        first, end = batch.offset_S1[response : response + 2].tolist()
        parts = np.arange(end - first) * 48 // (end - first)
        expected = [d_T[first:end][parts == part].max() for part in range(48)]
        np.testing.assert_array_equal(profile_B, np.array(expected, dtype=np.float32))
        assert exploration.response_S.largest[response] == max(expected)


def test_responses_with_passages_are_listed_before_the_first_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = existing(explore([traced(tmp_path)], PAIRS["total"], (), NOTHING, {}))
    for module in (passages_module, survey_module, explore_module):
        monkeypatch.setattr(module, "MOST_RESPONSES", 12)
    monkeypatch.setattr(passages_module, "MOST_TOKENS", 150)
    monkeypatch.setattr(leaders_module, "LEADERS", 2)
    exploration = existing(explore([traced(tmp_path)], PAIRS["total"], (), NOTHING, {}))
    assert (
        len(exploration.response_S) == 12
        and exploration.total_responses == len(every.response_S) == 48
    )
    assert sorted(exploration.prompts) == sorted(set(exploration.passage_P.response.tolist()))
    keys = [(row["step"], row["prompt_id"], row["sample_index"]) for row in every.response_S]
    numbers = [
        keys.index((row["step"], row["prompt_id"], row["sample_index"]))
        for row in exploration.response_S
    ]
    assert numbers == sorted(numbers) and max(numbers) >= 12
    assert exploration.response_S.tobytes() == every.response_S[numbers].tobytes()
    shown = {numbers[place] for place in exploration.prompts}
    others = [number for number in range(12) if number not in shown]
    assert numbers == sorted([*shown, *others[: 12 - len(shown)]])


def traced(tmp_path: Path) -> Trace:
    return write_trace(tmp_path / "trace", world(0, 24), world(1, 24))


@pytest.mark.parametrize("most", [100, 10**6])
def test_every_response_is_heard_of_twice(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(passages_module, "MOST_TOKENS", most)
    heard: list[int] = []
    analysis = analyse_mismatch([trace], worst=3)
    assert analysis.exploration(heard.append)
    assert sum(heard) == 2 * analysis.explored_responses == 96


def test_an_unscored_trace_and_one_without_responses(tmp_path: Path) -> None:
    unscored = write_trace(tmp_path / "a" / "trace", without(world(0, 12), "logp_trainer_T"))
    assert explore([unscored], PAIRS["total"], ALL[:1], NOTHING, {}) is None
    scored = write_trace(tmp_path / "b" / "trace", world(1, 12))
    exploration = existing(explore([unscored, scored], PAIRS["total"], (), NOTHING, {}))
    assert set(exploration.response_S.trace_index.tolist()) == {1} and exploration.judged == ()


@pytest.mark.parametrize("most", [passages_module.MOST_TOKENS, 1500])
def test_row_groups_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Leaders, passages and levels are the same, however a trace is cut into shards and groups."""
    monkeypatch.setattr(passages_module, "MOST_TOKENS", most)
    algorithms = tuple(map(parse_algorithm, ("grpo-clip-higher", "dppo-binary-tv", "gspo")))
    needs, together = replace(PLAIN, recomputed=True), long_batch(LONG)
    one = write_trace(tmp_path / "one" / "trace", together)
    monkeypatch.setattr(writer, "MAX_TOKENS_PER_ROW_GROUP", 1000)
    many = write_trace(tmp_path / "many" / "trace", together)
    assert len(list(one.tables())) == 1 < len(list(many.tables()))
    first, other = (
        existing(explore([trace], PAIRS["total"], algorithms, needs, {}, algorithms[:2]))
        for trace in (one, many)
    )
    assert explorer_view(first).data == explorer_view(replace(other, traces=first.traces)).data
