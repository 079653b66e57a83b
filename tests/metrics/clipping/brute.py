"""A second opinion in float64: a row per counted token, every mask as its paper or framework
writes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.metrics.clipping.masked import Needs
from mismatch_cli.rules.batch import TokenBatch

INF = float("inf")
Rule = Callable[[pd.DataFrame], pd.Series]


def counted(batch: TokenBatch, needs: Needs) -> pd.DataFrame:
    """The counted tokens, one row each, with a column per algorithm that says whether it blocks the
    token.

    A token counts even without full divergences, which are then NaN. Without advantages every token
    appears twice, as if A = 1 and as if A = −1.
    """
    lengths = np.diff(batch.offset_S1)
    t = pd.DataFrame({"s": np.repeat(np.arange(len(lengths)), lengths)})
    t["pos"] = t.groupby("s").cumcount()
    for name in ("prompt_id", "sample_index", "step", "epoch", "minibatch"):
        t[name] = getattr(batch, f"{name}_S")[t["s"]]
    t["id"] = batch.response_ids_T
    t["row"] = np.arange(len(t))
    wanted = {"lq": "logp_rollout", "lp": "logp_trainer", "l1": "logp_recomputed", "A": "advantage"}
    wanted |= {"entropy": "entropy_trainer", "tv_full": "tv_full", "kl_full": "kl_full"}
    for short, name in wanted.items():
        column = getattr(batch, f"{name}_T")
        t[short] = np.nan if column is None else column.astype(np.float64)
    t["q"], t["p"], t["p1"] = np.exp(t["lq"]), np.exp(t["lp"]), np.exp(t["l1"])
    with np.errstate(over="ignore"):
        t["r"], t["r1"], t["rho"] = (
            np.exp(t["lp"] - t["lq"]),
            np.exp(t["lp"] - t["l1"]),
            np.exp(t["l1"] - t["lq"]),
        )
    needed = [
        "lq",
        "lp",
        *(["l1"] if needs.recomputed else []),
        *(["A"] if needs.advantages else []),
    ]
    t = t[batch.loss_mask_T & t[needed].notna().all(axis=1).to_numpy()].reset_index(drop=True)
    for k in (1, 5, 10, 20) if needs.top_k else ():
        t[f"tv{k}"], t[f"kl{k}"] = top_k(batch, t, k, "rollout", "trainer")
    if needs.topk_recomputed:
        t["tv20_1"], t["kl20_1"] = top_k(batch, t, 20, "recomputed", "trainer")
    t["mean_now"], t["mean_gap"], t["sum_gap"] = (
        (t[current] - t[anchor]).groupby(t["s"]).transform(how)
        for current, anchor, how in (
            ("lp", "l1", "mean"),
            ("l1", "lq", "mean"),
            ("l1", "lq", "sum"),
        )
    )
    d = t["lp"] - t["lq"]
    t["k2"], t["k3"], t["abs_gap"] = d**2 / 2, np.expm1(d) - d, (t["rho"] - 1).abs()
    t["mean_total"] = d.groupby(t["s"]).transform("mean")
    if not needs.advantages:
        t = pd.concat([t.assign(A=1.0), t.assign(A=-1.0)], ignore_index=True)
    able = {n: rule for n, rule in BLOCKED.items() if needs.recomputed or n in ON_ROLLOUT}
    able = {n: rule for n, rule in able.items() if needs.top_k or not n.startswith("dppo-topk")}
    able = {n: rule for n, rule in able.items() if needs.advantages or n not in OF_BATCHES}
    # Nothing is blocked without A
    return t.assign(**{n: rule(t) & (t["A"] != 0) for n, rule in able.items()})


def top_k(
    batch: TokenBatch, t: pd.DataFrame, k: int, anchor: str, current: str
) -> tuple[list[float], list[float]]:
    """TV and KL(anchor‖current) over the first k ids, the sampled token, and all others, token
    by token.
    """
    ids = batch.topk_ids_TK
    q_TK, p_TK = (
        np.exp(getattr(batch, f"topk_logp_{n}_TK").astype(np.float64)) for n in (anchor, current)
    )
    short = {"rollout": "q", "trainer": "p", "recomputed": "p1"}
    tvs, kls = [], []
    for row, token, q, p in zip(
        t["row"], t["id"], t[short[anchor]], t[short[current]], strict=True
    ):
        parts = [(q_TK[row, i], p_TK[row, i]) for i in range(k)]
        if token not in ids[row, :k]:
            parts.append((q, p))
        rest = [max(1 - sum(part[side] for part in parts), 1e-6) for side in (0, 1)]
        parts.append((rest[0], rest[1]))
        tvs.append(sum(abs(a - b) for a, b in parts) / 2)
        kls.append(sum(a * np.log(a / b) for a, b in parts))
    return tvs, kls


def binary_kl(q: pd.Series, p: pd.Series) -> pd.Series:
    """KL(q‖p) over {token, any other}; infinite if p = 0."""
    with np.errstate(divide="ignore"):
        return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def clip(t: pd.DataFrame, ratio: str, low: float = 0.2, high: float = 0.28) -> pd.Series:
    return ((t["A"] > 0) & (t[ratio] > 1 + high)) | ((t["A"] < 0) & (t[ratio] < 1 - low))


def moved_away(t: pd.DataFrame, anchor: str, far: pd.Series) -> pd.Series:
    """Whether a token is far from the anchor and the update would move it further."""
    return far & (((t["A"] > 0) & (t["p"] > t[anchor])) | ((t["A"] < 0) & (t["p"] < t[anchor])))


def _ppo(t: pd.DataFrame) -> pd.Series:
    return clip(t, "r1", 0.2, 0.2)


def _band(value: pd.Series, low: float, high: float) -> pd.Series:
    return (value < low) | (value > high)


def _gspo(t: pd.DataFrame, mean: str = "mean_now") -> pd.Series:
    s = np.exp(t[mean])
    return ((t["A"] > 0) & (s > 1 + 4e-4)) | ((t["A"] < 0) & (s < 1 - 3e-4))


def never(t: pd.DataFrame) -> pd.Series:
    return pd.Series(False, index=t.index)


def _over_response(t: pd.DataFrame, column: str, how: str) -> pd.Series:
    return t.groupby("s")[column].transform(how)


def _outward(t: pd.DataFrame, ratio: str = "r") -> pd.Series:
    return ((t["A"] > 0) & (t[ratio] > 1)) | ((t["A"] < 0) & (t[ratio] < 1))


def _cppo(t: pd.DataFrame) -> pd.Series:
    """Algorithm 1 of arXiv 2606.10968, token by token; without advantages every token appears
    twice.
    """
    blocked = never(t)
    for _, part in t.groupby(["s", t.groupby("row").cumcount()]):
        blocked[part.index] = _cppo_of_response(part)
    return blocked & _outward(t)


def _cppo_of_response(part: pd.DataFrame) -> list[bool]:
    size = (part["p"] - part["q"]).abs().to_numpy()
    budget = min(max(np.quantile(size, 0.9), 0.02), 0.04)
    spent = weights = 0.0
    found = []
    for place, tv in enumerate(size):
        weight = 1 - 0.2 * place / max(len(size) - 1, 1)
        found.append(weight * tv > min(0.15, 0.15 + budget * weights - spent))
        spent, weights = spent + weight * tv, weights + weight
    return found


def _batches(t: pd.DataFrame) -> list[pd.DataFrame]:
    return [part for _, part in t.groupby(["step", "epoch", "minibatch"])]


def _m2po(t: pd.DataFrame) -> pd.Series:
    """Drop the outermost of a batch's outward tokens until the mean of the rest is below 0.04."""
    blocked = never(t)
    for part in _batches(t):
        left = (2 * part["k2"])[_outward(part)].sort_values()
        while len(left) > 1 and left.mean() >= 0.04:
            blocked[left.index[-1]] = True
            left = left.iloc[:-1]
    return blocked


