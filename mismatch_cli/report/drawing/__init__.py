"""How figures are drawn: a sheet with panels, its style, and the files it becomes."""
