"""What every test relies on: no hub, prepared imports, and one thread, which makes numbers repeatable to the bit."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from mismatch_cli.compat import prepare_imports

prepare_imports()
