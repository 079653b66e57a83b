"""Rewards that exit, hang, fork, print, grow or start processes: the run continues, and no
process is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks.rewards import OwnReward, check_reward
from tests.paths import ROOT

REWARDS = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent

def note(pid):
    with open(HERE / "pids", "a") as file:
        file.write(f"{pid}\\n")

def work(text):
    note(os.getpid())
    return len(text)

def spawned_pool(response):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as its:
        return its.submit(work, response).result()

POOL = None

def kept_pool(response):
    global POOL
    POOL = POOL or multiprocessing.get_context("fork").Pool(2)
    return POOL.map(work, [response] * 2)[0]

def child_left(response):
    note(subprocess.Popen(["sleep", "600"]).pid)
    return len(response)

def daemon_left(response):
    note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    return len(response)

def orphan_left(response):
    between = os.fork()
    if not between:
        os.setsid()
        if pid := os.fork():
            note(pid)
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os.waitpid(between, 0)
    return len(response)

def fork_that_answers(response):
    if not os.fork():
        time.sleep(0.05)
        return 1000
    return len(response)

def fork_that_leaves(response):
    if not (pid := os.fork()):
        sys.exit(3)
    return len(response) if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3 else -1

def prints(response):
    print('{"reward": 1000}')
    os.write(1, b'0 {"reward": 1000}\\n1 {"reward": 1000}\\n2 {"reward": 1000}\\n')
    subprocess.run(["echo", '1 {"reward": 1000}'])
    return len(response)

def reads(response):
    return len(response) + len(subprocess.run(["cat"], stdout=-1).stdout) + len(sys.stdin.read())

def closes(response):
    os.close(0), os.close(1)
    sys.stdout.close()
    return len(response)

def wanders(response):
    os.chdir("/")
    return len(response)

def handles_signals(response):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    time.sleep(0.05)
    return len(response)

def leaves_a_thread(response):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return len(response)

def leaves_an_alarm(response):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return len(response)

class Number:
    def __float__(self):
        return 5.0

def a_number_of_its_own(response):
    return Number()

def everywhere(*lines):
    for number in range(3, 64):
        for line in lines:
            try:
                os.write(number, line)
            except OSError:
                pass

if os.environ.get("FORGE") == "ready":
    everywhere(b"0 ready\\n", b"ready\\n")

def forges(response):
    everywhere(*(b'%d {"reward": 77}\\n' % n for n in range(5)), b'{"reward": 77}\\n', b' {"reward": 77}\\n')
    return len(response)

def spoils(response):
    everywhere(b"no end of a line")
    return len(response)

def forges_later(response):
    threading.Timer(0.1, everywhere, [b'2 {"reward": 77}\\n']).start()
    return len(response)

def exits(response):
    sys.exit(0)

def exits_at_once(response):
    os._exit(0)

def interrupts(response):
    raise KeyboardInterrupt

def recurses(response):
    return recurses(response)

def ends_its_group(response):
    os.killpg(0, signal.SIGTERM)
    return 1

def grows(response):
    held = []
    while True:
        held.append(bytearray(2**40))  # more than any machine has

def nothing(response):
    return None

def infinite(response):
    return float("inf")

def text(response):
    return "1.0"

def long_words(response):
    raise ValueError("x" * 10**7)

def sleeps(response):
    note(subprocess.Popen(["sleep", "600"]).pid)
    note(os.getpid())
    time.sleep(600)

def stops(response):
    os.kill(os.getpid(), signal.SIGSTOP)

def ends_its_keeper(response):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "pids").write_text("")
    return tmp_path


def assert_all_have_ended(folder: Path, at_least: int = 0, seconds: float = 3.0) -> None:
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) >= at_least
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("kept_pool", 1), ("spawned_pool", 1), ("child_left", 3), ("daemon_left", 3), ("orphan_left", 3),
        ("fork_that_answers", 0), ("fork_that_leaves", 0), ("prints", 0), ("reads", 0), ("closes", 0), ("wanders", 0),
        ("handles_signals", 0), ("leaves_a_thread", 0),
    ],
)  # fmt: skip
def test_every_response_gets_its_own_reward_and_no_process_is_left(folder, name, left):
    if name == "closes":  # the second time there is nothing left to close
        (folder / "mine.py").write_text(
            REWARDS.replace("os.close(0), os.close(1)", "os.closerange(0, 3)")
        )
    reward = OwnReward(f"{folder}/mine.py:{name}", seconds=10)
    try:
        rewards = [reward.grade("x" * n, None, "stop", "p") for n in (1, 2, 70_000)]
        assert rewards == [1, 2, 70_000]
        if name == "fork_that_answers":
            time.sleep(0.1)
            assert reward.grade("xxxx", None, "stop", "p") == 4
        assert reward.timeouts == 0
    finally:
        began = time.monotonic()
        reward.child.stop()
    assert time.monotonic() - began < 3
    assert_all_have_ended(folder, left)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "forges",
            r"mine\.py:forges failed: it wrote into a file descriptor that it had not opened",
        ),
        ("spoils", "it wrote into a file descriptor"),
        ("exits", r"SystemExit: 0"),
        ("exits_at_once", "its process died"),
        ("interrupts", "KeyboardInterrupt"),
        ("recurses", "RecursionError"),
        ("ends_its_group", "its process died"),
        ("ends_its_keeper", "its process died"),
        ("grows", "MemoryError"),
        ("nothing", "TypeError"),
        ("infinite", "returned inf"),
        ("text", r"returned the text '1\.0', not a number"),
        ("long_words", "ValueError: xxx"),
    ],
)
def test_an_invalid_reward_ends_the_run_with_its_reason(folder, name, said):
    reward = OwnReward(f"{folder}/mine.py:{name}", seconds=10)
    try:
        with pytest.raises(MismatchError, match=said) as caught:
            reward.grade("response", "4", "stop", "p")
        assert len(str(caught.value)) < 1000
    finally:
        reward.child.stop()


def test_what_is_written_between_two_questions_is_no_answer(folder, monkeypatch):
    reward = OwnReward(f"{folder}/mine.py:forges_later", seconds=10)
    assert reward.grade("x", None, "stop", "p") == 1
    time.sleep(0.3)
    with pytest.raises(MismatchError, match="it wrote into a file descriptor"):
        reward.grade("xx", None, "stop", "p")
    monkeypatch.setenv("FORGE", "ready")
    with pytest.raises(
        MismatchError,
        match=r"mine\.py:exits failed: it wrote into a file descriptor .* Run it by itself",
    ):
        check_reward(f"{folder}/mine.py:exits")


@pytest.mark.parametrize("name", ["sleeps", "stops"])
def test_a_reward_that_hangs_is_ended_with_all_its_processes(folder, name):
    reward = OwnReward(f"{folder}/mine.py:{name}", seconds=0.3)
    assert reward.grade("response", None, "stop", "p") == 0
    assert reward.timeouts == 1
    assert_all_have_ended(folder)


def test_a_reward_that_dies_between_two_questions_is_restarted(folder):
    reward = OwnReward(f"{folder}/mine.py:leaves_an_alarm", seconds=10)
    for n in (1, 2, 3):
        assert reward.grade("x" * n, None, "stop", "p") == n
        time.sleep(0.4)
    reward.child.stop()


def test_a_number_of_any_library_counts(folder):
    reward = OwnReward(f"{folder}/mine.py:a_number_of_its_own")
    assert reward.grade("x", None, "stop", "p") == 5
    reward.child.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_run_ends_no_process_is_left(folder, number):
    code = (
        f"from mismatch_cli.probe.tasks.rewards import OwnReward; OwnReward({str(folder)!r} + "
        "'/mine.py:sleeps')"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", f"{code}.grade('x', None, 'stop', 'p')"],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    until = time.monotonic() + 20
    while len((folder / "pids").read_text().split()) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    run.send_signal(number)
    run.wait(10)
    assert_all_have_ended(folder, 2)


def test_memory_is_bounded_and_the_worker_is_killed_before_the_run():
    code = """
from pathlib import Path
from mismatch_cli.processes.keeper import bound_memory, stand_guard
stand_guard()
bound_memory(2**28)
held = []
try:
    while len(held) < 64:
        held.append(bytearray(2**24))
except MemoryError:
    print(len(held) < 16, Path("/proc/self/oom_score_adj").read_text().strip())
"""
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT) == b"True 1000\n"
