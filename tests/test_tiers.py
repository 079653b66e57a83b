"""The parts cover the suite, and a tier that takes too long fails."""

from __future__ import annotations

import subprocess

import pytest

from tests import tiers


def test_every_folder_of_tests_belongs_to_one_part():
    with_tests = {
        path.relative_to(tiers.ROOT / "tests").parts[0]
        for path in (tiers.ROOT / "tests").glob("*/**/test_*.py")
    }
    named = [folder for folders in tiers.PARTS.values() for folder in folders]
    assert sorted(named) == sorted(set(named))
    assert with_tests <= set(named)
    assert all((tiers.ROOT / path).exists() for part in tiers.PARTS for path in tiers.paths(part))


@pytest.mark.parametrize(
    ("code", "used", "ends_with"), [(0, 10.0, 0), (0, 1e6, 1), (1, 10.0, 1), (2, 1e6, 2)]
)
def test_a_tier_fails_with_its_tests_or_beyond_its_cpu_seconds(
    code, used, ends_with, monkeypatch, capsys
):
    ran: list[list[str]] = []

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess:
        ran.append(line)
        return subprocess.CompletedProcess(line, code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(tiers, "cpu_seconds_of_children", lambda: used)
    assert tiers.main(["push", "-x"]) == ends_with
    assert ran[0][-3:] == ["-m", "not slow", "-x"]
    assert f"{used:.0f} CPU seconds" in capsys.readouterr().out
    assert tiers.main(["rules"]) == code, "a part has no limit"
