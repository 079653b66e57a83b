"""ROLL: what its dashboard shows."""
