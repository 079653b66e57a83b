"""In which settings two manifests differ, those first that most often explain a difference of log-probabilities."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = "ABCDEF"  # of the traces, as many as there are colours that can be told apart
_SECTIONS = (
    "rollout", "trainer", "recomputed", "equal_weights", "threads", "top_logprobs", "libraries", "prompts", "training",
    "imported", "config",
)  # fmt: skip
# What was asked for, and one version under two names: the same setting as the one that was resolved.
_SAME_AS = (
    (r"config\.trainer\.(\w+)", r"trainer.\1"),
    (r"config\.rollout_dtype", "rollout.dtype"),
    (r"config\.engine_args\.(\w+)", r"rollout.\1"),
    (r"config\.(engine|model|seed)", r"rollout.\1"),
    (r"config\.(threads|top_logprobs)", r"\1"),
    (r"trainer\.threads|recomputed\.threads", "threads"),
    (r"(?:trainer|recomputed)\.(torch|transformers)", r"libraries.\1"),
    (r"libraries\.vllm(?:-cpu)?", "rollout.version"),
    (r"config\.prompts\.location", "prompts.source"),
    (r"config\.prompt_template", "prompts.template"),
)


@dataclass(frozen=True)
class Cause:
    """Settings that are known to move log-probabilities: how, and who found it."""

    pattern: str
    why: str
    source: str


_EITHER = r"(rollout|trainer|recomputed)\."
CAUSES = (
    Cause(r"rollout\.logprobs_mode", "raw log-probs are not those of the distribution that was sampled",
          "vime#64, trl#4159"),
    Cause(r"config\.sampling\.temperature", "a temperature that only one side applies scales every log-prob",
          "miles PR#1345, prime-rl PR#697"),
    Cause(r"config\.sampling\.(top_p|top_k|min_p)", "the engine renormalises over what it keeps: one-sided gaps",
          "trl#6789, NeMo-RL#3365"),
    Cause(_EITHER + r"(architecture|parameters|vocab_size)", "another model", "elementary"),
    Cause(r"equal_weights", "later weights in the trainer add staleness", "trl#5312"),
    Cause(r"rollout\.quantization", "quantised rollouts differ by model family", "verl PR#4435, miles#2722"),
    Cause(r"rollout\.kv_cache_dtype", "a cache of fewer bits raises the mismatch", "NeMo-RL PR#1212"),
    Cause(_EITHER + r"dtype", "bfloat16 keeps 8 bits of a number, float16 11, float32 24", "arXiv 2510.26788"),
    Cause(_EITHER + r"head_dtype", "rounding of the logits is a dominant source; fixed on one side only it is worse",
          "NeMo-RL PR#3936, trl PR#4303"),
    Cause(_EITHER + r"head_(divisor|multiplier|softcap)", "logits are scaled or capped otherwise", "elementary"),
    Cause(r"(trainer|recomputed)\.attn_implementation", "some backends lack attention sinks or soft caps",
          "miles PR#1500"),
    Cause(r"rollout\.(attention_backend|cascade_attention)", "attention kernels differ in their rounding, some in bugs",
          "vllm#17652, verl FAQ"),
    Cause(r"rollout\.(engine|version)", "kernels and defaults change between versions", "NeMo-RL PR#4080, vllm#55238"),
    Cause(r"libraries\.transformers", "model code and position encodings change", "vllm PR#43419"),
    Cause(r"libraries\.torch", "kernels and their defaults change between versions", "torchtitan PR#2373"),
    Cause(_EITHER + r"(device\w*|gpu\w*)", "the same code rounds differently on other hardware",
          "vllm#46657, vllm#55238"),
    Cause(r"rollout\.prefix_caching", "a cache that survives a weight update is stale", "NeMo-RL PR#4018, SkyRL#2246"),
    Cause(r"rollout\.chunked_prefill", "a prefill in chunks runs other kernels", "vllm#42259"),
    Cause(r"rollout\.(enforce_eager|cudagraph_mode|compilation_mode)", "graphs and fused kernels round differently",
          "NeMo-RL#998, vllm#14722"),
    Cause(r"rollout\.(tensor|pipeline|data|expert)_parallel_size", "row-wise sums are split otherwise",
          "NeMo-RL dtensor-tp-accuracy.md"),
    Cause(r"rollout\.(max_num_seqs|max_num_batched_tokens)", "batch shapes choose the kernels", "SGLang PR#15041"),
    Cause(r"trainer\.token_budget", "micro-batch shapes choose the kernels", "trl#6789"),
    Cause(r"threads", "sums are split over another number of threads", "elementary"),
    Cause(_EITHER + r"model", "another checkpoint, unless these are two places of the same", "slime#1695"),
)  # fmt: skip
# Where from, how much and with which random numbers: it changes which responses there are, not how one is scored.
_HARMLESS = re.compile(
    r".*\.(seed|digest|source|location|count|skipped|limit|shuffle_seed|noise_responses|folder|path|paths|file|files)"
    r"|rollout\.(url|served_model|timeout|patience)"
    r"|libraries\.(python|numpy|pyarrow|math-verify|mismatch-cli)|prompts\..*|config\.(prompts\..*|samples_per_prompt)"
    r"|imported\.(rows\w*|tokens|steps|file_count|left_out.*|noted.*|libraries.*)"
    r"|config\.sampling\.max_tokens|rollout\.max_model_len|top_logprobs|config\.reward.*"
)


@dataclass(frozen=True)
class SettingDifference:
    """One setting in which two traces differ; None where a manifest does not have it.

    `likely` is its place among the known causes from 1, None where it is no known cause; `harmless` ones change which
    responses there are, and not how one is scored.
    """

    setting: str
    first: Any
    other: Any
    likely: int | None
    harmless: bool
    why: str
    source: str

    @property
    def in_one_only(self) -> bool:
        return self.first is None or self.other is None


def settings_diff(
    first: Mapping[str, Any], other: Mapping[str, Any], *, at_equal_weights: bool = False
) -> list[SettingDifference]:
    """Leaf by leaf what differs: known causes in their order, then what is not known, then what is harmless.

    A setting that only one manifest has stands behind those that both have. A gap `at_equal_weights` knows no
    staleness.
    """
    sections = [name for name in _SECTIONS if not at_equal_weights or name != "equal_weights"]
    settings, other_settings = _settings(first, other, sections), _settings(other, first, sections)
    names = list(dict.fromkeys([*settings, *other_settings]))
    rows = [
        _row(name, settings.get(name), other_settings.get(name))
        for name in names
        if settings.get(name) != other_settings.get(name)
    ]
    rows = [row for row in rows if not _repeats_trainer(row, rows)]
    return sorted(rows, key=lambda row: (row.harmless, row.in_one_only, row.likely or len(CAUSES) + 1))


def _settings(manifest: Mapping[str, Any], beside: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """Every setting once: what was resolved stands before what was asked for.

    A section that the manifest beside this one lacks is one setting.
    """
    found: dict[str, Any] = {}
    for section in sections:
        if section in manifest:
            known = section in beside or not isinstance(manifest[section], Mapping)
            for path, value in _leaves(section, manifest[section] if known else "recorded"):
                found.setdefault(_canonical(path), value)
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path, value


def _canonical(path: str) -> str:
    for pattern, name in _SAME_AS:
        if re.fullmatch(pattern, path):
            return re.sub(pattern, name, path)
    return path


def _row(name: str, first: Any, other: Any) -> SettingDifference:
    for place, cause in enumerate(CAUSES, start=1):
        if re.fullmatch(cause.pattern, name):
            return SettingDifference(name, first, other, place, False, cause.why, cause.source)
    return SettingDifference(name, first, other, None, bool(_HARMLESS.fullmatch(name)), "", "")


def _repeats_trainer(row: SettingDifference, rows: list[SettingDifference]) -> bool:
    """Whether the trainer at the rollout's weights differs just as the trainer does, or is not there at all."""
    section, _, name = row.setting.partition(".")
    of_trainer = [(other.first, other.other) for other in rows if other.setting == f"trainer.{name}"]
    return section == "recomputed" and (not name or (row.first, row.other) in of_trainer)
