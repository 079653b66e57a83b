"""What any threshold would block, and the thresholds of other families that block as many
tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.base.hashing import GROUPS, prompt_groups
from mismatch_cli.metrics.clipping.sweeps import (
    ABOVE_SWEEP,
    BELOW_SWEEP,
    BINS,
    FAMILIES,
    Sweeps,
    above_0,
)
from mismatch_cli.metrics.estimate import FEWEST_PROMPTS, SHARE, SIGNED, interval
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import (
    EVERYTHING,
    PLAIN,
    plain_algorithms,
    result_of,
    simple,
    world,
)

LOWEST = BINS.edges[0][1]  # the lowest distinguishable threshold
OWN_FAMILY = {
    "grpo-clip-higher": "ratio_clip", "dppo-binary-tv": "binary_tv", "dppo-binary-kl": "binary_kl",
    "dppo-topk-tv": "top_k_tv", "dppo-topk-kl": "top_k_kl", "prime-rl": "binary_tv",
    "ppo-rollout": "ratio_clip",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_the_mask_at_that_threshold(judged_world, family):
    rows, judged = judged_world.result["sweeps"][family], judged_world.judged
    update, outward = judged["r"] * judged["A"].abs(), brute.outward(judged, family)
    assert len(rows) > 20
    exact = 0
    for row in rows:
        out = outward > row["threshold"] * (1 - 1e-6)
        # No statistic rounds to the threshold
        if not (out & (outward < row["threshold"] * (1 + 1e-6))).any():
            exact += 1
            assert row["blocked"]["value"] == pytest.approx(out.mean(), abs=1e-12), row["threshold"]
            assert row["lost"]["value"] == pytest.approx(
                update[out].sum() / update.sum(), rel=1e-5, abs=1e-9
            )
    assert exact >= len(rows) - 1
    assert [row["threshold"] for row in rows] == sorted({row["threshold"] for row in rows})
    assert rows[0]["threshold"] == LOWEST and rows[0]["blocked"]["value"] > 0.1
    assert rows[-1]["blocked"]["value"] == 0


def test_every_cap(judged_world):
    rows, judged = judged_world.result["sweeps"]["cap"], judged_world.judged
    whole = (judged["r"] * judged["A"].abs()).sum()
    assert rows[0]["cap"] == 1 and rows[0]["lost"]["value"] > rows[4]["lost"]["value"] > 0
    for row in rows:
        above = judged[judged["r"] > row["cap"] * (1 + 1e-6)]
        assert row["cap"] == 1 or row["share"]["value"] == pytest.approx(
            len(above) / len(judged), abs=1e-12
        )
        taken = ((above["r"] - row["cap"]) * above["A"].abs()).sum()
        assert row["lost"]["value"] == pytest.approx(taken / whole, rel=1e-4, abs=1e-9)


def test_a_ratio_of_exactly_one_is_not_above_a_cap_of_one():
    """Most tokens of a peaked model have bit-identical log π and log μ; a cap of 1 leaves them
    unchanged.
    """
    same = [[-0.5, -0.1, 0.0]] * 11
    batch = simple([*same, [-0.5, -0.1, 0.0]], [*same, [-0.1, -0.1, 0.0]], [1.0, -1.0] * 6)
    row = result_of(batch, needs=PLAIN, algorithms=plain_algorithms())["sweeps"]["cap"][0]
    assert row["cap"] == 1 and row["lost"]["value"] > 0
    assert row["share"]["value"] == pytest.approx(1 / 36)


@pytest.mark.parametrize("fallen", [-25.0, -float("inf")])
def test_no_ratio_clip_of_one_blocks_a_negative_token(fallen):
    """r < 1 − 1 is never true, however far a token falls, and the sweep must agree with that
    mask.
    """
    batch = simple([[-0.5, -0.1]] * 12, [[fallen, -0.1]] * 12, [-1.0] * 12)
    result = result_of(
        batch,
        needs=PLAIN,
        algorithms=(parse_algorithm("grpo-clip-higher:ratio_low=1,ratio_high=1"),),
    )
    rows = {row["threshold"]: row["blocked"]["value"] for row in result["sweeps"]["ratio_clip"]}
    assert result["algorithms"][0]["blocked"]["all"]["value"] == 0
    assert rows[0.5] == 0.5
    assert rows[1.0] == 0


def test_the_paper_s_thresholds_agree_with_the_algorithms(judged_world):
    """The share that dppo-binary-tv blocks is between the rows around δ = 0.15."""
    blocked = next(r for r in judged_world.result["algorithms"] if r["name"] == "dppo-binary-tv")[
        "blocked"
    ]["all"]
    rows = judged_world.result["sweeps"]["binary_tv"]
    below, above = (
        [r["blocked"]["value"] for r in rows if r["threshold"] <= 0.15],
        [r["blocked"]["value"] for r in rows if r["threshold"] > 0.15],
    )
    assert below[-1] >= blocked["value"] >= above[0]


def test_equivalents_block_as_many_tokens(judged_world):
    """At the named threshold, within one bin of 3 %, the other family blocks as many."""
    judged, rows = judged_world.judged, judged_world.result["equivalents"]
    pairs = {(row["algorithm"], row["family"]) for row in rows}
    assert pairs == {
        (name, other)
        for name, family in OWN_FAMILY.items()
        for other in FAMILIES
        if other != family
    }
    shares = {row["name"]: row["blocked"]["all"] for row in judged_world.result["algorithms"]}
    number = 0
    for row in rows:
        assert row["blocked"] == shares[row["algorithm"]]  # with its interval
        count = int(judged[row["algorithm"]].sum())
        assert row["blocked"]["value"] == pytest.approx(count / len(judged))
        outward = brute.outward(judged, row["family"])
        threshold = row["threshold"]["value"]
        if threshold is None:
            assert count > (outward >= LOWEST).sum() and row["threshold"]["note"] == BELOW_SWEEP
            continue
        low, high = row["threshold"]["low"], row["threshold"]["high"]
        assert row["threshold"]["note"] if low is None else low < threshold < high
        number += 1
        assert (
            (outward > threshold * 1.0321).sum() <= count <= (outward > threshold / 1.0321).sum()
        ), row
    assert number > 15


def test_a_threshold_beyond_the_sweep_says_beyond_which_end():
    sweeps = Sweeps(top_k=0)
    sweeps.sums["binary_kl"][0, 0, [1, -1]] = 5, 10  # tokens between the lowest edges, and above
    sweeps.total[0, 0] = 100
    for blocked, note in ((16, BELOW_SWEEP), (9, ABOVE_SWEEP)):
        threshold = sweeps.threshold_for("binary_kl", blocked * np.eye(GROUPS)[0], 20)
        assert threshold.value is None and threshold.note == note
    assert BELOW_SWEEP.endswith("0.0039") and ABOVE_SWEEP.endswith("128")
    for blocked, value in ((15, LOWEST), (10, 128)):
        threshold = sweeps.threshold_for("binary_kl", blocked * np.eye(GROUPS)[0], 20)
        assert threshold.value == pytest.approx(value, rel=0.04)


def test_the_interval_of_an_equal_threshold_covers_all_possibly_equal_shares(judged_world):
    """By hand, by group of prompts: at its ends the difference of the shares just excludes 0."""
    judged, prompts = judged_world.judged, judged_world.judged["prompt_id"].nunique()
    group = prompt_groups(judged["prompt_id"].to_numpy())

    def difference(row, threshold):
        excess = (brute.outward(judged, row["family"]) > threshold).astype(float) - judged[
            row["algorithm"]
        ]
        left = np.array([excess[group != g].mean() for g in np.unique(group)])
        return interval(excess.mean(), left, prompts, SIGNED)

    count = 0
    for row in judged_world.result["equivalents"]:
        low, high = row["threshold"]["low"], row["threshold"]["high"]
        if low is None or row["family"].startswith("top_k"):
            continue
        count += 1
        assert (
            difference(row, low * (1 - 1e-6)).low > 0 > difference(row, high * (1 + 1e-6)).high
        ), row
        inside = [difference(row, edge) for edge in (low * 1.0321, high / 1.0321)]
        assert inside[0].low is None or inside[0].low <= 0
        assert inside[1].high is None or inside[1].high >= 0
    assert count > 5


def test_without_advantages_there_are_no_equivalents(judged_world):
    """Thresholds block different tokens for each sign, so no single number blocks as many of
    both.
    """
    batch = replace(judged_world.batch, advantage_T=None)
    result = result_of(batch, needs=replace(EVERYTHING, advantages=False))
    assert result["equivalents"] == [] and result["sweeps"]["binary_tv"][0]["blocked"]["value"] > 0


def test_sweeps_do_not_depend_on_the_algorithms(judged_world):
    """Sweeps reuse the statistics of the algorithms' masks, which do not depend on thresholds."""
    algorithms = tuple(
        parse_algorithm(spec)
        for spec in ("reinforce", "binary-tv:max_tv=0.4", "ratio-clip:ratio_low=0.9")
    )
    algorithms += (
        parse_algorithm("top-k-tv:k=5"),
        parse_algorithm("dppo-binary-kl:anchor=recomputed"),
    )
    assert (
        result_of(judged_world.batch, algorithms=algorithms)["sweeps"]
        == judged_world.result["sweeps"]
    )


