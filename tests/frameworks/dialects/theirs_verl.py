"""A second implementation of verl's metrics, after rollout_corr_helper.py, debug/metrics.py and
core_algos.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.frameworks.dialects.padded import Padded

Formula = Callable[[Padded], Tensor | float]
_CORR, _IS, _RS = "rollout_corr/", "rollout_corr/rollout_is_", "rollout_corr/rollout_rs_"


def _mean(x: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """verl_F.masked_mean: 0 for a row without tokens."""
    counted = torch.where(mask, x, 0)
    return (
        counted.sum() / mask.sum() if axis is None else counted.sum(axis) / (mask.sum(axis) + 1e-8)
    )


def perplexities(prefix: str) -> dict[str, Formula]:
    """Shared with ms-swift; slime's have no extremes, and 0 for a row without tokens."""

    def log_ppl_diff(g: Padded) -> Tensor:
        return _mean(g.q, g.mask, -1) - _mean(g.p, g.mask, -1)

    formulas: dict[str, Formula] = {
        "training_ppl": lambda g: (-_mean(g.p, g.mask, -1)).exp().mean(),
        "training_log_ppl": lambda g: (-_mean(g.p, g.mask, -1)).mean(),
        "rollout_ppl": lambda g: (-_mean(g.q, g.mask, -1)).exp().mean(),
        "rollout_log_ppl": lambda g: (-_mean(g.q, g.mask, -1)).mean(),
        "log_ppl_diff": lambda g: log_ppl_diff(g).mean(),
        "log_ppl_abs_diff": lambda g: log_ppl_diff(g).abs().mean(),
        "log_ppl_diff_max": lambda g: log_ppl_diff(g).max(),
        "log_ppl_diff_min": lambda g: log_ppl_diff(g).min(),
        "ppl_ratio": lambda g: log_ppl_diff(g).exp().mean(),
    }
    return {prefix + name: formula for name, formula in formulas.items()}


def _raw(g: Padded) -> Tensor:
    return g.d.clamp(-20, 20).exp() * g.mask


def _tis(g: Padded) -> Tensor:
    return _raw(g).clamp(max=2.0)


def _sd(w: Tensor, mask: Tensor) -> Tensor:
    return (_mean(w.square(), mask) - _mean(w, mask).square()).clamp(min=0).sqrt()


def _ess(g: Padded) -> Tensor:
    w = _tis(g).clamp(0, 2)
    return 1 / _mean((w / (_mean(w, g.mask) + 1e-8)).square(), g.mask)


def _rows_sd(values: Tensor) -> Tensor | float:
    return values.std() if values.numel() > 1 else 0.0


def _importance() -> Iterator[tuple[str, Formula]]:
    yield "mean", lambda g: _mean(_tis(g), g.mask)
    yield "max", lambda g: _tis(g).masked_fill(~g.mask, -math.inf).max()
    yield "min", lambda g: _tis(g).masked_fill(~g.mask, math.inf).min()
    yield "std", lambda g: _sd(_tis(g), g.mask) if g.mask.sum() > 1 else 0.0
    yield "eff_sample_size", _ess
    yield "ratio_fraction_high", lambda g: _mean((_raw(g) > 2).double(), g.mask)
    yield "ratio_fraction_low", lambda g: _mean((_raw(g) < 0.5).double(), g.mask)
    yield "seq_mean", lambda g: _mean(_tis(g), g.mask, -1).mean()
    yield "seq_std", lambda g: _rows_sd(_mean(_tis(g), g.mask, -1))
    yield "seq_max", lambda g: _mean(_tis(g), g.mask, -1).max()
    yield "seq_min", lambda g: _mean(_tis(g), g.mask, -1).min()
    yield "seq_max_deviation", lambda g: (_mean(_tis(g), g.mask, -1) - 1).abs().max()
    yield "seq_fraction_high", lambda g: (_mean(_raw(g), g.mask, -1) > 2).double().mean()
    yield "seq_fraction_low", lambda g: (_mean(_raw(g), g.mask, -1) < 0.5).double().mean()
    yield "batch_norm_factor", lambda g: _mean(_tis(g), g.mask)
    yield "oob_ratio", lambda g: _mean(((_raw(g) < 0.5) | (_raw(g) > 5.0)).double(), g.mask)


