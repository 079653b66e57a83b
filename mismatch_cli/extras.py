"""Optional dependencies, and the command that installs them: `pip install 'mismatch-cli[hf]'`."""

import importlib.util

from mismatch_cli.errors import MismatchError

# The modules of each extra in pyproject.toml; [cpu] and [vllm] include those of [hf]. An engine whose library is an
# extra has the name of that extra.
EXTRAS = {
    "hf": (
        *("torch", "transformers", "huggingface_hub", "peft", "safetensors"),
        *("datasets", "math_verify", "aiohttp"),
    ),
    "vllm": ("vllm",),
    "pandas": ("pandas",),
    "ray": ("ray",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),  # mlflow-skinny or mlflow
}
_LINES = {
    "hf": "pip install 'mismatch-cli[hf]'",
    **{
        extra: f"pip install 'mismatch-cli[{extra}]'"
        for extra in ("pandas", "ray", "trackio", "wandb", "tensorboard", "mlflow")
    },
    "vllm": "pip install 'mismatch-cli[cpu]' (no GPU) or pip install 'mismatch-cli[vllm]' (CUDA), or sample with the "
    "Hugging Face model: --engine hf",
}


def not_installed(error: BaseException, who: str) -> str | None:
    """The message for an import that failed because an extra is not installed; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return extra and f"{who} needs {module}, which is not installed. Install it with: {_LINES[extra]}"


def require(extra: str, who: str) -> None:
    """A `MismatchError` if a module of an extra is not installed; call it before creating folders or importing."""
    for module in EXTRAS.get(extra, ()):
        if importlib.util.find_spec(module) is None:
            raise MismatchError(not_installed(ModuleNotFoundError(name=module), who))
