"""What docs/extending.md adds is put into a checkout, its lines are typed there, and each is
found where it belongs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_cli.base import registry
from tests.docs.pages import DOCS, File, Line, additions, steps
from tests.docs.reader import checkout, missing, save, type_line, varies

pytestmark = pytest.mark.slow
PAGE = DOCS / "extending.md"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """The folder in which the page's lines have been typed; the changed checkout is beside it."""
    folder = tmp_path_factory.mktemp("extending")
    where = checkout(PAGE, folder / "checkout")
    desk = folder / "desk"
    desk.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.setenv("COLUMNS", "100")
        for step in steps(PAGE):
            if isinstance(step, File) and step not in additions(PAGE):
                save(step, desk)
            elif isinstance(step, Line):
                ran = type_line(step.text, checkout=where)
                assert ran.code == step.code, f"{step.text}\n{ran.text}"
                lost = missing(step.shown, ran.text, loosely=varies(step.text))
                assert not lost, f"{step.text}\ndoes not show\n{lost}\nbut\n{ran.text}"
    return desk


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_mask_with_equal_limits_is_binary_tv(desk):
    rows = {
        row["name"]: row["blocked"] for row in read(desk / "two" / "summary.json")["algorithms"]
    }
    equal = rows["two-sided-tv:max_fall=0.15,max_rise=0.15"]
    assert equal == rows["dppo-binary-tv"] != rows["two-sided-tv"]


def test_the_algorithm_is_its_mask_with_its_thresholds(desk):
    row, mask = read(desk / "careful" / "summary.json")["algorithms"]
    assert (
        row["name"] == "careful-tv"
        and row["blocked"] == mask["blocked"]
        and row["lost"] == mask["lost"]
    )


def test_the_engine_says_what_it_is(desk):
    rollout = read(desk / "coarse" / "trace" / "manifest.json")["rollout"]
    assert (rollout["engine"], rollout["mantissa_bits"]) == ("coarse", 4)


def test_the_importer_is_found_by_what_the_dump_holds(desk):
    assert read(desk / "import-toy" / "trace" / "manifest.json")["imported"]["format"] == "toy"


def test_the_check_explains_the_gap(desk):
    findings = read(desk / "import-toy" / "diagnosis" / "summary.json")["findings"]
    (few_decimals,) = [finding for finding in findings if finding["check"] == "few-decimals"]
    assert few_decimals["status"] == "found" and few_decimals["explains"] > 0.9


def test_the_metric_stands_in_the_tables_of_terminal_page_and_json(desk):
    """The terminal's is on the page of the guide."""
    metric = read(desk / "with-metric" / "summary.json")["pairs"]["mismatch"]["metrics"][
        "large_gaps"
    ]
    assert metric["low"] < metric["value"] < metric["high"]
    assert "above 0.1 nats" in (desk / "with-metric" / "report.html").read_text(encoding="utf-8")


def test_the_plot_is_written_and_stands_on_the_page(desk):
    assert (desk / "with-plot" / "plots" / "gap-histogram.png").stat().st_size > 5_000
    assert (desk / "with-plot" / "report.html").read_text(encoding="utf-8").count(
        "<strong>Sizes of the gap.</strong>"
    ) == 1


def test_the_tests_of_masks_algorithms_and_dialects_take_them_in(desk):
    """Run in the checkout: contract, gradient, plain count and second formulas."""
    named = (
        "two-sided or careful or toy or complete or blocked_shares or purity or few_tokens "
        "or shows_its_letters or published_gradient or every_algorithm_is_reinforce"
    )
    files = (
        "rules/trust_regions/test_contract.py",
        "train/test_gradients.py",
        "frameworks/dialects/test_owners.py",
    )
    files += ("metrics/clipping/test_algorithms.py",)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "-k",
            named,
            *(f"tests/{file}" for file in files),
        ],
        cwd=desk.parent / "checkout",
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert int(run.stdout.split(" passed")[0].split()[-1]) > 10


def test_without_the_page_they_are_not_there():
    assert "coarse" not in registry.names("mismatch_cli.models.engines")
