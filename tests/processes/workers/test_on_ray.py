"""A local cluster of two nodes: every reading command prints the same JSON as one process, even
if a node is lost.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.workers import Workers, on_ray, portions
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.poisoned import PoisonedFolder
from tests.studies.compared import FLOAT32, write_rows

pytestmark = pytest.mark.slow

ROOM = 150 * 2**20  # bytes of each object store
PORT = 23_000 + os.getpid() % 2_000  # for remote drivers
MASK = """
from mismatch_cli.rules.trust_regions import Decision

def trust_region(compared, advantage_T, *, limit: float = 1.01):
    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head with the driver, and another node; one CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.cluster_utils import Cluster

        head = {
            "num_cpus": 1,
            "object_store_memory": ROOM,
            "include_dashboard": False,
            "ray_client_server_port": PORT,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=ROOM)
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(autouse=True)
def in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", 1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, float32_rows: list[dict[str, Any]]) -> Path:
    """Enough shards for two levels of the tree."""
    return write_rows(
        tmp_path_factory.mktemp("ray") / "trace", float32_rows[:72], FLOAT32, shards=18
    )


COMMANDS = {
    "report": [],
    "clipstats": ["--theory", "-a", "dppo-binary-tv", "-a", "mask.py"],
    "diagnose": [],
    "compare": [],
    "gate": ["--limits", "verl", "--limits", "slime"],
    "report --as": ["--as", "all"],
}


@pytest.mark.usefixtures("nodes")
def test_every_reading_command_prints_the_same(trace, perturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mask.py").write_text(MASK)
    for name, flags in COMMANDS.items():
        command, traces = name.split()[0], [trace, perturbed] if name == "compare" else [trace]
        said = []
        for workers in ("1", "ray"):
            cache_flags = ["--cache", "cache"] if workers == "ray" else []
            run(
                [
                    command,
                    *map(str, traces),
                    *flags,
                    "--json",
                    "--quiet",
                    "--workers",
                    workers,
                    *cache_flags,
                ]
            )
            said.append(capsys.readouterr())
        assert said[0].out and not said[0].err, (name, said[0].err)
        assert said[1] == said[0], name
    assert list(Path("cache").iterdir())


@pytest.mark.usefixtures("nodes")
def test_a_damaged_shard_is_the_same_sentence(trace, tmp_path, float32_rows):
    broken = Trace.open(write_rows(tmp_path / "trace", float32_rows[:24], FLOAT32, shards=6))
    content = broken.shards[2].read_bytes()
    broken.shards[2].write_bytes(content[:100] + bytes(2000) + content[2100:])
    with pytest.raises(MismatchError, match=r"shard-00002\.parquet is damaged in row group 0"):
        analyse_mismatch([broken], workers=Workers("ray"))
    skipping = Trace.open(broken.folder, skip_broken=True)
    result = analyse_mismatch([skipping], workers=Workers("ray", skip_broken=True)).to_json()
    alone = analyse_mismatch(
        [Trace.open(broken.folder, skip_broken=True)], workers=Workers(skip_broken=True)
    ).to_json()
    assert list(skipping.broken) == ["shard-00002.parquet"]
    assert json.dumps(result) == json.dumps(alone)


@pytest.mark.usefixtures("nodes")
def test_a_driver_elsewhere_connects_by_address(trace, monkeypatch):
    typed = [
        sys.executable,
        "-m",
        "mismatch_cli",
        "report",
        str(trace),
        "--json",
        "--quiet",
        "--workers",
    ]
    alone, remote = (
        subprocess.check_output([*typed, who]) for who in ("1", f"ray://127.0.0.1:{PORT}")
    )
    assert json.loads(remote) == json.loads(alone)


def test_nodes_import_nothing_from_the_current_directory(nodes, trace, tmp_path):
    """A driver would put its own in front of the path of every worker."""
    folder = PoisonedFolder(tmp_path)
    words = ("clipstats", trace, "--workers", "ray", "--no-plots", "--output", tmp_path / "out")
    done = folder.run(*words, RAY_ADDRESS=nodes.address, RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0 and folder.imported() == [], done.stderr


def test_memory_that_runs_out_says_what_to_change():
    from ray.exceptions import OutOfMemoryError, RayTaskError

    for error in (OutOfMemoryError("killed"), RayTaskError("read", "", MemoryError())):
        with pytest.raises(MismatchError, match="ray start --num-cpus"), on_ray.errors_of_tasks():
            raise error


def test_a_node_that_is_lost_is_not_missed(nodes, trace):
    expected = json.dumps(analyse_mismatch([Trace.open(trace)]).to_json())
    lost = nodes.add_node(num_cpus=1, object_store_memory=ROOM)
    counts: list[int] = []

    def tell(responses: int) -> None:
        counts.append(responses)
        if len(counts) == 4:
            nodes.remove_node(lost, allow_graceful=False)

    result = json.dumps(
        analyse_mismatch([Trace.open(trace)], workers=Workers("ray"), on_responses=tell).to_json()
    )
    assert len(counts) == 18 and sum(counts) == 72
    assert result == expected
