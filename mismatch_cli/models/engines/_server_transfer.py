"""New weights for servers on GPUs: broadcast to all of them over NCCL, with vLLM's own transfer.

The first rank is the sender; the servers' GPUs follow it in NCCL's group, in the order of the URLs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mismatch_cli.base.errors import MismatchError, UsageError, first_line
from mismatch_cli.models.engines._server_http import Address, Server
from mismatch_cli.models.engines._server_weights import (
    MODE,
    check_taken,
    names_in_vllm,
    told_version,
)
from mismatch_cli.processes.ranks import World

if TYPE_CHECKING:
    from torch import Tensor

_ANSWER = 2**16  # bytes

_FOR_A_TRANSFER = 600.0  # seconds that a server may take for one


def check_possible() -> None:
    """A `UsageError` without a GPU to send from."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "weight_transfer = nccl sends weights from GPU to GPU, and torch sees no GPU here. "
            "Leave it out."
        )


class TransferredWeights:
    """Weights that go straight from the ranks' memory into the servers', without a copy in
    between.
    """

    def __init__(
        self, addresses: Sequence[Address], world: World, say: Callable[[str], None]
    ) -> None:
        self._fleet, self._world = Fleet(addresses, say), world
        self._stream = Stream()
        self._transfer: Any = None
        self._count, self._run = 0, ""

    @property
    def version(self) -> str:
        return f"{self._run}#{self._count}" if self._count else ""

    def publish(self, model: Any) -> None:
        """Send the weights of a model to all servers; reconnect first if one has left the group."""
        self._stream.take(model)
        connected = self._transfer is not None and self._world.told(
            self._fleet.all_have(self.version)
        )
        try:
            if not connected:
                self._connect()
            self._count += 1
            self._fleet.version = self.version
            self._transfer.send_weights()
        except (RuntimeError, ValueError, OSError) as error:
            raise MismatchError(
                f"The servers did not get the weights ({first_line(error)}). {MODE} and with "
                '--weight-transfer-config \'{"backend": "nccl"}\', on GPUs that no rank uses; or leave out '
                "weight_transfer to send weights through a folder."
            ) from error
        self._world.barrier()

    def _connect(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        if self._transfer is not None:
            self._transfer.shutdown()
        host, port, size = self._world.told(
            self._fleet.meeting_point() if self._world.first else ("", 0, 0)
        )
        self._run = f"{host}:{port}"
        info = NCCLTrainerInitInfo(host, port, size, rank=self._world.rank)
        self._transfer = WeightTransferTrainerFactory.trainer_init(
            info, client=self._fleet, source=self._stream
        )

    async def give(self, server: Server, url: str) -> None:
        """Check only: publishing has sent them, and a restarted server cannot get them by
        itself.
        """
        if await told_version(server) != self.version:
            raise MismatchError(
                f"{url} has lost its weights, and only a broadcast to all servers can restore "
                "them. Continue with --resume; with weight_transfer = folder a restarted server "
                "gets its weights back at once."
            )
        await check_taken(server, url, self.version)

    def forget_older(self) -> None:
        self._world.barrier()

    def remove(self) -> None:
        if self._transfer is not None:
            self._transfer.shutdown()


class Stream:
    """A state as vLLM's transfer reads it: first the metadata, then one full weight after the
    other.

    A vLLM `WeightSource`. Ranks read it in step, since all of them gather each weight of a model
    that is spread.
    """

    def __init__(self) -> None:
        self._state: Mapping[str, Tensor] = {}
        self._names: list[str] = []
        self._coming: list[Any] | None = None

    def take(self, model: Any) -> None:
        """Read from this model's state from now on."""
        from mismatch_cli.models.sharding import saved_state

        self._state = saved_state(model)
        self._names = names_in_vllm(model, self._state)

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of each weight; they never change for a model."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        if self._coming is None:
            self._coming = [
                ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self
            ]
        return self._coming

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            yield name, self._state[name].detach().contiguous()


class Fleet:
    """All servers as the one client that vLLM's transfer talks to: each request goes to all at
    once.
    """

    def __init__(self, addresses: Sequence[Address], say: Callable[[str], None]) -> None:
        self._addresses = [
            replace(address, patience=0, timeout=_FOR_A_TRANSFER) for address in addresses
        ]
        self._say = say
        self._sizes: list[int] = []
        self.version = ""  # of the weights that are sent next

    def all_have(self, version: str) -> bool:
        """Whether every server reports this version."""
        try:
            return all(
                told == version for told in self._on_all(lambda server, _: told_version(server))
            )
        except MismatchError:
            return False

    def meeting_point(self) -> tuple[str, int, int]:
        """Host and port where the servers find the first rank, and the number of GPUs in the
        group with its own.
        """
        told = self._on_all(lambda server, _: server.get("/get_world_size"))
        self._sizes = [size.get("world_size", 0) if isinstance(size, dict) else 0 for size in told]
        if 0 in self._sizes:
            silent = self._addresses[self._sizes.index(0)].url
            raise MismatchError(f"{silent} does not report how many GPUs it has. {MODE}.")
        url = urlsplit(self._addresses[0].url)
        server = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
        with (
            socket.create_connection(server, timeout=10) as seen,
            socket.create_server(("", 0)) as free,
        ):
            return seen.getsockname()[0], free.getsockname()[1], 1 + sum(self._sizes)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets = list(accumulate(self._sizes, initial=1))
        infos = [{"init_info": init_info | {"rank_offset": offset}} for offset in offsets[:-1]]
        self._on_all(
            lambda server, i: server.post("/init_weight_transfer_engine", infos[i], _ANSWER)
        )

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("/shutdown_weight_transfer_engine", {})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version or self.version})

    def _post(self, path: str, payload: dict[str, Any]) -> None:
        self._on_all(lambda server, _: server.post(path, payload, _ANSWER))

    def _on_all(self, ask: Callable[[Server, int], Awaitable[Any]]) -> list[Any]:
        async def one(i: int, address: Address) -> Any:
            async with Server(address, self._say) as server:
                return await ask(server, i)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(one(i, address) for i, address in enumerate(self._addresses))
            )

        return asyncio.run(all_of_them())
