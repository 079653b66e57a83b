"""The first responses of traces, token by token: a page shows what `clipstats` decides on the
same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.algorithms.algorithm import Algorithm, keep_T
from mismatch_cli.algorithms.parse import find
from mismatch_cli.algorithms.sliders import sliders
from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.clipping.masked import Needs, apply_masks
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.exploration import MOST_TOKENS, NOT_JUDGED, Exploration, Judged, explore
from mismatch_cli.studies.mismatch import analyse
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
from tests.studies.written import TEXTS, write_trace

NOTHING = Needs(advantages=False, recomputed=False, top_k=0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("run") / "trace", world(0, 24), world(1, 24))


@pytest.fixture(scope="module")
def explored(trace: Trace) -> Exploration:
    return existing(analyse_clipping([trace], ALL).exploration())


def existing(found: Exploration | None) -> Exploration:
    assert found is not None
    return found


def judged_by(found: Exploration, name: str, sign: str = "") -> Judged:
    return next(
        judged for judged in found.judged if (judged.algorithm, judged.sign) == (name, sign)
    )


def share(judged: Judged, position: int | None = None) -> float:
    """The blocked share of the judged tokens, as the page's script counts it."""
    level_T = judged.level_T[judged.level_T != NOT_JUDGED]
    return float(np.mean(level_T > (judged.published if position is None else position)))


def test_every_algorithm_blocks_the_tokens_that_its_masks_block(explored: Exploration) -> None:
    assert [judged.algorithm for judged in explored.judged] == [algorithm.name for algorithm in ALL]
    seen, batches = 0, [world(seed, 24) for seed in (0, 1)]
    found = found_in(batches, EVERYTHING, ALL)
    for batch in batches:
        for (masked,) in apply_masks(batch, EVERYTHING, ALL, found):
            tokens = masked.gaps.index_N[masked.judged_N]
            for judged, algorithm in zip(explored.judged, ALL, strict=True):
                level_T = judged.level_T[seen : seen + batch.num_tokens]
                assert np.array_equal(np.flatnonzero(level_T != NOT_JUDGED), tokens)
                kept_N = keep_T(algorithm, masked.policies, masked.advantage_N)[masked.judged_N]
                assert np.array_equal(level_T[tokens] <= judged.published, kept_N), algorithm.name
        seen += batch.num_tokens
    assert seen == len(explored.text_T)


def test_every_column_that_an_algorithm_may_need_is_read(tmp_path: Path) -> None:
    """A column that is not read would remove all algorithms from the page."""
    batch = world(0, 24)
    averaged = replace(batch, logp_average_T=batch.logp_recomputed_T)
    names = ("grpo-clip-higher", "ppo-ewma", "top-entropy", "ppo", "dppo-topk-tv-recompute")
    trace = write_trace(tmp_path / "trace", averaged)
    found = existing(analyse_clipping([trace], [find(name) for name in names]).exploration())
    assert [judged.algorithm for judged in found.judged] == list(names)


