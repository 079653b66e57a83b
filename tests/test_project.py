"""What surrounds the code agrees with it: metadata, licences, issue templates, hooks, workflows,
the container file.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from datetime import date
from urllib.parse import urlparse

import pytest
import typer
import yaml

from hatch_build import links
from mismatch_cli import __version__
from mismatch_cli.app.cli import build_app
from mismatch_cli.base.places import guide_pages
from tests.distribution import OWNER, REPOSITORY, latest_release
from tests.paths import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
TEXTS = [path for path in (ROOT / ".github").rglob("*.*") if path.is_file()]


def test_urls_lead_into_one_repository_to_existing_files():
    urls = links(REPOSITORY)
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} == urls.keys()
    assert urls["Homepage"] == urls["Source"] == REPOSITORY
    for url in urls.values():
        assert urlparse(url).hostname == "github.com" and url.startswith(REPOSITORY)
        if "/blob/main/" in url:
            assert (ROOT / url.partition("/blob/main/")[2]).is_file(), url


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_github_shows_the_forms(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and form["labels"]
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(ids) == len(set(ids)) >= 3 and all(
        re.fullmatch(r"[\w-]+", identifier) for identifier in ids
    )
    for element in form["body"]:
        assert element["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert element["attributes"].get("value" if element["type"] == "markdown" else "label")
    assert any(element.get("validations", {}).get("required") for element in form["body"])


def test_forms_request_what_an_answer_needs():
    said = {path.stem: path.read_text(encoding="utf-8") for path in FORMS}
    assert said.keys() == {"bug", "feature", "question"}
    assert all(
        word in said["bug"]
        for word in ("mismatch-cli --version", "manifest.json", "MISMATCH_DEBUG=1")
    )
    assert all(
        word in said["question"] for word in ("mismatch-cli verdict", "mismatch-cli diagnose")
    )
    named = {
        page for text in said.values() for page in re.findall(r"mismatch-cli guide ([\w-]+)", text)
    }
    assert len(named) >= 4 and named <= guide_pages().keys()


def test_hooks_run_the_tools_that_the_lock_pins():
    """In a checkout after `make setup`; hooks use .venv, so that versions are pinned only once."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][
        0
    ]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"ruff-check", "ruff-format", "mypy"}
    assert all(
        hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in hooks
    )
    lock = (ROOT / "requirements" / "dev.lock").read_text(encoding="utf-8")
    if not (ROOT / ".venv").exists():
        pytest.skip("There is no .venv here: make setup makes it.")
    for tool in ("ruff", "mypy"):
        done = subprocess.run(
            [ROOT / ".venv" / "bin" / tool, "--version"], capture_output=True, text=True, check=True
        )
        assert f"{tool}=={done.stdout.split()[1]} " in lock
    for hook in hooks[:2]:
        subprocess.run(
            [*hook["entry"].split(), "mismatch_cli/app/commands/guide.py"], cwd=ROOT, check=True
        )


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_changelog_and_citation_agree():
    version, day = latest_release()
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert (version, day) == (cited["version"], cited["date-released"]) and day >= date(
        2026, 11, 24
    )
    ahead = "## [Unreleased]" in text_of("CHANGELOG.md")
    assert ahead or version == __version__
    assert cited["license"] == PROJECT["license"]


def test_the_citation_is_one_by_its_schema():
    """What schema 1.2.0 of the Citation File Format demands of what is used here."""
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert cited["cff-version"] == "1.2.0" and cited["type"] in ("software", "dataset")
    assert cited.keys() <= {
        "abstract",
        "authors",
        "cff-version",
        "commit",
        "contact",
        "date-released",
        "doi",
        "identifiers",
        "keywords",
        "license",
        "license-url",
        "message",
        "preferred-citation",
        "references",
        "repository",
        "repository-artifact",
        "repository-code",
        "title",
        "type",
        "url",
        "version",
    }
    assert isinstance(cited["date-released"], date) and isinstance(cited["version"], str)
    assert len(set(cited["keywords"])) == len(cited["keywords"])
    for work in (cited, *cited["references"]):
        assert work["title"] and work["authors"]
        for author in work["authors"]:
            assert author.keys() == {"name"} or author.keys() == {"family-names", "given-names"}
    assert all(
        work["type"] in ("article", "conference-paper", "software") for work in cited["references"]
    )


