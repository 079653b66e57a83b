"""A second implementation of the frameworks' metrics: torch on padded rows with a mask, as in
their own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.frameworks.dialects.padded import Padded
from tests.frameworks.dialects.theirs_verl import VERL, perplexities

Formula = Callable[[Padded], Tensor | float]


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over tokens."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def _row_means(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def _k3(d: Tensor) -> Tensor:
    return d.exp() - d - 1


def _safe_exp(d: Tensor) -> Tensor:
    return d.clamp(-20, 20).exp()


def _clipped(g: Padded, ratio: Tensor) -> Tensor:
    """Whether PPO uses the clipped loss, ε = 0.2."""
    return -g.advantage * ratio.clamp(0.8, 1.2) > -g.advantage * ratio


def _sd_or_0(x: Tensor) -> Tensor | float:
    return x.std() if x.numel() > 1 else 0.0


# NeMo-RL: loss_functions.py and grpo.py, compute_and_apply_seq_logprob_error_masking


def _jensen_shannon(g: Padded) -> Tensor:
    mixture = (0.5 * g.p.exp() + 0.5 * g.q.exp()).log()
    return _mean(0.5 * _k3(g.p - mixture) + 0.5 * _k3(g.q - mixture), g.mask)


def _actor_weights(g: Padded) -> Tensor:
    return torch.nan_to_num(g.r, nan=0.0, posinf=0.0, neginf=0.0)


def _row_errors(g: Padded) -> Tensor:
    return _row_means(g.d.abs().exp(), g.mask)[g.mask.any(-1)]


def _after_mask(g: Padded, reduce: Callable[[Tensor], Tensor]) -> Tensor | float:
    errors = _row_errors(g)
    within = errors[errors <= 2]
    return reduce(within) if within.numel() else 0.0


def _masked_correct(g: Padded) -> Tensor | float:
    masked = _row_errors(g) > 2
    return (g.reward[g.mask.any(-1)][masked] == 1).double().mean() if masked.any() else 0.0


def _geometric_oob(g: Padded) -> Tensor:
    d = torch.nan_to_num(g.d, nan=0.0, posinf=0.0, neginf=0.0)
    ratio = _row_means(d, g.mask)[g.mask.any(-1)].exp()
    return 1 - ((ratio >= 0.999) & (ratio <= 1.002)).double().mean()


_NEMO_RL: dict[str, Formula] = {
    "train/token_mult_prob_error": lambda g: _mean(g.d.abs().exp(), g.mask),
    "train/gen_kl_error": lambda g: _mean(_k3(g.d), g.mask),
    "train/policy_kl_error": lambda g: _mean(_k3(-g.d), g.mask),
    "train/js_divergence_error": _jensen_shannon,
    "train/sampling_importance_ratio": lambda g: _mean(_actor_weights(g), g.mask),
    "train/is_oob_ratio (tis)": lambda g: _mean(
        ((_actor_weights(g) > 2) | (_actor_weights(g) < 0)).double(), g.mask
    ),
    "train/is_oob_ratio (icepop)": lambda g: _mean(
        (~((_actor_weights(g) >= 0.5) & (_actor_weights(g) <= 5))).double(), g.mask
    ),
    "train/is_oob_ratio (seq-mask-tis)": _geometric_oob,
    "train/max_seq_mult_prob_error": lambda g: _row_errors(g).max(),
    "train/mean_seq_mult_prob_error": lambda g: _row_errors(g).mean(),
    "train/min_seq_mult_prob_error": lambda g: _row_errors(g).min(),
    "train/max_seq_mult_prob_error_after_mask": lambda g: _after_mask(g, torch.max),
    "train/mean_seq_mult_prob_error_after_mask": lambda g: _after_mask(g, torch.mean),
    "train/min_seq_mult_prob_error_after_mask": lambda g: _after_mask(g, torch.min),
    "train/num_masked_seqs_by_logprob_error": lambda g: (_row_errors(g) > 2).sum(),
    "train/masked_correct_pct": _masked_correct,
    "train/probs_ratio": lambda g: _mean(g.r, g.mask),
    "train/probs_ratio_min": lambda g: g.r[g.mask].min(),
    "train/probs_ratio_max": lambda g: g.r[g.mask].max(),
    "train/probs_ratio_clamped": lambda g: _mean(g.r.clamp(0.8, 1.2), g.mask),
    "train/probs_ratio_clamped_min": lambda g: g.r[g.mask].clamp(0.8, 1.2).min(),
    "train/probs_ratio_clamped_max": lambda g: g.r[g.mask].clamp(0.8, 1.2).max(),
}

# prime-rl: loss.py; responses without any advantage never reach the trainer


def _trained(g: Padded) -> Padded:
    return g if g.advantage is None else g.rows(((g.advantage != 0) & g.mask).any(-1))


def _mismatch_kl(g: Padded) -> Tensor:
    trained = _trained(g)
    return _k3(trained.d)[trained.mask]


def _is_masked(g: Padded) -> Tensor:
    """`IPOLoss`: eps 0.3."""
    g = _trained(g)
    return _row_means((g.dp.abs() > 0.3).to(g.p.dtype), g.mask).mean()


def _kl_over(g: Padded, masked: bool) -> Tensor:
    """`_safe_mean` of each response over its masked or other tokens, then their mean."""
    g = _trained(g)
    return _row_means(_k3(g.d), g.mask & ((g.dp.abs() > 0.3) == masked)).mean()


_PRIME_RL: dict[str, Formula] = {
    "mismatch_kl/all/mean": lambda g: _mismatch_kl(g).mean(),
    "mismatch_kl/all/std": lambda g: _mismatch_kl(g).std(),
    "mismatch_kl/all/max": lambda g: _mismatch_kl(g).max(),
    "kl_ent_ratio/mean": lambda g: (
        _mismatch_kl(g).mean() / _trained(g).entropy[_trained(g).mask].mean()
    ),
    "is_masked/mean": _is_masked,
    "masked_mismatch_kl/mean": lambda g: _kl_over(g, True),
    "unmasked_mismatch_kl/mean": lambda g: _kl_over(g, False),
}

# slime: loss.py and mis.py, response by response, each value at every token of its response


def _of_rows(value: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Formula:
    """The sum over samples of a value's sample mean; 0 for a response without tokens."""

    def formula(g: Padded) -> Tensor:
        rows = zip(g.p, g.q, g.mask, strict=True)
        means = [
            (torch.where(m, value(p, q, m), 0).sum() / m.sum().clamp(min=1)).double()
            for p, q, m in rows
        ]
        return torch.stack(means).mean()

    return formula


