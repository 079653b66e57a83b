"""Results of `clipstats` on random traces, as `--json` prints them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mismatch_cli.base.json_form import from_json
from mismatch_cli.report.outline import Excerpt, Outline
from mismatch_cli.report.pages.clipping import page_of_result
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.clipping_result import ClippingResult
from tests.metrics.clipping.world import world
from tests.studies.written import write_trace

HOSTILE = "<script>alert(1)</script> [red]x[/red] $\\frac{1}{2}$ \x1b[2J \u202eevil \x00"
NAMES = (
    "pg-is", "pg-tis", "grpo-clip-higher", "minirl", "dppo-binary-tv", "dppo-binary-tv-recompute",
    "dppo-topk-tv",
    "mask-0.5", "relax-both", "ppo-icepop", "gspo", "ipo",
)  # fmt: skip
TOP_K = ("topk_ids", *(f"topk_logp_{side}" for side in ("rollout", "trainer", "recomputed")))


def sample_result(names: Sequence[str] = NAMES, **made: Any) -> dict[str, Any]:
    """A result of these algorithms, with a hostile token; more arguments as of `_printed`."""
    result: dict[str, Any] = json.loads(_printed(tuple(names), **made))
    for row in result["algorithms"]:
        for tokens in row["blocked_tokens"].values():
            tokens[-1:] = [token | {"text": HOSTILE} for token in tokens[-1:]]
    return result


@cache
def _printed(
    names: tuple[str, ...],
    *,
    advantages: bool = True,
    steps: int = 8,
    theory: bool = True,
    gap: bool = True,
    **written: Any,
) -> str:
    """`gap`: whether trainer and rollout differ; `written` as in `write_trace`."""
    batch = world(0, 90, steps=steps)
    if not gap:
        logp_T = batch.logp_rollout_T
        batch = replace(batch, logp_trainer_T=logp_T, logp_recomputed_T=logp_T)
    if not advantages:
        batch = replace(batch, advantage_T=None, reward_S=None)
    with tempfile.TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "run one" / "trace", batch, **written)
        algorithms = [TABLE[name] for name in names]
        arguments = ["--theory"] if theory else []
        study = analyse_clipping([trace], algorithms, theory=theory, arguments=arguments)
        return json.dumps(study.to_json())


def equal_weights_result() -> dict[str, Any]:
    """A trace whose trainer has the rollout's weights, without the top K."""
    names = ("grpo-clip-higher", "dppo-binary-tv", "minirl", "ppo", "dppo-topk-tv")
    return sample_result(names, steps=1, theory=False, equal_weights=True, without=TOP_K)


def nothing_judged() -> dict[str, Any]:
    """A result without any algorithm."""
    result = sample_result(("ipo",), steps=1, theory=False)
    lists = ("algorithms", "compared", "same_mask", "same_strictness", "equivalents")
    overlap = dict.fromkeys(result["overlap"], ())
    return result | dict.fromkeys(lists, ()) | {"overlap": overlap}


def page_of(result: dict[str, Any], examples: Sequence[Excerpt] = ()) -> Outline:
    """The page of a result in JSON."""
    return page_of_result(from_json(ClippingResult, result), examples)
