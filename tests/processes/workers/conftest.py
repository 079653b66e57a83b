"""The traces that studies compare."""

from tests.studies.compared import float32_rows, perturbed  # noqa: F401