def _at(mask: Tensor, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """A number of a row's trained tokens, at every position."""
    return reduce(x[mask]).expand_as(x) if mask.any() else torch.zeros_like(x)


_MIS_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "kl": lambda p, q, m: q - p,
    "k3_kl": lambda p, q, m: _k3(p - q),
    "training_log_ppl": lambda p, q, m: _at(m, p, lambda x: -x.mean()),
    "training_ppl": lambda p, q, m: _at(m, p, lambda x: (-x.mean()).exp()),
    "rollout_log_ppl": lambda p, q, m: _at(m, q, lambda x: -x.mean()),
    "rollout_ppl": lambda p, q, m: _at(m, q, lambda x: (-x.mean()).exp()),
    "log_ppl_diff": lambda p, q, m: _at(m, q - p, torch.mean),
    "log_ppl_abs_diff": lambda p, q, m: _at(m, q - p, lambda x: x.mean().abs()),
    "ppl_ratio": lambda p, q, m: _at(m, q - p, lambda x: x.mean().exp()),
    "chi2_token": lambda p, q, m: _at(
        m, p - q, lambda d: d.clamp(-20, 20).exp().square().mean() - 1
    ),
    "chi2_seq": lambda p, q, m: _at(m, p - q, lambda d: (2 * d.sum().clamp(-20, 20)).exp() - 1),
    "tis_weight_before_bound": lambda p, q, m: _safe_exp(p - q),
    "tis_weight_after_bound": lambda p, q, m: _safe_exp(p - q).clamp(0, 2),
    "tis_truncate_fraction": lambda p, q, m: (_safe_exp(p - q) > 2).double(),
    "rs_mask_fraction_low": lambda p, q, m: (_safe_exp(p - q) < 0.5).double(),
    "rs_mask_fraction_high": lambda p, q, m: (_safe_exp(p - q) > 2).double(),
    "rs_catastrophic_token_fraction": lambda p, q, m: ((p - q) < math.log(1e-4)).double(),
    "rs_catastrophic_seq_fraction": lambda p, q, m: _at(
        m, p - q, lambda d: (d < math.log(1e-4)).any().double()
    ),
    "is_ratio_mean_after_tis_rs": lambda p, q, m: _safe_exp(p - q).clamp(0, 2),
}
_MIS = {f"train/mis_{name}": _of_rows(value) for name, value in _MIS_ROWS.items()}
_TIS = {
    "train/tis": _of_rows(lambda p, q, m: (p - q).exp()),
    "train/tis_abs": _of_rows(lambda p, q, m: ((p - q).exp() - 1).abs()),
    "train/tis_clipfrac": _of_rows(
        lambda p, q, m: ((p - q).exp().clamp(0, 2) != (p - q).exp()).double()
    ),
}


