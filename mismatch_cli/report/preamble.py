"""What was compared, how, and what was left out: the first lines of every report, from the
manifest.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.metrics.pair_summary import TokenTotals
from mismatch_cli.models import weights_note
from mismatch_cli.models.attention import attention_warning
from mismatch_cli.models.positions import rescaling_warning
from mismatch_cli.probe.tasks.answers import without_answer
from mismatch_cli.report.outline import Facts
from mismatch_cli.studies.study import imported_fact, notes_of
from mismatch_cli.trace.origin import About, PromptFacts, Side, SkippedPrompt

_SKIPPED_SHOWN = 3
# Metrics beside the headline
LEADING = ("tv_binary_mean", "abs_d_mean", "k3", "ratio_outside_0.8_1.28")
# On screens
DECIDING = (
    "tv_binary_mean",
    "abs_d_mean",
    "abs_d_p99",
    "k3",
    "ratio_outside_0.8_1.28",
    "sequence_d_sd",
)
GAPS = {  # what each pair of policies compares
    "mismatch": "the same weights in the trainer (π) and in the rollout engine (μ)",
    "total": "the trainer's current weights (π) against the rollout engine (μ)",
    "staleness": "the trainer's current weights (π) against the weights that sampled (as μ)",
    "floor": "the trainer in another batch shape (π) against itself (as μ)",
}
MASKED = {
    "masked": "tokens are masked: the trainer does not learn from them",
    "not_measured": "tokens have no valid log-probability on one side (see `mismatch-cli diagnose`)",
}
_LEFT_OUT = MASKED | {
    "out_of_support": (
        "tokens are outside the trainer's truncated support (π = 0): |π − μ| counts them as μ, "
        "log metrics omit them"
    )
}


class Coverage(Protocol):
    """How much a result covers."""

    @property
    def tokens(self) -> int: ...
    @property
    def responses(self) -> int: ...
    @property
    def prompts(self) -> int: ...
    @property
    def prompts_exact(self) -> bool: ...


def about_facts(about: About, counts: Coverage) -> Facts:
    """Models, dtypes, versions, temperature and the number of tokens."""
    tokens = numbers.things(counts.tokens, "token")
    return (*who_facts(about), ("Measured on", measured(counts, tokens)))


def who_facts(about: About) -> Facts:
    """Models, dtypes, versions, temperature and prompts, as far as the manifest has them."""
    recorded = about.source is not None and about.source.is_recorded
    facts = [
        ("Recorded by" if recorded else "Imported from", imported_fact(about.source)),
        ("Rollout engine", _engine(about.engine_side)),
        ("Trainer", _trainer(about.trainer_side)),
        ("Trainer at the rollout's weights", _trainer(about.recomputed_side)),
        ("Sampling", _sampling(about)),
        ("Prompts", _prompts(about.prompt_facts)),
    ]
    return tuple((label, value) for label, value in facts if value)


def subject_lines(about: About, counts: Coverage, what: str = "token") -> tuple[str, str]:
    """What was measured, in two lines: both sides with their precision; model, tokens and
    temperature.
    """
    engine, trainer, temperature = about.engine_side, about.trainer_side, about.sampling.temperature
    models = list(dict.fromkeys(side.model for side in (trainer, engine) if side and side.model))
    models = [name for name in models if not any(_names_the_end(name, other) for other in models)]
    tokens = measured(counts, numbers.things(counts.tokens, what))
    second = _joined(*models, tokens, None if temperature is None else f"T = {temperature:g}")
    first = _sides(engine, trainer) or imported_fact(about.source)
    return first or "engine, trainer and precision not recorded", second


def _names_the_end(model: str, other: str) -> bool:
    """Whether a shortened path may be the end of the other: `…/model` of `sample_data/model`."""
    return model.startswith("…/") and other != model and other.endswith(model.removeprefix("…"))


def _sides(engine: Side | None, trainer: Side | None) -> str:
    """`vllm 0.32.0 bfloat16 with KV cache fp8 against transformers 5.19.0 bfloat16`."""
    sides = {"engine": engine, "trainer": trainer}
    return " against ".join(_side(_name(side, word), side) for word, side in sides.items() if side)


def _side(name: str, side: Side) -> str:
    return " ".join(filter(None, (name, _dtype(side), side.cache)))


def _dtype(side: Side) -> str:
    """The type of the weights, or what they are quantised to where that alone is stated."""
    return side.dtype or side.quantization or "dtype not recorded"


def _name(side: Side, otherwise: str = "not named") -> str:
    """`vllm 0.32.0`, `transformers 5.19.0`."""
    return " ".join(filter(None, (side.program, side.transformers or side.version))) or otherwise


def _joined(*parts: str | None) -> str:
    return " · ".join(filter(None, parts))


def _engine(engine: Side | None) -> str:
    if engine is None:
        return ""
    dtype, cache = _dtype(engine), engine.kv_cache_dtype
    cache = None if cache in (dtype, None) else f"KV cache {cache}"
    return _joined(_name(engine), _model(engine), dtype, cache, engine.device)


def _trainer(trainer: Side | None) -> str:
    if trainer is None:
        return ""
    dtype, head, kind = _dtype(trainer), trainer.head_dtype, trainer.attn_implementation
    precision = dtype + ("" if head in (dtype, None) else f", head {head}")
    attention = f"{kind} attention" if kind else None
    return _joined(_name(trainer), _model(trainer), precision, attention, trainer.device)


def _model(side: Side) -> str:
    return (side.model or "") + _adapter(side)


def _adapter(side: Side) -> str:
    if not side.adapter:
        return ""
    merged = ", merged" if side.adapter_merged else ""
    return f" + adapter {side.adapter} (rank {side.adapter_rank}{merged})"


def _sampling(about: About) -> str:
    """The settings that differ from plain sampling, and how long responses and context may be."""
    if not about.sampling_settings:
        return ""
    sampling, engine = about.sampling, about.engine_side
    context = engine.max_model_len if engine else None
    return _joined(
        _unless(sampling.temperature, None, "temperature"),
        _unless(sampling.top_p, 1.0, "top-p"),
        _unless(sampling.top_k, 0, "top-k"),
        _unless(sampling.min_p, 0.0, "min-p"),
        None if sampling.max_tokens is None else f"at most {sampling.max_tokens} tokens",
        f"context {context}" if context else None,
    )


def _unless(value: float | None, off: float | None, name: str) -> str | None:
    return None if value in (None, off) else f"{name} {value:g}"


def _prompts(prompts: PromptFacts | None) -> str:
    if prompts is None:
        return ""
    raw = prompts.template == "raw"
    template = "raw, no template" if raw else f"{prompts.template} template"
    return f"{prompts.count} from {prompts.source} · {template}"


def measured(counts: Coverage, tokens: str) -> str:
    """The number of tokens (in the caller's words), responses and prompts."""
    about = "" if counts.prompts_exact else "about "
    return (
        f"{tokens} in {numbers.things(counts.responses, 'response')} "
        f"to {about}{numbers.things(counts.prompts, 'prompt')}"
    )


def left_out(about: About, first: TokenTotals, total: TokenTotals | None) -> tuple[str, ...]:
    """What the numbers leave out, and why: of the first pair, and with staleness where that
    leaves out more.
    """
    notes = left_out_of(about, [(getattr(first, name), text) for name, text in _LEFT_OUT.items()])
    if total is None:
        return notes
    more = (
        f"With staleness, {numbers.counted(count, text)}."
        for name, text in _LEFT_OUT.items()
        if (count := getattr(total, name)) and count != getattr(first, name)
    )
    return (*notes, *more)


def left_out_of(about: About, counted: Iterable[tuple[int, str]] = ()) -> tuple[str, ...]:
    """Notes on partial traces, substituted attention, skipped prompts, and what else was left
    out: how many, and what they are.
    """
    sides = [side or {} for side in (about.rollout, about.trainer, about.recomputed)]
    rollout, trainer, _ = sides
    notes = [*partial_notes(about), *map(attention_warning, sides), *notes_of(about.source)]
    notes.append(rescaling_warning(rollout, trainer))
    notes.append(weights_note.weights_sentence(rollout, trainer))
    notes.append(_skipped(about.prompt_facts.skipped if about.prompt_facts else ()))
    notes += [f"{numbers.counted(count, text)}." for count, text in counted if count]
    if about.grading_timeouts:
        scored = numbers.counted(about.grading_timeouts, "responses score 0")
        notes.append(f"{scored} because grading the answer took too long.")
    if about.unstated:
        notes.append(without_answer(about.unstated, about.responses))
    return tuple(note for note in notes if note)


def partial_notes(about: About) -> tuple[str, ...]:
    """A note for each incomplete trace."""
    return tuple(
        f"PARTIAL: {part.trace} is incomplete; the numbers cover the rest: "
        f"{'; '.join(part.reasons)}. {part.remedy}"
        for part in about.partial
    )


def _skipped(skipped: Sequence[SkippedPrompt]) -> str:
    if not skipped:
        return ""
    named = "; ".join(f"prompt {s.prompt_id}: {s.reason}" for s in skipped[:_SKIPPED_SHOWN])
    left = len(skipped) - _SKIPPED_SHOWN
    rest = f"; and {left} more, in manifest.json" if left > 0 else ""
    return f"{numbers.counted(len(skipped), 'prompts were skipped')} ({named}{rest})."


def settings_tables(about: About) -> tuple[tuple[str, Facts], ...]:
    """Every setting as resolved."""
    tables = {
        "Rollout engine": about.rollout,
        "Trainer": about.trainer,
        "Trainer at the rollout's weights": about.recomputed,
        "Libraries": about.libraries,
    }
    return tuple((title, _facts(settings)) for title, settings in tables.items() if settings)


def _facts(settings: Mapping[str, Any]) -> Facts:
    return tuple(
        (name.replace("_", " "), "—" if value is None else str(value))
        for name, value in settings.items()
    )


def command_line(command: str, runs: Sequence[Path], *flags: str) -> str:
    """The command that shows this report again; `runs` are the traces as the user types them."""
    return suggest(command, *shorten_paths(list(runs)), *shorten_paths(list(flags)))
