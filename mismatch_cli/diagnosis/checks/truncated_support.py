"""top-p, top-k or min-p on one side only, which renormalised and the other did not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.checks.uniform_mixture import mixture_in
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from mismatch_cli.diagnosis.power import clear, no_power
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "truncated-support", 3
CLEARS = ("config.sampling.top_p",)  # settings that are not suspects if this finds nothing
TITLE = "Truncated support on one side only"
CAUSE = (
    "top-p, top-k or min-p renormalised the probabilities of one side, and the other side kept "
    "all tokens."
)
CHANGE = (
    "Sample with top_p = 1, top_k off, min_p = 0; or give the trainer the same truncation "
    "(vLLM ≥ 0.28: return_sampling_mask)."
)
SOURCE = "TRL 6789 and PR 7269 (top_p 0.8: mean ratio 0.896 = kept mass 0.895), NeMo-RL 3365"
_OUT_OF_SUPPORT = 0.002
_ONE_SIDED, _Z = 0.4, 5.0  # of the mean gap; standard errors
_LARGEST_RATIO = 10.0
_OFF = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
_HALF, _STEEP = float(np.log(0.5)), 0.2


def check(evidence: Evidence) -> Finding:
    """Found if the gap is one-sided (`OneSided`), or if the trainer gives many tokens
    probability 0.
    """
    sample = evidence.sample
    outside = evidence.counts.out_of_support
    share_outside = outside / max(1, outside + len(sample.d_N))
    if share_outside > _OUT_OF_SUPPORT and _is_one_sided(sample.d_N):
        return _trainer_finding(sample.d_N, outside)
    gap = OneSided.of(sample.d_N, sample.group_N)
    ratio = gap.ratio.value
    rows: tuple[Row, ...] = (
        ("mean ratio (the kept mass, if only the engine truncates)", ratio),
        ("standard error over prompts", gap.ratio.error),
        ("share of tokens with π < μ", float((sample.d_N < 0).mean())),
        ("share of the gap where π < μ / 2: more than truncation explains", gap.steep),
        *_kept_mass(sample),
    )
    if not gap.renormalised or mixture_in(sample):
        return clear(NAME, ratio, "mean ratio", gap.power, rows)
    sentence = (
        "The engine's probabilities are higher than the trainer's on nearly every token, and the "
        f"mean ratio is {ratio:.4g}: the engine renormalised over a part of the vocabulary with "
        "about that mass."
    )
    left_N = _without_lean(sample.d_N)
    return Finding(NAME, "found", ratio, "mean ratio", sentence, rows, left_N=left_N)


@dataclass(frozen=True)
class OneSided:
    """The mean ratio of some tokens, and the share of the gap where π < μ / 2, more than truncation
    explains.

    At full support E_μ[π/μ] is 1, however large the noise; if μ was renormalised, it is the kept
    mass.
    """

    ratio: Mean
    gap: float  # mean |d|, nats
    steep: float

    @classmethod
    def of(cls, d_N: np.ndarray, group_N: np.ndarray) -> OneSided:
        gap = float(np.abs(d_N).mean()) if len(d_N) else 0.0
        # The exponent is capped only so that it does not overflow
        ratio_N = np.minimum(np.exp(np.minimum(d_N, 3.0)), _LARGEST_RATIO)
        steep = float(-d_N[d_N < _HALF].sum() / (gap * len(d_N))) if gap else 0.0
        return cls(mean_over_prompts(ratio_N, group_N), gap, steep)

    @property
    def renormalised(self) -> bool:
        """Whether the mean ratio is significantly below 1 by much of the mean gap, and no single
        token by much.
        """
        lean = (1 - self.ratio.value) / self.gap if self.gap else 0.0
        return lean > _ONE_SIDED and -self.ratio.z_from(1.0) > _Z and self.steep < _STEEP

    @property
    def power(self) -> str:
        """The kept mass that would have been found."""
        cut = max(_ONE_SIDED * self.gap, _Z * self.ratio.error)
        if not cut < 1:
            return no_power("too few prompts to know the error of the mean ratio")
        return f"a kept mass of ≤ {1 - cut:.4g}"

    @property
    def is_no_distribution(self) -> bool:
        """Whether the mean ratio is significantly above 1 by much of the mean gap: no distribution
        has that on tokens that were drawn from the other one.
        """
        lean = (self.ratio.value - 1) / self.gap if self.gap else 0.0
        return lean > _ONE_SIDED and self.ratio.z_from(1.0) > _Z


def _without_lean(d_N: np.ndarray) -> np.ndarray:
    """The gap without its lean below 0: noise is symmetric, so gaps below 0 are scaled to match
    those above.
    """
    above, below = np.maximum(d_N, 0).sum(), np.maximum(-d_N, 0).sum()
    scale = above / below if below else 1.0
    return np.where(d_N < 0, d_N * scale, d_N)


def _kept_mass(sample: Sample) -> tuple[Row, ...]:
    """The kept mass by the trainer's probabilities, where the engine's top-K ends in −inf and so
    covers the support.
    """
    if sample.topk_logq_TK is None or sample.topk_logp_TK is None:
        return ()
    q_NK, p_NK = sample.topk_logq_TK[sample.index_N], sample.topk_logp_TK[sample.index_N]
    ends_N = np.isneginf(q_NK).any(axis=1)
    label = "tokens whose recorded ranks leave the support"
    if not ends_N.any():
        return ((label, 0),)
    mass_N = np.where(np.isfinite(q_NK), np.exp(p_NK.astype(np.float64)), 0).sum(axis=1)
    kept_mass = float(mass_N[ends_N].mean())
    return ((label, int(ends_N.sum())), ("kept mass there, by the trainer", kept_mass))


def trainer_truncates(evidence: Evidence) -> bool:
    """Whether the manifest says that the distribution is truncated, or the trainer makes sampled
    tokens that it does not call impossible more probable than the engine does, as a distribution
    over a part of the vocabulary is.
    """
    if any(evidence.sampling.get(name) not in off for name, off in _OFF.items()):
        return True
    return bool(evidence.counts.out_of_support) and _is_one_sided(evidence.sample.d_N)


def _is_one_sided(d_N: np.ndarray) -> bool:
    """Whether the trainer's probabilities are higher by much of the gap, or there is none."""
    total = float(np.abs(d_N).sum())
    return not total or float(d_N.sum() / total) > _ONE_SIDED


def _trainer_finding(d_N: np.ndarray, outside: int) -> Finding:
    """Found: the trainer gives so many sampled tokens probability 0."""
    rows = (
        ("sampled tokens with π = 0", outside),
        ("mean Δlog p of the others, nats", float(d_N.mean())),
    )
    sentence = (
        f"{outside:,} sampled tokens have probability 0 in the trainer: it truncates, and the "
        "engine does not."
    )
    kept_mass = float(np.exp(-d_N.mean()))
    left_N = -_without_lean(-d_N)
    return Finding(NAME, "found", kept_mass, "kept mass", sentence, rows, left_N=left_N)
