"""The base of every study, and what each says about its traces: what is compared, imported, and
missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.numbers import counted, things
from mismatch_cli.base.places import is_bundled, shown
from mismatch_cli.trace.manifest import remedy
from mismatch_cli.trace.recorder_notes import RECORD

if TYPE_CHECKING:
    from mismatch_cli.studies.exploration.explored import Exploration
    from mismatch_cli.trace.reader import Trace

FINISH_UNKNOWN = "unknown why responses ended"


class Study(ABC):
    """A typed result computed from traces or runs: its JSON holds every number, its plots draw
    `plot_data`.

    It knows neither pictures nor a terminal: `report/pages/STUDY.py` lays it out, and the files in
    `report/plots/` with the same `STUDY` are its figures.
    """

    STUDY: ClassVar[str]  # the kind, as its page and its plots name it
    FORMAT: ClassVar[str]  # of its JSON
    VERSION: ClassVar[int] = 1

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What `--json` prints and `summary.json` holds."""

    @cached_property
    def result(self) -> dict[str, Any]:
        """The JSON, made once."""
        return self.to_json()

    @property
    def explored_responses(self) -> int:
        """The responses that `exploration` reads; 0 if the study is not about tokens."""
        return 0

    def exploration(
        self,
        on_responses: Callable[[int], None] = lambda _: None,  # noqa: ARG002
    ) -> Exploration | None:
        """The tokens to inspect one by one; `on_responses` hears of each response twice."""
        return None

    @property
    def plot_data(self) -> Any:
        """What its plots draw."""
        return self


def typed(traces: Sequence[Trace]) -> tuple[Path, ...]:
    """These traces as you type them: a name for each."""
    return tuple(map(name_of, traces))


def name_of(trace: Trace) -> Path:
    """A trace as you type it: its run's folder relative to here; a bundled one by name."""
    folder = trace.run_folder
    return Path(folder.name) if is_bundled(folder) else from_here(folder)


def from_here(folder: Path) -> Path:
    """A folder as you type it: relative to the working folder if it is below that."""
    working = Path.cwd()
    return folder.relative_to(working) if folder.is_relative_to(working) else folder


def imported_fact(about: Mapping[str, Any]) -> str:
    """A line for the head of a report; empty for a trace recorded here."""
    imported = about.get("imported")
    if not imported:
        return ""
    what = "rank" if imported.get("format") == RECORD else "file"
    fact = f"{imported['title']} · {things(imported['file_count'], what)}"
    return f"{fact} · π: {pi_of(imported)}" if "holds" in imported else fact  # `rescore` replaces π


def pi_of(imported: Mapping[str, Any]) -> str:
    """What the dump's π is, and which weights it is taken to be from."""
    scored, newer = imported["rows_with_trainer"], imported["rows_with_newer_trainer"]
    if not scored:
        return "none in this dump"
    weights = (
        "newer weights than those"
        if newer == scored
        else "the weights"
        if not newer
        else "the weights, or newer,"
    )
    return f"{imported['holds']}; assumed to be at {weights} that sampled"


