"""The tensors of a saved model, read one at a time: names and shapes first, values memory-mapped
on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.base.text import parse_json
from mismatch_cli.models.loading import check_model_folder, load_config
from mismatch_cli.models.torch_settings import prepare_imports

if TYPE_CHECKING:
    import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED_INDEX, _PICKLED = "pytorch_model.bin.index.json", "pytorch_model.bin"
# What a folder of the hub needs to be loaded; not the weights of other frameworks.
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.py", "*.jinja"]


class SavedTensors:
    """The tensors in a model's folder: `shapes` by name, and `read`, which maps one tensor from
    its file.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.folder = model_folder(model)
        self.files: Mapping[str, Path] = {}  # by tensor name
        with _readable(model):
            self.files = _files_of(self.folder)
            self.shapes = {name: self._shape(name) for name in self.files}

    def read(self, name: str) -> torch.Tensor:
        with _readable(self.model):
            return read_tensor(self.files[name], name)

    def _shape(self, name: str) -> tuple[int, ...]:
        path = self.files[name]
        mapped = _mapped(path)
        if path.suffix == ".bin":
            return tuple(mapped[name].shape)
        return tuple(mapped.get_slice(name).get_shape())


def tensor_names(path: Path) -> list[str]:
    """The names of the tensors in one file."""
    return list(_mapped(path).keys())


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """One tensor of a file, memory-mapped."""
    mapped = _mapped(path)
    tensor: torch.Tensor = mapped[name] if path.suffix == ".bin" else mapped.get_tensor(name)
    return tensor


def tied_names(model: str) -> dict[str, str]:
    """The tied tensors of a model: name → the name that holds its values, such as the head's →
    the embeddings'.
    """
    tied = dict(_empty(model).all_tied_weights_keys)
    # In both directions: the folder may hold either of the two names.
    return tied | {source: target for target, source in tied.items()}


def computed_names(model: str) -> frozenset[str]:
    """The tensors that transformers computes with, as its own model names them; a folder may
    hold others, and may fuse or split them.
    """
    return frozenset(_empty(model).state_dict())


def _empty(model: str) -> Any:
    """The model without its weights."""
    prepare_imports()
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(model), **custom_code.loading())


def model_folder(model: str) -> Path:
    """The local folder of a model; the weights of a hub name come from the cache, or are
    fetched.
    """
    check_model_folder(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))
    except Exception as error:  # hub clients raise all kinds of errors
        raise MismatchError(
            f"{model} is not a local folder, and the Hugging Face hub cannot provide it "
            f"({first_line(error)}). Check the name."
        ) from error


@contextmanager
def _readable(model: str) -> Iterator[None]:
    try:
        yield
    except MismatchError:
        raise
    except Exception as error:  # safetensors and torch raise all kinds of errors for broken files
        raise MismatchError(
            f"The weights of {model} cannot be read ({type(error).__name__}: {first_line(error)}). "
            "Save the model with save_pretrained, and try again."
        ) from error


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor: by the index if there is one, as transformers and vLLM do."""
    for index, single in ((INDEX, SINGLE), (_PICKLED_INDEX, _PICKLED)):
        if (folder / single).is_file():
            return dict.fromkeys(tensor_names(folder / single), folder / single)
        if (folder / index).is_file():
            listed = parse_json((folder / index).read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in listed.items()}
    raise MismatchError(
        f"{folder} contains neither {SINGLE} nor {INDEX}. Save the model with save_pretrained, "
        "and try again."
    )


def _mapped(path: Path) -> Any:
    # Tensors are read one at a time, and opening a file takes longer than reading one of them.
    return _mapped_once(str(path), path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _mapped_once(path: str, changed: int) -> Any:  # noqa: ARG001 - a rewritten file is opened again
    if path.endswith(".bin"):
        import torch

        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    from safetensors import safe_open

    return safe_open(path, framework="pt")
