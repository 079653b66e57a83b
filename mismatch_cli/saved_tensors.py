"""The tensors of a saved model, read one at a time: names and shapes first, values mapped from the file when asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.models import check_model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED_INDEX, _PICKLED = "pytorch_model.bin.index.json", "pytorch_model.bin"


class SavedTensors:
    """What a model's folder holds: `shapes` by name, and `read`, which maps one tensor from its file."""

    def __init__(self, model: str) -> None:
        self.model, self.folder = model, model_folder(model)
        self.files: Mapping[str, Path] = {}  # by tensor
        with _readable(model):
            self.files = _files_of(self.folder)
            self.shapes = {name: self._shape(name) for name in self.files}

    def read(self, name: str) -> torch.Tensor:
        path = self.files[name]
        with _readable(self.model):
            if path.suffix == ".bin":
                return _pickled(path)[name]
            return _opened(path).get_tensor(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        path = self.files[name]
        if path.suffix == ".bin":
            return tuple(_pickled(path)[name].shape)
        return tuple(_opened(path).get_slice(name).get_shape())


def model_folder(model: str) -> Path:
    """Where a model lies on this machine; the weights of a hub name are those that the cache has, or fetched."""
    check_model_folder(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.py", "*.jinja"]))
    except Exception as error:  # a hub client fails in as many ways as there are networks
        raise MismatchError(
            f"{model} is not a folder here, and the Hugging Face hub did not give it ({first_line(error)}). "
            "Check the name."
        ) from error


@contextmanager
def _readable(model: str) -> Iterator[None]:
    try:
        yield
    except MismatchError:
        raise
    except Exception as error:  # safetensors and torch fail in as many ways as there are broken files
        raise MismatchError(
            f"The weights of {model} cannot be read ({type(error).__name__}: {first_line(error)}). "
            "Save the model with save_pretrained, and try again."
        ) from error


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor: as the index says where there is one, which is also what transformers and vLLM read."""
    for index, single in ((INDEX, SINGLE), (_PICKLED_INDEX, _PICKLED)):
        if (folder / single).is_file():
            path = folder / single
            names = _pickled(path) if path.suffix == ".bin" else _opened(path).keys()
            return dict.fromkeys(names, path)
        if (folder / index).is_file():
            listed = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in listed.items()}
    raise MismatchError(
        f"{folder} holds neither {SINGLE} nor {INDEX}. Save the model with save_pretrained, and try again."
    )


@lru_cache(maxsize=4)
def _mapped(path: str, changed: int) -> Any:  # noqa: ARG001 - a file that is written again is opened again
    if path.endswith(".bin"):
        import torch

        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    from safetensors import safe_open

    return safe_open(path, framework="pt").__enter__()


def _opened(path: Path) -> Any:
    return _mapped(str(path), os.stat(path).st_mtime_ns)


_pickled = _opened
