"""Faulty variants of the trainer: another temperature, perturbed weights, other positions or
context, a penalty.

Each variant scores the responses of a pool with the real model once; the result is kept in a file.
`temperature1.05`, `weights0.1`, `rope4` (the base), `linear4`, `yarn4` (RoPE scaling), `padded16`
(attended padding on the left), `padded-to-longest`, `prompt-first` (that token of the prompt is
another one), `prompt-dropped`, `penalised1.05` (of repetition), `retokenised`, `dropout0.05` (of
what either half of a layer adds, as in training).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.pool import Pool, Scores
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.diagnosis.model import ModelAtHand
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.trace.reader import Trace

_TOKEN_BUDGET = 16384


def add_variants(pool: Pool, trace: Trace, cache: Path, names: Iterable[str]) -> None:
    """Add some variants, scored in the dtype of the trace's trainer."""
    manifest = trace.manifest
    model, dtype = manifest["trainer"]["model"], manifest["trainer"]["dtype"]
    for name in sorted(names):
        path = cache / f"{name}.npz"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            np.savez(path, allow_pickle=False, **_score(name, pool, trace, model, dtype))
        arrays = np.load(path)
        topk = arrays.get("topk_logp_TK")
        pool.variants[name] = Scores(arrays["logp_T"], arrays["entropy_T"], topk)


def model_at_hand(pool: Pool, sample: Sample) -> ModelAtHand:
    """The model that scored a pool, with which `diagnose` can read responses again."""
    rows = pool.rows
    columns = (rows["step"].tolist(), rows["prompt_id"].tolist(), rows["sample_index"].tolist())
    prompts = dict(zip(zip(*columns, strict=True), map(list, rows["prompt_ids"]), strict=True))
    return ModelAtHand(sample, prompts, lambda: scoring_model(pool))


def scoring_model(pool: Pool) -> Trainer:
    """The model that scored a pool, with the pool's adapter."""
    trainer = pool.about["trainer"]
    return _scoring_model(trainer["model"], trainer["dtype"], pool.adapter)


@cache
def _scoring_model(model: str, dtype: str, adapter: str | None) -> Trainer:
    return Trainer.load(model, dtype=dtype, sampling=SamplingSettings(), adapter=adapter)


def _score(name: str, pool: Pool, trace: Trace, model: str, dtype: str) -> dict[str, np.ndarray]:
    requests = _requests(name, pool, trace)
    trainer = _trainer(name, model, dtype)
    if name.startswith("penalised"):
        return _penalised(float(name.removeprefix("penalised")), trainer.model, requests)
    logp, entropy, topk = [], [], []
    for score, length in zip(
        trainer.score(requests, token_budget=_TOKEN_BUDGET), pool.length_S, strict=True
    ):
        # A retokenised response is longer than what the engine sampled
        logp.append(score.logp_T[:length])
        entropy.append(score.entropy_T[:length])
        if score.logp_at_topk_TK is not None:
            topk.append(score.logp_at_topk_TK)
    arrays = {"logp_T": np.concatenate(logp), "entropy_T": np.concatenate(entropy)}
    if "topk_ids" in pool.ranks and name != "retokenised":
        arrays["topk_logp_TK"] = np.concatenate(topk)
    return arrays


def _trainer(name: str, model: str, dtype: str) -> Trainer:
    temperature = float(name.removeprefix("temperature")) if name.startswith("temperature") else 1.0
    sampling = SamplingSettings(temperature=temperature)
    if name.startswith(tuple(_POSITIONS)):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(model, Path(folder) / "model"))
            config = json.loads((copy / "config.json").read_text())
            _other_positions(config, name)
            (copy / "config.json").write_text(json.dumps(config))
            return Trainer(load_causal_lm(str(copy), dtype), sampling)
    loaded = load_causal_lm(model, dtype)
    if name.startswith("weights"):
        _perturb(loaded, float(name.removeprefix("weights")))
    trainer = Trainer(loaded, sampling)
    # Only now: a trainer refuses a model whose two passes over the same tokens differ
    if name.startswith("dropout"):
        _drop_out(loaded, float(name.removeprefix("dropout")))
    return trainer


def _drop_out(model: Any, share: float) -> None:
    """Dropout as in training, with one seed, whatever mode a scorer sets."""
    torch.manual_seed(0)

    def drop(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, share, training=True)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


_POSITIONS = ("rope", "linear", "yarn")


def _other_positions(config: dict[str, Any], name: str) -> None:
    where = config["rope_parameters"]
    kind = next(kind for kind in _POSITIONS if name.startswith(kind))
    factor = float(name.removeprefix(kind))
    if kind == "rope":
        where["rope_theta"] *= factor
    else:
        where |= {"rope_type": kind, "factor": factor}
        where["original_max_position_embeddings"] = int(config["max_position_embeddings"] / factor)


