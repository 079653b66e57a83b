"""From traces to a diagnosis, and from it to JSON and to what the figures draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mismatch_cli.diagnosis.alignment import lag_scan
from mismatch_cli.diagnosis.evidence import Evidence, gather
from mismatch_cli.diagnosis.grouped import Mean, mean_over_prompts
from mismatch_cli.diagnosis.run import Diagnosis, diagnose, module
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.report.analysis import about, check_poolable, who_is_compared
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.scoring.batches import ScoreRequest
from mismatch_cli.trace.reader import Trace

FORMAT, VERSION = "mismatch-cli diagnosis", 1
_EARLIER_RESPONSES = 128  # scored with the earlier checkpoint
_TOKEN_BUDGET = 8192
_BINS = 16


@dataclass(frozen=True)
class DiagnosisAnalysis:
    """A diagnosis with the traces it is of; what the figures draw."""

    PLOTS: ClassVar[str] = "mismatch_cli.report.diagnosis.plots"

    traces: Sequence[Trace]
    diagnosis: Diagnosis
    earlier_model: str | None = None

    @property
    def sample(self) -> Sample:
        return self.diagnosis.evidence.sample

    @property
    def subject(self) -> str:
        who = who_is_compared(self.traces[0].manifest)
        return f"{who} · {len(self.sample.kept):,} tokens" if who else f"{len(self.sample.kept):,} tokens"

    @cached_property
    def gap(self) -> Mean:
        """Mean |d| over the sample, nats."""
        return mean_over_prompts(np.abs(self.sample.d_N), self.sample.group_N)

    @cached_property
    def lags(self) -> dict[int, float]:
        """The gap by lag, nats."""
        return lag_scan(self.sample, self.diagnosis.evidence.alignment)

    @cached_property
    def by_position(self) -> list[tuple[float, Mean]]:
        """The mean position and the mean normalised gap of each sixteenth of the tokens, in the order of positions."""
        position_N = self.sample.position_T[self.sample.kept]
        order = np.argsort(position_N, kind="stable")
        parts = [part for part in np.array_split(order, _BINS) if len(part)]
        return [(float(position_N[part].mean()), self._mean_u(part)) for part in parts]

    @cached_property
    def by_step(self) -> list[tuple[int, Mean]]:
        """Each step with its mean normalised gap."""
        step_N = self.sample.step_S[self.sample.response_T[self.sample.kept]]
        return [(int(step), self._mean_u(np.flatnonzero(step_N == step))) for step in np.unique(step_N)]

    def _mean_u(self, part: np.ndarray) -> Mean:
        return mean_over_prompts(self.sample.u_N[part], self.sample.group_N[part])


def analyse_diagnosis(
    traces: Sequence[Trace], earlier_model: str | None = None, on_responses: Callable[[int], None] = lambda _: None
) -> DiagnosisAnalysis:
    """Make every check on traces that are samples of one thing; that for stale weights needs an earlier checkpoint."""
    check_poolable(traces)
    evidence = gather(traces, on_responses)
    if earlier_model is not None:
        evidence = replace(evidence, earlier_logp_T=_score_earlier(evidence, traces, earlier_model))
    return DiagnosisAnalysis(traces, diagnose(evidence), earlier_model)


def _score_earlier(evidence: Evidence, traces: Sequence[Trace], model: str) -> np.ndarray:
    """log π of the earlier checkpoint on some responses of the sample; NaN for the others."""
    from mismatch_cli.scoring.trainer import Trainer

    sample = evidence.sample
    names = ("temperature", "top_p", "top_k", "min_p")
    sampling = SamplingSettings(**{name: evidence.sampling[name] for name in names if name in evidence.sampling})
    prompts = _prompts_of(sample, traces)
    chosen = np.unique(np.linspace(0, sample.num_responses - 1, _EARLIER_RESPONSES).astype(int))
    chosen = np.array([s for s in chosen if prompts.get(_key(sample, s))], dtype=int)
    spans = list(sample.spans())
    requests = [ScoreRequest(prompts[_key(sample, s)], sample.response_ids_T[spans[s]].tolist()) for s in chosen]
    dtype = traces[0].manifest.get("trainer", {}).get("dtype", "auto")
    scores = Trainer.load(model, dtype=dtype, sampling=sampling).score(requests, token_budget=_TOKEN_BUDGET)
    logp_T = np.full(len(sample.logq_T), np.nan)
    for s, score in zip(chosen, scores, strict=True):
        logp_T[spans[s]] = score.logp_T
    return logp_T


def _prompts_of(sample: Sample, traces: Sequence[Trace]) -> dict[tuple[int, int, int], list[int]]:
    """The prompt ids of the responses in the sample, by their row key."""
    wanted = {_key(sample, s) for s in range(sample.num_responses)}
    found = {}
    for trace in traces:
        for table in trace.tables(("step", "prompt_id", "sample_index", "prompt_ids")):
            keys = zip(*(table.column(n).to_pylist() for n in ("step", "prompt_id", "sample_index")), strict=True)
            for row, key in enumerate(keys):
                if key in wanted:
                    found[key] = table.column("prompt_ids")[row].as_py()
    return found


def _key(sample: Sample, s: int) -> tuple[int, int, int]:
    return int(sample.step_S[s]), int(sample.prompt_id_S[s]), int(sample.sample_index_S[s])


def diagnosis_json(analysis: DiagnosisAnalysis) -> dict[str, Any]:
    """What `--json` prints and `summary.json` holds; documented in docs/diagnose.md."""
    diagnosis, sample = analysis.diagnosis, analysis.sample
    return {
        "format": FORMAT,
        "version": VERSION,
        "traces": [str(trace.folder) for trace in analysis.traces],
        "about": about(analysis.traces, 0),
        "pair": diagnosis.evidence.pair.name,
        "responses": diagnosis.evidence.counts.responses,
        "sample": {"responses": sample.num_responses, "tokens": len(sample.kept)},
        "abs_d_mean": analysis.gap.value,
        "faults": [finding.check for finding in diagnosis.faults],
        "first_cause": diagnosis.found[0].check if diagnosis.found else None,
        "findings": [
            finding.to_dict() | {name.lower(): getattr(module(finding.check), name) for name in _WORDS}
            for finding in diagnosis.findings
        ],
    }


_WORDS = ("TITLE", "CAUSE", "CHANGE", "SOURCE")
