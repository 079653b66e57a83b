"""Whether the engine sampled with its adapter: its own tokens, scored with the adapter and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.adapters import read_adapter, same_adapter
from mismatch_cli.errors import MismatchError
from mismatch_cli.recording.config import ProbeConfig
from mismatch_cli.recording.rollouts import Progress
from mismatch_cli.recording.score import evenly_spaced, load_trainer, requests_of
from mismatch_cli.scoring.batches import ScoreRequest
from mismatch_cli.scoring.fit import compare_fit
from mismatch_cli.scoring.trainer import Trainer
from mismatch_cli.trace.columns import table_to_batch
from mismatch_cli.trace.reader import open_shard

_RESPONSES = 32  # of the first shard


def equal_weights(config: ProbeConfig) -> bool:
    """Whether trainer and engine have the same weights: the same model, and adapters that change it alike, or none."""
    return config.trainer.model == config.model and same_adapter(config.adapter, config.trainer.adapter)


def check_unchanged(config: ProbeConfig, manifest: dict[str, Any]) -> None:
    """A `MismatchError` for an adapter that cannot be read, or is not what it was when the run began."""
    for side, name in (("rollout", config.adapter), ("trainer", config.trainer.adapter)):
        if name is not None:
            now = read_adapter(name).digest
            if manifest.get(side, {}).get("adapter_digest", now) != now:
                raise MismatchError(
                    f"The adapter {name} has changed since this run began, so it cannot be resumed. "
                    "Start anew in another --output, or with --force."
                )


class AdapterCheck:
    """Made before the trainer with the adapter loads, so that two models are never held at once."""

    def __init__(self, config: ProbeConfig, shard: Path, progress: Progress) -> None:
        self._config, self._progress = config, progress
        table = open_shard(shard).read()
        chosen = evenly_spaced(_RESPONSES, len(table))
        rows = [row for row in range(len(table)) if chosen(row)]
        batch = table_to_batch(table.combine_chunks())
        offset_S1 = batch.offset_S1.tolist()
        assert batch.logp_rollout_T is not None
        self._logp_rollout = [batch.logp_rollout_T[offset_S1[r] : offset_S1[r + 1]].numpy() for r in rows]
        requests = requests_of(table)
        self._requests = [ScoreRequest(requests[r].prompt_ids, requests[r].response_ids) for r in rows]
        self._without = self._logp(load_trainer(config.model, config.trainer, config.sampling, progress))

    def done(self, trainer: Trainer) -> dict[str, Any]:
        """What was found, for the manifest; a `MismatchError` where the engine's log μ is that of the model alone."""
        config = self._config
        fit = compare_fit(self._logp_rollout, self._logp(trainer), self._without)
        if fit.second_fits:
            raise MismatchError(
                f"The engine did not apply the adapter {config.adapter}: over {len(self._requests)} of its own "
                f"responses mean |π − μ| is {fit.first:.2g} with the adapter and {fit.second:.2g} without. Nothing was "
                "scored; look into log/ in the run folder, or probe the model without an adapter on the engine."
            )
        if not fit.first_fits:
            self._progress.say(
                f"Whether the engine applied the adapter {config.adapter} cannot be told: mean |π − μ| is "
                f"{fit.first:.2g} with it and {fit.second:.2g} without, too near to each other."
            )
        return {
            "responses": len(self._requests),
            "abs_dp_with": fit.first,
            "abs_dp_without": fit.second,
            "applied": True if fit.first_fits else None,
        }

    def _logp(self, trainer: Trainer) -> list[np.ndarray]:
        scores = trainer.score(self._requests, token_budget=self._config.trainer.token_budget)
        return [score.logp_T for score in scores]
