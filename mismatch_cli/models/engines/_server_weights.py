"""New weights for servers: a safetensors file in a folder that they can read, and the version that
they report.

vLLM offers the routes for it in its development mode only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.engines._server_http import RequestRefused, Server, lookup
from mismatch_cli.processes.ranks import World
from mismatch_cli.trace.drafts import remove_unfinished
from mismatch_cli.trace.files import replacing_folder

if TYPE_CHECKING:
    from torch import Tensor

_HEADLESS = ("gemma",)  # families without a separate head in vLLM
_ANSWER, _CHECKSUMS = 2**16, 2**24  # bytes: a word or two; a line for each weight
# SHA-256 of no bytes at all, which vLLM reports for weights that it has packed
_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_FILE = "model.safetensors"
# Prefix of what we remove again: the user's folder may have other files
_PREFIX = "mismatch-cli-weights-"
_START_IN_DEV_MODE = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment"


class SharedWeights:
    """A folder with the newest weights of a model, spread over ranks or not: the first rank writes
    it, and every rank sees it once `publish` returns.

    Every rank calls `publish`, and `remove_older` once all servers have the newest.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder.absolute()
        self._world = world
        self._count = 0  # how often weights were published

    @property
    def version(self) -> str:
        """What a server with these weights reports; empty before any are published."""
        return f"{self._folder}#{self._count}" if self._count else ""

    @property
    def path(self) -> Path:
        """The folder of the newest weights."""
        return self._folder / f"{_PREFIX}{self._count:06d}"

    def publish(self, model: Any) -> None:
        """Write all weights of a model under the next version."""
        from safetensors.torch import save_file

        from mismatch_cli.models.sharding import gather_on_first, saved_state

        state = saved_state(model)
        names = _names_in_vllm(model, state)
        gathered = gather_on_first(state, self._world)
        self._count += 1
        if self._world.first:
            with replacing_folder(self.path) as temporary:
                # safetensors refuses tensors that share their memory, as a tied head does.
                save_file(
                    {name: gathered[name].contiguous().clone() for name in names}, temporary / _FILE
                )
        self._world.barrier()

    async def send_to(self, server: Server, url: str) -> None:
        """Have a server load the published weights; a `MismatchError` if it cannot."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(self.path)}}
        try:
            await server.post("/collective_rpc", load, _ANSWER)
            await server.post("/update_weight_version", {"new_version": self.version}, _ANSWER)
        except RequestRefused as refused:
            raise MismatchError(
                f"{url} cannot load weights (status {refused.status}: {refused.reason}). "
                f"{_START_IN_DEV_MODE}, on a machine that can read the folder."
            ) from refused
        await _check_loaded(server, url, self.version)

    def remove_older(self) -> None:
        """Wait for all ranks, then remove all weights but the newest."""
        self._world.barrier()
        self._remove_all_but(self.path)

    def remove(self) -> None:
        """Remove all weights, and the folder if nothing else is in it."""
        self._remove_all_but(None)
        if self._world.first:
            with suppress(OSError):  # it is not empty, or is gone
                self._folder.rmdir()

    def _remove_all_but(self, newest: Path | None) -> None:
        """Remove the other weights in the folder, including what a killed run has left, finished
        or not.
        """
        if not self._world.first:
            return
        remove_unfinished(self._folder, _PREFIX)
        for path in self._folder.glob(f"{_PREFIX}*"):
            if path != newest:
                with suppress(OSError):  # a folder with other files in it stays
                    (path / _FILE).unlink(missing_ok=True)
                    path.rmdir()


def _names_in_vllm(model: Any, state: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights to send to a server.

    They include a tied head, though folders leave it out: without it vLLM on CPU keeps its old
    head.
    """
    family = str(getattr(model, "learning", model).config.model_type)
    if not family.startswith(_HEADLESS):
        return list(state)
    return [name for name in state if not name.endswith("lm_head.weight")]


async def _check_loaded(server: Server, url: str, version: str) -> None:
    """A `MismatchError` unless a server has this version of the weights and has dropped its
    older cache.
    """
    dropped, _ = await server.post("/reset_prefix_cache", {}, _ANSWER)
    if not lookup(dropped, "success"):
        raise MismatchError(
            f"{url} did not drop its prefix cache, which has keys of the old weights. Is it shared?"
        )
    if await read_version(server) != version:
        raise MismatchError(
            f"{url} does not report which weights it has, or another client sends it weights "
            f"too. {_START_IN_DEV_MODE}."
        )


async def read_version(server: Server) -> str | None:
    """The version label of the server's weights; None if it does not report one."""
    version = lookup(await server.get("/weight_info"), "weight_version")
    return version if isinstance(version, str) else None


async def read_checksums(server: Server) -> dict[str, str]:
    """SHA-256 of each weight of the server, by its name there; empty if it does not report them.

    Weights that vLLM on CPU has packed have the checksum of empty data, which is left out.
    """
    try:
        answer, _ = await server.post("/weight_checker", {"action": "checksum"}, _CHECKSUMS)
    except MismatchError:  # older versions, and several engines behind one URL
        return {}
    checksums = lookup(answer, "checksums")
    if not isinstance(checksums, dict):
        return {}
    return {str(name): str(value) for name, value in checksums.items() if value != _EMPTY}


def check_same_weights(
    first: str, other: str, expected: Mapping[str, str], actual: Mapping[str, str]
) -> None:
    """A `MismatchError` if the checksum of a weight differs from that of the same weight
    elsewhere, or before.
    """
    for name in expected.keys() & actual.keys():
        if expected[name] != actual[name]:
            raise MismatchError(
                f"The weight sync failed: by their checksums, {other} does not have the weights "
                f"of {first} ({name}). Restart both servers with the same arguments, then "
                "continue with --resume."
            )
