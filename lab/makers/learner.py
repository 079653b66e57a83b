"""The trainer of the miniature training run: it scores in bfloat16 and learns by plain policy
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.scoring.layout import pad_right
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.trace.columns import REQUIRED
from mismatch_cli.trace.reader import open_shard, table_to_batch

MINIBATCHES = 8  # updates per step, each on other responses
LEARNING_RATE = 2e-4


class Learner:
    """The weights that score, and their float32 masters: an update is often too small for
    bfloat16.
    """

    def __init__(self, config: ProbeConfig) -> None:
        self.trainer = Trainer.load(
            config.scoring_model, sampling=config.sampling, dtype=config.scorer.dtype
        )
        self.version = 0  # optimiser steps so far
        self._master = load_causal_lm(config.scoring_model, "float32")
        self._optimizer = torch.optim.AdamW(
            self._master.parameters(), lr=LEARNING_RATE, weight_decay=0.0
        )

    def describe(self) -> dict[str, Any]:
        """How it learns, for the manifest."""
        return {
            "loss": "policy gradient, weight π/μ, no trust region",
            "optimizer": "AdamW",
            "learning_rate": LEARNING_RATE,
            "updates_per_step": MINIBATCHES,
            "master_dtype": str(self._master.dtype).removeprefix("torch."),
        }

    def learn(self, shard: Path) -> None:
        """One update per minibatch: policy gradient with the weight r = π/μ, without a trust
        region.
        """
        table = open_shard(shard).read(columns=[*REQUIRED, "advantage"])
        for minibatch in range(MINIBATCHES):
            chosen = np.flatnonzero(minibatches(table.num_rows) == minibatch)
            self._update(table.take(chosen))
        with torch.no_grad():
            for scoring, master in zip(
                self.trainer.model.parameters(), self._master.parameters(), strict=True
            ):
                scoring.copy_(master)

    def _update(self, table: pa.Table) -> None:
        batch = table_to_batch(table.combine_chunks())
        assert batch.advantage_T is not None  # the bundled problems have answers
        ids = zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True)
        logp_T = policy_logp(
            self._master, [ScoreRequest(prompt, response) for prompt, response in ids]
        )
        ratio_T = (logp_T - torch.tensor(batch.logp_rollout_T)).exp()
        loss = -(ratio_T * torch.tensor(batch.advantage_T)).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.version += 1


def minibatches(rows: int) -> np.ndarray:
    """The minibatch of each response of a step: all prompts in every minibatch."""
    return np.arange(rows) % MINIBATCHES


def policy_logp(model: Any, requests: Sequence[ScoreRequest]) -> torch.Tensor:
    """log π of the response tokens, laid flat, with a gradient."""
    ids_BL, mask_BL = pad_right(requests, model.device)
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
    rows = [z[len(r.prompt_ids) - 1 : r.num_fed] for z, r in zip(logits_BLV, requests, strict=True)]
    target_ids_T = torch.tensor([token for r in requests for token in r.response_ids])
    return torch.cat(rows).log_softmax(-1).gather(1, target_ids_T[:, None])[:, 0]
