"""Checkpoints: folders that appear atomically, written by all ranks and readable by any number of
them.

Tensors are in safetensors files, one for each rank's parts (torch's distributed checkpoints);
everything else is in `state.json`, which is written last and lists those files. Checkpoints of
earlier versions, a `state.pt` each, can be read too.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mismatch_cli.base.errors import MismatchError, denied
from mismatch_cli.base.text import parse_json
from mismatch_cli.models.sharding import fill_weight, local_shard, shard_like
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.trace.files import could_not_write, replacing_folder, write_atomically
from mismatch_cli.trace.ownership import remove_results, remove_trace
from mismatch_cli.train.metrics_table import METRICS_TABLE, renew_table

METRICS_FILE = "metrics.jsonl"
_RETAINED = 2  # checkpoints: a damaged newest one has another before it
_STATE, _TENSORS = "state.json", "state"
_NAMES = "step-" + 6 * "[0-9]"  # a pattern: a copy that the user has renamed does not match
_EARLIER = "state.pt"
_ALONE = "shard-00001-model-00001-of-00001.safetensors"  # as torch's writer names it


def trained_weights(model: Any) -> dict[str, Tensor]:
    """The weights that training changes, by name."""
    weights = model.named_parameters()
    return {name: weight for name, weight in weights if weight.requires_grad}


def by_name(
    prefix: str, weights: Mapping[str, Tensor], parts: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Copies of this rank's parts of weights, under their names in a checkpoint."""
    named = {}
    for (name, weight), part in zip(weights.items(), parts, strict=True):
        named[f"{prefix}.{name}"] = shard_like(weight, part)
    return named


def loaded(
    prefix: str,
    weights: Mapping[str, Tensor],
    room: Iterable[Tensor],
    load: Callable[[dict[str, Tensor]], None],
) -> list[Tensor]:
    """This rank's parts of copies that `by_name` named, in CPU memory; `load` fills `room`."""
    named = by_name(prefix, weights, room)
    load(named)
    return [local_shard(tensor).to("cpu") for tensor in named.values()]


def save_checkpoint(
    run_folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    beside: Callable[[Path], None] = lambda _: None,
    world: World = ALONE,
) -> None:
    """Write `checkpoints/step-N` under a temporary name and rename it; the two newest are kept.
    Every rank calls it.

    `facts` must be valid JSON. `beside` may write more files into the folder, on the first rank.
    """
    folder = run_folder / "checkpoints" / f"step-{step:06d}"
    with _shared(folder, world) as temporary:
        _write_tensors(tensors, temporary / _TENSORS, folder, world)
        if world.first:
            beside(temporary)
            paths = sorted((temporary / _TENSORS).iterdir())
            files = {path.name: path.stat().st_size for path in paths}
            state = {"step": step, "ranks": world.size, "files": files, **facts}
            (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
    if world.first:
        for old in _checkpoints(run_folder)[:-_RETAINED]:
            shutil.rmtree(old)


@contextmanager
def _shared(folder: Path, world: World) -> Iterator[Path]:
    """A temporary folder that the first rank makes, and renames once all ranks have written into
    it.
    """
    if not world.first:
        yield Path(world.broadcast(""))
        world.barrier()
        return
    with replacing_folder(folder) as temporary:
        yield Path(world.broadcast(str(temporary)))
        world.barrier()


def _write_tensors(tensors: Mapping[str, Tensor], target: Path, folder: Path, world: World) -> None:
    """Write this rank's parts into files in `target`; an error names `folder`, the checkpoint."""
    # torch's writer copies everything in memory first, which a single rank need not.
    if world.size == 1:
        target.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, target / _ALONE)
            with open(target / _ALONE, "rb") as written:
                os.fsync(written.fileno())
        except (OSError, SafetensorError) as error:
            raise could_not_write(folder, error) from error
        return
    from torch.distributed import checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(target), save_distributed=True)
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:  # not an `Exception`; has those of the failed ranks
        first, _ = next(iter(error.failures.values()))
        raise could_not_write(folder, first) from error  # type: ignore[arg-type]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its facts, and `load`, which fills tensors of the same names in
    place.
    """

    folder: Path
    facts: dict[str, Any]
    load: Callable[[Mapping[str, Tensor]], None]

    @property
    def step(self) -> int:
        return int(self.facts["step"])


def latest_checkpoint(run_folder: Path, world: World = ALONE) -> Checkpoint | None:
    """The newest checkpoint; None without one, a `MismatchError` if it is damaged."""
    folders = _checkpoints(run_folder)
    if not folders:
        return None
    newest = folders[-1]
    how = "Delete it, then --resume continues from the one before."
    if len(folders) < 2:
        how = "Start again in another --output."
    damaged = MismatchError(f"{newest} is damaged. {how}")
    if (newest / _EARLIER).is_file():
        return _read_earlier(newest, damaged)
    facts = _read_facts(newest, damaged)
    load = partial(_load_tensors, newest / _TENSORS, facts["files"], damaged, world)
    return Checkpoint(newest, facts, load)


def _read_facts(checkpoint: Path, damaged: MismatchError) -> dict[str, Any]:
    """What `state.json` says; an error unless every file that it lists has its size."""
    folder = checkpoint / _TENSORS
    try:
        facts: dict[str, Any] = parse_json((checkpoint / _STATE).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in facts["files"]}
    except PermissionError as error:
        raise denied(error.filename) from error
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise damaged from error
    # A network file system that is away for a moment damages nothing.
    except OSError as error:
        raise MismatchError(
            f"{error.filename} cannot be read now ({error.strerror}). Check its file system."
        ) from error
    if sizes != facts["files"]:
        raise damaged
    return facts


def _load_tensors(
    folder: Path,
    files: Iterable[str],
    damaged: MismatchError,
    world: World,
    tensors: Mapping[str, Tensor],
) -> None:
    """Fill tensors in place with those of the same names in a checkpoint's files."""
    from torch.distributed import checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=world.size == 1)
    # safetensors' and torch's errors share no base class.
    except (Exception, dcp.CheckpointException) as error:
        for name in files:
            if not os.access(folder / name, os.R_OK):
                raise denied(folder / name) from error
        raise damaged from error


