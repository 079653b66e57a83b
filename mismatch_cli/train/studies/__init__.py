"""Training runs as typed results."""
