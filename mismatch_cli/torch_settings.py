"""torch settings of this process: threads chosen once, and given back after an engine has changed them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mismatch_cli.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")  # of a model; "auto" is its checkpoint's own
_SMALL_MODEL_BYTES = 200_000_000
_MOST_THREADS = 4096


def set_threads(asked: int | None, model: str) -> int:
    """Set torch's CPU threads: as asked, else one for a small model (more would wait for each other), else as it is."""
    import torch

    if asked is None and _weight_bytes(model) < _SMALL_MODEL_BYTES:
        asked = 1
    if asked is not None:
        if asked > _MOST_THREADS:
            raise UsageError(f"--threads {asked} is more than any machine has. Use at most {os.cpu_count()} here.")
        torch.set_num_threads(asked)
    return torch.get_num_threads()


def _weight_bytes(model: str) -> float:
    folder = Path(model)
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")] if folder.is_dir() else []
    return sum(f.stat().st_size for f in files) if files else float("inf")


@dataclass(frozen=True)
class TorchSettings:
    """torch as it was before an engine.

    vLLM on CPU turns `torch.set_num_threads` into a no-op for the process; on CUDA it takes cuDNN out of the kernels
    that attention is chosen from, and sets how float32 is multiplied.
    """

    set_num_threads: Callable[[int], None]
    threads: int
    compile_disabled: bool
    cudnn_attention: bool
    float32_precision: str

    @classmethod
    def current(cls) -> TorchSettings:
        import torch
        import torch._dynamo

        return cls(
            torch.set_num_threads,
            torch.get_num_threads(),
            torch._dynamo.config.disable,
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def restore_attention(self) -> None:
        """What an engine that is still there does not need: the trainer chooses its kernels as it would without one."""
        import torch

        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)

    def restore(self) -> None:
        import torch

        self.restore_attention()
        torch.set_float32_matmul_precision(self.float32_precision)

        torch.set_num_threads = self.set_num_threads  # type: ignore[assignment]
        torch.set_num_threads(self.threads)
        torch._dynamo.config.disable = self.compile_disabled
