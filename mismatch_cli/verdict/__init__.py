"""Is this normal? Where a summary stands: against the trainer's own noise first, then against what others published."""

from mismatch_cli.verdict.judge import judge

__all__ = ["judge"]
