"""`--vary`: a command once for each combination of settings, spread over devices, and one
comparison at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch_cli.app.common import Common
from mismatch_cli.app.completions import settings
from mismatch_cli.app.typed import truth, words
from mismatch_cli.base import registry
from mismatch_cli.base.configuration import WRITTEN, values_of
from mismatch_cli.base.errors import MismatchError, UsageError, suggest
from mismatch_cli.base.numbers import number, things
from mismatch_cli.base.options import by_key, is_typed_only, names_cluster, of_running

if TYPE_CHECKING:
    from mismatch_cli.probe.settings import Recorded
    from mismatch_cli.processes.members import Member, Outcome


def _varies_reserved(texts: Sequence[str]) -> bool:
    """Whether one of these settings has a value that only the command line may give it."""
    from mismatch_cli.probe.config import ProbeConfig, RescoreConfig

    settings_by_key = by_key(RescoreConfig) | by_key(ProbeConfig)
    for text in texts:
        typed, _, values = text.partition("=")
        varied = settings_by_key.get(_key_of(typed))
        if varied and any(is_typed_only(varied, [value]) for value in values.split(",")):
            return True
    return False


def _key_of(typed: str) -> str:
    return typed.strip().lstrip("-").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class VarySettings:
    """Several runs of one command."""

    vary: list[str] | None = of_running(
        None,
        "Run once per value, and compare; per combination if repeated.",
        metavar="SETTING=VALUE,VALUE",
        completes=settings,
        typed=_varies_reserved,
    )
    devices: str | None = of_running(
        None,
        "GPUs for several runs at once, or a Ray cluster: ray, or ray://HOST:PORT.",
        metavar="0,1|ray",
        numeric=True,
        show_default="all GPUs",
        typed=names_cluster,
    )


# Of all runs together
_OWN = ("vary", "devices", "output", "resume", "force", "open", "json", "quiet", "full", "debug")
_WORST_FIRST = "abs_d_mean"


def run_varied(
    context: typer.Context, common: Common, kind: type[Recorded], varied: VarySettings
) -> None:
    """Run each combination and compare the runs; a `MismatchError` at the end if one failed.

    Every setting is checked before the first run starts.
    """
    from mismatch_cli.studies.comparison import ComparisonAnalysis
    from mismatch_cli.trace.run_folder import folder_of_runs

    if common.resume and common.force:
        raise UsageError("--resume continues a run, --force replaces it: use one of them.")
    vary = varied.vary or []
    command, values = str(context.info_name), _values(context, kind, vary)
    folder = common.output or Path(
        f"{command}-by-{'-'.join(name.replace('_', '-') for name in values)}"
    )
    members = _members(context, kind, values, folder.absolute(), force=common.force)
    if len(members) < 2:
        raise UsageError("--vary needs at least two values: with one there is nothing to compare.")
    _check_there(members, common)
    with folder_of_runs(folder, ComparisonAnalysis.FORMAT):
        todo = [member for member in members if not (common.resume and member.finished)]
        common.progress.say(
            f"{things(len(members), 'run')} into {folder}, {len(members) - len(todo)} of them "
            "finished"
        )
        outcomes = _run(todo, varied.devices, common)
        failed = [outcome for outcome in outcomes if outcome.fault]
        lost = {outcome.member.name for outcome in failed}
        _compare([member for member in members if member.name not in lost], folder, common)
    if failed:
        first = failed[0]
        resume = suggest(
            command,
            *words(context, _OWN),
            *(f"--vary={text}" for text in vary),
            "--output",
            folder,
            "--resume",
        )
        raise MismatchError(
            f"{len(failed)} of {things(len(members), 'run')} failed, the first "
            f"{first.member.name}: {first.fault} Continue with: {resume}"
        )


def _values(context: typer.Context, kind: type, vary: Sequence[str]) -> dict[str, list[str]]:
    names = by_key(kind)
    found: dict[str, list[str]] = {}
    for text in vary:
        typed, equals, values = text.partition("=")
        name = _key_of(typed)
        if not equals or not all(value.strip() for value in values.split(",")):
            raise UsageError(
                f"--vary {text} is invalid. Use SETTING=VALUE,VALUE, such as "
                "kv-cache-dtype=auto,fp8."
            )
        if name not in names:
            raise UsageError(
                registry.unknown("setting", typed, [name.replace("_", "-") for name in names])
            )
        if name in found:
            raise UsageError(f"--vary names {typed} twice: give all of its values to one --vary.")
        found[name] = [value.strip() for value in values.split(",")]
    for known in context.command.params:
        if getattr(known, "is_flag", False):
            _ = [truth(text) for text in found.get(str(known.name), ())]
    return found


def _members(
    context: typer.Context,
    kind: type[Recorded],
    values: dict[str, list[str]],
    folder: Path,
    *,
    force: bool,
) -> list[Member]:
    """One member per combination; what would be refused in a single run is refused here."""
    from mismatch_cli.app.prepared import checked
    from mismatch_cli.processes.members import Member

    members: dict[str, Member] = {}
    context.meta[WRITTEN] = True
    for combination in product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        typed, name = (
            words(context, _OWN, chosen, resolved=True),
            "-".join(map(_named, combination)),
        )
        inner = context.command.make_context(
            str(context.info_name), list(typed), parent=context.parent
        )
        checked(kind, values_of(inner), str(context.info_name))
        if name in members:
            raise UsageError(
                f"--vary gives two runs the name {name}. Choose values whose last path parts "
                "differ."
            )
        members[name] = Member(
            folder / name, (str(context.info_name), *typed), Path.cwd(), replaces=force
        )
    return list(members.values())


def _named(value: str) -> str:
    """A short name for a value, since it heads columns; the folder around it names the setting."""
    return re.sub(r"[^\w.-]+", "-", Path(value).name)


def _check_there(members: Sequence[Member], common: Common) -> None:
    existing = [member.folder for member in members if member.folder.exists()]
    if existing and not (common.resume or common.force):
        raise MismatchError(
            f"{existing[0]} already exists. Continue it with --resume, replace it with --force, "
            "or choose another --output."
        )


def _run(members: Sequence[Member], devices: str | None, common: Common) -> list[Outcome]:
    from mismatch_cli.processes.members import RAY, run_members, run_on_ray, visible_devices

    if common.force:
        from mismatch_cli.trace.work import drop_begun

        for member in members:
            drop_begun(member.folder)

    def report(outcome: Outcome) -> None:
        common.progress.say(f"{outcome.member.name}: {outcome.fault or _headline(outcome.member)}")

    if devices is not None and (devices == RAY or devices.startswith(f"{RAY}://")):
        return run_on_ray(members, devices, report)
    return run_members(members, devices.split(",") if devices else visible_devices(), report)


def _headline(member: Member) -> str:
    return f"mean |Δlog p| {number(_gap(member))}"


def _gap(member: Member) -> float:
    pairs = json.loads((member.folder / "summary.json").read_text(encoding="utf-8"))["pairs"]
    value = next(iter(pairs.values()))["metrics"][_WORST_FIRST]["value"]
    return float("nan") if value is None else float(value)


def _compare(members: Sequence[Member], folder: Path, common: Common) -> None:
    """Compare the first run with the others; if there are too many, with those whose gaps differ
    most from its own.
    """
    from mismatch_cli.studies.comparison import analyse_comparison
    from mismatch_cli.studies.settings_compared import NAMES
    from mismatch_cli.trace.reader import Trace

    if len(members) < 2:
        return
    first, *others = members
    if len(members) > len(NAMES):
        others = sorted(others, key=lambda member: abs(_gap(member) - _gap(first)), reverse=True)[
            : len(NAMES) - 1
        ]
        common.progress.say(
            f"Comparing {first.name} with the {len(others)} of the runs whose gap differs most "
            "from its."
        )
    traces = [Trace.open(member.folder) for member in (first, *others)]
    common.study(analyse_comparison, traces, folder, "Comparing", passes=2)