def _opsm(g: Padded) -> Tensor:
    """`compute_opsm_mask` adds up the responses; the dashboard divides by their number."""
    shares = []
    for p, q, mask, advantage in zip(g.p, g.q, g.mask, g.advantage, strict=True):
        count = mask.sum().clamp(min=1)
        seq_kl = torch.where(mask, q - p, 0).sum() / count
        shares.append(((advantage < 0) & (seq_kl > 1e-4)).sum() / count)
    return torch.stack(shares).double().mean()


_SLIME: dict[str, Formula] = {
    "train/train_rollout_logprob_abs_diff": _of_rows(lambda p, q, m: (p - q).abs()),
    "train/ppo_kl": _of_rows(lambda p, q, m: q - p),
    "train/pg_clipfrac": lambda g: _row_means(_clipped(g, g.r).double(), g.mask).mean(),
    "train/opsm_clipfrac": _opsm,
    "train/ois": _of_rows(lambda p, q, m: (p - q).exp()),
    **_TIS,
    **_MIS,
}

# miles: loss_hub/losses.py, math_utils.py and corrections.py; non-finite values become 0


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _low_var_kl(p: Tensor, q: Tensor, _mask: Tensor) -> Tensor:
    d = torch.nan_to_num(p - q, nan=0.0, posinf=20.0, neginf=-20.0).clamp(-20, 20)
    return _finite(_k3(d).clamp(-10, 10))


def _miles_clipfrac(g: Padded) -> Tensor:
    ratio = _safe_exp(_finite(g.d))
    return _row_means(_clipped(g, ratio).double(), g.mask).mean()


def _ess_ratio(p: Tensor, q: Tensor, m: Tensor) -> Tensor:
    w = torch.where(m, _safe_exp(_finite(p - q)), 0)
    return (w.sum() ** 2 / (m.sum().clamp(min=1) * w.square().sum().clamp(min=1e-8))).expand_as(p)


