"""From the accumulators to the JSON of docs/clipstats.md: every number with its interval."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.metrics.clipping.masked import NEGATIVE, POSITIVE
from mismatch_cli.metrics.clipping.summary import ClippingSummary
from mismatch_cli.metrics.clipping.sums import Totals
from mismatch_cli.metrics.clipping.sweeps import FAMILIES
from mismatch_cli.metrics.estimate import OVERFLOW, SHARE, Estimate, Scale, grouped_ratio, grouped_share
from mismatch_cli.metrics.estimate import POSITIVE as ABOVE_0
from mismatch_cli.metrics.profiles import POSITION_BINS, bin_bounds
from mismatch_cli.metrics.volatility import MU_BINS, MU_EDGES
from mismatch_cli.policies import TRAINER_ROLLOUT

_SIGNS = {"positive": POSITIVE, "negative": NEGATIVE}
_NO_ADVANTAGES = Estimate(None, note="no advantages in the trace")
_OTHER_WEIGHT = Estimate(None, note="the weight is not r")
_SCALES: dict[str, Scale] = {
    **dict.fromkeys((f"{kind}_{which}" for kind in ("blocked", "lost") for which in ("all", *_SIGNS)), SHARE),
    **dict.fromkeys(("lost_masked", "lost_capped", "touched", "mu_blocked", "mu_kept"), SHARE),
    **dict.fromkeys(("entropy_blocked", "entropy_kept"), ABOVE_0),
}
_FAMILY_OF = {region: family for family, region in FAMILIES.items()}


def clipping_result(summary: ClippingSummary, blocked_tokens: int) -> dict[str, Any]:
    """`counts`, `algorithms`, `overlap`, `bad_updates`, `sweeps`, `equivalents`, `approximation`, `theory`."""
    algorithms = summary.question.algorithms
    prompts = summary.prompts.result()
    advantages = summary.question.needs.advantages
    rows = [_algorithm(summary, i, blocked_tokens) for i in range(len(algorithms))]
    return {
        "counts": summary.counts | {
            "prompts": prompts,
            "prompts_exact": prompts < summary.prompts.size,
            "steps": len(summary.bad_updates.steps.sums),
            "lacking": dict(summary.lacking),
        },
        "algorithms": rows,
        "overlap": summary.overlap.result([algorithm.name for algorithm in algorithms], prompts),
        "bad_updates": summary.bad_updates.result(prompts, advantages=advantages),
        "sweeps": summary.sweeps.result(prompts),
        "equivalents": _equivalents(summary, rows) if advantages else [],
        "approximation": summary.approximation.result(prompts),
        "theory": summary.theory.result(prompts) if summary.theory else None,
    }  # fmt: skip


def _algorithm(summary: ClippingSummary, i: int, blocked_tokens: int) -> dict[str, Any]:
    algorithm = summary.question.algorithms[i]
    prompts, advantages = summary.prompts.result(), summary.question.needs.advantages
    blocked_when, weight = algorithm.formulas
    estimates = summary.sums.result(lambda totals: _evaluate(Totals(totals), i, algorithm), prompts, _SCALES)
    if not advantages:
        estimates |= dict.fromkeys(("blocked_all", "lost_all", "lost_masked", "lost_capped", "touched"), _NO_ADVANTAGES)
    elif not algorithm.weighs_by_ratio:
        estimates["lost_capped"] = _OTHER_WEIGHT
    elif not np.isfinite(summary.sums.sums_GM).all():
        infinite = Estimate(None, note=f"a ratio is {OVERFLOW}")
        estimates |= {name: infinite for name, e in estimates.items() if name.startswith("lost") and e.value is None}
    found = {name: estimate.to_dict() for name, estimate in estimates.items()}
    cells = summary.cells
    return {
        "name": algorithm.name,
        "anchor": algorithm.anchor,
        "blocked_when": blocked_when,
        "weight": weight,
        "source": algorithm.source,
        "weighs_by_ratio": algorithm.weighs_by_ratio,
        "blocked": {name: found[f"blocked_{name}"] for name in ("all", *_SIGNS)},
        "lost": {name: found[f"lost_{name}"] for name in ("all", *_SIGNS, "masked", "capped")},
        "responses_touched": found["touched"],
        **{name: found[name] for name in ("mu_blocked", "mu_kept", "entropy_blocked", "entropy_kept")},
        "by_mu": [
            {"mu_low": (0.0, *MU_EDGES)[b], "mu_high": (*MU_EDGES, 1.0)[b]}
            | _bin_row(cells.by_mu[[0, 1 + i], :, :, b], prompts, advantages)
            for b in range(MU_BINS)
        ],
        "by_position": [
            dict(zip(("first", "last"), bin_bounds(b), strict=True))
            | _bin_row(cells.by_position[[0, 1 + i], :, :, b], prompts, advantages)
            for b in range(POSITION_BINS)
            if cells.by_position[0, :, :, b].any()
        ],
        "by_step": [
            {"first": first, "last": last} | _step_row(Totals(sums_GM), i, prompts, advantages)
            for first, last, sums_GM in summary.steps
        ],
        "blocked_tokens": {name: summary.tokens.result(i, sign, blocked_tokens) for name, sign in _SIGNS.items()},
    }


def _evaluate(t: Totals, i: int, algorithm: Algorithm) -> dict[str, np.ndarray]:
    """Every share and mean of algorithm i, alike on totals and on what is left without each group."""
    unit = "update" if algorithm.weighs_by_ratio else "advantage"
    whole = {sign: t.shared(f"{unit}_{sign}") for sign in _SIGNS}
    lost = {sign: t.of(i, f"lost_{sign}") for sign in _SIGNS}
    capped = {sign: t.of(i, f"capped_{sign}") for sign in _SIGNS}
    blocked = {sign: t.of(i, sign) for sign in _SIGNS}
    judged = {sign: t.shared(sign) for sign in _SIGNS}
    n, blocked_n, everything = _sum(judged), _sum(blocked), _sum(whole)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "blocked_all": blocked_n / n,
            **{f"blocked_{sign}": blocked[sign] / judged[sign] for sign in _SIGNS},
            "lost_all": (_sum(lost) + _sum(capped)) / everything,
            **{f"lost_{sign}": (lost[sign] + capped[sign]) / whole[sign] for sign in _SIGNS},
            "lost_masked": _sum(lost) / everything,
            "lost_capped": _sum(capped) / everything,
            "touched": t.of(i, "touched") / t.shared("responses"),
            "mu_blocked": t.of(i, "mu") / blocked_n,
            "mu_kept": (t.shared("mu") - t.of(i, "mu")) / (n - blocked_n),
            "entropy_blocked": t.of(i, "entropy") / t.of(i, "entropy_n"),
            "entropy_kept": (t.shared("entropy") - t.of(i, "entropy")) / (t.shared("entropy_n") - t.of(i, "entropy_n")),
        }


def _sum(by_sign: dict[str, np.ndarray]) -> np.ndarray:
    return by_sign["positive"] + by_sign["negative"]


def _bin_row(counts_2xG: np.ndarray, prompts: int, advantages: bool) -> dict[str, Any]:
    """Judged and blocked tokens of one bin: [judged and blocked, signs, groups]."""
    judged, blocked = counts_2xG
    shares = {name: grouped_share(blocked[sign], judged[sign], prompts) for name, sign in _SIGNS.items()}
    both = grouped_share(blocked.sum(axis=0), judged.sum(axis=0), prompts) if advantages else _NO_ADVANTAGES
    estimates = {"all": both, **shares}
    tokens = judged.sum() if advantages else judged[POSITIVE].sum()  # otherwise every token was asked for each sign
    return {"tokens": int(tokens), "blocked": {name: value.to_dict() for name, value in estimates.items()}}


def _step_row(t: Totals, i: int, prompts: int, advantages: bool) -> dict[str, Any]:
    """Sums by prompt group of one step, or stretch of steps."""
    judged = np.stack([t.shared(sign) for sign in _SIGNS])
    blocked = np.stack([t.of(i, sign) for sign in _SIGNS])
    n_G, blocked_G = judged.sum(axis=0), blocked.sum(axis=0)
    means = {
        "mu_blocked": (t.of(i, "mu"), blocked_G, SHARE),
        "mu_kept": (t.shared("mu") - t.of(i, "mu"), n_G - blocked_G, SHARE),
        "entropy_blocked": (t.of(i, "entropy"), t.of(i, "entropy_n"), ABOVE_0),
        "entropy_kept": (
            t.shared("entropy") - t.of(i, "entropy"),
            t.shared("entropy_n") - t.of(i, "entropy_n"),
            ABOVE_0,
        ),
    }
    row = _bin_row(np.stack([judged, blocked]), prompts, advantages)
    return row | {
        name: grouped_ratio(part_G, whole_G, prompts, scale).to_dict()
        for name, (part_G, whole_G, scale) in means.items()
    }


def _equivalents(summary: ClippingSummary, rows_by_algorithm: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every published one-sided mask on trainer/rollout: the threshold of each other family that blocks as much."""
    rows = []
    sweeps, cells = summary.sweeps, summary.cells
    for i, algorithm in enumerate(summary.question.algorithms):
        own = _FAMILY_OF.get(algorithm.masks[0].region) if len(algorithm.masks) == 1 else None
        if own is None or algorithm.masks[0].ratio != TRAINER_ROLLOUT:
            continue
        blocked_G = cells.by_mu[1 + i].sum(axis=(0, 2))
        if not blocked_G.any():
            continue  # every high enough threshold blocks as little
        blocked = rows_by_algorithm[i]["blocked"]["all"]
        for family in _FAMILY_OF.values():
            if family != own and family in sweeps.counts:
                threshold = sweeps.threshold_for(family, blocked_G.sum()).to_dict()
                rows.append({"algorithm": algorithm.name, "blocked": blocked, "family": family, "threshold": threshold})
    return rows
