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
    below = study.above(leader)
    if not below:
        unclear: Status = "" if status == "good" else status
        return Verdict("NO CLEAR DIFFERENCE", _undecided(study) + _collapsed(study), unclear)
    rivals = study.rivals(leader)
    whom = below[0] if len(rivals) == 1 else f"{len(below)} OF {len(rivals)}"
    return Verdict(f"{leader} ABOVE {whom}", _above(study, leader) + _collapsed(study), status)


def _status(study: TrainingAnalysis) -> Status:
    if len(study.fallen) == len(study.final_rewards):
        return "bad"
    if study.fallen or not study.is_done:
        return "mixed"
    return "good"


def _collapsed(study: TrainingAnalysis) -> str:
    """A sentence that follows others; empty if no algorithm has collapsed."""
    if not study.fallen:
        return ""
    return f" Reward fell below half of its best: {first_named(study.fallen)}."


def _of_one(study: TrainingAnalysis) -> Verdict:
    """How the runs of the only algorithm end."""
    if study.is_done and not study.fallen:
        gained = all(run.has_gained for run in study.runs)
        return Verdict("DONE", _single(study), "good" if gained else "mixed")
    headline = "COLLAPSED" if study.fallen else "NOT DONE"
    return Verdict(headline, _single(study) + _collapsed(study), _status(study))


def _single(study: TrainingAnalysis) -> str:
    """`NAME has a final reward of 0.932 ± 0.021 and a final accuracy of 0.961, from 0.512 … (3
    seeds).`
    """
    (group,) = [group for group in study.by_algorithm if group.name in study.final_rewards]
    title = reward_title(study) if study.is_done else "reward"
    sentence = f"{group.name} has a {title} of {plain(group.number('reward'))}"
    if not study.is_whole or (study.is_done and not study.is_final):
        sentence += f" over {study.window}"
    sentence += _accuracy(group, done=study.is_done)
    if len(group.runs) > 1:
        sentence += f" ({len(group.runs)} seeds)"
    if not study.is_done:
        sentence += " so far"
    return f"{sentence}."


def _accuracy(group: RunGroup, *, done: bool) -> str:
    """The end of a sentence; empty where nothing was evaluated."""
    accuracy = group.number("eval_accuracy")
    if accuracy.value is None:
        return ""
    measured = plain(accuracy)
    evaluated = group.runs_with("eval_accuracy")
    if evaluated < len(group.runs):
        measured += f" in {evaluated} of {len(group.runs)} runs"
    if not done:
        return f" and an accuracy of {measured}"
    words = f" and a final accuracy of {measured}"
    before = group.number("accuracy_before")
    if before.value is not None:
        words += f", from {plain(before)} before training"
    return words


def reward_title(study: TrainingAnalysis) -> str:
    """`final reward`, if it is that of the end of each run and not of all of it."""
    return "final reward" if study.is_final else "reward"


def _undecided(study: TrainingAnalysis) -> str:
    """Rewards that intervals do not separate, and why."""
    names, sentence = study.highest_first, _rewards(study)
    if all(len(study.compared[name]) == 1 for name in names):
        return f"{sentence} One seed each: repeat with --seeds 3 to see whether that is luck."
    if len(_tasks(study)) == 1 and len(names) == 2:
        estimate, pairs = study.difference(*names)
        return f"{sentence} Difference: {by_how_much(estimate)}, {how_paired(pairs)}."
    return f"{sentence} No 95 % interval of a difference over seeds is above 0."


def _tasks(study: TrainingAnalysis) -> set[object]:
    return {task_of(study.algorithms[name][0]) for name in study.final_rewards}


def _rewards(study: TrainingAnalysis) -> str:
    """The rewards of few algorithms; of many, the lowest and the highest."""
    kind = _kind(study, "rewards")
    tasks = len(_tasks(study))
    if tasks > 1:
        return (
            f"{kind} are compared within each of {tasks} models or problems; none is above another."
        )
    names = study.highest_first
    reward_of = {name: plain(study.final_rewards[name]) for name in names}
    if len(names) <= _NAMED:
        return f"{kind}: {', '.join(map(' '.join, reward_of.items()))}."
    best, worst = names[0], names[-1]
    lines = "algorithms" if len(study.settings) == 1 else "algorithms in their settings"
    return (
        f"{kind} of {len(names)} {lines}: from {reward_of[worst]} ({worst}) to "
        f"{reward_of[best]} ({best})."
    )