_MILES: dict[str, Formula] = {
    "train/train_rollout_logprob_abs_diff": _of_rows(lambda p, q, m: _finite((p - q).abs())),
    "train/train_rollout_kl": _of_rows(_low_var_kl),
    "train/ppo_kl": _of_rows(lambda p, q, m: _finite(q - p)),
    "train/pg_clipfrac": _miles_clipfrac,
    "train/ess_ratio": _of_rows(_ess_ratio),
    "train/opsm_clipfrac": _opsm,
    "train/ois": _of_rows(lambda p, q, m: _finite(p - q).exp()),
    **_TIS,
    **_MIS,
}

# ROLL: train_infer_corrections.py and actor_worker.py


def _valid_mean(values: Tensor, g: Padded) -> Tensor:
    """The mean over samples with a valid token."""
    return values[g.mask.any(-1)].double().mean()


def _segments(x: Tensor, g: Padded) -> Tensor:
    """At each token, the mean of x over its run of trained tokens."""
    result = torch.zeros_like(x)
    for row, mask in enumerate(g.mask.tolist()):
        start = 0
        while start < len(mask):
            end = start
            while end < len(mask) and mask[end]:
                end += 1
            if end > start:
                result[row, start:end] = x[row, start:end].mean()
            start = end + 1
    return result


def _levels(
    kind: str, x: Callable[[Padded], Tensor], reduce: Callable[[Tensor], Tensor]
) -> dict[str, Formula]:
    """The four of a kind: `of` a mean or sum of x at each level."""
    formulas: dict[str, Formula] = {
        "token": lambda g: _valid_mean(_row_means(reduce(x(g)), g.mask), g),
        "geometric": lambda g: _valid_mean(reduce(_row_means(x(g), g.mask)), g),
        "sequence": lambda g: _valid_mean(reduce(torch.where(g.mask, x(g), 0).sum(-1)), g),
        "segment": lambda g: _valid_mean(_row_means(reduce(_segments(x(g), g)), g.mask), g),
    }
    return {
        f"actor/train_infer_{kind}_{level}_mean": formula for level, formula in formulas.items()
    }


def _tis_clipped(g: Padded) -> Tensor:
    """In float32, where the ratio of a nearly certain token is 1 and not above it."""
    return ((g.p.float() - g.q.float()).exp() > 1).double().sum() / g.mask.sum()


_ROLL: dict[str, Formula] = {
    **_levels("ratio", lambda g: g.d, torch.exp),
    **_levels("diff", lambda g: g.dp, lambda x: x),
    # Includes padding, where r is 1
    "actor/is_weight_clipfrac": lambda g: (g.r > 1.2).double().sum() / g.mask.sum(),
    "actor/train_infer_final_mask_mean": lambda g: _mean(
        ((g.r >= 0.8) & (g.r <= 1.2)).double(), g.mask
    ),
    "actor/ratio_mean": lambda g: _valid_mean(_row_means(g.r, g.mask), g),
    "actor/ratio_max": lambda g: (g.r * g.mask).max(),
    "actor/ratio_min": lambda g: (g.r * g.mask + ~g.mask * 1e10).min(),
    "actor/ppo_ratio_high_clipfrac": lambda g: (g.r > 1.2).double().sum() / g.mask.sum(),
    "actor/ppo_ratio_low_clipfrac": lambda g: (g.r < 0.8).double().sum() / g.mask.sum(),
    # `clipped_low + clipped_high`
    "actor/ppo_ratio_clipfrac": lambda g: (
        ((g.r < 0.8).double() + (g.r > 1.2).double()).sum() / g.mask.sum()
    ),
    "actor/tis_upper_clipfrac": _tis_clipped,
    "actor/tis_lower_clipfrac": lambda g: (g.r < 0).double().sum() / g.mask.sum(),
    "actor/tis_total_clipfrac": _tis_clipped,
    "actor/tis_clipped_ratio_mean": lambda g: _valid_mean(_row_means(g.r.clamp(0, 1), g.mask), g),
    "actor/cispo_clipped_ratio_mean": lambda g: _valid_mean(
        _row_means(g.r.clamp(0.9, 1.1), g.mask), g
    ),
    "actor/clipfrac": lambda g: _valid_mean(_row_means(_clipped(g, g.r).double(), g.mask), g),
    "actor/approxkl": lambda g: _valid_mean(_row_means(0.5 * g.d.square(), g.mask), g),
    "actor/policykl": lambda g: _valid_mean(_row_means(g.d, g.mask), g),
}