def _clip_cov(t: pd.DataFrame) -> pd.Series:
    """The candidates of a batch with the smallest draws."""
    blocked = _ppo(t)
    draws = mix(
        hash_keys(*(t[n].to_numpy() for n in _ROW_KEY)) + t["pos"].to_numpy().astype(np.uint64)
    ) >> np.uint64(11)
    for part in _batches(t):
        cov = (part["A"] - part["A"].mean()) * (part["lp"] - part["lp"].mean())
        candidates = part.index[(cov > 1) & (cov < 5) & ~blocked[part.index]]
        number = max(int(2e-4 * len(part)), 1)
        chosen = candidates[np.argsort(draws[candidates])[:number]]
        blocked[chosen] = True
    return blocked


_ROW_KEY = ("step", "epoch", "minibatch", "prompt_id", "sample_index")


BLOCKED: dict[str, Rule] = {
    "pg-is": never,
    "pg-tis": never,
    "grpo-clip-higher": lambda t: clip(t, "r"),
    "minirl": lambda t: clip(t, "r1"),
    "minirl-tis": lambda t: clip(t, "r1"),
    "dppo-binary-tv": lambda t: moved_away(t, "q", (t["p"] - t["q"]).abs() > 0.15),
    "dppo-binary-tv-recompute": lambda t: moved_away(t, "p1", (t["p"] - t["p1"]).abs() > 0.15),
    "dppo-binary-kl": lambda t: moved_away(t, "q", binary_kl(t["q"], t["p"]) > 0.05),
    "dppo-binary-kl-recompute": lambda t: moved_away(t, "p1", binary_kl(t["p1"], t["p"]) > 0.05),
    "dppo-topk-tv": lambda t: moved_away(t, "q", t["tv20"] > 0.2),
    "dppo-topk-tv-recompute": lambda t: moved_away(t, "p1", t["tv20_1"] > 0.2),
    "dppo-topk-kl": lambda t: moved_away(t, "q", t["kl20"] > 0.05),
    "dppo-topk-kl-recompute": lambda t: moved_away(t, "p1", t["kl20_1"] > 0.05),
    "mask-0.5": lambda t: (t["A"] < 0) & (t["q"] - t["p"] >= 0.5),
    "mask-0.5-recompute": lambda t: (t["A"] < 0) & (t["p1"] - t["p"] >= 0.5),
    "mask-0.8": lambda t: (t["A"] < 0) & (t["q"] - t["p"] >= 0.8),
    "relax-high": lambda t: clip(t, "r") & ((t["A"] < 0) | (t["q"] >= 0.1)),
    "relax-low": lambda t: clip(t, "r") & ((t["A"] > 0) | (t["q"] >= 0.1)),
    "relax-both": lambda t: clip(t, "r") & (t["q"] >= 0.1),
    "reinforce": never,
    "ppo": _ppo,
    "ppo-tis": _ppo,
    "ppo-icepop": lambda t: _ppo(t) | _band(t["rho"], 0.5, 5.0),
    "ppo-mis": lambda t: _ppo(t) | _band(np.exp(t["sum_gap"]), 0.0, 3.0),
    "ppo-mis-geometric": lambda t: _ppo(t) | _band(np.exp(t["mean_gap"]), 0.999, 1.002),
    "ppo-dual-clip": lambda t: _ppo(t) | ((t["A"] < 0) & (t["r1"] > 3)),
    "gspo": _gspo,
    "prime-rl": lambda t: moved_away(t, "q", (t["p"] - t["q"]).abs() > 0.2),
    "ipo": lambda t: (t["p"] - t["q"]).abs() > 0.1,
    "ppo-opsm": lambda t: _ppo(t) | ((t["A"] < 0) & (-t["mean_now"] > 1e-4)),
    "ppo-seq-tis": _ppo,
    "glm5-dis": lambda t: _band(t["r"], 0.8, 1.2),
    "ppo-rollout": lambda t: clip(t, "r", 0.2, 0.2),
    "gspo-rollout": lambda t: _gspo(t, "mean_total"),
    "gmpo": lambda t: clip(t, "r1", 1 - np.exp(-0.4), np.exp(0.4) - 1),
    "cppo": _cppo,
    "trm-max": lambda t: _over_response(t, "k2", "max") > 0.05,
    "trm-avg": lambda t: _over_response(t, "k3", "mean") > 0.001,
    "kpop": lambda t: np.maximum(binary_kl(t["q"], t["p"]), binary_kl(t["p"], t["q"])) > 0.1,
    "m2po": _m2po,
    "vaco": lambda t: (
        clip(t, "r1", 0.2, 0.272)
        | (_outward(t, "rho") & (_over_response(t, "abs_gap", "mean") > 0.2))
    ),
    "clip-cov": _clip_cov,
    **dict.fromkeys(
        ("sapo", "vespo", "drpo", "gbpo", "topr", "minpro", "nfpo", "kl-cov", "dro", "kimi-k1.5"),
        never,
    ),
}
OF_BATCHES = {"m2po", "clip-cov"}
ON_ROLLOUT = {
    "pg-is",
    "pg-tis",
    "reinforce",
    "prime-rl",
    "ipo",
    "glm5-dis",
    "vespo",
    "drpo",
    *(
        "ppo-rollout",
        "gspo-rollout",
        "cppo",
        "trm-max",
        "trm-avg",
        "kpop",
        "m2po",
        "topr",
        "minpro",
        "nfpo",
        "dro",
    ),
    "kimi-k1.5",
    "relax-high",
    "relax-low",
    "relax-both",
    "grpo-clip-higher",
}
ON_ROLLOUT |= {
    "dppo-binary-tv",
    "dppo-binary-kl",
    "dppo-topk-tv",
    "dppo-topk-kl",
    "mask-0.5",
    "mask-0.8",
}
CAPS = {"pg-tis": 3.0, "minirl-tis": 3.0} | {
    name: 5.0 for name in BLOCKED if name.startswith("dppo-topk")
}
OTHER_WEIGHT = {
    "reinforce", "gspo", "sapo", "vespo", "drpo", "gspo-rollout", "gmpo", "vaco", "clip-cov",
    "kl-cov", "gbpo", "topr",
    "minpro", "nfpo", "dro", "kimi-k1.5",
    *(n for n in BLOCKED if n.startswith("ppo") and n != "ppo-rollout"),
}  # fmt: skip


