"""The trainer as it should not be: another temperature, perturbed weights, another RoPE base, text tokenised otherwise.

Each variant scores the responses of a pool with the real model, once; what it said is kept in a file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults import FAULTS, Pool, Scores

from mismatch_cli.models import load_causal_lm
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.scoring.batches import ScoreRequest
from mismatch_cli.scoring.trainer import Trainer
from mismatch_cli.trace.reader import Trace

_TOKEN_BUDGET = 16384


def add_variants(pool: Pool, trace: Trace, cache: Path, names: Sequence[str] = ()) -> None:
    """Some variants, or every one that a fault uses, scored in the dtype of the trace's trainer."""
    manifest = trace.manifest
    model, dtype = manifest["trainer"]["model"], manifest["trainer"]["dtype"]
    for name in names or _names():
        path = cache / f"{name}.npz"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            np.savez(path, allow_pickle=False, **_score(name, pool, trace, model, dtype))
        kept = np.load(path)
        topk = kept.get("topk_logp_TK")
        pool.variants[name] = Scores(kept["logp_T"], kept["entropy_T"], topk)


def _names() -> list[str]:
    severities = {fault.check: fault.severities for fault in FAULTS}
    names = [f"temperature{t:g}" for t in severities["temperature"]]
    names += [f"weights{scale:g}" for scale in severities["stale-weights"]]
    names += [f"rope{factor:g}" for factor in severities["position-drift"]]
    return [*names, "retokenised"]


def _score(name: str, pool: Pool, trace: Trace, model: str, dtype: str) -> dict[str, np.ndarray]:
    requests = _requests(pool, trace, split=name == "retokenised")
    trainer = _trainer(name, model, dtype)
    scores = trainer.score(requests, token_budget=_TOKEN_BUDGET)
    cut = pool.length_S.tolist()  # a retokenised response is longer than what the engine sampled
    found = {
        "logp_T": np.concatenate([s.logp_T[:n] for s, n in zip(scores, cut, strict=True)]),
        "entropy_T": np.concatenate([s.entropy_T[:n] for s, n in zip(scores, cut, strict=True)]),
    }
    if "topk_ids" in pool.ranks and name != "retokenised":
        found["topk_logp_TK"] = np.concatenate([s.logp_at_topk_TK for s in scores if s.logp_at_topk_TK is not None])
    return found


def _trainer(name: str, model: str, dtype: str) -> Trainer:
    temperature = float(name.removeprefix("temperature")) if name.startswith("temperature") else 1.0
    sampling = SamplingSettings(temperature=temperature)
    if name.startswith("rope"):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(model, Path(folder) / "model"))
            config = json.loads((copy / "config.json").read_text())
            _scale_rope(config, float(name.removeprefix("rope")))
            (copy / "config.json").write_text(json.dumps(config))
            return Trainer(load_causal_lm(str(copy), dtype), sampling)
    loaded = load_causal_lm(model, dtype)
    if name.startswith("weights"):
        _perturb(loaded, float(name.removeprefix("weights")))
    return Trainer(loaded, sampling)


def _scale_rope(config: dict[str, Any], factor: float) -> None:
    where = config.get("rope_parameters") or config
    where["rope_theta"] *= factor


@torch.no_grad()
def _perturb(model: Any, scale: float) -> None:
    """Noise of `scale` times each tensor's own spread."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_((scale * parameter.float().std() * noise).to(parameter.dtype))


def _requests(pool: Pool, trace: Trace, split: bool) -> list[ScoreRequest]:
    rng, bounds = np.random.default_rng(0), pool.offset_S1
    splits = _splits(trace) if split else {}
    requests = []
    for s, prompt in enumerate(pool.rows["prompt_ids"]):
        own = slice(bounds[s], bounds[s + 1])
        ids = pool.tokens["response_ids"][own].tolist()
        if split:
            requests.append(ScoreRequest(list(prompt), _with_one_split(ids, splits, rng)))
        else:
            topk = pool.ranks["topk_ids"][own] if "topk_ids" in pool.ranks else None
            requests.append(ScoreRequest(list(prompt), ids, topk))
    return requests


def _splits(trace: Trace) -> dict[int, tuple[int, int]]:
    """Token ids that are the text of two others."""
    text_of = {i: text for i in range(4096) if not (text := trace.vocabulary.decode([i])).startswith("⟨")}
    id_of = {text: i for i, text in text_of.items()}
    found = {}
    for token, text in text_of.items():
        for cut in range(1, len(text)):
            if text[:cut] in id_of and text[cut:] in id_of:
                found[token] = (id_of[text[:cut]], id_of[text[cut:]])
                break
    return found


def _with_one_split(ids: list[int], splits: dict[int, tuple[int, int]], rng: np.random.Generator) -> list[int]:
    """One token of the first half in two; the ids as they are where none can be split."""
    possible = [i for i, token in enumerate(ids[: max(1, len(ids) // 2)]) if token in splits and i >= 3]
    if not possible:
        return ids
    at = int(rng.choice(possible))
    return [*ids[:at], *splits[ids[at]], *ids[at + 1 :]]
