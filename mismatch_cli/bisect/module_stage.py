"""Stage 3: compare the modules of both sides on some responses, with the settings that cause
gaps changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.bisect.baseline_stage import base_of
from mismatch_cli.bisect.dissect import graft
from mismatch_cli.bisect.experiments import ROLLOUT, TRAINER, Change, Experiment, Leg
from mismatch_cli.bisect.legs import forced_responses
from mismatch_cli.bisect.modules import ModuleFindings, choose_responses
from mismatch_cli.bisect.ranking import RECORDED
from mismatch_cli.bisect.search_state import Searching
from mismatch_cli.bisect.settings_stage import changes_of
from mismatch_cli.bisect.side_settings import combined
from mismatch_cli.models.engines import engine_module
from mismatch_cli.trace.shards import open_shard

_MODULES_OF_KIND = {
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
    rollout, trainer = _undo_causes(run)
    rows = _choose_rows(run)
    started = time.perf_counter()
    if run.ranks.world.first:
        findings, described = _graft_modules(run, rows, rollout, trainer)
        _write_results(run, rows, findings, described, time.perf_counter() - started)
    run.ranks.world.barrier()


def _undo_causes(run: Searching) -> tuple[Change, Change]:
    """The changes to both sides that undo the settings that cause gaps: the modules cause what
    is left.
    """
    helping, together = run.helping(), run.search.together
    needed = helping[:1]
    if together is not None:
        needed = [e for e in helping if e.setting in together["settings"]]
    rollout, trainer = changes_of(run, needed)
    # A pass over the modules reads one whole response: it has neither batches nor a cache.
    rollout = {name: value for name, value in rollout.items() if name not in ("alone", "cached")}
    trainer = {name: value for name, value in trainer.items() if name != "other_shape"}
    return combined(_room_beside_trainer(run), rollout), trainer


def _room_beside_trainer(run: Searching) -> Change:
    """Settings for an engine whose modules can be called, with room on its GPU for the trainer."""
    if run.runner.rollout.engine != "vllm":
        return {}
    arguments: dict[str, Any] = {"enforce_eager": True}
    share = engine_module("vllm").MEMORY_SHARE
    device = run.runner.legs.described(run.search.base[0], ROLLOUT).get("device")
    if share is not None and device not in (None, "cpu"):
        arguments[share] = _MEMORY_SHARE
    return {"engine_args": arguments}


def _choose_rows(run: Searching) -> list[int]:
    """The indices of the responses to compare, chosen by their recorded gap."""
    measured = run.measured()
    sums = measured.sums(RECORDED)
    # A response without a token that counts has no gap, not one of 0, which may look typical.
    gap_S = sums.of("abs_d") / np.where(sums.tokens_S > 0, sums.tokens_S, np.nan)
    prompts = measured.tokens.prompt_id_S.tolist()
    return choose_responses(np.split(gap_S, len(gap_S)), prompts, run.config.module_responses)


def _graft_modules(
    run: Searching, rows: Sequence[int], rollout: Change, trainer: Change
) -> tuple[ModuleFindings, dict[str, Any]]:
    """What grafts show, and how both sides describe themselves."""
    forced = []
    for path in run.runner.legs.tokens.shards:
        forced += forced_responses(open_shard(path).read(columns=["prompt_ids", "response_ids"]))
    responses = [forced[row] for row in rows]
    with (
        run.runner.engine(rollout) as engine,
        run.runner.loaded_trainer(trainer) as scorer,
        run.progress.counting("Comparing modules", len(responses)) as on_done,
    ):
        described = {ROLLOUT: engine.describe(), TRAINER: scorer.describe()}
        return graft(engine, scorer, responses, on_done), described


def _write_results(
    run: Searching,
    rows: Sequence[int],
    findings: ModuleFindings,
    described: Mapping[str, Any],
    seconds: float,
) -> None:
    """Write a leg for each kind, legs of both sides' own passes over the same responses, and the
    experiments.
    """

    def write(leg: Leg, logp: Sequence[np.ndarray]) -> None:
        columns = {f"logp_{leg.side}": logp}
        run.runner.legs.write_selected(leg, rows, columns, described[leg.side], seconds)

    own = Leg("modules-rollout", ROLLOUT, "engine, eager, whole responses at once")
    scored = Leg("modules-trainer", TRAINER, "trainer, one response at a time")
    write(own, findings.logp_prefill)
    write(scored, findings.logp_trainer)
    before = (own.name, scored.name)
    experiments = []
    for kind, logp in findings.grafted.items():
        modules = _MODULES_OF_KIND[kind]
        leg = Leg(f"graft-{kind}", TRAINER, f"trainer with {modules} of the engine")
        write(leg, logp)
        after = (own.name, leg.name)
        change = f"compute {modules} alike on both sides"
        parts = tuple(m.module for m in findings.isolated.values() if m.kind == kind)
        experiments.append(Experiment(kind, "both", 3, before, after, change, parts=parts))
    run.add(*experiments)
    run.search.modules = findings.to_json()
    run.save()
