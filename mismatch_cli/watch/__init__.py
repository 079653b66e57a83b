"""Follows a run from outside while it trains: what is new, step by step, and what is already on
record.
"""
