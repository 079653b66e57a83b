"""An alarm is a state: told when it begins, every so many steps, and when it is over."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.limits.limit_sets import WHOLE_INTERVAL, Limit, LimitSet
from mismatch_cli.studies.gate import Check, MeasuredMetric, check_limits
from mismatch_cli.studies.watch_state import SetLimit, watch_state
from mismatch_cli.trace.training_folder import WATCH_FILE
from mismatch_cli.watch.alarms import EVERY, Alarms
from mismatch_cli.watch.folders import check_watch_folder
from mismatch_cli.watch.state import State

SETS = [LimitSet("mine", (Limit("k3", "max", 0.01, "mismatch"),))]


def checks(
    value: float | None, half: float | None = None, sets: list[LimitSet] = SETS
) -> list[Check]:
    """The judgement of a step's number, instead of that of a measurement."""
    ends = (None, None) if half is None else (value - half, value + half)
    why = "" if value is not None else "not measured"
    metric = MeasuredMetric(value, *ends, pair="mismatch", why=why)
    return check_limits(sets, SimpleNamespace(find=lambda _: metric), None)


def said(alarms: Alarms, values: dict[int, float | None]) -> list[tuple[int, str, int]]:
    judged = [alarms.update(step, checks(value)) for step, value in values.items()]
    return [(event.step, event.state, event.since) for events in judged for event in events]


def test_it_begins_once_and_is_over_once():
    alarms = Alarms()
    values = {1: 0.005, 2: 0.02, 3: 0.03, 4: None, 5: 0.02, 6: 0.01, 7: 0.02, 8: 0.001}
    assert said(alarms, values) == [
        (2, "begins", 2), (6, "over", 2), (7, "begins", 7), (8, "over", 7),
    ]  # fmt: skip
    assert [alarm.when for alarm in alarms.all] == ["from step 2 to 5", "at step 7"]


def test_it_is_told_again_every_so_many_steps():
    alarms = Alarms()
    steps = range(1, 2 * EVERY + 5)
    events = said(alarms, dict.fromkeys(steps, 0.02))
    assert events == [(1, "begins", 1), (1 + EVERY, "still", 1), (1 + 2 * EVERY, "still", 1)]
    assert alarms.all[0].when == "since step 1" and alarms.all[0].last == steps[-1]


def test_the_same_step_again_tells_nothing_and_an_earlier_one_changes_nothing():
    alarms = Alarms()
    assert said(alarms, {2: 0.02}) == [(2, "begins", 2)]
    assert said(Alarms(alarms.all), {2: 0.02}) == []
    assert said(alarms, {1: 0.001}) == [] and alarms.all[0].over is None
    # The step has grown, and holds the limit now; it grows once more, and does not
    assert said(alarms, {2: 0.001}) == [(2, "over", 2)]
    assert said(alarms, {2: 0.001}) == []
    assert said(alarms, {2: 0.02}) == [(2, "begins", 2)]


def test_an_undecided_step_does_not_end_it():
    """Within the limit, but with an interval that contains it."""
    alarms = Alarms()
    alarms.update(1, checks(0.02, 0.001))
    assert alarms.update(2, checks(0.009, 0.005)) == []
    (over,) = alarms.update(3, checks(0.005, 0.001))
    assert (over.state, over.since) == ("over", 1)


def test_with_certainty_asked_for_an_undecided_step_raises_none():
    sure = [LimitSet("s", (Limit("k3", "max", 0.01, "mismatch", WHOLE_INTERVAL),))]
    alarms = Alarms()
    assert alarms.update(1, checks(0.011, 0.005, sets=sure)) == []
    (event,) = alarms.update(2, checks(0.02, 0.005, sets=sure))
    assert event.text == "k3 (mismatch) at step 2: 0.02 is above 0.01 (s)"


def test_every_event_says_what_it_is():
    alarms = Alarms()
    (begins,) = alarms.update(3, checks(0.02))
    (still,) = alarms.update(3 + EVERY, checks(0.03))
    (over,) = alarms.update(4 + EVERY, checks(0.001))
    assert begins.text == "k3 (mismatch) at step 3: 0.02 is above 0.01 (mine)"
    assert still.text == "k3 (mismatch) at step 28: 0.03 is above 0.01, since step 3 (mine)"
    assert over.text == "k3 (mismatch) at step 29: holds again, after an alarm since step 3 (mine)"
    assert [event.is_alarm for event in (begins, still, over)] == [True, True, False]
    assert {"step": 29, "state": "over", "since": 3, "status": "holds"}.items() <= (
        over.to_json().items()
    )


def test_a_restart_continues_and_the_page_reads_the_same(tmp_path: Path):
    limits = {"limits": [{"name": "mine", "limits": [vars(SETS[0].limits[0])]}]}
    state = State(tmp_path, tmp_path / "run", limits, lines=False)
    (event,) = state.update_alarms(1, checks(0.02))
    assert state.uncalled == [event]
    state.record_call(event)
    state.update_alarms(2, checks(0.03))
    state.save()
    again = State(tmp_path, tmp_path / "run", limits, lines=False)
    assert again.uncalled == [] and again.update_alarms(2, checks(0.03)) == []
    watched = watch_state(tmp_path)
    (alarm,) = watched.alarms
    assert (alarm.since, alarm.last, alarm.over) == (1, 2, None)
    again.update_alarms(3, checks(0.001))
    (alarm,) = watch_state(tmp_path).alarms
    assert (alarm.over, alarm.check.reason) == (3, "0.02 is above 0.01")
    assert alarm.to_json()["step"] == 1


def test_a_state_of_another_version_is_refused(tmp_path: Path):
    folder, run = tmp_path / "seen", tmp_path / "run"
    folder.mkdir()
    content = {"format": "mismatch-cli watch", "version": 1, "run": str(run)}
    (folder / WATCH_FILE).write_text(json.dumps(content))
    with pytest.raises(MismatchError, match="is from another version of mismatch-cli"):
        check_watch_folder(folder, run)


def test_a_limit_that_decides_differently_is_another_one():
    alarms = Alarms()
    alarms.update(1, checks(0.011, 0.005))
    sure = [LimitSet("mine", (Limit("k3", "max", 0.01, "mismatch", WHOLE_INTERVAL),))]
    assert alarms.update(1, checks(0.011, 0.005, sets=sure)) == []
    assert len(alarms.of(SETS)) == 1 and alarms.of(sure) == []


def asked(baseline: list[str]) -> dict[str, object]:
    return {"limits": [asdict(of) for of in SETS], "baseline": baseline, "algorithm": "grpo"}


def test_with_another_baseline_the_alarms_are_those_of_its_own_judgement(tmp_path: Path):
    State(tmp_path, tmp_path / "run", asked(["a"]), lines=False).update_alarms(1, checks(0.02))
    same = State(tmp_path, tmp_path / "run", asked(["a"]), lines=False)
    assert len(same.alarms.all) == 1
    assert State(tmp_path, tmp_path / "run", asked(["b"]), lines=False).alarms.all == []


def test_a_limit_is_measured_in_its_own_set(tmp_path: Path):
    """The same limit of a second set may be for other models, and not be judged."""
    sets = [*SETS, LimitSet("theirs", SETS[0].limits)]
    state = State(tmp_path, tmp_path / "run", asked([]), lines=False)
    state.update_alarms(1, checks(0.001))
    assert state.unmeasured(SETS) == [] and state.unmeasured(sets) == SetLimit.all_of(sets[1:])
