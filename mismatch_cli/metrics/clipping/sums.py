"""What is summed over each response, of all judged tokens and of those that each algorithm blocks or caps.

Sums have the names of `sums_dtype`, and pairs are of tokens with A > 0 and with A < 0. Then what is made of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.metrics.clipping.masked import SIGNS, Masked
from mismatch_cli.metrics.estimate import POSITIVE, SHARE, Estimate, Scale, grouped_ratio, grouped_share

NO_ADVANTAGES = Estimate(None, note="no advantages in the trace")
SCALES: dict[str, Scale] = {
    **dict.fromkeys((f"{kind}_{which}" for kind in ("blocked", "lost") for which in ("all", *SIGNS)), SHARE),
    **dict.fromkeys(("lost_masked", "lost_capped", "touched", "mu_blocked", "mu_kept"), SHARE),
    **dict.fromkeys(("entropy_blocked", "entropy_kept"), POSITIVE),
}


def sums_dtype(algorithms: int) -> np.dtype:
    """M float64 numbers: over all judged tokens, then `of` each algorithm, over those that it blocks."""
    means: list[Any] = [("mu", float), ("entropy", float), ("entropy_n", float)]
    own = [("blocked", float, 2), ("lost", float, 2), ("capped", float, 2), ("touched", float), *means]
    shared = [("judged", float, 2), ("update", float, 2), ("advantage", float, 2), ("responses", float), *means]
    return np.dtype([*shared, ("of", own, (algorithms,))])


def response_sums(judged: Masked) -> np.ndarray:
    """[S, M] in float64, in the order of `sums_dtype`."""
    sums_S = np.zeros(judged.num_responses, sums_dtype(len(judged.algorithms)))
    total = judged.gaps.responses.sum
    sums_S["responses"] = total(judged.judged_N) > 0
    sums_S["mu"] = total(judged.gaps.q_N * judged.judged_N)
    if judged.entropy_N is not None:
        known_N = judged.judged_N & ~np.isnan(judged.entropy_N)
        sums_S["entropy"], sums_S["entropy_n"] = total(np.where(known_N, judged.entropy_N, 0)), total(known_N)
    for sign, sign_N in enumerate((judged.positive_N, judged.negative_N)):
        sums_S["judged"][:, sign] = total(sign_N)
        sums_S["update"][:, sign] = total(np.where(sign_N, judged.update_N, 0))
        sums_S["advantage"][:, sign] = total(judged.abs_advantage_N * sign_N)
    for place, (algorithm, blocked_U) in enumerate(zip(judged.algorithms, judged.blocked, strict=True)):
        _fill(sums_S["of"][:, place], judged, algorithm, blocked_U)
    return sums_S.view(np.float64).reshape(judged.num_responses, -1)


def _fill(own_S: np.ndarray, judged: Masked, algorithm: Algorithm, blocked_U: np.ndarray) -> None:
    """The sums of one algorithm; `capped` is what the bounds of its weight take from kept tokens: (r − weight)·|A|."""
    weight_N = judged.update_N if algorithm.weighs_by_ratio else judged.abs_advantage_N
    own_S["mu"] = judged.sum_at(blocked_U, judged.gaps.q_N[blocked_U])
    for sign in range(len(SIGNS)):
        index_U = blocked_U[judged.sign(blocked_U) == sign]
        own_S["blocked"][:, sign] = judged.sum_at(index_U)
        own_S["lost"][:, sign] = judged.sum_at(index_U, weight_N[index_U])
    own_S["touched"] = own_S["blocked"].any(axis=1)
    if judged.entropy_N is not None:
        known_U = blocked_U[~np.isnan(judged.entropy_N[blocked_U])]
        own_S["entropy"], own_S["entropy_n"] = judged.sum_at(known_U, judged.entropy_N[known_U]), judged.sum_at(known_U)
    if not algorithm.weighs_by_ratio or not algorithm.weight[0].bounded:
        return
    low, high = np.float32(algorithm.weight[0].floor), np.float32(algorithm.weight[0].cap)
    bounded_N = judged.judged_N & ((judged.ratio_N > high) | (judged.ratio_N < low))
    bounded_N[blocked_U] = False
    index_U = np.flatnonzero(bounded_N)
    ratio_U = judged.ratio_N[index_U].astype(np.float64)
    lost_U = (ratio_U - np.clip(ratio_U, low, high)) * judged.abs_advantage_N[index_U]
    for sign in range(len(SIGNS)):
        chosen = judged.sign(index_U) == sign
        own_S["capped"][:, sign] = judged.sum_at(index_U[chosen], lost_U[chosen])


def evaluate(sums: np.ndarray, place: int, algorithm: Algorithm) -> dict[str, np.ndarray]:
    """Every share and mean of the algorithm at `place`, alike on totals and on what is left without each group."""
    own, whole = sums["of"][..., place], sums["update" if algorithm.weighs_by_ratio else "advantage"]
    n, blocked_n, everything = (pair.sum(axis=-1) for pair in (sums["judged"], own["blocked"], whole))
    masked, capped = own["lost"].sum(axis=-1), own["capped"].sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        blocked, lost = own["blocked"] / sums["judged"], (own["lost"] + own["capped"]) / whole
        return {
            "blocked_all": blocked_n / n,
            **{f"blocked_{sign}": blocked[..., row] for row, sign in enumerate(SIGNS)},
            "lost_all": (masked + capped) / everything,
            **{f"lost_{sign}": lost[..., row] for row, sign in enumerate(SIGNS)},
            "lost_masked": masked / everything,
            "lost_capped": capped / everything,
            "touched": own["touched"] / sums["responses"],
            **{name: part / count for name, (part, count) in _means(sums, own).items()},
        }


def _means(sums: np.ndarray, own: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What is averaged over blocked and over kept tokens, each sum with its number of tokens."""
    n, blocked_n = sums["judged"].sum(axis=-1), own["blocked"].sum(axis=-1)
    return {
        "mu_blocked": (own["mu"], blocked_n),
        "mu_kept": (sums["mu"] - own["mu"], n - blocked_n),
        "entropy_blocked": (own["entropy"], own["entropy_n"]),
        "entropy_kept": (sums["entropy"] - own["entropy"], sums["entropy_n"] - own["entropy_n"]),
    }


def bin_row(counts_22G: np.ndarray, prompts: int, advantages: bool) -> dict[str, Any]:
    """Judged and blocked tokens of one bin, each by the sign of A and prompt group."""
    judged_2G, blocked_2G = counts_22G
    both = NO_ADVANTAGES
    if advantages:
        both = grouped_share(blocked_2G.sum(axis=0), judged_2G.sum(axis=0), prompts)
    shares = [both, *(grouped_share(*pair, prompts) for pair in zip(blocked_2G, judged_2G, strict=True))]
    tokens = judged_2G.sum() if advantages else judged_2G[0].sum()  # otherwise every token was asked for each sign
    blocked = {name: found.to_dict() for name, found in zip(("all", *SIGNS), shares, strict=True)}
    return {"tokens": int(tokens), "blocked": blocked}


def step_row(sums_G: np.ndarray, place: int, prompts: int, advantages: bool) -> dict[str, Any]:
    """The same of one step, or stretch of steps, with its means."""
    own_G = sums_G["of"][:, place]
    return bin_row(np.stack([sums_G["judged"].T, own_G["blocked"].T]), prompts, advantages) | {
        name: grouped_ratio(part_G, count_G, prompts, SCALES[name]).to_dict()
        for name, (part_G, count_G) in _means(sums_G, own_G).items()
    }
