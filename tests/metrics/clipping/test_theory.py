"""The paper's identity and bounds: on random batches, and on a toy whose every sequence can be
enumerated.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mismatch_cli.base.json_form import to_json
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import (
    EVERYTHING,
    PLAIN,
    plain_algorithms,
    result_of,
    simple,
    summarise,
    world,
)

PLAINLY = {"needs": PLAIN, "algorithms": plain_algorithms(), "theory": True}
V, T = 3, 4  # vocabulary and length of the toy
STATES = [state for length in range(T) for state in product(range(V), repeat=length)]
SEQUENCES = list(product(range(V), repeat=T))


def surrogate_and_correction(r: np.ndarray) -> tuple[float, float]:
    """Σ (r_t − 1) and Σ (r_t − 1)(1 − Π_{j>t} r_j) of one response, as equations 5 and 6 write
    them.
    """
    after = [np.prod(r[t + 1 :]) for t in range(len(r))]
    return float(np.sum(r - 1)), float(
        sum((r_t - 1) * (1 - rest) for r_t, rest in zip(r, after, strict=True))
    )


@pytest.mark.parametrize("per_token", [False, True])
def test_against_a_loop_over_responses(per_token):
    batch = world(1, per_token=per_token)
    t = brute.counted(batch, EVERYTHING)
    reward = batch.reward_S
    t = t[~np.isnan(reward[t["s"]])]
    ratios = {s: np.exp((rows["lp"] - rows["lq"]).to_numpy()) for s, rows in t.groupby("s")}
    terms = {s: surrogate_and_correction(r) for s, r in ratios.items()}
    weight = np.array([np.prod(r) for r in ratios.values()])
    surrogate = np.mean([reward[s] * x for s, (x, _) in terms.items()])
    spread = np.mean([np.abs(r - 1).sum() for r in ratios.values()])
    longest, tv_max = max(map(len, ratios.values())), t["tv_full"].max()
    kl_max, linear = t["kl_full"].max(), surrogate - 2 * spread
    quadratic = surrogate - 2 * longest * (longest - 1) * tv_max**2
    assert tv_max > 1.001 * (t["p"] - t["q"]).abs().max()
    expected = {
        "surrogate": surrogate,
        "correction": np.mean([reward[s] * x for s, (_, x) in terms.items()]),
        "difference": np.mean([reward[s] * (np.prod(r) - 1) for s, r in ratios.items()]),
        "quadratic_bound": quadratic,
        "linear_bound": linear,
        "composite_bound": max(quadratic, linear),
        "pinsker_bound": surrogate - 2 * longest * (longest - 1) * min(1, kl_max / 2),
        "tv_sum": spread / 2,
        "ess": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
    }
    theory = result_of(batch, theory=True)["theory"]
    for name, x in expected.items():
        assert theory[name]["value"] == pytest.approx(x, rel=1e-5, abs=1e-7), name
    assert (theory["xi"], theory["longest"]) == (1, longest)
    assert theory["tv_max"] == pytest.approx(tv_max, rel=1e-5) and theory["tv_max_of"].startswith(
        "full TV"
    )
    assert theory["kl_max"] == pytest.approx(kl_max, rel=1e-5) and theory["kl_max_of"] == "full KL"
    assert theory["tv_of_kl"] == pytest.approx(min(1, np.sqrt(kl_max / 2)), rel=1e-5)
    assert theory["tv_of_kl"] >= theory["tv_max"]
    # The higher bound with its interval, if it has one
    assert linear > quadratic and theory["composite_bound"] == theory["linear_bound"]
    assert theory["quadratic_bound"]["low"] is theory["quadratic_bound"]["high"] is None
    assert (
        "no interval" in theory["quadratic_bound"]["note"]
        and theory["linear_bound"]["low"] is not None
    )
    assert theory["weight_max"] == pytest.approx(weight.max(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["the column", "one token"])
def test_without_every_full_tv_the_largest_is_over_the_sampled_tokens(lacking):
    """A maximum over full TVs of some tokens and binary TVs of others would mean nothing."""
    batch = world(1)
    t = brute.counted(batch, EVERYTHING)
    t = t[~np.isnan(batch.reward_S[t["s"]])]
    full_T = batch.tv_full_T.copy()
    full_T[int(t["row"].iloc[40])] = float("nan")
    theory = result_of(
        replace(batch, tv_full_T=full_T if lacking == "one token" else None), theory=True
    )["theory"]
    complete, largest = result_of(batch, theory=True)["theory"], (t["p"] - t["q"]).abs().max()
    assert (
        theory["tv_max"] == pytest.approx(largest, rel=1e-5)
        and theory["tv_max"] < complete["tv_max"]
    )
    assert "binary TV" in theory["tv_max_of"] and "binary" not in complete["tv_max_of"]
    penalty = 2 * theory["longest"] * (theory["longest"] - 1) * largest**2
    assert theory["quadratic_bound"]["value"] == pytest.approx(
        theory["surrogate"]["value"] - penalty, rel=1e-5
    )
    assert (
        theory["surrogate"] == complete["surrogate"]
        and theory["linear_bound"] == complete["linear_bound"]
    )


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("merged", [False, True])
def test_a_shard_without_full_tvs_makes_the_largest_binary_for_all(order, merged):
    """μ − π is 0.3 in one shard and 0.2 in the other, and only the first has a full TV of 0.9."""
    knowing, lacking = (
        simple(
            [np.log([0.5, 0.4])] * 2, [np.log([0.5 - drop, 0.4])] * 2, [1, -1], reward_S=np.ones(2)
        )
        for drop in (0.3, 0.2)
    )
    knowing = replace(knowing, tv_full_T=np.array([0.3, 0.9, 0.3, 0.9]))
    question = {
        "needs": replace(PLAIN, full=True),
        "algorithms": plain_algorithms(),
        "theory": True,
    }
    assert result_of(knowing, **question)["theory"]["tv_max"] == pytest.approx(0.9)
    batches = (knowing, lacking)[::order]
    if merged:
        summary, other = (summarise(batch, **question) for batch in batches)
        summary.merge(other)
    else:
        summary = summarise(*batches, **question)
    theory = to_json(summary.result(5))["theory"]
    assert "binary TV" in theory["tv_max_of"]
    assert theory["tv_max"] == pytest.approx(0.3)


def test_the_composite_bound_is_the_higher_one():
    """Four tokens of which one differs: 24 D² against 4 D, equal at D = 1/6."""
    for step, higher in ((0.01, "quadratic_bound"), (0.3, "linear_bound")):
        mu, pi = np.array([0.5] * 4), np.array([0.5 + step, 0.5, 0.5, 0.5])
        batch = simple([np.log(mu)] * 2, [np.log(pi)] * 2, [1, -1], reward_S=np.array([1.0, 0.0]))
        theory = result_of(batch, **PLAINLY)["theory"]
        lower = min(theory["quadratic_bound"]["value"], theory["linear_bound"]["value"])
        assert theory["composite_bound"] == theory[higher] and theory[higher]["value"] > lower


def test_pinsker_by_the_binary_kl_of_the_sampled_tokens():
    """Without full divergences; the TV of a token outside the trainer's support is at most 1."""
    mu, pi = np.array([0.5, 0.8, 0.1]), np.array([0.7, 0.6, 0.3])
    binary_N = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
    batch = simple([np.log(mu)] * 2, [np.log(pi)] * 2, [1, -1], reward_S=np.array([0.5, -2.0]))
    theory = result_of(batch, **PLAINLY)["theory"]
    assert theory["kl_max"] == pytest.approx(binary_N.max(), rel=1e-5)
    assert "binary KL" in theory["kl_max_of"]
    assert theory["pinsker_bound"]["value"] == pytest.approx(
        theory["surrogate"]["value"] - 2 * 3 * 2 * binary_N.max(), rel=1e-5
    )
    assert theory["pinsker_bound"]["value"] < theory["quadratic_bound"]["value"]
    cut = np.array([np.log(0.7), -np.inf, np.log(0.3)])
    batch = simple([np.log(mu)] * 2, [cut] * 2, [1, -1], reward_S=np.ones(2))
    theory = result_of(batch, **PLAINLY)["theory"]
    assert (theory["kl_max"], theory["tv_of_kl"]) == (None, 1)
    assert theory["pinsker_bound"]["value"] == theory["surrogate"]["value"] - 2 * 3 * 2


