"""A trace on disk, judged shard by shard: it gives the accumulators' numbers for any number of
workers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.processes.workers import Workers
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.clipping import analyse_clipping, token_class
from mismatch_cli.studies.clipping_result import ClippingResult
from mismatch_cli.trace.reader import Trace
from tests.metrics.clipping.world import (
    ALL,
    PLAIN,
    estimates_in,
    result_of,
    summarise,
    without,
    world,
)
from tests.paths import DOCS
from tests.studies.written import TEXTS, write_trace

SEEDS = (0, 1, 2)
PAGE = DOCS / "json" / "clipstats.md"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(
        tmp_path_factory.mktemp("run") / "trace", *(world(seed, 24) for seed in SEEDS)
    )


@pytest.fixture(scope="module")
def result(trace) -> dict[str, Any]:
    return analyse_clipping([trace], ALL, theory=True, arguments=["--theory"]).to_json()


def merged_result(*batches: TokenBatch, **question: Any) -> dict[str, Any]:
    """The summaries of the batches, merged in order; an optimiser step spans several of them."""
    parts = [summarise(batch, whole=batches, **question) for batch in batches]
    summary = ClippingSummary(parts[0].question)
    for part in parts:
        summary.merge(part)
    result: dict[str, Any] = to_json(summary.result(50))
    return result


def test_the_numbers_are_those_of_the_accumulators(result):
    """To the bit."""
    expected = json.loads(
        json.dumps(merged_result(*(world(seed, 24) for seed in SEEDS), theory=True))
    )
    for key, value in expected.items():
        if key == "algorithms":
            continue
        assert result[key] == value, key
    for row, same in zip(result["algorithms"], expected["algorithms"], strict=True):
        for key, value in same.items():
            assert key == "blocked_tokens" or row[key] == value, key


def test_the_documented_keys_exist_and_the_json_is_valid(result, trace):
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text) == result
    documented = [
        line.split("|")[1]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    keys = {key.strip().strip("`") for cell in documented for key in cell.split(",")}
    assert set(result) <= keys
    assert set(result["algorithms"][0]) <= keys and set(result["bad_updates"]) <= keys
    assert (result["format"], result["version"]) == ("mismatch-cli clipstats", 1)
    assert result["traces"] == [shorten_paths(str(trace.folder))] and result["arguments"] == [
        "--theory"
    ]
    assert result["skipped"] == []
    has = {
        "advantages": True,
        "rewards": True,
        "entropy": True,
        "full": True,
        "top_k": 20,
        "recomputed": "measured",
    }
    assert result["has"].items() >= has.items()


def test_blocked_tokens_have_their_text_and_kind(result):
    rows = [r for a in result["algorithms"] for rows in a["blocked_tokens"].values() for r in rows]
    with_text = [row for row in rows if row["token_id"] < len(TEXTS)]
    assert with_text and len(with_text) < len(rows)
    for row in rows:
        expected = (
            TEXTS[row["token_id"]].decode()
            if row["token_id"] < len(TEXTS)
            else f"⟨{row['token_id']}⟩"
        )
        assert row["text"] == expected and row["class"] == token_class(expected)


def test_two_workers_give_the_same_bits(result, trace):
    analysis = analyse_clipping(
        [trace], ALL, theory=True, workers=Workers(2), arguments=["--theory"]
    )
    assert json.dumps(analysis.to_json()) == json.dumps(result)


@pytest.mark.parametrize("without", [(), ("advantage", "reward")], ids=["whole", "no advantages"])
def test_a_stored_result_is_read_as_it_was_written(tmp_path, without):
    trace = write_trace(tmp_path / "trace", world(0, 24), without=without)
    study = analyse_clipping([trace], ALL, theory=True)
    stored = json.loads(json.dumps(study.to_json()))
    result = from_json(ClippingResult, stored)
    assert stored == {"format": study.FORMAT, "version": study.VERSION, **to_json(result)}
    assert result.in_order[0].lost == study.result.in_order[0].lost
    assert result.has_advantages == (not without) == (result.theory is not None)


def test_progress_counts_every_response(trace):
    counts: list[int] = []
    analyse_clipping([trace], ALL[:3], on_responses=counts.append)
    assert counts == [24] * len(SEEDS)


def test_two_traces_are_one_measurement(tmp_path, trace):
    """Counts add up, and every example names its trace."""
    other = write_trace(tmp_path / "trace", world(7, 24), seed=1)
    pooled = analyse_clipping([trace, other], ALL).to_json()
    alone = result_of(*(world(seed, 24) for seed in (*SEEDS, 7)))
    assert pooled["counts"] == alone["counts"]
    for row, same, algorithm in zip(pooled["algorithms"], alone["algorithms"], ALL, strict=True):
        equal = row["blocked"]["all"]["value"] == pytest.approx(same["blocked"]["all"]["value"])
        # A batch belongs to one trace, even if steps share a number
        assert equal or algorithm.batch_masks
    traces = {row["trace"] for row in pooled["overlap"]["examples"]}
    assert traces == {0, 1}
    assert {row["trace"] for row in pooled["overlap"]["examples"] if row["prompt_id"] >= 700} == {1}


def test_a_shard_without_recomputed_is_counted_and_left_out(tmp_path):
    trace = write_trace(
        tmp_path / "trace", world(0, 30), without(world(1, 12), "logp_recomputed_T")
    )
    result = analyse_clipping([trace], ALL).to_json()
    assert result["counts"] == result_of(world(0, 30))["counts"] | {
        "lacking": {"logp_recomputed": 12}
    }
    assert result["about"]["unscored_responses"] == 0  # the trainer did score them
    clip = (parse_algorithm("grpo-clip-higher"),)
    plain = analyse_clipping([trace], clip).to_json()
    assert (
        plain["counts"]
        == result_of(world(0, 30), world(1, 12), needs=PLAIN, algorithms=clip)["counts"]
    )
    assert (
        plain["counts"]["lacking"] == {}
        and plain["counts"]["responses"] > result["counts"]["responses"]
    )


def test_a_shard_that_was_never_scored_is_counted_as_such(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 30), without(world(1, 12), "logp_trainer_T"))
    result = analyse_clipping([trace], ALL).to_json()
    assert result["about"]["unscored_responses"] == 12 and result["counts"]["lacking"] == {
        "logp_trainer": 12
    }
    assert result["counts"]["tokens"] == result_of(world(0, 30))["counts"]["tokens"]


def test_a_shard_without_full_divergences_is_judged_like_the_others(tmp_path):
    lacking = without(world(1, 12), "tv_full_T", "kl_full_T")
    trace = write_trace(tmp_path / "trace", world(0, 30), lacking)
    result = analyse_clipping([trace], ALL, theory=True).to_json()
    expected = json.loads(json.dumps(merged_result(world(0, 30), lacking)))
    assert result["has"]["full"] is True and result["approximation"]["truth"] == "full"
    assert result["counts"] == expected["counts"] and result["counts"]["lacking"] == {}
    assert result["approximation"] == expected["approximation"]
    assert "binary TV" in result["theory"]["tv_max_of"]


def test_pooled_traces_are_judged_on_the_smallest_top_k_of_them(tmp_path):
    """The first five of twenty ranks, pooled with a trace of five: as if both had recorded five."""
    recorded = [world(seed, 24, top_k=k) for seed, k in ((0, 20), (1, 5))]
    traces = [
        write_trace(tmp_path / str(n) / "trace", batch, seed=n) for n, batch in enumerate(recorded)
    ]
    algorithms = (parse_algorithm("dppo-topk-tv:k=5"), parse_algorithm("dppo-topk-kl:k=5"))
    result = analyse_clipping(traces, algorithms).to_json()
    needs = Needs(advantages=True, recomputed=False, top_k=5, full=True)
    same = json.loads(
        json.dumps(
            merged_result(world(0, 24, top_k=5), recorded[1], needs=needs, algorithms=algorithms)
        )
    )
    for row, expected in zip(result["algorithms"], same["algorithms"], strict=True):
        assert row["blocked"] == expected["blocked"] and row["blocked"]["all"]["value"] > 0
    for part in ("counts", "sweeps", "approximation"):
        assert result[part] == same[part], part


def test_no_token_has_what_all_algorithms_need(tmp_path):
    """Recomputed in one shard, top K in the other: no token has both, and the message says what
    to do.
    """
    topk = (
        "topk_ids_TK",
        "topk_logp_rollout_TK",
        "topk_logp_trainer_TK",
        "topk_logp_recomputed_TK",
    )
    trace = write_trace(
        tmp_path / "trace",
        without(world(0, 16), *topk),
        without(world(1, 12), "logp_recomputed_T", topk[-1]),
    )
    with pytest.raises(MismatchError, match="--algorithm") as caught:
        analyse_clipping([trace], (parse_algorithm("minirl"), parse_algorithm("dppo-topk-tv")))
    assert "logp_recomputed" in str(caught.value) and "topk_logp_rollout" in str(caught.value)
    minirl = analyse_clipping([trace], (parse_algorithm("minirl"),)).summary
    assert (minirl.responses_read, minirl.lacking) == (28, {"logp_recomputed": 12})
    assert minirl.counts["tokens"] == result_of(world(0, 16))["counts"]["tokens"]


def test_without_advantages_both_signs_are_asked(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 40), without=("advantage",))
    result = analyse_clipping([trace], ALL).to_json()
    counts = result["counts"]
    assert (
        counts["tokens"] == counts["positive"] == counts["negative"] > 0 == counts["zero_advantage"]
    )
    assert result["equivalents"] == []
    for rows in (
        result["bad_updates"]["by_step"],
        *(row["by_step"] for row in result["algorithms"]),
    ):
        assert sum(row["tokens"] for row in rows) == counts["tokens"]
    for path, estimate in estimates_in(result["algorithms"]).items():
        if path.endswith("/all"):
            assert estimate["value"] is None and estimate["note"], path
    row = next(row for row in result["algorithms"] if row["name"] == "grpo-clip-higher")
    assert row["blocked"]["positive"]["value"] > 0 and row["blocked"]["negative"]["value"] > 0
    json.dumps(result, allow_nan=False)


def test_equal_weights(tmp_path):
    """Masks on the recomputed policy only are skipped; the engine's band is judged against the
    trainer.
    """
    trace = write_trace(
        tmp_path / "trace",
        world(0, 40),
        without=("logp_recomputed", "topk_logp_recomputed"),
        equal_weights=True,
    )
    result = analyse_clipping([trace], ALL).to_json()
    names = {row["name"] for row in result["algorithms"]}
    assert names >= {"grpo-clip-higher", "ppo-icepop", "ppo-mis", "ppo-mis-geometric"}
    assert {row["algorithm"] for row in result["skipped"]} == {a.name for a in ALL} - names
    icepop = next(row for row in result["algorithms"] if row["name"] == "ppo-icepop")
    batch = world(0, 40)
    expected = result_of(
        replace(
            batch,
            logp_recomputed_T=batch.logp_trainer_T,
            topk_logp_recomputed_TK=batch.topk_logp_trainer_TK,
        )
    )
    same = next(row for row in expected["algorithms"] if row["name"] == "ppo-icepop")
    assert icepop["blocked"] == same["blocked"] and icepop["blocked"]["all"]["value"] > 0


def test_theory_without_rewards(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 12), without=("reward",))
    result = analyse_clipping([trace], ALL[:3], theory=True).to_json()
    assert result["theory"] is None and result["has"]["rewards"] is False


def test_the_same_seed_twice_would_count_twice(tmp_path, trace):
    other = write_trace(tmp_path / "trace", world(7, 12))
    with pytest.raises(MismatchError, match="seed"):
        analyse_clipping([trace, other], ALL)


def test_plot_data(trace):
    pair = (parse_algorithm("grpo-clip-higher"), parse_algorithm("dppo-binary-tv"))
    analysis = analyse_clipping([trace], ALL)
    result, data = analysis.result, analysis.plot_data
    sample = data.sample
    assert data.compared == pair and len(sample) == result.counts.tokens
    assert (sample["advantage"] != 0).all() and np.isfinite(sample["logp_recomputed"]).all()
    for algorithm in pair:
        row = next(row for row in result.algorithms if row.name == algorithm.name)
        assert data.blocked(algorithm).mean() == pytest.approx(row.blocked.all.value)
    r = np.exp(sample["logp_trainer"].astype(float) - sample["logp_rollout"])
    clipped = ((sample["advantage"] > 0) & (r > 1.28)) | ((sample["advantage"] < 0) & (r < 0.8))
    assert (data.blocked(pair[0]) == clipped).all()


def test_plots_without_the_recomputed_policy(tmp_path):
    trace = write_trace(
        tmp_path / "trace", world(0, 12), without=("logp_recomputed", "topk_logp_recomputed")
    )
    analysis = analyse_clipping([trace], (parse_algorithm("grpo-clip-higher"),))
    assert np.isnan(analysis.plot_data.sample["logp_recomputed"]).all()


def test_without_advantages_the_plots_get_each_token_once_per_sign(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 12), without=("advantage",))
    data = analyse_clipping([trace], (parse_algorithm("dppo-binary-tv-recompute"),)).plot_data
    logp_anchor_N, logp_N = data.coordinates(data.compared[0])
    difference_N = np.exp(logp_N) - np.exp(logp_anchor_N)
    assert data.of_sign("positive").sum() == data.of_sign("negative").sum() == len(data.sample) / 2
    assert (
        data.blocked(data.compared[0]) == (difference_N * data.sample["advantage"] > 0.15)
    ).all()


def test_a_trace_of_one_token_and_one_of_none(tmp_path):
    batch = world(0, 6)
    single = replace(
        batch, loss_mask_T=np.arange(batch.num_tokens) == 3, advantage_T=np.ones(batch.num_tokens)
    )
    result = analyse_clipping(
        [write_trace(tmp_path / "one" / "trace", single)], ALL, theory=True
    ).to_json()
    assert result["counts"]["tokens"] == 1
    json.dumps(result, allow_nan=False)
    masked = replace(batch, loss_mask_T=np.zeros(batch.num_tokens, dtype=bool))
    result = analyse_clipping(
        [write_trace(tmp_path / "none" / "trace", masked)], ALL, theory=True
    ).to_json()
    assert result["counts"]["tokens"] == 0
    json.dumps(result, allow_nan=False)


def test_one_row_for_each_mask_and_the_compared_ones_keep_theirs(trace):
    """ppo-tis has the mask of ppo but a different weight; a key in which they differ keeps them
    apart.
    """
    judged = [
        parse_algorithm(name)
        for name in ("ppo", "ppo-tis", "minirl", "minirl-tis", "pg-tis", "pg-is")
    ]
    result = analyse_clipping([trace], judged, judged[2:4]).result
    masks = result.masks(result.algorithms)
    assert [mask.label for mask in masks] == [
        "ppo (+1 alike)",
        "minirl",
        "minirl-tis",
        "pg-tis (+1 alike)",
    ]
    assert [mask.others for mask in masks] == [("ppo-tis",), (), (), ("pg-is",)]
    apart = result.masks(result.algorithms, attrgetter("lost"))
    assert [mask.label for mask in apart][-2:] == ["pg-tis", "pg-is"]
