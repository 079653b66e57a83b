"""A small search as `bisect` leaves it in a folder, made without a model: legs are numbers with
known parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.bisect.experiments import (
    ALONE,
    AS_RECORDED,
    DECODED,
    LEGS,
    OTHER_SHAPE,
    REFERENCE,
    ROLLOUT,
    SCORED,
    TRAINER,
    WHOLE,
    Experiment,
    Leg,
    Pair,
    Search,
)
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.bisect.legs import Legs, write_as_recorded
from mismatch_cli.bisect.ranking import RECORDED
from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
from mismatch_cli.trace.writer import rows_to_table
from tests.frameworks.dialects.conftest import rows

HOSTILE = "<script>alert(1)</script> \x1b[2J \u202eevil {{ 7 * 7 }} $x$ [bold]y[/bold]"
PROMPTS, SAMPLES, LENGTH = 24, 2, 12
BASE: Pair = (DECODED.name, SCORED.name)
_SIDE = {
    "model": "sample_data/model",
    "dtype": "bfloat16",
    "device": "cpu",
    "adapter": None,
    "threads": 1,
}
MANIFEST: dict[str, Any] = {
    "command": "probe",
    "rollout": {**_SIDE, "engine": "vllm", "version": "0.32.0", "kv_cache_dtype": "fp8"},
    "trainer": {
        **_SIDE, "transformers": "5.19.0", "head_dtype": "bfloat16", "attn_implementation": "sdpa",
    },
    "config": {"sampling": {"temperature": 1.0}, "seed": 0},
    "prompts": {"count": PROMPTS, "source": "problems.jsonl", "template": "chat", "skipped": []},
}  # fmt: skip
WEIGHTS = {
    "compared": 120,
    "unread": ["model.layers.3.mlp.gate.weight: packed by a kernel"],
    "differing": [
        {"tensor": "model.layers.1.mlp.up_proj.weight", "relation": "scaled", "relative": 0.01,
         "detail": "× 1.0100"},
        {"tensor": f"model.{HOSTILE}.weight", "relation": "other", "relative": None, "detail": ""},
    ],
    "config": [{"key": "rope_theta", "rollout": 10000.0, "trainer": 500000.0}],
}  # fmt: skip


def modules(layers: int = 6) -> dict[str, Any]:
    """What stage 3 keeps: rounding that accumulates over the layers, and a different attention
    in the middle.
    """
    rng = np.random.default_rng(3)
    streams, error = [], 1e-4
    for layer in range(layers):
        odd = 40.0 if layer == layers // 2 else 1.0
        attention, mlp = (2e-4 * np.exp(rng.normal(0, 0.3, 2)) * (odd, 1.0)).tolist()
        before, after = error, hypot(error, attention)
        error = hypot(after, mlp)
        streams.append(
            {
                "layer": layer,
                "before": {"inherited": before if layer else 0.0},
                "attention": {"inherited": after, "added": attention},
                "mlp": {"inherited": error, "added": mlp},
            }
        )
    isolated = []
    for layer in range(layers):
        relation = "different" if layer == layers // 2 else "rounding"
        norm = {"kind": "norm", "relation": "bits", "relative": 0.0, "differing": 0.0}
        attention = {"kind": "attention", "relation": relation, "relative": 3e-3, "differing": 0.4}
        isolated += [
            {"module": f"model.layers.{layer}.{part['kind']}"} | part for part in (norm, attention)
        ]
    grafts = [
        {"kind": "attention", "share": 0.61, "left": 0.004},
        {"kind": "all", "share": 0.97, "left": 0.0003},
    ]
    result = {
        "responses": 8,
        "gap": 0.01,
        "layers": streams,
        "isolated": isolated,
        "grafts": grafts,
    }
    return result | {"missing": ["rotary: the engine has one for all layers"]}


def analysis(
    folder: Path, *, gap: float = 1.0, stages: int = 4, responses: int = PROMPTS * SAMPLES
) -> BisectionAnalysis:
    """A search through `stages`, on a gap of two causes, a precision and noise; `gap` scales all
    of them.
    """
    rng = np.random.default_rng(0)
    tokens = responses * LENGTH
    logp = -0.5 - np.minimum(rng.exponential(1.0, tokens), 8.0)
    sizes = {"head": 0.02, "cache": 0.03, "rounding": 0.002, "noise": 3e-4}
    # Parts that add up: what a leg removes is then a known share
    parts = {name: gap * size * rng.laplace(0, 1, tokens) for name, size in sizes.items()}
    whole = sum(parts.values())
    _record(folder, logp - parts["cache"], logp + whole - parts["cache"], responses)
    legs = Legs(folder, FixedTokens.read(folder / LEGS / AS_RECORDED), TerminalProgress(quiet=True))
    search = Search(folder, gap=float(np.abs(whole).mean()), like="/runs/probe-model")
    for stage, leg, values in _readings(logp, parts):
        # Stage 3 reads fewer responses, as `bisect` does with modules
        if stage < stages:
            read = list(range(16 if stage == 3 else responses))
            columns = np.split(values.astype(np.float32), responses)[: len(read)]
            legs.write_selected(leg, read, {f"logp_{leg.side}": columns}, MANIFEST[leg.side], 1.5)
    search.base = BASE
    search.experiments = [experiment for experiment in _experiments() if experiment.stage < stages]
    for number in range(stages):
        search.stages[str(number)] = {"status": "done", "why": "", "seconds": 12.5 * number}
    search.findings = [
        {"setting": "stop", "check": "end-of-sequence", "title": "The end-of-sequence token",
         "cause": "appended",
         "change": "Keep the engine's own last token.", "sentence": "One token in twelve.",
         "explains": 0.02}
    ]  # fmt: skip
    search.weights = WEIGHTS
    reason = "a GPU has it, and this machine has none"
    search.untried = [
        {"setting": "batch_invariant", "side": ROLLOUT, "better": True, "why": reason}
    ]
    if stages > 2:
        search.together = {
            "settings": ["kv_cache_dtype", "head_dtype"],
            "after": ["rollout-both", "trainer-head"],
        }
    if stages > 3:
        search.modules = modules()
    search.save()
    return BisectionAnalysis.read(folder)


def _record(folder: Path, rollout: np.ndarray, trainer: np.ndarray, responses: int) -> None:
    """The fixed tokens, of which every fifth is hostile, and their vocabulary."""
    columns = rows(
        np.split(rollout.astype(np.float32), responses),
        prompt_id=[row // SAMPLES for row in range(responses)],
        sample_index=[row % SAMPLES for row in range(responses)],
        response_ids=[np.arange(LENGTH) % 5] * responses,
        loss_mask=[[True] * LENGTH] * responses,
        logp_trainer=np.split(trainer.astype(np.float32), responses),
    )
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [" so", " the", " sum", " is", HOSTILE]
    pieces_table = pa.table(
        {"id": pa.array(range(5), pa.int32()), "bytes": [piece.encode() for piece in pieces]}
    )
    vocabulary = folder / "vocab.parquet"
    pq.write_table(pieces_table, vocabulary)
    write_as_recorded(
        folder / LEGS / AS_RECORDED, [rows_to_table(columns)], MANIFEST, vocabulary, equal=True
    )
    vocabulary.unlink()


def _readings(
    logp: np.ndarray, part: Mapping[str, np.ndarray]
) -> list[tuple[int, Leg, np.ndarray]]:
    """The stage of each leg, the leg, and its readings: the engine's part of the gap is its
    cache.
    """
    trainer = logp + part["head"] + part["rounding"] + part["noise"]
    engine = logp - part["cache"]
    without = trainer - part["head"]

    def rollout(name: str, what: str) -> Leg:
        return Leg(name, ROLLOUT, f"engine, {what}")

    def scored(name: str, what: str) -> Leg:
        return Leg(name, TRAINER, f"trainer, {what}")

    head, both = (
        scored("trainer-head", "head_dtype = float32"),
        rollout("rollout-both", "cache and head"),
    )
    return [
        (0, DECODED, engine),
        (0, SCORED, trainer),
        (0, OTHER_SHAPE, trainer - part["noise"]),
        (0, ALONE, engine),
        (1, WHOLE, engine + part["noise"]),
        (1, REFERENCE, trainer - part["rounding"] - part["noise"]),
        (2, rollout("rollout-cache", "kv_cache_dtype = auto"), logp),
        (2, head, without),
        (2, both, logp),
        (2, scored("trainer-eager", "attn_implementation = eager"), trainer + 2 * part["head"]),
        (2, rollout("rollout-float32", "dtype = float32"), logp),
        (2, scored("trainer-wide", "dtype = float32"), logp),
        (3, rollout("modules-rollout", "eager, whole responses at once"), engine),
        (3, scored("modules-trainer", "one response at a time"), trainer),
        (3, scored("graft-attention", "with attention of the engine"), trainer - part["cache"]),
        (3, scored("graft-mlp", "with the MLPs of the engine"), trainer + 2 * part["cache"]),
    ]


def _experiments() -> list[Experiment]:
    cache, head = (DECODED.name, "trainer-head"), ("rollout-cache", SCORED.name)
    modules_of_both = ("modules-rollout", "modules-trainer")
    return [
        Experiment(
            "logp_rollout",
            ROLLOUT,
            0,
            RECORDED,
            (DECODED.name, AS_RECORDED),
            "the recorded log μ is another",
        ),
        Experiment(
            "head_dtype",
            TRAINER,
            2,
            BASE,
            cache,
            "an LM head in float32 in the trainer",
            "as the weights",
            "float32",
            ("--float32-head",),
        ),
        Experiment(
            "kv_cache_dtype",
            ROLLOUT,
            2,
            BASE,
            head,
            "a KV cache in the dtype of the weights",
            "fp8",
            "auto",
            ("--kv-cache-dtype", "auto"),
        ),
        Experiment(
            "attn_implementation",
            TRAINER,
            2,
            BASE,
            (DECODED.name, "trainer-eager"),
            "eager attention in the trainer",
            "sdpa",
            "eager",
            ("--attn", "eager"),
        ),
        Experiment(
            "dtype",
            "both",
            2,
            BASE,
            ("rollout-float32", "trainer-wide"),
            "float32 on both sides, or float16",
            "bfloat16",
            "float32",
            floor=True,
        ),
        Experiment(
            "attention",
            "both",
            3,
            modules_of_both,
            ("modules-rollout", "graft-attention"),
            "attention, computed alike on both sides",
            parts=("model.layers.3.self_attn",),
        ),
        Experiment(
            "mlp",
            "both",
            3,
            modules_of_both,
            ("modules-rollout", "graft-mlp"),
            "the MLPs, computed alike",
        ),
    ]
