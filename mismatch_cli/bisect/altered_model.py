"""The trainer's model with some tensors, or one configuration value, taken from the engine.

It is a folder of links to the trainer's files; only the altered files are new, so that loading it
renames, fuses and ties as usual.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.text import parse_json
from mismatch_cli.models.saved_tensors import (
    INDEX,
    SINGLE,
    SavedTensors,
    model_folder,
    read_tensor,
    tensor_names,
    tied_names,
)
from mismatch_cli.trace.files import replacing, replacing_folder

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
_BUFFERED = 1 << 28  # bytes of tensors to collect before writing a file
# transformers reads every tensor of every file that an index names; of two with one name, the file
# whose name sorts last counts. So the engine's files begin with ~, which sorts after all letters.
_ENGINE_FILE, _TRAINER_FILE = "~engine-{:05d}.safetensors", "trainer-{}"


class TensorWriter:
    """Writes tensors to a folder as they arrive, in files of 256 MiB; without a folder it drops
    them.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._written = 0

    def __enter__(self) -> TensorWriter:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in _engine_files(self._folder):
                old.unlink()
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        if self._folder is None:
            return
        # safetensors refuses tensors that share memory, as tied ones do: each is copied.
        self._waiting[name] = tensor.detach().cpu().contiguous().clone()
        if sum(waiting.nbytes for waiting in self._waiting.values()) >= _BUFFERED:
            self._write()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._waiting and kind is None:
            self._write()

    def _write(self) -> None:
        assert self._folder is not None
        self._written += 1
        _save(self._waiting, self._folder / _ENGINE_FILE.format(self._written))
        self._waiting = {}


def _engine_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("~engine-*.safetensors"))


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, {"format": "pt"})


def folder_with(trainer: str, engine: Path, names: Collection[str], into: Path) -> Path:
    """A model folder like the trainer's, with these tensors taken from those `TensorWriter` wrote to
    the folder `engine`.

    Tensors tied to one of them, but not named themselves, keep the trainer's values.
    """
    saved = SavedTensors(trainer)
    _refuse_pickles(saved)
    own_files = {path.name: path for path in saved.files.values()}
    file_of = _files_of_tensors(engine)
    untied = _untied(saved, names)
    with replacing_folder(into) as folder:
        _link(saved.folder, folder, leave_out=(INDEX, SINGLE, *own_files))
        for name, path in own_files.items():
            (folder / _TRAINER_FILE.format(name)).symlink_to(path.resolve())
        with TensorWriter(folder) as replaced:
            for name in names:
                replaced.add(name, read_tensor(file_of[name], name))
            for name, source in untied.items():
                replaced.add(name, saved.read(source))
        _write_index(folder, saved)
    return into


def _write_index(folder: Path, saved: SavedTensors) -> None:
    """Write the index of the trainer's tensors, and of those that replace them."""
    files = {name: _TRAINER_FILE.format(path.name) for name, path in saved.files.items()}
    files |= {name: path.name for name, path in _files_of_tensors(folder).items()}
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _refuse_pickles(saved: SavedTensors) -> None:
    if any(path.suffix == ".bin" for path in saved.files.values()):
        raise MismatchError(
            f"{saved.model} stores its weights as pickles, whose tensors cannot be replaced one by "
            "one. Save it again with save_pretrained, which writes safetensors."
        )


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """By name, the file of each tensor that `TensorWriter` wrote to a folder."""
    files: dict[str, Path] = {}
    for path in _engine_files(folder):
        files |= dict.fromkeys(tensor_names(path), path)
    return files


def _untied(saved: SavedTensors, replaced: Collection[str]) -> dict[str, str]:
    """Tensors that the trainer's folder lacks because they are tied to a replaced one, each with
    the tensor that has its values.
    """
    untied = {}
    for name, source in tied_names(saved.model).items():
        is_lost = source in replaced and source in saved.files
        if is_lost and name not in replaced and name not in saved.files:
            untied[name] = source
    return untied


def folder_with_config(trainer: str, changes: Mapping[str, Any], into: Path) -> Path:
    """A model folder like the trainer's, with these configuration values changed; None removes a
    value.
    """
    source = model_folder(trainer)
    config = parse_json((source / CONFIG).read_text(encoding="utf-8"))
    for key, value in changes.items():
        _section(config, key)[key] = value
    with replacing_folder(into) as folder:
        _link(source, folder, leave_out=(CONFIG,))
        (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return into


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The section that holds a setting of the text model, in a configuration that may cover
    several models.
    """
    text = config.get("text_config")
    if isinstance(text, dict) and key not in config:
        return text
    return config


def _link(source: Path, folder: Path, leave_out: Collection[str]) -> None:
    for path in source.iterdir():
        if path.is_file() and path.name not in leave_out:
            (folder / path.name).symlink_to(path.resolve())
