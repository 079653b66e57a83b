"""`train` while it runs: what a terminal shows, the report that is refreshed, the folder that is
locked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from mismatch_cli.app.cli import run
from mismatch_cli.app.refresher import Refresher
from mismatch_cli.processes.child import Child
from mismatch_cli.train.commands.train import steps_before
from mismatch_cli.train.live import Pace, TrainingView, duration
from mismatch_cli.train.train_config import load_config
from tests.paths import ROOT
from tests.processes.kept import kept
from tests.terminal import Terminal
from tests.train.commands.test_train import TRAIN

pytestmark = pytest.mark.slow

HOSTILE = "[red]:cat:\x1b[2J漢字\n" + "x" * 90


def record(step: int, **changes: Any) -> dict[str, Any]:
    seconds = {"sample": 2.0, "update": 1.0, "recompute": 1e-5} | (
        {"evaluate": 30.0} if step % 10 == 0 else {}
    )
    return {
        "step": step,
        "reward": step / 100,
        "eval_accuracy": 0.5 if step % 10 == 0 else None,
        "seconds": seconds,
        "mismatch": {"abs_dp_mean": 0.001 * step},
        "blocked": 0.002,
        "bad_over_negative": 0.0004,
        "sync": "proven",
        "back_offs": 0,
        "grading_timeouts": 0,
        "length": 50 + step,
        "entropy": 0.6,
    } | changes


def view_of(steps: int, *changes: dict[str, Any], runs: int = 1, **config: Any) -> TrainingView:
    view = TrainingView(
        load_config("miniature", {"steps": 100, "eval_every": 10, **config}), 1, runs
    )
    for step in range(1, steps + 1):
        view.add(record(step, **(changes[step - 1] if step <= len(changes) else {})))
    return view


def shown(view: TrainingView, width: int = 77, height: int = 23) -> str:
    return "\n".join(line.plain for line in view.lines(width, height))


def test_an_evaluation_does_not_make_the_time_left_jump() -> None:
    pace, left = Pace(load_config("miniature", {"steps": 100, "eval_every": 10})), []
    for step in range(1, 101):
        pace.add(record(step))
        left.append(pace.left())
    exact = [3.0 * (100 - step) + 30 * (10 - step // 10) for step in range(1, 101)]
    assert left[9:] == pytest.approx(exact[9:], abs=1e-2)  # known since the first evaluation
    assert left[:9] == pytest.approx([3.0 * (100 - step) for step in range(1, 10)], abs=1e-2)
    assert pace.whole() == pytest.approx(600, abs=1e-2)


@pytest.mark.parametrize(("every", "times"), [(0, 1), (10, 5), (30, 3)])
def test_rare_phases_come_as_often_as_the_loop_has_them(every: int, times: int) -> None:
    pace = Pace(load_config("miniature", {"steps": 100, "eval_every": every}))
    for step in range(1, 51):
        pace.add(
            record(
                step, seconds={"sample": 1.0, "evaluate": 1000.0} if step == 50 else {"sample": 1.0}
            )
        )
    assert round(pace.left() / 1000) == times  # 60, 70, … 100; 60, 90, 100; only the last step


def rows(view: TrainingView, width: int = 77, height: int = 23) -> dict[str, str]:
    """Each labelled line by its label."""
    lines = [line.plain for line in view.lines(width, height)]
    return {
        line[:10].strip(): line[10:].strip()
        for line in lines
        if line and not line.startswith(("━", "─"))
    }


def test_each_evaluation_set_is_shown_where_there_are_several() -> None:
    sets = {"eval_accuracy": 0.4, "eval": {"aime_2024": 0.5, "aime\x1b25": 0.3}}
    view = view_of(11, *[{}] * 9, sets)
    assert rows(view)["by set"] == "aime_2024 0.500 · aime\\x1b25 0.300"
    assert (
        "accuracy 0.400  aime_2024 0.500  aime\\x1b25 0.300" in view_of(10, *[{}] * 9, sets).line()
    )
    assert "by set" not in rows(view_of(11, *[{}] * 9, {"eval": {"aime_2024": 0.5}}))


def test_what_is_shown() -> None:
    view = view_of(30, runs=3, prompts_per_step=16, samples_per_prompt=8)
    text, view_rows = shown(view), rows(view)
    assert "run 1 of 3" in text and "30 of 100 steps · 7 min left · all runs 27 min" in text
    assert re.fullmatch(r"0\.295 +0\.0100 ▁\S+█ 0\.295 +mean of 2 steps", view_rows["reward"])
    # The axis spans at least 0.05, so equal values are drawn in its middle
    assert re.fullmatch(r"0\.500 +0\.500 ▅▅▅ +0\.500 +at step 30", view_rows["accuracy"])
    assert re.fullmatch(r"0\.030 +0\.0010 ▁\S+█ 0\.030 +equal weights", view_rows["|π − μ|"])
    assert view_rows["blocked"].startswith("0.0020") and view_rows["blocked"].endswith(
        "share of A ≠ 0"
    )
    assert view_rows["bad"].startswith("0.00040") and view_rows["length"].startswith("80.0")
    assert view_rows["entropy"].endswith("nats") and "trouble" not in view_rows
    assert view_rows["sync"] == "proven at 30 of 30 checks"
    assert view_rows["time"] == "3.0 s a step · sample 2.0 · update 1.0 · evaluate 30"
    view.enter("sample")
    assert rows(view)["now"] == "sampling 128 responses, 0 s"
    assert "saving" in shown(view_of(100))


def test_a_first_step_that_cannot_prove_the_sync_is_counted_out() -> None:
    first = {"sync": "undecidable"}
    assert rows(view_of(1, first))["sync"] == "step 1 has no older weights"
    assert (
        rows(view_of(6, first))["sync"] == "proven at 5 of 5 checks · step 1 has no older weights"
    )
    rounding = {"weights_changed": 0.02, "abs_dp_mean": 0.012}
    mixed = rows(view_of(3, first, {}, {"sync": "newer", "rounding": rounding}))
    assert "proven at 1 of 2 checks, newer weights at 1" in mixed["sync"]
    assert mixed["rounding"] == "the engine lags by |π − μ| 0.012"
    unsound = rows(view_of(1, {"back_offs": 2, "grading_timeouts": 1}))
    assert unsound["trouble"] == "loss-scale back-offs 2 · grading timeouts 1"


def test_a_number_is_formatted_alike_in_the_view_the_log_and_the_result() -> None:
    view = view_of(100, runs=2)
    gap, blocked = (rows(view)[label].split()[0] for label in ("|π − μ|", "blocked"))
    for line in (view.line(), view.result(200)):
        assert f"|π − μ| {gap}" in line and f"blocked {blocked}" in line
    assert view.result(200).startswith("dppo-binary-tv seed 0: reward 0.955 · accuracy 0.500 · ")
    assert view_of(12).result(80).startswith("dppo-binary-tv seed 0: stopped at step 12 of 100")
    assert all(len(view.result(width)) <= width for width in (50, 80))


@pytest.mark.parametrize(
    ("width", "height", "count"), [(77, 23, 9), (57, 19, 9), (57, 9, 6), (37, 9, 5), (37, 5, 1)]
)
def test_a_small_terminal_loses_whole_lines_the_least_important_first(
    width: int, height: int, count: int
) -> None:
    view = view_of(30, runs=2)
    lines = [line.plain for line in view.lines(width, height)]
    assert len(lines) <= height and max(map(len, lines)) <= width and "…" not in "".join(lines)
    order = ("reward", "|π − μ|", "blocked", "accuracy", "bad", "length", "entropy", "time", "sync")
    assert set(rows(view, width, height)) & set(order) == set(order[:count])


def test_before_the_first_step_it_shows_what_it_waits_for() -> None:
    view = view_of(0)
    assert "loading libraries and problems" in shown(view)
    for phase in ("engine", "trainer", "evaluate"):
        view.enter(phase)
    doing = [line.rsplit(maxsplit=2)[0].strip() for line in shown(view).splitlines()[1:]]
    assert doing == [
        "loading libraries and problems",
        "loading the model into vllm",
        "loading the trainer",
        "evaluating",
    ]
    assert "evaluating" in shown(view, 77, 2) and "trainer" not in shown(view, 77, 2)
    view.stopping = True
    assert "Finishing this step, then saving (Ctrl-C again: stop at once)" in shown(view)


def test_a_log_names_what_takes_long_before_the_first_step() -> None:
    view, said = view_of(0), []
    for phase in ("engine", "trainer", "evaluate", "sample", "grade", "sync", "update"):
        view.enter(phase)
        said.append(view.starting())
    named = [words for words in said if words]
    assert named == [
        "Loading the model into vllm",
        "Loading the trainer",
        "Evaluating",
        "Sampling 256 responses",
    ]
    later = view_of(1)
    later.enter("sample")
    assert later.starting() == ""


@pytest.mark.parametrize("width", [1, 12, 37, 77, 300])
@pytest.mark.parametrize("steps", [0, 1, 40, 100])
def test_nothing_is_wider_than_the_terminal_nor_taken_for_markup(width: int, steps: int) -> None:
    view = view_of(
        steps,
        {"mismatch": {}, "blocked": None, "bad_over_negative": None},
        algorithm=HOSTILE,
        runs=2,
    )
    view.stopping = True
    text = shown(view, width)
    assert "[red]:cat:\\x1b[2J" in text and "\x1b" not in text
    if width >= 37:  # the name may be cut
        assert max(cell_len(line.plain) for line in view.lines(width, 23)[1:]) <= width


def test_small_things() -> None:
    assert [duration(x) for x in (4.4, 99, 101, 5000, 40_000)] == [
        "4 s",
        "99 s",
        "2 min",
        "83 min",
        "11 h 7 min",
    ]


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """What the condition gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def test_the_report_is_drawn_by_a_process_that_gives_way(tmp_path: Path) -> None:
    done, empty, absent = tmp_path / "done", tmp_path / "empty", tmp_path / "absent"
    for folder, lines in ((done, f"{json.dumps(record(1))}\n" + '{"step": 2, "rew'), (empty, "")):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    said: list[str] = []
    refresher = Refresher([done, empty, absent], tmp_path, 0.01, said.append)
    time.sleep(0.02)
    refresher.step_done()
    keeper = refresher.child.pid
    assert keeper is not None
    wait_for(
        lambda: [os.getpriority(os.PRIO_PROCESS, pid) for pid in kept(refresher.child)] == [19]
    )
    assert os.getsid(keeper) == keeper
    refresher.step_done()
    assert refresher.child.pid == keeper  # one at a time
    wait_for(lambda: refresher.step_done() or not refresher.child.runs)
    assert said == []
    assert 'http-equiv="refresh"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    # At least half a second of work is 2 % of that
    assert refresher.next_at - time.monotonic() > 20


