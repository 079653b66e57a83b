"""What `diagnose` says of every planted fault: all findings, their figures and their words.

Variants of the trainer are made from the trace's numbers, since a model rounds differently on
another processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache

import numpy as np

from lab.pool import Pool, Scores
from mismatch_cli.diagnosis.diagnose import Findings
from mismatch_cli.diagnosis.evidence import Finding
from tests.diagnosis.conftest import healthy, judged, sampled_alone
from tests.diagnosis.planted import SEVERITY, broken
from tests.golden import readable

# From vLLM in float32, in bfloat16 with a KV cache in fp8, and with only the sampled tokens' numbers
POOLS = ("float32", "fp8-kv", "dump")
NAMES = [f"planted/{pool}/{fault}" for pool in POOLS for fault in SEVERITY]
# What undoing it leaves of each token is in `explains`, and who is in `part` is in `where`
_NOT_SHOWN = ("check", "part", "left_N")


def planted_outputs(only: str) -> dict[str, str]:
    return {name: what_is_said(name) for name in NAMES if only in name}


def what_is_said(name: str) -> str:
    _, pool, fault = name.split("/")
    copy = broken(_pool("fp8-kv" if pool == "dump" else pool), fault)
    return words(judged(sampled_alone(copy) if pool == "dump" else copy))


def words(diagnosis: Findings) -> str:
    """A line for each field that a finding fills in, and the gap that is left."""
    lines = [f"unexplained: {diagnosis.unexplained.nats:.4g} nats"]
    lines += [f"suspect: {suspect.check}" for suspect in diagnosis.suspects]
    for finding in diagnosis.findings:
        lines += _words(finding)
    return readable.as_text(lines)


def _words(finding: Finding) -> Iterator[str]:
    for field in fields(finding):
        value = getattr(finding, field.name)
        title = f"{finding.check} {field.name}"
        if field.name == "evidence" and value:
            yield from readable.flat(dict(value), title)
        # False is the default of what is true or false
        elif field.name not in _NOT_SHOWN and value not in (None, "", (), False):
            yield from readable.flat(value, title)


@cache
def _pool(name: str) -> Pool:
    pool = healthy(name)[1]
    place_T = np.arange(len(pool.response_T)) - pool.offset_S1[pool.response_T]
    # At inverse temperature 1.05, a distribution of the top K is normalised by this
    norm_T = np.log(np.exp(1.05 * pool.ranks["topk_logp_trainer"]).sum(axis=1))
    changes: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "temperature1.05": lambda logp_T, _: 1.05 * logp_T - norm_T,
        "weights0.1": lambda logp_T, noise_T: logp_T + 0.3 * noise_T,
        "rope4": lambda logp_T, noise_T: logp_T + 0.01 * place_T * noise_T,
        "retokenised": lambda logp_T, noise_T: logp_T + 2 * (place_T > 10) * noise_T,
        "penalised1.1": lambda logp_T, _: logp_T - 0.2 * (place_T % 3 == 1),
    }
    pool.variants = {variant: _changed(pool, change) for variant, change in changes.items()}
    return pool


def _changed(pool: Pool, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Scores:
    """The trainer's numbers, changed by noise that is as small as a token is certain."""
    rng = np.random.default_rng(0)

    def changed(logp_T: np.ndarray) -> np.ndarray:
        noise_T = rng.standard_normal(len(logp_T)) * -np.expm1(logp_T)
        return np.minimum(change(logp_T, noise_T), 0).astype(np.float32)

    sampled_T = changed(pool.tokens["logp_trainer"])
    topk_TK = np.stack([changed(logp_T) for logp_T in pool.ranks["topk_logp_trainer"].T], axis=1)
    is_sampled_TK = pool.ranks["topk_ids"] == pool.tokens["response_ids"][:, None]
    topk_TK = np.where(is_sampled_TK, sampled_T[:, None], topk_TK)
    return Scores(sampled_T, pool.tokens["entropy_trainer"], topk_TK)
