"""What is known of other frameworks, a folder each: `importer.py` reads what it saves,
`recorder.py` records from inside its training loop, `metrics.py` is what its dashboard shows;
`limits.toml`, `algorithms.toml` and `causes.toml` are rows for the tables of other rooms.

Shared by all: `importing/`, `recording/` and `dialects/`.
"""

IMPORTERS = "mismatch_cli.frameworks.NAME.importer"
RECORDERS = "mismatch_cli.frameworks.NAME.recorder"
DASHBOARDS = "mismatch_cli.frameworks.NAME.metrics"
PICKLES = "mismatch_cli.frameworks.NAME.pickles"