def test_xi_is_the_largest_size_of_a_reward():
    batch = simple([[-1.0, -1.0]] * 2, [[-1.0, -0.9]] * 2, [1, -1], reward_S=np.array([0.5, -3.0]))
    theory = result_of(batch, **PLAINLY)["theory"]
    assert theory["xi"] == 3
    assert theory["linear_bound"]["value"] == pytest.approx(
        theory["surrogate"]["value"] - 2 * 3 * np.expm1(0.1), rel=1e-5
    )


def test_the_identity_holds_for_every_sample_alone():
    """L′ − Δ = R (Πr − 1) for one response at a time, also if Πr is far from 1."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        logq, logp = -rng.exponential(1.0, 8), -rng.exponential(1.0, 8)
        theory = result_of(
            simple([list(logq)], [list(logp)], [1.0], reward_S=np.array([0.7])), **PLAINLY
        )["theory"]
        x, correction = surrogate_and_correction(np.exp(logp - logq))
        assert theory["surrogate"]["value"] == pytest.approx(0.7 * x, rel=1e-5, abs=1e-6)
        assert theory["correction"]["value"] == pytest.approx(0.7 * correction, rel=1e-4, abs=1e-5)
        difference = theory["surrogate"]["value"] - theory["correction"]["value"]
        assert theory["difference"]["value"] == pytest.approx(difference, rel=1e-12, abs=1e-12)
        assert theory["difference"]["value"] == pytest.approx(
            0.7 * np.expm1((logp - logq).sum()), rel=1e-5
        )


def toy(policy: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """Log-probability of each token of every sequence: [sequences, T]."""
    return np.log([[policy[sequence[:t]][sequence[t]] for t in range(T)] for sequence in SEQUENCES])


def test_on_all_sequences_weighted_by_mu_the_difference_is_exact():
    """μ in sixths, so that the trace has every sequence in exact proportion to μ: J(π) − J(μ),
    not an estimate.
    """
    rng = np.random.default_rng(3)
    mu = {state: rng.permutation([1, 2, 3]) / 6 for state in STATES}
    pi = {state: rng.dirichlet(3 * p + 0.5) for state, p in mu.items()}
    reward = rng.normal(size=len(SEQUENCES))
    logq, logp = toy(mu), toy(pi)
    times = np.rint(np.exp(logq.sum(axis=1)) * 6**T).astype(int)
    assert times.sum() == 6**T
    rows = np.repeat(np.arange(len(SEQUENCES)), times)
    batch = simple(
        logq[rows].tolist(), logp[rows].tolist(), [1.0] * len(rows), reward_S=reward[rows]
    )
    theory = result_of(batch, **PLAINLY)["theory"]
    gain = (np.exp(logp.sum(axis=1)) - np.exp(logq.sum(axis=1))) @ reward
    assert theory["difference"]["value"] == pytest.approx(gain, rel=1e-4, abs=1e-6)
    assert theory["surrogate"]["value"] - theory["correction"]["value"] == pytest.approx(
        gain, rel=1e-4, abs=1e-6
    )
    reached = {
        state: np.exp(logq[:, : len(state)].sum(axis=1))[
            SEQUENCES.index(state + (0,) * (T - len(state)))
        ]
        for state in STATES
    }
    tv_sum = sum(reached[state] * np.abs(mu[state] - pi[state]).sum() / 2 for state in STATES)
    # E_μ |r − 1| / 2 is the TV of the state
    assert theory["tv_sum"]["value"] == pytest.approx(tv_sum, rel=1e-5)
    assert theory["linear_bound"]["value"] <= gain
    d_max = max(np.abs(mu[state] - pi[state]).sum() / 2 for state in STATES)
    assert theory["tv_max"] <= d_max + 1e-6  # a sample never exceeds the largest over all states


def test_both_bounds_hold_with_the_true_divergence_over_all_states():
    """Equations 7 and B.3 over random tabular policies, near and far, with the exact
    expectations.
    """
    rng = np.random.default_rng(0)
    tightest = np.inf
    for case in range(400):
        mu = {state: rng.dirichlet(np.ones(V)) for state in STATES}
        step = 10.0 ** rng.uniform(-3, 0)
        pi = {state: (1 - step) * p + step * rng.dirichlet(np.ones(V)) for state, p in mu.items()}
        logq, logp = toy(mu), toy(pi)
        weight, r = np.exp(logq.sum(axis=1)), np.exp(logp - logq)
        beyond_first_order = r.prod(axis=1) - 1 - (r - 1).sum(axis=1)
        reward = (
            rng.normal(size=len(r)),
            rng.integers(0, 2, len(r)) + 0.0,
            -np.sign(beyond_first_order),
        )[case % 3]
        gain = weight @ (reward * (r.prod(axis=1) - 1))
        surrogate, xi = weight @ (reward * (r - 1).sum(axis=1)), np.abs(reward).max()
        tv = {state: np.abs(mu[state] - pi[state]).sum() / 2 for state in STATES}
        penalty = 2 * xi * T * (T - 1) * max(tv.values()) ** 2
        tv_sum = weight @ np.array(
            [sum(tv[sequence[:t]] for t in range(T)) for sequence in SEQUENCES]
        )
        kl_max = max(float(mu[state] @ np.log(mu[state] / pi[state])) for state in STATES)
        assert max(tv.values()) ** 2 <= kl_max / 2 + 1e-12
        assert gain >= surrogate - penalty - 1e-12
        assert gain >= surrogate - 4 * xi * tv_sum - 1e-12
        assert gain >= surrogate - min(penalty, 4 * xi * tv_sum) - 1e-12
        assert gain >= surrogate - xi * T * (T - 1) * kl_max - 1e-12
        assert 4 * xi * tv_sum == pytest.approx(2 * xi * (weight @ np.abs(r - 1).sum(axis=1)))
        tightest = min(tightest, (gain - surrogate + penalty) / penalty)
    assert 0 < tightest < 0.8  # with the worst reward the correction uses much of the penalty


def test_theory_without_rewards_is_null():
    batch = simple([[-1.0]], [[-1.1]], [1.0])
    assert batch.reward_S is None
    assert result_of(batch, **PLAINLY)["theory"] is None
    graded = replace(batch, reward_S=np.ones(1))
    assert result_of(graded, **PLAINLY)["theory"] is not None
    assert result_of(graded, **(PLAINLY | {"theory": False}))["theory"] is None


def test_a_weight_too_large_for_a_float():
    """Σd = 800 nats: the largest weight has no number, but the effective sample size does, and
    nothing is NaN.
    """
    far = [[-40.0] * 20, *[[-1.0] * 20] * 11]
    near = [[-0.01] * 20, *[[-1.0] * 20] * 11]
    theory = result_of(simple(far, near, [1.0] * 12, reward_S=np.ones(12)), **PLAINLY)["theory"]
    assert theory["weight_max"] is None
    assert theory["ess"]["value"] == pytest.approx(1 / 12)
    assert theory["difference"]["value"] is None and theory["difference"]["note"]


def test_a_response_that_earns_nothing_adds_nothing_however_large_its_weight():
    """100 tokens with d = 8.5 have a weight beyond a float, times a reward of 0."""
    batch = simple(
        [[-9.0] * 100, [-1.0, -2.0]],
        [[-0.5] * 100, [-1.5, -2.5]],
        [1, -1],
        reward=np.array([0.0, 1.0]),
        prompt_id=np.array([0, 1]),
    )
    theory = result_of(batch, **PLAINLY)["theory"]
    half = np.exp(-0.5)
    assert theory["difference"]["value"] == pytest.approx((half**2 - 1) / 2)
    assert theory["surrogate"]["value"] == pytest.approx(2 * (half - 1) / 2)
    assert theory["correction"]["value"] == pytest.approx((half - 1) - (half**2 - 1) / 2)
    assert theory["weight_max"] is None
