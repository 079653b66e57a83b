"""Hostile code and data: rewards, chat templates, servers' answers, and dumps that expand beyond
their size.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from mismatch_cli.base import memory
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, create_engine, sample_checked
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.tasks import prompt_templates as _templates
from mismatch_cli.probe.tasks.rewards import OwnReward
from mismatch_cli.rules.batch import Rollout
from tests.fuzz import strategies as of
from tests.fuzz.properties import Kind, judge
from tests.fuzz.world import call, copy
from tests.models.engines.fake_server import FakeServer, completion

_K, _TOKENS = 4, 3
_PROMPT = [5, 6, 7]


def _refused(error: MismatchError) -> str:
    said = str(error)
    assert "\n" not in said and len(said) < 2000, said[:300]
    # An unforeseen foreign error
    assert "engine failed while" not in said, said
    return "refused (1)"


def _children() -> list[str]:
    return [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


DEEDS = r"""
subprocess.Popen(['sleep', '300'])
subprocess.Popen(['sleep', '300'], start_new_session=True)
threading.Thread(target=time.sleep, args=(300,)).start()
print('0 ready', '1 1.0', flush=True)
os.write(1, b'1 {"reward": 9}\n')
subprocess.run(['cat'])
os.chdir('/')
os.closerange(0, 3)
os.closerange(3, 64)
os.fork()
os.fork() or os.setsid() or time.sleep(300)
os.fork() or sys.exit(1)
os.fork() or os._exit(1)
multiprocessing.get_context('fork').Pool(2).map(abs, [1, 2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(1)
signal.setitimer(signal.ITIMER_REAL, 0.001)
sys.exit(0)
os._exit(0)
os.abort()
os.kill(os.getpid(), signal.SIGSTOP)
os.killpg(0, signal.SIGKILL)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(300)
bytearray(2**50)
1 / 0
input()
sys.setrecursionlimit(10**6)
exec('def f(): f()\nf()')
raise_(KeyboardInterrupt)
raise_(SystemExit(3))
raise_(BaseException('\ud800'))
sys.stdout.close()
json.dumps.__globals__.clear()
None
""".strip().splitlines()
ANSWERS = r"""
len(response)
True
None
'1'
float('nan')
-1e308 * 10
10**400
[1]
b'1'
1j
os
""".strip().splitlines()
_HEAD = (
    "import json, multiprocessing, os, signal, subprocess, sys, threading, time\n\n"
    "def raise_(e):\n"
    "    raise e\n\n"
)


@st.composite
def rewards(draw: st.DrawFn) -> str:
    deeds = draw(st.lists(st.sampled_from(DEEDS), min_size=1, max_size=3))
    answer = of.pick(draw, *ANSWERS[:1] * 8, *ANSWERS)
    body = "".join(f"    {deed}\n" for deed in deeds)
    at_import = "".join(f"{deed}\n" for deed in deeds[:1]) if draw(st.integers(0, 9)) == 0 else ""
    return f"{_HEAD}{at_import}def reward(response):\n{body}    return {answer}\n"


def try_reward(code: str) -> str:
    """Whatever it does, it returns, fails with a sentence, or is given up, and all its processes
    end.
    """
    with copy() as folder:
        (folder / "mine.py").write_text(code)
        before, began = _children(), time.monotonic()
        reward = OwnReward(f"{folder}/mine.py:reward", seconds=1.0)
        reward.child.seconds_to_start = 3.0
        try:
            grades = [reward.grade("x" * n, None, "stop", "p") for n in (2, 3)]
            outcome = "given up" if reward.timeouts else "done"
            if "return len" in code and not reward.timeouts:
                assert grades == [2, 3], grades
        except MismatchError as error:
            outcome = _refused(error)
        finally:
            reward.child.stop()
        assert time.monotonic() - began < 30
        assert _children() == before, "somebody is left"
        return outcome


PIECES = [
    "\x00",
    "\ud800",
    *r"""
{{ messages[0].content }}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{{ 'a' * 10 ** 11 }}
{{ 'a' * 10 ** 7 }}
{{ 9 ** (9 ** 9) }}
{{ ''.__class__.__mro__ }}
{{ messages.append(1) }}
{{ raise_exception('no') }}
{{ undefined.x.y }}
{% include 'x' %}
{% if %}
{{ range(10 ** 9) | list }}
{{ strftime_now('%Y' * 9999) | length }}
{{ 1 / 0 }}
{{ '\ud800' }}
{% set x = namespace() %}{% set x.x = x %}{{ x }}
{{ messages | tojson }}
{{ '%s' % messages }}
{{ '{0.__class__}'.format(messages) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ bos_token }}
{{ '%999999999d' % 1 }}
{{ 'x'.center(10 ** 9) | length }}
{{ lipsum(n=99999) | length }}
{{ cycler | string }}
""".strip().splitlines(),
]


@cache
def _tokenizer() -> Any:
    return load_tokenizer(str(bundled("model")))


def try_template(pieces: list[str]) -> str:
    # So that loading is not timed
    _tokenizer()
    before, began = _children(), time.monotonic()
    with (
        mock.patch.object(_tokenizer(), "chat_template", "".join(pieces)),
        mock.patch.object(_templates, "_SECONDS", 0.5),
    ):
        try:
            chats = {
                i: [{"role": "user", "content": text}] for i, text in enumerate(("a", "b{{ 1 }}"))
            }
            outcome = (
                "done" if len(list(_templates.rendered(_tokenizer(), chats))) == 2 else "FAILED"
            )
        except MismatchError as error:
            outcome = _refused(error)
    assert time.monotonic() - began < 20 and _children() == before
    return outcome


@cache
def _server() -> tuple[FakeServer, Any]:
    fake = FakeServer(str(bundled("model")))
    settings = EngineSettings(
        fake.model,
        SamplingSettings(max_tokens=_TOKENS),
        _K,
        extra={"url": fake.url, "patience": 0.1},
    )
    return fake, create_engine("server", settings)


_ASKED = {
    "prompt": _PROMPT,
    "temperature": 1.0,
    "top_k": -1,
    "seed": 3,
    "max_tokens": _TOKENS,
    "logprobs": _K,
}


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """A valid completion with a change at one of its levels, or in its bytes."""
    answer = completion(_ASKED)
    choice = answer["choices"][0]
    level = of.pick(draw, "answer", "choice", "logprobs", "entries", "bytes")
    if level == "bytes":
        return draw(of.changed_bytes(json.dumps(answer).encode()))
    if level == "answer":
        answer = draw(of.changed_record(answer))
    elif level == "choice":
        answer["choices"][0] = draw(of.changed_record(choice))
    elif level == "logprobs":
        choice["logprobs"] = draw(of.changed_record(choice["logprobs"]))
    else:
        at = draw(st.integers(0, _TOKENS - 1))
        choice["logprobs"]["top_logprobs"][at] = draw(
            of.changed_record(choice["logprobs"]["top_logprobs"][at])
        )
    return json.dumps(answer).encode(errors="surrogatepass")


def try_answer(content: bytes) -> str:
    fake, engine = _server()
    # Later answers are valid
    turns = iter([content])
    fake.tamper = lambda _: next(turns, None)
    try:
        (rollout,) = sample_checked(engine, [Request(_PROMPT, seed=3)], [0], lambda _: None)
    except MismatchError as error:
        return _refused(error)
    finally:
        fake.restore()
    _check_rollout(rollout)
    return "done"


def _check_rollout(rollout: Rollout) -> None:
    """Ids of the vocabulary, log-probs of one distribution, K different ids at each token, and
    ranks that agree with them.
    """
    assert all(type(i) is int and 0 <= i < 2048 for i in rollout.response_ids)
    logp_T, top_TK, ids_TK = (
        rollout.logp_rollout_T,
        rollout.topk_logp_rollout_TK,
        rollout.topk_ids_TK,
    )
    assert (np.isfinite(logp_T) & (logp_T <= 0)).all()
    assert top_TK is not None and ids_TK is not None
    assert top_TK.shape == ids_TK.shape == (len(rollout.response_ids), _K)
    assert (np.exp(top_TK.astype(float)).sum(1) < 1.001).all()
    assert (np.diff(np.sort(ids_TK, axis=1), axis=1) > 0).all()
    for t, rank in enumerate(rollout.rank_rollout_T):
        inside = rollout.response_ids[t] in ids_TK[t]
        assert inside == (rank > 0) or top_TK[t, -1] == logp_T[t], "a rank that its column denies"


@st.composite
def bombs(draw: st.DrawFn) -> tuple[int, int, str, tuple[str, ...]]:
    """Rows, ids per row, the packing, and the columns."""
    rows = of.pick(draw, 1, 10, 1000, 10**5, 10**6)
    length = of.pick(draw, *[n for n in (1, 100, 10**4, 10**6, 10**7) if n * rows <= 2 * 10**7])
    optional = ("logp_trainer", "loss_mask", "topk_ids", "entropy_trainer")
    return (
        rows,
        length,
        of.pick(draw, "zstd", "snappy", "none"),
        tuple(draw(st.sets(st.sampled_from(optional)))),
    )


_ALLOWED = 2**27


def try_bomb(case: tuple[int, int, str, tuple[str, ...]]) -> str:
    """With an eight times smaller bound than the real one: imported or refused, and never with
    more memory.
    """
    rows, length, codec, optional = case
    offsets = pa.array(np.arange(rows + 1) * length, pa.int32())
    kinds = dict.fromkeys(("prompt_ids", "response_ids", "topk_ids"), np.int32) | {
        "loss_mask": np.bool_
    }
    with copy() as folder, mock.patch.object(memory, "_ALLOWED", _ALLOWED):
        columns = {
            name: pa.ListArray.from_arrays(
                offsets, pa.array(np.zeros(rows * length, kinds.get(name, np.float32)))
            )
            for name in ("prompt_ids", "response_ids", "logp_rollout", *optional)
        }
        pq.write_table(pa.table(columns), folder / "bomb.parquet", compression=codec)
        del columns
        bound = memory.allowance((folder / "bomb.parquet").stat().st_size)
        with _peak() as peak:
            outcome = judge(
                call(folder, "import", "bomb.parquet", "--output", "new", "--quiet"), folder
            )
        assert peak() <= bound + 2**26, (
            f"{peak() / 2**20:.0f} MB where {bound / 2**20:.0f} are allowed"
        )
        return outcome


@contextlib.contextmanager
def _peak() -> Iterator[Any]:
    """The peak growth of the process's memory, in bytes."""
    # Resets the high-water mark
    Path("/proc/self/clear_refs").write_text("5")
    had = _status("VmRSS:")
    yield lambda: _status("VmHWM:") - had


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


KINDS = {
    "rewards": Kind(rewards(), try_reward),
    "chat templates": Kind(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3), try_template),
    "server answers": Kind(answers(), try_answer),
    "bombs": Kind(bombs(), try_bomb),
}
