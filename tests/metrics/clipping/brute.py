"""A second opinion in float64: a row per counted token, and what every mask blocks, from the
objectives as published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.rules.batch import TokenBatch
from tests.metrics.clipping.world import ALL, result_of
from tests.rules.algorithms.published import Sample, gspo_token, prime_rl, topk_kl, topk_tv
from tests.rules.algorithms.published_owners import OF_TABLE

COLUMNS = {
    "lq": "logp_rollout", "lp": "logp_trainer", "l1": "logp_recomputed", "A": "advantage",
    "entropy": "entropy_trainer", "tv_full": "tv_full", "kl_full": "kl_full",
}  # fmt: skip
PROBABILITIES = {"rollout": "q", "trainer": "p", "recomputed": "p1"}
ROW_KEY = ["step", "epoch", "minibatch", "prompt_id", "sample_index"]
RANKS = 20
# An excluded token has a gradient of 0 whether or not a mask blocks it.
LEAST = -100.0


def gmpo(s: Sample) -> Tensor:
    """With an advantage for each token."""
    return s.advantage * torch.where(
        s.advantage > 0, s.d_old.clamp(max=0.4), s.d_old.clamp(min=-0.4)
    )


# The rest of the table, whose rows drop no token
UNMASKED = {
    "pg-is", "pg-tis", "reinforce", "sapo", "vespo", "drpo", "gbpo", "topr", "minpro", "nfpo",
    "kl-cov", "dro", "kimi-k1.5",
}  # fmt: skip
OBJECTIVES = OF_TABLE | {
    # With an advantage for each token, as in a trace
    "gspo": lambda s: gspo_token(s, s.logp_old),
    "gspo-rollout": lambda s: gspo_token(s, s.logq),
    "gmpo": gmpo,
    # Without the term, which has a gradient at blocked tokens too
    "prime-rl": lambda s: prime_rl(s) + 1e-3 * s.d**2,
}
CAPS = {"pg-tis": 3.0, "minirl-tis": 3.0} | {
    name: 5.0 for name in OBJECTIVES if name.startswith("dppo-topk")
}
OTHER_WEIGHT = {
    "reinforce", "gspo", "sapo", "vespo", "drpo", "gspo-rollout", "gmpo", "vaco", "clip-cov",
    "kl-cov", "gbpo", "topr",
    "minpro", "nfpo", "dro", "kimi-k1.5",
    *(n for n in OBJECTIVES if n.startswith("ppo") and n != "ppo-rollout"),
}  # fmt: skip


def counted(batch: TokenBatch, needs: Needs) -> pd.DataFrame:
    """The counted tokens, one row each, with a column per algorithm that says whether it blocks the
    token.

    A token counts even without full divergences, which are then NaN. Without advantages every token
    appears twice, as if A = 1 and as if A = −1.
    """
    lengths = np.diff(batch.offset_S1)
    t = pd.DataFrame({"s": np.repeat(np.arange(len(lengths)), lengths)})
    t["pos"], t["row"] = t.groupby("s").cumcount(), t.index
    for name in ROW_KEY:
        t[name] = getattr(batch, f"{name}_S")[t["s"]]
    t["id"] = batch.response_ids_T
    for short, name in COLUMNS.items():
        column = getattr(batch, f"{name}_T")
        t[short] = np.nan if column is None else column.astype(np.float64)
    t["q"], t["p"], t["p1"] = np.exp(t["lq"]), np.exp(t["lp"]), np.exp(t["l1"])
    with np.errstate(over="ignore"):
        t["r"] = np.exp(t["lp"] - t["lq"])
    needed = ["lq", "lp", *["l1"] * needs.recomputed, *["A"] * needs.advantages]
    t = t[batch.loss_mask_T & t[needed].notna().all(axis=1)].reset_index(drop=True)
    for k in (1, 5, 10, RANKS) if needs.top_k else ():
        q, p = partition(batch, t, k, "rollout"), partition(batch, t, k, "trainer")
        t[f"tv{k}"], t[f"kl{k}"] = topk_tv(q, p).numpy(), topk_kl(q, p).numpy()
    with_signs = [t] if needs.advantages else [t.assign(A=1.0), t.assign(A=-1.0)]
    parts = [with_blocked(batch, signed, needs) for signed in with_signs]
    return pd.concat(parts, ignore_index=True)


def partition(batch: TokenBatch, t: pd.DataFrame, k: int, policy: str) -> Tensor:
    """Probabilities of the first k ids, of the sampled token if it is not among them, and of all
    others.
    """
    logp_TK = getattr(batch, f"topk_logp_{policy}_TK")[t["row"], :k]
    is_among = (batch.topk_ids_TK[t["row"], :k] == t[["id"]].to_numpy()).any(axis=1)
    alone = np.where(is_among, 0.0, t[PROBABILITIES[policy]])
    # In float64, where the package computes in float32
    named = np.column_stack([np.exp(logp_TK.astype(np.float64)), alone])
    rest = np.maximum(1 - named.sum(axis=1), 1e-6)
    return torch.tensor(np.column_stack([named, rest]))


def with_blocked(batch: TokenBatch, t: pd.DataFrame, needs: Needs) -> pd.DataFrame:
    """A token is blocked where the published objective has no gradient; none is without A."""
    names = []
    for algorithm in ALL:
        lacks_policy = algorithm.needs_recomputed and not needs.recomputed
        lacks_top_k = algorithm.needs_top_k and not needs.top_k
        lacks_sign = algorithm.batch_masks and not needs.advantages
        if not (lacks_policy or lacks_top_k or lacks_sign):
            names.append(algorithm.name)
    t = t.assign(**dict.fromkeys(names, False))
    for rows, sample in samples(batch, t, needs):
        for name in set(names) - UNMASKED:
            (gradient,) = torch.autograd.grad(
                OBJECTIVES[name](sample).sum(), sample.logp, retain_graph=True
            )
            t.loc[rows, name] = ((gradient == 0) & (sample.advantage != 0)).numpy()
    return t


def samples(batch: TokenBatch, t: pd.DataFrame, needs: Needs) -> Iterator[tuple[pd.Index, Sample]]:
    """The tokens of each batch, as the published objectives take them."""
    for _, part in t.groupby(["step", "epoch", "minibatch"]):
        logq, logp, logp_old, advantage, entropy = (
            torch.tensor(part[name].clip(lower=LEAST).to_numpy())
            for name in ("lq", "lp", "l1", "A", "entropy")
        )
        luck = torch.tensor((token_hashes(part, ROW_KEY) >> np.uint64(11)).astype(np.float64))
        policies = ["rollout", "trainer", *["recomputed"] * needs.topk_recomputed]
        parts = [partition(batch, part, RANKS, x) for x in policies if needs.top_k]
        lengths = part.groupby("s").size().tolist()
        yield (
            part.index,
            Sample(
                logp.requires_grad_(), logp_old, logq, advantage, lengths, parts, entropy, [], luck
            ),
        )


def token_hashes(t: pd.DataFrame, key: Sequence[str]) -> np.ndarray:
    """A hash of the key of each token's row, mixed with the position."""
    return mix(hash_keys(*(t[n].to_numpy() for n in key)) + t["pos"].to_numpy().astype(np.uint64))


