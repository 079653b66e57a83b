"""Accumulators: every statistic of a trace as additive state, updated batch by batch and merged
in shard order.
"""
