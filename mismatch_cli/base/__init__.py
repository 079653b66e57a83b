"""Known to every room, and knowing none: errors, text, numbers, arrays, registries, settings."""
