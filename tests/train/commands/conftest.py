"""Pictures stay blank, as in the tests of the core's commands."""

from tests.app.commands.conftest import _blank_pictures  # noqa: F401
