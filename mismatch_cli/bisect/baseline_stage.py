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
    """Find faults in the columns and differences of weights and configurations, and read a leg
    without each.
    """
    legs, trainer = run.runner.legs, run.runner.trainer
    if run.search.findings is None:
        trace = Trace.open(legs.folder(AS_RECORDED))
        found = diagnose(trace, trainer.config.scoring_model) if run.ranks.world.first else None
        run.search.findings = run.ranks.world.told(found)
        run.save()
    read_sides(run)
    run.add(*_of_columns(run))
    if run.is_explained():
        return
    for experiment, change in _of_models(run):
        run.check_time()
        leg = leg_of(TRAINER, change, f"trainer with the rollout’s {experiment['setting']}")
        try:
            run.runner.read_trainer([leg], run.enough(lambda read: (run.search.base[0], read.name)))
        except (
            MismatchError
        ) as error:  # pickled weights, or a configuration that does not fit the trainer's weights
            run.cannot_try(experiment["setting"], TRAINER, experiment["better"], str(error))
            continue
        after = (run.search.base[0], leg.name)
        run.add(Experiment(**experiment, stage=0, before=run.search.base, after=after))


def legs_of_both(run: Searching) -> None:
    """Read what stage 0 did not read of the unchanged sides, and the float32 trainer, which is
    the reference.
    """
    read_sides(run)
    run.add(*_of_columns(run))
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
    runner = run.runner
    name = runner.rollout.engine
    legs = [DECODED, ALONE, UNCACHED] if engine_has(name, "REPLAYS") else []
    legs += [WHOLE] if engine_has(name, "PREFILLS") and can_be_whole(run) else []
    compares = 0 in run.config.wanted and run.search.weights is None and engine_has(name, "OPEN")

    def compare(engine: Engine) -> None:
        run.search.weights = run.ranks.world.told(
            compared(run, engine) if run.ranks.world.first else None
        )

    narrow = run.enough(lambda leg: (leg.name, AS_RECORDED))
    if legs or compares:
        runner.read_rollout(
            legs or [DECODED],
            lambda leg: leg in (ALONE, UNCACHED) and narrow(leg),
            also=compare if run.told(compares) else None,
        )


def can_be_whole(run: Searching) -> bool:
    """Whether log μ from reading a whole response at once is that of the sampling distribution."""
    return run.runner.rollout.engine == "hf" or not run.runner.rollout.sampling.truncates


def base_of(run: Searching) -> tuple[str, str]:
    """The legs that changes are measured against: both sides read again, where that is possible."""
    engine = next(
        (leg.name for leg in (DECODED, WHOLE) if run.runner.legs.is_done(leg.name)), AS_RECORDED
    )
    trainer = SCORED.name if run.runner.legs.is_done(SCORED.name) else AS_RECORDED
    return engine, trainer


def _of_columns(run: Searching) -> list[Experiment]:
    """What part of the gap is only in the recorded columns, not in what made them; the diagnosis
    names it if it can.
    """
    findings, (engine, trainer) = run.search.findings or [], run.search.base
    found = next(iter(findings), None)
    columns = []
    if engine == DECODED.name:
        columns.append(
            Experiment("logp_rollout", ROLLOUT, 0, RECORDED, (engine, AS_RECORDED), _NOT_THE_ENGINE)
        )
    if trainer == SCORED.name:
        columns.append(
            Experiment(
                "logp_trainer", TRAINER, 0, RECORDED, (AS_RECORDED, trainer), _NOT_THE_TRAINER
            )
        )
    if found is None:
        return columns
    causes = rank(run.measured(), replace(run.search, experiments=columns), details=False).causes
    first = causes[0].experiment if causes else None  # the column that the fault is in
    named = {"setting": found["setting"], "change": found["change"]}
    return [replace(column, **named) if column == first else column for column in columns]


def compared(run: Searching, engine: Engine) -> dict[str, Any]:
    """The engine's weights and configuration compared with the trainer's, in the form of
    `search.json`.
    """
    rollout, trainer = run.runner.rollout, run.runner.trainer.config
    found = compare_weights(
        cast(OpenEngine, engine),
        trainer.scoring_model,
        trainer_dtype=trainer.scorer.dtype,
        keep_in=run.runner.weights_folder,
    )
    config = config_differences(rollout.model, trainer.scoring_model, rollout.overrides)
    groups = [asdict(group) for group in found.groups()]
    structure = structure_difference(rollout.model, trainer.scoring_model)
    return found.to_json() | {
        "groups": groups,
        "config": [difference.to_json() for difference in config],
        **structure.to_json(),
    }


def _of_models(run: Searching) -> Iterator[tuple[dict[str, Any], Change]]:
    """For each difference between the two models: an experiment without its legs, and the change
    to the trainer.
    """
    found, rollout, trainer = (
        run.search.weights or {},
        run.runner.rollout,
        run.runner.trainer.config,
    )
    about: dict[str, Any]
    if rollout.adapter != trainer.scorer_adapter and compare_adapters(
        {"adapter": rollout.adapter}, {"adapter": trainer.scorer_adapter}
    ):
        words = "use the adapter on both sides, or on neither"
        about = {
            "setting": "adapter",
            "value": trainer.scorer_adapter,
            "better": rollout.adapter,
            "change": words,
        }
        lacks = TRAINER if rollout.adapter else ROLLOUT
        yield about | {"side": lacks}, {"trainer_adapter": rollout.adapter}
    for group in found.get("groups", ()):
        words = f"load the same weights on both sides: {_details(found, group['tensors'])}"
        about = {
            "setting": group["name"],
            "value": group["relation"],
            "better": "the rollout’s",
            "change": words,
        }
        yield (
            about | {"side": TRAINER, "parts": tuple(group["tensors"])},
            {"tensors": {group["name"]: group["tensors"]}},
        )
    for differing in found.get("config", ()):
        inner = differing["inner"]
        setting = ".".join([differing["key"], *inner[:1]]) if len(inner) == 1 else differing["key"]
        about = {
            "setting": setting,
            "value": differing["trainer"],
            "better": differing["rollout"],
            "parts": tuple(inner),
        }
        about |= {"side": TRAINER, "change": f"the same {setting} on both sides"}
        yield about, {"model_config": {differing["key"]: differing["rollout"]}}


def _details(found: Mapping[str, Any], tensors: Sequence[str]) -> str:
    """`model.layers.1.mlp.down_proj.weight is × 1.0100 in the engine`; of several the first."""
    first = next(each for each in found["differing"] if each["tensor"] == tensors[0])
    more = f", and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{first['tensor']} differs ({first['relation']}: {first['detail']}){more}"
