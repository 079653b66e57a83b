"""The live view of a training run: progress, metrics, time left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.curves import (
    LABEL,
    CurveLine,
    ViewLine,
    blank,
    curve,
    curves,
    duration,
    flow,
    labelled,
    most_important,
    plain,
)
from mismatch_cli.base.numbers import number
from mismatch_cli.base.text import visible
from mismatch_cli.metrics.update_table import LAST
from mismatch_cli.train.studies.runs import evaluated_sets, sync_in_words
from mismatch_cli.train.train_config import TrainConfig

if TYPE_CHECKING:
    from rich.text import Text

Record = Mapping[str, Any]

STOPPING = "Finishing this step, then saving (Ctrl-C again: stop at once)"
_RECENT = 20  # steps from which the time of the next ones is estimated
_RARE = ("evaluate", "checkpoint")  # phases that only some steps have
# Phases that a log names before the first step is done
_IN_LOG = ("engine", "trainer", "evaluate", "sample")
_LEAST = 0.02  # of a step: shorter phases are not named
_NARROWEST_BAR, _WIDEST_BAR = 12, 30
_SMOOTHED_OVER = 256  # responses: the mean reward of fewer is noise
_LEAST_REWARD = 0.05  # the least range of an axis
_DOING = {
    "start": "loading libraries and problems",
    "engine": "loading the model into {engine}",
    "trainer": "loading the trainer",
    "sample": "sampling {responses} responses",
    "grade": "grading",
    "recompute": "recomputing log π′",
    "bounds": "reading the full distributions of few tokens",
    "update": "updating the weights",
    "sync": "sending the new weights to the engine, and checking them",
    "record": "measuring",
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
    "model": "saving the model",
}


class Pace:
    """Estimates how long a run will take from its steps so far; phases that only some steps have
    count separately.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._steps = config.steps
        # Without an interval only the last step is evaluated.
        evaluate_every = config.evaluation.every or config.steps
        self._every = {"evaluate": evaluate_every, "checkpoint": config.checkpoint_every}
        self._seconds_of: list[Mapping[str, float]] = []  # by phase, of each step that is done
        self._before = 0  # steps before the first one seen

    def add(self, record: Record) -> None:
        if not self._seconds_of:
            self._before = record["step"] - 1
        self._seconds_of.append(record["seconds"])

    def of_step(self) -> dict[str, float]:
        """Mean seconds of each phase over recent steps; for a rare phase, over the steps that
        had it.
        """
        recent = self._seconds_of[-_RECENT:]
        means = {}
        for name in dict.fromkeys(chain.from_iterable(recent)):
            means[name] = _mean([step.get(name, 0.0) for step in recent])
        for name in _RARE:
            mean = _mean([step[name] for step in self._seconds_of if name in step])
            if mean:
                means[name] = mean
        return means

    def left(self) -> float:
        """Seconds from the last step seen to the end of the run."""
        return self._seconds(self._before + len(self._seconds_of))

    def whole(self) -> float:
        """Seconds that such a run takes from its first step to its end."""
        return self._seconds(0)

    def _seconds(self, done: int) -> float:
        """Seconds from a step to the end of the run."""
        means = self.of_step()
        rare = 0.0
        for name, every in self._every.items():
            rare += means.pop(name, 0.0) * self._times(every, done)
        return rare + (self._steps - done) * sum(means.values())

    def _times(self, every: int, done: int) -> int:
        """How often a phase still occurs: every so many steps, and always at the last one."""
        if done >= self._steps:
            return 0
        times = self._steps // every - done // every
        if self._steps % every:
            times += 1
        return times


