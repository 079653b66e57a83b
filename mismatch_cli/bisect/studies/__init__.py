"""A search as a typed result."""