# TRL and ms-swift: grpo_trainer.py


def _is_low(g: Padded) -> Tensor:
    return ((g.r < 1 - 0.2) & (g.advantage < 0)).double()


def _is_high(g: Padded) -> Tensor:
    return ((g.r > 1 + 0.2) & (g.advantage > 0)).double()


_CLIPPED: dict[str, Formula] = {
    "clip_ratio/low_mean": lambda g: _mean(_is_low(g), g.mask),
    "clip_ratio/high_mean": lambda g: _mean(_is_high(g), g.mask),
    "clip_ratio/region_mean": lambda g: _mean(_is_low(g) + _is_high(g), g.mask),
    "cispo_clip_ratio": lambda g: _mean(((g.r > 5) & (g.advantage > 0)).double(), g.mask),
}


def _with_tokens(g: Padded, x: Tensor) -> Tensor:
    """`masked_seq_mean` is NaN without tokens, which `nanmin` and `nanmax` leave out."""
    return _row_means(x, g.mask)[g.mask.any(-1)]


def _phi_seq(g: Padded) -> Tensor:
    """`get_gamma_weights` with token_truncate; g compares the trainer with the rollout."""
    least = math.log(1e-8)
    log_ratio = torch.nan_to_num(g.p - g.recomputed, nan=0.0).clamp(-20, 20)
    gap = torch.nan_to_num((g.recomputed - g.q) * g.mask, nan=0.0).exp().clamp(max=3)
    log_w = (log_ratio * g.mask).sum(-1) + (gap.log().clamp(least, 20) * g.mask).sum(-1)
    log_w = log_w.clamp(least, 20)
    rises = _row_means(g.advantage, g.mask) >= 0
    k, lam = torch.where(rises, 2.0, 3.0), torch.where(rises, 3.0, 2.0)
    return (lam + k * log_w - lam * log_w.exp()).exp().mean()


# SkyRL: off_policy_correction_utils.py and ppo_utils.py


def _any_share(outside: Callable[[Tensor], Tensor]) -> Formula:
    """Responses with a trained token outside."""
    return lambda g: (outside(_safe_exp(g.d)) & g.mask).any(-1).double().mean()


def _row_shares(
    name: str, ratio: Callable[[Padded], Tensor], low: float, high: float
) -> dict[str, Formula]:
    return {
        f"policy/{name}_masked_ratio": lambda g: (
            ((ratio(g) > high) | (ratio(g) < low)).double().mean()
        ),
        f"policy/{name}_over_high_ratio": lambda g: (ratio(g) > high).double().mean(),
        f"policy/{name}_under_low_ratio": lambda g: (ratio(g) < low).double().mean(),
    }


def _product(g: Padded) -> Tensor:
    return _safe_exp(torch.where(g.mask, g.d, 0).sum(-1))