def test_the_share_is_what_clipstats_prints(trace: Trace, explored: Exploration) -> None:
    rows = analyse_clipping([trace], ALL).to_json()["algorithms"]
    assert {row["name"]: row["blocked"]["all"]["value"] for row in rows} == pytest.approx(
        {judged.algorithm: share(judged) for judged in explored.judged}, abs=1e-12
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
    asked = {judged.algorithm: typed(judged, place) for judged in movable}
    moved = tuple(find(spec) for spec in asked.values())
    needy = tuple(algorithm for algorithm in ALL if algorithm.name.endswith("-recompute"))
    rows = {
        row["name"]: row
        for row in analyse_clipping([trace], (*moved, *needy)).to_json()["algorithms"]
    }
    for judged in movable:
        position = range(len(judged.thresholds))[place]
        expected = rows[asked[judged.algorithm]]["blocked"]["all"]["value"]
        assert share(judged, position) == pytest.approx(expected, abs=1e-12), asked[
            judged.algorithm
        ]


def typed(judged: Judged, place: int) -> str:
    return f"{judged.algorithm}:" + ",".join(
        f"{name}={value:.9g}" for name, value in judged.thresholds[place].items()
    )


def test_positions_go_from_strict_to_loose_through_the_published_one(explored: Exploration) -> None:
    for judged, algorithm in zip(explored.judged, ALL, strict=True):
        shares = [share(judged, position) for position in range(len(judged.thresholds))]
        assert shares == sorted(shares, reverse=True), judged.algorithm
        assert sliders(algorithm)[judged.published][0] is algorithm
        for low, high in zip(judged.thresholds, judged.thresholds[1:], strict=False):
            looser = {
                name: low[name] > high[name] if name == "band_low" else low[name] < high[name]
                for name in low
            }
            assert all(looser.values()), judged.algorithm


def test_a_mask_whose_share_does_not_fall_is_shown_as_decided(tmp_path: Path, trace: Trace) -> None:
    """A user's own mask, which blocks ratios near its threshold."""
    file = tmp_path / "near.py"
    file.write_text(
        "from mismatch_cli.trust_regions import Decision\n"
        "def trust_region(compared, advantage_T, *, near: float = 1.0):\n"
        "    away_T = abs(compared.ratio_T - near)\n"
        "    return Decision(away_T > 0.1, away_T)\n",
        encoding="utf-8",
    )
    algorithm = find(str(file))
    (judged,) = existing(analyse_clipping([trace], (algorithm,)).exploration()).judged
    assert (len(judged.thresholds), judged.published) == (1, 0)
    assert judged.unmoved == "not ordered by its threshold"
    assert 0 < share(judged) < 1
    (row,) = analyse_clipping([trace], (algorithm,)).to_json()["algorithms"]
    assert share(judged) == row["blocked"]["all"]["value"]


def test_without_advantages_each_algorithm_is_judged_for_both_signs(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 40), without=("advantage",))
    analysis = analyse_clipping([trace], ALL)
    found, rows = existing(analysis.exploration()), analysis.to_json()["algorithms"]
    assert found.advantage_T is None and len(found.judged) == 2 * sum(
        not a.batch_masks for a in ALL
    )
    for row in rows:
        for sign, key in ((">", "positive"), ("<", "negative")):
            assert share(judged_by(found, row["name"], sign)) == pytest.approx(
                row["blocked"][key]["value"], abs=1e-12
            )


def test_a_gap_is_explored_at_equal_weights_and_judged_at_the_current_trainer(
    tmp_path: Path, trace: Trace
) -> None:
    """`report` is about the mismatch, a mask about the current trainer."""
    found = existing(analyse([trace], worst=3).exploration())
    assert (found.pair.name, found.judged_alike) == ("mismatch", False)
    pair = (find("grpo-clip-higher"), find("dppo-binary-tv"))
    rows = analyse_clipping([trace], pair).to_json()["algorithms"]
    assert [share(judged) for judged in found.judged] == pytest.approx(
        [row["blocked"]["all"]["value"] for row in rows]
    )
    absent = ("logp_recomputed", "topk_logp_recomputed")
    equal = write_trace(tmp_path / "trace", world(0, 40), without=absent, equal_weights=True)
    assert existing(analyse([equal], worst=3).exploration()).judged_alike


def test_tokens_keep_their_numbers(trace: Trace, explored: Exploration) -> None:
    batches = list(trace.batches())
    ids_T = np.concatenate([batch.response_ids_T for batch in batches])
    words = [TEXTS[token] if token < len(TEXTS) else f"⟨{token}⟩" for token in ids_T.tolist()]
    assert list(explored.text_T) == words
    for name, column in (
        ("logq_T", "logp_rollout_T"),
        ("logp_T", "logp_trainer_T"),
        ("advantage_T", "advantage_T"),
    ):
        expected = np.concatenate([getattr(batch, column) for batch in batches])
        np.testing.assert_array_equal(getattr(explored, name), expected)
    lengths = np.concatenate([np.diff(batch.offset_S1) for batch in batches]).tolist()
    assert [response.tokens for response in explored.responses] == lengths
    assert {response.prompt for response in explored.responses} == {"".join(TEXTS[1:5])}
    graded = [response.reward for response in explored.responses]
    assert graded.count(None) == 2 and set(graded) == {None, 0.0, 1.0}
    ranks = explored.ranks
    assert ranks is not None and ranks.logq_UK.shape == (len(ranks.token_U), 5)
    topk = np.concatenate([batch.topk_logp_trainer_TK for batch in batches])
    np.testing.assert_array_equal(ranks.logp_UK, topk[ranks.token_U, :5])


def test_only_the_requested_responses_of_the_first_shards(trace: Trace) -> None:
    found = existing(explore([trace], PAIRS["total"], ALL[:3], PLAIN, {}, responses=30))
    assert (len(found.responses), found.left_out, found.full) == (30, 18, False)
    assert [response.prompt_id for response in found.responses][-6:] == [
        100,
        100,
        100,
        101,
        101,
        101,
    ]
    assert explore([trace], PAIRS["total"], ALL[:3], PLAIN, {}, responses=0) is None


