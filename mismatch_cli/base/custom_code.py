"""Code that comes with a model: it runs only if the user allows it for this command, and is then
recorded.
"""

import pickle
from typing import Any

FLAG = "--trust-remote-code"
_LOADED_FROM = "transformers_modules."  # the package into which transformers loads models' code
_allowed = False
_classes: dict[str, set[str]] = {}  # by model: the names of classes loaded from its code


def allow(yes: bool) -> None:
    """Set for this command whether models may run their own code."""
    global _allowed
    _allowed = yes
    _classes.clear()


def allowed() -> bool:
    """Whether the user lets models run their own code in this command."""
    return _allowed


def loading() -> dict[str, bool]:
    """Arguments for every `from_pretrained`, which would otherwise ask and read an answer from
    stdin.
    """
    import transformers.dynamic_module_utils

    # Without the argument transformers asks, and a `y` on stdin would run the model's code.
    # With no time for an answer it refuses, also where libraries load something themselves.
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    return {"trust_remote_code": _allowed}


def note(model: str, *objects: Any) -> None:
    """Record the classes of those objects that come from the model's own code."""
    for kind in map(type, objects):
        if kind.__module__.startswith(_LOADED_FROM):
            _classes.setdefault(model, set()).add(f"{kind.__module__}.{kind.__qualname__}")


def on_record() -> dict[str, dict[str, list[str]]]:
    """For manifests: the classes that came with each model, by model; empty if none did."""
    if not _classes:
        return {}
    return {"custom_code": {model: sorted(names) for model, names in _classes.items()}}


def refusal(name: str, error: BaseException) -> str | None:
    """The message for a model that was not loaded because it would run code; None for other
    failures.
    """
    reason = f"{error} {error.__cause__ or ''}"
    if "trust_remote_code" in reason:
        return (
            f"{name} contains its own code, which would run here. If you have read it and trust "
            f"it, add {FLAG}."
        )
    is_pickle = isinstance(error, pickle.UnpicklingError)
    # torch raises other errors too, and only their text says that a pickle was the reason.
    if is_pickle or "weights_only" in reason or "Weights only load failed" in reason:
        return (
            f"{name} contains a pickle of more than tensors, which could run any code, so it was "
            "not opened. If you trust it, save it as safetensors and name that."
        )
    return None
