"""Settings of `bisect`: every field is a flag, is kept in the run's manifest, and is restored by
`--resume`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import ADAPTER, DATA, MODEL, setting
from mismatch_cli.base.places import bundled, bundled_names
from mismatch_cli.bisect import SEARCH_FILE
from mismatch_cli.models.engines import engine_names
from mismatch_cli.models.torch_settings import DTYPES
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.probe.engine_arguments import unlisted_arguments
from mismatch_cli.probe.settings import (
    Recorded,
    ThreadSettings,
    of_engine,
    of_prompts,
    of_sampling,
    of_trainer,
)
from mismatch_cli.trace.manifest import FILE_NAME

STAGES = {0: "bookkeeping and weights", 1: "legs", 2: "settings", 3: "modules"}
_OF_TRACE: dict[str, Any] = {"show_default": "from the trace"}


of_search = partial(setting, panel="Search")


@dataclass(frozen=True, kw_only=True)
class BisectConfig(ThreadSettings, Recorded):
    """What to search, with which models, and for how long."""

    NOTE: ClassVar[str] = SEARCH_FILE  # a search has legs, and no trace of its own

    @staticmethod
    def read_note(folder: Path) -> dict[str, Any]:
        """The content of `search.json`."""
        # `--help` must not pay for it
        from mismatch_cli.bisect.experiments import read_search

        return read_search(folder)

    trace: str = setting(
        lambda: str(bundled("traces") / "bfloat16"),
        "Run folder or trace folder, which is only read, or a model, which is probed first.",
        argument=True,
        path=DATA,
        show_default="the bundled bfloat16 trace",
    )
    stages: str = of_search(
        "0,1,2,3",
        "Stages of the search: 0 bookkeeping and weights, 1 legs, 2 settings, 3 modules. The "
        "search ends once the gap is explained.",
        metavar="N,N",
        changeable=True,
    )
    budget: float | None = of_search(
        None,
        "Start no new experiment after this many minutes.",
        metavar="MINUTES",
        min=0,
        changeable=True,
    )
    version: int | None = of_search(
        None,
        "Version of the sampling weights, if the trace has several.",
        min=0,
        show_default="the first",
    )
    responses: int = of_search(256, "Maximum number of responses to read again.", least=1)
    module_responses: int = of_search(
        32, "Responses on which to compare modules: half the worst, half typical.", least=1
    )
    model: str | None = of_engine(
        None, "The engine’s model: folder or hub name.", path=MODEL, metavar="MODEL", **_OF_TRACE
    )
    engine: str | None = of_engine(
        None, "Engine that sampled.", choices=("engine", engine_names), **_OF_TRACE
    )
    engine_url: str | None = of_engine(
        None, "Server that sampled.", changeable=True, metavar="URL", typed=True
    )
    rollout_dtype: str | None = of_engine(
        None, "The engine’s dtype.", choices=("dtype", DTYPES), **_OF_TRACE
    )
    rollout_adapter: str | None = of_engine(
        None, "The engine’s LoRA adapter.", path=ADAPTER, metavar="ADAPTER", **_OF_TRACE
    )
    engine_arg: list[str] | None = of_engine(  # noqa: RUF009
        None,
        "Engine setting to use instead of the trace’s. Repeatable.",
        metavar="KEY=VALUE",
        typed=unlisted_arguments,
    )
    trainer_model: str | None = of_trainer(
        None, "The trainer’s model: folder or hub name.", path=MODEL, metavar="MODEL", **_OF_TRACE
    )
    trainer_adapter: str | None = of_trainer(
        None, "The trainer’s LoRA adapter.", path=ADAPTER, metavar="ADAPTER", **_OF_TRACE
    )
    trainer_dtype: str | None = of_trainer(
        None, "The trainer’s dtype.", choices=("dtype", DTYPES), **_OF_TRACE
    )
    attn: str | None = of_trainer(
        None, "The trainer’s attention, such as sdpa.", metavar="NAME", **_OF_TRACE
    )
    device_map: str | None = of_trainer(
        None,
        "Where the trainer runs, such as auto, cuda:1 or cpu.",
        changeable=True,
        metavar="DEVICE",
    )
    token_budget: int = of_trainer(8192, "Maximum tokens to score at a time.", least=1)
    prompts: str | None = of_prompts(
        None, "For a model: file or data set of prompts.", path=DATA, metavar="FILE|NAME"
    )
    num_prompts: int = of_prompts(64, "For a model: number of prompts.", min=1)
    samples_per_prompt: int = of_sampling(2, "For a model: responses per prompt.", least=1)
    max_tokens: int = of_sampling(256, "For a model: maximum response length in tokens.", least=1)
    temperature: float = of_sampling(1.0, "For a model: sampling temperature, above 0.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wanted  # noqa: B018 - refuse invalid stages before anything is read
        if self.prompts and not self.is_model:
            raise UsageError(
                "--prompts is only for a model; a trace has its own prompts. Leave it out."
            )

    @property
    def wanted(self) -> tuple[int, ...]:
        """The chosen stages, in order."""
        found = sorted(set(self.stages.replace(" ", "").split(",")))
        if not found or not set(found) <= set(map(str, STAGES)):
            raise UsageError(
                f"--stages {self.stages} is invalid. Name stages from 0 to 3, such as --stages 0,1."
            )
        return tuple(map(int, found))

    @property
    def is_model(self) -> bool:
        """Whether a model was named, which is probed first."""
        path = Path(self.trace).expanduser()
        if path.exists():
            return (path / "config.json").is_file() and not (path / FILE_NAME).is_file()
        of_hub = not path.is_absolute() and self.trace.count("/") == 1 and not path.parent.is_dir()
        return of_hub and self.trace not in bundled_names()

    # Names that the checks of all recording commands use, before a folder is made.

    @property
    def scorer(self) -> str | None:
        return self.trainer_model

    @property
    def scorer_adapter(self) -> str | None:
        return self.trainer_adapter

    @property
    def engine_adapter(self) -> str | None:
        return self.rollout_adapter

    @property
    def name(self) -> str:
        """What the run folder is named after: the trace's run, or the model."""
        path = Path(self.trace).resolve()
        return path.parent.name if path.name == "trace" else path.name

    def probe(self) -> ProbeConfig:
        """Settings for probing a model, whose trace is then searched."""
        flags = self.named(
            "prompts", "num_prompts", "samples_per_prompt", "max_tokens", "temperature", "threads"
        )
        flags |= self.named(
            "engine",
            "engine_url",
            "rollout_dtype",
            "rollout_adapter",
            "engine_arg",
            "trainer_model",
        )
        flags |= self.named(
            "trainer_adapter", "trainer_dtype", "attn", "device_map", "token_budget"
        )
        return ProbeConfig.from_flags(
            flags | {"model": self.trace, "noise_responses": 0, "top_logprobs": 0}
        )
