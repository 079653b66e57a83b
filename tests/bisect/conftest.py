"""The browser, for the page of a search."""

from tests.report.conftest import browser  # noqa: F401
