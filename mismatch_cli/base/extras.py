"""Optional dependencies, and the command that installs them: `pip install 'mismatch-cli[hf]'`."""

import importlib.util
import sys
from pathlib import Path

from mismatch_cli.base.errors import MismatchError

# The modules of each extra in pyproject.toml; [cpu] and [vllm] include those of [hf]. An engine
# whose library is an extra has the name of that extra.
EXTRAS = {
    "hf": (
        *("torch", "transformers", "huggingface_hub", "peft", "safetensors"),
        *("datasets", "math_verify", "aiohttp"),
    ),
    "vllm": ("vllm",),
    "ray": ("ray",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),  # mlflow-skinny or mlflow
}


def _line(extra: str) -> str:
    """What to type for an extra, in the environment of whoever installed this program: pip's,
    uv's or pipx's.
    """
    if extra == "vllm":
        cpu, cuda = _installs("cpu"), _installs("vllm")
        return (
            f"{cpu} (no GPU) or {cuda} (CUDA), or sample with the Hugging Face model: --engine hf"
        )
    return _installs(extra)


def _installs(extra: str) -> str:
    receipts = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}
    found = (
        installs for receipt, installs in receipts.items() if Path(sys.prefix, receipt).is_file()
    )
    return f"{next(found, 'pip install')} '{_source()}[{extra}]'"


def _source() -> str:
    """The checkout that was installed, if it is still there; otherwise the name on the package
    index.
    """
    import importlib.metadata
    import json
    from urllib.parse import unquote, urlsplit

    try:
        told = json.loads(
            importlib.metadata.distribution("mismatch-cli").read_text("direct_url.json") or "{}"
        )
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "mismatch-cli"
    folder = Path(unquote(urlsplit(told.get("url", "")).path))
    is_checkout = told.get("dir_info") == {} and (folder / "pyproject.toml").is_file()
    return str(folder) if is_checkout else "mismatch-cli"


def not_installed(error: BaseException, who: str) -> str | None:
    """The message for an import that failed because an extra is not installed; None for any
    other error.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return (
        extra and f"{who} needs {module}, which is not installed. Install it with: {_line(extra)}"
    )


def require(extra: str, who: str) -> None:
    """A `MismatchError` if a module of an extra is not installed; call it before creating
    folders or importing.
    """
    for module in EXTRAS.get(extra, ()):
        if importlib.util.find_spec(module) is None:
            raise MismatchError(not_installed(ModuleNotFoundError(name=module), who))
