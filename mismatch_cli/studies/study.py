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
    """The name of each trace, as you type it."""
    return tuple(map(name_of, traces))


def name_of(trace: Trace) -> Path:
    """A trace as you type it: its run's folder relative to here; a bundled one by name."""
    folder = trace.run_folder
    if is_bundled(folder):
        return Path(folder.name)
    return relative_to_here(folder)


def relative_to_here(folder: Path) -> Path:
    """A folder as you type it: relative to the working folder if it is below that."""
    working = Path.cwd()
    if folder.is_relative_to(working):
        return folder.relative_to(working)
    return folder


def folders_of(traces: Sequence[Trace]) -> list[str]:
    """The folders of traces as JSON holds them: absolute paths shortened."""
    folders: list[str] = shorten_paths([str(trace.folder) for trace in traces])
    return folders


def imported_fact(source: Imported | None) -> str:
    """A line for the head of a report; empty for a trace recorded here."""
    if source is None:
        return ""
    unit = "rank" if source.is_recorded else "file"
    fact = f"{source.title} · {things(source.file_count, unit)}"
    if source.holds:  # a rescored dump has another π, and holds none of its own
        fact += f" · π: {pi_of(source)}"
    return fact


def pi_of(source: Imported) -> str:
    """What the dump's π is, and which weights it is taken to be from."""
    scored, newer = source.rows_with_trainer, source.rows_with_newer_trainer
    if not scored:
        return "none in this dump"
    weights = "the weights"
    if newer == scored:
        weights = "newer weights than those"
    elif newer:
        weights = "the weights, or newer,"
    return f"{source.holds}; assumed to be at {weights} that sampled"


def notes_of(source: Imported | None) -> tuple[str, ...]:
    """A sentence per reason for leaving rows out or for a peculiarity."""
    if source is None:
        return ()
    notes = []
    for reason, count in source.left_out.items():
        note = f"Left out: {counted(count, reason)}"
        if reason in source.left_out_first:
            note += f" (first: {source.left_out_first[reason]})"
        notes.append(f"{note}.")
    for peculiarity, count in source.noted.items():
        notes.append(f"{counted(count, peculiarity)}.")
    return tuple(notes)


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
        for name, value in _identity(trace).items():
            if value != _identity(first)[name]:
                raise MismatchError(
                    f"{trace.folder} and {first.folder} differ in {name}, so they cannot be "
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
    """What traces must share to be samples of the same setup, by its name in a message."""
    manifest = trace.manifest

    def section(name: str, without: str) -> dict[str, Any]:
        return {key: value for key, value in manifest.get(name, {}).items() if key != without}

    return {
        "rollout engine": section("rollout", without="seed"),
        "trainer": section("trainer", without="threads"),
        "trainer at the rollout's weights": section("recomputed", without="threads"),
        "sampling settings": manifest.get("config", {}).get("sampling"),
        "top log-probs": manifest.get("top_logprobs"),
        "prompts": manifest.get("prompts", {}).get("digest"),
    }


def who_is_compared(manifest: Mapping[str, Any]) -> str:
    """Models, then `vllm bfloat16 with KV cache fp8 against transformers bfloat16`; empty if
    unknown.
    """
    models = []
    programs = []
    for section in ("rollout", "trainer"):
        side = side_of(manifest.get(section))
        if side is None:
            continue
        if side.model and shorten_paths(side.model) not in models:
            models.append(shorten_paths(side.model))
        program = " ".join(filter(None, (side.program, side.dtype, side.cache)))
        if program:
            programs.append(program)
    compared = " against ".join(models), " against ".join(programs)
    return " · ".join(filter(None, compared))


def subject_of(manifest: Mapping[str, Any], tokens: int) -> str:
    """The line below every figure, so that a copied picture explains itself."""
    return " · ".join(filter(None, (who_is_compared(manifest), f"{tokens:,} tokens")))
