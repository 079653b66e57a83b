"""Commands that messages advise: whoever copies one into a shell types what was meant."""

from __future__ import annotations

import shlex
from pathlib import Path


def suggest(*words: str | Path) -> str:
    """`mismatch-cli` with these words, quoted for a shell; a path that begins with a dash becomes `./-…`."""
    return f"mismatch-cli {quoted(*words)}"


def quoted(*words: str | Path) -> str:
    """The words alone, quoted in the same way."""
    return shlex.join(f"./{w}" if isinstance(w, Path) and str(w).startswith("-") else str(w) for w in words)
