"""Real vLLM API servers for tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from mismatch_cli.base.places import bundled
from tests.warm import Forked

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the executor "uni": no third process
}
_ARGUMENTS = (
    f"--model {bundled('model')} --served-model-name tiny --host 127.0.0.1 --dtype float32 "
    "--enforce-eager"
)
_ARGUMENTS += " --no-enable-chunked-prefill --max-logprobs 40 --distributed-executor-backend uni"


class VllmServers:
    """Starts servers on ports of 127.0.0.1, kills them with -9, and leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, Forked] = {}

    def start(self, port: int, mode: str, *more: str, tells_all: bool = False) -> str:
        """Start a server without waiting for it; returns its URL."""
        arguments = [*_ARGUMENTS.split(), "--port", str(port), "--logprobs-mode", mode, *more]
        environment = os.environ | _ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": str(int(tells_all))}
        log = self._folder / f"{port}.log"
        self._running[port] = Forked(
            "tests.models.engines.vllm_servers", *arguments, env=environment, log=log
        )
        return f"http://127.0.0.1:{port}"

    def kill(self, port: int) -> None:
        """Kill the server and its engine at once, as if the machine went down; returns when the
        port is free.
        """
        os.killpg(self._running.pop(port).pid, signal.SIGKILL)
        while _taken(port):
            time.sleep(0.02)

    def wait(self, url: str) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(600):
            try:
                direct.open(f"{url}/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(f"{url} did not start: see {self._folder}")

    def close(self) -> None:
        for port in list(self._running):
            self.kill(port)


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    # vLLM on CPU insists on new interpreters for its engine; a fork has everything imported
    # already.
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")
    from vllm.entrypoints.launchers.api_server import entry

    sys.argv[0] = "api_server"
    entry.main()


if __name__ == "__main__":
    _serve()
