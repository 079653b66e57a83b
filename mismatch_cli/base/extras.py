"""Optional dependencies, and the command that installs them: `pip install 'mismatch-cli[hf]'`."""

import importlib.util
import sys
from pathlib import Path

from mismatch_cli.base.errors import MismatchError

# The modules of each extra in pyproject.toml; [cpu] and [vllm] include those of [hf].
# An engine whose library is an extra has the name of that extra.
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
# What uv and pipx leave in the environments that they make, and how each installs.
_RECEIPTS = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}


def not_installed(error: BaseException, who: str) -> str | None:
    """The message for an import that failed because an extra is not installed; None for any
    other error.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return (
                f"{who} needs {module}, which is not installed. Install it with: {_advice(extra)}"
            )
    return None


def require(extra: str, who: str) -> None:
    """A `MismatchError` if a module of an extra is not installed; call it before creating
    folders or importing.
    """
    for module in EXTRAS.get(extra, ()):
        if importlib.util.find_spec(module) is None:
            raise MismatchError(not_installed(ModuleNotFoundError(name=module), who))


def _advice(extra: str) -> str:
    """What to type for an extra."""
    if extra != "vllm":
        return _command(extra)
    return (
        f"{_command('cpu')} (no GPU) or {_command('vllm')} (CUDA), or sample with the Hugging Face "
        "model: --engine hf"
    )


def _command(extra: str) -> str:
    """The command that adds an extra where this program is installed, by what installed it."""
    return f"{_installer()} '{_source()}[{extra}]'"


def _installer() -> str:
    for receipt, installer in _RECEIPTS.items():
        if Path(sys.prefix, receipt).is_file():
            return installer
    return "pip install"


def _source() -> str:
    """The checkout that was installed, if it is still there; otherwise the name on the package
    index.
    """
    import importlib.metadata
    import json
    from urllib.parse import unquote, urlsplit

    try:
        distribution = importlib.metadata.distribution("mismatch-cli")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "mismatch-cli"
    folder = Path(unquote(urlsplit(origin.get("url", "")).path))
    # pip writes `dir_info` for a folder alone, and puts `editable` into it for such a link.
    is_checkout = origin.get("dir_info") == {} and (folder / "pyproject.toml").is_file()
    return str(folder) if is_checkout else "mismatch-cli"
