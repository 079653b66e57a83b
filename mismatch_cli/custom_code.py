"""Code that comes with a model: it runs only where the user has said so for this command, and is then on record."""

import pickle
from typing import Any

FLAG = "--trust-remote-code"
_LOADED_FROM = "transformers_modules."  # the package into which transformers loads the code of models
_allowed = False
_classes: dict[str, set[str]] = {}  # by model: what was loaded from its code


def allow(yes: bool) -> None:
    """Say for the command that begins whether its models may bring code."""
    global _allowed
    _allowed = yes
    _classes.clear()


def allowed() -> bool:
    return _allowed


def loading() -> dict[str, bool]:
    """What every `from_pretrained` is told: left to itself it would ask, and take an answer from stdin."""
    import transformers.dynamic_module_utils

    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # nor for what libraries load by themselves
    return {"trust_remote_code": _allowed}


def note(model: str, *loaded: Any) -> None:
    """Remember which of these were made by code of the model."""
    for made in loaded:
        kind = type(made)
        if kind.__module__.startswith(_LOADED_FROM):
            _classes.setdefault(model, set()).add(f"{kind.__module__}.{kind.__qualname__}")


def on_record() -> dict[str, dict[str, list[str]]]:
    """For manifests: the classes that came with each model, by name; empty where none did."""
    return {"custom_code": {model: sorted(names) for model, names in _classes.items()}} if _classes else {}


def refusal(name: str, error: BaseException) -> str | None:
    """What to tell of a model that was not loaded because it would have run code; None for other failures."""
    said = f"{error} {error.__cause__ or ''}"
    if "trust_remote_code" in said:
        return f"{name} brings code of its own, which would run here. If you have read it and trust it, add {FLAG}."
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in said or "Weights only load failed" in said:
        return (
            f"{name} holds a pickle that builds more than tensors, which could run any code, so it was not opened. "
            "Where you trust it, save it as safetensors and name that."
        )
    return None
