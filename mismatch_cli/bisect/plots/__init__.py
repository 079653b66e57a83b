"""The figures of a search."""
