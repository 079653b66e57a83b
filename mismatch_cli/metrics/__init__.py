"""Accumulators: every statistic of a trace as additive state that is updated batch by batch and merged in shard order."""
