"""The frameworks' metrics a second time: plain float64 numpy on whole arrays, as their own code reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.trace.reader import Trace

Arrays = list[np.ndarray]  # one per response


@dataclass
class Gap:
    """π against μ, response by response."""

    p: Arrays
    q: Arrays
    advantage: Arrays
    entropy: Arrays

    @property
    def d(self) -> Arrays:
        return [p - q for p, q in zip(self.p, self.q, strict=True)]

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate(self.d)

    @property
    def r(self) -> np.ndarray:
        return np.exp(self.flat)

    @property
    def dp(self) -> np.ndarray:
        return np.exp(np.concatenate(self.p)) - np.exp(np.concatenate(self.q))

    def by_response(self, function: Callable[[np.ndarray], Any]) -> np.ndarray:
        return np.array([function(d) for d in self.d], dtype=float)

    def trained(self) -> Gap:
        keep = [i for i, a in enumerate(self.advantage) if (a != 0).any()]
        return Gap(*([column[i] for i in keep] for column in (self.p, self.q, self.advantage, self.entropy)))


def gaps_of(trace: Trace) -> dict[str, Gap]:
    """The three pairs of a trace without masks, in which everything was measured."""
    names = ("logp_rollout", "logp_trainer", "logp_recomputed", "advantage", "entropy_trainer")
    columns: dict[str, Arrays] = {name: [] for name in names}
    for batch in trace.batches():
        assert batch.loss_mask_T.all()
        for name, of_responses in columns.items():
            flat = getattr(batch, f"{name}_T").astype(np.float64)
            of_responses += np.split(flat, batch.offset_S1[1:-1])
    q, p, old, *rest = columns.values()
    return {
        "recomputed / rollout": Gap(old, q, *rest),
        "trainer / rollout": Gap(p, q, *rest),
        "trainer / recomputed": Gap(p, old, *rest),
    }


def _ess(w: np.ndarray) -> float:
    return 1 / np.mean((w / w.mean()) ** 2)


def _k3(d: np.ndarray) -> np.ndarray:
    return np.exp(d) - d - 1


def _jensen_shannon(g: Gap) -> float:
    p, q = (np.exp(np.concatenate(side)) for side in (g.p, g.q))
    m = (p + q) / 2
    return np.mean((p / m - 1 - np.log(p / m) + q / m - 1 - np.log(q / m)) / 2)


def _clipfrac(g: Gap) -> float:
    advantage = np.concatenate(g.advantage)
    return np.mean(-advantage * np.clip(g.r, 0.8, 1.2) > -advantage * g.r)


def _dppo(g: Gap, sign: int = 0) -> float:
    shares = []
    for p, q, a in zip(*(getattr(g.trained(), name) for name in ("p", "q", "advantage")), strict=True):
        dp = np.exp(p) - np.exp(q)
        dropped = np.where(a > 0, dp > 0.2, (a < 0) & (dp < -0.2)) & ((np.sign(a) == sign) | (sign == 0))
        shares.append(dropped.mean())
    return float(np.mean(shares))


def _masked_product(g: Gap) -> np.ndarray:
    product = g.by_response(lambda d: np.exp(d.sum()))
    return np.where(product > 3, 0, product)


def _ppl(prefix: str, extremes: bool = True) -> dict[str, Callable[[Gap], float]]:
    of = {
        "training_ppl": lambda g: np.mean([np.exp(-p.mean()) for p in g.p]),
        "training_log_ppl": lambda g: np.mean([-p.mean() for p in g.p]),
        "rollout_ppl": lambda g: np.mean([np.exp(-q.mean()) for q in g.q]),
        "rollout_log_ppl": lambda g: np.mean([-q.mean() for q in g.q]),
        "log_ppl_diff": lambda g: g.by_response(lambda d: -d.mean()).mean(),
        "log_ppl_abs_diff": lambda g: g.by_response(lambda d: abs(d.mean())).mean(),
        "ppl_ratio": lambda g: g.by_response(lambda d: np.exp(-d.mean())).mean(),
    }
    if extremes:
        of["log_ppl_diff_max"] = lambda g: g.by_response(lambda d: -d.mean()).max()
        of["log_ppl_diff_min"] = lambda g: g.by_response(lambda d: -d.mean()).min()
    return {prefix + name: formula for name, formula in of.items()}


_CORR, _IS, _SWIFT, _AREAL = "rollout_corr/", "rollout_corr/rollout_is_", "rollout_correction/", "ppo_actor/update/"
_BEFORE, _WITHIN = "policy/rollout_train_logprobs_abs_diff", "policy/minibatch_rollout_logprobs_abs_diff"

THEIRS: dict[str, dict[str, Callable[[Gap], float]]] = {
    "verl": {
        "training/rollout_probs_diff_mean": lambda g: np.abs(g.dp).mean(),
        "training/rollout_probs_diff_max": lambda g: np.abs(g.dp).max(),
        "training/rollout_probs_diff_std": lambda g: np.abs(g.dp).std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": lambda g: np.corrcoef(
            np.exp(np.concatenate(g.p)), np.exp(np.concatenate(g.q))
        )[0, 1],
        f"{_CORR}kl": lambda g: -g.flat.mean(),
        f"{_CORR}k3_kl": lambda g: _k3(g.flat).mean(),
        **_ppl(_CORR),
        f"{_CORR}chi2_token": lambda g: np.square(np.exp(np.clip(g.flat, -20, 20))).mean() - 1,
        f"{_CORR}chi2_seq": lambda g: g.by_response(lambda d: np.exp(2 * np.clip(d.sum(), -20, 20))).mean() - 1,
        f"{_IS}mean": lambda g: np.minimum(g.r, 2).mean(),
        f"{_IS}max": lambda g: np.minimum(g.r, 2).max(),
        f"{_IS}min": lambda g: np.minimum(g.r, 2).min(),
        f"{_IS}std": lambda g: np.minimum(g.r, 2).std(),
        f"{_IS}eff_sample_size": lambda g: _ess(np.minimum(g.r, 2)),
        f"{_IS}ratio_fraction_high": lambda g: (g.r > 2).mean(),
        f"{_IS}ratio_fraction_low": lambda g: (g.r < 0.5).mean(),
        "actor/ppo_kl": lambda g: -g.flat.mean(),
        "actor/pg_clipfrac": _clipfrac,
    },
    "nemo-rl": {
        "train/token_mult_prob_error": lambda g: np.exp(np.abs(g.flat)).mean(),
        "train/gen_kl_error": lambda g: _k3(g.flat).mean(),
        "train/policy_kl_error": lambda g: _k3(-g.flat).mean(),
        "train/js_divergence_error": _jensen_shannon,
        "train/sampling_importance_ratio": lambda g: g.r.mean(),
        "train/max_seq_mult_prob_error": lambda g: g.by_response(lambda d: np.exp(np.abs(d)).mean()).max(),
        "train/mean_seq_mult_prob_error": lambda g: g.by_response(lambda d: np.exp(np.abs(d)).mean()).mean(),
        "train/min_seq_mult_prob_error": lambda g: g.by_response(lambda d: np.exp(np.abs(d)).mean()).min(),
        "train/probs_ratio": lambda g: g.r.mean(),
        "train/probs_ratio_min": lambda g: g.r.min(),
        "train/probs_ratio_max": lambda g: g.r.max(),
    },
    "prime-rl": {
        "mismatch_kl/all/mean": lambda g: _k3(g.trained().flat).mean(),
        "mismatch_kl/all/std": lambda g: _k3(g.trained().flat).std(ddof=1),
        "mismatch_kl/all/max": lambda g: _k3(g.trained().flat).max(),
        "kl_ent_ratio/mean": lambda g: _k3(g.trained().flat).mean() / np.concatenate(g.trained().entropy).mean(),
        "is_masked/mean": _dppo,
        "is_masked_high/mean": lambda g: _dppo(g, 1),
        "is_masked_low/mean": lambda g: _dppo(g, -1),
    },
    "slime": {
        "train/train_rollout_logprob_abs_diff": lambda g: g.by_response(lambda d: np.abs(d).mean()).mean(),
        "train/tis": lambda g: g.by_response(lambda d: np.exp(d).mean()).mean(),
        "train/tis_abs": lambda g: g.by_response(lambda d: np.abs(np.exp(d) - 1).mean()).mean(),
        "train/tis_clipfrac": lambda g: g.by_response(lambda d: (np.clip(np.exp(d), 0, 2) != np.exp(d)).mean()).mean(),
        "train/ois": lambda g: g.by_response(lambda d: np.exp(d).mean()).mean(),
        "train/mis_kl": lambda g: g.by_response(lambda d: -d.mean()).mean(),
        "train/mis_k3_kl": lambda g: g.by_response(lambda d: _k3(d).mean()).mean(),
        **_ppl("train/mis_", extremes=False),
        "train/mis_chi2_token": lambda g: g.by_response(lambda d: np.exp(2 * d).mean() - 1).mean(),
        "train/mis_chi2_seq": lambda g: g.by_response(lambda d: np.exp(2 * d.sum()) - 1).mean(),
    },
    "trl": {
        "sampling/sampling_logp_difference/mean": lambda g: np.abs(g.flat).mean(),
        "sampling/sampling_logp_difference/max": lambda g: np.abs(g.flat).max(),
        "sampling/importance_sampling_ratio/min": lambda g: _masked_product(g).min(),
        "sampling/importance_sampling_ratio/mean": lambda g: _masked_product(g).mean(),
        "sampling/importance_sampling_ratio/max": lambda g: _masked_product(g).max(),
    },
    "skyrl": {
        f"{_BEFORE}_mean": lambda g: np.abs(g.flat).mean(),
        f"{_BEFORE}_std": lambda g: np.abs(g.flat).std(ddof=1),
        f"{_BEFORE}_max": lambda g: np.abs(g.flat).max(),
        f"{_BEFORE}_min": lambda g: np.abs(g.flat).min(),
        f"{_WITHIN}_mean": lambda g: np.abs(g.flat).mean(),
        f"{_WITHIN}_std": lambda g: np.abs(g.flat).std(),
        f"{_WITHIN}_max": lambda g: np.abs(g.flat).max(),
        "policy/is_ratio_mean": lambda g: g.r.mean(),
        "policy/is_ratio_max": lambda g: g.r.max(),
    },
    "ms-swift": {
        f"{_SWIFT}kl": lambda g: -g.flat.mean(),
        f"{_SWIFT}k3_kl": lambda g: np.clip(_k3(g.flat), -10, 10).mean(),
        **_ppl(_SWIFT),
        f"{_SWIFT}chi2_token": lambda g: np.square(g.r).mean() - 1,
        f"{_SWIFT}chi2_seq": lambda g: g.by_response(lambda d: np.exp(2 * d.mean())).mean() - 1,
        f"{_SWIFT}is_weight_mean": lambda g: np.minimum(g.r, 2).mean(),
        f"{_SWIFT}ess": lambda g: _ess(np.clip(g.r, 0.5, 2)),
        f"{_SWIFT}clipped_frac": lambda g: (g.r > 2).mean(),
    },
    "openrlhf": {"vllm_kl": lambda g: -g.flat.mean(), "ppo_kl": lambda g: -g.flat.mean()},
    "areal": {
        f"{_AREAL}behave_approx_kl/avg": lambda g: g.flat.mean(),
        f"{_AREAL}behave_approx_kl/min": lambda g: g.flat.min(),
        f"{_AREAL}behave_approx_kl/max": lambda g: g.flat.max(),
        f"{_AREAL}behave_imp_weight/avg": lambda g: g.r.mean(),
        f"{_AREAL}behave_imp_weight/min": lambda g: g.r.min(),
        f"{_AREAL}behave_imp_weight/max": lambda g: g.r.max(),
        f"{_AREAL}approx_kl/avg": lambda g: g.flat.mean(),
        f"{_AREAL}importance_weight/avg": lambda g: g.r.mean(),
    },
    "oat": {
        "kl_sample_train_v1": lambda g: -g.flat.mean(),
        "kl_sample_train_v2": lambda g: (g.flat**2).mean() / 2,
        "sampler_learner_prob_diff_max": lambda g: (-g.dp).max(),
        "sampler_learner_prob_diff_min": lambda g: (-g.dp).min(),
        "logprobs_diff_max": lambda g: g.flat.max(),
        "logprobs_diff_min": lambda g: g.flat.min(),
    },
    "open-instruct": {
        "debug/vllm_vs_local_logprob_diff_mean": lambda g: np.abs(g.flat).mean(),
        "debug/vllm_vs_local_logprob_diff_max": lambda g: np.abs(g.flat).max(),
        "debug/vllm_vs_local_logprob_diff_std": lambda g: np.abs(g.flat).std(ddof=1),
        "debug/vllm_local_reverse_kl": lambda g: (np.exp(np.concatenate(g.q)) * -g.flat).mean(),
    },
}
