"""Fixtures for testing studies."""

from tests.studies.compared import analysis, float32_rows, perturbed, result, traces  # noqa: F401
