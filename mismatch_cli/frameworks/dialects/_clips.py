"""What the losses of TRL's GRPOTrainer clip, which ms-swift's trainer logs under the same names."""

from __future__ import annotations

from mismatch_cli.frameworks.dialects._metric import (
    BLOCKED,
    FALLS,
    RISES,
    UPDATE,
    FrameworkMetric,
    Quantity,
    Reduce,
    blocked,
    mean,
    ratio_above,
    ratio_below,
    where_advantage,
)

LOW = where_advantage(ratio_below(0.8), -1)
HIGH = where_advantage(ratio_above(1.2), 1)


def clip_line(
    name: str, formula: str, source: str, measured: Quantity, reduce: Reduce = mean
) -> FrameworkMetric:
    """A `clip_ratio/*` with the default epsilons."""
    return FrameworkMetric(
        f"clip_ratio/{name}",
        UPDATE,
        formula,
        source,
        measured,
        reduce,
        note="epsilon and epsilon_high 0.2",
        needs=("advantage_T",),
    )


def clip_means(source: str) -> tuple[FrameworkMetric, FrameworkMetric, FrameworkMetric]:
    """The shares of tokens that are clipped below, above, and on either side."""
    return (
        clip_line("low_mean", f"share with {FALLS}", source, LOW),
        clip_line("high_mean", f"share with {RISES}", source, HIGH),
        clip_line("region_mean", f"share {BLOCKED}", source, blocked("ppo")),
    )


def cispo_line(source: str, note: str) -> FrameworkMetric:
    """The share of tokens whose weight CISPO caps, at epsilon_high 5."""
    return FrameworkMetric(
        "cispo_clip_ratio",
        UPDATE,
        "share with A > 0 and r > 5",
        source,
        where_advantage(ratio_above(5.0), 1),
        note=note,
        needs=("advantage_T",),
    )