def notes_of(imported: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A sentence per reason for leaving rows out or for a peculiarity."""
    if not imported:
        return ()
    first = imported["left_out_first"]
    left_out = (
        f"Left out: {counted(count, reason)}"
        + (f" (first: {first[reason]})." if reason in first else ".")
        for reason, count in imported["left_out"].items()
    )
    return (*left_out, *(f"{counted(count, what)}." for what, count in imported["noted"].items()))


def without_unknown(result: dict[str, Any], imported: Mapping[str, Any] | None) -> dict[str, Any]:
    """The summary of a pair, without the share of truncated responses if the dump does not
    record it.
    """
    if imported and imported.get("rows_with_unknown_finish"):
        empty = dict.fromkeys(result["metrics"]["truncated_share"])
        result["metrics"]["truncated_share"] = empty | {"note": FINISH_UNKNOWN}
    return result


def check_poolable(traces: Sequence[Trace]) -> None:
    """Refuse traces that are empty, that differ in models or settings, or whose responses would
    count twice.
    """
    first = traces[0]
    if not any(trace.num_responses for trace in traces):
        raise MismatchError(
            f"{first.folder} has no responses, so there is nothing to measure. Record it again."
        )
    seeds = set()
    for trace in traces:
        differing = [
            name for name, value in _identity(trace).items() if value != _identity(first)[name]
        ]
        if differing:
            raise MismatchError(
                f"{trace.folder} and {first.folder} differ in {differing[0]}, so they cannot be "
                "pooled. Report them one at a time."
            )
        seed = trace.manifest.get("config", {}).get("seed", trace.folder)
        if seed in seeds:
            raise MismatchError(
                f"{trace.folder} repeats the seed of another trace, so its responses would count "
                "twice. Leave it out."
            )
        seeds.add(seed)


def _identity(trace: Trace) -> dict[str, Any]:
    """What traces must share to be samples of the same setup."""
    manifest = trace.manifest
    return {
        "rollout engine": {k: v for k, v in manifest.get("rollout", {}).items() if k != "seed"},
        "trainer": {k: v for k, v in manifest.get("trainer", {}).items() if k != "threads"},
        "trainer at the rollout's weights": {
            k: v for k, v in manifest.get("recomputed", {}).items() if k != "threads"
        },
        "sampling settings": manifest.get("config", {}).get("sampling"),
        "top log-probs": manifest.get("top_logprobs"),
        "prompts": manifest.get("prompts", {}).get("digest"),
    }


def about(traces: Sequence[Trace], unscored_responses: int) -> dict[str, Any]:
    """What a report says about the origin of its traces, and what they lack."""
    manifest = traces[0].manifest
    names = (
        "imported",
        "rollout",
        "trainer",
        "recomputed",
        "equal_weights",
        "prompts",
        "config",
        "libraries",
        "threads",
        "top_logprobs",
    )
    facts = {name: manifest[name] for name in names if name in manifest} | {
        "unscored_responses": unscored_responses,
        "responses": sum(trace.num_responses for trace in traces),
        "grading_timeouts": sum(trace.count("grading_timeouts") for trace in traces),
        "unstated": sum(trace.count("unstated") for trace in traces),
        "partial": shortfalls(traces),
    }
    return dict(shown(facts))


def shortfalls(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """What each partial trace lacks that its manifest promises, and how to complete it."""
    return [_shortfall(trace) for trace in traces if trace.completeness.partial]


def _shortfall(trace: Trace) -> dict[str, Any]:
    found = trace.completeness
    unscored = found.unscored > 0 and len(found.reasons) == 1
    advice = remedy(trace.folder, trace.manifest, unscored=unscored)
    return {"trace": str(trace.folder), **found.to_json(), "remedy": advice}


def program(side: Mapping[str, Any]) -> str:
    """What samples or scores: an engine, transformers, or a recorded run's name for its trainer;
    empty if unknown.
    """
    return (
        side.get("engine")
        or side.get("name")
        or ("transformers" if side.get("transformers") else "")
    )


def cache_of(side: Mapping[str, Any]) -> str:
    """`with KV cache fp8`; empty if the cache has the dtype of the weights."""
    cache = side.get("kv_cache_dtype")
    return "" if cache in (side.get("dtype"), None, "auto") else f"with KV cache {cache}"


def who_is_compared(manifest: Mapping[str, Any]) -> str:
    """Models, then `vllm bfloat16 with KV cache fp8 against transformers bfloat16`; empty if
    unknown.
    """
    sides = [side for side in (manifest.get("rollout"), manifest.get("trainer")) if side]
    models = dict.fromkeys(shown(str(side["model"])) for side in sides if side.get("model"))
    programs = (
        " ".join(filter(None, (program(side), side.get("dtype"), cache_of(side)))) for side in sides
    )
    return " · ".join(
        filter(None, (" against ".join(models), " against ".join(filter(None, programs))))
    )


def subject_of(manifest: Mapping[str, Any], tokens: int) -> str:
    """The line below every figure, so that a copied picture explains itself."""
    return " · ".join(filter(None, (who_is_compared(manifest), f"{tokens:,} tokens")))
