"""Where things are: the repository, the package, the guide."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, DOCS = ROOT / "mismatch_cli", ROOT / "docs"
