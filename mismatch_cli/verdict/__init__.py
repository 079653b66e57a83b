"""Is this normal? Where a summary stands: against the trainer's own noise first, then against what others published."""
