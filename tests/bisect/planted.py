"""Causes of a gap, planted one at a time into healthy runs of real commands, for `mismatch-cli
bisect` to name.

A row says into which models a cause can be planted, what `bisect` may call it, and how to make its
trace. Unless something is planted, the two sides of these models agree as well as their dtype
allows.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.diagnosis.hypotheses import padded_to
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.probe.score import requests_of, with_columns
from mismatch_cli.trace.shards import open_shard
from mismatch_cli.trace.writer import write_shard
from tests.changed_models import (
    copied,
    rounded_norms_in_vllm,
    rounded_to_int8,
    scaled,
    stale,
    with_rounded_norms,
)
from tests.families import save_family

Typed = Callable[[list[str]], None]  # runs a command line of mismatch-cli, which must succeed
BUNDLED, LLAMA, GEMMA, MOE = MODELS = ("bundled", "llama", "gemma2", "qwen3_moe")
FLOAT32, BFLOAT16 = "float32", "bfloat16"
SAMPLED = "--num-prompts 32 --samples-per-prompt 2 --max-tokens 48 --top-logprobs 0"
_SECTIONS = re.compile(r"^(config\.sampling|rollout|trainer|recomputed)\.")
_BRIEF = "--noise-responses 16 --threads 1 --no-plots --quiet --force"


class Bed:
    """A model and a folder for its runs. A finished run is not repeated."""

    def __init__(
        self, folder: Path, name: str, typed: Typed, sampled: str = SAMPLED, runs: str = ""
    ) -> None:
        """`runs`: the name of its folder of runs, if not the model's name."""
        self.name, self._typed, self._sampled = name, typed, sampled
        self.runs, self._models = folder / "runs" / (runs or name), folder / "models"
        self.model = str(bundled("model")) if name == BUNDLED else self._family()

    def _family(self) -> str:
        folder = self._models / self.name
        if (folder / "model.safetensors").exists():
            return str(folder)
        return save_family(self._models, self.name)

    def probed(self, run: str, *flags: str, dtype: str = FLOAT32, model: str | None = None) -> Path:
        """A run sampled by vLLM, with the same dtype on both sides."""
        dtypes = f"--rollout-dtype {dtype} --trainer-dtype {dtype}"
        return self._made(
            run, "probe", model or self.model, *f"{dtypes} {self._sampled} {_BRIEF}".split(), *flags
        )

    def rescored(
        self, run: str, source: Path, *flags: str, dtype: str = FLOAT32, model: str | None = None
    ) -> Path:
        """A trace's tokens, scored by a trainer that is said to have the sampling weights."""
        trainer = f"--trainer-model {model or self.model} --trainer-dtype {dtype}"
        return self._made(run, "rescore", str(source), *f"{trainer} {_BRIEF}".split(), *flags)

    def _made(self, name: str, command: str, *arguments: str) -> Path:
        run = self.runs / name
        if not (run / "summary.json").exists():
            self._typed([command, *arguments, "--output", str(run)])
        return run

    def by(self, typed: Typed) -> Bed:
        """The same bed, with another way to make runs."""
        bed = copy(self)
        bed._typed = typed
        return bed

    def clean(self, dtype: str = FLOAT32) -> Path:
        """A run with nothing planted."""
        return self.probed(f"clean-{dtype}", dtype=dtype)

    def copy(self, kind: str, **changes: Any) -> str:
        """A changed copy of the model (`changed_models.copied`)."""
        return copied(self.model, self._models / f"{self.name}-{kind}", **changes)

    def rounded_norms(self) -> str:
        return with_rounded_norms(self.model, self._models / f"{self.name}-rounded-norms")

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((Path(self.model) / "config.json").read_text()))

    @property
    def rope(self) -> dict[str, Any]:
        """The model's position encoding."""
        return dict(self.config["rope_parameters"])