_SKYRL_CORRECTION: dict[str, Formula] = {
    "policy/tis_token_clip_high_ratio": lambda g: _mean((_safe_exp(g.d) > 2).double(), g.mask),
    "policy/tis_seq_clip_high_ratio": lambda g: (_product(g) > 5).double().mean(),
    "policy/outlier_seq_masked_ratio": _any_share(lambda r: (r > 100) | (r < 1e-4)),
    "policy/outlier_seq_over_high_ratio": _any_share(lambda r: r > 100),
    "policy/outlier_seq_under_low_ratio": _any_share(lambda r: r < 1e-4),
    "policy/token_mask_ratio": lambda g: _mean(
        (~((_safe_exp(g.d) >= 0.5) & (_safe_exp(g.d) <= 2))).double(), g.mask
    ),
    **_row_shares("geo_sequence_mask", lambda g: _safe_exp(_row_means(g.d, g.mask)), 0.99, 1.01),
    **_row_shares("product_sequence_mask", _product, 0.5, 2.0),
    "policy/clip_ratio": lambda g: _mean(_clipped(g, _safe_exp(g.d)).double(), g.mask),
    "policy/cispo/ratio_mean": lambda g: _mean(_safe_exp(g.d), g.mask),
    "policy/cispo/ratio_clamped_mean": lambda g: _mean(_safe_exp(g.d).clamp(0, 5), g.mask),
    "policy/cispo/ratio_max": lambda g: _safe_exp(g.d)[g.mask].max(),
    "policy/cispo/ratio_min": lambda g: _safe_exp(g.d)[g.mask].min(),
}

# the others


def _masked_product(g: Padded) -> Tensor:
    ratio = torch.where(g.mask, g.d, 0).sum(-1).exp()
    return ratio.masked_fill(ratio > 3, 0.0)


def _three(
    name: str, x: Callable[[Padded], Tensor], prefix: str = "ppo_actor/update/"
) -> dict[str, Formula]:
    """`stats_tracker.stat` of AReaL."""
    return {
        f"{prefix}{name}/avg": lambda g: x(g)[g.mask].mean(),
        f"{prefix}{name}/min": lambda g: x(g)[g.mask].min(),
        f"{prefix}{name}/max": lambda g: x(g)[g.mask].max(),
    }


def _rejected_by_areal(g: Padded) -> Tensor:
    log_ratio = torch.where(torch.isfinite(g.d), g.d, 0.0)
    return _mean((log_ratio.exp() > 5).double(), g.mask)


def _sapo_gate(g: Padded, tau: float) -> Tensor:
    return torch.sigmoid(tau * (g.r - 1)) * (4 / tau)


def _soft_gate(g: Padded) -> Tensor:
    gate = torch.where(g.advantage > 0, _sapo_gate(g, 1.0), _sapo_gate(g, 1.05))
    return _mean(gate, g.mask)


def _dual_clipped(g: Padded) -> Tensor:
    """Where −A c is below the clipped loss, and A < 0; c = 3."""
    loss = torch.maximum(-g.advantage * g.r, -g.advantage * g.r.clamp(0.8, 1.2))
    return _mean(((-3 * g.advantage < loss) & (g.advantage < 0)).double(), g.mask)


def _far(threshold: float) -> Formula:
    """NaN if a log-prob is not finite."""
    return lambda g: _mean(
        torch.where(torch.isfinite(g.d), (g.d.abs() > math.log(threshold)).double(), math.nan),
        g.mask,
    )


_GAP = "ppo_actor/train_infer/"
_AREAL_GAP: dict[str, Formula] = {
    **_three("logp_diff", lambda g: g.d, _GAP),
    **_three("logp_abs_diff", lambda g: g.d.abs(), _GAP),
    f"{_GAP}logp_diff_squared": lambda g: _mean(g.d.square(), g.mask),
    f"{_GAP}trainer_nll": lambda g: _mean(-g.p, g.mask),
    f"{_GAP}rollout_nll": lambda g: _mean(-g.q, g.mask),
    f"{_GAP}kl_k1": lambda g: _mean(-g.d, g.mask),
    f"{_GAP}kl_k2": lambda g: _mean(g.d.square() / 2, g.mask),
    f"{_GAP}kl_k3": lambda g: _mean(g.d.expm1() - g.d, g.mask),
    **{f"{_GAP}ratio_outside_{x:g}": _far(x) for x in (1.5, 2, 3, 5, 10)},
}


def _kept_by_areal(g: Padded) -> Tensor:
    """behave_imp_weight at the tokens that a rejection without bounds keeps."""
    weight = torch.where(torch.isfinite(g.d), g.d, 0.0).exp()
    return weight[g.mask & (weight > 0)]