def test_without_top_k_those_families_are_absent():
    result = result_of(world(0, 30), needs=PLAIN, algorithms=plain_algorithms())
    assert set(result["sweeps"]) == {"ratio_clip", "binary_tv", "binary_kl", "cap"}
    assert {row["family"] for row in result["equivalents"]} == {
        "ratio_clip",
        "binary_tv",
        "binary_kl",
    }


def test_bins_are_three_percent_apart():
    low, high = (edges[1:-1] for edges in BINS.edges)
    assert (high / low).min() > 1 and (high / low).max() < 1.0321


@pytest.mark.parametrize("seed", range(3))
def test_shares_fall_with_the_threshold(seed):
    sweeps = result_of(world(seed, 40), needs=EVERYTHING)["sweeps"]
    for family, rows in sweeps.items():
        name = "share" if family == "cap" else "blocked"
        values = [row[name]["value"] for row in rows]
        assert values == sorted(values, reverse=True), family


def test_intervals_delete_one_group_of_prompts_at_a_time(judged_world):
    """The share without each group of prompts by hand, over the groups with a judged token."""
    judged = judged_world.judged
    group = prompt_groups(judged["prompt_id"].to_numpy())
    row = judged_world.result["sweeps"]["binary_tv"][8]
    out = brute.outward(judged, "binary_tv") > row["threshold"]
    left = np.array([out[group != g].mean() for g in np.unique(group)])
    assert FEWEST_PROMPTS < len(left) < GROUPS
    expected, estimate = (
        interval(out.mean(), left, len(np.unique(judged["prompt_id"])), SHARE),
        row["blocked"],
    )
    assert (estimate["low"], estimate["high"]) == (
        pytest.approx(expected.low),
        pytest.approx(expected.high),
    )


def test_an_interval_that_ends_at_0_contains_0():
    """So its threshold may be an equal one; the same for an interval without an end."""
    for sign in (1, -1):
        assert above_0(sign * 1e-9, sign)
        assert not above_0(0.0, sign)
        assert not above_0(sign * -1e-9, sign)
        assert not above_0(None, sign)
