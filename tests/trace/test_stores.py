"""Traces on a local S3 server (moto), sometimes slow or busy, and on an fsspec file system."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.trace import stores
from tests.studies.compared import FLOAT32, write_rows

pytestmark = pytest.mark.slow

BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Store:
    """moto's S3 behind a gate that counts requests and answers some of them with 503."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.busy, self.busy_with = 0, ""  # how often requests for such a file are refused first
        self.requests: Counter[tuple[str, str]] = Counter()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._at_the_gate, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _at_the_gate(self, environ: dict[str, Any], start_response: Any) -> Any:
        from werkzeug.wrappers import Response

        place = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        key = environ["REQUEST_METHOD"], place, environ.get("HTTP_RANGE", "")
        self.requests[key] += 1
        is_refused = self.requests[key] <= self.busy and self.busy_with in place
        answer = Response(BUSY, 503, content_type="application/xml") if is_refused else self._app
        return answer(environ, start_response)

    def close(self) -> None:
        """vLLM looks at every attribute of every module, and flask's refuse that."""
        self._server.shutdown()
        for name in list(sys.modules):
            if name.split(".")[0] in ("flask", "flask_cors", "moto", "werkzeug"):
                del sys.modules[name]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        served = Store()
        patch.setenv("AWS_ENDPOINT_URL", served.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        import boto3

        stores.file_system.cache_clear()
        boto3.client("s3", endpoint_url=served.url, region_name="us-east-1").create_bucket(
            Bucket="bucket"
        )
        yield served
        served.close()
        stores.file_system.cache_clear()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.studies.compared import rows_of

    return write_rows(
        tmp_path_factory.mktemp("stores") / "trace", rows_of(FLOAT32)[:36], FLOAT32, shards=6
    )


@pytest.fixture(scope="module")
def url(store: Store, trace: Path) -> str:
    """The same trace, uploaded to the store file by file."""
    fs = stores.file_system("s3", "bucket")
    for path in trace.iterdir():
        with fs.open_output_stream(f"bucket/runs/a/trace/{path.name}") as file:
            file.write(path.read_bytes())
    return "s3://bucket/runs/a"


@pytest.fixture(autouse=True)
def fresh(store: Store) -> None:
    stores.list_folders_again()
    store.busy, store.busy_with = 0, ""
    store.requests.clear()


def numbers(capsys: pytest.CaptureFixture[str], *typed: str) -> Any:
    assert run([*typed, "--json", "--quiet"]) == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    own = result.keys() - {"traces", "suspects", "skipped"}
    return {name: result[name] for name in own}


READING = (
    ["report"],
    ["clipstats"],
    ["diagnose"],
    ["gate", "--limits", "slime"],
    ["report", "--as", "all"],
)


def test_a_trace_on_a_store_is_read_like_any_other(url, trace, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, *flags in READING:
        assert numbers(capsys, command, url, *flags) == numbers(
            capsys, command, str(trace), *flags
        ), command
    assert run(["compare", url, str(trace), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["shared_responses"] == 36
    assert run(["report", url]) == 0
    assert url in capsys.readouterr().out.replace("\n", "")
    assert list(tmp_path.glob("*/report.html"))


def test_the_library_opens_it(url, trace):
    import mismatch_cli

    remote, local = mismatch_cli.open(url), mismatch_cli.open(trace)
    assert remote.metrics.equals(local.metrics) and remote.tokens.equals(local.tokens)


def test_workers_read_it_and_the_cache_knows_it(url, trace, capsys, tmp_path, store, monkeypatch):
    from mismatch_cli.processes.workers import portions

    monkeypatch.setattr(portions, "PORTION_BYTES", 1)
    expected = numbers(capsys, "report", str(trace))
    cached = ["--workers", "2", "--cache", str(tmp_path / "cache")]
    assert numbers(capsys, "report", url, *cached) == expected
    store.requests.clear()
    assert numbers(capsys, "report", url, "--cache", str(tmp_path / "cache")) == expected
    pages = [key for key in store.requests if "shard-" in key[1] and key[2]]
    assert len(pages) <= 6  # one footer each


def test_it_is_listed_once(url, store, capsys):
    numbers(capsys, "report", url)
    lists = [
        key for key in store.requests if "list-type=2" in key[1] and "runs%2Fa%2Ftrace%2F" in key[1]
    ]
    assert sum(store.requests[key] for key in lists if "max-keys=1&" not in key[1]) == 1, lists


def test_requests_to_a_busy_store_are_retried(url, trace, store, capsys):
    store.busy, store.busy_with = 1, "shard-00002"
    assert numbers(capsys, "report", url) == numbers(capsys, "report", str(trace))
    assert max(store.requests.values()) >= 2


def test_a_store_s_final_error_is_one_sentence(url, store, capsys, monkeypatch):
    assert run(["report", "s3://bucket/runs/nothing"]) == 1
    assert "s3://bucket/runs/nothing does not exist" in capsys.readouterr().err
    monkeypatch.setattr(stores, "ATTEMPTS", 2)
    stores.file_system.cache_clear()
    store.busy = 10**6
    assert run(["report", url, "--skip-broken"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Could not read" in said and "AWS_" in said
    stores.file_system.cache_clear()


def test_a_damaged_shard_on_a_store_is_named_and_skipped(store, trace, capsys):
    fs = stores.file_system("s3", "bucket")
    for path in trace.iterdir():
        content = path.read_bytes()
        if path.name == "shard-00003.parquet":
            content = content[:100] + bytes(2000) + content[2100:]
        with fs.open_output_stream(f"bucket/broken/trace/{path.name}") as file:
            file.write(content)
    assert run(["report", "s3://bucket/broken", "--json"]) == 1
    assert "s3://bucket/broken/trace/shard-00003.parquet is damaged" in capsys.readouterr().err
    result = numbers(capsys, "report", "s3://bucket/broken", "--skip-broken")
    assert list(result["about"]["partial"][0]["broken_shards"]) == ["shard-00003.parquet"]


def test_any_file_system_of_fsspec(trace, capsys):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(f"{trace}/", "/runs/b/", recursive=True)
    assert numbers(capsys, "report", "memory://runs/b") == numbers(capsys, "report", str(trace))
    assert run(["report", "nowhere://runs/b"]) == 1
    assert "pip install fsspec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["report", "--output", "s3://bucket/x"], "guide scale"),
        (["import", "s3://bucket/x"], "Copy it to this machine"),
    ],
)
def test_commands_that_do_not_work_with_a_store(typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(typed) in (1, 2)
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
