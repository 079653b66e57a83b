"""What was compared, how, and what was left out: the first lines of every report, from the
manifest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import shown
from mismatch_cli.models import weights_note
from mismatch_cli.models.attention import warning
from mismatch_cli.models.positions import rescaled
from mismatch_cli.probe.tasks.answers import without_answer
from mismatch_cli.report.view import Facts
from mismatch_cli.studies.study import cache_of, imported_fact, notes_of, program
from mismatch_cli.trace.recorder_notes import RECORD

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


def about_facts(summary: Mapping[str, Any]) -> Facts:
    """Models, dtypes, versions, temperature and the number of tokens."""
    counts = next(iter(summary["pairs"].values()))["counts"]
    return (
        *who_facts(summary["about"]),
        ("Measured on", measured(counts, numbers.things(counts["tokens"], "token"))),
    )


def who_facts(about: Mapping[str, Any]) -> Facts:
    """Models, dtypes, versions, temperature and prompts, as far as the manifest has them."""
    facts = [
        ("Recorded by" if is_recorded(about) else "Imported from", imported_fact(about)),
        ("Rollout engine", _engine(about.get("rollout", {}))),
        ("Trainer", _trainer(about.get("trainer", {}))),
        ("Trainer at the rollout's weights", _trainer(about.get("recomputed", {}))),
        (
            "Sampling",
            _sampling(about.get("config", {}).get("sampling", {}), about.get("rollout", {})),
        ),
        ("Prompts", _prompts(about)),
    ]
    return tuple((label, value) for label, value in facts if value)


def is_recorded(about: Mapping[str, Any]) -> bool:
    """Whether a recorder inside a run wrote the trace."""
    return bool(about.get("imported", {}).get("format") == RECORD)


def subject_lines(
    about: Mapping[str, Any], counts: Mapping[str, Any], what: str = "token"
) -> tuple[str, str]:
    """What was measured, in two lines: both sides with their precision; model, tokens and
    temperature.
    """
    engine, trainer = about.get("rollout", {}), about.get("trainer", {})
    temperature = about.get("config", {}).get("sampling", {}).get("temperature")
    models = list(
        dict.fromkeys(side["model"] for side in (trainer, engine) if side and side["model"])
    )
    models = [name for name in models if not any(_names_the_end(name, other) for other in models)]
    tokens = measured(counts, numbers.things(counts["tokens"], what))
    second = _joined(*models, tokens, None if temperature is None else f"T = {temperature:g}")
    return _sides(engine, trainer) or imported_fact(
        about
    ) or "engine, trainer and precision not recorded", second


def _names_the_end(model: str, other: str) -> bool:
    """Whether a shortened path may be the end of the other: `…/model` of `sample_data/model`."""
    return model.startswith("…/") and other != model and other.endswith(model.removeprefix("…"))


def _sides(engine: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """`vllm 0.32.0 bfloat16 with KV cache fp8 against transformers 5.19.0 bfloat16`."""
    sides = {"engine": engine, "trainer": trainer}
    return " against ".join(_side(_name(side, word), side) for word, side in sides.items() if side)


def _side(name: str, side: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (name, _dtype(side), cache_of(side))))


def _dtype(side: Mapping[str, Any]) -> str:
    """The type of the weights, or what they are quantised to where that alone is stated."""
    return str(side["dtype"] or side.get("quantization") or "dtype not recorded")


def _name(side: Mapping[str, Any], otherwise: str = "not named") -> str:
    """`vllm 0.32.0`, `transformers 5.19.0`."""
    return (
        " ".join(filter(None, (program(side), side.get("transformers") or side.get("version"))))
        or otherwise
    )


def _joined(*parts: str | None) -> str:
    return " · ".join(filter(None, parts))


def _engine(engine: Mapping[str, Any]) -> str:
    if not engine:
        return ""
    dtype, cache = _dtype(engine), engine["kv_cache_dtype"]
    cache = None if cache in (dtype, None) else f"KV cache {cache}"
    return _joined(_name(engine), _model(engine), dtype, cache, engine["device"])


def _trainer(trainer: Mapping[str, Any]) -> str:
    if not trainer:
        return ""
    dtype, head, kind = _dtype(trainer), trainer["head_dtype"], trainer["attn_implementation"]
    precision = dtype + ("" if head in (dtype, None) else f", head {head}")
    attention = f"{kind} attention" if kind else None
    return _joined(_name(trainer), _model(trainer), precision, attention, trainer["device"])


def _model(side: Mapping[str, Any]) -> str:
    return (side["model"] or "") + _adapter(side)


def _adapter(side: Mapping[str, Any]) -> str:
    if not side.get("adapter"):
        return ""
    merged = ", merged" if side["adapter_merged"] else ""
    return f" + adapter {side['adapter']} (rank {side['adapter_rank']}{merged})"


def _sampling(sampling: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    if not sampling:
        return ""
    usual = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # an import may lack any
    return _joined(
        *(
            f"{key.replace('_', '-')} {sampling[key]:g}"
            for key, off in usual.items()
            if sampling.get(key, off) != off
        ),
        f"at most {sampling['max_tokens']} tokens" if "max_tokens" in sampling else None,
        f"context {engine['max_model_len']}" if engine.get("max_model_len") else None,
    )


def _prompts(about: Mapping[str, Any]) -> str:
    prompts = about.get("prompts")
    if not prompts:
        return ""
    template = (
        "raw, no template" if prompts["template"] == "raw" else f"{prompts['template']} template"
    )
    return f"{prompts['count']} from {prompts['source']} · {template}"


def measured(counts: Mapping[str, Any], tokens: str) -> str:
    """The number of tokens (in the caller's words), responses and prompts."""
    about = "" if counts["prompts_exact"] else "about "
    return (
        f"{tokens} in {numbers.things(counts['responses'], 'response')} "
        f"to {about}{numbers.things(counts['prompts'], 'prompt')}"
    )


def left_out(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """What the numbers leave out, and why; also with staleness, where that leaves out more."""
    first, total = (
        next(iter(summary["pairs"].values()))["counts"],
        summary["pairs"].get("total", {}).get("counts", {}),
    )
    of_total = (
        f"With staleness, {numbers.counted(count, text)}."
        for name, text in _LEFT_OUT.items()
        if (count := total.get(name)) and count != first[name]
    )
    return (*left_out_of(summary["about"], first, _LEFT_OUT), *of_total)


def left_out_of(
    about: Mapping[str, Any], counts: Mapping[str, Any], words: Mapping[str, str]
) -> tuple[str, ...]:
    """Notes on partial traces, substituted attention, skipped prompts, and the counts in
    `words`.
    """
    sides = [about.get(name, {}) for name in ("rollout", "trainer", "recomputed")]
    rollout, trainer, _ = sides
    notes = [*partial_notes(about), *map(warning, sides), *notes_of(about.get("imported"))]
    notes.append(rescaled(rollout, trainer))
    notes.append(weights_note.noted(rollout, trainer))
    notes.append(_skipped(about.get("prompts", {}).get("skipped", [])))
    notes += [
        f"{numbers.counted(counts[name], text)}." for name, text in words.items() if counts[name]
    ]
    late = about["grading_timeouts"]
    if late:
        scored = numbers.counted(late, "responses score 0")
        notes.append(f"{scored} because grading the answer took too long.")
    unstated = about["unstated"]
    if unstated:
        notes.append(without_answer(unstated, about["responses"]))
    return tuple(note for note in notes if note)


def partial_notes(about: Mapping[str, Any]) -> tuple[str, ...]:
    """A note for each incomplete trace."""
    return tuple(
        f"PARTIAL: {part['trace']} is incomplete; the numbers cover the rest: "
        f"{'; '.join(part['reasons'])}. {part['remedy']}"
        for part in about.get("partial", ())
    )


def _skipped(skipped: list[Mapping[str, Any]]) -> str:
    if not skipped:
        return ""
    named = "; ".join(f"prompt {s['prompt_id']}: {s['reason']}" for s in skipped[:_SKIPPED_SHOWN])
    rest = (
        f"; and {len(skipped) - _SKIPPED_SHOWN} more, in manifest.json"
        if len(skipped) > _SKIPPED_SHOWN
        else ""
    )
    return f"{numbers.counted(len(skipped), 'prompts were skipped')} ({named}{rest})."


def settings_tables(summary: Mapping[str, Any]) -> tuple[tuple[str, Facts], ...]:
    """Every setting as resolved."""
    about = summary["about"]
    titles = {
        "rollout": "Rollout engine",
        "trainer": "Trainer",
        "recomputed": "Trainer at the rollout's weights",
        "libraries": "Libraries",
    }
    return tuple((title, _facts(about[name])) for name, title in titles.items() if about.get(name))


def _facts(settings: Mapping[str, Any]) -> Facts:
    return tuple(
        (name.replace("_", " "), "—" if value is None else str(value))
        for name, value in settings.items()
    )


def command_line(command: str, runs: Sequence[Path], *flags: str) -> str:
    """The command that shows this report again; `runs` are the traces as the user types them."""
    return suggest(command, *shown(list(runs)), *shown(list(flags)))
