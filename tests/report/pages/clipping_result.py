"""A result of `clipstats` as docs/json/clipstats.md describes it, with made-up numbers that all
differ.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mismatch_cli.base.json_form import from_json
from mismatch_cli.report.outline import Excerpt, Outline
from mismatch_cli.report.pages.clipping import page_of_result
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.clipping_result import ClippingResult

HOSTILE = "<script>alert(1)</script> [red]x[/red] $\\frac{1}{2}$ \x1b[2J \u202eevil \x00"
TOKENS = ("Wait", " the", "\n\n", "  ", " \\(", "We", " Since", "שלום", "漢字", HOSTILE)
NAMES = (
    "pg-is", "pg-tis", "grpo-clip-higher", "minirl", "dppo-binary-tv", "dppo-binary-tv-recompute",
    "dppo-topk-tv",
    "mask-0.5", "relax-both", "ppo-icepop", "gspo", "ipo",
)  # fmt: skip
EDGES = (0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0)
NO_ADVANTAGES = {"value": None, "low": None, "high": None, "note": "no advantages in the trace"}
OTHER_WEIGHT = {"value": None, "low": None, "high": None, "note": "the weight is not r"}
NO_VALUE = {"value": None, "low": None, "high": None, "note": "fewer than 10 prompts"}


class _Maker:
    def __init__(self, seed: int, advantages: bool) -> None:
        self.rng, self.advantages = np.random.default_rng(seed), advantages

    def estimate(self, scale: float) -> dict[str, Any]:
        value = float(scale * self.rng.uniform(0.2, 1.8))
        half = 0.12 * value
        return {"value": value, "low": value - half, "high": value + half, "note": None}

    def count(self, scale: int) -> int:
        return int(self.rng.integers(scale // 5 + 1, 2 * scale + 2))

    def signs(self, scale: float) -> dict[str, Any]:
        everything = self.estimate(scale) if self.advantages else NO_ADVANTAGES
        return {
            "all": everything,
            "positive": self.estimate(scale),
            "negative": self.estimate(1.3 * scale),
        }

    def algorithm(self, name: str, steps: int) -> dict[str, Any]:
        algorithm = TABLE[name]
        blocks = bool(algorithm.masks)
        scale = 10 ** self.rng.uniform(-4, -1.5) if blocks else 0.0
        blocked_when, weight = algorithm.formulas
        lost = {**self.signs(2 * scale), "masked": NO_ADVANTAGES, "capped": NO_ADVANTAGES}
        if self.advantages:
            masked, capped = (
                self.estimate(2 * scale),
                self.estimate(0.01 if "min" in weight else 0.0),
            )
            together = {key: masked[key] + capped[key] for key in ("value", "low", "high")} | {
                "note": None
            }
            lost |= {
                "all": together,
                "masked": masked,
                "capped": capped if algorithm.weighs_by_ratio else OTHER_WEIGHT,
            }
        return {
            "name": name,
            "anchor": algorithm.anchor,
            "blocked_when": blocked_when,
            "weight": weight,
            "source": algorithm.source,
            "weighs_by_ratio": algorithm.weighs_by_ratio,
            "blocked": self.signs(scale),
            "lost": lost,
            "blocked_rare": self.estimate(scale),
            "responses_touched": self.estimate(min(40 * scale, 0.5)),
            "mu_blocked": self.estimate(0.1) if blocks else NO_VALUE,
            "mu_kept": self.estimate(0.5),
            "entropy_blocked": self.estimate(2.0) if blocks else NO_VALUE,
            "entropy_kept": self.estimate(0.4),
            "by_mu": [
                {
                    "mu_low": low,
                    "mu_high": high,
                    "tokens": self.count(9000),
                    "blocked": self.signs(scale),
                }
                for low, high in pairwise(EDGES)
            ],
            "by_position": [
                {
                    "first": first,
                    "last": last,
                    "tokens": self.count(9000),
                    "blocked": self.signs(scale),
                }
                for first, last in ((0, 0), (1, 9), (10, 99))
            ],
            "by_step": [
                {
                    "first": step,
                    "last": step,
                    "tokens": self.count(9000),
                    "blocked": self.signs(scale),
                    "blocked_rare": self.estimate(scale),
                    "mu_blocked": self.estimate(0.1),
                    "mu_kept": self.estimate(0.5),
                    "entropy_blocked": self.estimate(2.0),
                    "entropy_kept": self.estimate(0.4),
                }
                for step in range(steps)
            ],
            "blocked_tokens": {
                sign: [self.token(number, text) for number, text in enumerate(TOKENS)]
                if blocks
                else []
                for sign in ("positive", "negative")
            },
        }

    def as_strict(self, name: str) -> dict[str, Any]:
        mask = TABLE[name].masks[0]
        own = mask.region.replace("-", "_") if mask.region in ("ratio-clip", "binary-tv") else None
        families = ("ratio_clip", "binary_tv", "binary_kl", "top_k_tv", "top_k_kl")
        thresholds = {family: self.estimate(0.1) for family in families if family != own}
        return {
            "algorithm": name,
            "settings": mask.settings,
            "family": own,
            "thresholds": thresholds,
        }

    def token(self, number: int, text: str) -> dict[str, Any]:
        blocked = 200 - 19 * number
        rate = float(self.rng.uniform(0.01, 0.2))
        return {
            "token_id": number,
            "text": text,
            "class": "word",
            "blocked": blocked,
            "tokens": round(blocked / rate),
            "rate": rate,
            "lift": float(self.rng.uniform(0.2, 9)) if number % 2 else None,
            "mu": float(self.rng.uniform(0, 0.2)),
            "pi": float(self.rng.uniform(0, 0.3)),
            "ratio": float(self.rng.uniform(1.3, 9)),
        }

    def overlap(self, names: Sequence[str]) -> dict[str, Any]:
        size = len(names)
        symmetric = self.rng.integers(50, 4000, (size, size))
        symmetric = np.triu(symmetric) + np.triu(symmetric, 1).T
        jaccard = [[dict(self.estimate(0.5)) for _ in names] for _ in names]
        for i in range(size):
            jaccard[i][i] = {"value": 1.0, "low": 1.0, "high": 1.0, "note": None}
            for j in range(i):
                jaccard[i][j] = jaccard[j][i]
        only = self.rng.integers(0, 3000, (size, size))
        np.fill_diagonal(only, 0)
        return {
            "names": list(names),
            "jaccard": jaccard,
            "both": symmetric.tolist(),
            "only_row": only.tolist(),
            "examples": [],
        }

    def bad_updates(self, steps: int) -> dict[str, Any]:
        def shares() -> dict[str, Any]:
            of_tokens = self.estimate(0.002) if self.advantages else NO_ADVANTAGES
            return {"over_tokens": of_tokens, "over_negative": self.estimate(0.004)}

        by_step = [
            {
                "first": step,
                "last": step,
                "tokens": self.count(9000),
                "negative": self.count(4000),
                "bad": self.count(40),
                "reward": self.estimate(0.5),
                "reward_change": -0.02 if step else None,
                **shares(),
            }
            for step in range(steps)
        ]
        correlations = [
            {
                "of": "bad updates among tokens with A < 0",
                "with": "reward",
                "steps": steps,
                **self.estimate(-0.4),
            },
            {
                "of": "bad updates among tokens with A < 0",
                "with": "mean |π − μ|",
                "steps": steps,
                **NO_VALUE,
            },
        ]
        return {
            "delta": 0.5,
            **shares(),
            "by_step": by_step,
            "correlations": correlations if steps > 2 else [],
            "sweep": [
                {"delta": delta, "bad": self.count(900), **shares()}
                for delta in (0.1, 0.3, 0.5, 0.8)
            ],
        }

    def approximation(self) -> dict[str, Any]:
        rows = [
            {
                "divergence": divergence,
                "k": k,
                "threshold": threshold,
                "mean": self.estimate(0.01),
                "bias": self.estimate(-0.003),
                "rank_correlation": self.estimate(0.5),
                "wrong_mask": self.estimate(1e-3),
            }
            for divergence, threshold in (("tv", 0.15), ("kl", 0.05))
            for k in (0, 5, 20)
        ]
        scales = {"low": 0.01, "high": 0.012, "decided": 0.5}
        bracket = [
            {"k": k, "threshold": 0.15}
            | {name: self.estimate(scale) for name, scale in scales.items()}
            for k in (0, 20)
        ]
        return {"truth": "full", "tokens": 900, "rows": rows, "bracket": bracket}

    def theory(self) -> dict[str, Any]:
        keys = (
            "surrogate",
            "correction",
            "difference",
            "quadratic_bound",
            "linear_bound",
            "composite_bound",
            "pinsker_bound",
            "tv_sum",
        )
        return {key: self.estimate(3.0) for key in keys} | {
            "xi": 1.0,
            "longest": 812,
            "tv_max": 0.93,
            "tv_max_of": "full TV",
            "kl_max": 2.4,
            "kl_max_of": "full KL",
            "tv_of_kl": 1.0,
            "ess": self.estimate(0.3),
            "weight_max": 21.5,
        }


def sample_result(
    names: Sequence[str] = NAMES,
    *,
    advantages: bool = True,
    steps: int = 8,
    theory: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """A result with all parts that the arguments allow."""
    make = _Maker(seed, advantages)
    levels = np.geomspace(0.01, 1, 7)
    return {
        "format": "mismatch-cli clipstats",
        "version": 1,
        "traces": ["run one/trace"],
        "arguments": ["--theory"] if theory else [],
        "compared": _compared(names),
        "about": _about(),
        "counts": {
            "tokens": 84_211,
            "positive": 44_120,
            "negative": 40_091,
            "zero_advantage": 9_216 if advantages else 0,
            "masked": 512,
            "not_measured": 37,
            "responses": 640,
            "prompts": 80,
            "prompts_exact": True,
            "steps": steps,
            "out_of_support": 0,
            "lacking": {},
        },
        "has": {
            "advantages": advantages,
            "rewards": advantages,
            "entropy": True,
            "top_k": 20,
            "recomputed": "measured",
            "full": True,
            "lacks_recomputed": "",
            "topk_recomputed": True,
            "average": False,
            "batches": True,
        },
        "skipped": [],
        "same_mask": [[name] for name in names],
        "algorithms": [make.algorithm(name, steps if steps > 1 else 0) for name in names],
        "overlap": make.overlap(names),
        "bad_updates": make.bad_updates(steps if steps > 1 else 0),
        "sweeps": {
            key: [
                {
                    "threshold": float(x),
                    "blocked": make.estimate(0.02 / x),
                    "lost": make.estimate(0.03),
                }
                for x in levels
            ]
            for key in ("ratio_clip", "binary_tv", "binary_kl", "top_k_tv", "top_k_kl")
        }
        | {
            "cap": [
                {"cap": c, "share": make.estimate(0.02), "lost": make.estimate(0.03)}
                for c in (2.0, 3.0, 5.0)
            ]
        },
        "equivalents": [
            {
                "algorithm": name,
                "blocked": make.estimate(0.01),
                "family": family,
                "threshold": make.estimate(0.1),
            }
            for name, family in (
                ("grpo-clip-higher", "binary_tv"),
                ("dppo-binary-tv", "ratio_clip"),
            )
            if name in names
        ],
        "approximation": make.approximation(),
        "theory": make.theory() if theory else None,
        "same_strictness": [
            make.as_strict(name) for name in _compared(names) if advantages and TABLE[name].masks
        ],
    }


def _compared(names: Sequence[str]) -> list[str]:
    """The paper's pair if it exists, else the first two."""
    paper = [name for name in ("grpo-clip-higher", "dppo-binary-tv") if name in names]
    return list(dict.fromkeys([*paper, *names]))[:2]


