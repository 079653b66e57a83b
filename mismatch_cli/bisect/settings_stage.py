"""Stage 2: change settings one at a time, then all that help at once, without those that are not
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from mismatch_cli.bisect.runner import leg_of
from mismatch_cli.bisect.search_state import Searching
from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide, combined
from mismatch_cli.bisect.toggles import Toggle, toggles
from mismatch_cli.models.engines import engine_module

_AS_ASKED: dict[tuple[str, ...], Leg] = {("alone",): ALONE, ("cached",): UNCACHED}
_MOST_TOGETHER = 4  # settings


def turn_settings(run: Searching) -> None:
    """Change each setting that applies; report and skip what this machine cannot do."""
    read_sides(run)  # if earlier stages were skipped
    for toggle in toggles(*as_read(run)):
        run.check_time()
        why = _out_of_reach(run, toggle)
        try:
            if not why:
                run.add(_experiment(run, toggle, _after(run, toggle)))
                run.tried(toggle.setting, toggle.side)
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
    legs, (engine, trainer) = run.runner.legs, run.search.base
    rollout = replace(run.runner.rollout, told=legs.described(engine, ROLLOUT))
    return rollout, replace(run.runner.trainer, told=legs.described(trainer, TRAINER))


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
    known = {
        name: getattr(toggle, name)
        for name in ("setting", "side", "value", "better", "change", "flags", "floor")
    }
    return Experiment(**known, parts=toggle.parts, stage=2, before=run.search.base, after=after)


def _after(run: Searching, toggle: Toggle) -> Pair:
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
    known = (leg for leg in (OTHER_SHAPE, REFERENCE) if leg.change == change)
    leg = next(known, leg_of(TRAINER, change, f"trainer, {what}"))
    enough = run.enough(lambda read: (run.search.base[0], read.name))
    run.runner.read_trainer([leg], (lambda _: False) if whole else enough)
    return leg.name


def read_engine(run: Searching, change: Change, what: str, trainer: str) -> str:
    """The name of the engine's leg under a change; its gap to the trainer's leg decides when
    enough is read.
    """
    leg = _AS_ASKED.get(tuple(change))
    if leg is None:
        asked = {} if run.search.base[0] == DECODED.name else {"prefill": True}
        leg = leg_of(ROLLOUT, {**change, **asked}, f"engine, {what}")
    run.runner.read_rollout([leg], run.enough(lambda read: (read.name, trainer)))
    return leg.name


def turn_together(run: Searching) -> None:
    """Change all settings that help at once, then drop, one at a time, those that are not
    needed.
    """
    helping = run.helping()[:_MOST_TOGETHER]
    if len(helping) < 2:
        return
    pair = _pair_of(run, helping)
    for least in reversed(helping[1:]):
        without = [kept for kept in helping if kept is not least]
        other = _pair_of(run, without)
        if (run.share(pair).value or 0.0) - (run.share(other).value or 0.0) < LEAST / 2:
            helping, pair = without, other
    run.search.together = {
        "settings": [experiment.setting for experiment in helping],
        "after": list(pair),
    }
    run.save()


def _pair_of(run: Searching, experiments: Sequence[Experiment]) -> Pair:
    """The legs of several changes at once; a single change per side has already been read."""
    changes = changes_of(run, experiments)
    engine, trainer = run.search.base
    names = [experiment.setting for experiment in experiments]
    run.check_time()
    if changes[1]:
        trainer = read_trainer(run, changes[1], " and ".join(names), whole=True)
    if changes[0]:
        engine = read_engine(run, changes[0], " and ".join(names), trainer)
    return engine, trainer


def changes_of(run: Searching, experiments: Sequence[Experiment]) -> tuple[Change, Change]:
    """The combined changes of several experiments, to the engine and to the trainer."""
    legs, unchanged = run.runner.legs, {*run.search.base, AS_RECORDED}
    sides: list[Change] = []
    for position in (0, 1):
        names = dict.fromkeys(
            e.after[position] for e in experiments if e.after[position] not in unchanged
        )
        whole = combined(*(legs.about(name)["change"] for name in names))
        sides.append({name: value for name, value in whole.items() if name != "prefill"})
    return sides[0], sides[1]
