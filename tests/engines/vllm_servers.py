"""Real vLLM API servers for tests: forked from one process that has imported vLLM, which takes longer than a server.

Run as a program it reads one server's arguments per line from stdin and prints the process id of each; when stdin ends,
however its owner ended, it kills them all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from mismatch_cli.places import bundled

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the executor "uni": no third process
    "TORCH_COMPILE_DISABLE": "1",
}
_ARGUMENTS = f"--model {bundled('model')} --served-model-name tiny --host 127.0.0.1 --dtype float32 --enforce-eager"
_ARGUMENTS += " --no-enable-chunked-prefill --max-logprobs 40 --distributed-executor-backend uni"


class VllmServers:
    """Starts servers on ports of 127.0.0.1, kills them with -9, and leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: dict[int, int] = {}
        with open(folder / "launcher.log", "w") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm_servers"], text=True, cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    def start(self, port: int, mode: str, *, tells_all: bool = False) -> str:
        """Start a server, not waiting for it; answers its URL."""
        arguments = [*_ARGUMENTS.split(), "--port", str(port), "--logprobs-mode", mode]
        order = {"log": str(self._folder / f"{port}.log"), "arguments": arguments, "dev": str(int(tells_all))}
        self._launcher.stdin.write(json.dumps(order) + "\n")
        self._launcher.stdin.flush()
        self._pids[port] = int(self._launcher.stdout.readline())
        return f"http://127.0.0.1:{port}"

    def kill(self, port: int) -> None:
        """Like a machine that goes down: the server and its engine, at once; returns when the port is free."""
        os.killpg(self._pids.pop(port), signal.SIGKILL)
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
        self._launcher.stdin.close()
        self._launcher.wait(timeout=30)


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


def _serve_on_demand() -> None:
    from mismatch_cli.torch_settings import prepare_imports

    os.environ.update(_ENVIRONMENT)
    prepare_imports()
    import vllm.utils.system_utils

    # vLLM on CPU insists on new interpreters for its engine; a fork has everything imported already.
    vllm.utils.system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker
    from vllm.entrypoints.launchers.api_server import entry

    launcher: int = os.getpid()
    children: list[int] = []
    try:
        for line in sys.stdin:
            order = json.loads(line)
            pid = os.fork()
            if not pid:
                os.setsid()
                log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
                    os.dup2(descriptor, target)
                os.environ["VLLM_SERVER_DEV_MODE"] = order["dev"]
                sys.argv = ["api_server", *order["arguments"]]
                entry.main()
                os._exit(0)
            children.append(pid)
            os.write(1, f"{pid}\n".encode())
    finally:
        if os.getpid() == launcher:  # not a child whose server failed
            for pid in children:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            os._exit(0)


if __name__ == "__main__":
    _serve_on_demand()
