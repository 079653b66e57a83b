"""What surrounds the code: metadata, issue templates and hooks name things that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml

from mismatch_cli.places import guide_pages

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
TEXTS = [path for path in (ROOT / ".github").rglob("*.*") if path.is_file()]


def test_urls_lead_into_one_repository_to_existing_files():
    urls = PROJECT["urls"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= urls.keys()
    for url in urls.values():
        assert urlparse(url).hostname == "github.com" and url.startswith(urls["Homepage"])
        if "/blob/main/" in url:
            assert (ROOT / url.partition("/blob/main/")[2]).is_file(), url
    action = re.search(r"uses: (\S+)/mismatch-cli@", (ROOT / "docs" / "gate.md").read_text(encoding="utf-8"))
    assert action and urls["Homepage"] == f"https://github.com/{action[1]}/mismatch-cli"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_github_shows_the_forms(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and form["labels"]
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(ids) == len(set(ids)) >= 3 and all(re.fullmatch(r"[\w-]+", known) for known in ids)
    for element in form["body"]:
        assert element["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert element["attributes"].get("value" if element["type"] == "markdown" else "label")
    assert any(element.get("validations", {}).get("required") for element in form["body"])


def test_forms_request_what_an_answer_needs():
    said = {path.stem: path.read_text(encoding="utf-8") for path in FORMS}
    assert said.keys() == {"bug", "feature", "question"}
    assert all(word in said["bug"] for word in ("mismatch-cli --version", "manifest.json", "--debug"))
    assert all(word in said["question"] for word in ("mismatch-cli verdict", "mismatch-cli diagnose"))
    named = {page for text in said.values() for page in re.findall(r"mismatch-cli guide ([\w-]+)", text)}
    assert len(named) >= 4 and named <= guide_pages().keys()


def test_hooks_run_the_tools_that_the_lock_pins():
    """In a checkout after `make setup`; hooks use .venv, so that versions are pinned only once."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"ruff-check", "ruff-format", "mypy"}
    assert all(hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in hooks)
    lock = (ROOT / "requirements" / "dev.lock").read_text(encoding="utf-8")
    if not (ROOT / ".venv").exists():
        pytest.skip("There is no .venv here: make setup makes it.")
    for tool in ("ruff", "mypy"):
        done = subprocess.run([ROOT / ".venv" / "bin" / tool, "--version"], capture_output=True, text=True, check=True)
        assert f"{tool}=={done.stdout.split()[1]} " in lock
    for hook in hooks[:2]:
        subprocess.run([*hook["entry"].split(), "mismatch_cli/commands/guide.py"], cwd=ROOT, check=True)
