"""The setting that is likeliest to make the gap of a report, and the commands that test it."""

from mismatch_cli.limits.judge import HEALTHY
from mismatch_cli.limits.suspects import Suspect
from mismatch_cli.report.outline import Facts
from mismatch_cli.studies.mismatch import MismatchResult


def _first_suspect(result: MismatchResult) -> Suspect | None:
    """The setting that is likeliest to make the gap, where it is not healthy."""
    if result.verdict.status == HEALTHY:
        return None
    return next(iter(result.suspects), None)


def suspect_remark(result: MismatchResult) -> Facts:
    """The first suspected setting, named as in `compare`."""
    suspect = _first_suspect(result)
    if suspect is None:
        return ()
    return (("Suspect", f"{_setting(suspect)}: {suspect.why}"),)


def _setting(suspect: Suspect) -> str:
    return f"{suspect.setting.rpartition('.')[2]} = {suspect.value}"


def suspect_tests(result: MismatchResult) -> Facts:
    """The commands that measure how much of the gap the first suspect causes."""
    suspect = _first_suspect(result)
    if suspect is None:
        return ()
    first, *others = suspect.test
    shows = f"how much of the gap {_setting(suspect)} causes"
    return ((first, shows), *((line, "") for line in others))
