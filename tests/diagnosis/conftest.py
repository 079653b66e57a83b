"""The bundled traces as pools of healthy responses, with variants scored by the real model under
faults.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lab.pool import Pool, gather_tables
from lab.variants import add_variants, model_at_hand
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.diagnose import Findings, diagnose
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.model import Hypothesis, ModelAtHand
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.trace.reader import Trace

VARIANTS = ("temperature1.05", "weights0.1", "rope4", "retokenised", "penalised1.1", "linear4")
MODEL = str(bundled("model"))


def healthy(name: str) -> tuple[Trace, Pool]:
    """A bundled trace as if nothing had been learned in between: the trainer's log π is at the
    sampling weights.
    """
    trace = Trace.open(bundled("traces") / name)
    # The bundled trace names the model by its path in a checkout
    manifest = trace.manifest | {"trainer": trace.manifest["trainer"] | {"model": MODEL}}
    trace.__dict__["manifest"] = manifest
    table = pa.concat_tables(trace.tables())
    if "logp_recomputed" in table.column_names:
        table = table.drop_columns(["logp_trainer", "topk_logp_trainer", "version_trainer"])
        table = table.append_column("version_trainer", table["version_rollout"])
        equal = {"logp_recomputed": "logp_trainer", "topk_logp_recomputed": "topk_logp_trainer"}
        table = table.rename_columns([equal.get(name, name) for name in table.column_names])
    pool = Pool.of(table)
    pool.about = {side: dict(manifest[side]) for side in ("rollout", "trainer")}
    return trace, pool


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pool]:
    """From vLLM in float32, and in bfloat16 with a KV cache in fp8."""
    by_name = {}
    for name in ("float32", "fp8-kv"):
        trace, by_name[name] = healthy(name)
        add_variants(by_name[name], trace, Path(tmp_path_factory.mktemp(name)), VARIANTS)
    return by_name


@pytest.fixture(scope="session")
def bf16_pool() -> Pool:
    """From vLLM in bfloat16, scored in bfloat16."""
    return healthy("bfloat16")[1]


def whole(pool: Pool) -> Pool:
    """A full copy, into which a fault can be planted."""
    return pool.take(np.arange(pool.num_responses))


def sampled_alone(pool: Pool) -> Pool:
    """As an imported dump: only the log-probabilities of the sampled tokens."""
    pool.ranks.clear()
    pool.tokens.pop("entropy_trainer", None)
    return pool


def imported(pool: Pool, responses: np.ndarray, dtype: str) -> Pool:
    """Some responses as from a dump of two sides that have this dtype and the model."""
    # A dump has only the log-probabilities of the sampled tokens
    few = sampled_alone(pool.take(responses))
    few.about = {side: {"dtype": dtype, "model": MODEL} for side in ("rollout", "trainer")}
    return few


def finding_of(diagnosis: Findings, check: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.check == check)


def evidence_of(pool: Pool, about: dict | None = None, pieces: int = 1) -> Evidence:
    table = pool.table()
    bounds = np.linspace(0, len(table), pieces + 1).astype(int)
    tables = [table.slice(a, b - a).combine_chunks() for a, b in itertools.pairwise(bounds)]
    return gather_tables(tables, PAIRS["mismatch"], {"temperature": 1.0}, about or pool.about)


def judged(pool: Pool, about: dict | None = None, pieces: int = 1) -> Findings:
    return diagnose(evidence_of(pool, about, pieces))


def judged_with_earlier(pool: Pool, earlier_T: np.ndarray, about: dict | None = None) -> Findings:
    """With the log-probabilities of an earlier checkpoint."""
    earlier_T = earlier_T[pool.sample_order_T].astype(np.float64)
    return diagnose(replace(evidence_of(pool, about), earlier_logp_T=earlier_T))


def judged_with_model(pool: Pool, trainer: Trainer | None = None) -> Findings:
    evidence = evidence_of(pool)
    return diagnose(replace(evidence, model=model_of(pool, evidence, trainer)))


def model_of(pool: Pool, evidence: Evidence, trainer: Trainer | None = None) -> ModelAtHand:
    """The trainer's model, or another one."""
    if trainer is None:
        return model_at_hand(pool, evidence.sample)
    keys = zip(*(pool.rows[n].tolist() for n in ("step", "prompt_id", "sample_index")), strict=True)
    prompts = dict(zip(keys, map(list, pool.rows["prompt_ids"]), strict=True))
    return ModelAtHand(evidence.sample, prompts, lambda: trainer)


def scored(pool: Pool, hypothesis: Hypothesis, trainer: Trainer | None = None) -> np.ndarray:
    """The model's log-probabilities under a hypothesis, in the order of the pool."""
    model = model_of(pool, evidence_of(pool), trainer)
    model.budget = 10**9
    logp_T = np.empty(len(pool.response_T), dtype=np.float32)
    logp_T[pool.sample_order_T] = model.logp_T(hypothesis)
    return logp_T