_DIFF, _BEFORE = "debug/vllm_vs_local_logprob_diff", "policy/rollout_train_logprobs_abs_diff"
_WITHIN, _AREAL, _SWIFT = (
    "policy/minibatch_rollout_logprobs_abs_diff",
    "ppo_actor/update/",
    "rollout_correction/",
)


def _rho(g: Padded) -> Tensor:
    return torch.where(g.mask, g.d.clamp(-10, 10), 0).exp()


def _swift_weight(g: Padded) -> Tensor:
    return _safe_exp(g.d).clamp(max=2)


def _swift_ess(g: Padded) -> Tensor:
    w = _swift_weight(g).clamp(0.5, 2)
    return 1 / _mean((w / _mean(w, g.mask)).square(), g.mask)


THEIRS: dict[str, dict[str, Formula]] = {
    "verl": VERL,
    "nemo-rl": _NEMO_RL,
    "prime-rl": _PRIME_RL,
    "slime": _SLIME,
    "miles": _MILES,
    "roll": _ROLL,
    "trl": {
        "sampling/sampling_logp_difference/mean": lambda g: g.d.abs()[g.mask].mean(),
        "sampling/sampling_logp_difference/max": lambda g: g.d.abs()[g.mask].max(),
        "sampling/importance_sampling_ratio/min": lambda g: _masked_product(g).min(),
        "sampling/importance_sampling_ratio/mean": lambda g: _masked_product(g).mean(),
        "sampling/importance_sampling_ratio/max": lambda g: _masked_product(g).max(),
        **_CLIPPED,
        "clip_ratio/low_min": lambda g: _with_tokens(g, _is_low(g)).min(),
        "clip_ratio/high_max": lambda g: _with_tokens(g, _is_high(g)).max(),
        "vespo/phi_seq_mean": _phi_seq,
    },
    "skyrl": {
        f"{_BEFORE}_mean": lambda g: g.d.abs()[g.mask].mean(),
        f"{_BEFORE}_std": lambda g: g.d.abs()[g.mask].std(),
        f"{_BEFORE}_max": lambda g: g.d.abs()[g.mask].max(),
        f"{_BEFORE}_min": lambda g: g.d.abs()[g.mask].min(),
        f"{_WITHIN}_mean": lambda g: _mean(g.d.abs(), g.mask),
        f"{_WITHIN}_std": lambda g: (
            (_mean(g.d.square(), g.mask) - _mean(g.d.abs(), g.mask) ** 2).clamp(min=0).sqrt()
        ),
        f"{_WITHIN}_max": lambda g: (g.d.abs() * g.mask).max(),
        "policy/is_ratio_mean": lambda g: _mean(_safe_exp(g.d), g.mask),
        "policy/is_ratio_max": lambda g: (_safe_exp(g.d) * g.mask).max(),
        **_SKYRL_CORRECTION,
    },
    "ms-swift": {
        f"{_SWIFT}kl": lambda g: _mean(-g.d, g.mask),
        f"{_SWIFT}k3_kl": lambda g: _mean(_k3(g.d.clamp(-20, 20)).clamp(-10, 10), g.mask),
        **perplexities(_SWIFT),
        f"{_SWIFT}chi2_token": lambda g: _mean(_safe_exp(g.d).square(), g.mask) - 1,
        f"{_SWIFT}chi2_seq": lambda g: (
            _row_means(g.d, g.mask).clamp(-20, 20).exp().square().mean() - 1
        ),
        f"{_SWIFT}is_weight_mean": lambda g: _mean(_swift_weight(g), g.mask),
        f"{_SWIFT}ess": _swift_ess,
        f"{_SWIFT}clipped_frac": lambda g: _mean((_safe_exp(g.d) > 2).double(), g.mask),
        **_CLIPPED,
    },
    "openrlhf": {
        "vllm_kl": lambda g: _mean(-g.d, g.mask),
        "is_filter_ratio": lambda g: _mean((~((g.r >= 0.5) & (g.r <= 5))).double(), g.mask),
        "ppo_kl": lambda g: _mean(-g.d, g.mask),
        "ppo_clip_ratio": lambda g: _mean(_clipped(g, _safe_exp(g.d)).double(), g.mask),
    },
    "areal": {
        **_three("logp_diff", lambda g: g.q - g.p),
        **_three("logp_abs_diff", lambda g: (g.q - g.p).abs()),
        **_three("behave_approx_kl", lambda g: g.d),
        **_AREAL_GAP,
        f"{_AREAL}behave_filtered_ratio/avg": _rejected_by_areal,
        f"{_AREAL}rs_filtered_fraction": _rejected_by_areal,
        f"{_AREAL}clip_ratio/avg": lambda g: _mean(_clipped(g, g.r).double(), g.mask),
        f"{_AREAL}dual_clip_ratio/avg": _dual_clipped,
        f"{_AREAL}sapo_soft_gate/avg": _soft_gate,
        f"{_AREAL}sapo_scaled_gate_pos/avg": lambda g: _mean(_sapo_gate(g, 1.0), g.mask),
        f"{_AREAL}sapo_scaled_gate_neg/avg": lambda g: _mean(_sapo_gate(g, 1.05), g.mask),
        f"{_AREAL}behave_imp_weight/avg": lambda g: _kept_by_areal(g).mean(),
        f"{_AREAL}behave_imp_weight/min": lambda g: _kept_by_areal(g).min(),
        f"{_AREAL}behave_imp_weight/max": lambda g: _kept_by_areal(g).max(),
        f"{_AREAL}approx_kl/avg": lambda g: g.d[g.mask].mean(),
        f"{_AREAL}importance_weight/avg": lambda g: g.r[g.mask].mean(),
    },
    "oat": {  # includes prompts, where the mask is 0
        "kl_sample_train_v1": lambda g: _mean(-g.d, g.mask),
        "kl_sample_train_v2": lambda g: _mean(g.d.square(), g.mask) / 2,
        "sampler_learner_prob_diff_max": lambda g: (-g.dp * g.mask).max().clamp(min=0),
        "sampler_learner_prob_diff_min": lambda g: (-g.dp * g.mask).min().clamp(max=0),
        "logprobs_diff_max": lambda g: (g.d * g.mask).max().clamp(min=0),
        "logprobs_diff_min": lambda g: (g.d * g.mask).min().clamp(max=0),
    },
    "open-instruct": {
        f"{_DIFF}_mean": lambda g: g.d.abs()[g.mask].mean(),
        f"{_DIFF}_max": lambda g: g.d.abs()[g.mask].max(),
        f"{_DIFF}_std": lambda g: _sd_or_0(g.d.abs()[g.mask]),
        "debug/vllm_local_reverse_kl": lambda g: _mean(g.q.exp() * -g.d, g.mask),
        "val/rho_weight": lambda g: _mean(_rho(g).clamp(max=2), g.mask),
        "val/rho_clipfrac": lambda g: _mean((_rho(g).clamp(max=2) != _rho(g)).double(), g.mask),
        "val/ratio": lambda g: _mean(g.r, g.mask),
        "policy/clipfrac_avg": lambda g: _mean(
            (-g.advantage * g.r.clamp(0.8, 1.272) > -g.advantage * g.r).double(), g.mask
        ),
    },
    "tinker": {
        "optim/kl_sample_train_v1": lambda g: -g.d[g.mask].mean(),
        "optim/kl_sample_train_v2": lambda g: 0.5 * g.d[g.mask].square().mean(),
        "optim/entropy": lambda g: -g.q[g.mask].mean(),
    },
}
