"""Stages 0 and 1, with both sides as in the manifest: bookkeeping, weights and configurations;
then the legs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.bisect.experiments import (
    ALONE,
    AS_RECORDED,
    DECODED,
    OTHER_SHAPE,
    REFERENCE,
    ROLLOUT,
    SCORED,
    TRAINER,
    UNCACHED,
    WHOLE,
    Change,
    Experiment,
    Leg,
    Pair,
)
from mismatch_cli.bisect.model_config import config_differences
from mismatch_cli.bisect.model_structure import structure_difference
from mismatch_cli.bisect.ranking import RECORDED, rank
from mismatch_cli.bisect.runner import leg_of
from mismatch_cli.bisect.search_state import Searching
from mismatch_cli.bisect.weights import compare_adapters, compare_weights
from mismatch_cli.models.engines import Engine, OpenEngine, engine_has
from mismatch_cli.trace.reader import Trace

_NOT_THE_ENGINE = (
    "this engine does not reproduce the recorded log μ: check what differs from the run that "
    "recorded it, and how it was written"
)
_NOT_THE_TRAINER = (
    "this trainer does not reproduce the recorded log π: check its inputs (token ids, mask, "
    "positions), and how it was written"
)
# Faults of a trace whose trainer has this model
Diagnose = Callable[[Trace, str], list[dict[str, Any]]]


def bookkeeping(run: Searching, diagnose: Diagnose) -> None:
    """Search for faults in the columns and differences of weights and configurations, and read a
    leg without each.
    """
    legs, trainer = run.runner.legs, run.runner.trainer
    if run.search.findings is None:
        trace = Trace.open(legs.folder(AS_RECORDED))
        faults = None
        if run.ranks.world.first:
            faults = diagnose(trace, trainer.config.scoring_model)
        run.search.findings = run.ranks.world.broadcast(faults)
        run.save()
    read_sides(run)
    run.add(*_column_experiments(run))
    if run.is_explained():
        return
    engine = run.search.base[0]
    for experiment, change in _model_experiments(run):
        run.check_time()
        leg = leg_of(TRAINER, change, f"trainer with the rollout’s {experiment['setting']}")
        try:
            run.runner.read_trainer([leg], run.enough(lambda read: (engine, read.name)))
        # Pickled weights, or a configuration that does not fit the trainer's weights.
        except MismatchError as error:
            run.cannot_try(experiment["setting"], TRAINER, experiment["better"], str(error))
        else:
            after = (engine, leg.name)
            run.add(Experiment(**experiment, stage=0, before=run.search.base, after=after))


def legs_of_both(run: Searching) -> None:
    """Read what stage 0 did not read of the unchanged sides, and the float32 trainer, which is
    the reference.
    """
    read_sides(run)
    run.add(*_column_experiments(run))
    if trainer_dtype(run) != "float32":
        run.check_time()
        run.runner.read_trainer([REFERENCE])


def read_sides(run: Searching) -> None:
    """Read the unchanged legs of both sides that are missing; changes are measured against them."""
    read_rollout(run)
    run.runner.read_trainer([SCORED, OTHER_SHAPE])
    run.search.base = base_of(run)


def trainer_dtype(run: Searching) -> str:
    """The dtype in which the trainer read its leg."""
    return str(run.runner.legs.described(SCORED.name, TRAINER)["dtype"])


def read_rollout(run: Searching) -> None:
    """Read every leg of the unchanged engine while it is loaded, and compare its weights if they
    are wanted.
    """
    name = run.runner.rollout.engine
    legs = []
    if engine_has(name, "REPLAYS"):
        legs += [DECODED, ALONE, UNCACHED]
    if engine_has(name, "PREFILLS") and can_be_whole(run):
        legs.append(WHOLE)
    compares = _lacks_weights(run) and engine_has(name, "OPEN")
    if not (legs or compares):
        return

    def compare(engine: Engine) -> None:
        weights = compare_models(run, engine) if run.ranks.world.first else None
        run.search.weights = run.ranks.world.broadcast(weights)

    narrow = run.enough(lambda leg: (leg.name, AS_RECORDED))
    run.runner.read_rollout(
        legs or [DECODED],
        # The legs that changes are compared with are read in full.
        lambda leg: leg in (ALONE, UNCACHED) and narrow(leg),
        also=compare if run.first_says(compares) else None,
    )


def _lacks_weights(run: Searching) -> bool:
    return 0 in run.config.wanted and run.search.weights is None


def can_be_whole(run: Searching) -> bool:
    """Whether log μ from reading a whole response at once is that of the sampling distribution."""
    return run.runner.rollout.engine == "hf" or not run.runner.rollout.sampling.truncates


def base_of(run: Searching) -> Pair:
    """The legs that changes are measured against: both sides read again, where that is possible."""
    return _first_done(run, DECODED, WHOLE), _first_done(run, SCORED)


def _first_done(run: Searching, *legs: Leg) -> str:
    for leg in legs:
        if run.runner.legs.is_done(leg.name):
            return leg.name
    return AS_RECORDED


def _column_experiments(run: Searching) -> list[Experiment]:
    """What part of the gap is only in the recorded columns, not in what made them; the diagnosis
    names it if it can.
    """
    engine, trainer = run.search.base
    columns = []
    if engine == DECODED.name:
        after = (engine, AS_RECORDED)
        columns.append(Experiment("logp_rollout", ROLLOUT, 0, RECORDED, after, _NOT_THE_ENGINE))
    if trainer == SCORED.name:
        after = (AS_RECORDED, trainer)
        columns.append(Experiment("logp_trainer", TRAINER, 0, RECORDED, after, _NOT_THE_TRAINER))
    if not run.search.findings:
        return columns
    # The fault that explains most is taken to be in the column that removes most of the gap.
    fault = run.search.findings[0]
    ranking = rank(run.measured(), replace(run.search, experiments=columns), details=False)
    if ranking.causes:
        at = columns.index(ranking.causes[0].experiment)
        columns[at] = replace(columns[at], setting=fault["setting"], change=fault["change"])
    return columns


def compare_models(run: Searching, engine: Engine) -> dict[str, Any]:
    """The engine's weights and configuration compared with the trainer's, in the form of
    `search.json`.
    """
    rollout, trainer = run.runner.rollout, run.runner.trainer.config
    weights = compare_weights(
        cast(OpenEngine, engine),
        trainer.scoring_model,
        trainer_dtype=trainer.scorer.dtype,
        keep_in=run.runner.weights_folder,
    )
    config = config_differences(rollout.model, trainer.scoring_model, rollout.overrides)
    groups = [asdict(group) for group in weights.groups()]
    structure = structure_difference(rollout.model, trainer.scoring_model)
    return weights.to_json() | {
        "groups": groups,
        "config": [difference.to_json() for difference in config],
        **structure.to_json(),
    }


def _model_experiments(run: Searching) -> Iterator[tuple[dict[str, Any], Change]]:
    """For each difference between the two models: an experiment without its legs, and the change
    to the trainer.
    """
    yield from _adapter_experiment(run)
    weights = run.search.weights or {}
    for group in weights.get("groups", ()):
        tensors = group["tensors"]
        experiment = {
            "setting": group["name"],
            "side": TRAINER,
            "value": group["relation"],
            "better": "the rollout’s",
            "change": f"load the same weights on both sides: {_details(weights, tensors)}",
            "parts": tuple(tensors),
        }
        yield experiment, {"tensors": {group["name"]: tensors}}
    for differing in weights.get("config", ()):
        key, inner = differing["key"], differing["inner"]
        setting = f"{key}.{inner[0]}" if len(inner) == 1 else key
        experiment = {
            "setting": setting,
            "side": TRAINER,
            "value": differing["trainer"],
            "better": differing["rollout"],
            "change": f"the same {setting} on both sides",
            "parts": tuple(inner),
        }
        yield experiment, {"model_config": {key: differing["rollout"]}}


def _adapter_experiment(run: Searching) -> Iterator[tuple[dict[str, Any], Change]]:
    """The experiment and the change where the two sides' adapters hold different numbers."""
    rollout, trainer = run.runner.rollout.adapter, run.runner.trainer.config.scorer_adapter
    if rollout != trainer and compare_adapters({"adapter": rollout}, {"adapter": trainer}):
        experiment = {
            "setting": "adapter",
            "side": TRAINER if rollout else ROLLOUT,  # the one that lacks it
            "value": trainer,
            "better": rollout,
            "change": "use the adapter on both sides, or on neither",
        }
        yield experiment, {"trainer_adapter": rollout}


def _details(weights: Mapping[str, Any], tensors: Sequence[str]) -> str:
    """`model.layers.1.mlp.down_proj.weight differs (scaled: × 1.0100), and 2 more`."""
    by_name = {differing["tensor"]: differing for differing in weights["differing"]}
    first = by_name[tensors[0]]
    text = f"{first['tensor']} differs"
    if first["detail"]:
        text += f" ({first['relation']}: {first['detail']})"
    if len(tensors) > 1:
        text += f", and {len(tensors) - 1} more"
    return text
