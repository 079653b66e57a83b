"""The live view of a training run: progress, metrics, time left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
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
        every = {"evaluate": config.evaluation.every, "checkpoint": config.checkpoint_every}
        self._every = {name: steps for name, steps in every.items() if steps}
        self._done: list[Mapping[str, float]] = []
        self._before = 0  # steps before the first one seen

    def add(self, record: Record) -> None:
        if not self._done:
            self._before = record["step"] - 1
        self._done.append(record["seconds"])

    def of_step(self) -> dict[str, float]:
        """Mean seconds of each phase over recent steps; for a rare phase, over the steps that
        had it.
        """
        recent = self._done[-_RECENT:]
        names = dict.fromkeys(name for step in recent for name in step)
        means = {name: _mean(step.get(name, 0.0) for step in recent) for name in names}
        rare = {name: _mean(step[name] for step in self._done if name in step) for name in _RARE}
        return means | {name: value for name, value in rare.items() if value}

    def left(self) -> float:
        """Seconds from the last step seen to the end of the run."""
        return self._seconds(self._before + len(self._done))

    def whole(self) -> float:
        """Seconds that such a run takes from its first step to its end."""
        return self._seconds(0)

    def _seconds(self, done: int) -> float:
        means = self.of_step()
        rare = sum(
            means.pop(name, 0.0) * self._times(every, done) for name, every in self._every.items()
        )
        return rare + (self._steps - done) * sum(means.values())

    def _times(self, every: int, done: int) -> int:
        """How often a phase occurs that the last step always has; if `every` is 0, only there."""
        if done >= self._steps:
            return 0
        return (self._steps // every - done // every if every else 0) + int(
            not every or self._steps % every > 0
        )


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
        words = self._doing(phase) if phase in _IN_LOG and not self.records else ""
        return words[:1].upper() + words[1:]

    def line(self) -> str:
        """The last step in one line, for a log."""
        record, steps = self.records[-1], self._config.steps
        parts = [f"step {record['step']}/{steps}", f"reward {number(record['reward'])}"]
        parts += _measured(record)
        parts.append(f"{sum(record['seconds'].values()):.1f} s")
        left = self._pace.left()
        return "  ".join([*parts, f"{duration(left)} left"] if record["step"] < steps else parts)

    def result(self, width: int) -> str:
        """The whole run in one line: as much as fits."""
        step, steps = self.records[-1]["step"], self._config.steps
        rewards = [record["reward"] for record in self.records[-LAST:]]
        accuracy = self._evaluated()[-1:]
        pieces = [f"{visible(self._config.algorithm)} seed {self._config.sampler.seed}: "]
        pieces[0] += (
            f"reward {number(_mean(rewards))}"
            if step == steps
            else f"stopped at step {step} of {steps}"
        )
        pieces += [f"accuracy {number(record['eval_accuracy'])}" for record in accuracy]
        pieces += [part for part in _measured(self.records[-1]) if not part.startswith("accuracy")]
        return flow([*pieces[:2], duration(time.monotonic() - self._began), *pieces[2:]], width)[0]

    def lines(self, width: int, height: int) -> list[Text]:
        """The screen."""
        lines = [ViewLine(0, self._title())]
        if self.records:
            lines += [ViewLine(0, line) for line in self._bar(width)]
            lines += [blank(), *curves(self._measures(), width), blank(), *self._facts(width)]
        else:
            started = self._start_up(width)
            # The last ones stay
            lines += [ViewLine(len(started) - place, line) for place, line in enumerate(started)]
        if self.stopping:
            lines += [
                ViewLine(0, plain(line, "bold")) for line in flow(STOPPING.split(), width, " ")
            ]
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
        now = time.monotonic()
        ends = [began for _, began in self._phases[1:]] + [now]
        rows = [
            (self._doing(phase), duration(end - began))
            for (phase, began), end in zip(self._phases, ends, strict=True)
        ]
        longest = max(len(doing) for doing, _ in rows)
        lines = [plain(f"{doing:<{longest}}  {spent:>6}"[:width], "dim") for doing, spent in rows]
        lines[-1].stylize("not dim")
        return lines

    def _doing(self, phase: str) -> str:
        config = self._config
        return _DOING[phase].format(
            engine=visible(config.engine.name),
            responses=config.prompts_per_step * config.sampler.samples_per_prompt,
        )

    def _bar(self, width: int) -> list[Text]:
        from rich.text import Text

        step, steps = self.records[-1]["step"], self._config.steps
        waited = time.monotonic() - self._last
        left = max(0.0, self._pace.left() - waited)
        pieces = [
            f"{step} of {steps} steps",
            f"{duration(left)} left" if step < steps else "saving",
        ]
        if runs_left := self._runs - self._number:
            pieces.append(
                f"all runs {duration(left + runs_left * (self._start + self._pace.whole()))}"
            )
        words = flow(pieces, width)
        room = min(_WIDEST_BAR, width - len(words[0]) - 2)
        beside = room >= _NARROWEST_BAR
        room = room if beside else width
        bar = Text.assemble(
            ("━" * (room * step // steps), "cyan"), ("─" * (room - room * step // steps), "dim")
        )
        return [bar.append("  " + words.pop(0)) if beside else bar, *map(Text, words)]

    def _evaluated(self) -> list[Record]:
        return [record for record in self.records if record.get("eval_accuracy") is not None]

    def _measures(self) -> list[tuple[int, CurveLine]]:
        """The metrics that are drawn over the steps, each with its rank."""
        config, rewards = self._config, [record["reward"] for record in self.records]
        over = -(
            -_SMOOTHED_OVER // max(1, config.prompts_per_step * config.sampler.samples_per_prompt)
        )
        smooth = [_mean(rewards[max(0, end - over) : end]) for end in range(1, len(rewards) + 1)]
        over = min(over, len(rewards))
        note = f"mean of {over} steps" if over > 1 else ""
        found = [(1, CurveLine("reward", smooth[-1], smooth, _LEAST_REWARD, note, 3))]
        if evaluated := self._evaluated():
            values = [record["eval_accuracy"] for record in evaluated]
            note = f"at step {evaluated[-1]['step']}"
            found.append((4, CurveLine("accuracy", values[-1], values, _LEAST_REWARD, note, 3)))
        gap = [record["mismatch"].get("abs_dp_mean") for record in self.records]
        of_key = {
            "blocked": (3, "share of A ≠ 0", 2),
            "bad": (5, "share of A < 0", 2),
            "length": (6, "tokens", 3),
            "entropy": (7, "nats", 3),
        }
        found += curve(2, "|π − μ|", gap, "equal weights", 2)
        for label, (rank, note, digits) in of_key.items():
            key = "bad_over_negative" if label == "bad" else label
            found += curve(rank, label, [record.get(key) for record in self.records], note, digits)
        return found

    def _facts(self, width: int) -> list[ViewLine]:
        """The lines below the curves."""
        now = self.records[-1]
        found = [(8, "time", self._times())]
        if now.get("sync"):
            found.insert(0, (9, "sync", self._sync()))
        if measured := [record["rounding"] for record in self.records if record.get("rounding")]:
            lag = number(measured[-1]["abs_dp_mean"], 2)  # at the last step that measured it
            found.insert(1, (11, "rounding", [f"the engine lags by |π − μ| {lag}"]))
        wrong = {
            "back_offs": "loss-scale back-offs",
            "grading_timeouts": "grading timeouts",
            "unstated": "responses without an answer",
        }
        if troubles := [f"{words} {now[key]}" for key, words in wrong.items() if now.get(key)]:
            found.insert(0, (2, "trouble", troubles))
        if sets := [evaluated_sets(record) for record in self._evaluated()[-1:]]:
            by_set = [f"{visible(name)} {number(accuracy)}" for name, accuracy in sets[0].items()]
            found[:0] = [(4, "by set", by_set)] if by_set else []
        if self._phases:
            phase, began = self._phases[-1]
            found.append(
                (10, "now", [f"{self._doing(phase)}, {duration(time.monotonic() - began)}"])
            )
        return [
            ViewLine(rank, labelled(label, flow(pieces, width - LABEL)[0]))
            for rank, label, pieces in found
        ]

    def _sync(self) -> list[str]:
        words = [sync_in_words([self.records])]
        first = ["step 1 has no older weights"] * (self.records[0].get("sync") == "undecidable")
        return [*filter(None, words), *first]

    def _times(self) -> list[str]:
        seconds = self._pace.of_step()
        rare = {name: seconds.pop(name) for name in _RARE if name in seconds}
        whole = sum(seconds.values())
        named = sorted(
            (name for name in seconds if seconds[name] > _LEAST * whole), key=seconds.__getitem__
        )
        pieces = [
            f"{number(whole, 2)} s a step",
            *(f"{name} {number(seconds[name], 2)}" for name in reversed(named)),
        ]
        return pieces + [
            f"{name} {number(value, 2)}" for name, value in rare.items() if value > _LEAST * whole
        ]


def _measured(record: Record) -> list[str]:
    """The metrics of a step in words, formatted as in the view; shares are not percentages, as
    in metrics.jsonl.
    """
    values = {
        "accuracy": (record.get("eval_accuracy"), 3),
        "|π − μ|": (record["mismatch"].get("abs_dp_mean"), 2),
        "blocked": (record.get("blocked"), 2),
        "bad": (record.get("bad_over_negative"), 2),
    }
    found = [
        f"{name} {number(value, digits)}"
        for name, (value, digits) in values.items()
        if value is not None
    ]
    sets = evaluated_sets(record).items()
    return [
        *found[:1],
        *(f"{visible(name)} {number(accuracy)}" for name, accuracy in sets),
        *found[1:],
    ]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
