"""Reading a saved `DataProto` of verl as data: a pickle of which nothing is called but what rebuilds arrays.

`DataProto.save_to_disk` pickles a pair of dicts: tensors, as `torch.save` or numpy packed them, and arrays of objects.
Here each name in the pickle must be one of a few, which stand for containers of data; any other is refused.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.importers import _pickled_numpy, _torch_file

_BEGINNING = 256  # bytes, which name the class
_NESTED = ("<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>")


def is_saved(path: Path) -> bool:
    """Whether a pickle begins as that of a DataProto does."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    return b"verl" in beginning and b"DataProto" in beginning


def load(path: Path) -> dict[str, Any]:
    """Tensors [S, …] (or a list of S) and arrays of S objects by their names, and `meta_info`.

    A `MismatchError` for a file that is cut off, and for one that holds more than data.
    """
    try:
        with path.open("rb") as file:
            saved = _Reader(file, path).load()
        if not isinstance(saved, _Saved):
            raise ValueError("it is no DataProto")
        packed, arrays, meta = _pickled_numpy.with_arrays(saved.state)
        tensors = _of_torch(packed, path) if isinstance(packed, bytes) else _of_numpy(packed)
        return {**dict(arrays), **tensors, "meta_info": meta}
    except MismatchError:
        raise
    except Exception as error:  # what a broken pickle raises is up to its bytes
        if isinstance(error, MemoryError):
            raise
        _torch_file.check_memory(error)
        raise MismatchError(
            f"{path} is not a DataProto that verl saved, or broken ({first_line(error)}). "
            "Copy it again, or name other files only."
        ) from error


class _Saved:
    """In the place of verl's class: its state and nothing else."""

    state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Knows the few names that such a file needs; data comes of each of them, and no code runs."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("verl.protocol", "DataProto"):
            return _Saved
        if (module, name) == ("torch", "Size"):
            return tuple
        if found := _pickled_numpy.NAMES.get(f"{module}.{name}"):
            return found
        raise _torch_file.NeedsItsFramework(self._path, f"is a pickle that names {module}.{name}, which could run code")


def _of_torch(data: bytes, path: Path) -> dict[str, Any]:
    """What `torch.save` wrote of a consolidated TensorDict: one storage, and where each tensor lies in it."""
    import torch

    name = "tensordict._reductions._rebuild_tensordict_files_consolidated"
    try:
        with torch.serialization.safe_globals([(_consolidated, name)]):
            found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise _torch_file.NeedsItsFramework(path, "holds more than tensors, which could run any code") from error
    return dict(found)


def _consolidated(metadata: dict[str, Any], storage: Any) -> dict[str, Any]:
    leaves = {key: _tensor(storage[start:stop], dtype, shape) for key, (dtype, shape, start, stop, _) in
              metadata["leaves"].items()}  # fmt: skip
    whole = {key: value for key, value in leaves.items() if not key.startswith(_NESTED)}
    for key in leaves:
        if key.startswith(_NESTED[1]):
            name = key.removeprefix(_NESTED[1])
            whole[name] = leaves[_NESTED[0] + name].tensor_split(leaves[key][1:-1].cpu())
    return whole


def _of_numpy(packed: Any) -> dict[str, Any]:
    """The same with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy: each tensor by itself, as bytes."""
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
    """A tensor of some bytes, which may have padding behind them."""
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype} is no type of numbers")
    count = int(np.prod([int(size) for size in shape], dtype=np.int64))
    return data[: count * kind.itemsize].clone().view(kind).view(*map(int, shape))
