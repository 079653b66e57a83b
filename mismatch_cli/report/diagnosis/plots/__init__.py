"""The figures of a diagnosis, one a file."""
