"""Limits on what was measured, and whether they hold: for CI."""