def _rejection(option: str, low: float | None, high: float) -> Iterator[tuple[str, Formula]]:
    """compute_rollout_rejection_mask and compute_rs_metrics for one option on sequences."""

    def statistic(g: Padded) -> Tensor:
        d = g.d.clamp(-20, 20)
        k = -d if option.endswith("k1") else d.exp() - 1 - d
        return torch.where(g.mask, k, 0).sum(-1) if "sum" in option else _mean(k, g.mask, -1)

    def valid(g: Padded) -> Tensor:
        return statistic(g)[g.mask.any(-1)]

    def keep(k: Tensor) -> Tensor:
        return k <= high if low is None else (k >= low) & (k <= high)

    def at_tokens(g: Padded, k: Tensor) -> Tensor:
        return k.unsqueeze(-1).expand(g.mask.shape)

    yield "mean", lambda g: _mean(at_tokens(g, statistic(g)), g.mask)
    yield (
        "std",
        lambda g: _sd(at_tokens(g, statistic(g)).clamp(0.0 if low is None else low, high), g.mask),
    )
    yield "masked_fraction", lambda g: _mean(1 - at_tokens(g, keep(statistic(g))).double(), g.mask)
    yield "seq_masked_fraction", lambda g: 1 - keep(valid(g)).double().mean()
    yield "seq_mean", lambda g: valid(g).mean()
    yield "seq_std", lambda g: _rows_sd(valid(g))
    yield "seq_max_deviation", lambda g: valid(g).abs().max()
    for prefix in ("", "seq_"):
        yield f"{prefix}max", lambda g: valid(g).max()
        yield f"{prefix}min", lambda g: valid(g).min()
        yield f"{prefix}fraction_high", lambda g: (valid(g) > high).double().mean()
        if low is not None:
            yield f"{prefix}fraction_low", lambda g: (valid(g) < low).double().mean()


_GEO = dict(_rejection("seq_mean_k1", math.log(0.999), math.log(1.001)))
_REJECTION = {
    "seq_sum_k1": dict(_rejection("seq_sum_k1", math.log(0.5), math.log(2.0))),
    "seq_mean_k1": _GEO,
    "seq_mean_k3": dict(_rejection("seq_mean_k3", None, 0.01)),
}


def _pearson(g: Padded) -> Tensor:
    return torch.corrcoef(torch.stack([g.p.exp()[g.mask], g.q.exp()[g.mask]]))[0][1]


def _seq_rejected(g: Padded) -> Tensor:
    """The share of all rows; a row without tokens has no rejected ones."""
    return _GEO["seq_masked_fraction"](g) * g.mask.any(-1).double().mean()


def _clipfrac_lower(g: Padded) -> Tensor:
    """Dual clip, c = 3."""
    ratio = g.d.clamp(-20, 20).exp()
    losses = torch.maximum(-g.advantage * ratio, -g.advantage * ratio.clamp(0.8, 1.2))
    return _mean(((losses > -3 * g.advantage) & (g.advantage < 0)).to(g.p.dtype), g.mask)


def _clipfrac(g: Padded) -> Tensor:
    ratio = g.d.clamp(-20, 20).exp()
    return _mean((-g.advantage * ratio.clamp(0.8, 1.2) > -g.advantage * ratio).double(), g.mask)


VERL: dict[str, Formula] = {
    "training/rollout_probs_diff_mean": lambda g: g.dp.abs()[g.mask].mean(),
    "training/rollout_probs_diff_max": lambda g: g.dp.abs()[g.mask].max(),
    "training/rollout_probs_diff_std": lambda g: g.dp.abs()[g.mask].std(),
    "training/rollout_actor_probs_pearson_corr": _pearson,
    f"{_CORR}kl": lambda g: _mean(g.q - g.p, g.mask),
    f"{_CORR}k3_kl": lambda g: _mean(g.r - g.d - 1, g.mask),
    **perplexities(_CORR),
    f"{_CORR}chi2_token": lambda g: _mean(g.d.clamp(-20, 20).exp().square(), g.mask) - 1,
    f"{_CORR}chi2_seq": lambda g: (
        (2 * torch.where(g.mask, g.d, 0).sum(-1).clamp(-20, 20)).exp().mean() - 1
    ),
    **{f"{_IS}{name}": formula for name, formula in _importance()},
    **{
        f"{_RS}{option}_{name}": formula
        for option, rows in _REJECTION.items()
        for name, formula in rows.items()
    },
    f"{_RS}masked_fraction": _GEO["masked_fraction"],
    f"{_RS}seq_masked_fraction": _seq_rejected,
    "actor/ppo_kl": lambda g: _mean(-g.d.clamp(-20, 20), g.mask),
    "actor/pg_clipfrac": _clipfrac,
    "actor/pg_clipfrac_lower": _clipfrac_lower,
}