def test_the_owner_of_the_repository_is_spelled_in_one_line():
    """Whatever else needs the address of the repository takes it from pyproject.toml.

    In an unpacked sdist, PKG-INFO has the links that were made from it.
    """
    rooms = ("mismatch_cli", "docs", "lab", "sample_data", "requirements", ".github", ".ci")
    suffixes = {".py", ".md", ".toml", ".yml", ".cff", ".txt", ".lock", ".html", ".js", ""}
    files = [
        *ROOT.glob("*"),
        *(path for room in rooms for path in (ROOT / room).rglob("*")),
    ]
    named = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.is_file() and path.suffix in suffixes and path.name != "PKG-INFO"
        for line in path.read_text(encoding="utf-8").splitlines()
        if OWNER.search(line) or ("github.com/" in line and "/mismatch-cli" in line)
    ]
    assert len(named) == 1 and named[0].startswith(f'pyproject.toml: repository = "{REPOSITORY}"')


def test_licences_are_named_for_what_the_core_needs():
    rows = re.findall(r"^\| ([\w-]+) \| \S", text_of("THIRD_PARTY.md"), re.M)
    needed = [re.match(r"[\w-]+", requirement).group() for requirement in PROJECT["dependencies"]]
    assert [row for row in rows if row not in ("what", "package")] == needed
    for name in re.findall(r"`(frameworks/\S+\.\w+)`", text_of("THIRD_PARTY.md")):
        assert (ROOT / "tests" / name).is_file(), name


def test_security_names_flags_and_tests_that_exist():
    said = text_of("SECURITY.md")
    group = typer.main.get_command(build_app())
    commands = [group.get_command(None, name) for name in group.list_commands(None)]
    flags = {
        flag for command in commands for parameter in command.params for flag in parameter.opts
    } | {"--version"}
    named = {
        flag for code in re.findall(r"`([^`]*)`", said) for flag in re.findall(r"--[a-z-]+", code)
    }
    assert len(named) > 5 and named <= flags
    tests = re.findall(r"`(tests/[^`]+)`", said)
    assert len(tests) > 5 and all((ROOT / name).exists() for name in tests)


def test_the_image_is_built_from_what_is_there():
    lines = re.sub(r"\\\n", " ", text_of("Dockerfile"))
    exceptions = {
        line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")
    }
    sources = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", lines, re.M)
        for word in line.split()
    } - {"."}
    assert all((ROOT / name).exists() for name in exceptions | sources) and sources <= exceptions
    needed = {
        "hatch_build.py",
        "pyproject.toml",
        "README.md",
        "mismatch_cli",
        "docs",
        "sample_data",
    }
    assert needed | set(PROJECT["license-files"]) <= exceptions
    python = re.search(r"^PYTHON \?= python(.*)$", text_of("Makefile"), re.M)[1]
    assert set(re.findall(r"^FROM python:([\d.]+)", lines, re.M)) == {python}
    assert re.search(r"^USER 1000$", lines, re.M) and 'ENTRYPOINT ["mismatch-cli"]' in lines


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_needs(path):
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML 1.1 reads `on` as a truth
    assert flow["permissions"] == {"contents": "read"} and flow[True]
    for name, job in flow["jobs"].items():
        assert job["runs-on"] and ("permissions" in job) == (name == "publish")
        for step in job["steps"]:
            # What others name reaches a script as a variable
            assert "${{ github" not in step.get("run", "")
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
            for command in re.findall(r"^(\.ci/\w+|make \w+)", step.get("run", ""), re.M):
                target = command.removeprefix("make ")
                assert (ROOT / target).is_file() or f"\n{target}:" in text_of("Makefile"), command


def test_every_action_is_pinned_by_commit():
    """A tag or a branch can be moved to other code; the comment names the version for people."""
    pages = [*WORKFLOWS, ROOT / "action.yml", *ROOT.glob("*.md"), *(DOCS).rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    # Ours is on docs/gate.md, which says that its reader writes a commit there.
    lines = re.findall(r"^ *-? *uses: (?!.*/mismatch-cli@)(.*)$", text, re.M)
    assert len(lines) > 8
    pins = [re.fullmatch(r"([\w/.-]+)@([0-9a-f]{40})  # (v\d+\.\d+\.\d+)", line) for line in lines]
    assert [line for line, pin in zip(lines, pins, strict=True) if not pin] == []
    commits = {(pin[1], pin[3]): pin[2] for pin in pins}
    # A version is one commit everywhere
    assert all(commits[pin[1], pin[3]] == pin[2] for pin in pins)


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.M))
    used = set(re.findall(r"(?:^ {4}|`)make ([a-z]+)", text_of("README.md"), re.M))
    assert {"probe", "test"} <= used <= targets
