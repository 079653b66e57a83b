"""What the sdist and the wheel are held to before anybody gets them.

python -m tests.distribution FOLDER [TAG]    # with a tag: what may be released under it
"""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import yaml
from packaging.metadata import Metadata
from packaging.version import Version
from trove_classifiers import classifiers

from tests.paths import PACKAGE, ROOT

_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = _PYPROJECT["project"]
# The address of the repository, which is spelled nowhere else
REPOSITORY: str = _PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
OWNER = re.compile(r"\bOWNER\b")  # until the repository has one
CACHES = re.compile(
    r"(^|/)(__pycache__|\.[a-z]+_cache|\.hypothesis|\.venv|\.git|dist|build|[^/]+\.egg-info)/|\.py[cod]$"
)
_RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)


def latest_release() -> tuple[str, date]:
    """The newest version of CHANGELOG.md, and its day."""
    version, day = _RELEASE.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    return version, date.fromisoformat(day)


def sdist_files(sdist: Path) -> set[str]:
    """The files of an sdist, without its outermost folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def metadata_of(sdist: Path, wheel: Path) -> Metadata:
    """The metadata, valid by the specification, known classifiers alone, and the same in both."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        raw = archive.read(name)
    with tarfile.open(sdist) as archive:
        pkg_info = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert pkg_info is not None and pkg_info.read() == raw, (
            "sdist and wheel have different metadata"
        )
    metadata = Metadata.from_email(raw, validate=True)
    unknown = set(metadata.classifiers or ()) - set(classifiers)
    assert not unknown, f"PyPI refuses the classifiers {unknown}"
    return metadata


def check(folder: Path) -> Metadata:
    """One sdist and one wheel of one version, with licences, without caches, with a README whose
    links are whole.
    """
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    metadata = metadata_of(sdist, wheel)
    with zipfile.ZipFile(wheel) as archive:
        packed = {*archive.namelist()}
    names = packed | sdist_files(sdist)
    readmes = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("README.md")}
    assert readmes <= packed, "READMEs of rooms and frameworks that the wheel lacks"
    assert not [name for name in names if CACHES.search(name)]
    info = f"{wheel.name.split('-')[0]}-{metadata.version}.dist-info"
    assert {f"{info}/licenses/{name}" for name in PROJECT["license-files"]} <= names
    assert metadata.description_content_type == "text/markdown"
    relative = re.findall(r"\]\((?!https://|#)([^)]*)\)", metadata.description or "")
    assert not relative, f"links that a package index cannot follow: {relative}"
    return metadata


def may_be_released(metadata: Metadata, tag: str) -> list[str]:
    """What forbids to upload this under that tag."""
    version, day = latest_release()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    reasons = {
        f"the tag is {tag}, the version {metadata.version}: tag v{metadata.version}": tag
        != f"v{metadata.version}",
        f"CHANGELOG.md ends with {version}, not with {metadata.version}": Version(version)
        != metadata.version,
        f"CITATION.cff names {cited['version']} of {cited['date-released']}, CHANGELOG.md "
        f"{version} of {day}": ((cited["version"], cited["date-released"]) != (version, day)),
        "pyproject.toml still names OWNER: docs/maintaining.md, Releasing": (
            OWNER.search(REPOSITORY) is not None
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


if __name__ == "__main__":
    checked = check(Path(sys.argv[1]))
    if forbidden := [reason for tag in sys.argv[2:] for reason in may_be_released(checked, tag)]:
        sys.exit("\n".join(f"dist: {reason}." for reason in forbidden))
    print(f"dist: {checked.name} {checked.version} is sound.")
