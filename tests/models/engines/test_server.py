"""`--engine server` against real vLLM servers on loopback: their numbers, their death and return,
and what is refused.

What a healthy vLLM does not do (answer 429, lose a log-prob, rewrite ids) is done by `Proxy`,
which passes everything else on to the real one.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import (
    EngineSettings,
    ForcedResponse,
    Request,
    create_engine,
    prefill_checked,
    sample_checked,
)
from mismatch_cli.trace.manifest import read_manifest
from mismatch_cli.trace.reader import Trace
from tests.models.engines.fake_server import COMPLETIONS, FakeServer
from tests.models.engines.vllm_servers import VllmServers, free_port
from tests.models.plain_torch import at_sampled, logp_of

MODEL = str(bundled("model"))
K = 20
PLAIN = SamplingSettings(max_tokens=24)
TRUNCATED = SamplingSettings(temperature=0.7, top_p=0.9, top_k=15, min_p=0.01, max_tokens=24)
PROMPTS = [[5, 6, 7], [30, 40, 50, 60], [9] * 12, [100, 200, 300]]
REQUESTS = [Request(PROMPTS[i % 4], seed=i) for i in range(12)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = VllmServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def both(servers, port) -> tuple[str, str]:
    urls = (
        servers.start(port, "processed_logprobs"),
        servers.start(free_port(), "raw_logprobs", tells_all=True),
    )
    for url in urls:
        servers.wait(url)
    return urls


@pytest.fixture(scope="module")
def url(both) -> str:
    return both[0]


@pytest.fixture(scope="module")
def raw_url(both) -> str:
    return both[1]


def engine_at(url: str, sampling: SamplingSettings = PLAIN, top_logprobs: int = K, **extra: Any):
    say = extra.pop("say", lambda message: None)
    return create_engine(
        "server", EngineSettings(MODEL, sampling, top_logprobs, extra={"url": url} | extra, say=say)
    )


def sample(engine, requests=REQUESTS, on_finished=lambda count: None):
    return sample_checked(engine, requests, [0] * len(requests), on_finished)


def assert_mu_is_what_was_sampled(model, rollouts, sampling) -> None:
    """log μ, ranks, and top-K ids and log-probs against plain torch in float32."""
    for rollout in rollouts:
        logp_TV = logp_of(model, rollout, sampling)
        expected_T = at_sampled(logp_TV, rollout)
        np.testing.assert_allclose(rollout.logp_rollout_T, expected_T, atol=1e-4)
        topk = logp_TV.topk(K)
        np.testing.assert_allclose(rollout.topk_logp_rollout_TK, topk.values, atol=1e-4)
        rank_T = (logp_TV > expected_T[:, None]).sum(1).numpy() + 1
        # No other logit within the noise
        clear_T = (logp_TV - expected_T[:, None]).abs().lt(1e-4).sum(1).eq(1).numpy()
        known_T = rollout.rank_rollout_T > 0
        assert np.array_equal(known_T[clear_T], rank_T[clear_T] <= K)
        assert np.array_equal(rollout.rank_rollout_T[clear_T & known_T], rank_T[clear_T & known_T])
        own_TK = logp_TV.gather(1, torch.from_numpy(rollout.topk_ids_TK).long())
        np.testing.assert_allclose(rollout.topk_logp_rollout_TK, own_TK, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
def test_mu_is_the_distribution_that_was_sampled(url, model, sampling):
    rollouts = sample(engine_at(url, sampling))
    assert_mu_is_what_was_sampled(model, rollouts, sampling)
    # Both kinds occurred: the sampled token among the top K, and outside
    if not sampling.truncates:
        assert {-1, 1} <= {int(rank) for r in rollouts for rank in r.rank_rollout_T}


@pytest.mark.slow
def test_recorded_tokens_are_read_in_one_pass(both, model):
    """Whichever log-probs a server reports for its own samples."""
    responses = [
        ForcedResponse(PROMPTS[i % 4], [7 + i, 1, 300 - i, 8][: 1 + i % 4]) for i in range(9)
    ]
    whole = ForcedResponse(
        PROMPTS[0], list(range(3, 512))
    )  # with the prompt as long as the context
    for url in both:
        counts: list[int] = []
        logps = prefill_checked(engine_at(url), responses, range(9), counts.append)
        assert sum(counts) == 9
        for logp_T, response in zip(logps, responses, strict=True):
            expected_T = at_sampled(logp_of(model, response, SamplingSettings()), response)
            np.testing.assert_allclose(logp_T, expected_T, atol=1e-5, rtol=1e-6)
        with pytest.raises(
            MismatchError,
            match=r"must fit one more into its context of 512\. Start it with vllm serve --max-model-len 513",
        ):
            prefill_checked(engine_at(url), [whole], [0], lambda count: None)
    with pytest.raises(
        MismatchError, match=r"before temperature and truncation.* Use --engine vllm"
    ):
        prefill_checked(engine_at(both[0], TRUNCATED), responses, range(9), lambda count: None)


@pytest.mark.slow
def test_seeds_decide_responses_and_finish_reasons_are_right(url):
    engine = engine_at(url, replace(PLAIN, max_tokens=100))
    counts = []
    once, again = sample(engine, on_finished=counts.append), sample(engine)
    assert [r.response_ids for r in once] == [r.response_ids for r in again]
    for a, b in zip(once, again, strict=True):
        np.testing.assert_allclose(a.logp_rollout_T, b.logp_rollout_T, atol=1e-5)
    assert len({tuple(r.response_ids) for r in once}) > 4
    assert sum(counts) == len(REQUESTS)
    for rollout in once:
        # The model's end of sequence
        assert (rollout.finish_reason == "stop") == (rollout.response_ids[-1] == 1)
        assert rollout.finish_reason == "stop" or len(rollout.response_ids) == 100
    long = sample(engine, [Request([9] * 508, seed=1)])[0]  # a response that has room for 4 tokens
    assert long.finish_reason == "stop" or len(long.response_ids) == 4


def test_without_top_logprobs_no_rank_is_made_up(url):
    rollout = sample(engine_at(url, top_logprobs=0), REQUESTS[:1])[0]
    assert rollout.topk_ids_TK is None and (rollout.rank_rollout_T == -1).all()


def test_settings_are_described_as_far_as_the_server_reports_them(url, raw_url):
    closed, open_ = engine_at(url).describe(), engine_at(raw_url).describe()
    assert (
        closed["dtype"] is None
        and closed["kv_cache_dtype"] == "auto"
        and closed["prefix_caching"] is True
    )
    assert (
        closed["version"] == open_["version"]
        and closed["served_model"] == "tiny"
        and closed["model"] == MODEL
    )
    assert open_["dtype"] == open_["kv_cache_dtype"] == "float32"
    assert (open_["device"], open_["compilation_mode"], open_["enforce_eager"]) == (
        "cpu",
        "NONE",
        True,
    )
    assert (closed["logprobs_mode"], open_["logprobs_mode"]) == (
        "processed_logprobs",
        "raw_logprobs",
    )
    assert closed["max_model_len"] == open_["max_model_len"] == 512
    assert engine_at(url, max_model_len=100).max_model_len == 100


def test_raw_logprobs_are_accepted_only_where_they_are_mu(raw_url, model):
    assert_mu_is_what_was_sampled(model, sample(engine_at(raw_url)), PLAIN)
    for sampling in (replace(PLAIN, temperature=0.7), replace(PLAIN, top_p=0.9)):
        with pytest.raises(
            MismatchError, match=r"raw log-probs.*--logprobs-mode processed_logprobs"
        ):
            engine_at(raw_url, sampling)


def test_a_server_that_comes_back_with_other_settings_is_noticed(fake, raw_url):
    engine = engine_at(fake.url)
    fake.model = raw_url
    with pytest.raises(
        MismatchError, match=r"changed its settings.*processed_logprobs before.*raw_logprobs now"
    ):
        sample(engine)


@pytest.mark.slow
def test_killed_in_the_middle_and_brought_back_the_shard_is_the_same(servers, url, port):
    said, finished = [], []
    requests = [Request(PROMPTS[i % 4], seed=i) for i in range(24)]
    engine = engine_at(
        url, replace(PLAIN, max_tokens=60), concurrency=4, patience=120, say=said.append
    )
    unbroken = sample(engine, requests)

    def kill_once(count: int) -> None:
        finished.append(count)
        if len(finished) == 6:
            servers.kill(port)
            servers.start(port, "processed_logprobs")

    broken = sample(engine, requests, kill_once)
    assert "does not answer" in said[0] and said[-1].endswith("answers again")
    assert sum(finished) == 24
    for a, b in zip(unbroken, broken, strict=True):
        assert a.response_ids == b.response_ids and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logp_rollout_T, b.logp_rollout_T, atol=1e-5)
        np.testing.assert_allclose(a.topk_logp_rollout_TK, b.topk_logp_rollout_TK, atol=1e-4)


def test_what_the_server_cannot_do_fails_with_one_sentence(url):
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("does not return 60 log-probs.*--max-logprobs 60",
         lambda: engine_at(url, top_logprobs=60)),
        ("served_model can be: tiny", lambda: engine_at(url, served_model="other")),
        ("lists no models", lambda: engine_at(f"{url}/docs")),
        ("cannot set enforce_eager", lambda: engine_at(url, enforce_eager=True)),
        ("not contain a user name, password or query",
         lambda: engine_at("http://me:secret@localhost:1")),
        ("is not a server's URL", lambda: engine_at("localhost:8000")),
        ("concurrency=0 is invalid", lambda: engine_at(url, concurrency=0)),
        ("needs --engine-url", lambda: engine_at("")),
        ("not answered.*Connection refused",
         lambda: engine_at(f"http://127.0.0.1:{free_port()}", patience=0.3)),
    ]  # fmt: skip
    for message, start in cases:
        with pytest.raises(MismatchError, match=message) as caught:
            start()
        assert "\n" not in str(caught.value)
    other = EngineSettings(MODEL, PLAIN, K, dtype="bfloat16", extra={"url": url})
    with pytest.raises(UsageError, match="--rollout-dtype bfloat16"):
        create_engine("server", other)
    # It would sample without the adapter
    with pytest.raises(UsageError, match="served_model = NAME"):
        create_engine(
            "server", EngineSettings(MODEL, PLAIN, K, adapter="some/adapter", extra={"url": url})
        )


def test_weights_under_another_name_need_the_served_name(url, tmp_path):
    shutil.copy(f"{MODEL}/config.json", tmp_path)  # a copy of the served model
    settings = EngineSettings(str(tmp_path), PLAIN, K, extra={"url": url})
    with pytest.raises(MismatchError, match=r"does not serve .*, but: tiny.*served_model = NAME"):
        create_engine("server", settings)
    engine = create_engine("server", replace(settings, extra={"url": url, "served_model": "tiny"}))
    assert engine.describe()["model"] == MODEL


class Proxy(FakeServer):
    """Passes honest requests on to a real server, at `model`."""

    def honest(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.model).netloc)
        headers = {"Content-Type": "application/json"}
        connection.request("POST" if body else "GET", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.fixture
def fake(url):
    with closing(Proxy(url)) as fake:
        yield fake


@pytest.mark.slow
def test_no_more_requests_are_under_way_than_allowed(fake):
    engine = engine_at(fake.url, concurrency=3)
    under_way: list[str] = []
    numbers: list[int] = []

    def begin(path: str, headers: Any) -> None:
        if path == COMPLETIONS:
            under_way.append(path)
            numbers.append(len(under_way))

    fake.reply, fake.tamper = begin, lambda answer: under_way.pop()
    sample(engine)
    assert max(numbers) == 3


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
def test_a_request_to_a_busy_server_is_retried(fake, url, status):
    engine = engine_at(fake.url)
    refused: list[str] = []

    def refuse_the_first_five(path: str, headers: Any) -> tuple[int, dict[str, str], bytes] | None:
        if path == COMPLETIONS and len(refused) < 5:
            refused.append(path)
            return status, {"Retry-After": "0"}, b"busy"
        return None

    fake.reply = refuse_the_first_five
    assert [r.response_ids for r in sample(engine)] == [
        r.response_ids for r in sample(engine_at(url))
    ]
    assert len(refused) == 5


def test_a_bad_request_is_not_retried(fake):
    engine = engine_at(fake.url)
    fake.asked.clear()
    with pytest.raises(MismatchError, match=r"rejected a request \(status 400\)"):
        sample(engine, [Request([10**6], seed=0)])
    assert fake.asked.count(COMPLETIONS) == 1


def test_a_server_that_stays_away_is_given_up(fake):
    engine = engine_at(fake.url, patience=0.6)
    fake.reply = lambda path, headers: (500, {}, b'{"error": {"message": "the engine is dead"}}')
    began = time.monotonic()
    with pytest.raises(
        MismatchError, match=r"has not answered for 0\.6 s.*the engine is dead.*--resume"
    ):
        sample(engine)
    assert time.monotonic() - began < 3


def test_an_interrupt_is_heard_at_once(fake):
    engine = engine_at(fake.url)
    hanging = threading.Event()
    fake.reply = lambda path, headers: hanging.wait(20) and None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            sample(engine)
        assert time.monotonic() - began < 2
    finally:
        signal.signal(signal.SIGINT, before)
        hanging.set()


def test_the_key_comes_from_the_environment(fake, monkeypatch):
    fake.reply = lambda path, headers: (
        None if headers["Authorization"] == "Bearer abc" else (401, {}, b"")
    )
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(MismatchError, match="VLLM_API_KEY"):
        engine_at(fake.url)
    monkeypatch.setenv("VLLM_API_KEY", "abc\n")
    assert "abc" not in json.dumps(engine_at(fake.url).describe())


def test_text_is_never_tokenised_again(fake):
    fake.tamper = lambda answer: answer["choices"][0].pop("token_ids")
    with pytest.raises(MismatchError, match=r"does not return token ids.*vLLM 0\.10\.2"):
        engine_at(fake.url)


def test_garbage_is_reported(fake):
    engine = engine_at(fake.url)
    fake.reply = lambda path, headers: (200, {}, b"<html>" if path == COMPLETIONS else b"[]")
    with pytest.raises(MismatchError, match="did not answer in JSON"):
        sample(engine)
    with pytest.raises(MismatchError, match="lists no models"):
        engine_at(fake.url)


PROBE = (
    "probe --engine server --num-prompts 4 --samples-per-prompt 2 --max-tokens 24 "
    "--trainer-dtype float32 --threads 1"
)


def test_probe_end_to_end(url, raw_url, tmp_path, capsys, monkeypatch):
    """Recorded, scored and reported; after losing the last shard, another server is refused and
    the first resumes.
    """
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    folder = tmp_path / "run"
    assert run([*PROBE.split(), "--engine-url", f"{url}/v1", "-o", str(folder)]) == 0
    # Lines break by its length
    assert "dtype not recorded" in " ".join(capsys.readouterr().out.split())
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["pairs"]["mismatch"]["metrics"]["abs_d_max"]["value"] < 1e-4
    manifest = read_manifest(folder / "trace")
    assert (
        manifest["rollout"]["engine"] == "server"
        and manifest["rollout"]["logprobs_mode"] == "processed_logprobs"
    )
    assert Trace.open(folder).num_responses == 8
    for path in folder.rglob("*"):
        assert path.is_dir() or b"a-secret-key" not in path.read_bytes()

    next(iter((folder / "trace").glob("shard-*.parquet"))).unlink()
    assert run([*PROBE.split(), "--engine-url", raw_url, "-o", str(folder), "--resume"]) == 1
    assert "logprobs_mode was processed_logprobs and is raw_logprobs" in capsys.readouterr().err
    assert run([*PROBE.split(), "--engine-url", url, "-o", str(folder), "--resume"]) == 0
    again = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert again["pairs"]["mismatch"]["counts"] == summary["pairs"]["mismatch"]["counts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --engine server", "belong together"),
        ("probe --engine-url http://localhost:1", "needs --engine server"),
        ("probe --engine server", "needs --engine-url"),
    ],
)
def test_contradicting_flags_are_refused(arguments, message, tmp_path, capsys):
    assert run([*arguments.split(), "-o", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
