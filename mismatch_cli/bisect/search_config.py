"""Settings of `bisect`: every field is a flag, is kept in the run's manifest, and is restored by
`--resume`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import DATA, override, setting, settings_group, values_by_key
from mismatch_cli.base.places import bundled, bundled_names
from mismatch_cli.bisect import SEARCH_FILE
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.probe.settings import (
    CpuSettings,
    PromptSettings,
    RecordingSettings,
    RolloutSettings,
    SamplerSettings,
    ScorerSettings,
)
from mismatch_cli.trace.manifest import FILE_NAME

STAGES = {0: "bookkeeping and weights", 1: "legs", 2: "settings", 3: "modules"}
_OF_TRACE = override(None, show_default="from the trace")
# Settings of an engine that a search takes from the trace, or as KEY=VALUE
_NOT_SEARCHED = (
    "served_model",
    "kv_cache_dtype",
    "tensor_parallel",
    "eager",
    "prefix_caching",
    "max_model_len",
)
_OF_A_MODEL = "For a model, which is probed first"
of_search = partial(setting, panel="Search")


@dataclass(frozen=True, kw_only=True)
class BisectConfig(RecordingSettings):
    """What to search, with which models, and for how long."""

    NOTE: ClassVar[str] = SEARCH_FILE  # a search has legs, and no trace of its own

    @staticmethod
    def read_note(folder: Path) -> dict[str, Any]:
        """The content of `search.json`."""
        # `--help` reads this class, and must not pay for the state of a search.
        from mismatch_cli.bisect.experiments import read_search

        return read_search(folder)

    trace: str = setting(
        lambda: str(bundled("traces") / "bfloat16"),
        "Run or trace folder, only read, or a model, which is probed first.",
        argument=True,
        path=DATA,
        show_default="the bundled bfloat16 trace",
    )
    stages: str = of_search(
        "0,1,2,3",
        "Stages: 0 bookkeeping and weights, 1 legs, 2 settings, 3 modules; it ends once the gap "
        "is explained.",
        metavar="N,N",
        numeric=True,
        changeable=True,
    )
    budget: float | None = of_search(
        None,
        "Start no new experiment after these minutes.",
        metavar="MINUTES",
        least=0,
        changeable=True,
    )
    version: int | None = of_search(
        None,
        "Which version of the sampling weights.",
        flag=False,
        least=0,
        show_default="the first",
    )
    responses: int = of_search(256, "Responses to read again at most.", flag=False, least=1)
    module_responses: int = of_search(
        32,
        "Responses to compare modules on: half the worst, half typical.",
        flag=False,
        least=1,
    )
    engine: Any = settings_group(  # None: as the trace says
        RolloutSettings,
        model=override(None, help="The engine's model.", show_default="from the trace"),
        name=_OF_TRACE,
        dtype=_OF_TRACE,
        adapter=_OF_TRACE,
        arguments=override(
            help="Engine settings to use instead of the trace's.",
            argument=True,
            metavar="[KEY=VALUE]...",
        ),
        without=_NOT_SEARCHED,
    )
    scorer: Any = settings_group(  # None: as the trace says
        ScorerSettings,
        model=_OF_TRACE,
        dtype=_OF_TRACE,
        adapter=_OF_TRACE,
        attn=_OF_TRACE,
        without=("merge_adapter", "float32_head", "replay_routes", "noise_responses"),
    )
    problems: PromptSettings = settings_group(
        PromptSettings, "source", "number", source=override(None), panel=_OF_A_MODEL
    )
    sampler: SamplerSettings = settings_group(
        SamplerSettings,
        "samples_per_prompt",
        "max_tokens",
        "temperature",
        samples_per_prompt=override(2),
        panel=_OF_A_MODEL,
    )
    cpu: CpuSettings = settings_group(CpuSettings)

    def __post_init__(self) -> None:
        if "=" in self.trace and not Path(self.trace).exists():
            raise UsageError(
                f"{self.trace} is an engine setting, and those follow the trace: mismatch-cli "
                f"bisect TRACE {self.trace}"
            )
        self.wanted  # noqa: B018 - refuse invalid stages before anything is read
        if self.problems.source and not self.is_model:
            raise UsageError(
                "--prompts is only for a model; a trace has its own prompts. Leave it out."
            )

    @property
    def wanted(self) -> tuple[int, ...]:
        """The chosen stages, in order."""
        numbers = set(self.stages.replace(" ", "").split(","))
        if not numbers <= set(map(str, STAGES)):
            raise UsageError(
                f"--stages {self.stages} is invalid. Name stages from 0 to 3, such as --stages 0,1."
            )
        return tuple(sorted(map(int, numbers)))

    @property
    def is_model(self) -> bool:
        """Whether a model was named, which is probed first."""
        path = Path(self.trace).expanduser()
        if path.exists():
            return (path / "config.json").is_file() and not (path / FILE_NAME).is_file()
        # AUTHOR/NAME is a model of the hub, unless AUTHOR is a folder: then NAME is mistyped.
        is_hub_name = not path.is_absolute() and self.trace.count("/") == 1
        return is_hub_name and not path.parent.is_dir() and self.trace not in bundled_names()

    # Names that the checks of all recording commands use, before a folder is made.

    @property
    def scoring_model(self) -> str | None:
        return self.scorer.model

    @property
    def scorer_adapter(self) -> str | None:
        return self.scorer.adapter

    @property
    def engine_adapter(self) -> str | None:
        return self.engine.adapter

    @property
    def name(self) -> str:
        """What the run folder is named after: the trace's run, or the model."""
        path = Path(self.trace).resolve()
        return path.parent.name if path.name == "trace" else path.name

    def probe(self) -> ProbeConfig:
        """The configuration for probing a model, whose trace is then searched."""
        settings = values_by_key(self)
        del settings["trace"]
        fixed = {"model": self.trace, "noise_responses": 0, "top_logprobs": 0}
        return ProbeConfig.of(settings | fixed)
