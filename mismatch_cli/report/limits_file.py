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


def limits_file(derived: FromRuns, runs: Mapping[str, MismatchResult], name: str) -> str:
    """The text of the file `name`; `runs` has the result of each folder."""
    names = [str(shorten_paths(folder)) for folder in runs]
    passes = "passes" if len(names) == 1 else "pass"
    about = f"Limits that {' and '.join(names)} {passes}, with a margin."
    lines = [f"# {visible(line)}".rstrip() for line in _comments(derived, runs, names, name)]
    lines += ["", f"about = {_quoted(about)}"]
    limits_on: dict[str, list[DerivedLimit]] = {}
    for each in derived.drawn:
        limits_on.setdefault(each.limit.metric, []).append(each)
    for metric, limits in limits_on.items():
        lines += _table(metric, limits, names)
    return "\n".join(lines) + "\n"


def _comments(
    derived: FromRuns, runs: Mapping[str, MismatchResult], names: Sequence[str], file: str
) -> Iterator[str]:
    """The runs, the rule, and the metrics without a limit."""
    good_runs = numbers.things(len(runs), "good run")
    yield f"Limits of `mismatch-cli gate RUN --limits {file}`, from {good_runs}:"
    for run, result in zip(names, runs.values(), strict=True):
        sides, model = subject_lines(result.about, result.pairs[derived.pair].counts)
        yield f"  {run}: {sides}"
        yield f"    {model}"
    yield f"Measured and written by mismatch-cli {__version__}."
    yield ""
    yield from _RULE.splitlines()
    if derived.left_out:
        yield ""
        yield "Metrics without a limit, which these runs do not give:"
        for metric, reason in derived.left_out.items():
            yield f"  {metric}: {reason}"


def _table(metric: str, limits: Sequence[DerivedLimit], names: Sequence[str]) -> Iterator[str]:
    """The bounds of a metric, and the run that each comes from."""
    is_bare_key = metric.replace("_", "").isalnum()
    yield ""
    yield f"[limits.{metric if is_bare_key else _quoted(metric)}]"
    yield f"pair = {_quoted(limits[0].limit.pair)}"
    for each in limits:
        yield f"{each.limit.bound} = {each.limit.threshold!r}"
    sources = [f"{_measured(each.estimate)} in {names[each.run]}" for each in limits]
    yield f"source = {_quoted('; '.join(dict.fromkeys(sources)))}"


def _measured(estimate: Estimate) -> str:
    return " ".join(numbers.estimate(estimate.value, estimate.low, estimate.high))


def _quoted(text: str) -> str:
    """A basic TOML string: the same as JSON's, except for characters that `visible` spells out."""
    return json.dumps(visible(text), ensure_ascii=False)
