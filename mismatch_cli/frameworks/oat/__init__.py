"""oat: what its dashboard shows."""
