"""`mismatch-cli import`: turns another framework's dump into a trace that every other command
reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.common import Common, print_json, print_parts
from mismatch_cli.app.flags import flags
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.app.shared_settings import FormatSettings
from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import override, setting, settings_group
from mismatch_cli.base.places import FAULTY, bundled, bundled_trace
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.frameworks import IMPORTERS
from mismatch_cli.limits.manifest_sides import DTYPES, recorded_dtype
from mismatch_cli.probe.settings import RolloutSettings, SamplerSettings, ScorerSettings

if TYPE_CHECKING:
    from mismatch_cli.frameworks.importing.driver import Import
    from mismatch_cli.trace.origin import Imported

PANEL, PLACE = "Use elsewhere", 1

_SIDE = override(None, flag=False, choices=("dtype", (*DTYPES, "auto")))  # `auto` states nothing


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """What is imported, and how its columns are read."""

    paths: list[Path] | None = setting(
        None,
        "A dump's files, or the framework's run folder.",
        argument=True,
        show_default="a small bundled dump",
    )
    columns: list[str] | None = setting(
        None,
        "For any other layout: its names for the plain schema's columns. A dot enters objects, "
        "also of a list: choices.token_ids; a number is one entry.",
        metavar="OURS=THEIRS,…",
    )
    weights: str | None = setting(
        None,
        "Whether its log π is at the weights that sampled, or newer ones.",
        choices=("kind of weights", ("equal", "newer")),
        show_default="as the format defines it",
    )
    tokenizer: str | None = setting(
        None,
        "Model (or trace) whose tokenizer turns ids into text.",
        metavar="MODEL",
    )


@dataclass(frozen=True, kw_only=True)
class SchemaSettings:
    """What to print instead of importing."""

    formats: bool = setting(False, "List the formats and what each contains.")
    schema: bool = setting(False, "Print the plain schema and code that writes it.")


@flags()
def command(
    *,
    dump: DumpSettings = settings_group(DumpSettings),
    of_format: FormatSettings = settings_group(FormatSettings),
    printed: SchemaSettings = settings_group(SchemaSettings),
    sampler: Any = settings_group(
        SamplerSettings,
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        temperature=override(None),
        top_p=override(None, flag=True),
        top_k=override(None, flag=True),
        min_p=override(None, flag=True),
    ),
    engine: RolloutSettings = settings_group(RolloutSettings, "dtype", dtype=_SIDE),
    trainer: ScorerSettings = settings_group(ScorerSettings, "dtype", dtype=_SIDE),
    common: Common = settings_group(
        Common,
        "trust_remote_code",
        "output",
        "force",
        "json",
        "quiet",
        "debug",
        output=override(help="Run folder; the trace is its trace/.", show_default="import-NAME"),
    ),
) -> None:
    """Turn a dump of TRL, verl, prime-rl, NeMo-RL, slime, miles or open-instruct, or plain JSONL,
    into a trace.

    It never unpickles anything, and never skips a response silently.

    Examples:
      mismatch-cli import
      mismatch-cli import runs/math/token_exports --output math
      mismatch-cli import dump.jsonl --tokenizer Qwen/Qwen2.5-0.5B --temperature 1
      mismatch-cli import mine.jsonl --columns response_ids=output_tokens,logp_rollout=logprobs
      mismatch-cli import --schema
    """
    if printed.formats:
        _print_formats(common.json)
        return
    if printed.schema:
        _print_schema(common.json)
        return
    sampling = sampler.stated
    SamplingSettings(**sampling)  # a `UsageError` for what cannot be measured
    paths = dump.paths
    tokenizer = dump.tokenizer
    format = of_format.format
    columns = _column_names(dump.columns, format)
    _check_places(paths, tokenizer, common, as_plain=bool(columns) or format == "plain")
    if not paths:
        common.progress.say("No dump named: importing the bundled one.")
        paths = [bundled("dumps")]
        tokenizer = tokenizer or str(bundled_trace(FAULTY))
    from mismatch_cli.frameworks.importing.driver import Import

    newer = None if dump.weights is None else dump.weights == "newer"
    sides = _sides(engine.dtype, trainer.dtype)
    request = Import(paths, format, newer, sampling, sides, columns=columns)
    folder, imported = _import(request, tokenizer, common)
    if tokenizer is None:
        common.progress.say(
            "Reports will show token ids, also where the dump has texts: --tokenizer MODEL, the "
            "model's name or folder, shows text."
        )
    _show(imported, folder, common)


def _sides(rollout_dtype: str | None, trainer_dtype: str | None) -> dict[str, dict[str, Any]]:
    """What the manifest says of both sides, if the precision of either is stated."""
    dtypes = {"rollout": rollout_dtype, "trainer": trainer_dtype}
    stated = {side: dtype for side, dtype in dtypes.items() if dtype not in (None, "auto")}
    if not stated:
        return {}
    return {side: dict(recorded_dtype(stated.get(side))) for side in dtypes}


def _column_names(columns: list[str] | None, format: str | None) -> dict[str, str]:
    """The dump's names of our columns; a `UsageError` if they, or a format beside them, are
    invalid.
    """
    if not columns:
        return {}
    if format not in (None, "plain"):
        raise UsageError(
            f"--columns is for files of another layout, --format {format} for its own: leave out "
            "one."
        )
    from mismatch_cli.frameworks.importing.naming import parse_columns

    return parse_columns(",".join(columns))


def _check_places(
    paths: list[Path] | None, tokenizer: str | None, common: Common, *, as_plain: bool
) -> None:
    """Refuse paths that do not exist, or are traces, before importing anything that reads them."""
    from mismatch_cli.frameworks.importing import files_at
    from mismatch_cli.models.loading import check_model_folder
    from mismatch_cli.trace.manifest import is_manifest
    from mismatch_cli.trace.run_folder import check_run_folder

    for path in paths or ():
        files_at(path)
        if not as_plain and any(is_manifest(folder) for folder in (path, path / "trace")):
            raise UsageError(f"{path} is a trace already. Read it with: {suggest('report', path)}")
    if tokenizer is not None and not _of_a_trace(tokenizer):
        check_model_folder(tokenizer)
    check_run_folder(common.output or _folder_of(paths), replaced=common.force, resumable=False)


def _folder_of(paths: Sequence[Path] | None) -> Path:
    """The run folder without --output: named after the first file or folder of the dump."""
    first = paths[0] if paths else bundled("dumps")
    stem, _, _ = first.resolve().name.partition(".")
    return Path(f"import-{stem}")


def _import(dump: Import, tokenizer: str | None, common: Common) -> tuple[Path, dict[str, Any]]:
    """Write beside an old trace, and replace it once the new one is complete: an interrupt
    changes nothing.
    """
    from dataclasses import replace

    from mismatch_cli.frameworks.importing.driver import UnknownLayout, import_dump
    from mismatch_cli.frameworks.importing.torch_file import NeedsItsFramework
    from mismatch_cli.trace.recording_folder import replacing_run
    from mismatch_cli.trace.run_folder import run_folder

    folder = common.output or _folder_of(dump.paths)
    try:
        with (
            run_folder(folder, resume=False, force=common.force, resumable=False),
            replacing_run(folder) as new,
        ):
            trace = new / "trace"
            trace.mkdir()
            # A tokenizer that cannot be loaded is an error before the dump is read, not after.
            write_vocabulary, size = _vocabulary(tokenizer)
            imported = import_dump(replace(dump, vocabulary=size), trace, common.progress)
            write_vocabulary(trace)
    except (NeedsItsFramework, UnknownLayout) as error:
        # The error refers to these lines, so they are printed even with --quiet.
        if error.lines:
            TerminalProgress(quiet=False).say(error.lines)
        raise
    return folder, imported


def _vocabulary(tokenizer: str | None) -> tuple[Any, int | None]:
    """Load the tokenizer: a function that writes its vocabulary into a trace, and the model's
    number of ids, if a model was named.
    """
    if tokenizer is None:
        return lambda _folder: None, None
    of_trace = _of_a_trace(tokenizer)
    if of_trace:
        return partial(shutil.copy, of_trace), None
    from mismatch_cli.models.loading import load_tokenizer
    from mismatch_cli.probe.full_divergence import vocabulary_of
    from mismatch_cli.trace.vocabulary import write_vocabulary

    loaded = load_tokenizer(tokenizer)
    # A model may have rows for more ids than its tokenizer names, or for fewer.
    size = max(len(loaded), vocabulary_of(tokenizer, loaded))
    return lambda folder: write_vocabulary(folder, loaded), size


def _of_a_trace(tokenizer: str) -> Path | None:
    """The vocabulary of the trace, or run, that was named instead of a model."""
    from mismatch_cli.trace.manifest import VOCABULARY

    for folder in (Path(tokenizer), Path(tokenizer, "trace")):
        vocabulary = folder / VOCABULARY
        if vocabulary.is_file():
            return vocabulary
    return None


def _show(imported: dict[str, Any], folder: Path, common: Common) -> None:
    """Print what is in the trace, what is not and why, and what to type next."""
    from mismatch_cli.base.json_form import from_json
    from mismatch_cli.studies.unusable import unusable_columns
    from mismatch_cli.trace.origin import Imported
    from mismatch_cli.trace.reader import Trace

    source = from_json(Imported, imported)
    if common.json:
        print_json(imported | {"output": str(folder)})
    else:
        print_parts(*_contents(source))
    progress = common.progress
    progress.say(f"Wrote {folder / 'trace'}")
    warning = unusable_columns(Trace.open(folder))
    if warning:
        progress.say(f"! {warning}")
    if source.rows_with_trainer:
        progress.say(f"Next: {suggest('diagnose', folder)}")
        progress.say(f"      {suggest('report', folder)}")
        progress.say(f"      {suggest('clipstats', folder)}")
    else:
        progress.say("The dump has no trainer log-probabilities: score it with a model.")
        progress.say(f"Next: {suggest('rescore', folder, '--trainer-model', 'MODEL')}")


def _contents(source: Imported) -> Iterator[str]:
    """What was imported, and what was left out."""
    from mismatch_cli.base.numbers import things
    from mismatch_cli.studies.study import notes_of, pi_of

    tokens, rows = things(source.tokens, "token"), things(source.rows, "response")
    steps = things(source.steps, "step")
    yield f"Imported {tokens} in {rows} of {steps} from {source.title}."
    yield f"π: {pi_of(source)}."
    yield f"Index: {source.shift}."
    yield f"Padding: {source.padding}."
    yield from (f"• {note}" for note in notes_of(source))


def _print_formats(as_json: bool) -> None:
    from mismatch_cli.base.json_form import to_json
    from mismatch_cli.frameworks.importing.driver import facts

    formats = {name: facts(name) for name in registry.names(IMPORTERS)}
    if as_json:
        print_json(to_json(formats))
        return
    from rich.table import Table

    for name, described in formats.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        for fact in ("files", "enable", "holds", "shift", "padding", "averaging"):
            table.add_row(f"  {fact}", getattr(described, fact))
        print_parts(f"{name}: {described.title}", table, "")


def _print_schema(as_json: bool) -> None:
    from mismatch_cli.frameworks.importing.padded import kind_of
    from mismatch_cli.frameworks.plain.importer import WRITER, meanings

    schema = {}
    for name, meaning in meanings().items():
        # Arrow names the items of a list, which are always called so.
        kind = str(kind_of(name)).replace("item: ", "")
        schema[name] = (kind, meaning)
    if as_json:
        columns = schema.items()
        print_json({name: {"type": kind, "meaning": meaning} for name, (kind, meaning) in columns})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for head in ("column", "type", "meaning"):
        table.add_column(head, overflow="fold")
    for name, (kind, meaning) in schema.items():
        table.add_row(name, kind, meaning)
    print_parts(
        "One response per line (JSONL) or row (Parquet); lists are as long as response_ids.",
        table,
        "",
    )
    print(WRITER, end="")