def weight(t: pd.DataFrame, name: str) -> pd.Series:
    """The weight of the update, for algorithms whose weight is r."""
    return t["r"].clip(upper=CAPS.get(name, INF))


def lost(t: pd.DataFrame, name: str) -> dict[str, float | None]:
    """The update weight that the tokens of `t` lose: in total, to masks, to caps."""
    size, out = t["A"].abs(), t[name]
    if name in OTHER_WEIGHT:
        share = size[out].sum() / size.sum()
        return {"all": share, "masked": share, "capped": None}
    whole = (t["r"] * size).sum()
    return {
        "all": 1 - (weight(t, name) * size)[~out].sum() / whole,
        "masked": (t["r"] * size)[out].sum() / whole,
        "capped": ((t["r"] - weight(t, name)) * size)[~out].sum() / whole,
    }


def outward(t: pd.DataFrame, family: str) -> pd.Series:
    """The statistic of a family of thresholds, positive if the update moves the token further
    from μ.
    """
    magnitude = {
        "ratio_clip": lambda: (t["r"] - 1).abs(),
        "binary_tv": lambda: (t["p"] - t["q"]).abs(),
        "binary_kl": lambda: binary_kl(t["q"], t["p"]),
        "top_k_tv": lambda: t["tv20"],
        "top_k_kl": lambda: t["kl20"],
    }[family]()
    return magnitude * np.sign(t["p"] - t["q"]) * np.sign(t["A"])


def token_hashes(t: pd.DataFrame) -> np.ndarray:
    """The hash by which examples are chosen at random: of the response, then mixed with the
    position.
    """
    response_hash = hash_keys(
        *(t[name].to_numpy() for name in ("prompt_id", "sample_index", "step"))
    )
    return mix(response_hash + t["pos"].to_numpy().astype(np.uint64))