def _kind(study: TrainingAnalysis, noun: str) -> str:
    """`Final reward`, `Reward so far`, or `Reward over steps 1 to 7`, of one or several."""
    if study.is_done and study.is_final:
        return f"Final {noun}"
    if study.is_done or not study.is_whole:
        return f"{noun.capitalize()} over {study.window}"
    return f"{noun.capitalize()} so far"


def by_how_much(difference: Estimate) -> str:
    """`0.154 ± 0.115`, or the difference with the reason for not having an interval."""
    if difference.note:
        return f"{plain(difference)} ({difference.note})"
    return plain(difference)


def how_paired(pairs: int) -> str:
    """How the seeds of a difference were used: `paired over 3 seeds`."""
    if not pairs:
        return "seeds not paired"
    return f"paired over {numbers.things(pairs, 'seed')}"


def _above(study: TrainingAnalysis, leader: str) -> str:
    """Algorithms whose reward is clearly below the leader's, by how much, and the others."""
    rewards, below, rivals = study.final_rewards, study.above(leader), study.rivals(leader)
    comparisons = []
    pairings = []
    for name in below[:_NAMED]:
        higher_by, paired_seeds = study.difference(leader, name)
        comparisons.append(f"{plain(rewards[name])} of {name} (higher by {by_how_much(higher_by)})")
        pairings.append(how_paired(paired_seeds))
    others = ", ".join(comparisons)
    if len(below) > _NAMED:
        others += f" and {len(below) - _NAMED} more below"
    pairing = " and ".join(dict.fromkeys(pairings))
    sentence = (
        f"{_kind(study, 'reward')}: {plain(rewards[leader])}, against {others}: 95 % over "
        f"seeds, {pairing}."
    )
    rest = [name for name in rivals if name not in below]
    if rest:
        sentence += f" Not clearly below it: {first_named(rest)}."
    if len(rivals) > 1:
        pairs = len(rivals) * (len(rivals) + 1) // 2
        sentence += f" Chance sets 1 pair in 20 of equal algorithms apart; these are {pairs} pairs."
    return sentence


def first_named(names: Sequence[str]) -> str:
    """`a, b, c and 2 more`."""
    words = ", ".join(names[:_NAMED])
    left = len(names) - _NAMED
    if left > 0:
        words += f" and {left} more"
    return words


def watch_verdict(study: TrainingAnalysis, watched: WatchState) -> Verdict:
    """The state of the limits: what the terminal says and the exit code counts."""
    (group,) = study.by_run
    first, last = number(group.number("abs_dp_first")), number(group.number("abs_dp_last"))
    steps = numbers.things(group.run.num_steps, "step")
    measured = f"{steps}, mean |π − μ| {first} at first, {last} now."
    if watched.alarms:
        headline = alarm_count(watched.alarms).upper()
        return Verdict(headline, f"{_alarms(watched)}. {measured}", "bad")
    if watched.unmeasured:
        missing = ", ".join(watched.unmeasured[:_NAMED])
        never = f"Never measured, which counts as exceeded: {missing}."
        return Verdict("NOT MEASURED", f"{never} {measured}", "bad")
    limits = len(watched.limits)
    if not limits:
        return Verdict("NO LIMITS", f"{measured} Limits become alarms with --limits.")
    hold = numbers.counted(limits, "limits hold")
    return Verdict("LIMITS HOLD", f"{hold} at each of {measured}", "good")


def _alarms(watched: WatchState) -> str:
    """A few alarms, those that are not over first, and how many more there are."""
    words = []
    for alarm in under_way_first(watched.alarms)[:_NAMED]:
        words.append(f"{alarm.check.metric} {alarm.when}: {alarm.check.reason}")
    left = len(watched.alarms) - _NAMED
    if left > 0:
        words.append(f"{left:,} more")
    return "; ".join(words)
