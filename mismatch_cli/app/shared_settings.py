"""Settings of several commands that read: which traces, by which algorithms and limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mismatch_cli.app import completions as completed
from mismatch_cli.base import registry
from mismatch_cli.base.options import setting
from mismatch_cli.frameworks import IMPORTERS

of_limits = partial(setting, panel="Limits")


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The traces that a command reads."""

    traces: list[Path] | None = setting(
        None,
        "Run or trace folders; several are pooled.",
        argument=True,
        show_default="the bundled trace",
        completes=completed.runs,
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """The algorithms that a command looks at."""

    algorithms: list[str] | None = setting(
        None,
        "NAME, NAME:PARAMETER=VALUE,… or a file such as my_mask.py; see `mismatch-cli algorithms`. "
        "Repeatable.",
        key="algorithm",
        short="-a",
        metavar="ALGORITHM",
        completes=completed.algorithms,
        typed=registry.names_file,
    )


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """The limits that a command judges by."""

    limits: list[str] | None = of_limits(
        None,
        "Published limits by name (`gate --list`), or your TOML file. Repeatable.",
        metavar="NAME|FILE.toml",
        completes=completed.limits,
    )
    baseline: list[Path] | None = of_limits(
        None, "Trace that relative limits refer to.", metavar="TRACE", completes=completed.runs
    )


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """How a dump is read."""

    format: str | None = setting(
        None,
        "Format of the dump.",
        choices=("format", partial(registry.names, IMPORTERS)),
        unless="JSONL or Parquet of your own is plain.",
        show_default="detected",
    )


@dataclass(frozen=True, kw_only=True)
class FrameworkSettings:
    """Whose names a run's metrics have too."""

    framework: str | None = setting(
        None,
        "Also record the metrics of a framework, such as verl or trl.",
        key="as",
        metavar="FRAMEWORK",
        choices=("framework", completed.frameworks),
    )

    @property
    def name(self) -> str:
        """The framework; empty for none."""
        return self.framework or ""


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """The page of a run that grows."""

    report_every: float = setting(
        60.0,
        "Seconds between refreshes of the page; 0: none while it runs.",
        least=0,
        metavar="SECONDS",
        panel="Output",
    )


@dataclass(frozen=True, kw_only=True)
class ListSettings:
    """What to do instead of judging."""

    list: bool = setting(False, "List known names with sources.")
