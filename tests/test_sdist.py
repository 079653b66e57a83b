"""The sdist holds all that is tracked, gives the same wheel as the checkout, and its tests run
where it is unpacked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

import pytest

from tests import distribution
from tests.distribution import ROOT, check, may_be_released, sdist_files

pytestmark = pytest.mark.slow

# A few seconds of what needs no engine; some of it reads the files around the package.
QUICK = (
    "rules/test_divergences.py",
    "test_project.py",
    "base/test_extras.py",
    "rules/trust_regions/test_golden.py",
    "trace/test_trace.py",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build("sdist", ROOT, folder)
    build("wheel", unpacked(folder, tmp_path_factory.mktemp("source")), folder)
    return folder


def build(target: str, source: Path, folder: Path) -> None:
    line = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def unpacked(folder: Path, where: Path) -> Path:
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(where, filter="data")
    (source,) = where.iterdir()
    return source


def test_both_are_sound(built):
    metadata = check(built)
    assert metadata.license_expression == "MIT" and metadata.license_files == [
        "LICENSE",
        "THIRD_PARTY.md",
    ]


def test_the_sdist_holds_what_is_tracked(built):
    (sdist,) = built.glob("*.tar.gz")
    held = sdist_files(sdist) - {"PKG-INFO"}
    assert {
        "Makefile",
        ".ci/run",
        ".ci/night",
        "action.yml",
        "requirements/cpu.lock",
        "tests/conftest.py",
        "Dockerfile",
    } <= held
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("This is not a checkout of git.")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    assert tracked - held == set()


def test_the_wheel_is_that_of_the_checkout(built, tmp_path):
    build("wheel", ROOT, tmp_path)
    (one,), (other,) = built.glob("*.whl"), tmp_path.glob("*.whl")
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        assert {i.filename: i.CRC for i in first.infolist()} == {
            i.filename: i.CRC for i in second.infolist()
        }


def test_its_tests_run_where_it_is_unpacked(built, tmp_path):
    source = unpacked(built, tmp_path)
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/{name}" for name in QUICK),
    ]
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST"))
    }
    done = subprocess.run(
        line, cwd=source, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    # It is the unpacked code that they test
    assert "passed" in done.stdout and str(ROOT) not in done.stdout


def test_a_tag_must_be_that_of_the_version(built, monkeypatch):
    metadata = check(built)
    monkeypatch.setattr(
        distribution, "REPOSITORY", distribution.REPOSITORY.replace("OWNER", "somebody")
    )
    assert may_be_released(metadata, f"v{metadata.version}") == []
    assert [why.split(":")[0] for why in may_be_released(metadata, "v9.0.0")] == [
        f"the tag is v9.0.0, the version {metadata.version}"
    ]
    monkeypatch.setattr(distribution, "latest_release", lambda: ("9.0.0", date(2030, 1, 1)))
    monkeypatch.setattr(distribution, "REPOSITORY", "https://github.com/OWNER/mismatch-cli")
    assert len(may_be_released(metadata, f"v{metadata.version}")) == 3
