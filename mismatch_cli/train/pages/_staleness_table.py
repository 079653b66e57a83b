"""The table of what algorithms block by staleness."""

from mismatch_cli.base import numbers
from mismatch_cli.metrics.update_table import TRAINING
from mismatch_cli.report.tables import Col, col, percent, table, text
from mismatch_cli.report.view import Table
from mismatch_cli.train.studies.staleness import SHARES, Dose
from mismatch_cli.train.studies.training import TrainingAnalysis

_Row = tuple[str, Dose]
_NOTE = (
    "N: optimiser steps by which the weights that sample are behind. More: blocked tokens than at "
    "the lowest N, in points, in the mean over runs with the same seed if two or more seeds are "
    "shared. Means over the steps at which every engine is as far behind as it should be."
)


def staleness_table(study: TrainingAnalysis) -> Table:
    """A row per algorithm and dose; empty where the runs do not differ in staleness."""
    rows = [(response.name, dose) for response in study.by_staleness for dose in response.doses]
    return table(
        "Blocked tokens by staleness",
        rows,
        [
            text("algorithm", lambda row: row[0]),
            col("N", lambda row: str(row[1].updates)),
            col("seeds", lambda row: str(row[1].seeds)),
            *map(_share, ("blocked, %", "A > 0, %", "A < 0, %"), SHARES),
            col("more, points", lambda row: _more(row[1])),
            col("paired seeds", lambda row: _pairs(row[1])),
        ],
        note=_NOTE,
    )


def _share(title: str, key: str) -> Col[_Row]:
    return col(title, lambda row: percent(row[1].blocked[key]), TRAINING[key])


def _more(dose: Dose) -> str:
    if dose.more is None:
        return numbers.MISSING
    return percent(dose.more.estimate)


def _pairs(dose: Dose) -> str:
    return numbers.MISSING if dose.more is None else str(dose.more.pairs)
