"""The command `watch`."""
