"""Reads verl's saved `DataProto` as data: a pickle from which only functions that rebuild arrays
are called.

`DataProto.save_to_disk` pickles a pair of dicts: tensors, as `torch.save` or numpy packed them, and
arrays of objects. Each name in the pickle must be one of a few that stand for data containers; any
other is refused.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.frameworks.importing import (
    pickled_numpy,
    torch_file,
)

_BEGINNING = 256  # bytes, which include the name of the class
_NESTED = ("<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>")


def is_saved(path: Path) -> bool:
    """Whether a pickle begins like that of a DataProto."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    return b"verl" in beginning and b"DataProto" in beginning


def load(path: Path) -> dict[str, Any]:
    """Tensors [S, …] (or a list of S) and arrays of S objects by name, and `meta_info`.

    Raises `MismatchError` for a file that is truncated or holds more than data.
    """
    try:
        with path.open("rb") as file:
            saved = _Reader(file, path).load()
        if not isinstance(saved, _Saved):
            raise ValueError("it is not a DataProto")
        packed, arrays, meta = pickled_numpy.with_arrays(saved.state)
        tensors = _of_torch(packed, path) if isinstance(packed, bytes) else _of_numpy(packed)
        return {**dict(arrays), **tensors, "meta_info": meta}
    except MismatchError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        if isinstance(error, MemoryError):
            raise
        torch_file.check_memory(error)
        raise MismatchError(
            f"{path} is broken, or not a DataProto that verl saved ({first_line(error)}). "
            "Copy it again, or leave it out."
        ) from error


class _Saved:
    """Takes the place of verl's class: its state and nothing else."""

    state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Knows the few names that such a file needs; each of them yields data, and no code runs."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("verl.protocol", "DataProto"):
            return _Saved
        if (module, name) == ("torch", "Size"):
            return tuple
        if found := pickled_numpy.NAMES.get(f"{module}.{name}"):
            return found
        raise torch_file.NeedsItsFramework(
            self._path, f"is a pickle that names {module}.{name}, which could run code"
        )


def _of_torch(data: bytes, path: Path) -> dict[str, Any]:
    """Read a consolidated TensorDict from `torch.save`: one storage, and the range of each
    tensor in it.
    """
    import torch

    name = "tensordict._reductions._rebuild_tensordict_files_consolidated"
    try:
        with torch.serialization.safe_globals([(_consolidated, name)]):
            found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise torch_file.NeedsItsFramework(
            path, "holds more than tensors and could run any code"
        ) from error
    return dict(found)


def _consolidated(metadata: dict[str, Any], storage: Any) -> dict[str, Any]:
    leaves = {
        key: _tensor(storage[start:stop], dtype, shape)
        for key, (dtype, shape, start, stop, _) in metadata["leaves"].items()
    }
    whole = {key: value for key, value in leaves.items() if not key.startswith(_NESTED)}
    for key in leaves:
        if key.startswith(_NESTED[1]):
            name = key.removeprefix(_NESTED[1])
            whole[name] = leaves[_NESTED[0] + name].tensor_split(leaves[key][1:-1].cpu())
    return whole


def _of_numpy(packed: Any) -> dict[str, Any]:
    """Read what VERL_DATAPROTO_SERIALIZATION_METHOD=numpy writes: each tensor by itself, as
    bytes.
    """
    _, _, items = packed
    return {
        name: _tensor(_bytes(item[2]), f"torch.{item[0]}", item[1])
        if len(item) == 3
        else [_tensor(_bytes(data), f"torch.{dtype}", shape) for dtype, shape, data in item[1]]
        for name, item in items.items()
    }


def _bytes(data: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor(data: Any, dtype: str, shape: Any) -> Any:
    """A tensor from bytes that may end with padding."""
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype} is not a numeric type")
    count = int(np.prod([int(size) for size in shape], dtype=np.int64))
    return data[: count * kind.itemsize].clone().view(kind).view(*map(int, shape))
