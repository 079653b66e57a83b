"""Tinker: what its dashboard shows."""
