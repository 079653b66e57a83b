"""`mismatch_cli.open`: a recorded run, and everything that the commands report about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled_trace
from mismatch_cli.library import named_choices
from mismatch_cli.library.results import (
    Clipping,
    Comparison,
    Diagnosis,
    Gate,
    Report,
    Result,
    frame_of,
)
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.studies.study import check_poolable, name_of
from mismatch_cli.trace.origin import shortfalls
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.stores import list_folders_again

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_Path: TypeAlias = str | PathLike[str]
_Limits: TypeAlias = str | PathLike[str] | Mapping[str, Any]
_LARGE = 2**23  # tokens: 2.4 GB
_BYTES = 290  # of memory for each token, while the frame is made (lab/token_rows.py)


class Run:
    """A recorded run, or several pooled as one measurement; files are read when you ask for
    something.
    """

    def __init__(self, paths: Sequence[_Path] = (), workers: Workers = ALONE) -> None:
        list_folders_again()  # a trace on a store may have grown since it was listed
        named = paths or [bundled_trace()]
        self._traces = [
            Trace.open(Path(path).expanduser(), skip_broken=workers.skip_broken) for path in named
        ]
        self._workers = workers
        check_poolable(self._traces)
        for lacking in shortfalls(self._traces):
            warnings.warn(
                f"{lacking.trace} is partial: {', '.join(lacking.reasons)}. {lacking.remedy}",
                stacklevel=3,
            )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folder of each trace."""
        return tuple(trace.folder for trace in self._traces)

    @property
    def manifest(self) -> dict[str, Any]:
        """How the (first) trace was recorded: models, engines, settings, versions."""
        return deepcopy(self._traces[0].manifest)

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """A row per token: keys, text, recorded columns, `d`, `ratio`, divergences, and what two
        algorithms block.

        docs/json/tokens.md lists the columns. All tokens are in memory at once: for a large run use
        `token_frames()`.
        """
        from mismatch_cli.studies.tokens import number_of_tokens, token_tables

        count = number_of_tokens(self._traces)
        if count > _LARGE:
            size = f"{count:,} tokens take about {count * _BYTES / 1e9:.0f} GB as one frame"
            warnings.warn(
                f"{size}. Iterate over token_frames() instead, which loads some at a time.",
                stacklevel=2,
            )
        return frame_of(list(token_tables(self._traces)))

    def token_frames(self) -> Iterator[pd.DataFrame]:
        """The rows of `tokens` in order, in frames of at most about a million rows: any length
        fits into memory.
        """
        from mismatch_cli.studies.tokens import token_tables

        return (frame_of([table]) for table in token_tables(self._traces))

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics of `report()`: a row per pair and metric, with value, 95 % interval,
        noise, unit and formula.
        """
        return self._report.metrics

    def report(self) -> Report:
        """How far trainer and rollout disagree, as `mismatch-cli report` shows it."""
        return self._report

    @cached_property
    def _report(self) -> Report:
        from mismatch_cli.studies.mismatch import analyse_mismatch

        return Report(analyse_mismatch(self._traces, workers=self._workers))

    def clip(
        self,
        *algorithms: str,
        compare: tuple[str, str] | None = None,
        theory: bool = False,
        **parameters: float | str,
    ) -> Clipping:
        """What algorithms block, as `mismatch-cli clipstats` shows it: the named ones, or all.

        A name is what `clipstats -a` takes: `"dppo-binary-tv"`, `"dppo-binary-tv:delta=0.1"`,
        `"my_mask.py:limit=2"`. For a single algorithm, parameters may be keyword arguments:
        `clip("dppo-binary-tv", delta=0.1)`.
        """
        specs = named_choices.with_parameters(algorithms, parameters)
        judged, compared = named_choices.algorithms(specs, compare or ())
        from mismatch_cli.studies.clipping import analyse_clipping

        typed = named_choices.clipping_arguments(specs, compare, theory=theory)
        return Clipping(
            analyse_clipping(
                self._traces,
                judged,
                compared,
                theory=theory,
                workers=self._workers,
                arguments=typed,
            )
        )

    def diagnose(
        self, *, earlier_model: str | None = None, trainer_model: str | None = None
    ) -> Diagnosis:
        """What is wrong with the run, as `mismatch-cli diagnose` shows it; the models are those
        of its flags.
        """
        from mismatch_cli.models.loading import check_models

        check_models((earlier_model, trainer_model), "`diagnose` with a model")
        from mismatch_cli.studies.diagnosis import analyse_diagnosis

        return Diagnosis(
            analyse_diagnosis(self._traces, earlier_model, trainer_model, workers=self._workers)
        )

    def compare(self, *others: Run | _Path, pair: str | None = None) -> Comparison:
        """How up to five other runs differ from this one, as `mismatch-cli compare` shows it;
        each is one trace.
        """
        from mismatch_cli.studies.settings_compared import check_trace_count

        if not others:
            raise UsageError(
                "compare needs two runs, and one is named. Name a second: run.compare('OTHER')"
            )
        check_trace_count(1 + len(others))
        runs = [self]
        for other in others:
            runs.append(other if isinstance(other, Run) else Run([other]))
        for run in runs:
            if len(run.paths) > 1:
                raise UsageError(
                    f"{run!r} pools traces, but compare takes single ones. Open one of them."
                )
        from mismatch_cli.studies.comparison import analyse_comparison

        typed = ["--pair", pair] if pair else []
        traces = [run._traces[0] for run in runs]
        return Comparison(analyse_comparison(traces, pair, arguments=typed, workers=self._workers))

    def gate(
        self,
        *limits: _Limits,
        baseline: Run | _Path | None = None,
        allow_partial: bool = False,
    ) -> Gate:
        """Whether limits hold, as `mismatch-cli gate` shows it; the default limits are those of
        prime-rl.

        A set of limits is the name of a published set, a TOML file, or a mapping: `{"k3": {"max":
        0.01}}`.
        """
        requested = [limit if isinstance(limit, Mapping) else str(limit) for limit in limits]
        sets = named_choices.limit_sets(requested, has_baseline=baseline is not None)
        baseline_traces: list[Trace] = []
        if baseline is not None:
            opened = baseline if isinstance(baseline, Run) else Run([baseline])
            baseline_traces = opened._traces
        from mismatch_cli.studies.gate import GateAnalysis

        return Gate(
            GateAnalysis.of(
                sets,
                self._traces,
                baseline_traces,
                allow_partial=allow_partial,
                workers=self._workers,
            )
        )

    def plot(self, name: str) -> Figure:
        """A figure of `report()`, `clip()` or `diagnose()` by name; a `UsageError` for an
        unknown name suggests one.
        """
        from mismatch_cli.base.registry import unknown_name
        from mismatch_cli.report.figures import plots_of

        makers: dict[str, Callable[[], Result]] = {
            "mismatch": self.report,
            "clipping": self.clip,
            "diagnosis": self.diagnose,
        }
        names: list[str] = []
        for study, make in makers.items():
            plots = plots_of(study)
            if name in plots:
                # Only this study is made: each of them reads the whole trace.
                return make().plot(name)
            names += plots
        if name in plots_of("comparison"):
            raise UsageError(
                f"{name} draws a comparison. Type: run.compare('OTHER').plot({name!r})"
            )
        raise UsageError(unknown_name("plot", name, names))

    def __repr__(self) -> str:
        names = ", ".join(str(name_of(trace)) for trace in self._traces)
        responses = sum(trace.num_responses for trace in self._traces)
        return (
            f"<Run {names}: {responses:,} responses; tokens, metrics, report(), clip(), "
            "diagnose(), compare(), gate()>"
        )

    def _repr_html_(self) -> str:
        try:
            return self._report._repr_html_()
        except MismatchError as error:  # a run without scores still has a representation
            return f"<p>{escape(repr(self))}</p><p>{escape(str(error))}</p>"
