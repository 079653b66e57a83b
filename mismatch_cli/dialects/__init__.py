"""The same tokens in the words of other frameworks: their metric names, their formulas, their averages.

A file is a framework, and its name the public name (`nemo_rl.py` is `nemo-rl`): `LINES`, what its dashboard shows about
the gap between rollout and trainer, and `WHEN`, when it does. Everything is measured over all tokens of the traces at
once; a dashboard shows the mean over micro-batches, ranks or steps of such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from mismatch_cli import registry
from mismatch_cli.dialects._line import Line
from mismatch_cli.dialects._read import Reading, Readings, read
from mismatch_cli.trace.reader import Trace

__all__ = ["Line", "Reading", "Readings", "lines", "measure", "names", "readings", "when"]


def names() -> list[str]:
    """The frameworks whose words are known."""
    return registry.names(__name__)


def lines(framework: str) -> tuple[Line, ...]:
    """What a framework logs about the gap; a `UsageError` names the nearest where it is not known."""
    found: tuple[Line, ...] = registry.load(__name__, framework, "framework").LINES
    return found


def when(framework: str) -> str:
    """When a framework logs these, and on what."""
    found: str = registry.load(__name__, framework, "framework").WHEN
    return found


def readings(traces: Sequence[Trace], frameworks: Sequence[str]) -> Readings:
    """Every line of the asked frameworks on the tokens of all traces, in one pass and bounded memory."""
    return read(traces, {name: lines(name) for name in frameworks})


def measure(traces: Sequence[Trace], frameworks: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Framework → metric name → value, None where the traces lack what it needs."""
    return {name: {one.line.name: one.value for one in of} for name, of in readings(traces, frameworks).of.items()}
