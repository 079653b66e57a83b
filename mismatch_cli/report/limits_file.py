"""Limits that follow from good runs, as the TOML file that `gate` reads: the rule, the runs, and what is left out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mismatch_cli import __version__, numbers
from mismatch_cli.places import shown
from mismatch_cli.report.about import subject_lines
from mismatch_cli.studies.good_runs import MARGIN, Drawn, FromRuns
from mismatch_cli.text import visible

_RULE = f"""\
The rule: v is the value of a run, e the end of its 95 % interval on the side of a larger gap. A limit is
v + {MARGIN:g} · (e − v), on the scale on which the interval is formed (the logarithm, for what is above 0),
rounded away from the run; of several runs, the widest. Of other runs with the same settings and as many prompts, at
least 95 of 100 keep all limits. A run of fewer prompts strays further: go by runs as small as those to judge.
They are yours from here: edit them, and add others, such as the faults that `mismatch-cli diagnose` finds:
  [limits."diagnosis:faults"]
  max = 0
What can stand here: mismatch-cli guide gate"""


def limits_file(found: FromRuns, runs: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The text of the file of this name; `runs` holds by folder what was measured of each."""
    names = [str(shown(folder)) for folder in runs]
    comments = [f"Limits of `mismatch-cli gate RUN --limits {name}`, from {numbers.things(len(runs), 'good run')}:"]
    for run, summary in zip(names, runs.values(), strict=True):
        what = subject_lines(summary["about"], summary["pairs"][found.pair]["counts"])
        comments += [f"  {run}: {what[0]}", f"    {what[1]}"]
    comments += [f"Measured and written by mismatch-cli {__version__}.", "", *_RULE.splitlines()]
    if found.left_out:
        comments += ["", "Without a limit, since none follows from these runs:"]
        comments += [f"  {metric}: {why}" for metric, why in found.left_out.items()]
    about = f"What {' and '.join(names)} keep{'s' * (len(names) == 1)}, with a margin."
    tables = [line for metric, drawn in _by_metric(found) for line in _table(metric, drawn, names)]
    lines = [f"# {visible(line)}".rstrip() for line in comments]
    return "\n".join([*lines, "", f"about = {_quoted(about)}", *tables]) + "\n"


def _by_metric(found: FromRuns) -> Iterator[tuple[str, list[Drawn]]]:
    for metric in dict.fromkeys(drawn.limit.metric for drawn in found.drawn):
        yield metric, [drawn for drawn in found.drawn if drawn.limit.metric == metric]


def _table(metric: str, drawn: Sequence[Drawn], names: Sequence[str]) -> list[str]:
    """The bounds of a metric, and of which run each is."""
    sources = dict.fromkeys(f"{_measured(one.found)} in {names[one.run]}" for one in drawn)
    bounds = [f"{one.limit.bound} = {one.limit.threshold!r}" for one in drawn]
    head = f"[limits.{metric if metric.replace('_', '').isalnum() else _quoted(metric)}]"
    return ["", head, f"pair = {_quoted(drawn[0].limit.pair)}", *bounds, f"source = {_quoted('; '.join(sources))}"]


def _measured(found: Mapping[str, Any]) -> str:
    return " ".join(numbers.estimate(found["value"], found["low"], found["high"]))


def _quoted(text: str) -> str:
    """A basic string of TOML: JSON writes the same but for what `visible` has spelled out."""
    return json.dumps(visible(text), ensure_ascii=False)
