"""Servers that never stop, say nothing, send bombs, answer for others, or return invalid
probabilities.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import (
    EngineSettings,
    Forced,
    Request,
    _server_http,
    create_engine,
    prefill_checked,
    sample_checked,
    server,
)
from tests.models.engines.fake_server import FakeServer

MODEL = str(bundled("model"))
K = 5
COMPLETIONS = "/v1/completions"
REQUESTS = [Request([5, 6, 7 + i], seed=i) for i in range(6)]
_CHUNK = b"10000\r\n" + b"x" * 2**16 + b"\r\n"


@pytest.fixture(scope="module")
def shared():
    fake = FakeServer(MODEL)
    yield fake
    fake.close()


@pytest.fixture
def fake(shared):
    yield shared
    shared.restore()


def engine_at(fake: FakeServer, **extra: Any):
    settings = EngineSettings(
        MODEL, SamplingSettings(max_tokens=4), K, extra={"url": fake.url, "concurrency": 2} | extra
    )
    return create_engine("server", settings)


def sample(engine, requests=REQUESTS):
    return sample_checked(engine, requests, [0] * len(requests), lambda count: None)


def test_an_honest_answer_is_accepted(fake):
    engine = engine_at(fake)
    rollouts = sample(engine)
    assert [len(r.response_ids) for r in rollouts] == [4] * 6
    expected_V = -0.05 * np.arange(2048) - np.logaddexp.reduce(-0.05 * np.arange(2048))
    for rollout in rollouts:
        np.testing.assert_allclose(
            rollout.logp_rollout_T, expected_V[rollout.response_ids], atol=1e-5
        )
        ranks = [i + 1 if i < K else -1 for i in rollout.response_ids]
        assert rollout.rank_rollout_T.tolist() == ranks
        assert rollout.topk_ids_TK.tolist() == [list(range(K))] * 4


def test_a_request_is_sent_with_its_own_settings(fake, monkeypatch):
    """Its sampling settings, if it has any, reach the server; other requests have the engine's."""
    asked: list[dict[str, Any]] = []
    sent = _server_http.Server.post

    async def noting(self: Any, path: str, body: dict[str, Any], most: int) -> Any:
        asked.append(body)
        return await sent(self, path, body, most)

    monkeypatch.setattr(_server_http.Server, "post", noting)
    engine, own = engine_at(fake), SamplingSettings(temperature=0.6, top_p=0.95, max_tokens=2)
    asked.clear()
    mixed = [
        replace(request, sampling=own) if i % 2 else request for i, request in enumerate(REQUESTS)
    ]
    assert [len(r.response_ids) for r in sample(engine, mixed)] == [4, 2] * 3
    told = {tuple(a["prompt"]): (a["temperature"], a["top_p"], a["max_tokens"]) for a in asked}
    assert [told[tuple(r.prompt_ids)] for r in REQUESTS] == [(1.0, 1.0, 4), (0.6, 0.95, 2)] * 3


