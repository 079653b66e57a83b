"""What training runs answer: which algorithm ends higher, and whether limits hold."""

from collections.abc import Sequence

from mismatch_cli.base import numbers
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.outline import Status, Verdict
from mismatch_cli.report.tables import number, plain
from mismatch_cli.studies.watch_state import WatchState, alarm_count, under_way_first
from mismatch_cli.train.studies.run_numbers import RunGroup
from mismatch_cli.train.studies.run_settings import task_of
from mismatch_cli.train.studies.training import TrainingAnalysis

_NAMED = 3  # algorithms, alarms or limits that a sentence names


def verdict(study: TrainingAnalysis) -> Verdict:
    """How the runs end: of several algorithms, whether one ends above another."""
    rewards = study.final_rewards
    if not rewards:
        rewarded = study.has("reward")
        why = "The runs share no step." if rewarded else "No reward was recorded."
        return Verdict("NOT MEASURED", why)
    if len(rewards) == 1:
        return _of_one(study)
    leader, status = study.leader, _status(study)
    above, rivals = study.above(leader), study.rivals(leader)
    if not above:
        unclear: Status = "" if status == "good" else status
        return Verdict("NO CLEAR DIFFERENCE", _undecided(study) + _collapsed(study), unclear)
    below = above[0] if len(rivals) == 1 else f"{len(above)} OF {len(rivals)}"
    return Verdict(f"{leader} ABOVE {below}", _above(study, leader) + _collapsed(study), status)


def _status(study: TrainingAnalysis) -> Status:
    if len(study.fallen) == len(study.final_rewards):
        return "bad"
    return "mixed" if study.fallen or not study.is_done else "good"


def _collapsed(study: TrainingAnalysis) -> str:
    return f" Reward fell below half of its best: {_list(study.fallen)}." if study.fallen else ""


def _of_one(study: TrainingAnalysis) -> Verdict:
    if study.is_done and not study.fallen:
        gained = all(run.has_gained for run in study.runs)
        return Verdict("DONE", _single(study), "good" if gained else "mixed")
    words = "COLLAPSED" if study.fallen else "NOT DONE"
    return Verdict(words, _single(study) + _collapsed(study), _status(study))


def _single(study: TrainingAnalysis) -> str:
    """`NAME has a final reward of 0.932 ± 0.021 and a final accuracy of 0.961, from 0.512 … (3
    seeds).`
    """
    group = next(group for group in study.by_algorithm if group.name in study.final_rewards)
    title = reward_title(study) if study.is_done else "reward"
    words = f"{group.name} has a {title} of {plain(group.number('reward'))}"
    if not study.is_whole or (study.is_done and not study.is_final):
        words += f" over {study.window}"
    words += _accuracy(group, done=study.is_done)
    if len(group.runs) > 1:
        words += f" ({len(group.runs)} seeds)"
    return f"{words}." if study.is_done else f"{words} so far."


def _accuracy(group: RunGroup, *, done: bool) -> str:
    accuracy, before = group.number("eval_accuracy"), group.number("accuracy_before")
    if accuracy.value is None:
        return ""
    if not done:
        return f" and an accuracy of {plain(accuracy)}"
    first = "" if before.value is None else f", from {plain(before)} before training"
    return f" and a final accuracy of {plain(accuracy)}{first}"


def reward_title(study: TrainingAnalysis) -> str:
    """`final reward`, if it is that of the end of each run and not of all of it."""
    return "final reward" if study.is_final else "reward"


def _undecided(study: TrainingAnalysis) -> str:
    """Rewards that intervals do not separate, and why."""
    names, sentence = study.highest_first, _rewards(study)
    if all(len(study.compared[name]) == 1 for name in names):
        return f"{sentence} One seed each: repeat with --seeds 3 to see whether that is luck."
    if len(_tasks(study)) == 1 and len(names) == 2:
        apart, pairs = study.difference(*names)
        return f"{sentence} Difference: {by_how_much(apart)}, {how_paired(pairs)}."
    return f"{sentence} No 95 % interval of a difference over seeds is above 0."


def _tasks(study: TrainingAnalysis) -> set[object]:
    return {task_of(study.algorithms[name][0]) for name in study.final_rewards}


