"""AReaL: what its dashboard shows."""
