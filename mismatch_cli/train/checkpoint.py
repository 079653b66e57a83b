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
_KEPT = 2
_STATE, _TENSORS, _NAMES = "state.json", "state", "step-" + 6 * "[0-9]"
_EARLIER = "state.pt"
_ALONE = "shard-00001-model-00001-of-00001.safetensors"  # as torch's writer names it


def trained_weights(model: Any) -> dict[str, Tensor]:
    """The weights that training changes, by name."""
    named = model.named_parameters()
    return {name: weight for name, weight in named if weight.requires_grad}


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
    """This rank's parts of such copies, in CPU memory, once `load` has filled `room`."""
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
            files = {
                path.name: path.stat().st_size for path in sorted((temporary / _TENSORS).iterdir())
            }
            state = {"step": step, "ranks": world.size, "files": files, **facts}
            (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
    if world.first:
        for old in _checkpoints(run_folder)[:-_KEPT]:
            shutil.rmtree(old)


@contextmanager
def _shared(folder: Path, world: World) -> Iterator[Path]:
    """A temporary folder that the first rank makes, and renames once all ranks have written into
    it.
    """
    if not world.first:
        yield Path(world.told(""))
        world.barrier()
        return
    with replacing_folder(folder) as temporary:
        yield Path(world.told(str(temporary)))
        world.barrier()


def _write_tensors(tensors: Mapping[str, Tensor], target: Path, folder: Path, world: World) -> None:
    if world.size == 1:  # torch's writer makes a copy of everything in memory first
        target.mkdir()
        try:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, target / _ALONE
            )
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
        raise could_not_write(folder, next(iter(error.failures.values()))[0]) from error  # type: ignore[arg-type]


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
    found = _checkpoints(run_folder)
    if not found:
        return None
    how = "Delete it, then --resume continues from the one before."
    if len(found) < 2:
        how = "Start again in another --output."
    damaged = MismatchError(f"{found[-1]} is damaged. {how}")
    if (found[-1] / _EARLIER).is_file():
        return _earlier(found[-1], damaged)
    folder = found[-1] / _TENSORS
    try:
        facts = parse_json((found[-1] / _STATE).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in facts["files"]}
    except PermissionError as error:
        raise denied(error.filename) from error
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise damaged from error
    except OSError as error:
        raise MismatchError(
            f"{error.filename} cannot be read now ({error.strerror}). Check its file system."
        ) from error
    if sizes != facts["files"]:
        raise damaged

    def load(tensors: Mapping[str, Tensor]) -> None:
        from torch.distributed import checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(folder))
        try:
            with _quiet():
                dcp.load(dict(tensors), storage_reader=reader, no_dist=world.size == 1)
        except (
            Exception,
            dcp.CheckpointException,
        ) as error:  # safetensors' and torch's share no base class
            for name in facts["files"]:
                if not os.access(folder / name, os.R_OK):
                    raise denied(folder / name) from error
            raise damaged from error

    return Checkpoint(found[-1], facts, load)


def _earlier(folder: Path, damaged: MismatchError) -> Checkpoint:
    """A checkpoint of an earlier version: lists of tensors, in the order of the model's
    parameters.
    """
    try:
        state: dict[str, Any] = torch.load(folder / _EARLIER, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own errors share no base class
        raise damaged from error
    learner, sync = state["learner"], state["sync"]
    moments = learner["optimizer"]["state"]
    kept: dict[str, list[Tensor]] = {"weight": learner["masters"], "before": sync["before"] or []}
    kept |= {
        kind: [moments[i][kind] for i in sorted(moments)] for kind in ("exp_avg", "exp_avg_sq")
    }

    def load(tensors: Mapping[str, Tensor]) -> None:
        wanted: dict[str, list[Tensor]] = defaultdict(list)
        for name, tensor in tensors.items():
            wanted[name.partition(".")[0]].append(tensor)
        for kind, found in wanted.items():
            for tensor, saved in zip(found, kept[kind], strict=True):
                fill_weight(tensor, saved)

    facts = {
        "step": int(state["step"]),
        "learner": {"version": learner["version"], "loss_scale": learner["loss_scale"]},
        "sync": {"before": sync["before"] is not None, "gap": sync["gap"]},
        "judge": state["judge"],
    }
    return Checkpoint(folder, facts, load)


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
        lines = [
            line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step
        ]
        write_atomically(path, "".join(f"{line}\n" for line in lines))
        if lines:
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
    steps = (
        [_step_of(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )
    return int(max((step for step in steps if step < float("inf")), default=0))


def _checkpoints(run_folder: Path) -> list[Path]:
    """The complete checkpoints, in order; a copy that the user has renamed is not among them,
    and stays.
    """
    found = (run_folder / "checkpoints").glob(_NAMES)
    return sorted(
        path for path in found if (path / _STATE).is_file() or (path / _EARLIER).is_file()
    )


def _step_of(line: str) -> float:
    """The step of a line; infinity for an unfinished line, which is always cut."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