def equal_weights_result() -> dict[str, Any]:
    """A trace whose trainer has the rollout's weights: the recomputed anchor blocks nothing by
    construction.
    """
    result = sample_result(("grpo-clip-higher", "dppo-binary-tv"), steps=1, theory=False)
    result["has"]["recomputed"] = "equal weights"
    reason = (
        "not applicable: the trainer has the weights that sampled. Score with later weights: "
        "probe --trainer-model"
    )
    result["skipped"] = [{"algorithm": name, "reason": reason} for name in ("minirl", "ppo")]
    result["skipped"].append(
        {"algorithm": "dppo-topk-tv", "reason": "it needs the top 20 log-probs"}
    )
    return result


def page_of(result: dict[str, Any], examples: Sequence[Excerpt] = ()) -> Outline:
    """The page of a result in JSON."""
    return page_of_result(from_json(ClippingResult, result), examples)


def nothing_blocked(result: dict[str, Any]) -> dict[str, Any]:
    """The same result with masks that never block."""
    quiet = copy.deepcopy(result)
    zero = {"value": 0.0, "low": 0.0, "high": 0.0, "note": None}
    for row in quiet["algorithms"]:
        row["blocked"] = {
            sign: zero if found["value"] else found for sign, found in row["blocked"].items()
        }
        row["lost"] = {
            sign: zero if found["value"] else found for sign, found in row["lost"].items()
        }
        row["blocked_tokens"] = {"positive": [], "negative": []}
        row["mu_blocked"] = row["entropy_blocked"] = NO_VALUE
    return quiet


def _about() -> dict[str, Any]:
    model = "Qwen/Qwen3-1.7B-Base"
    trainer = {
        "transformers": "5.19.0", "model": model, "dtype": "bfloat16", "head_dtype": "float32",
        "attn_implementation": "sdpa", "device": "cuda",
    }  # fmt: skip
    return {
        "rollout": {
            "engine": "vllm",
            "version": "0.32.0",
            "model": model,
            "dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "device": "cuda",
            "max_model_len": 4096,
        },
        "trainer": trainer,
        "recomputed": trainer,
        "prompts": {"count": 80, "source": "problems.jsonl", "template": "chat", "skipped": []},
        "config": {
            "sampling": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "max_tokens": 2048,
            }
        },
        "libraries": {"torch": "2.13.0"},
        "unscored_responses": 0,
        "grading_timeouts": 0,
        "responses": 100,
        "unstated": 0,
    }
