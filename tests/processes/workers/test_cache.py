"""The cache: nothing is read twice, and no result is mistaken for another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.workers import Workers, portions
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.algorithm_support import PAPER
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.diagnosis import analyse_diagnosis
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.studies.tokens import token_tables
from mismatch_cli.studies.translation import Translation
from mismatch_cli.trace import reader
from mismatch_cli.trace.reader import Trace
from tests.metrics.clipping.world import world
from tests.studies.written import write_trace

STUDIES: dict[str, Any] = {
    "report": lambda traces, workers: analyse_mismatch(traces, 5, workers),
    "clipstats": lambda traces, workers: analyse_clipping(
        traces, [TABLE[name] for name in PAPER], workers=workers
    ),
    "diagnose": lambda traces, workers: analyse_diagnosis(traces, workers=workers),
    "compare": lambda traces, workers: analyse_comparison([*traces, *traces], workers=workers),
    "dialects": lambda traces, workers: Translation.of(traces, "all", workers),
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards of which a row group was flattened."""
    shards: list[str] = []
    of_group = reader.RowGroup

    def counted(path: Path, *parts: Any) -> Any:
        shards.append(path.name)
        return of_group(path, *parts)

    monkeypatch.setattr(reader, "RowGroup", counted)
    return shards


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Five shards, in two full portions and a partial one."""
    return write_trace(tmp_path / "whole", *(world(seed, 12) for seed in range(5))).folder


def part_of(whole: Path, folder: Path, shards: int) -> Trace:
    """The first shards of a trace, as while it grew."""
    later = [path.name for path in Trace.open(whole).shards[shards:]]
    shutil.copytree(whole, folder, ignore=lambda *_: later, dirs_exist_ok=True)
    return Trace.open(folder)


@pytest.fixture
def two_in_a_portion(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [path.stat().st_size for path in Trace.open(whole).shards]
    monkeypatch.setattr(portions, "PORTION_BYTES", max(sizes) + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("two_in_a_portion")
@pytest.mark.parametrize("name", STUDIES)
def test_a_growing_trace_is_read_once(name, whole, tmp_path, read):
    study, workers = STUDIES[name], Workers(cache=tmp_path / "cache")
    for shards in (1, 2, 4, 5):
        trace = part_of(whole, tmp_path / "growing", shards)
        expected = json.dumps(study([trace], Workers()).to_json())
        read.clear()
        assert json.dumps(study([trace], workers).to_json()) == expected, shards
        if name != "compare":  # a comparison changes with the trace
            new = {1: ["00000"], 2: ["00001"], 4: ["00002", "00003"], 5: ["00004"]}[shards]
            assert read == [f"shard-{number}.parquet" for number in new]
        read.clear()
        assert json.dumps(study([trace], workers).to_json()) == expected
        assert read == []


@pytest.mark.slow
@pytest.mark.usefixtures("two_in_a_portion")
def test_changed_shards_are_read_again(whole, tmp_path, read, monkeypatch):
    trace, workers = Trace.open(whole), Workers(cache=tmp_path / "cache")

    def reread() -> list[str]:
        read.clear()
        result = json.dumps(analyse_mismatch([Trace.open(whole)], 5, workers).to_json())
        shards = list(read)
        assert result == json.dumps(analyse_mismatch([Trace.open(whole)], 5).to_json())
        return sorted(name[6:11] for name in shards)

    assert reread() == ["00000", "00001", "00002", "00003", "00004"]
    assert reread() == []
    other = write_trace(tmp_path / "other", world(9, 12)).shards[0]
    shutil.copy(other, trace.shards[3])
    assert reread() == ["00002", "00003"]
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert len(reread()) == 5
    monkeypatch.setattr(
        "mismatch_cli.processes.workers.cache.program_hash", lambda: "another version"
    )
    assert len(reread()) == 5


@pytest.mark.slow
def test_the_results_of_a_lost_driver_are_reused(whole, tmp_path, read, monkeypatch):
    monkeypatch.setattr(portions, "PORTION_BYTES", 1)
    expected = json.dumps(analyse_mismatch([Trace.open(whole)], 5).to_json())

    def lost(_responses: int) -> None:
        if len(read) == 4:
            raise KeyboardInterrupt

    read.clear()
    with pytest.raises(KeyboardInterrupt):
        analyse_mismatch(
            [Trace.open(whole)], 5, Workers(cache=tmp_path / "cache"), on_responses=lost
        )
    read.clear()
    assert (
        json.dumps(
            analyse_mismatch([Trace.open(whole)], 5, Workers(cache=tmp_path / "cache")).to_json()
        )
        == expected
    )
    assert read == ["shard-00003.parquet", "shard-00004.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_skipping_a_broken_shard_equals_removing_it(name, whole, tmp_path):
    """Damage that only reading finds, not the footer; the token page and the export leave the
    shard out too.
    """
    path = Trace.open(whole).shards[2]
    part_of(whole, tmp_path / "without", 5)
    (tmp_path / "without" / path.name).unlink()
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(2000) + content[2100:])
    result = STUDIES[name](
        [Trace.open(whole, skip_broken=True)], Workers(skip_broken=True)
    ).to_json()
    expected = STUDIES[name]([Trace.open(tmp_path / "without")], Workers()).to_json()
    changed = {"traces", "about", "suspects"}
    if name == "compare":
        assert result["comparisons"] == expected["comparisons"]
        assert [side["summary"] for side in result["traces"]] == [
            side["summary"] for side in expected["traces"]
        ]
    else:
        assert {k: v for k, v in result.items() if k not in changed} == {
            k: v for k, v in expected.items() if k not in changed
        }
    assert sum(map(len, token_tables([Trace.open(whole, skip_broken=True)]))) == sum(
        map(len, token_tables([Trace.open(tmp_path / "without")]))
    )


def test_the_content_of_a_mask_file_identifies_it(whole, tmp_path):
    workers, mask = Workers(cache=tmp_path / "cache"), tmp_path / "mask.py"
    blocked = []
    for limit in ("1.0", "1e10"):
        mask.write_text(
            "from mismatch_cli import Decision\n"
            "def trust_region(compared, advantage_T, *, limit: float = 2.0):\n"
            f"    return Decision(compared.ratio_T <= {limit}, compared.ratio_less_1_T)\n"
        )
        trust_regions.find.cache_clear()  # as in a new process
        result = analyse_clipping(
            [Trace.open(whole)], [parse_algorithm(str(mask))], workers=workers
        ).to_json()
        blocked.append(result["algorithms"][0]["blocked"]["all"]["value"])
    assert blocked[0] > 0 and blocked[1] == 0


def test_a_trace_with_only_broken_shards_is_refused(whole):
    for path in Trace.open(whole).shards:
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes(2000) + content[2100:])
    for study in STUDIES.values():
        with pytest.raises(MismatchError, match="has no readable shard"):
            study([Trace.open(whole, skip_broken=True)], Workers(skip_broken=True))


def test_a_skipped_shard_is_not_forgotten(whole, tmp_path):
    """The cache of a run that skips a broken shard does not serve a run that does not, or the
    repaired shard.
    """
    trace, cache = Trace.open(whole), tmp_path / "cache"
    path = trace.shards[1]
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(2000) + content[2100:])
    for _ in range(2):
        skipping = Trace.open(whole, skip_broken=True)
        result = analyse_mismatch([skipping], 5, Workers(cache=cache, skip_broken=True)).to_json()
        assert list(result["about"]["partial"][0]["broken_shards"]) == ["shard-00001.parquet"]
        assert result["pairs"]["total"]["counts"]["responses"] == 48
    with pytest.raises(reader.DamagedShard):
        analyse_mismatch([Trace.open(whole)], 5, Workers(cache=cache))
    path.write_bytes(content)
    result = analyse_mismatch([Trace.open(whole)], 5, Workers(cache=cache)).to_json()
    assert result["pairs"]["total"]["counts"]["responses"] == 60 and not result["about"]["partial"]
