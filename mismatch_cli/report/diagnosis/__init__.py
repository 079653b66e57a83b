"""The report of `diagnose`: the first cause with its evidence, and every check that was made."""
