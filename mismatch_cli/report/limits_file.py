"""Limits derived from good runs, as the TOML file that `gate` reads: the rule, the runs, and
what is left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from mismatch_cli import __version__
from mismatch_cli.base import numbers
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.base.text import visible
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.preamble import subject_lines
from mismatch_cli.studies.good_runs import MARGIN, DerivedLimit, FromRuns
from mismatch_cli.studies.mismatch import MismatchResult

_RULE = f"""\
The rule: v is the value of a run, e the end of its 95 % interval on the side of a larger gap. A limit is
v + {MARGIN:g} · (e − v), on the scale of the interval (the logarithm for positive metrics), rounded away from the run;
of several runs, the widest limit counts. At least 95 of 100 other runs with the same settings and as many prompts pass
all limits. Runs with fewer prompts vary more: derive limits from runs as small as those to judge.
Edit these limits, and add others, such as the faults that `mismatch-cli diagnose` finds:
  [limits."diagnosis:faults"]
  max = 0
For everything a limits file can contain: mismatch-cli guide gate"""


def limits_file(found: FromRuns, runs: Mapping[str, MismatchResult], name: str) -> str:
    """The text of the file `name`; `runs` has the result of each folder."""
    names = [str(shorten_paths(folder)) for folder in runs]
    comments = [
        f"Limits of `mismatch-cli gate RUN --limits {name}`, from "
        f"{numbers.things(len(runs), 'good run')}:"
    ]
    for run, result in zip(names, runs.values(), strict=True):
        what = subject_lines(result.about, result.pairs[found.pair].counts)
        comments += [f"  {run}: {what[0]}", f"    {what[1]}"]
    comments += [f"Measured and written by mismatch-cli {__version__}.", "", *_RULE.splitlines()]
    if found.left_out:
        comments += ["", "Metrics without a limit, which these runs do not give:"]
        comments += [f"  {metric}: {why}" for metric, why in found.left_out.items()]
    about = f"Limits that {' and '.join(names)} pass{'es' * (len(names) == 1)}, with a margin."
    tables = [line for metric, drawn in _by_metric(found) for line in _table(metric, drawn, names)]
    lines = [f"# {visible(line)}".rstrip() for line in comments]
    return "\n".join([*lines, "", f"about = {_quoted(about)}", *tables]) + "\n"


def _by_metric(found: FromRuns) -> Iterator[tuple[str, list[DerivedLimit]]]:
    for metric in dict.fromkeys(drawn.limit.metric for drawn in found.drawn):
        yield metric, [drawn for drawn in found.drawn if drawn.limit.metric == metric]


def _table(metric: str, drawn: Sequence[DerivedLimit], names: Sequence[str]) -> list[str]:
    """The bounds of a metric, and the run that each comes from."""
    sources = dict.fromkeys(f"{_measured(limit.estimate)} in {names[limit.run]}" for limit in drawn)
    bounds = [f"{each.limit.bound} = {each.limit.threshold!r}" for each in drawn]
    head = f"[limits.{metric if metric.replace('_', '').isalnum() else _quoted(metric)}]"
    return [
        "",
        head,
        f"pair = {_quoted(drawn[0].limit.pair)}",
        *bounds,
        f"source = {_quoted('; '.join(sources))}",
    ]


def _measured(estimate: Estimate) -> str:
    return " ".join(numbers.estimate(estimate.value, estimate.low, estimate.high))


def _quoted(text: str) -> str:
    """A basic TOML string: the same as JSON's, except for characters that `visible` spells out."""
    return json.dumps(visible(text), ensure_ascii=False)
