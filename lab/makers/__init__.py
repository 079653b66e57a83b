"""Makers of what sample_data/ holds: the bundled model, problems, traces and dumps.

See sample_data/README.md.
"""

import sys
from pathlib import Path

SAMPLE_DATA = Path(__file__).resolve().parents[2] / "sample_data"

# transformers imports these if they are installed, and builds for another torch then fail; nothing
# here needs them.
[sys.modules.setdefault(name, None) for name in ("torchvision", "torchaudio", "torchcodec")]  # type: ignore[arg-type]