def test_several_traces_with_different_top_k(tmp_path: Path) -> None:
    """Twenty ranks in one, five in the other, and a third without any: each token has what its
    trace has.
    """
    recorded = [world(0, 12), world(1, 12, top_k=5), without_topk(world(2, 12))]
    traces = [
        write_trace(tmp_path / str(n) / "trace", batch, seed=n) for n, batch in enumerate(recorded)
    ]
    found = existing(
        analyse_clipping(traces[:2], (find("dppo-topk-tv:k=5"), *ALL[:3])).exploration()
    )
    assert [response.trace for response in found.responses] == [0] * 12 + [1] * 12
    row = analyse_clipping(traces[:2], (find("dppo-topk-tv:k=5"), *ALL[:3])).to_json()[
        "algorithms"
    ][0]
    assert share(found.judged[0]) == pytest.approx(row["blocked"]["all"]["value"], abs=1e-12)
    mixed = existing(explore(traces, PAIRS["total"], ALL[2:3], PLAIN, {}))
    assert mixed.ranks is not None and len(mixed.text_T) == sum(
        batch.num_tokens for batch in recorded
    )
    assert mixed.ranks.token_U.max() < sum(batch.num_tokens for batch in recorded[:2])


def test_several_traces_share_the_page(tmp_path: Path) -> None:
    traces = [write_trace(tmp_path / str(n) / "trace", world(n, 24), seed=n) for n in range(3)]
    found = existing(explore(traces, PAIRS["total"], (), PLAIN, {}, responses=10))
    assert [response.trace for response in found.responses] == [0] * 4 + [1] * 3 + [2] * 3
    assert [Path(name).name for name in found.traces] == ["0", "1", "2"] and found.left_out == 62
    tokens = sum(response.tokens for response in found.responses)
    assert len(found.text_T) == tokens == len(found.logq_T)


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
    found = existing(analysis.exploration())
    assert (len(found.responses), found.left_out) == (24, 12)
    first = batches[0].num_tokens
    for judged, row in zip(found.judged, analysis.to_json()["algorithms"], strict=True):
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
    found = existing(
        explore(
            [write_trace(tmp_path / "trace", batch)], PAIRS["total"], plain_algorithms(), PLAIN, {}
        )
    )
    assert [response.tokens for response in found.responses] == [4, 0, 2]
    clip = judged_by(found, "grpo-clip-higher")
    assert [int(level > clip.published) for level in clip.level_T[[0, 3]]] == [1, 1]
    assert (clip.level_T[[1, 2, 4, 5]] == NOT_JUDGED).all()
    assert found.ranks is None and found.entropy_T is None


def test_a_response_longer_than_a_page_is_cut_and_judged_as_a_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logq_T = -rng.exponential(1.0, 130_000).astype(np.float32)
    logp_T = np.minimum(logq_T + rng.normal(0.0, 0.1, len(logq_T)).astype(np.float32), 0)
    logp_T[:MOST_TOKENS] = logq_T[:MOST_TOKENS]  # nothing has moved yet at the end of the page
    batch = simple([logq_T.tolist()], [logp_T.tolist()], [-1.0])
    batch = replace(
        batch, response_ids_T=batch.response_ids_T % 8, logp_recomputed_T=batch.logp_rollout_T
    )
    algorithms: Sequence[Algorithm] = (find("gspo"), find("dppo-binary-tv"))
    needs = replace(PLAIN, recomputed=True)
    trace = write_trace(tmp_path / "trace", batch, batch)
    found = existing(explore([trace], PAIRS["total"], algorithms, needs, {}))
    (response,) = found.responses
    assert (response.length, response.tokens, len(found.text_T)) == (
        130_000,
        MOST_TOKENS,
        MOST_TOKENS,
    )
    assert found.left_out == 1 and found.full
    assert not existing(explore([trace], PAIRS["total"], algorithms, needs, {}, responses=1)).full
    gspo, tv = found.judged
    assert (share(gspo), share(tv)) == (1.0, 0.0)


def test_an_unscored_trace_and_one_without_responses(tmp_path: Path) -> None:
    unscored = write_trace(tmp_path / "a" / "trace", without(world(0, 12), "logp_trainer_T"))
    assert explore([unscored], PAIRS["total"], ALL[:1], NOTHING, {}) is None
    scored = write_trace(tmp_path / "b" / "trace", world(1, 12))
    found = existing(explore([unscored, scored], PAIRS["total"], (), NOTHING, {}))
    assert {response.trace for response in found.responses} == {1} and found.judged == ()
