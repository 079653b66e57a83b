"""Settings that move log-probabilities, ordered by how often and how far: the one ranking that
all commands use.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# A requested setting, and a version under a second name, map to the setting as it was resolved.
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
    """Settings known to move log-probabilities: why, who reported it, and how large the gap was."""

    pattern: str
    why: str
    source: str
    seen: str = ""


_EITHER = r"(rollout|trainer|recomputed)\."
# fmt: off
CAUSES = (
    Cause(r"rollout\.logprobs_mode", "raw log-probs are not those of the sampling distribution",
          "vime#64, trl#4159", "mean Δlog p −1.0 nats at temperature 0.7 (tinker-cloud PR #26)"),
    Cause(r"config\.sampling\.temperature",
          "a temperature applied on one side only scales every log-prob",
          "miles PR#1345, prime-rl PR#697",
          "first tokens at a ratio of 2.0 where T = 0.6 (trl#4159)"),
    Cause(r"config\.sampling\.(top_p|top_k|min_p)",
          "the engine renormalises over the tokens it keeps: one-sided gaps",
          "trl#6789, NeMo-RL#3365",
          "top-p 0.8: mean ratio 0.896, 52 % of the tokens outside [0.9, 1.1] (trl#6789)"),
    Cause(_EITHER + r"(architecture|parameters|vocab_size)", "a different model", "elementary"),
    Cause(_EITHER + r"adapter(_digest|_rank|_alpha|_targets)?",
          "an adapter that only one side has loaded",
          "SkyRL#1776, vllm#51594", "−6.63 nats on one path, −0.009 on the other (vllm#51594)"),
    Cause(r"equal_weights", "newer weights in the trainer add staleness", "trl#5312",
          "mean |Δlog p| 0.010 before, 0.201 with stale weights (trl#5312)"),
    Cause(r"rollout\.quantization", "a quantised rollout adds a gap that depends on the model",
          "verl PR#4435, miles#2722", "mean |Δlog p| 0.041 with an FP8 rollout (miles#2722)"),
    Cause(r"rollout\.kv_cache_dtype", "a low-precision cache raises the mismatch",
          "NeMo-RL PR#1212",
          "mean |Δlog p| 0.0083 with fp8, 0.0024 without, on the bundled model"),
    Cause(_EITHER + r"(num_experts|routes)",
          "each side routes by itself: some tokens reach different experts",
          "arXiv 2510.11370, prime-rl PR#2808",
          "k3 0.0005–0.0015; 0.0002–0.0005 with routing replay (prime-rl PR#2808)"),
    Cause(r"trainer\.rounded_weights",
          "rounding to the engine's dtype swallows most of a small step: the engine lags",
          "measured: SmolLM2-135M",
          "4 % of the weights change, mean |π − μ| 0.022 instead of 0.006, in bfloat16 after a "
          "step of 2e-5"),
    Cause(_EITHER + r"dtype", "bfloat16 keeps 8 significant bits, float16 11, float32 24",
          "arXiv 2510.26788",
          "k3 0.001 in bfloat16, 1e-5 to 4e-5 in float16 (AknA13/train-infer-mismatch)"),
    Cause(_EITHER + r"head_dtype",
          "rounded logits are much of a gap; float32 heads on both sides remove that part",
          "NeMo-RL PR#3936, trl PR#4303",
          "mean |Δlog p| with no, one and two float32 heads: 0.0022, 0.0032 and 0.0011 on the "
          "bundled model, 0.038, 0.035 and 0.028 on SmolLM2-135M; RMS 0.039 to 0.041 with one, "
          "0.031 with two (Fast-LLM PR#525)"),
    Cause(_EITHER + r"head_(divisor|multiplier|softcap)", "logits are scaled or capped differently",
          "elementary"),
    Cause(r"(trainer|recomputed)\.attn_implementation",
          "some backends lack attention sinks or soft caps",
          "miles PR#1500",
          "mean |Δlog p| 0.080 to 0.139 without sinks, 0.0177 with them (miles PR#1500)"),
    Cause(r"rollout\.(hf_overrides|rope_\w+)|trainer\.rope_\w+",
          "the sides may encode positions differently",
          "vllm#27722, prime-rl PR#2802",
          "0.030 with two YaRN factors, 0.0015 with one (prime-rl PR#2802)"),
    Cause(r"rollout\.(attention_backend|cascade_attention)",
          "attention kernels round differently, and some have bugs",
          "vllm#17652, verl FAQ"),
    Cause(r"rollout\.(engine|version)", "kernels and defaults change between versions",
          "NeMo-RL PR#4080, vllm#55238"),
    Cause(r"libraries\.transformers", "model code and position encodings change", "vllm PR#43419",
          "mean |Δlog p| 0.0032 before, 0.000054 after (vllm PR#43419)"),
    Cause(r"libraries\.torch", "kernels and their defaults change between versions",
          "torchtitan PR#2373"),
    Cause(_EITHER + r"(device\w*|gpu\w*)", "the same code rounds differently on other hardware",
          "vllm#46657, vllm#55238"),
    Cause(r"rollout\.prefix_caching", "a cache that survives a weight update is stale",
          "NeMo-RL PR#4018, SkyRL#2246",
          "mean |Δlog p| 0.87, max 28.6 nats (SkyRL#2246)"),
    Cause(r"rollout\.speculative_config",
          "drafts take a different path near limits, and drafters miss weight syncs",
          "vllm PR#38711, vllm#48296"),
    Cause(r"rollout\.chunked_prefill", "chunked prefill runs different kernels", "vllm#42259"),
    Cause(r"rollout\.(enforce_eager|cudagraph_mode|compilation_mode)",
          "graphs and fused kernels round differently",
          "NeMo-RL#998, vllm#14722",
          "up to 0.39 nats between eager and graphs (NeMo-RL model diagnostics)"),
    Cause(_EITHER + r"adapter_merged",
          "merging an adapter rounds the sum to the dtype of the weights", "trl#6688"),
    Cause(r"rollout\.(tensor|pipeline|data|expert)_parallel_size",
          "row-wise sums are split differently",
          "NeMo-RL dtensor-tp-accuracy.md"),
    Cause(r"rollout\.(max_num_seqs|max_num_batched_tokens)", "kernels depend on the batch shape",
          "SGLang PR#15041"),
    Cause(r"trainer\.token_budget", "kernels depend on the micro-batch shape", "trl#6789",
          "SD of Δlog p 0.055 between two micro-batches of one trainer (trl#6789)"),
    Cause(r"threads", "sums are split over a different number of threads", "elementary"),
    Cause(_EITHER + r"model", "a different checkpoint, unless these are two copies of the same one",
          "slime#1695"),
)
# fmt: on


def place(setting: str) -> int | None:
    """A setting's rank among the known causes, from 1; None if it is not one of them."""
    return next(
        (n for n, cause in enumerate(CAUSES, start=1) if re.fullmatch(cause.pattern, setting)), None
    )


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every setting below a path, by its canonical name: a requested setting has the name of the
    resolved one.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(f"{path}.{name}", inner)
    else:
        yield _canonical(path), value


def _canonical(path: str) -> str:
    for pattern, name in _SAME_AS:
        if re.fullmatch(pattern, path):
            return re.sub(pattern, name, path)
    return path