def test_a_failed_drawing_is_reported_once_and_a_killed_one_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    refresher = Refresher([tmp_path], tmp_path, 0.01, said.append)
    for _ in range(2):
        (tmp_path / "metrics.jsonl").write_text("{\n{\n", encoding="utf-8")
        refresher.next_at = 0
        refresher.step_done()
        wait_for(lambda: refresher.step_done() or not refresher.child.runs)
    assert len(said) == 1 and "could not be refreshed, training continues" in said[0]
    assert "line 1 is not a JSON object" in said[0]
    refresher.next_at = 0
    refresher.step_done()
    wait_for(lambda: kept(refresher.child))
    pids = [refresher.child.pid, *kept(refresher.child)]
    refresher.stop()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    refresher.stop()
    off = Refresher([tmp_path], tmp_path, 0, said.append)
    off.step_done()
    assert not off.child.runs


def drawing_of(reason: str) -> Callable[[Any], bool]:
    """In the place of the function that draws: much output, then an error."""

    def draw(page: Any) -> bool:
        sys.stderr.write("a warning\n" * 50_000)
        print("a number\n" * 50_000)
        sys.exit(reason)

    return draw


def drawing_without_end() -> Callable[[Any], bool]:
    return lambda page: time.sleep(600) is None


def test_a_drawing_with_much_output_or_without_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    refresher = Refresher([tmp_path], tmp_path, 0.01, said.append)
    for child, longest in (
        (Child(drawing_of, "first"), 60),
        (Child(drawing_of, "2nd"), 60),
        (Child(drawing_without_end), 0.1),
    ):
        monkeypatch.setattr("mismatch_cli.app.refresher._LONGEST", longest)
        refresher.child, refresher.next_at = child, 0
        refresher.step_done()
        wait_for(lambda: refresher.step_done() or not refresher.child.runs)
    refresher.stop()
    reasons = [sentence.rpartition("continues: ")[2] for sentence in said]
    assert reasons == ["SystemExit: first", "SystemExit: 2nd", "it takes too long"]


