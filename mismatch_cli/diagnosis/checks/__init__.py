"""The checks, one a file: NAME, STAGE, words for people, and `check(evidence) -> Finding`."""
