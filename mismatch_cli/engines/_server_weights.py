"""New weights for servers: one safetensors file in a folder that they see, and the version that they say they have.

The transport that works everywhere. vLLM's routes for it exist in its development mode alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mismatch_cli.engines._server_http import Refused, Server
from mismatch_cli.errors import MismatchError
from mismatch_cli.models import saved_state
from mismatch_cli.ranks import World
from mismatch_cli.trace.files import replacing_folder

_HEADLESS = ("gemma",)  # families whose head has no name in vLLM
_ANSWER = 2**16  # bytes: a word or two
_MODE = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment, on a machine that sees the folder."


class SharedWeights:
    """A folder with the newest weights, written by the first rank; every rank sees it when `publish` has returned."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world = folder.absolute(), world
        self._count = 0

    @property
    def version(self) -> str:
        """What a server that has these weights says; empty where none have been published."""
        return f"{self._folder}#{self._count}" if self._count else ""

    @property
    def path(self) -> Path:
        return self._folder / f"{self._count:06d}"

    def publish(self, model: Any) -> None:
        """Write the weights of a model, whole or spread; every rank calls it."""
        from safetensors.torch import save_file

        from mismatch_cli.sharding import on_first

        state = on_first(saved_state(model), self._world)
        self._count += 1
        if self._world.first:
            kind = str(getattr(model, "learning", model).config.model_type)
            # A tied head is named too, though folders leave it out: without it vLLM on CPU keeps its old head.
            named = {
                name: weight.contiguous().clone()
                for name, weight in state.items()
                if not (kind.startswith(_HEADLESS) and name.endswith("lm_head.weight"))
            }
            with replacing_folder(self.path) as temporary:
                save_file(named, temporary / "model.safetensors")
        self._world.barrier()

    def forget_older(self) -> None:
        """Remove what no server needs any more, once all have the newest."""
        self._world.barrier()
        if self._world.first:
            for path in self._folder.iterdir():
                if path != self.path:
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        if self._world.first:
            shutil.rmtree(self._folder, ignore_errors=True)


async def told_version(server: Server) -> str | None:
    """The version that somebody gave its weights; None where the server tells none."""
    told = await server.get("/weight_info")
    found = told.get("weight_version") if isinstance(told, dict) else None
    return found if isinstance(found, str) else None


async def tell(server: Server, url: str, weights: SharedWeights) -> None:
    """Have a server take over the published weights; a `MismatchError` where it cannot."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.path)}}
    try:
        await server.post("/collective_rpc", load, _ANSWER)
        dropped, _ = await server.post("/reset_prefix_cache", {}, _ANSWER)
        await server.post("/update_weight_version", {"new_version": weights.version}, _ANSWER)
    except Refused as refused:
        raise MismatchError(f"{url} takes no weights (status {refused.status}: {refused.told}). {_MODE}") from refused
    if not (isinstance(dropped, dict) and dropped.get("success")):
        raise MismatchError(f"{url} did not drop its prefix cache, which holds keys of the old weights. Is it shared?")
    if await told_version(server) != weights.version:
        raise MismatchError(f"{url} does not say which weights it has, or somebody else gives it weights too. {_MODE}")
