"""What somebody sees of a training run while it goes on: where it stands, how it does, how long it will take.

On the terminal a view of it is drawn here; its report is made anew now and then by another process, this file run as a
program: training does not wait for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.commands._show import Common
from mismatch_cli.errors import MismatchError
from mismatch_cli.numbers import sparkline
from mismatch_cli.rl.train_config import TrainConfig
from mismatch_cli.text import visible
from mismatch_cli.trace.files import remove_unfinished

if TYPE_CHECKING:
    from rich.text import Text

Record = Mapping[str, Any]

STOPPING = "Finishing this step, then saving (Ctrl-C again: stop at once)"
_RECENT = 20  # steps whose time says how long the next ones take
_FIRST = 5  # steps with which the mismatch is compared
_RARE = ("evaluate", "checkpoint")  # phases that not every step has
_LEAST = 0.02  # of a step: what a phase takes to be named
_LABEL, _BETWEEN = 10, " · "
_NARROWEST_BAR = 12
_SPARK = 40  # steps in the small curve, at most
_SHARE = 0.02  # of the time, at most, is spent on drawing
_LOWEST = 19  # the priority of whoever gets what others leave
_RELOAD_SECONDS = 60  # after which an open page looks for a newer one


class Pace:
    """How long a run will take, from the steps that it has done; what not every step has is counted apart."""

    def __init__(self, config: TrainConfig) -> None:
        self._steps = config.steps
        self._every = {"evaluate": config.eval_every, "checkpoint": config.checkpoint_every}
        self._done: list[Mapping[str, float]] = []
        self._before = 0  # steps before the first one that was seen

    def add(self, record: Record) -> None:
        if not self._done:
            self._before = record["step"] - 1
        self._done.append(record["seconds"])

    def of_step(self) -> dict[str, float]:
        """Mean seconds of each phase of the recent steps; of a rare phase, of those steps that had it."""
        recent = self._done[-_RECENT:]
        names = dict.fromkeys(name for step in recent for name in step)
        means = {name: _mean(step.get(name, 0.0) for step in recent) for name in names}
        rare = {name: _mean(step[name] for step in self._done if name in step) for name in _RARE}
        return means | {name: value for name, value in rare.items() if value}

    def left(self) -> float:
        """Seconds from the last step that was seen to the end."""
        return self._seconds(self._before + len(self._done))

    def whole(self) -> float:
        """Seconds of such a run from its first step to its end."""
        return self._seconds(0)

    def _seconds(self, done: int) -> float:
        means = self.of_step()
        rare = sum(means.pop(name, 0.0) * self._times(every, done) for name, every in self._every.items())
        return rare + (self._steps - done) * sum(means.values())

    def _times(self, every: int, done: int) -> int:
        """How often something comes that the last step has too; never by itself where `every` is 0."""
        if done >= self._steps:
            return 0
        return (self._steps // every - done // every if every else 0) + int(not every or self._steps % every > 0)


class TrainingView:
    """One run of several, as lines of text that fit into a width."""

    def __init__(self, config: TrainConfig, number: int = 1, runs: int = 1) -> None:
        self._config, self._number, self._runs = config, number, runs
        self._pace = Pace(config)
        self.records: list[Record] = []
        self._began = self._last = time.monotonic()
        self._start = 0.0  # seconds before the first step
        self.stopping = False

    def add(self, record: Record, *, earlier: bool = False) -> None:
        """A step is done; `earlier`: by the run that is resumed."""
        self._pace.add(record)
        if not earlier:
            self._last = time.monotonic()
            self._start = self._start or self._last - self._began - sum(record["seconds"].values())
        self.records.append(record)  # last: another thread draws

    def line(self) -> str:
        """The last step in one line, for a log."""
        record, steps = self.records[-1], self._config.steps
        measured = (
            ("accuracy", record.get("eval_accuracy"), ".3f"),
            ("|π−μ|", record["mismatch"].get("abs_dp_mean"), ".2g"),
            ("blocked", record.get("blocked"), ".2g"),
            ("bad", record.get("bad_over_negative"), ".2g"),
        )
        parts = [f"step {record['step']}/{steps}", f"reward {record['reward']:.3f}"]
        parts += [f"{name} {value:{digits}}" for name, value, digits in measured if value is not None]
        parts.append(f"{sum(record['seconds'].values()):.1f} s")
        left = self._pace.left()
        return "  ".join([*parts, f"{duration(left)} left"] if record["step"] < steps else parts)

    def lines(self, width: int) -> list[Text]:
        """What stands on the terminal."""
        from rich.text import Text

        run_of_runs = f" · run {self._number} of {self._runs}" if self._runs > 1 else ""
        lines = [Text.assemble((visible(self._config.algorithm), "bold"), f" · seed {self._config.seed}{run_of_runs}")]
        if self.records:
            lines += self._bar(width)
            for label, pieces in self._rows(width - _LABEL):
                for number, line in enumerate(_flow(pieces, width - _LABEL)):
                    lines.append(Text.assemble((f"{'' if number else label:<{_LABEL}}", "dim"), line))
        else:
            words = f"Loading the model into {visible(self._config.engine)} and the trainer, then the first step:"
            waited = duration(time.monotonic() - self._began)
            lines += map(Text, _flow([*words.split(), waited], width, " "))
        if self.stopping:
            lines += [Text(line, style="bold") for line in _flow(STOPPING.split(), width, " ")]
        return lines

    def _bar(self, width: int) -> list[Text]:
        from rich.text import Text

        step, steps = self.records[-1]["step"], self._config.steps
        waited = time.monotonic() - self._last
        left = max(0.0, self._pace.left() - waited)
        pieces = [f"{step} of {steps} steps", f"{duration(left)} left" if step < steps else "saving"]
        if runs_left := self._runs - self._number:
            pieces.append(f"all runs {duration(left + runs_left * (self._start + self._pace.whole()))}")
        words = _flow(pieces, width)
        room = min(30, width - len(words[0]) - 2)
        beside = room >= _NARROWEST_BAR
        room = room if beside else width
        bar = Text.assemble(("━" * (room * step // steps), "cyan"), ("─" * (room - room * step // steps), "dim"))
        return [bar.append("  " + words.pop(0)) if beside else bar, *map(Text, words)]

    def _rows(self, width: int) -> list[tuple[str, list[str]]]:
        records, now = self.records, self.records[-1]
        rewards = [record["reward"] for record in records]
        curve = sparkline(rewards[-max(1, min(_SPARK, width - 7)) :], min(rewards), max(rewards))
        evaluated = [record for record in records if record.get("eval_accuracy") is not None][-1:]
        accuracy = [f"accuracy {record['eval_accuracy']:.3f} at step {record['step']}" for record in evaluated]
        rows = [("reward", [f"{rewards[-1]:.3f} {curve}", *accuracy])]
        gap, bad, blocked = now["mismatch"].get("abs_dp_mean"), now.get("bad_over_negative"), now.get("blocked")
        if gap is not None:
            first = [record["mismatch"].get("abs_dp_mean") for record in records[:_FIRST]]
            at_first = _number(_mean(value for value in first if value is not None))
            pieces = [f"|π−μ| {_number(gap)}", *[f"{at_first} in the first steps"] * (len(records) > _FIRST)]
            rows.append(("mismatch", pieces))
        updates = [] if blocked is None else [f"blocked {_number(100 * blocked)} %"]
        updates += [] if bad is None else [f"bad {_number(100 * bad)} % of A < 0"]
        updates += [f"back-offs {now['back_offs']}"] * bool(now.get("back_offs"))
        rows += [("updates", updates)] if updates else []
        rows += [("sync", self._sync())] if now.get("sync") else []
        return [*rows, ("time", self._times())]

    def _sync(self) -> list[str]:
        answers = [record.get("sync") for record in self.records]
        timeouts = self.records[-1].get("grading_timeouts")
        pieces = [f"proven at {answers.count('proven')} of {len(answers)} steps"]
        pieces += [] if answers[-1] == "proven" else [f"last: {answers[-1]}"]
        return pieces + [f"grading timeouts {timeouts}"] * bool(timeouts)

    def _times(self) -> list[str]:
        seconds = self._pace.of_step()
        rare = {name: seconds.pop(name) for name in _RARE if name in seconds}
        whole = sum(seconds.values())
        named = sorted((name for name in seconds if seconds[name] > _LEAST * whole), key=seconds.__getitem__)
        pieces = [f"{_number(whole)} s a step", *(f"{name} {_number(seconds[name])}" for name in reversed(named))]
        return pieces + [f"{name} {_number(value)}" for name, value in rare.items() if value > _LEAST * whole]


def duration(seconds: float) -> str:
    """A time as people say it: `45 s`, `12 min`, `1 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _flow(pieces: Iterable[str], width: int, between: str = _BETWEEN) -> list[str]:
    """Pieces on as few lines as hold them: a line ends between pieces only."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(between) + len(piece) <= width:
            lines[-1] += between + piece
        else:
            lines.append(piece)
    return lines


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _number(value: float) -> str:
    from mismatch_cli.numbers import number

    return number(value, 2)


class Refresher:
    """Draws the report of these runs into `output`, no sooner than every so many seconds, one process at a time."""

    def __init__(self, folders: Sequence[Path], output: Path, every: float, say: Callable[[str], None]) -> None:
        self._command = [sys.executable, "-m", __name__, str(output), *map(str, folders)]
        self._output, self._every, self._say, self._said = output, every, say, ""
        self._next = time.monotonic() + every
        self._child: subprocess.Popen[bytes] | None = None
        # No pipe: nobody reads it before the process ends, and one that is full would hold it up.
        self._errors = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this object

    def step_done(self) -> None:
        """Look after the process that draws, and start the next when it is time."""
        if not self._every or not self._is_free() or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        try:
            self._errors.seek(0)
            self._errors.truncate()
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,  # Ctrl-C is not for it
            )  # fmt: skip
            os.setpriority(os.PRIO_PROCESS, self._child.pid, _LOWEST)
        except OSError as error:
            self._complain(str(error))

    def stop(self) -> None:
        """End the process that draws, whatever it has done."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()  # what it writes is written under another name first
            self._child.wait()
            for folder in (self._output, self._output / "plots"):
                remove_unfinished(folder)
        self._child = None
        self._errors.close()

    def _is_free(self) -> bool:
        if self._child is None:
            return True
        pid, status, usage = os.wait4(self._child.pid, os.WNOHANG)  # `poll` does not tell what it has cost
        if pid == 0:
            return False
        self._child.returncode = os.waitstatus_to_exitcode(status)
        self._next = max(self._next, time.monotonic() + (usage.ru_utime + usage.ru_stime) / _SHARE)
        self._child = None
        if status:
            self._complain(self._read_errors())
        return True

    def _read_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _complain(self, error: str) -> None:
        """Say once why it failed: it will be tried again."""
        reason = next((line.strip() for line in reversed(error.splitlines()) if line.strip()), "no reason given")
        if reason != self._said:
            self._said = reason
            self._say(f"The report could not be refreshed, training goes on: {visible(reason)}")


def _draw(output: Path, folders: Sequence[Path]) -> None:
    """Draw the report of those runs that have begun."""
    from mismatch_cli.studies.runs import read_runs
    from mismatch_cli.studies.training import TrainingAnalysis

    begun = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
    Common(quiet=True).show(TrainingAnalysis.of(read_runs(begun)), output, reload_seconds=_RELOAD_SECONDS)


def _end_with_parent() -> None:
    """Whoever holds the folder holds the other end of stdin; when it is gone, another process may be writing there."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _draw(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
    except MismatchError as error:
        sys.exit(str(error))