@dataclass(frozen=True)
class Planted:
    """A run whose trace contains the cause, and further flags for `bisect`."""

    run: Path
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plant:
    """One cause: the models it applies to, the correct names for it, and how to make it.

    `dtype` is that of the clean run with which its gap is compared. `parts`: the tensors or modules
    that it affects, if a cause names some. `here`: a context that changes the engine in this
    process, for both the trace and the search.
    """

    name: str
    models: tuple[str, ...]
    right: tuple[str, ...]
    make: Callable[[Bed], Planted]
    dtype: str = FLOAT32
    parts: tuple[str, ...] = ()
    here: Callable[[], AbstractContextManager[None]] | None = None

    def is_named_by(self, cause: Mapping[str, Any]) -> bool:
        """Whether a row of `causes` is this one: by its setting, and by its parts if it names
        only the kind.
        """
        setting = str(cause["setting"])
        said = setting if setting in self.parts else _SECTIONS.sub("", setting)
        right = False
        for name in self.right:
            right |= f".{said}.".startswith(f".{name}.") or said.endswith(f".{name}")
        of_parts = not self.parts or setting in self.parts or set(cause["parts"]) == set(self.parts)
        return right and of_parts


SCALED, STALE = "model.layers.1.self_attn.o_proj.weight", "model.layers.0.self_attn.v_proj.weight"
# Gemma-2 normalises attention's output, so its scale is lost
NORMED_NOWHERE = "model.layers.1.self_attn.q_proj.weight"
_POSITIONS = ("rope_parameters", "rope_theta", "rope_scaling", "rope_type", "hf_overrides")


def _flagged(run: str, *flags: str, dtype: str) -> Callable[[Bed], Planted]:
    """A probe with a flag that affects only one side."""
    return lambda bed: Planted(bed.probed(run, *flags, dtype=dtype))


def _trainer(run: str, **changes: Any) -> Callable[[Bed], Planted]:
    """Another folder for the trainer, declared to have equal weights."""
    return lambda bed: Planted(bed.rescored(run, bed.clean(), model=bed.copy(run, **changes)))


def _engine(run: str, **changes: Any) -> Callable[[Bed], Planted]:
    """Another folder for the engine, which samples; the trainer scores with the right one."""

    def planted(bed: Bed) -> Planted:
        sampled = bed.probed(f"{run}-sampled", model=bed.copy(run, **changes))
        return Planted(bed.rescored(run, sampled))

    return planted


def _rounded_norms(bed: Bed) -> Planted:
    model, trusted = bed.rounded_norms(), "--trust-remote-code"
    # A manifest does not start code
    again = ("--model", model, "--trainer-model", model, trusted)
    return Planted(bed.probed("rounded-norms", trusted, model=model), again)


def other_base(bed: Bed) -> dict[str, Any]:
    return {"rope_parameters": bed.rope | {"rope_theta": 4 * bed.rope["rope_theta"]}}


def other_scaling(bed: Bed) -> dict[str, Any]:
    """Scaled by 2 if the family does not scale, else unscaled."""
    plain, linear = {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}
    kind = linear if bed.rope["rope_type"] == "default" else plain
    return {"rope_parameters": kind | {"rope_theta": bed.rope["rope_theta"]}}


def _positions_of_trainer(
    run: str, positions: Callable[[Bed], dict[str, Any]]
) -> Callable[[Bed], Planted]:
    return lambda bed: _trainer(run, settings=positions(bed))(bed)


def _positions_of_engine(
    run: str, positions: Callable[[Bed], dict[str, Any]]
) -> Callable[[Bed], Planted]:
    return lambda bed: Planted(
        bed.probed(run, "--engine-arg", f"hf_overrides={json.dumps(positions(bed))}")
    )


def temperature(bed: Bed) -> Planted:
    """The engine divides its logits by a temperature; the trainer does not."""
    hot = bed.probed("temperature-sampled", "--temperature", "0.8")
    return Planted(bed.rescored("temperature", hot, "--temperature", "1"))


def without_cap(bed: Bed) -> Planted:
    return Planted(bed.rescored("without-cap", bed.clean(), "--attn", "sdpa"))


def attended_padding(bed: Bed) -> Planted:
    """The trainer's columns as from a left-padded batch without an attention mask."""
    run = bed.runs / "padded"
    if not run.exists():
        source = bed.rescored("unrepeated", bed.clean(), "--noise-responses", "0")
        broken = shutil.copytree(source, bed.runs / "padded.part", dirs_exist_ok=True)
        trainer = Trainer.load(bed.model, dtype=FLOAT32, sampling=SamplingSettings())
        for shard in sorted((broken / "trace").glob("shard-*.parquet")):
            _score_padded(shard, trainer, bed.config["pad_token_id"])
        broken.rename(run)
    return Planted(run)


