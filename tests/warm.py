"""Programs forked from a Python that has already imported torch, transformers and vLLM, the slowest
part of most.

Each is a process and a session of its own, as if a shell had started it. Run as a program this
module reads one order per line from stdin; when stdin ends, however its owner ended, it kills all
that it started.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.paths import ROOT


class Forked:
    """A running program with the part of `subprocess.Popen`'s interface that tests use; it
    prints into a file.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """`log`: the file to which its output is appended, instead of a temporary one."""
        self._files = tempfile.TemporaryDirectory(prefix="forked-")
        self._code = Path(self._files.name) / "code"
        self._errors = log or Path(self._files.name) / "stderr"
        order = {
            "module": module, "arguments": arguments, "env": env or dict(os.environ),
            "folder": os.getcwd(),
            "code": str(self._code), "stderr": str(self._errors), "stdout": str(log or os.devnull),
        }  # fmt: skip
        self.pid = _warm_python().fork(order)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._code.is_file():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def said(self) -> str:
        """Its stderr so far."""
        return self._errors.read_text() if self._errors.is_file() else ""

    def ended(self, within: float = 300) -> str:
        """Wait for its end, which sets `returncode`; return its stderr."""
        until = time.monotonic() + within
        while self.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"still running after {within} s: {self.said()}")
            time.sleep(0.02)
        return self.said()


def cli(*arguments: str, env: dict[str, str] | None = None) -> Forked:
    return Forked("mismatch_cli", *arguments, env=env)


class _WarmPython:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            text=True,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def fork(self, order: dict[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@cache
def _warm_python() -> _WarmPython:
    """One for all modules of a pytest process, whose end closes its stdin."""
    return _WarmPython()


def import_what_is_slow() -> None:
    from mismatch_cli.models.torch_settings import prepare_imports

    prepare_imports()
    import pandas  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.launcher.api  # noqa: F401
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def _fork_on_demand() -> None:
    import_what_is_slow()
    codes: dict[int, str] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.05)
        if ready:
            piece = os.read(0, 1 << 20)
            if not piece:
                break
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if not pid:
                    become(order)
                codes[pid] = order["code"]
                os.write(1, f"{pid}\n".encode())
        for pid in list(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _write_at_once(Path(codes.pop(pid)), str(os.waitstatus_to_exitcode(status)))
    for pid in codes:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def become(order: dict) -> None:
    """Run the requested program in this process, which ends with it."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["folder"])
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    for path, target in ((os.devnull, 0), (order["stdout"], 1), (order["stderr"], 2)):
        os.dup2(os.open(path, flags if target else os.O_RDONLY, 0o644), target)
    sys.argv = [order["module"], *order["arguments"]]
    code = 1
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_at_once(path: Path, text: str) -> None:
    """Write a file atomically; write nothing if the reader has left."""
    with suppress(FileNotFoundError):
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    _fork_on_demand()
