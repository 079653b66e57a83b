"""The report on a terminal and as a page: its first lines, every width, and hostile names."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.json_form import from_json
from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Outline
from mismatch_cli.report.pages.comparison import page
from mismatch_cli.report.screen import print_view
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.comparison_result import ComparisonResult
from mismatch_cli.trace.reader import Trace
from tests.report.printed import printed
from tests.studies.compared import FLOAT32, Row, first_two, lacking, write_rows

HOSTILE = "<b>[red]$x$\x1b[2J \u202eevil"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def page_of_result(result: Row) -> Outline:
    """The page of a result as `--json` prints it."""
    typed = from_json(ComparisonResult, result)
    return page(SimpleNamespace(result=typed, typed=(Path("one"), Path("other"))))


def on_terminal(result: Row, width: int) -> str:
    return printed(page_of_result(result), width, partial(print_view, full=True))


def runs_of(result: Row) -> list[str]:
    return [side["run"] for side in result["traces"]]


def words(text: str) -> str:
    return " ".join(text.split())


def with_differences(
    result: Row, value: float, marked: int, settings: list[Any] | None = None
) -> Row:
    """Two traces whose differences all have one value."""
    made = copy.deepcopy(first_two(result))
    comparison = made["comparisons"][0]
    comparison |= {"tested": 40, "more_than_noise": marked, "expected_by_chance": 2.0}
    comparison["differs"] = "metrics" if marked > 4 else "noise"
    comparison["settings"] = comparison["settings"] if settings is None else settings
    for metric in comparison["metrics"].values():
        metric["difference"] = {"value": value, "low": None, "high": None, "note": None}
    return made


@pytest.mark.parametrize(
    ("prompts", "pairing"),
    [
        ((128, 24), "24 of {}'s 128 prompts and all 24 of {}'s are in both, not most of each"),
        ((24, 128), "all 24 of {}'s and 24 of {}'s 128 prompts are in both, not most of each"),
        ((128, 30), "24 of {}'s 128 prompts and 24 of {}'s 30 prompts are in both, not most"),
    ],
)
def test_why_traces_with_common_prompts_are_not_paired(result, prompts, pairing):
    made = copy.deepcopy(first_two(result))
    made["comparisons"][0] |= {"pairing": "none", "shared_prompts": 24}
    for trace, number in zip(made["traces"], prompts, strict=True):
        trace["prompts"] = number
    screen = page_of_result(made).screen
    assert screen is not None
    assert screen.subject[1].startswith("not paired: " + pairing.format(*runs_of(made)))


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("count", [2, 3])
def test_no_line_is_wider_than_the_terminal(result, count, width):
    from rich.cells import cell_len

    text = on_terminal(result if count == 3 else first_two(result), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "mean |π − μ|" in words(text) and "libraries." in text and "kernels" in text


def test_the_first_lines_say_how_the_traces_are_paired(result):
    text, (a, b, c) = words(on_terminal(result, 120)), runs_of(result)
    assert f"{b} with {a} on the same tokens: both have the same 96 responses" in text
    assert (
        f"{c} with {a} by prompt: both have responses to the same 24 prompts; 40 responses are "
        "the same" in text
    )
    assert "Paired on the same tokens" in words(on_terminal(first_two(result), 120))
    assert text.index(f"{b} with {a}") < text.index("Differences in settings")


def test_the_headline_says_how_many_would_differ_by_chance(result):
    text = words(on_terminal(first_two(result), 120))
    comparison = result["comparisons"][0]
    assert (
        f"{comparison['more_than_noise']} of {comparison['tested']} metrics differ by more than "
        "noise; about 1 would by chance." in text
    )
    a, b, _ = runs_of(result)
    first = (
        f"Likeliest of the settings that differ: libraries.torch (2.13.0+cpu in {a}, 2.14.0+cpu "
        f"in {b})."
    )
    assert first in text
    several = words(on_terminal(result, 120))
    for row in result["comparisons"]:
        marked = f"{row['more_than_noise']} of {row['tested']} metrics differ by more than noise"
        assert f"{marked}; about {row['expected_by_chance']:.0f} would by chance" in several
    unknown = {
        "setting": "rollout.dtype",
        "first": None,
        "other": "float16",
        "likely": 8,
        "harmless": False,
    }
    made = with_differences(result, 0.1, 20, settings=[unknown | {"why": "", "source": ""}])
    assert "Likeliest of the settings" not in words(on_terminal(made, 120))


def test_if_no_setting_differs_the_hardware_is_named(result):
    text = words(on_terminal(with_differences(result, 0.1, 20, settings=[]), 120))
    assert "No recorded setting that affects a log-probability differs. That leaves" in text
    assert "hardware, the weights themselves" in text
    quiet = words(on_terminal(with_differences(result, 0.1, 1, settings=[]), 120))
    assert "No recorded setting that affects" in quiet and "hardware" not in quiet


def test_nothing_differs_and_too_few_prompts(result):
    nothing = with_differences(result, 0.0, 0)
    nothing["comparisons"][0] |= {"tested": 0, "differs": "untested"}
    assert "No metric differs." in words(on_terminal(nothing, 120))
    few = with_differences(result, 0.1, 0)
    few["comparisons"][0] |= {"tested": 0, "differs": "untested"}
    assert "Too few prompts to tell this from noise." in words(on_terminal(few, 120))


def test_left_out_responses_are_counted(result):
    made = copy.deepcopy(first_two(result))
    made["traces"][0]["compared_responses"] -= 20
    made["comparisons"][0]["on_tokens"]["masked_in_one"] = 7
    text = words(on_terminal(made, 120))
    a, b, c = runs_of(result)
    assert (
        f"{a}: 20 of 96 responses are left out because another trace has no match for them" in text
    )
    assert f"7 tokens are masked in only one of {a} and {b}" in text
    assert "responses to a prompt" not in text
    assert f"{a} has 4 responses to a prompt and {c} 8" in words(on_terminal(result, 120))


def test_values_difference_and_mark_share_a_row(result):
    text = on_terminal(first_two(result), 120)
    (row,) = re.findall(r"^mean Δlog p .*$", text, re.M)[:1]
    assert re.search(r"−0\.0201 \* +−0\.02005 ± 0\.00029 +—", row)
    (largest,) = re.findall(r"^largest \|Δlog p\| .*$", text, re.M)[:1]
    assert "±" not in largest and "*" not in largest
    table = on_terminal(result, 120)
    (row,) = re.findall(r"^mean \|Δlog p\| .*$", table, re.M)[:1]
    assert row.count("*") == 2


def test_the_page_is_complete_and_every_metric_is_defined(result):
    html = render_html(page_of_result(result))
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(set(ids)) == len(ids)
    links = re.findall(r'href="#([^"]+)"', html)
    assert set(links) <= set(ids)
    assert "metric-ess_sequence" in links and "metric-clip_flips" in links
    for tag in ("details", "table", "div", "section", "bdi"):
        assert len(re.findall(f"<{tag}[ >]", html)) == html.count(f"</{tag}>"), tag
    assert "{2} against {0}: every difference".format(*runs_of(result)) in html


def test_names_and_settings_are_escaped(result):
    made = copy.deepcopy(first_two(result))
    made["traces"][1]["folder"] = HOSTILE
    made["comparisons"][0]["settings"][0] |= {
        "setting": HOSTILE,
        "first": HOSTILE,
        "other": [HOSTILE],
    }
    html, text = render_html(page_of_result(made)), on_terminal(made, 100)
    assert "<b>" not in html and not CONTROL.search(html) and not CONTROL.search(text)
    assert "[red]$x$\\x1b[2J" in words(text)


def test_the_page_says_what_is_left_out_of_traces_with_the_same_responses(float32_rows, tmp_path):
    rows = float32_rows[:8]
    whole = write_rows(tmp_path / "whole", rows, FLOAT32)
    unscored = write_rows(tmp_path / "unscored", [lacking(row, 0, 2) for row in rows], FLOAT32)
    lost = sum(len(row["response_ids"][::2]) for row in rows)
    assert page(analyse_comparison(list(map(Trace.open, (whole, unscored))))).notes == (
        f"whole: {lost} tokens are left out: masked here, or not measured in a trace with the same "
        "responses.",
        f"unscored: {lost} tokens have no valid log-probability on one side (see `mismatch-cli "
        "diagnose`).",
    )
    masked = []
    for row in rows:
        mask = [position > 0 for position in range(len(row["response_ids"]))]
        masked.append(row | {"loss_mask": mask})
    analysis = analyse_comparison(
        list(map(Trace.open, (whole, write_rows(tmp_path / "masked", masked, FLOAT32))))
    )
    assert {trace.summary.counts.masked for trace in analysis.result.traces} == {8}
    assert page(analysis).notes[-1] == (
        "8 tokens are masked in only one of whole and masked; they are left out of both."
    )


def test_the_verdict_is_about_the_mean_that_differs(float32_rows, tmp_path):
    """A trainer that calls a tenth of the tokens impossible: these change |π − μ| alone."""
    rows = []
    for row in float32_rows:
        logp = np.array(row["logp_trainer"])
        logp[2::10] = -np.inf
        rows.append(row | {"logp_trainer": logp.tolist()})
    traces = [FLOAT32, write_rows(tmp_path / "truncated", rows, FLOAT32)]
    verdict = page(analyse_comparison(list(map(Trace.open, traces)))).verdict
    assert verdict.words == "THE GAP DIFFERS"
    assert verdict.text.startswith(
        "Mean |π − μ| is more than 1,000 × larger in truncated than in float32."
    )


def test_equal_traces_have_no_difference_and_an_undecided_one_is_not_hidden(result):
    equal, few = with_differences(result, 0.0, 0), with_differences(result, 0.1, 0)
    for made in (equal, few):
        made["comparisons"][0] |= {"tested": 0, "differs": "untested"}
    assert page_of_result(equal).verdict.words == "NO DIFFERENCE"
    assert page_of_result(few).verdict.words == "UNDECIDED"
    both = copy.deepcopy(result)
    for row, differs in zip(both["comparisons"], ("noise", "untested"), strict=True):
        row["differs"] = differs
    verdict = page_of_result(both).verdict
    assert (verdict.words, verdict.status) == ("UNDECIDED", "")


def test_where_a_trace_has_no_gap_the_verdict_says_so(result):
    made = copy.deepcopy(first_two(result))
    made["comparisons"][0]["metrics"]["abs_d_mean"]["factor"] |= {"value": 0.0, "low": None}
    text = page_of_result(made).verdict.text
    assert text.startswith(f"{runs_of(result)[1]} has no gap. ")
