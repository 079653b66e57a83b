"""Every number of every algorithm, compared with a plain count in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mismatch_cli.metrics.clipping.clipping_summary import RARE
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import ALL, EVERYTHING, result_of, without, world
from tests.tiers import at_night

CASES = {
    "one advantage per response": (world(0), EVERYTHING),
    "an advantage per token": (world(1, per_token=True), EVERYTHING),
    "no advantages": (without(world(2), "advantage_T"), replace(EVERYTHING, advantages=False)),
}
NAMES = [algorithm.name for algorithm in ALL]
MU_EDGES = (0, 1e-4, 1e-3, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 0.99, 1)


@pytest.fixture(scope="module", params=[*list(CASES)[:1], *at_night(*list(CASES)[1:])])
def case(request: pytest.FixtureRequest) -> SimpleNamespace:
    return brute.judged(*CASES[request.param])


def value(estimate: dict[str, Any]) -> float:
    return np.nan if estimate["value"] is None else estimate["value"]


def near(expected: float | None) -> Any:
    return None if expected is None else pytest.approx(expected, rel=2e-5, abs=1e-9, nan_ok=True)


def share(flags: pd.Series) -> float:
    """The share of true flags; NaN (null in the JSON) if there are none."""
    return float(flags.mean()) if len(flags) else np.nan


def of_sign(t: pd.DataFrame, name: str) -> pd.DataFrame:
    return {"all": t, "positive": t[t["A"] > 0], "negative": t[t["A"] < 0]}[name]


def test_the_table_is_complete_and_the_batches_are_informative(case):
    """Every algorithm is in the second opinion, and every mask except the rarest blocks
    something here.
    """
    assert {algorithm.name for algorithm in ALL} == set(brute.OBJECTIVES) - {"top-entropy"}
    never = {name for name in case.rows if not case.judged[name].any()}
    without_mask = brute.UNMASKED & set(case.t)
    assert without_mask <= never <= without_mask | {"mask-0.8"}


def test_counts(case):
    batch, t, counts = case.batch, case.t, case.result["counts"]
    assert counts["tokens"] == case.judged["row"].nunique()
    assert counts["positive"] == (t["A"] > 0).sum() and counts["negative"] == (t["A"] < 0).sum()
    assert counts["zero_advantage"] == (t["A"] == 0).sum()
    assert counts["masked"] == (~batch.loss_mask_T).sum() > 0
    assert (
        counts["not_measured"] == (batch.loss_mask_T & np.isnan(batch.logp_recomputed_T)).sum() > 0
    )
    assert counts["masked"] + counts["not_measured"] + t["row"].nunique() == batch.num_tokens
    assert counts["responses"] == case.judged["s"].nunique()
    assert counts["out_of_support"] == 0 and counts["lacking"] == {}
    assert (
        counts["prompts"] == case.judged["prompt_id"].nunique() and counts["prompts_exact"] is True
    )
    assert counts["steps"] == 6


def test_blocked_shares(case):
    for name in case.rows:
        for sign, estimate in case.rows[name]["blocked"].items():
            tokens = of_sign(case.judged, sign)
            expected = share(tokens[name]) if case.needs.advantages or sign != "all" else np.nan
            assert value(estimate) == near(expected), (name, sign)


def test_update_weight_lost(case):
    for name in case.rows:
        row = case.rows[name]
        assert row["weighs_by_ratio"] is (name not in brute.OTHER_WEIGHT), name
        assert list(row["lost"]) == ["all", "positive", "negative", "masked", "capped"], name
        for sign in ("positive", "negative"):
            assert row["lost"][sign]["value"] == near(
                brute.lost(of_sign(case.judged, sign), name)["all"]
            ), (name, sign)
        expected = brute.lost(case.judged, name)
        for part in ("all", "masked", "capped"):
            assert row["lost"][part]["value"] == (
                near(expected[part]) if case.needs.advantages else None
            ), (
                name,
                part,
            )
            assert row["lost"][part]["value"] is not None or row["lost"][part]["note"], (name, part)


def test_caps_take_something(case):
    if case.needs.advantages:
        assert all(
            case.rows[name]["lost"]["capped"]["value"] > 0 for name in ("pg-tis", "minirl-tis")
        )


def test_responses_touched(case):
    for name in case.rows:
        out = case.judged[case.judged[name]]
        expected = (
            out["s"].nunique() / case.judged["s"].nunique() if case.needs.advantages else np.nan
        )
        assert value(case.rows[name]["responses_touched"]) == near(expected), name


def test_the_share_of_rare_rewarded_tokens_that_is_blocked(case):
    rare = of_sign(case.judged, "positive")
    rare = rare[rare["q"] < RARE]
    assert len(rare)
    for name in case.rows:
        assert value(case.rows[name]["blocked_rare"]) == near(share(rare[name])), name
        for row in case.rows[name]["by_step"]:
            expected = share(rare[rare["step"] == row["first"]][name])
            assert value(row["blocked_rare"]) == near(expected), (name, row["first"])


def test_mean_mu_and_entropy_of_blocked_and_kept(case):
    for name in case.rows:
        out = case.judged[name]
        assert case.judged["entropy"].isna().any()
        for column, short in (("q", "mu"), ("entropy", "entropy")):
            for which, tokens in (("blocked", case.judged[out]), ("kept", case.judged[~out])):
                assert value(case.rows[name][f"{short}_{which}"]) == near(tokens[column].mean()), (
                    name,
                    short,
                    which,
                )


def test_by_mu(case):
    for name in case.rows:
        rows = case.rows[name]["by_mu"]
        assert [(row["mu_low"], row["mu_high"]) for row in rows] == list(pairwise(MU_EDGES)), name
        assert sum(row["tokens"] for row in rows) == case.judged["row"].nunique(), name
        judged = case.judged[["row", "A", "q", name]]
        for row in rows:
            high = row["mu_high"] if row["mu_high"] < 1 else 2
            check_bin(
                case, name, row, judged[(judged["q"] >= row["mu_low"]) & (judged["q"] < high)]
            )


def test_by_position(case):
    """Positions count every token of the response, including masked ones."""
    for name in case.rows:
        rows = case.rows[name]["by_position"]
        assert [(row["first"], row["last"]) for row in rows][:4] == [
            (0, 0),
            (1, 1),
            (2, 3),
            (4, 7),
        ], name
        assert sum(row["tokens"] for row in rows) == case.judged["row"].nunique(), name
        judged = case.judged[["row", "A", "pos", name]]
        for row in rows:
            check_bin(case, name, row, judged[judged["pos"].between(row["first"], row["last"])])


def check_bin(case: SimpleNamespace, name: str, row: dict[str, Any], inside: pd.DataFrame) -> None:
    """A token counts once, even if it was judged for both signs of its advantage."""
    assert row["tokens"] == inside["row"].nunique()
    assert list(row["blocked"]) == ["all", "positive", "negative"]
    for sign, estimate in row["blocked"].items():
        tokens = of_sign(inside, sign)
        expected = share(tokens[name])
        assert value(estimate) == near(
            expected if case.needs.advantages or sign != "all" else np.nan
        ), (
            name,
            row,
            sign,
        )


def test_by_step(case):
    for name in case.rows:
        judged, rows = (
            case.judged[["row", "A", "step", "q", "entropy", name]],
            case.rows[name]["by_step"],
        )
        out = judged[name]
        assert [(row["first"], row["last"]) for row in rows] == [
            (step, step) for step in range(6)
        ], name
        for row in rows:
            inside = judged[judged["step"] == row["first"]]
            check_bin(case, name, row, inside)
            for column, short in (("q", "mu"), ("entropy", "entropy")):
                for which, tokens in (
                    ("blocked", inside[out[inside.index]]),
                    ("kept", inside[~out[inside.index]]),
                ):
                    assert value(row[f"{short}_{which}"]) == near(tokens[column].mean()), (
                        name,
                        short,
                        row,
                    )


@pytest.mark.parametrize("sign", ["positive", "negative"])
def test_blocked_tokens(case, sign):
    """The most frequently blocked ids; ties in order of id."""
    for name in case.rows:
        tokens = of_sign(case.judged[["A", "id", "q", "p", "r", name]], sign)
        out = tokens[tokens[name]]
        counts = sorted(out["id"].value_counts().items(), key=lambda item: (-item[1], item[0]))
        rows = case.rows[name]["blocked_tokens"][sign]
        assert [(row["token_id"], row["blocked"]) for row in rows] == counts[:50], name
        occurrences, means = tokens["id"].value_counts(), out.groupby("id")[["q", "p", "r"]].mean()
        for row in rows:
            assert row["tokens"] == occurrences[row["token_id"]], name
            assert row["rate"] == near(row["blocked"] / row["tokens"]), name
            if row["lift"] is not None:
                assert row["lift"] == near(row["rate"] / (len(out) / len(tokens))), name
            assert [row["mu"], row["pi"], row["ratio"]] == pytest.approx(
                means.loc[row["token_id"]].tolist(), rel=2e-5
            )


def test_only_as_many_blocked_tokens_as_requested(case):
    few = result_of(case.batch, needs=case.needs, blocked_tokens=3)
    for row in few["algorithms"]:
        assert (
            row["blocked_tokens"]["positive"]
            == case.rows[row["name"]]["blocked_tokens"]["positive"][:3]
        )


def test_the_json_holds_no_nan(case):
    json.dumps(case.result, allow_nan=False)


ANCHORS = {
    "pg-is": "none", "pg-tis": "none", "reinforce": "none", "grpo-clip-higher": "rollout",
    "ipo": "rollout",
    "minirl": "recomputed", "dppo-binary-kl": "rollout", "dppo-binary-kl-recompute": "recomputed",
    "ppo": "recomputed",
    "ppo-tis": "recomputed", "ppo-icepop": "both", "ppo-mis": "both", "gspo": "recomputed",
    "prime-rl": "rollout",
    "sapo": "recomputed", "vespo": "rollout", "drpo": "rollout", "dro": "rollout",
    "topr": "rollout", "vaco": "both",
    "cppo": "rollout",
}  # fmt: skip


def test_each_row_describes_its_algorithm(case):
    assert [row["name"] for row in case.result["algorithms"]] == [n for n in NAMES if n in case.t]
    for name, anchor in ANCHORS.items():
        assert case.rows[name]["anchor"] == anchor, name
    for algorithm in (algorithm for algorithm in ALL if algorithm.name in case.t):
        row = case.rows[algorithm.name]
        assert (row["blocked_when"], row["weight"]) == algorithm.formulas and row[
            "source"
        ] == algorithm.source
