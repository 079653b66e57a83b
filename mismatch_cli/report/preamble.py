"""What was compared, how, and what was left out: the first lines of every report, from the
manifest.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.metrics.pair_summary import PairSummary
from mismatch_cli.models import weights_note
from mismatch_cli.models.attention import attention_warning
from mismatch_cli.models.positions import rescaling_warning
from mismatch_cli.probe.tasks.answers import without_answer
from mismatch_cli.report.outline import Facts, stated
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
    facts = {
        "Recorded by" if recorded else "Imported from": imported_fact(about.source),
        "Rollout engine": _engine(about.engine_side),
        "Trainer": _trainer(about.trainer_side),
        "Trainer at the rollout's weights": _trainer(about.recomputed_side),
        "Sampling": _sampling(about),
        "Prompts": _prompts(about.prompt_facts),
    }
    return stated(facts.items())


def subject_lines(about: About, counts: Coverage, unit: str = "token") -> tuple[str, str]:
    """What was measured, in two lines: both sides with their precision; model, tokens and
    temperature.
    """
    engine, trainer, temperature = about.engine_side, about.trainer_side, about.sampling.temperature
    first = _sides(engine, trainer) or imported_fact(about.source)
    second = [*_models(trainer, engine), measured(counts, numbers.things(counts.tokens, unit))]
    if temperature is not None:
        second.append(f"T = {temperature:g}")
    return first or "engine, trainer and precision not recorded", _joined(*second)


def _models(*sides: Side | None) -> list[str]:
    """The models of both sides, each once."""
    names = dict.fromkeys(side.model for side in sides if side and side.model)
    models = []
    for name in names:
        others = [other for other in names if other != name]
        # A shortened path, `…/model`, may be the end of the other side's `sample_data/model`.
        end = name.removeprefix("…")
        is_repeated = name.startswith("…/") and any(other.endswith(end) for other in others)
        if not is_repeated:
            models.append(name)
    return models


def _sides(engine: Side | None, trainer: Side | None) -> str:
    """`vllm 0.32.0 bfloat16 with KV cache fp8 against transformers 5.19.0 bfloat16`."""
    sides = []
    for side, role in ((engine, "engine"), (trainer, "trainer")):
        if side is not None:
            words = (_name(side, role), _dtype(side), side.cache)
            sides.append(" ".join(filter(None, words)))
    return " against ".join(sides)


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
    facts = [_name(engine), _model(engine), dtype]
    if cache not in (dtype, None):
        facts.append(f"KV cache {cache}")
    return _joined(*facts, engine.device)


def _trainer(trainer: Side | None) -> str:
    if trainer is None:
        return ""
    dtype, head = _dtype(trainer), trainer.head_dtype
    precision = dtype
    if head not in (dtype, None):
        precision += f", head {head}"
    facts = [_name(trainer), _model(trainer), precision]
    if trainer.attn_implementation:
        facts.append(f"{trainer.attn_implementation} attention")
    return _joined(*facts, trainer.device)


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
    facts = []
    for name, value, off in (
        ("temperature", sampling.temperature, None),
        ("top-p", sampling.top_p, 1.0),
        ("top-k", sampling.top_k, 0),
        ("min-p", sampling.min_p, 0.0),
    ):
        if value is not None and value != off:
            facts.append(f"{name} {value:g}")
    if sampling.max_tokens is not None:
        facts.append(f"at most {sampling.max_tokens} tokens")
    if engine and engine.max_model_len:
        facts.append(f"context {engine.max_model_len}")
    return _joined(*facts)


def _prompts(prompts: PromptFacts | None) -> str:
    if prompts is None:
        return ""
    template = f"{prompts.template} template"
    if prompts.template == "raw":
        template = "raw, no template"
    return f"{prompts.count} from {prompts.source} · {template}"


def measured(counts: Coverage, tokens: str) -> str:
    """The number of tokens (in the caller's words), responses and prompts."""
    about = "" if counts.prompts_exact else "about "
    return (
        f"{tokens} in {numbers.things(counts.responses, 'response')} "
        f"to {about}{numbers.things(counts.prompts, 'prompt')}"
    )


def left_out(about: About, main: PairSummary, total: PairSummary | None) -> tuple[str, ...]:
    """What the numbers leave out, and why: of the main pair, and with staleness where that
    leaves out more.
    """
    of_main = by_reason(main.counts, _LEFT_OUT)
    notes = list(left_out_of(about, of_main))
    if total is not None:
        for counted, of_total in zip(of_main, by_reason(total.counts, _LEFT_OUT), strict=True):
            number, text = of_total
            if number and of_total != counted:
                notes.append(f"With staleness, {numbers.counted(number, text)}.")
    return tuple(notes)


def by_reason(counts: object, reasons: Mapping[str, str]) -> list[tuple[int, str]]:
    """Counts by the names of their attributes, each with the words of what it counts."""
    return [(getattr(counts, name), text) for name, text in reasons.items()]


def left_out_of(about: About, counted: Iterable[tuple[int, str]] = ()) -> tuple[str, ...]:
    """Notes on partial traces, substituted attention, skipped prompts, and what else was left
    out: how many, and what they are.
    """
    sides = [side or {} for side in (about.rollout, about.trainer, about.recomputed)]
    rollout, trainer, _ = sides
    notes = [*partial_notes(about), *map(attention_warning, sides), *notes_of(about.source)]
    notes.append(rescaling_warning(rollout, trainer))
    notes.append(weights_note.weights_sentence(rollout, trainer))
    if about.prompt_facts:
        notes.append(_skipped(about.prompt_facts.skipped))
    notes += [f"{numbers.counted(count, text)}." for count, text in counted if count]
    if about.grading_timeouts:
        scored = numbers.counted(about.grading_timeouts, "responses score 0")
        notes.append(f"{scored} because grading the answer took too long.")
    if about.unstated:
        notes.append(without_answer(about.unstated, about.responses))
    return tuple(filter(None, notes))


def partial_notes(about: About) -> tuple[str, ...]:
    """A note for each incomplete trace."""
    notes = []
    for shortfall in about.partial:
        reasons = "; ".join(shortfall.reasons)
        notes.append(
            f"PARTIAL: {shortfall.trace} is incomplete; the numbers cover the rest: {reasons}. "
            f"{shortfall.remedy}"
        )
    return tuple(notes)


def _skipped(skipped: Sequence[SkippedPrompt]) -> str:
    if not skipped:
        return ""
    reasons = [f"prompt {each.prompt_id}: {each.reason}" for each in skipped[:_SKIPPED_SHOWN]]
    others = len(skipped) - _SKIPPED_SHOWN
    if others > 0:
        reasons.append(f"and {others} more, in manifest.json")
    return f"{numbers.counted(len(skipped), 'prompts were skipped')} ({'; '.join(reasons)})."


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
    facts = []
    for name, value in settings.items():
        facts.append((name.replace("_", " "), numbers.MISSING if value is None else str(value)))
    return tuple(facts)


def command_line(command: str, runs: Sequence[Path], *flags: str) -> str:
    """The command that shows this report again; `runs` are the traces as the user types them."""
    return suggest(command, *shorten_paths(list(runs)), *shorten_paths(list(flags)))