def binary_kl(q: pd.Series, p: pd.Series) -> pd.Series:
    """KL(q‖p) over {token, any other}; infinite if p = 0."""
    with np.errstate(divide="ignore"):
        return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def lost(t: pd.DataFrame, name: str) -> dict[str, float | None]:
    """The update weight that the tokens of `t` lose: in total, to masks, to caps."""
    size, out = t["A"].abs(), t[name]
    if name in OTHER_WEIGHT:
        share = size[out].sum() / size.sum()
        return {"all": share, "masked": share, "capped": None}
    whole, capped = t["r"] * size, t["r"].clip(upper=CAPS.get(name, np.inf)) * size
    return {
        "all": 1 - capped[~out].sum() / whole.sum(),
        "masked": whole[out].sum() / whole.sum(),
        "capped": (whole - capped)[~out].sum() / whole.sum(),
    }


def outward(t: pd.DataFrame, family: str) -> pd.Series:
    """The statistic of a family of thresholds, positive if the update moves the token further
    from μ.
    """
    magnitude = {
        "ratio_clip": (t["r"] - 1).abs(),
        "binary_tv": (t["p"] - t["q"]).abs(),
        "binary_kl": binary_kl(t["q"], t["p"]),
        "top_k_tv": t.get("tv20"),
        "top_k_kl": t.get("kl20"),
    }[family]
    return magnitude * np.sign(t["p"] - t["q"]) * np.sign(t["A"])


def judged(batch: TokenBatch, needs: Needs, **question: Any) -> SimpleNamespace:
    """A batch, the result for all algorithms, and its tokens: `t` holds the counted ones, `judged`
    those with an advantage.
    """
    t, result = counted(batch, needs), result_of(batch, needs=needs, **question)
    rows = {row["name"]: row for row in result["algorithms"]}
    return SimpleNamespace(
        batch=batch, needs=needs, t=t, judged=t[t["A"] != 0], result=result, rows=rows
    )
