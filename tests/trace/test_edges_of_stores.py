"""Which paths are on a store, and which variable of AWS names the place of a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_cli.trace import reader
from mismatch_cli.trace.stores import StorePath, bucket_location, local_or_store

VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
MINIO = {"endpoint_override": "minio:9000", "scheme": "http"}
CEPH = {"endpoint_override": "ceph.example", "scheme": "https"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, MINIO),
        ({"AWS_ENDPOINT_URL_S3": "http://minio:9000"}, MINIO),
        ({"AWS_ENDPOINT_URL_S3": "ceph.example", "AWS_ENDPOINT_URL": "http://minio:9000"}, CEPH),
        ({"AWS_REGION": "eu-west-1"}, {"region": "eu-west-1"}),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, {"region": "eu-west-1"}),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-east-1"}, {"region": "eu-west-1"}),
    ],
)
def test_one_variable_is_enough_and_the_more_specific_one_wins(monkeypatch, variables, expected):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bucket_location("bucket") == expected


@pytest.mark.parametrize("url", ["file:///no/such/run", "file:/no/such/run"])
def test_a_url_of_a_local_file_is_its_path(url):
    place = local_or_store(Path(url))
    assert isinstance(place, Path)
    assert str(place) == "/no/such/run"


@pytest.mark.parametrize("url", ["s3://bucket/run", "hf://datasets/me/run/"])
def test_any_other_url_is_a_path_on_its_store(url):
    place = local_or_store(Path(url))
    assert isinstance(place, StorePath)
    assert str(place) == url.rstrip("/")


def test_what_is_requested_together_comes_in_order(monkeypatch):
    monkeypatch.setattr(reader, "_FOOTERS_AT_A_TIME", 3)
    for count in (0, 1, 3, 8):
        paths = [Path(f"s3/{number}") for number in range(count)]
        names = reader._requested_together(lambda path: path.name, paths)
        assert list(names) == [str(number) for number in range(count)]


def test_paths_within_file_systems():
    from pyarrow.fs import FileSystem

    url = "abfs://box@account.dfs.core.windows.net/runs/a"
    for name, inside in (
        (url, FileSystem.from_uri(url)[1]),
        ("hf://datasets/me/runs/a", "datasets/me/runs/a"),
        ("s3://bucket/a/", "bucket/a"),
        ("gs:/bucket/a", "bucket/a"),
    ):
        place = local_or_store(Path(name))
        assert isinstance(place, StorePath) and place.inside == inside
    assert local_or_store(Path("file:///tmp/x")) == Path("/tmp/x")
    assert local_or_store(Path("runs/a")) == Path("runs/a")


def test_a_path_on_a_store_has_names_like_a_local_one():
    path = StorePath("s3", "bucket/runs") / "a" / Path("trace/shard-00000.parquet")
    assert str(path) == "s3://bucket/runs/a/trace/shard-00000.parquet"
    assert (path.name, path.parts[:3]) == ("shard-00000.parquet", ("s3://", "bucket", "runs"))
    assert path.parent == StorePath("s3", "bucket/runs/a/trace")
    assert path.parent.parent.name == "a" and path.parent < path
