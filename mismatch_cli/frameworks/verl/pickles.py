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
# A nested tensor is saved as leaves with these prefixes.
_VALUES = "<NJT_VALUES>"
_OFFSETS = "<NJT_OFFSETS>"
_LENGTHS = "<NJT_LENGTHS>"  # only where values between the rows belong to none of them
_NESTED = (_VALUES, _OFFSETS, _LENGTHS)


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
    except (MismatchError, MemoryError):
        raise
    except Exception as error:  # a broken pickle can raise anything
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
        path = f"{module}.{name}"
        if path in pickled_numpy.NAMES:
            return pickled_numpy.NAMES[path]
        raise torch_file.NeedsItsFramework(
            self._path, f"is a pickle that names {path}, which could run code"
        )


def _of_torch(data: bytes, path: Path) -> dict[str, Any]:
    """Read a consolidated TensorDict from `torch.save`: one storage, and the range of each
    tensor in it.
    """
    import torch

    name = "tensordict._reductions._rebuild_tensordict_files_consolidated"
    try:
        with torch.serialization.safe_globals([(_consolidated, name)]):
            return dict(torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"))
    except pickle.UnpicklingError as error:
        raise torch_file.NeedsItsFramework(
            path, "holds more than tensors and could run any code"
        ) from error


def _consolidated(metadata: dict[str, Any], storage: Any) -> dict[str, Any]:
    """The tensors by name; a nested one, three leaves of a consolidated TensorDict, as a list."""
    leaves: dict[str, Any] = {}
    for key, (dtype, shape, start, stop, _) in metadata["leaves"].items():
        leaves[key] = _tensor(storage[start:stop], dtype, shape)
    tensors: dict[str, Any] = {}
    for key, tensor in leaves.items():
        if not key.startswith(_NESTED):
            tensors[key] = tensor
        elif key.startswith(_OFFSETS):
            name = key.removeprefix(_OFFSETS)
            values = leaves[_VALUES + name]
            begin_S = tensor[:-1]
            end_S = begin_S + leaves.get(_LENGTHS + name, tensor.diff())
            ranges = zip(begin_S.tolist(), end_S.tolist(), strict=True)
            tensors[name] = [values[begin:end] for begin, end in ranges]
    return tensors


def _of_numpy(packed: Any) -> dict[str, Any]:
    """Read what VERL_DATAPROTO_SERIALIZATION_METHOD=numpy writes: each tensor by itself, as
    bytes.
    """
    _, _, items = packed
    tensors: dict[str, Any] = {}
    for name, item in items.items():
        if len(item) == 3:
            tensors[name] = _of_bytes(*item)
        else:
            tensors[name] = [_of_bytes(*piece) for piece in item[1]]
    return tensors


def _of_bytes(dtype: str, shape: Any, data: Any) -> Any:
    import torch

    # torch warns about a tensor over memory that must not change, as that of bytes.
    return _tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), f"torch.{dtype}", shape)


def _tensor(data: Any, dtype: str, shape: Any) -> Any:
    """A tensor from bytes that may end with padding."""
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype} is not a numeric type")
    sizes = list(map(int, shape))
    count = int(np.prod(sizes, dtype=np.int64))
    return data[: count * kind.itemsize].clone().view(kind).view(*sizes)
