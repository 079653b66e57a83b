"""The command `bisect`."""