def _score_padded(shard: Path, trainer: Trainer, token: int) -> None:
    table = open_shard(shard).read()
    requests = requests_of(table)
    # A framework pads to the longest prompt of its batch
    padding = padded_to(max(len(request.prompt_ids) for request in requests), token).prompt
    read = [ScoreRequest(padding(request.prompt_ids), request.response_ids) for request in requests]
    scores = trainer.score(read, token_budget=8192)
    columns = {"logp_trainer": "logp_T", "entropy_trainer": "entropy_T", "rank_trainer": "rank_T"}
    values = {}
    for name, attribute in columns.items():
        values[name] = [getattr(score, attribute) for score in scores]
    write_shard(shard, with_columns(table, values))


HEAD = "--float32-head"
FP8 = ("--kv-cache-dtype", "fp8")
ONE_EXPERT = {"num_experts_per_tok": 1}


def head_of_engine(dtype: str) -> tuple[str, str]:
    return "--engine-arg", f'hf_overrides={{"head_dtype": "{dtype}"}}'


PLANTS = (
    Plant(
        "fp8 KV cache", MODELS, ("kv_cache_dtype",), _flagged("fp8", *FP8, dtype=BFLOAT16), BFLOAT16
    ),
    Plant(
        "fp8 KV cache in float32",
        MODELS,
        ("kv_cache_dtype",),
        _flagged("fp8-float32", *FP8, dtype=FLOAT32),
    ),
    Plant("RMSNorm rounded in the trainer", MODELS, ("norm",), _rounded_norms),
    Plant(
        "RMSNorm rounded in the engine",
        MODELS,
        ("norm",),
        _flagged("rounded-engine", dtype=FLOAT32),
        here=rounded_norms_in_vllm,
    ),
    Plant("RoPE base, trainer", MODELS, _POSITIONS, _positions_of_trainer("base", other_base)),
    Plant("RoPE base, engine", MODELS, _POSITIONS, _positions_of_engine("base-engine", other_base)),
    Plant(
        "RoPE scaling, trainer", MODELS, _POSITIONS, _positions_of_trainer("scaling", other_scaling)
    ),
    Plant(
        "RoPE scaling, engine",
        MODELS,
        _POSITIONS,
        _positions_of_engine("scaling-engine", other_scaling),
    ),
    # A float32 head does not change the bfloat16 gap of the other models.
    Plant(
        "float32 LM head, trainer",
        (BUNDLED,),
        ("head_dtype",),
        _flagged("head", HEAD, dtype=BFLOAT16),
        BFLOAT16,
    ),
    Plant(
        "float32 LM head, engine",
        (BUNDLED,),
        ("head_dtype",),
        _flagged("head-engine", *head_of_engine(FLOAT32), dtype=BFLOAT16),
        BFLOAT16,
    ),
    Plant(
        "bfloat16 LM head, engine in float32",
        MODELS,
        ("head_dtype",),
        _flagged("low-head-engine", *head_of_engine(BFLOAT16), dtype=FLOAT32),
    ),
    Plant(
        "weights of int8, engine", MODELS, ("weights",), _engine("int8", tensors=rounded_to_int8)
    ),
    Plant(
        "one tensor × 1.01, trainer",
        (BUNDLED, LLAMA, MOE),
        ("weights", SCALED),
        _trainer("scaled", tensors=scaled(SCALED, 1.01)),
        parts=(SCALED,),
    ),
    Plant(
        "one tensor × 1.01, trainer",
        (GEMMA,),
        ("weights", NORMED_NOWHERE),
        _trainer("scaled-queries", tensors=scaled(NORMED_NOWHERE, 1.01)),
        parts=(NORMED_NOWHERE,),
    ),
    Plant(
        "one stale tensor, engine",
        MODELS,
        ("weights", STALE),
        _engine("stale", tensors=stale(STALE)),
        parts=(STALE,),
    ),
    Plant("temperature", MODELS, ("temperature",), temperature),
    Plant(
        "soft cap left out",
        (GEMMA,),
        ("attn_implementation", "attn_logit_softcapping"),
        without_cap,
    ),
    Plant(
        "padding attended",
        MODELS,
        ("attention_mask", "attended-padding", "padding"),
        attended_padding,
    ),
    Plant(
        "router with another top-k",
        (MOE,),
        tuple(ONE_EXPERT),
        _trainer("one-expert", settings=ONE_EXPERT),
    ),
)
