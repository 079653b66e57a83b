"""Stage 3: compare the modules of both sides on some responses, with the settings that cause
gaps changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.bisect.baseline_stage import base_of
from mismatch_cli.bisect.dissect import graft
from mismatch_cli.bisect.experiments import ROLLOUT, TRAINER, Change, Experiment, Leg
from mismatch_cli.bisect.modules import ModuleFindings, choose_responses
from mismatch_cli.bisect.ranking import RECORDED
from mismatch_cli.bisect.search_state import Searching
from mismatch_cli.bisect.settings_stage import changes_of
from mismatch_cli.bisect.side_settings import combined
from mismatch_cli.models.engines import ForcedResponse, engine_module
from mismatch_cli.trace.shards import open_shard

_WHAT = {
    "embedding": "the embeddings",
    "residual": "the precision of the residual stream",
    "norm": "the norms",
    "rotary": "the rotary embedding",
    "attention": "attention",
    "router": "the routers",
    "mlp": "the MLPs",
    "experts": "the experts",
    "head": "the LM head",
    "all": "every module",
}
_MEMORY_SHARE = 0.4  # of a GPU


def compare_modules(run: Searching) -> None:
    """Hook both models, then graft each kind of the engine's modules into the trainer's forward
    pass.
    """
    if run.ranks.spreads:
        raise MismatchError(
            "modules can only be compared with a trainer in one process: leave out sharded"
        )
    run.search.base = base_of(run)
    rollout, trainer = _undone(run)
    rows = _chosen(run)
    started = time.perf_counter()
    if run.ranks.world.first:
        found, described = _grafted(run, rows, rollout, trainer)
        _keep(run, rows, found, described, time.perf_counter() - started)
    run.ranks.world.barrier()


def _undone(run: Searching) -> tuple[Change, Change]:
    """The changes to both sides that undo the settings that cause gaps: the modules cause what
    is left.
    """
    helping, together = run.helping(), run.search.together
    needed = (
        helping[:1]
        if together is None
        else [e for e in helping if e.setting in together["settings"]]
    )
    rollout, trainer = changes_of(run, needed)
    asked = ("alone", "cached", "other_shape")
    kept = [
        {name: value for name, value in change.items() if name not in asked}
        for change in (rollout, trainer)
    ]
    return combined(_beside_trainer(run), kept[0]), kept[1]


def _beside_trainer(run: Searching) -> Change:
    """Settings for an engine whose modules can be called, with room on its GPU for the trainer."""
    if run.runner.rollout.engine != "vllm":
        return {}
    share = engine_module("vllm").MEMORY_SHARE
    described = run.runner.legs.described(run.search.base[0], ROLLOUT)
    room = (
        {} if share is None or described.get("device") in (None, "cpu") else {share: _MEMORY_SHARE}
    )
    return {"engine_args": {"enforce_eager": True, **room}}


def _chosen(run: Searching) -> list[int]:
    """The indices of the responses to compare, chosen by their recorded gap."""
    measured = run.measured()
    sums = measured.sums(RECORDED)
    gap_S = sums.sums_S3[:, 0] / np.maximum(sums.tokens_S, 1)
    prompts = measured.tokens.prompt_id_S.tolist()
    return choose_responses(np.split(gap_S, len(gap_S)), prompts, run.config.module_responses)


def _grafted(
    run: Searching, rows: Sequence[int], rollout: Change, trainer: Change
) -> tuple[ModuleFindings, dict[str, Any]]:
    """What grafts find, and how both sides describe themselves."""
    tables = [
        open_shard(path).read(columns=["prompt_ids", "response_ids"])
        for path in run.runner.legs.tokens.shards
    ]
    ids = [
        zip(t["prompt_ids"].to_pylist(), t["response_ids"].to_pylist(), strict=True) for t in tables
    ]
    forced = [ForcedResponse(*pair) for pair in chain.from_iterable(ids)]
    responses = [forced[row] for row in rows]
    with (
        run.runner.engine(rollout) as engine,
        run.runner.loaded_trainer(trainer) as scorer,
        run.progress.counting("Comparing modules", len(responses)) as on_done,
    ):
        described = {ROLLOUT: engine.describe(), TRAINER: scorer.describe()}
        return graft(engine, scorer, responses, on_done), described


def _keep(
    run: Searching,
    rows: Sequence[int],
    found: ModuleFindings,
    described: Mapping[str, Any],
    seconds: float,
) -> None:
    """Keep a leg for each kind, legs of both sides' own passes over the same responses, and the
    experiments.
    """
    legs = run.runner.legs
    own = Leg("modules-rollout", ROLLOUT, "engine, eager, whole responses at once")
    scored = Leg("modules-trainer", TRAINER, "trainer, one response at a time")
    kinds = {
        kind: Leg(f"graft-{kind}", TRAINER, f"trainer with {_WHAT[kind]} of the engine")
        for kind in found.grafted
    }
    written = [(own, found.logp_prefill), (scored, found.logp_trainer)]
    written += [(leg, found.grafted[kind]) for kind, leg in kinds.items()]
    for leg, logp in written:
        legs.write_selected(leg, rows, {f"logp_{leg.side}": logp}, described[leg.side], seconds)
    before = (own.name, scored.name)
    run.add(
        *(
            _experiment(
                [m.module for m in found.isolated.values() if m.kind == kind], kind, before, leg
            )
            for kind, leg in kinds.items()
        )
    )
    run.search.modules = found.to_json()
    run.save()


def _experiment(parts: Sequence[str], kind: str, before: tuple[str, str], leg: Leg) -> Experiment:
    change = f"compute {_WHAT[kind]} alike on both sides"
    return Experiment(kind, "both", 3, before, (before[0], leg.name), change, parts=tuple(parts))
