"""The cost of `probe` beyond sampling and scoring: prompts, grading, files, analysis, plots, HTML.

    python -m lab.probe [--engine vllm] [--num-prompts 512] [--samples-per-prompt 8]

Wall time of one probe of the bundled model, without imports and loading of models, as a ratio to
the time inside the engine's `sample` and the trainer's `score` (with the noise). Target: at most
1.1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from mismatch_cli.models.torch_settings import prepare_imports

TARGET = 1.1


class Stopwatch:
    """Seconds by name, from wrapped functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def wrap(self, owner: Any, function: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running(name):
                return inner(*args, **kwargs)

        setattr(owner, function, timed)


def import_everything(engine: str) -> None:
    prepare_imports()
    import matplotlib.figure  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    if engine == "vllm":
        import vllm  # noqa: F401


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One probe; seconds by phase."""
    from mismatch_cli.app import common as _show
    from mismatch_cli.app.progress import TerminalProgress
    from mismatch_cli.models import engines
    from mismatch_cli.models.scoring.trainer import Trainer
    from mismatch_cli.probe import record as recording
    from mismatch_cli.probe import rollouts
    from mismatch_cli.probe.config import ProbeConfig
    from mismatch_cli.probe.tasks.grading import MathVerify
    from mismatch_cli.trace.reader import Trace

    watch = Stopwatch()
    engine = engines.registry.load("mismatch_cli.models.engines", arguments.engine, "engine")
    watch.wrap(getattr(engine, f"{arguments.engine.capitalize()}Engine"), "sample", "sampling")
    watch.wrap(
        getattr(engine, f"{arguments.engine.capitalize()}Engine"), "close", "loading and freeing"
    )
    watch.wrap(recording, "create_engine", "loading and freeing")
    watch.wrap(Trainer, "load", "loading and freeing")
    watch.wrap(Trainer, "score", "scoring")
    watch.wrap(Trainer, "score_again", "scoring")
    watch.wrap(MathVerify, "grade", "grading")
    watch.wrap(rollouts, "write_shard", "writing sampled shards")
    watch.wrap(_show, "_write", "plots, HTML, JSON")

    config = ProbeConfig.of(
        {
            "engine": arguments.engine,
            "num_prompts": arguments.num_prompts,
            "samples_per_prompt": arguments.samples_per_prompt,
            "threads": 1,
        }
    )
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        quiet = TerminalProgress(quiet=True)
        stdout, sys.stdout = sys.stdout, nowhere
        with watch.running("all"):
            recording.record(config, Path(folder), {}, quiet)
            _show.Common(quiet=True).study_mismatch([Trace.open(Path(folder))], Path(folder))
        sys.stdout = stdout
    return dict(watch.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    arguments = parser.parse_args()
    import_everything(arguments.engine)
    seconds = measure(arguments)
    whole = seconds.pop("all") - seconds.pop("loading and freeing")
    own = seconds["sampling"] + seconds["scoring"]
    for name, value in seconds.items():
        print(f"{name:<24}{value:8.2f} s")
    print(f"{'everything else':<24}{whole - sum(seconds.values()):8.2f} s")
    print(
        f"{'probe':<24}{whole:8.2f} s, {whole / own:.3f} × its sampling and scoring (target "
        f"{TARGET})"
    )


if __name__ == "__main__":
    main()
