"""Servers that never stop, say nothing, send bombs, answer for others, or return invalid
probabilities.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import (
    EngineSettings,
    ForcedResponse,
    Request,
    _server_http,
    create_engine,
    prefill_checked,
    sample_checked,
    server,
)
from tests.models.engines.fake_server import COMPLETIONS, FakeServer

MODEL = str(bundled("model"))
K = 5
REQUESTS = [Request([5, 6, 7 + i], seed=i) for i in range(6)]
Json = dict[str, Any]
Change = Callable[[Json, Json], Any]
_CHUNK = b"10000\r\n" + b"x" * 2**16 + b"\r\n"


@pytest.fixture
def fake():
    with closing(FakeServer(MODEL)) as fake:
        yield fake


def changing(change: Change) -> Callable[[Json], Any]:
    """Tampers with an answer and its first choice."""
    return lambda answer: change(answer, answer["choices"][0])


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
    bodies: list[dict[str, Any]] = []
    sent = _server_http.Server.post

    async def noting(self: Any, path: str, body: dict[str, Any], most: int) -> Any:
        bodies.append(body)
        return await sent(self, path, body, most)

    monkeypatch.setattr(_server_http.Server, "post", noting)
    engine, own = engine_at(fake), SamplingSettings(temperature=0.6, top_p=0.95, max_tokens=2)
    bodies.clear()
    mixed = [
        replace(request, sampling=own) if i % 2 else request for i, request in enumerate(REQUESTS)
    ]
    assert [len(r.response_ids) for r in sample(engine, mixed)] == [4, 2] * 3
    settings = {tuple(a["prompt"]): (a["temperature"], a["top_p"], a["max_tokens"]) for a in bodies}
    assert [settings[tuple(r.prompt_ids)] for r in REQUESTS] == [(1.0, 1.0, 4), (0.6, 0.95, 2)] * 3


def _ends_with(entry: Any) -> Change:
    def change(answer: Json, choice: Json) -> None:
        # Answers to other requests have none
        choice.get("prompt_logprobs", [None])[-1] = entry

    return change


# For the tokens 5, 6, 7, 8.
READINGS = [
    (lambda a, c: c.update(prompt_token_ids=[5, 6, 7, 9]), "did not read the prompt"),
    (lambda a, c: c.update(prompt_token_ids=None), "does not return token ids"),
    (lambda a, c: c.update(prompt_logprobs=None), "does not have a log-prob for each token"),
    (
        lambda a, c: c.update(prompt_logprobs=[None, {"6": {"logprob": -1.0}}]),
        "does not have a log-prob for each token",
    ),
    (_ends_with(None), "not belong to the tokens of its prompt"),
    (_ends_with({"9": {"logprob": -1.0}}), "not belong to the tokens of its prompt"),
    (_ends_with({"8": -1.0}), "not belong to the tokens of its prompt"),
    (
        _ends_with({"8": {"logprob": None}}),
        "reported log μ = nan for token 1 of a response to prompt 3",
    ),
    (
        _ends_with({"8": {"logprob": 0.5}}),
        "reported log μ = 0.5 for token 1 of a response to prompt 3",
    ),
    (lambda a, c: a.update(model="another"), "from the model 'another'"),
    (lambda a, c: a.update(choices=[]), "not one completion"),
]


def test_recorded_tokens_are_read_only_by_an_honest_server(fake):
    engine = engine_at(fake)
    responses = [ForcedResponse([5, 6], [7, 8]), ForcedResponse([5], [8, 2047, 0])]
    expected_V = -0.05 * np.arange(2048) - np.logaddexp.reduce(-0.05 * np.arange(2048))
    logps = prefill_checked(engine, responses, [3, 4], lambda count: None)
    for logp_T, response in zip(logps, responses, strict=True):
        np.testing.assert_allclose(logp_T, expected_V[response.response_ids], atol=1e-5)
    for change, message in READINGS:
        fake.tamper = changing(change)
        with pytest.raises(MismatchError, match=message):
            prefill_checked(engine, responses[:1], [3], lambda count: None)


def talking(
    head: bytes = b"",
    part: Callable[[int], bytes] = lambda number: b"",
    parts: int = 2**40,
    seconds: float = 0.0,
) -> Callable[[str, Callable[[bytes], None]], bool]:
    """Says this over the raw connection, with a pause after each part."""

    def talk(path: str, say: Callable[[bytes], None]) -> bool:
        say(head)
        for number in range(parts):
            say(part(number))
            time.sleep(seconds)
        return True

    return talk


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SILENT = talking(parts=1, seconds=5)
LINES = {
    "an endless body": talking(CHUNKED, lambda number: _CHUNK),
    "endless headers": talking(OK, lambda number: b"X-%d: %s\r\n" % (number, b"y" * 1000)),
    "an endless line": talking(OK + b"X: ", lambda number: b"y" * 2**16),
    "endless trailers": talking(
        CHUNKED + b"2\r\n{}\r\n0\r\n", lambda number: b"X-T: %s\r\n" % (b"y" * 1000)
    ),
    "silence": SILENT,
    "a dripping body": talking(
        OK + b"Content-Length: 1000\r\n\r\n", lambda number: b"[", 100, 0.05
    ),
    "dripping headers": talking(OK, lambda number: b"X-%d: y\r\n" % number, 100, 0.05),
    "a body cut off": talking(OK + b'Content-Length: 1000\r\n\r\n{"choices": [', parts=0),
    "no HTTP": talking(b"SSH-2.0-OpenSSH_9.2\r\n", parts=0),
}


@pytest.mark.parametrize("talk", LINES.values(), ids=LINES)
def test_any_raw_answer_ends_soon_and_in_little_memory(fake, monkeypatch, talk):
    monkeypatch.setattr(server, "FOR_THE_LIST", 0.2)
    monkeypatch.setattr(_server_http, "BODY_SECONDS", 0.2)
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
    fake.talk = SILENT
    began = time.monotonic()
    with pytest.raises(MismatchError, match=r"has not answered for 0\.(7|3) s \(nothing within"):
        sample(engine, REQUESTS[:1])
    assert 0.6 < time.monotonic() - began < 1.2
    assert server.FOR_THE_LIST == 5  # as the page says


def test_a_missing_first_token_is_noticed(fake, monkeypatch):
    monkeypatch.setattr(server, "FIRST_ANSWER", 0.3)
    fake.talk = lambda path, say: path == COMPLETIONS and SILENT(path, say)
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
        fake.reply = lambda path, headers, reply=reply: reply if path == COMPLETIONS else None
        with pytest.raises(MismatchError, match=message) as caught:
            sample(engine, REQUESTS[:1])
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
    assert "/elsewhere" not in fake.asked


def _put_on_top(answer: Json, choice: Json) -> None:
    """A sampled token outside the top K that is more probable than they are."""
    entries = {f"token_id:{i}": -5.0 - i / 10 for i in range(K)}
    sampled = choice["logprobs"]["tokens"][0] = "token_id:99"
    choice["token_ids"][0] = 99
    choice["logprobs"]["top_logprobs"][0] = {sampled: -1.0} | entries
    choice["logprobs"]["token_logprobs"][0] = -1.0


def _at_top(value: float | None) -> Change:
    def change(answer: Json, choice: Json) -> None:
        entries = choice["logprobs"]["top_logprobs"][0]
        entries[next(reversed(entries))] = value

    return change


def _each(of_value: Callable[[float], float | None]) -> Change:
    def change(answer: Json, choice: Json) -> None:
        logprobs = choice["logprobs"]
        entries = [{k: of_value(v) for k, v in top.items()} for top in logprobs["top_logprobs"]]
        own = [of_value(value) for value in logprobs["token_logprobs"]]
        logprobs.update(token_logprobs=own, top_logprobs=entries)

    return change


def _other_spelling(spelling: str) -> Change:
    def change(answer: Json, choice: Json) -> None:
        entries = choice["logprobs"]["top_logprobs"][0]
        entries[spelling] = entries.pop("token_id:3", -3.0)

    return change


def _without_first_value(answer: Json, choice: Json) -> None:
    logprobs = choice["logprobs"]
    logprobs["token_logprobs"][0] = -9999.0
    logprobs["top_logprobs"][0][logprobs["tokens"][0]] = -9999.0


def _same_key_twice(answer: Json, choice: Json) -> bytes:
    key = b'"token_id:2": '
    return json.dumps(answer).encode().replace(key, key + b"-9.0, " + key)


TAMPERED: list[tuple[str, Change]] = [
    ("from the model 'other' instead of 'tiny'", lambda a, c: a.update(model="other")),
    ("from the model 'None'", lambda a, c: a.pop("model")),
    ("from the model", lambda a, c: a.update(model=["tiny"])),
    ("repeats the answer", lambda a, c: a.update(id="cmpl-1")),
    ("not the completion", lambda a, c: c.update(index=1)),
    ("not one completion", lambda a, c: a["choices"].append(a["choices"][0])),
    ("not one completion", lambda a, c: a["choices"].clear()),
    ("not one completion", lambda a, c: a.update(choices={"0": 1})),
    ("does not start from the prompt",
     lambda a, c: c.update(prompt_token_ids=[5, 6, 9999])),
    ("outside the model's 2048",
     lambda a, c: c["token_ids"].__setitem__(0, float(c["token_ids"][0]))),
    ("outside the model's 2048",
     lambda a, c: c["token_ids"].__setitem__(0, str(c["token_ids"][0]))),
    ("outside the model's 2048", lambda a, c: c["token_ids"].__setitem__(0, True)),
    ("outside the model's 2048", lambda a, c: c["token_ids"].__setitem__(0, -1)),
    ("outside the model's 2048", lambda a, c: c.update(token_ids="1234")),
    ("more probable than one of them", _put_on_top),
    ("add up to more than 1", _at_top(0.5)),
    ("add up to more than 1", _at_top(1e-4)),
    ("add up to more than 1", _at_top(None)),
    ("add up to more than 1", _each(lambda _: -0.1)),
    ("cannot add up to 1", _each(lambda _: -30.0)),
    ("log μ = nan|add up to", _each(lambda _: None)),
    ("not belong|for a token instead of|does not return",
     _other_spelling("token_id:03")),
    ("does not return", _other_spelling("token_id:٣")),
    ("does not return", _other_spelling("token_id:-3")),
    ("does not return", _other_spelling("token_id:" + "3" * 5000)),
    ("not belong", _other_spelling("token_id:2048")),
    ("one token two log-probs", _same_key_twice),
    ("does not return token ids", lambda a, c: c["logprobs"].update(tokens=["a"] * 4)),
    ("log-probs do not belong",
     lambda a, c: c["token_ids"].__setitem__(0, (c["token_ids"][0] + 1) % 2048)),
    ("add up to more than 1.*--logprobs-mode processed_logprobs", _each(lambda value: value + 20)),
    ("log μ = -inf for token 0|cannot add up to 1", _without_first_value),
    ("does not have", lambda a, c: c["logprobs"]["token_logprobs"].pop()),
    ("log-probs for a token instead of 5|not belong",
     lambda a, c: c["logprobs"]["top_logprobs"][0].popitem()),
    ("no top log-probs", lambda a, c: c["logprobs"]["top_logprobs"].__setitem__(0, None)),
    ("does not start from the prompt",
     lambda a, c: c.update(prompt_token_ids=[1, *c["prompt_token_ids"]])),
    ("outside the model's 2048", lambda a, c: c["token_ids"].__setitem__(0, 10**6)),
    ("ended a response with 'abort'.*--resume", lambda a, c: c.update(finish_reason="abort")),
    ("cut a response at 2 of ", lambda a, c: c.update(token_ids=c["token_ids"][:2])),
    ("no log-probs", lambda a, c: c.update(logprobs=None)),
    ("does not return token ids", lambda a, c: c.clear()),
]  # fmt: skip


def test_an_impossible_answer_is_not_recorded(fake):
    engine = engine_at(fake)
    for message, change in TAMPERED:
        fake.tamper = changing(change)
        with pytest.raises(MismatchError, match=message) as caught:
            sample(engine)
        assert "failed while" not in str(caught.value) and len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


def test_an_alias_of_the_same_weights_may_answer_and_another_model_may_not(fake):
    roots = {"tiny": MODEL, "alias": MODEL, "other": "elsewhere"}
    cards = [{"id": name, "root": root, "max_model_len": 512} for name, root in roots.items()]
    models = 200, {}, json.dumps({"data": cards}).encode()
    fake.reply = lambda path, headers: models if path == "/v1/models" else None
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
    answers = {"/server_info?config_format=json": json.dumps({"vllm_config": config}).encode(),
            "/version": b'{"version": {"x": 1}}'}  # fmt: skip
    fake.reply = lambda path, headers: (200, {}, answers[path]) if path in answers else None
    described = engine_at(fake).describe()
    assert described["enforce_eager"] is True
    assert (
        described["version"]
        is described["dtype"]
        is described["quantization"]
        is described["max_num_seqs"]
        is None
    )