def _lies_about(**told: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["choices"][0].update(told)


def _changes_one(entry: Any) -> Callable[[dict[str, Any]], None]:
    def tamper(answer: dict[str, Any]) -> None:
        # Answers to other requests have none
        answer["choices"][0].get("prompt_logprobs", [None])[-1] = entry

    return tamper


# For the tokens 5, 6, 7, 8.
READINGS = [
    (_lies_about(prompt_token_ids=[5, 6, 7, 9]), "did not read the prompt"),
    (_lies_about(prompt_token_ids=None), "does not return token ids"),
    (_lies_about(prompt_logprobs=None), "does not have a log-prob for each token"),
    (
        _lies_about(prompt_logprobs=[None, {"6": {"logprob": -1.0}}]),
        "does not have a log-prob for each token",
    ),
    (_changes_one(None), "not belong to the tokens of its prompt"),
    (_changes_one({"9": {"logprob": -1.0}}), "not belong to the tokens of its prompt"),
    (_changes_one({"8": -1.0}), "not belong to the tokens of its prompt"),
    (
        _changes_one({"8": {"logprob": None}}),
        "reported log μ = nan for token 1 of a response to prompt 3",
    ),
    (
        _changes_one({"8": {"logprob": 0.5}}),
        "reported log μ = 0.5 for token 1 of a response to prompt 3",
    ),
    (lambda answer: answer.update(model="another"), "from the model 'another'"),
    (lambda answer: answer.update(choices=[]), "not one completion"),
]


def test_recorded_tokens_are_read_only_by_an_honest_server(fake):
    engine = engine_at(fake)
    responses = [Forced([5, 6], [7, 8]), Forced([5], [8, 2047, 0])]
    expected_V = -0.05 * np.arange(2048) - np.logaddexp.reduce(-0.05 * np.arange(2048))
    found = prefill_checked(engine, responses, [3, 4], lambda count: None)
    for logp_T, response in zip(found, responses, strict=True):
        np.testing.assert_allclose(logp_T, expected_V[response.response_ids], atol=1e-5)
    for tamper, message in READINGS:
        fake.tamper = tamper
        with pytest.raises(MismatchError, match=message):
            prefill_checked(engine, responses[:1], [3], lambda count: None)


# What is sent over the raw connection.


def _endless_body(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        say(_CHUNK)


def _endless_headers(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"HTTP/1.1 200 OK\r\n")
    number = 0
    while True:
        number += 1
        say(b"".join(b"X-%d-%d: %s\r\n" % (number, i, b"y" * 1000) for i in range(50)))


def _endless_line(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        say(b"y" * 2**16)


def _endless_trailers(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    while True:
        say(b"X-T: %s\r\n" % (b"y" * 1000))


def _silent(path: str, say: Callable[[bytes], None]) -> bool:
    time.sleep(5)
    return True


def _drips(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        say(b"[")
        time.sleep(0.05)
    return True


def _drips_headers(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"HTTP/1.1 200 OK\r\n")
    for i in range(100):
        say(b"X-%d: y\r\n" % i)
        time.sleep(0.05)
    return True


def _cut_off(path: str, say: Callable[[bytes], None]) -> bool:
    say(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [')
    return True


def _not_http(path: str, say: Callable[[bytes], None]) -> bool:
    say(b"SSH-2.0-OpenSSH_9.2\r\n")
    return True


LINES = [_endless_body, _endless_headers, _endless_line, _endless_trailers, _silent, _drips,
         _drips_headers, _cut_off,
         _not_http]  # fmt: skip


@pytest.mark.parametrize("talk", LINES)
def test_any_raw_answer_ends_soon_and_in_little_memory(fake, monkeypatch, talk):
    monkeypatch.setattr(server, "_FOR_THE_LIST", 0.2)
    monkeypatch.setattr(_server_http, "_BODY_SECONDS", 0.2)
    engine = engine_at(fake, timeout=0.3, patience=0.1)
    fake.talk = talk
    for ask in (lambda: engine_at(fake, patience=0.1), lambda: sample(engine, REQUESTS[:1])):
        began, fake.sent = time.monotonic(), 0
        with pytest.raises(MismatchError) as caught:
            ask()
        # Even on a busy machine; a dripping answer would take 5
        assert time.monotonic() - began < 4
        assert fake.sent < 2**26  # before the connection closed, including the system's buffers
        assert "\n" not in str(caught.value) and "failed while" not in str(caught.value)


def test_a_silent_server_gets_the_stated_time(fake):
    engine = engine_at(fake, timeout=0.4, patience=0.3)
    fake.talk = _silent
    began = time.monotonic()
    with pytest.raises(MismatchError, match=r"has not answered for 0\.(7|3) s \(nothing within"):
        sample(engine, REQUESTS[:1])
    assert 0.6 < time.monotonic() - began < 1.2
    assert server._FOR_THE_LIST == 5  # as the page says


def test_a_missing_first_token_is_noticed(fake, monkeypatch):
    monkeypatch.setattr(server, "_FIRST_ANSWER", 0.3)
    fake.talk = lambda path, say: path == COMPLETIONS and _silent(path, say)
    began = time.monotonic()
    with pytest.raises(MismatchError, match="nothing within"):
        engine_at(fake, patience=0.2)
    assert time.monotonic() - began < 1.5


def test_bombs_redirects_and_depth_are_refused(fake):
    engine = engine_at(fake, patience=0.2)
    bomb = gzip.compress(b" " * 2**24)
    cases: list[tuple[str, tuple[int, dict[str, str], bytes]]] = [
        ("answered in the encoding gzip", (200, {"Content-Encoding": "gzip"}, bomb)),
        ("answered in the encoding deflate, br", (200, {"Content-Encoding": "deflate, br"}, bomb)),
        (r"rejected a request \(status 302\)", (302, {"Location": f"{fake.url}/elsewhere"}, b"")),
        ("did not answer in JSON", (200, {}, b"[" * 10**5 + b"]" * 10**5)),
        ("did not answer in JSON", (200, {"Content-Type": "text/html"}, b"<html>")),
        ("did not answer in JSON", (200, {}, b'{"choices": NaN}')),
        ("did not answer in JSON", (200, {}, b'{"model": "\\ud800"}')),
        ("not answered", (500, {}, b"[" * 10**5)),
        ("rejected a request", (422, {}, b'{"detail": "' + b"x" * 2**20 + b'"}')),
        ("answered with more than", (200, {}, b" " * 2**22)),
    ]  # fmt: skip
    for message, reply in cases:
        fake.reply = lambda path, reply=reply: reply if path == COMPLETIONS else None
        with pytest.raises(MismatchError, match=message) as caught:
            sample(engine, REQUESTS[:1])
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
    assert "/elsewhere" not in fake.asked


def _of_first(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: change(answer["choices"][0]) and None


def _put_on_top(choice: dict[str, Any]) -> None:
    """A sampled token outside the top K that is more probable than they are."""
    entries = {f"token_id:{i}": -5.0 - i / 10 for i in range(K)}
    sampled = choice["logprobs"]["tokens"][0] = "token_id:99"
    choice["token_ids"][0] = 99
    choice["logprobs"]["top_logprobs"][0] = {sampled: -1.0} | entries
    choice["logprobs"]["token_logprobs"][0] = -1.0


def _at_top(value: float) -> Callable[[dict[str, Any]], None]:
    def change(choice: dict[str, Any]) -> None:
        entries = choice["logprobs"]["top_logprobs"][0]
        entries[next(reversed(entries))] = value

    return change


def _all_at(value: float) -> Callable[[dict[str, Any]], None]:
    def change(choice: dict[str, Any]) -> None:
        logprobs = choice["logprobs"]
        logprobs["token_logprobs"] = [value] * 4
        logprobs["top_logprobs"] = [
            dict.fromkeys(entries, value) for entries in logprobs["top_logprobs"]
        ]

    return change


def _other_spelling(spelling: str) -> Callable[[dict[str, Any]], None]:
    def change(choice: dict[str, Any]) -> None:
        entries = choice["logprobs"]["top_logprobs"][0]
        entries[spelling] = entries.pop("token_id:3", -3.0)

    return change


def _same_key_twice(answer: dict[str, Any]) -> bytes:
    return (
        json.dumps(answer)
        .encode()
        .replace(b'"token_id:2": ', b'"token_id:2": -9.0, "token_id:2": ')
    )


TAMPERED: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("from the model 'other' instead of 'tiny'", lambda a: a.update(model="other")),
    ("from the model 'None'", lambda a: a.pop("model") and None),
    ("from the model", lambda a: a.update(model=["tiny"])),
    ("repeats the answer", lambda a: a.update(id="cmpl-1")),
    ("not the completion", _of_first(lambda c: c.update(index=1))),
    ("not one completion", lambda a: a["choices"].append(a["choices"][0])),
    ("not one completion", lambda a: a["choices"].clear()),
    ("not one completion", lambda a: a.update(choices={"0": 1})),
    ("does not start from the prompt",
     _of_first(lambda c: c.update(prompt_token_ids=[5, 6, 9999]))),
    ("outside the model's 2048",
     _of_first(lambda c: c["token_ids"].__setitem__(0, float(c["token_ids"][0])))),
    ("outside the model's 2048",
     _of_first(lambda c: c["token_ids"].__setitem__(0, str(c["token_ids"][0])))),
    ("outside the model's 2048", _of_first(lambda c: c["token_ids"].__setitem__(0, True))),
    ("outside the model's 2048", _of_first(lambda c: c["token_ids"].__setitem__(0, -1))),
    ("outside the model's 2048", _of_first(lambda c: c.update(token_ids="1234"))),
    ("more probable than one of them", _of_first(_put_on_top)),
    ("add up to more than 1", _of_first(_at_top(0.5))),
    ("add up to more than 1", _of_first(_at_top(1e-4))),
    ("add up to more than 1", _of_first(_at_top(None))),
    ("add up to more than 1", _of_first(_all_at(-0.1))),
    ("cannot add up to 1", _of_first(_all_at(-30.0))),
    ("log μ = nan|add up to", _of_first(_all_at(None))),
    ("not belong|for a token instead of|does not return",
     _of_first(_other_spelling("token_id:03"))),
    ("does not return", _of_first(_other_spelling("token_id:٣"))),
    ("does not return", _of_first(_other_spelling("token_id:-3"))),
    ("does not return", _of_first(_other_spelling("token_id:" + "3" * 5000))),
    ("not belong", _of_first(_other_spelling("token_id:2048"))),
    ("one token two log-probs", _same_key_twice),
]  # fmt: skip


def test_an_impossible_answer_is_not_recorded(fake):
    engine = engine_at(fake)
    for message, tamper in TAMPERED:
        fake.tamper = tamper
        with pytest.raises(MismatchError, match=message) as caught:
            sample(engine)
        assert "failed while" not in str(caught.value) and len(str(caught.value)) < 400


def test_an_alias_of_the_same_weights_may_answer_and_another_model_may_not(fake):
    fake.reply = lambda path: (
        None
        if path != "/v1/models"
        else (
            200,
            {},
            json.dumps(
                {
                    "data": [
                        {"id": "tiny", "root": MODEL, "max_model_len": 512},
                        {"id": "alias", "root": MODEL, "max_model_len": 512},
                        {"id": "other", "root": "elsewhere", "max_model_len": 512},
                    ]
                }
            ).encode(),
        )
    )
    assert len(sample(engine_at(fake, served_model="alias"))) == 6
    with pytest.raises(MismatchError, match="from the model 'tiny' instead of 'other'"):
        engine_at(fake, served_model="other")


def test_an_invalid_context_length_must_be_given(fake):
    for length in (-1, 0, 1.5, "512", True, None, [512], 10**30):
        fake.card = {"max_model_len": length}
        with pytest.raises(MismatchError, match="max_model_len"):
            engine_at(fake)


def test_a_servers_settings_are_kept_only_if_they_are_plausible(fake):
    config = {"model_config": {"dtype": ["x"], "quantization": {"a": [1]}, "enforce_eager": True},
              "scheduler_config": {"max_num_seqs": [[]]}, "parallel_config": 5,
              "cache_config": None}  # fmt: skip
    told = {"/server_info?config_format=json": json.dumps({"vllm_config": config}).encode(),
            "/version": b'{"version": {"x": 1}}'}  # fmt: skip
    fake.reply = lambda path: (200, {}, told[path]) if path in told else None
    described = engine_at(fake).describe()
    assert described["enforce_eager"] is True
    assert (
        described["version"]
        is described["dtype"]
        is described["quantization"]
        is described["max_num_seqs"]
        is None
    )
