"""`mismatch-cli verdict`: is this number normal? For a metric from any framework's dashboard,
without a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.command import Command
from mismatch_cli.app.common import Common, print_json, print_parts
from mismatch_cli.app.completions import frameworks
from mismatch_cli.app.flags import flags
from mismatch_cli.app.shared_settings import ListSettings
from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.json_form import to_json
from mismatch_cli.base.options import override, setting, settings_group
from mismatch_cli.frameworks import DASHBOARDS
from mismatch_cli.limits.manifest_sides import DTYPES, family, recorded_dtype
from mismatch_cli.limits.model_names import is_kind, named_model
from mismatch_cli.probe.settings import RolloutSettings, SamplerSettings, ScorerSettings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.studies.dashboard import ListedMetric

PANEL, PLACE = "Measure", 4

_OWN, _EXAMPLE = "mismatch", "k1=0.01"
# The mean |Δlog p| of the trace fp8-kv, its dtype and its KV cache
_BUNDLED = "abs_d_mean=0.0083", "bf16", "fp8"
_VALUE = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?|[-+]?(nan|inf|infinity)", re.IGNORECASE)
_NEGATIVE = re.compile(r"-\.?\d")
_SIGN = re.compile(r"−(?=\.?\d)")  # as our own screens print a negative number
_RUN = "The run behind the number"
of_run = partial(setting, panel=_RUN)
_TRAINER_DTYPE = override(
    None, help="Dtype of the trainer, if different.", choices=("dtype", DTYPES)
)


class TakesNegatives(Command):
    """A command that takes a negative number after a name or its `=`."""

    def parse_args(self, ctx: Any, args: Sequence[str]) -> list[str]:
        """Parse `k1 -0.001` as `k1=-0.001`: Typer reads what begins with a dash as a flag."""
        words: list[str] = []
        for typed in args:
            word = _SIGN.sub("-", typed)
            if words and _NEGATIVE.match(word) and not words[-1].startswith("-"):
                words[-1] = f"{words[-1].removesuffix('=')}={word}"
            else:
                words.append(word)
        return super().parse_args(ctx, words)


COMMAND = TakesNegatives


@dataclass(frozen=True, kw_only=True)
class NumberSettings:
    """The numbers, as they are typed."""

    numbers: list[str] | None = setting(
        None,
        "Metrics and numbers: NAME=VALUE or NAME VALUE. A framework is needed where several use "
        "the name differently.",
        argument=True,
        metavar="[FRAMEWORK] [NAME=VALUE]...",
        completes=frameworks,
        show_default="the mean |Δlog p| of a bundled trace",
    )


@dataclass(frozen=True, kw_only=True)
class FamilySettings:
    """The model behind a number, and its precision."""

    model: str | None = of_run(
        None,
        "dense or moe, one of these with a size (dense-7b), or a hub's name.",
        metavar="MODEL",
        completes=("dense", "moe"),
    )
    dtype: str | None = of_run(
        None, "Dtype of the rollout engine's weights.", choices=("dtype", DTYPES)
    )


@flags()
def command(
    *,
    named: NumberSettings = settings_group(NumberSettings),
    listing: ListSettings = settings_group(ListSettings),
    of_family: FamilySettings = settings_group(FamilySettings),
    trainer: Any = settings_group(ScorerSettings, "dtype", dtype=_TRAINER_DTYPE, panel=_RUN),
    engine: Any = settings_group(
        RolloutSettings, "kv_cache_dtype", kv_cache_dtype=override(show_default=""), panel=_RUN
    ),
    sampler: Any = settings_group(
        SamplerSettings,
        "temperature",
        "top_p",
        temperature=override(None),
        top_p=override(None, flag=True),
        panel=_RUN,
    ),
    common: Common = settings_group(Common, "json", "quiet", "debug"),
) -> None:
    """Say whether a number is normal: which limits it meets, what others measured, what to check
    first.

    It needs no trace. The exit code is 0 whether limits hold or not; use `gate` to fail a job.

    Examples:
      mismatch-cli verdict trl sampling/sampling_logp_difference/mean=0.02 --model dense-7b --dtype bf16
      mismatch-cli verdict verl training/rollout_probs_diff_mean=0.007 rollout_corr/kl=0.002
      mismatch-cli verdict k3 0.0015 k1 -0.001 --model Qwen/Qwen3-30B-A3B
      mismatch-cli verdict --list trl
    """
    words = named.numbers or []
    dtype = of_family.dtype
    cache_dtype = engine.kv_cache_dtype
    if not words and not listing.list:
        number, bundled_dtype, bundled_cache_dtype = _BUNDLED
        words = [number]
        dtype = dtype or bundled_dtype
        cache_dtype = cache_dtype or bundled_cache_dtype
        common.progress.say(
            "No metric named: judging the mean |Δlog p| of fp8-kv, a bundled trace."
        )
    framework, values = _parsed(words, listing.list)
    sampling = {"temperature": sampler.temperature, "top_p": sampler.top_p}
    about = _about(of_family.model, dtype, trainer.dtype, cache_dtype, sampling)
    from mismatch_cli.studies.dashboard import DashboardNumbers, QuotedNumber, listed_metrics

    if listing.list:
        _show_names(listed_metrics(framework), common.json)
        return
    quoted = [QuotedNumber.of(framework, name, value) for name, value in values]
    common.print(DashboardNumbers(quoted, about))


def _parsed(words: Sequence[str], without_numbers: bool) -> tuple[str, list[tuple[str, float]]]:
    """The framework (empty if none was named), and each metric with its value."""
    framework = ""
    rest = words = _without_blanks(words)
    if words and words[0] in (_OWN, *frameworks()):
        framework, *rest = words
    if without_numbers:
        _check_without_numbers(framework, rest)
        return framework, []
    if framework and not rest:
        raise UsageError(
            f"Which metric of {framework}? Give NAME=VALUE. For names: "
            f"{suggest('verdict', '--list', framework)}"
        )
    return framework, [_number(pair) for pair in _pairs(rest, framework)]


def _without_blanks(words: Sequence[str]) -> list[str]:
    """The words without blanks around them or their `=`, typed as `NAME = VALUE` in one word or
    three.
    """
    tight: list[str] = []
    for word in words:
        name, equals, value = word.rpartition("=")
        typed = name.strip() + equals + value.strip()
        if tight and (typed.startswith("=") or tight[-1].endswith("=")):
            tight[-1] += typed
        else:
            tight.append(typed)
    return tight


def _check_without_numbers(framework: str, rest: Sequence[str]) -> None:
    if not rest:
        return
    if not framework and "=" not in rest[0]:
        registry.check(DASHBOARDS, rest[0], "framework")
    raise UsageError(f"--list only lists names: leave out {rest[0]}.")


def _pairs(words: Sequence[str], framework: str) -> Iterator[str]:
    """Each metric as NAME=VALUE, whether typed as one word or as two."""
    owner = [framework] if framework else []
    rest = iter(words)
    for word in rest:
        if _VALUE.fullmatch(word):
            raise UsageError(
                f"{word} of which metric? Type its name too: "
                f"{suggest('verdict', *owner, f'NAME={word}')}. For names: "
                f"{suggest('verdict', '--list', *owner)}"
            )
        if "=" in word:
            yield word
            continue
        value = next(rest, "")
        if not _VALUE.fullmatch(value):
            from mismatch_cli.studies.metric_names import without_value

            raise UsageError(without_value(word, framework))
        yield f"{word}={value}"


def _number(word: str) -> tuple[str, float]:
    name, separator, text = word.rpartition("=")
    if not separator or not name:
        raise UsageError(f"'{word}' is not NAME=VALUE. Example: mismatch-cli verdict {_EXAMPLE}")
    if text.endswith("%"):
        raise UsageError(f"{word}: give a number, not a percentage. Write 2 % as 0.02.")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        raise UsageError(f"{word}: '{text}' is not a finite number. Write it as 0.02 or 2e-2.")
    value = float(text)
    if not isfinite(value):
        raise UsageError(f"{word} is too large. Give a finite number.")
    return name, value


def _about(
    model: str | None,
    dtype: str | None,
    trainer_dtype: str | None,
    cache_dtype: str | None,
    sampling: dict[str, Any],
) -> dict[str, Any]:
    """The facts about the run, as a manifest has them; a `UsageError` for an invalid one."""
    for name, most in (("temperature", 100), ("top_p", 1)):
        value = sampling[name]
        if value is not None and not 0 < value <= most:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} {value:g} is out of range. Use a number above 0 and at most {most}."
            )
    of_model = _model(model)
    engine_dtype = recorded_dtype(dtype)
    rollout = {**of_model, **engine_dtype, "kv_cache_dtype": cache_dtype}
    # Without a dtype of its own, the trainer has that of the engine: of two, one is usually named.
    # Weights below 16 bits, such as fp8, are the engine's alone, and not part of this `dtype`.
    trainer = {**of_model, **recorded_dtype(trainer_dtype or engine_dtype.get("dtype"))}
    return {"rollout": rollout, "trainer": trainer, "config": {"sampling": sampling}}


def _model(name: str | None) -> dict[str, Any]:
    """The facts about a model of this name; a `UsageError` if they do not say whether it has
    experts.
    """
    if name is None or is_kind(name):
        return {"architecture": name}
    from mismatch_cli.models.loading import local_architecture

    by_name = named_model(name)
    facts = {"model": name, "architecture": local_architecture(name) or by_name.kind}
    if not family({"rollout": facts}):
        raise UsageError(
            f"--model {name} does not say whether it has experts. Use dense-{by_name.size or '7b'} "
            f"or moe-{by_name.size or '30b'}."
        )
    return facts


def _show_names(metrics: Sequence[ListedMetric], as_json: bool) -> None:
    if as_json:
        print_json(to_json(metrics))
        return
    from rich.text import Text

    parts: list[RenderableType] = []
    for framework, group in groupby(metrics, lambda metric: metric.framework):
        of_framework = list(group)
        widest = max(len(metric.name) for metric in of_framework)
        parts.append(Text(framework, style="bold"))
        for metric in of_framework:
            definition = metric.formula
            if metric.metric and framework != _OWN:
                definition += f"  = {metric.metric}"
            parts.append(Text.assemble(f"  {metric.name:<{widest}}  ", (definition, "dim")))
    print_parts(*parts, Text("Use: mismatch-cli verdict FRAMEWORK NAME=VALUE"))
