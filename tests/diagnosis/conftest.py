"""The bundled traces as pools of healthy responses, with variants scored by the real model under
faults.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lab.pool import Pool, gather_tables
from lab.variants import add_variants
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.diagnose import Diagnosis, diagnose
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import Trace

VARIANTS = ("temperature1.05", "weights0.1", "rope4", "retokenised", "penalised1.1", "linear4")
MODEL = str(bundled("model"))


def at_equal_weights(trace: Trace) -> pa.Table:
    """The trace as if nothing had been learned in between: the trainer's log π is at the
    sampling weights.
    """
    table = pa.concat_tables(trace.tables())
    if "logp_recomputed" not in table.column_names:
        return table
    for name in ("logp", "topk_logp"):
        recomputed = table.column(f"{name}_recomputed")
        table = table.drop_columns([f"{name}_recomputed", f"{name}_trainer"]).append_column(
            f"{name}_trainer", recomputed
        )
    return table.set_column(
        table.column_names.index("version_trainer"),
        "version_trainer",
        table.column("version_rollout"),
    )


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pool]:
    """From vLLM in float32, and in bfloat16 with a KV cache in fp8."""
    found = {}
    for name in ("float32", "fp8-kv"):
        trace = Trace.open(bundled("traces") / name)
        manifest = trace.manifest | {"trainer": trace.manifest["trainer"] | {"model": MODEL}}
        # The bundled trace names the model by its path in a checkout
        trace.__dict__["manifest"] = manifest
        found[name] = Pool.of(at_equal_weights(trace))
        found[name].about = {side: dict(manifest[side]) for side in ("rollout", "trainer")}
        add_variants(found[name], trace, Path(tmp_path_factory.mktemp(name)), VARIANTS)
    return found


@pytest.fixture(scope="session")
def bf16_pool() -> Pool:
    """From vLLM in bfloat16, scored in bfloat16."""
    trace = Trace.open(bundled("traces") / "bfloat16")
    pool = Pool.of(at_equal_weights(trace))
    pool.about = {side: dict(trace.manifest[side]) for side in ("rollout", "trainer")}
    return pool


def whole(pool: Pool) -> Pool:
    """A full copy, into which a fault can be planted."""
    return pool.take(np.arange(pool.num_responses))


def sampled_alone(pool: Pool) -> Pool:
    """As an imported dump: only the log-probabilities of the sampled tokens."""
    pool.ranks.clear()
    pool.tokens.pop("entropy_trainer", None)
    return pool


def finding_of(diagnosis: Diagnosis, check: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.check == check)


def judged(pool: Pool, pieces: int = 1, about: dict | None = None) -> Diagnosis:
    table = pool.table()
    bounds = np.linspace(0, len(table), pieces + 1).astype(int)
    tables = [table.slice(a, b - a).combine_chunks() for a, b in itertools.pairwise(bounds)]
    return diagnose(
        gather_tables(tables, PAIRS["mismatch"], {"temperature": 1.0}, about or pool.about)
    )
