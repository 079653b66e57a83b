"""What can be wrong with the settings of a run, told before a model is loaded, a run begins or a file is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mismatch_cli import registry
from mismatch_cli.algorithms.parse import find
from mismatch_cli.engines import engine_module
from mismatch_cli.errors import UsageError
from mismatch_cli.models import check_model_folder
from mismatch_cli.rl.config import TrainConfig
from mismatch_cli.rl.learner import AGGREGATIONS
from mismatch_cli.rl.task import check_task
from mismatch_cli.sampling import SamplingSettings


def check_runs(configs: Sequence[TrainConfig]) -> None:
    """Every run's names, thresholds and files; a `MismatchError` or `UsageError` for the first that does not do.

    What only the hub knows (a model or a data set by its name there) is found when the first run loads it.
    """
    for spec in dict.fromkeys(config.algorithm for config in configs):
        _check_top_k(spec, configs[0].model)
    first = configs[0]  # runs of one command differ in algorithm and seed
    if first.aggregation not in AGGREGATIONS:
        raise UsageError(registry.unknown("aggregation", first.aggregation, AGGREGATIONS))
    if not engine_module(first.engine).TAKES_WEIGHTS:
        raise UsageError(
            "Training sends new weights to the engine after every step, and a server behind a URL takes none from "
            "here. Use --engine vllm or --engine hf."
        )
    SamplingSettings(temperature=first.temperature, max_tokens=first.max_tokens)
    check_model_folder(first.model)
    check_task(first)


def _check_top_k(spec: str, model: str) -> None:
    """The algorithm, and that its top K are no more than the tokens there are, as far as the model is at hand."""
    k = find(spec).needs_top_k
    try:
        tokens = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return
    if isinstance(tokens, int) and k > tokens:
        raise UsageError(f"{spec} needs the top {k:,} log-probs, and {model} has {tokens:,} tokens. Choose a lower k.")
