"""Settings that move log-probabilities, ordered by how often and how far: the one ranking of all commands."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    """Settings that are known to move log-probabilities: how, who found it, and what was seen where one did."""

    pattern: str
    why: str
    source: str
    seen: str = ""


_EITHER = r"(rollout|trainer|recomputed)\."
# fmt: off
CAUSES = (
    Cause(r"rollout\.logprobs_mode", "raw log-probs are not those of the distribution that was sampled",
          "vime#64, trl#4159", "mean Δlog p −1.0 nats at temperature 0.7 (tinker-cloud PR #26)"),
    Cause(r"config\.sampling\.temperature", "a temperature that only one side applies scales every log-prob",
          "miles PR#1345, prime-rl PR#697", "first tokens at a ratio of 2.0 where T = 0.6 (trl#4159)"),
    Cause(r"config\.sampling\.(top_p|top_k|min_p)", "the engine renormalises over what it keeps: one-sided gaps",
          "trl#6789, NeMo-RL#3365", "top-p 0.8: mean ratio 0.896, 52 % of the tokens outside [0.9, 1.1] (trl#6789)"),
    Cause(_EITHER + r"(architecture|parameters|vocab_size)", "another model", "elementary"),
    Cause(_EITHER + r"adapter(_digest|_rank|_alpha|_targets)?", "an adapter that one side has not loaded",
          "SkyRL#1776, vllm#51594", "one path at −6.63 nats where the other has −0.009 (vllm#51594)"),
    Cause(r"equal_weights", "later weights in the trainer add staleness", "trl#5312",
          "mean |Δlog p| 0.010 before, 0.201 with weights that were not renewed (trl#5312)"),
    Cause(r"rollout\.quantization", "quantised rollouts differ by model family", "verl PR#4435, miles#2722",
          "mean |Δlog p| 0.041 with an FP8 rollout (miles#2722)"),
    Cause(r"rollout\.kv_cache_dtype", "a cache of fewer bits raises the mismatch", "NeMo-RL PR#1212",
          "mean |Δlog p| 0.0083 with fp8, 0.0024 without, on the bundled model"),
    Cause(_EITHER + r"(num_experts|routes)", "each side chooses the experts itself, and some tokens go to others",
          "arXiv 2510.11370, prime-rl PR#2808",
          "k3 0.0005–0.0015, with the routes replayed 0.0002–0.0005 (prime-rl PR#2808)"),
    Cause(_EITHER + r"dtype", "bfloat16 keeps 8 bits of a number, float16 11, float32 24", "arXiv 2510.26788",
          "k3 0.001 in bfloat16, 1e-5 to 4e-5 in float16 (AknA13/train-infer-mismatch)"),
    Cause(_EITHER + r"head_dtype", "rounding of the logits is a dominant source; fixed on one side only it is worse",
          "NeMo-RL PR#3936, trl PR#4303",
          "RMS of Δlog p 0.031 with two float32 heads, 0.039 to 0.041 with one (Fast-LLM PR#525)"),
    Cause(_EITHER + r"head_(divisor|multiplier|softcap)", "logits are scaled or capped otherwise", "elementary"),
    Cause(r"(trainer|recomputed)\.attn_implementation", "some backends lack attention sinks or soft caps",
          "miles PR#1500", "mean |Δlog p| 0.080 to 0.139 without sinks, 0.0177 with them (miles PR#1500)"),
    Cause(r"rollout\.(hf_overrides|rope_\w+)|trainer\.rope_\w+", "one side may read positions otherwise",
          "vllm#27722, prime-rl PR#2802", "0.030 with another YaRN factor, 0.0015 with the same (prime-rl PR#2802)"),
    Cause(r"rollout\.(attention_backend|cascade_attention)", "attention kernels differ in their rounding, some in bugs",
          "vllm#17652, verl FAQ"),
    Cause(r"rollout\.(engine|version)", "kernels and defaults change between versions", "NeMo-RL PR#4080, vllm#55238"),
    Cause(r"libraries\.transformers", "model code and position encodings change", "vllm PR#43419",
          "mean |Δlog p| 0.0032 before, 0.000054 after (vllm PR#43419)"),
    Cause(r"libraries\.torch", "kernels and their defaults change between versions", "torchtitan PR#2373"),
    Cause(_EITHER + r"(device\w*|gpu\w*)", "the same code rounds differently on other hardware",
          "vllm#46657, vllm#55238"),
    Cause(r"rollout\.prefix_caching", "a cache that survives a weight update is stale", "NeMo-RL PR#4018, SkyRL#2246",
          "mean |Δlog p| 0.87, at most 28.6 nats (SkyRL#2246)"),
    Cause(r"rollout\.speculative_config", "drafted tokens take another path near limits, and drafts miss weight syncs",
          "vllm PR#38711, vllm#48296"),
    Cause(r"rollout\.chunked_prefill", "a prefill in chunks runs other kernels", "vllm#42259"),
    Cause(r"rollout\.(enforce_eager|cudagraph_mode|compilation_mode)", "graphs and fused kernels round differently",
          "NeMo-RL#998, vllm#14722", "at most 0.39 nats between eager and graphs (NeMo-RL model diagnostics)"),
    Cause(_EITHER + r"adapter_merged", "merging an adapter rounds the sum in the dtype of the weights", "trl#6688"),
    Cause(r"rollout\.(tensor|pipeline|data|expert)_parallel_size", "row-wise sums are split otherwise",
          "NeMo-RL dtensor-tp-accuracy.md"),
    Cause(r"rollout\.(max_num_seqs|max_num_batched_tokens)", "batch shapes choose the kernels", "SGLang PR#15041"),
    Cause(r"trainer\.token_budget", "micro-batch shapes choose the kernels", "trl#6789",
          "SD of Δlog p 0.055 between two micro-batches of one trainer (trl#6789)"),
    Cause(r"threads", "sums are split over another number of threads", "elementary"),
    Cause(_EITHER + r"model", "another checkpoint, unless these are two places of the same", "slime#1695"),
)
# fmt: on


def place(setting: str) -> int | None:
    """Where a setting stands among the known causes, from 1; None where it is none of them."""
    return next((n for n, cause in enumerate(CAUSES, start=1) if re.fullmatch(cause.pattern, setting)), None)


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every setting below a path under its canonical name: what was asked for goes by the name of what was resolved."""
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
