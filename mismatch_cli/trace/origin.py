"""Where traces come from: what a report says of their manifest, with types for what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.json_form import from_json, left_out_if_none
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.trace.manifest import remedy
from mismatch_cli.trace.recorder_notes import RECORD

if TYPE_CHECKING:
    from mismatch_cli.trace.reader import Trace


@dataclass(frozen=True)
class Side:
    """What sampled or scored, as far as the manifest says."""

    model: str | None = None
    engine: str | None = None
    name: str | None = None  # a recorded run's, for its trainer
    version: str | None = None
    transformers: str | None = None  # its version
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    head_dtype: str | None = None
    attn_implementation: str | None = None
    device: str | None = None
    adapter: str | None = None
    adapter_rank: int | None = None
    adapter_merged: bool | None = None
    max_model_len: int | None = None

    @property
    def program(self) -> str:
        """An engine, transformers, or a recorded run's name for its trainer; empty if unknown."""
        fallback = "transformers" if self.transformers else ""
        return self.engine or self.name or fallback

    @property
    def cache(self) -> str:
        """`with KV cache fp8`; empty if the cache has the dtype of the weights."""
        if self.kv_cache_dtype in (self.dtype, None, "auto"):
            return ""
        return f"with KV cache {self.kv_cache_dtype}"


@dataclass(frozen=True)
class Sampling:
    """How responses were sampled; an import may lack any of it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class SkippedPrompt:
    """A prompt without responses."""

    prompt_id: int
    reason: str


@dataclass(frozen=True)
class PromptFacts:
    """Where the prompts are from."""

    count: int
    source: str
    template: str
    skipped: Sequence[SkippedPrompt] = ()


@dataclass(frozen=True)
class Imported:
    """The dump of another framework, or the record of a run, that a trace was made from."""

    title: str
    file_count: int
    left_out: Mapping[str, int]  # rows by reason
    left_out_first: Mapping[str, str]  # where each reason was met first
    noted: Mapping[str, int]  # rows by peculiarity
    format: str | None = None
    holds: str | None = None  # what its π is; `rescore` replaces that
    rows_with_trainer: int = 0
    rows_with_newer_trainer: int = 0
    rows_with_unknown_finish: int = 0
    rows: int = 0
    tokens: int = 0
    steps: int = 0
    shift: str = ""  # which logits a token's log-probability is from, in words
    padding: str = ""  # how the dump marks it, in words

    @property
    def is_recorded(self) -> bool:
        """Whether a recorder inside a run wrote the trace."""
        return self.format == RECORD


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """What a partial trace lacks that its manifest promises, and how to complete it."""

    trace: str
    shards: int
    recorded_shards: int | None
    missing_shards: Sequence[str]
    short_shards: Sequence[str]
    broken_shards: Mapping[str, str]
    responses: int
    recorded_responses: int | None
    unscored_responses: int
    reasons: Sequence[str]
    remedy: str


@dataclass(frozen=True, kw_only=True)
class About:
    """The sections of a manifest that a report shows, absolute paths shortened, and what is
    missing.

    The mappings are as in the manifest; the properties read them.
    """

    imported: Mapping[str, Any] | None = left_out_if_none()
    rollout: Mapping[str, Any] | None = left_out_if_none()
    trainer: Mapping[str, Any] | None = left_out_if_none()
    recomputed: Mapping[str, Any] | None = left_out_if_none()
    equal_weights: bool | None = left_out_if_none()
    prompts: Mapping[str, Any] | None = left_out_if_none()
    config: Mapping[str, Any] | None = left_out_if_none()
    libraries: Mapping[str, str] | None = left_out_if_none()
    threads: int | None = left_out_if_none()
    top_logprobs: int | None = left_out_if_none()
    unscored_responses: int = 0
    responses: int = 0
    grading_timeouts: int = 0
    unstated: int = 0  # responses without an answer
    partial: Sequence[Shortfall] = ()

    @classmethod
    def of(cls, traces: Sequence[Trace], unscored_responses: int = 0) -> About:
        """What a report says of traces that share a manifest but for seeds."""
        manifest = traces[0].manifest
        return cls(
            **{name: shorten_paths(manifest[name]) for name in _OF_MANIFEST if name in manifest},
            unscored_responses=unscored_responses,
            responses=sum(trace.num_responses for trace in traces),
            grading_timeouts=sum(trace.count("grading_timeouts") for trace in traces),
            unstated=sum(trace.count("unstated") for trace in traces),
            partial=shortfalls(traces),
        )

    @property
    def manifest(self) -> dict[str, Any]:
        """What it has of the manifest, by the manifest's keys."""
        sections = {}
        for name in _OF_MANIFEST:
            section = getattr(self, name)
            if section is not None:
                sections[name] = section
        return sections

    @property
    def engine_side(self) -> Side | None:
        return side_of(self.rollout)

    @property
    def trainer_side(self) -> Side | None:
        return side_of(self.trainer)

    @property
    def recomputed_side(self) -> Side | None:
        """The trainer at the weights that sampled."""
        return side_of(self.recomputed)

    @property
    def sampling_settings(self) -> Mapping[str, Any]:
        """All that the manifest says of how responses were sampled."""
        settings: Mapping[str, Any] = (self.config or {}).get("sampling") or {}
        return settings

    @cached_property
    def sampling(self) -> Sampling:
        return from_json(Sampling, self.sampling_settings)

    @cached_property
    def source(self) -> Imported | None:
        """The dump or record; None for a trace that was made here."""
        if not self.imported:
            return None
        return from_json(Imported, self.imported)

    @cached_property
    def prompt_facts(self) -> PromptFacts | None:
        if not self.prompts:
            return None
        return from_json(PromptFacts, self.prompts)


# The fields from the manifest are those that JSON leaves out if they are None.
_OF_MANIFEST = tuple(each.name for each in fields(About) if each.metadata)


def side_of(settings: Mapping[str, Any] | None) -> Side | None:
    """What a manifest's section about a side says; None without any."""
    if not settings:
        return None
    return from_json(Side, settings)


def shortfalls(traces: Sequence[Trace]) -> tuple[Shortfall, ...]:
    """What each partial trace lacks, and how to complete it."""
    lacking = []
    for trace in traces:
        completeness = trace.completeness
        if completeness.partial:
            only_unscored = completeness.unscored > 0 and len(completeness.reasons) == 1
            advice = remedy(trace.folder, trace.manifest, unscored=only_unscored)
            content = {"trace": str(trace.folder), **completeness.to_json(), "remedy": advice}
            lacking.append(from_json(Shortfall, shorten_paths(content)))
    return tuple(lacking)