def _read_earlier(folder: Path, damaged: MismatchError) -> Checkpoint:
    """A checkpoint of an earlier version: lists of tensors, in the order of the model's
    parameters.
    """
    try:
        state: dict[str, Any] = torch.load(folder / _EARLIER, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own errors share no base class
        raise damaged from error
    learner, sync = state["learner"], state["sync"]
    saved: dict[str, list[Tensor]] = {"weight": learner["masters"], "before": sync["before"] or []}
    # AdamW's state is by the number of the parameter, and its order in the file is not promised.
    moments = [moment for _, moment in sorted(learner["optimizer"]["state"].items())]
    for kind in ("exp_avg", "exp_avg_sq"):
        saved[kind] = [moment[kind] for moment in moments]

    facts = {
        "step": int(state["step"]),
        "learner": {"version": learner["version"], "loss_scale": learner["loss_scale"]},
        "sync": {"before": sync["before"] is not None, "gap": sync["gap"]},
        "judge": state["judge"],
    }
    return Checkpoint(folder, facts, partial(_fill_by_kind, saved))


def _fill_by_kind(saved: Mapping[str, list[Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors named `kind.parameter` in place; saved ones have no name besides their kind."""
    wanted: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        wanted[name.partition(".")[0]].append(tensor)
    for kind, of_kind in wanted.items():
        for tensor, saved_tensor in zip(of_kind, saved[kind], strict=True):
            fill_weight(tensor, saved_tensor)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch, which warns a single process at every checkpoint that it is alone."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def cut_back(run_folder: Path, step: int, say: Callable[[str], None] = lambda _: None) -> None:
    """Remove everything after `step`: lines of metrics, which the table copies, and traces of
    steps.
    """
    (run_folder / METRICS_TABLE).unlink(missing_ok=True)
    path = run_folder / METRICS_FILE
    if path.is_file():
        retained = [line for line in _lines(path) if _step_of(line) <= step]
        write_atomically(path, "\n".join([*retained, ""]))
        if retained:
            renew_table(path, say)
    for folder in (run_folder / "traces").glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdecimal() and int(number) > step:  # a user's copy has a different name
            remove_trace(folder)
            remove_results(folder)  # reports on it
            with suppress(OSError):  # the user has put files there
                folder.rmdir()


def last_step(run_folder: Path) -> int:
    """The newest step on record; 0 if there is none."""
    path = run_folder / METRICS_FILE
    if not path.is_file():
        return 0
    steps = map(_step_of, _lines(path))
    return int(max((step for step in steps if step < inf), default=0))


def _checkpoints(run_folder: Path) -> list[Path]:
    """The complete checkpoints, in order; a copy that the user has renamed is not among them,
    and stays.
    """
    folders = (run_folder / "checkpoints").glob(_NAMES)
    return sorted(filter(_is_complete, folders))


def _is_complete(checkpoint: Path) -> bool:
    """Whether it has the file that is written last, of this version or an earlier one."""
    return (checkpoint / _STATE).is_file() or (checkpoint / _EARLIER).is_file()


def _lines(path: Path) -> list[str]:
    """The lines of metrics; bytes that are no text make a damaged one, which is cut."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _step_of(line: str) -> float:
    """The step of a line; infinity for an unfinished line, which is always cut."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return inf