class TrainingView:
    """One run, perhaps of several, as lines of text that fit into a terminal."""

    def __init__(self, config: TrainConfig, number: int = 1, runs: int = 1) -> None:
        self._config, self._number, self._runs = config, number, runs
        self._pace = Pace(config)
        self.records: list[Record] = []
        self._began = self._last = time.monotonic()
        self._start = 0.0  # seconds before the first step
        self._phases = [("start", self._began)]  # those since the last step, each with its start
        self.stopping = False

    def add(self, record: Record, *, earlier: bool = False) -> None:
        """A step is done; `earlier`: before the run was resumed."""
        self._pace.add(record)
        if not earlier:
            self._last = time.monotonic()
            self._start = self._start or self._last - self._began - sum(record["seconds"].values())
        self._phases = []
        self.records.append(record)  # last, since another thread draws

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._phases = [*self._phases, (phase, time.monotonic())]

    def starting(self) -> str:
        """What begins now, for a log; empty once a step is done, and for what takes no time."""
        phase, _ = self._phases[-1]
        if phase not in _IN_LOG or self.records:
            return ""
        doing = self._doing(phase)
        return doing[:1].upper() + doing[1:]

    def line(self) -> str:
        """The last step in one line, for a log."""
        record = self.records[-1]
        step, steps = record["step"], self._config.steps
        pieces = [f"step {step}/{steps}", f"reward {number(record['reward'])}"]
        pieces += _measured(record)
        pieces.append(f"{sum(record['seconds'].values()):.1f} s")
        if step < steps:
            pieces.append(f"{duration(self._pace.left())} left")
        return "  ".join(pieces)

    def result(self, width: int) -> str:
        """The whole run in one line: as much as fits."""
        step, steps = self.records[-1]["step"], self._config.steps
        ending = f"stopped at step {step} of {steps}"
        if step == steps:
            ending = f"reward {number(_mean(self._series('reward')[-LAST:]))}"
        run = f"{visible(self._config.algorithm)} seed {self._config.sampler.seed}"
        measured = [f"accuracy {number(each['eval_accuracy'])}" for each in self._evaluated()[-1:]]
        measured += [
            text for text in _measured(self.records[-1]) if not text.startswith("accuracy")
        ]
        # A narrow terminal cuts the end off, and the time matters more than all but one of them.
        measured.insert(1, duration(time.monotonic() - self._began))
        return flow([f"{run}: {ending}", *measured], width)[0]

    def lines(self, width: int, height: int) -> list[Text]:
        """The screen."""
        lines = [ViewLine(0, self._title())]
        if self.records:
            lines += map(ViewLine, repeat(0), self._bar(width))
            lines += [blank(), *curves(self._measures(), width), blank(), *self._facts(width)]
        else:
            # Each phase is more important than those before it: where lines are few, the last stay.
            phases = self._start_up(width)
            lines += map(ViewLine, range(len(phases), 0, -1), phases)
        if self.stopping:
            stopping = flow(STOPPING.split(), width, " ")
            lines += [ViewLine(0, plain(line, "bold")) for line in stopping]
        return [line.text for line in most_important(lines, height)]

    def _title(self) -> Text:
        from rich.text import Text

        run_of_runs = f" · run {self._number} of {self._runs}" if self._runs > 1 else ""
        return Text.assemble(
            (visible(self._config.algorithm), "bold"),
            f" · seed {self._config.sampler.seed}{run_of_runs}",
        )

    def _start_up(self, width: int) -> list[Text]:
        """The phases before the first step is done, each with its time."""
        phases, begins = zip(*self._phases, strict=True)
        names = list(map(self._doing, phases))
        longest = max(map(len, names))
        lines = []
        for name, (began, end) in zip(names, pairwise((*begins, time.monotonic())), strict=True):
            line = f"{name:<{longest}}  {duration(end - began):>6}"
            lines.append(plain(line[:width], "dim"))
        lines[-1].stylize("not dim")
        return lines

    def _doing(self, phase: str) -> str:
        """What happens in a phase."""
        engine = visible(self._config.engine.name)
        return _DOING[phase].format(engine=engine, responses=self._responses)

    @property
    def _responses(self) -> int:
        """The responses of a step."""
        return self._config.prompts_per_step * self._config.sampler.samples_per_prompt

    def _bar(self, width: int) -> list[Text]:
        """How far the run is, with the time left; on a narrow terminal the words go below."""
        from rich.text import Text

        step, steps = self.records[-1]["step"], self._config.steps
        waited = time.monotonic() - self._last
        left = max(0.0, self._pace.left() - waited)
        remaining = f"{duration(left)} left" if step < steps else "saving"
        pieces = [f"{step} of {steps} steps", remaining]
        runs_left = self._runs - self._number
        if runs_left:
            of_others = runs_left * (self._start + self._pace.whole())
            pieces.append(f"all runs {duration(left + of_others)}")
        words = flow(pieces, width)
        room = min(_WIDEST_BAR, width - len(words[0]) - 2)
        beside = room >= _NARROWEST_BAR
        if not beside:
            room = width
        filled = room * step // steps
        bar = Text.assemble(("━" * filled, "cyan"), ("─" * (room - filled), "dim"))
        if beside:
            bar.append("  " + words.pop(0))
        return [bar, *map(Text, words)]

    def _evaluated(self) -> list[Record]:
        """The steps that were evaluated."""
        return [record for record in self.records if record.get("eval_accuracy") is not None]

    def _measures(self) -> list[tuple[int, CurveLine]]:
        """The metrics that are drawn over the steps, each with its rank."""
        drawn = [(1, self._reward_curve())]
        evaluated = self._evaluated()
        if evaluated:
            last = evaluated[-1]
            values = [record["eval_accuracy"] for record in evaluated]
            note = f"at step {last['step']}"
            drawn.append((4, CurveLine("accuracy", values[-1], values, _LEAST_REWARD, note, 3)))
        gap = [mismatch.get("abs_dp_mean") for mismatch in self._series("mismatch")]
        drawn += curve(2, "|π − μ|", gap, "equal weights", 2)
        for rank, label, key, unit, digits in (
            (3, "blocked", "blocked", "share of A ≠ 0", 2),
            (5, "bad", "bad_over_negative", "share of A < 0", 2),
            (6, "length", "length", "tokens", 3),
            (7, "entropy", "entropy", "nats", 3),
        ):
            drawn += curve(rank, label, self._series(key), unit, digits)
        return drawn

    def _series(self, key: str) -> list[Any]:
        """What each step has under a key; None where it lacks that."""
        return [record.get(key) for record in self.records]

    def _reward_curve(self) -> CurveLine:
        """The reward as the mean of the last steps: as many as have enough responses."""
        rewards = self._series("reward")
        over = -(-_SMOOTHED_OVER // max(1, self._responses))  # steps
        smooth = [_mean(rewards[max(0, end - over) : end]) for end in range(1, len(rewards) + 1)]
        over = min(over, len(rewards))
        note = f"mean of {over} steps" if over > 1 else ""
        return CurveLine("reward", smooth[-1], smooth, _LEAST_REWARD, note, 3)

    def _facts(self, width: int) -> list[ViewLine]:
        """The lines below the curves, each with its rank: where the terminal is low, the highest
        numbers go first.
        """
        facts = [
            (4, "by set", self._by_set()),
            (2, "trouble", _troubles(self.records[-1])),
            (9, "sync", self._sync()),
            (11, "rounding", self._rounding()),
            (8, "time", self._times()),
        ]
        if self._phases:
            phase, began = self._phases[-1]
            doing = f"{self._doing(phase)}, {duration(time.monotonic() - began)}"
            facts.append((10, "now", [doing]))
        lines = []
        for rank, label, pieces in facts:
            if pieces:
                fitting = flow(pieces, width - LABEL)[0]
                lines.append(ViewLine(rank, labelled(label, fitting)))
        return lines

    def _by_set(self) -> list[str]:
        """The last accuracy on each evaluation set, if there are several."""
        evaluated = self._evaluated()
        return _accuracy_by_set(evaluated[-1]) if evaluated else []

    def _sync(self) -> list[str]:
        """How often the engine was shown to have the new weights, after a step that checked it."""
        if not self.records[-1].get("sync"):
            return []
        pieces = []
        checks = sync_in_words([self.records])
        if checks:
            pieces.append(checks)
        if self.records[0].get("sync") == "undecidable":
            pieces.append("step 1 has no older weights")
        return pieces

    def _rounding(self) -> list[str]:
        """How far the engine's dtype lags behind, at the last step that measured it."""
        measured = list(filter(None, self._series("rounding")))
        if not measured:
            return []
        return [f"the engine lags by |π − μ| {number(measured[-1]['abs_dp_mean'], 2)}"]

    def _times(self) -> list[str]:
        """The seconds of a step, then its phases, longest first, then the rare ones."""
        seconds = self._pace.of_step()
        rare = {name: seconds.pop(name) for name in _RARE if name in seconds}
        whole = sum(seconds.values())
        pieces = [f"{number(whole, 2)} s a step"]
        longest_last = sorted(seconds.items(), key=itemgetter(1))
        for name, value in (*reversed(longest_last), *rare.items()):
            if value > _LEAST * whole:
                pieces.append(f"{name} {number(value, 2)}")
        return pieces


_TROUBLES = {
    "back_offs": "loss-scale back-offs",
    "grading_timeouts": "grading timeouts",
    "unstated": "responses without an answer",
}


def _troubles(record: Record) -> list[str]:
    """What went wrong in a step, and how often."""
    return [f"{label} {record[key]}" for key, label in _TROUBLES.items() if record.get(key)]


def _measured(record: Record) -> list[str]:
    """The metrics of a step in words, formatted as in the view; shares are not percentages, as
    in metrics.jsonl.
    """
    measured = []
    accuracy = record.get("eval_accuracy")
    if accuracy is not None:
        measured = [f"accuracy {number(accuracy)}", *_accuracy_by_set(record)]
    others = {
        "|π − μ|": record["mismatch"].get("abs_dp_mean"),
        "blocked": record.get("blocked"),
        "bad": record.get("bad_over_negative"),
    }
    for name, value in others.items():
        if value is not None:
            measured.append(f"{name} {number(value, 2)}")
    return measured


def _accuracy_by_set(record: Record) -> list[str]:
    """The accuracy on each evaluation set; empty if there is only one."""
    sets = evaluated_sets(record)
    return [f"{visible(name)} {number(accuracy)}" for name, accuracy in sets.items()]


def _mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