def test_a_stop_in_the_last_step_of_a_run_starts_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Any, folder: Path, on_step: Callable[[Any], None], **_: Any) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(f"{json.dumps(record(1))}\n", encoding="utf-8")
        on_step(record(1))
        os.kill(os.getpid(), signal.SIGINT)
        return True

    monkeypatch.setattr("mismatch_cli.train.loop.train", train)
    assert run([*TRAIN, "--seeds", "3", "-o", str(tmp_path / "a b")]) == 130
    assert {path.name for path in tmp_path.glob("*/*-seed-*")} == {"dppo-binary-tv-seed-0"}
    error = capfd.readouterr().err
    assert (
        f"--resume --output '{tmp_path}/a b'" in error
        and (tmp_path / "a b" / "report.html").is_file()
    )


def test_a_resumed_run_knows_its_earlier_steps(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_accuracy": 0.1}, *(record(step) for step in range(1, 4))]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"
    )
    assert [each["step"] for each in steps_before(tmp_path, 3)] == [1, 2]


def test_a_run_in_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One run for everything: the view, a refreshed report, a second process that is refused,
    and a first Ctrl-C.
    """
    folder = tmp_path / "run"
    train = [*TRAIN, "--steps", "500", "-o", str(folder)]
    terminal = Terminal(
        [sys.executable, "-m", "mismatch_cli", *train, "--report-every", "0.1"], 100
    )
    try:
        wait_for(lambda: terminal.shows("loading the model into hf"))
        assert run([*TRAIN, "--steps", "500", "-o", str(folder)]) == 1
        assert "is being written by another process" in capfd.readouterr().err
        wait_for(lambda: terminal.shows("of 500 steps") and terminal.shows("|π − μ|"))
        wait_for(lambda: terminal.shows("") and (folder / "report.html").exists())
        assert 'http-equiv="refresh"' in (folder / "report.html").read_text(encoding="utf-8")
        assert run([*train, "--resume"]) == 1
        assert "is being written by another process" in capfd.readouterr().err
        terminal.resize(40)
        terminal.text = ""
        wait_for(lambda: terminal.shows(" steps"))
        terminal.text = ""
        terminal.type("\x03")
        wait_for(lambda: terminal.shows("Finishing this step"))
        assert terminal.finish() == 130
    finally:
        terminal.process.kill()
    lines = [re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", line) for line in terminal.text.splitlines()]
    assert "--resume --output" in terminal.text and lines[-1] == "mismatch-cli: Interrupted."
    assert "\x1b[?25h" in terminal.text  # the cursor is back
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text(encoding="utf-8")
    steps = (folder / "metrics.jsonl").read_text(encoding="utf-8").count("\n")
    assert (folder / "checkpoints" / f"step-{steps:06d}" / "state.json").is_file()


def test_a_view_that_is_cut_short_gives_the_terminal_back() -> None:
    """A second Ctrl-C, or an error, while it is shown."""
    script = """
import sys, time
from mismatch_cli.app.progress import TerminalProgress
from rich.text import Text
progress = TerminalProgress(False)
try:
    with progress.view(lambda width, height: [Text("in view")]):
        time.sleep(0.8)
        progress.say("said [red]above[/]")
        raise KeyboardInterrupt
except KeyboardInterrupt:
    progress.say("afterwards")
"""
    terminal = Terminal([sys.executable, "-c", script], 80)
    assert terminal.finish() == 0
    assert (
        terminal.text.index("\x1b[?25l")
        < terminal.text.index("in view")
        < terminal.text.index("above[/]")
    )
    assert (
        terminal.text.index("above[/]")
        < terminal.text.rindex("\x1b[?25h")
        < terminal.text.index("afterwards")
    )
