"""Measure the gap between the rollout engine and the trainer of a language model in reinforcement learning."""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, which would be imported for it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from mismatch_cli.errors import MismatchError, UsageError
    from mismatch_cli.library.opened_run import Run

__all__ = ["MismatchError", "Run", "UsageError", "__version__", "open"]
__version__ = "0.1.0"

# The third version, of 12 June 2026, which is also that of ICML 2026 (PMLR 306). What other versions number otherwise:
# docs/formulas.md.
DPPO = "DPPO, arXiv 2602.04879v3"

_WHERE = {"MismatchError": "errors", "UsageError": "errors", "Run": "library.opened_run"}


def open(
    run: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    *,
    workers: int | str = 1,
    cache: str | PathLike[str] | None = None,
    skip_broken: bool = False,
) -> Run:
    """A recorded run to look at: its folder, or those of several that are pooled; by default the bundled one.

    `workers` processes read it, or a cluster (`"ray"`); a script that asks for several guards its first line with
    `if __name__ == "__main__"`. `cache` is a folder for partial results; with `skip_broken` shards that cannot be read
    are left out. A `MismatchError` says what is wrong with a folder, a warning that a trace lacks a part.
    """
    from pathlib import Path

    from mismatch_cli.library.opened_run import Run
    from mismatch_cli.workers import Workers

    read_by = Workers(workers, None if cache is None else Path(cache), skip_broken)
    return Run([run] if isinstance(run, str) or hasattr(run, "__fspath__") else run, read_by)


if not TYPE_CHECKING:  # or any name would be known

    def __getattr__(name: str) -> object:
        """What is imported when it is asked for, so that a program which only starts pays for none of it."""
        from importlib import import_module

        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