@torch.no_grad()
def _perturb(model: Any, scale: float) -> None:
    """Noise of `scale` times each tensor's own spread."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_((scale * parameter.float().std() * noise).to(parameter.dtype))


def _requests(name: str, pool: Pool, trace: Trace) -> list[ScoreRequest]:
    rng, bounds = np.random.default_rng(0), pool.offset_S1
    splits = _splits(trace) if name == "retokenised" else {}
    longest = max(len(prompt) for prompt in pool.rows["prompt_ids"])
    requests = []
    for s, prompt in enumerate(pool.rows["prompt_ids"]):
        own = slice(bounds[s], bounds[s + 1])
        ids = pool.tokens["response_ids"][own].tolist()
        if name == "retokenised":
            requests.append(ScoreRequest(list(prompt), _with_one_split(ids, splits, rng)))
        else:
            topk = pool.ranks["topk_ids"][own] if "topk_ids" in pool.ranks else None
            requests.append(ScoreRequest(_context(name, list(prompt), longest), ids, topk))
    return requests


def _context(name: str, prompt: list[int], longest: int) -> list[int]:
    """The prompt as the trainer reads it: padded, or with another token."""
    if name.startswith("padded"):
        if name == "padded-to-longest":
            return [_PADDING] * (longest - len(prompt)) + prompt
        return [_PADDING] * int(name.removeprefix("padded")) + prompt
    if name == "prompt-dropped":
        return prompt[1:]
    if name.startswith("prompt-"):
        places = {"first": 0, "middle": len(prompt) // 2, "last": len(prompt) - 1}
        at = places[name.removeprefix("prompt-")]
        other = _ANOTHER if prompt[at] != _ANOTHER else _ANOTHER + 1
        return [*prompt[:at], other, *prompt[at + 1 :]]
    return prompt


_PADDING, _ANOTHER = 2, 300  # the bundled model's padding, and a token of its text


@torch.inference_mode()
def _penalised(penalty: float, model: Any, requests: list[ScoreRequest]) -> dict[str, np.ndarray]:
    """Log-probabilities with the logits of every token in the context divided by the penalty.

    Negative logits are multiplied by it, as in engines.
    """
    logp, entropy, topk = [], [], []
    for request in requests:
        logp_TV = _penalised_logp(penalty, model, request)
        ids_T = torch.tensor(request.response_ids)
        logp.append(logp_TV.gather(1, ids_T[:, None])[:, 0].numpy())
        entropy.append(-(logp_TV.exp() * logp_TV).sum(-1).numpy())
        if request.topk_ids_TK is not None:
            topk_ids_TK = torch.from_numpy(request.topk_ids_TK.astype(np.int64))
            topk.append(logp_TV.gather(1, topk_ids_TK).numpy())
    arrays = {"logp_T": np.concatenate(logp), "entropy_T": np.concatenate(entropy)}
    if topk:
        arrays["topk_logp_TK"] = np.concatenate(topk)
    return arrays


def _penalised_logp(penalty: float, model: Any, request: ScoreRequest) -> torch.Tensor:
    """The whole distribution at each token of the response, T × V."""
    ids = torch.tensor(request.prompt_ids + request.response_ids)
    # The logits at a position are those of the next token
    start = len(request.prompt_ids)
    logits_TV = model(input_ids=ids[None, :-1]).logits[0, start - 1 :].float()
    in_context_TV = torch.zeros(len(logits_TV), logits_TV.shape[1], dtype=torch.bool)
    in_context_TV[:, ids[:start]] = True
    for t in range(1, len(logits_TV)):
        in_context_TV[t:, ids[start + t - 1]] = True
    penalised_TV = torch.where(logits_TV > 0, logits_TV / penalty, logits_TV * penalty)
    return torch.where(in_context_TV, penalised_TV, logits_TV).log_softmax(-1)


def _splits(trace: Trace) -> dict[int, tuple[int, int]]:
    """Token ids whose text is that of two other tokens."""
    texts = [trace.vocabulary.decode([i]) for i in range(4096)]
    text_of = {i: text for i, text in enumerate(texts) if not text.startswith("⟨")}
    id_of = {text: i for i, text in text_of.items()}
    splits = {}
    for token, text in text_of.items():
        for cut in range(1, len(text)):
            if text[:cut] in id_of and text[cut:] in id_of:
                splits[token] = (id_of[text[:cut]], id_of[text[cut:]])
                break
    return splits


def _with_one_split(
    ids: list[int], splits: dict[int, tuple[int, int]], rng: np.random.Generator
) -> list[int]:
    """The ids with one token of the first half split in two; unchanged if none can be split."""
    half = max(1, len(ids) // 2)
    possible = [i for i in range(3, half) if ids[i] in splits]
    if not possible:
        return ids
    at = int(rng.choice(possible))
    return [*ids[:at], *splits[ids[at]], *ids[at + 1 :]]
