"""The base of every study, and what each says about its traces: what is compared, imported, and
missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.json_form import to_json
from mismatch_cli.base.numbers import counted, things
from mismatch_cli.base.places import is_bundled, shorten_paths
from mismatch_cli.trace.origin import Imported, side_of

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

    @property
    @abstractmethod
    def result(self) -> Any:
        """The numbers and words, as a dataclass whose fields are the keys of its JSON; a study
        makes it once (`cached_property`).
        """

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints and `summary.json` holds."""
        return {"format": self.FORMAT, "version": self.VERSION, **to_json(self.result)}

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


def typed_names(traces: Sequence[Trace]) -> tuple[Path, ...]:
    """These traces as you type them: a name for each."""
    return tuple(map(name_of, traces))


def name_of(trace: Trace) -> Path:
    """A trace as you type it: its run's folder relative to here; a bundled one by name."""
    folder = trace.run_folder
    return Path(folder.name) if is_bundled(folder) else relative_to_here(folder)


def relative_to_here(folder: Path) -> Path:
    """A folder as you type it: relative to the working folder if it is below that."""
    working = Path.cwd()
    return folder.relative_to(working) if folder.is_relative_to(working) else folder


def imported_fact(source: Imported | None) -> str:
    """A line for the head of a report; empty for a trace recorded here."""
    if source is None:
        return ""
    what = "rank" if source.is_recorded else "file"
    fact = f"{source.title} · {things(source.file_count, what)}"
    return f"{fact} · π: {pi_of(source)}" if source.holds else fact  # `rescore` replaces π


def pi_of(source: Imported) -> str:
    """What the dump's π is, and which weights it is taken to be from."""
    scored, newer = source.rows_with_trainer, source.rows_with_newer_trainer
    if not scored:
        return "none in this dump"
    weights = "the weights, or newer," if newer else "the weights"
    if newer == scored:
        weights = "newer weights than those"
    return f"{source.holds}; assumed to be at {weights} that sampled"


def notes_of(source: Imported | None) -> tuple[str, ...]:
    """A sentence per reason for leaving rows out or for a peculiarity."""
    if source is None:
        return ()
    first = source.left_out_first
    left_out = (
        f"Left out: {counted(count, reason)}"
        + (f" (first: {first[reason]})." if reason in first else ".")
        for reason, count in source.left_out.items()
    )
    return (*left_out, *(f"{counted(count, what)}." for what, count in source.noted.items()))


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


def who_is_compared(manifest: Mapping[str, Any]) -> str:
    """Models, then `vllm bfloat16 with KV cache fp8 against transformers bfloat16`; empty if
    unknown.
    """
    sides = [
        side for side in map(side_of, (manifest.get("rollout"), manifest.get("trainer"))) if side
    ]
    models = dict.fromkeys(shorten_paths(side.model) for side in sides if side.model)
    programs = (" ".join(filter(None, (side.program, side.dtype, side.cache))) for side in sides)
    compared = " against ".join(models), " against ".join(filter(None, programs))
    return " · ".join(filter(None, compared))


def subject_of(manifest: Mapping[str, Any], tokens: int) -> str:
    """The line below every figure, so that a copied picture explains itself."""
    return " · ".join(filter(None, (who_is_compared(manifest), f"{tokens:,} tokens")))
