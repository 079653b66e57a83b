"""The figures of training runs."""
