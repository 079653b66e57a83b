"""Where the bundled model and data lie: in the wheel beside this package, in a checkout under `sample_data/`."""

from __future__ import annotations

from pathlib import Path

_IN_WHEEL = Path(__file__).parent / "sample_data"
_IN_CHECKOUT = Path(__file__).parent.parent / "sample_data"


def bundled(name: str) -> Path:
    """The path of a bundled file or folder, such as `model` or `problems.jsonl`."""
    return (_IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT) / name


def bundled_trace() -> Path:
    """A short training run of the bundled model, with an fp8 KV cache."""
    return bundled("traces") / "fp8-kv"
