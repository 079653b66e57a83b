"""Import this first: it makes mismatch_cli and lab/ importable, and hides what a CPU
torch cannot load.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
sys.path.insert(0, str(Path(__file__).parents[2]))

from mismatch_cli.models.torch_settings import prepare_imports

# vllm-cpu comes with builds of torchvision and torchaudio that a CPU torch cannot load
prepare_imports()

ROOT = Path(__file__).parents[2]
