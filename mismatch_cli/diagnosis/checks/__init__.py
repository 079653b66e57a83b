"""The checks, one per file: NAME, STAGE, texts for reports, and `check(evidence) -> Finding`."""