def _rewards(study: TrainingAnalysis) -> str:
    names, rewards = study.highest_first, study.final_rewards
    kind, tasks = _kind(study, "rewards"), len(_tasks(study))
    if tasks > 1:
        return (
            f"{kind} are compared within each of {tasks} models or problems; none is above another."
        )
    if len(names) <= _NAMED:
        return f"{kind}: {', '.join(f'{name} {plain(rewards[name])}' for name in names)}."
    best, worst = names[0], names[-1]
    lines = "algorithms" if len(study.settings) == 1 else "algorithms in their settings"
    return (
        f"{kind} of {len(names)} {lines}: from {plain(rewards[worst])} ({worst}) to "
        f"{plain(rewards[best])} ({best})."
    )


def _kind(study: TrainingAnalysis, noun: str) -> str:
    """`Final reward`, `Reward so far`, or `Reward over steps 1 to 7`, of one or several."""
    if study.is_done and study.is_final:
        return f"Final {noun}"
    if study.is_done or not study.is_whole:
        return f"{noun.capitalize()} over {study.window}"
    return f"{noun.capitalize()} so far"


def by_how_much(apart: Estimate) -> str:
    """`0.154 ± 0.115`, or the difference with the reason for not having an interval."""
    return plain(apart) + (f" ({apart.note})" if apart.note else "")


def how_paired(pairs: int) -> str:
    """How the seeds of a difference were used: `paired over 3 seeds`."""
    return f"paired over {numbers.things(pairs, 'seed')}" if pairs else "seeds not paired"


def _above(study: TrainingAnalysis, leader: str) -> str:
    """Algorithms whose reward is clearly below the leader's, by how much, and the others."""
    rewards, below, rivals = study.final_rewards, study.above(leader), study.rivals(leader)
    apart = {name: study.difference(leader, name) for name in below[:_NAMED]}
    others = ", ".join(
        f"{plain(rewards[name])} of {name} (higher by {by_how_much(difference.estimate)})"
        for name, difference in apart.items()
    )
    more = f" and {len(below) - _NAMED} more below" if len(below) > _NAMED else ""
    how = " and ".join(dict.fromkeys(how_paired(each.pairs) for each in apart.values()))
    sentence = (
        f"{_kind(study, 'reward')}: {plain(rewards[leader])}, against {others}{more}: 95 % over "
        f"seeds, {how}."
    )
    rest = [name for name in rivals if name not in below]
    if rest:
        sentence += f" Not clearly below it: {_list(rest)}."
    if len(rivals) > 1:
        pairs = len(rivals) * (len(rivals) + 1) // 2
        sentence += f" Chance sets 1 pair in 20 of equal algorithms apart; these are {pairs} pairs."
    return sentence


def _list(names: Sequence[str]) -> str:
    left = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {left} more" if left > 0 else "")


def watch_verdict(study: TrainingAnalysis, watched: WatchState) -> Verdict:
    """The state of the limits: what the terminal says and the exit code counts."""
    (run,) = study.by_run
    steps, limits = numbers.things(run.run.num_steps, "step"), len(watched.limits)
    first, last = (number(run.number(key)) for key in ("abs_dp_first", "abs_dp_last"))
    measured = f"{steps}, mean |π − μ| {first} at first, {last} now."
    if watched.alarms:
        return Verdict(
            alarm_count(watched.alarms).upper(), f"{_alarms(watched)}. {measured}", "bad"
        )
    if watched.unmeasured:
        missing = ", ".join(watched.unmeasured[:_NAMED])
        never = f"Never measured, which counts as exceeded: {missing}."
        return Verdict("NOT MEASURED", f"{never} {measured}", "bad")
    if not limits:
        return Verdict("NO LIMITS", f"{measured} Limits become alarms with --limits.")
    hold = f"{numbers.things(limits, 'limit')} {'holds' if limits == 1 else 'hold'}"
    return Verdict("LIMITS HOLD", f"{hold} at each of {measured}", "good")


def _alarms(watched: WatchState) -> str:
    alarms, left = under_way_first(watched.alarms), len(watched.alarms) - _NAMED
    named = [
        f"{alarm.check.metric} {alarm.when}: {alarm.check.reason}" for alarm in alarms[:_NAMED]
    ]
    return "; ".join([*named, f"{left:,} more"] if left > 0 else named)
