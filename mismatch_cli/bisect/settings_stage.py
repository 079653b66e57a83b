"""Stage 2: change settings one at a time, then all that help at once, without those that are not
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.bisect.baseline_stage import read_sides
from mismatch_cli.bisect.experiments import (
    ALONE,
    AS_RECORDED,
    DECODED,
    OTHER_SHAPE,
    REFERENCE,
    ROLLOUT,
    TRAINER,
    UNCACHED,
    Change,
    Experiment,
    Leg,
    Pair,
)
from mismatch_cli.bisect.ranking import LEAST
from mismatch_cli.bisect.runner import leg_of, never
from mismatch_cli.bisect.search_state import Searching
from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide, combined
from mismatch_cli.bisect.toggles import Toggle, toggles
from mismatch_cli.models.engines import engine_module

_WITHOUT_RESTART: dict[tuple[str, ...], Leg] = {("alone",): ALONE, ("cached",): UNCACHED}
_MOST_TOGETHER = 4  # settings


def turn_settings(run: Searching) -> None:
    """Change each setting that applies; report and skip what this machine cannot do."""
    read_sides(run)  # if earlier stages were skipped
    for toggle in toggles(*as_read(run)):
        run.check_time()
        why = _out_of_reach(run, toggle)
        try:
            if not why:
                run.add(_experiment(run, toggle, _read_pair(run, toggle)))
                run.forget_untried(toggle.setting, toggle.side)
        except (MismatchError, UsageError) as error:
            why = str(error)
        if why:
            run.cannot_try(toggle.setting, toggle.side, toggle.better, why)
        elif run.is_explained():
            return


def as_read(run: Searching) -> tuple[RolloutSide, TrainerSide]:
    """Both sides as they described themselves when they read the tokens again, perhaps on
    another machine.
    """
    runner, (engine, trainer) = run.runner, run.search.base
    return (
        replace(runner.rollout, described=runner.legs.described(engine, ROLLOUT)),
        replace(runner.trainer, described=runner.legs.described(trainer, TRAINER)),
    )


def _out_of_reach(run: Searching, toggle: Toggle) -> str:
    """Why a setting cannot be changed from here; empty if it can."""
    engine = run.runner.rollout.engine
    if toggle.rollout and run.search.base[0] == AS_RECORDED:
        return f"--engine {engine} cannot read recorded tokens again"
    if toggle.starts and engine_module(engine).REMOTE:
        return "the server must be started with it"
    if toggle.rollout and not toggle.starts and run.search.base[0] != DECODED.name:
        return f"--engine {engine} cannot decode recorded tokens"
    return ""


def _experiment(run: Searching, toggle: Toggle, after: Pair) -> Experiment:
    return Experiment(
        setting=toggle.setting,
        side=toggle.side,
        stage=2,
        before=run.search.base,
        after=after,
        change=toggle.change,
        value=toggle.value,
        better=toggle.better,
        flags=toggle.flags,
        floor=toggle.floor,
        parts=toggle.parts,
    )


def _read_pair(run: Searching, toggle: Toggle) -> Pair:
    """The pair of legs with a setting changed; reads missing ones, the trainer's first, since it
    is cheaper.
    """
    engine, trainer = run.search.base
    what = f"{toggle.setting} = {toggle.better}"
    if toggle.trainer:
        trainer = read_trainer(run, toggle.trainer, what, whole=bool(toggle.rollout))
    if toggle.rollout:
        engine = read_engine(run, toggle.rollout, what, trainer)
    return engine, trainer


def read_trainer(run: Searching, change: Change, what: str, *, whole: bool) -> str:
    """The name of the trainer's leg under a change; `whole`: on all responses, to compare an
    engine's leg with it.
    """
    leg = leg_of(TRAINER, change, f"trainer, {what}")
    for unchanged in (OTHER_SHAPE, REFERENCE):
        if unchanged.change == change:
            leg = unchanged
    engine = run.search.base[0]
    enough = never if whole else run.enough(lambda read: (engine, read.name))
    run.runner.read_trainer([leg], enough)
    return leg.name


def read_engine(run: Searching, change: Change, what: str, trainer: str) -> str:
    """The name of the engine's leg under a change; its gap to the trainer's leg decides when
    enough is read.
    """
    leg = _WITHOUT_RESTART.get(tuple(change))
    if leg is None:
        # The change is measured against this base: an engine that did not decode reads at once.
        if run.search.base[0] != DECODED.name:
            change = {**change, "prefill": True}
        leg = leg_of(ROLLOUT, change, f"engine, {what}")
    run.runner.read_rollout([leg], run.enough(lambda read: (read.name, trainer)))
    return leg.name


def turn_together(run: Searching) -> None:
    """Change all settings that help at once, then drop, one at a time, those that are not
    needed.
    """
    helping = run.helping()[:_MOST_TOGETHER]
    if len(helping) < 2:
        return
    pair = _read_together(run, helping)
    # The least helpful is tried first, and the most helpful is always needed.
    for least in reversed(helping[1:]):
        others = [experiment for experiment in helping if experiment is not least]
        pair_of_others = _read_together(run, others)
        lost = (run.share(pair).value or 0.0) - (run.share(pair_of_others).value or 0.0)
        if lost < LEAST / 2:
            helping, pair = others, pair_of_others
    settings = [experiment.setting for experiment in helping]
    run.search.together = {"settings": settings, "after": list(pair)}
    run.save()


def _read_together(run: Searching, experiments: Sequence[Experiment]) -> Pair:
    """The legs of several changes at once; a single change per side has already been read."""
    engine_change, trainer_change = changes_of(run, experiments)
    engine, trainer = run.search.base
    what = " and ".join(experiment.setting for experiment in experiments)
    run.check_time()
    if trainer_change:
        trainer = read_trainer(run, trainer_change, what, whole=True)
    if engine_change:
        engine = read_engine(run, engine_change, what, trainer)
    return engine, trainer


def changes_of(run: Searching, experiments: Sequence[Experiment]) -> tuple[Change, Change]:
    """The combined changes of several experiments, to the engine and to the trainer."""
    engines = [experiment.after[0] for experiment in experiments]
    trainers = [experiment.after[1] for experiment in experiments]
    return _combined_change(run, engines), _combined_change(run, trainers)


def _combined_change(run: Searching, legs: Iterable[str]) -> Change:
    """The changes of some legs of one side; which of them read a prefill depends on the base."""
    unchanged = {*run.search.base, AS_RECORDED}
    changed = [leg for leg in dict.fromkeys(legs) if leg not in unchanged]
    change = combined(*(run.runner.legs.about(leg)["change"] for leg in changed))
    change.pop("prefill", None)
    return change
