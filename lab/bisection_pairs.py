"""Two causes planted at once: their shares by `bisect`, compared with those measured on many more
prompts.

The share of a cause is measured on all 512 problems, by hand: the engine under the other setting
decodes the same tokens again, or the trainer under the other setting scores them again. `bisect`
sees 32 of the problems, with other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import (
    EngineSettings,
    ForcedResponse,
    ReplayingEngine,
    create_engine,
)
from mismatch_cli.trace.reader import Trace
from tests.bisect.planted import (
    BFLOAT16,
    BUNDLED,
    FLOAT32,
    FP8,
    HEAD,
    SCALED,
    Bed,
    Planted,
    Typed,
    head_of_engine,
)
from tests.changed_models import scaled

SEEDS = 4
_SMALL = "--num-prompts 32 --samples-per-prompt 2 --max-tokens 48 --top-logprobs 0"
_LARGE = (
    "--num-prompts 512 --samples-per-prompt 1 --max-tokens 48 --top-logprobs 0 --shuffle --seed 100"
)
_MILD = 0.999  # a temperature whose gap is about that of the tensor
Undone = Callable[[Bed, Path], np.ndarray]  # |Δlog p| of all tokens, one of the causes undone


@dataclass(frozen=True)
class Two:
    """Both causes at once, and each undone, keyed by the setting and the side on which `bisect`
    may undo it.
    """

    name: str
    make: Callable[[Bed], Planted]
    undone: Mapping[tuple[str, str], Undone] = field(default_factory=dict)


def pairs_rows(folder: Path, typed: Typed, bisected: Any) -> Iterator[str]:
    yield (
        "| two at once | cause | undone on | share on 512 prompts | shares of `bisect`, 32 "
        "prompts each | within |"
    )
    yield "|---|---|---|---|---|---|"
    inside = intervals = 0
    for two in PAIRS:
        large = Bed(folder, BUNDLED, typed, _LARGE, "pairs-large")
        run = two.make(large).run
        searches = []
        for seed in range(SEEDS):
            bed = Bed(folder, BUNDLED, typed, f"{_SMALL} --shuffle --seed {seed}", f"pairs-{seed}")
            searches.append(bisected.of(two.make(bed)).summary)
        for (setting, side), undo in two.undone.items():
            # The share of the gap that is gone once the cause is undone
            truth = 1 - undo(large, run).sum() / np.abs(_gaps(run)).sum()
            hits, shown = 0, []
            for summary in searches:
                share = _share_of(summary, setting, side)
                if share is not None and share["low"] is not None:
                    hits += share["low"] <= truth <= share["high"]
                    interval = f"{100 * share['low']:.0f} to {100 * share['high']:.0f}"
                    shown.append(f"{100 * share['value']:.0f} ({interval})")
            inside += hits
            intervals += len(shown)
            yield (
                f"| {two.name} | `{setting}` | {side} | {100 * truth:.1f} % | {', '.join(shown)} "
                f"| {hits} of {len(shown)} |"
            )
    yield f"\n{inside} of {intervals} intervals hold the share."


def _share_of(summary: Mapping[str, Any], setting: str, side: str) -> dict[str, Any] | None:
    """The share of a setting on a side, whether it was named as a cause or only tested."""
    for row in (*summary["causes"], *summary["tested"]):
        if row["setting"] == setting and row["side"] == side:
            share: dict[str, Any] = row["share"]
            return share
    return None


def _gaps(run: Path) -> np.ndarray:
    """Δlog p of all tokens."""
    return np.concatenate(
        [batch.logp_trainer_T - batch.logp_rollout_T for batch in Trace.open(run).batches()]
    )


def _decoded(dtype: str, **arguments: Any) -> Undone:
    """The engine under other settings decodes the same tokens; the trainer's numbers are kept."""

    def undone(bed: Bed, run: Path) -> np.ndarray:
        trace, gaps = Trace.open(run), []
        settings = EngineSettings(
            bed.model, SamplingSettings(), 0, dtype, extra=arguments, replays=True
        )
        with closing(create_engine("vllm", settings)) as engine:
            for table in trace.tables(["prompt_ids", "response_ids", "logp_trainer"]):
                columns = table.to_pydict()
                forced = list(map(ForcedResponse, columns["prompt_ids"], columns["response_ids"]))
                rollouts = cast(ReplayingEngine, engine).replay(forced, lambda _: None)
                logp_T = np.concatenate([rollout.logp_rollout_T for rollout in rollouts])
                gaps.append(np.concatenate(columns["logp_trainer"]) - logp_T)
        return np.abs(np.concatenate(gaps))

    return undone


def _rescored(
    name: str, *flags: str, dtype: str = FLOAT32, model: Callable[[Bed], str] | None = None
) -> Undone:
    """The trainer under other settings scores the same tokens."""

    def undone(bed: Bed, run: Path) -> np.ndarray:
        scorer = None if model is None else model(bed)
        return np.abs(_gaps(bed.rescored(name, run, *flags, dtype=dtype, model=scorer)))

    return undone


def _cache_and_head(bed: Bed) -> Planted:
    """An 8-bit cache, and a float32 head only in the trainer."""
    return Planted(bed.probed("cache-and-head", *FP8, HEAD, dtype=BFLOAT16))


def _cache_and_low_head(bed: Bed) -> Planted:
    """An 8-bit cache and a bfloat16 head in the engine, and everything else in float32."""
    return Planted(bed.probed("cache-and-low-head", *FP8, *head_of_engine(BFLOAT16)))


def _mild_temperature_and_tensor(bed: Bed) -> Planted:
    sampled = bed.probed("mild-sampled", "--temperature", f"{_MILD:g}")
    return Planted(
        bed.rescored("mild-and-scaled", sampled, "--temperature", "1", model=_other_tensor(bed))
    )


def _other_tensor(bed: Bed) -> str:
    return bed.copy("scaled", tensors=scaled(SCALED, 1.01))


_LOW_HEAD, _FULL_HEAD = {"head_dtype": BFLOAT16}, {"head_dtype": FLOAT32}
PAIRS = (
    Two(
        "fp8 KV cache, float32 head in the trainer",
        _cache_and_head,
        {
            ("kv_cache_dtype", "rollout"): _decoded(BFLOAT16),
            ("head_dtype", "rollout"): _decoded(
                BFLOAT16, kv_cache_dtype="fp8", hf_overrides=_FULL_HEAD
            ),
            ("head_dtype", "trainer"): _rescored("without-head", dtype=BFLOAT16),
        },
    ),
    Two(
        "fp8 KV cache, bfloat16 head in the engine",
        _cache_and_low_head,
        {
            ("kv_cache_dtype", "rollout"): _decoded(FLOAT32, hf_overrides=_LOW_HEAD),
            ("head_dtype", "rollout"): _decoded(FLOAT32, kv_cache_dtype="fp8"),
        },
    ),
    Two(
        f"temperature {_MILD:g}, one tensor × 1.01",
        _mild_temperature_and_tensor,
        {
            ("temperature", "trainer"): _rescored(
                "with-temperature", "--temperature", f"{_MILD:g}", model=_other_tensor
            ),
            (SCALED, "trainer"): _rescored("with-tensor", "--temperature", "1"),
        },
    ),
)
