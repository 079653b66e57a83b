"""A search on a terminal, as a page and in figures: its words, every width, and searches that
found little.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.bisect.model_config import ConfigDifference
from mismatch_cli.bisect.model_structure import StructureDifference
from mismatch_cli.bisect.modules import IsolatedModule, ModuleFindings
from mismatch_cli.bisect.pages.bisection import _remarks, _triangle_section
from mismatch_cli.bisect.pages.bisection_models import weights_section
from mismatch_cli.bisect.studies import bisection
from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
from mismatch_cli.bisect.studies.bisection_result import BisectionResult, ComparedModels, Modules
from mismatch_cli.bisect.studies.model_differences import ModelDifferences
from mismatch_cli.bisect.weights import DifferingTensor, TensorGroup, WeightComparison
from mismatch_cli.metrics.estimate import FEW_PROMPTS, NO_SPREAD, Estimate
from mismatch_cli.report.drawing.style import NARROW, WIDE
from mismatch_cli.report.figures import figure_views, plots_of
from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Outline, Table
from mismatch_cli.report.pages import page_of
from mismatch_cli.report.screen import print_view, screen_of
from tests.bisect.searches import HOSTILE, LENGTH, analysis, modules
from tests.report.browser import LAYOUT, Browser
from tests.report.plots.drawing import PAPER, check_texts, drawn

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CASES: dict[str, dict[str, Any]] = {"whole": {}, "no gap": {"gap": 1e-6}, "stopped": {"stages": 1}}
PLOTS = ["waterfall", "triangle", "layer-error"]


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BisectionAnalysis]:
    folder = tmp_path_factory.mktemp("searches")
    return {name: analysis(folder / name.replace(" ", "-"), **how) for name, how in CASES.items()}


@pytest.fixture(scope="module")
def views(searches: dict[str, BisectionAnalysis]) -> dict[str, Outline]:
    return {name: page_of(search) for name, search in searches.items()}


def printed(view: Outline, width: int, *, full: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False, markup=False)
    print_view(view, console, full=full)
    return console.file.getvalue()  # type: ignore[attr-defined]


def causes_of(view: Outline) -> Table:
    return next(section for section in view.sections if section.title == "Causes").tables[0]


def differences(weights: dict[str, Any]) -> ModelDifferences:
    return ModelDifferences(from_json(ComparedModels, weights))


def in_words(text: str) -> str:
    return " ".join(text.split())


def test_the_screen_is_forty_lines_that_fit(views):
    for name, view in views.items():
        typed = [command for command, _ in view.next]
        for width in (60, 80, 120):
            lines = printed(view, width).splitlines()
            assert width == 60 or len(lines) <= 40, name
            assert all(cell_len(line) <= width or line in typed for line in lines), name


def test_the_screen_ranks_causes_by_share_with_their_intervals(searches, views):
    view = views["whole"]
    rows = causes_of(view).rows
    shares = [row.share.value for row in searches["whole"].causes]
    assert [row[0] for row in rows] == [
        "kv_cache_dtype (rollout)",
        "attention",
        "head_dtype (trainer)",
        "bfloat16 itself",
    ]
    assert shares[:3] == sorted(shares[:3], reverse=True)
    assert [float(row[1].partition(" ")[0]) for row in rows] == pytest.approx(
        [100 * share for share in shares], abs=0.05
    )
    (on_screen,) = screen_of(view).tables
    assert re.fullmatch(r"50\.\d ± \d\.\d", rows[0][1])
    assert [row[:2] for row in on_screen.rows] == [row[:2] for row in rows]
    words = in_words(printed(view, 80))
    assert "3 CAUSES FOUND" in words and "shares of all causes overlap" in words
    overlap = searches["whole"].overlap
    assert f"explain together by {100 * overlap:.0f} % of the gap." in words
    assert "mismatch-cli probe --like /runs/probe-model --kv-cache-dtype auto" in words
    assert f"{rows[0][0]} {rows[0][1]} a KV cache" in words
    remarks = dict(view.remarks)
    assert re.fullmatch(
        r"mlp, \+\d+ %; attn_implementation \(trainer\) = eager, \+\d+ %",
        remarks["Makes it larger"],
    )
    assert remarks["To float32"].endswith("the trainer is closer to float32")
    assert remarks["Not tried"] == "batch_invariant"
    assert remarks["Modules"] == (
        "attention 61 % of 0.010 nats that remain after settings; 1 module beyond rounding"
    )


def test_no_gap_is_good_and_a_stopped_search_says_what_is_missing(views):
    assert views["no gap"].verdict.status == "good"
    assert not screen_of(views["no gap"]).tables
    stopped = in_words(printed(views["stopped"], 80))
    assert views["stopped"].verdict.status == "bad"
    assert "NO CAUSE FOUND" not in stopped and "No cause yet: " in stopped
    assert "NOT FINISHED" in stopped
    assert "Not tested: legs, settings, modules. No cause yet: " in stopped
    assert "--resume" in stopped and "# test the rest: nothing is read twice" in stopped
    assert "--budget" not in stopped
    assert "legs, settings, modules: the search was stopped" in stopped


def test_a_trainer_is_a_reference_only_in_float32(searches, monkeypatch):
    """Before its float32 leg is read, no distance is called one from float32, unless its own leg
    is in float32.
    """
    triangle = searches["stopped"].triangle
    assert triangle.rollout_reference is None and triangle.prefill_reference is None
    assert list(triangle.between) == ["engine – trainer, as recorded"]
    whole = searches["whole"].triangle
    assert len(whole.between) == 4 and whole.decode_prefill_is is not None
    in_float32 = {"trainer": {"dtype": "float32"}}
    monkeypatch.setattr(bisection, "read_manifest", lambda _folder: in_float32)
    stopped = replace(searches["stopped"]).triangle
    assert list(stopped.between) == ["engine – trainer, as recorded", "engine – float32"]
    assert stopped.nearer is None and stopped.trainer_reference is None


def test_a_leg_without_numbers_has_no_distance(searches):
    triangle = replace(
        searches["whole"].triangle,
        as_recorded=Estimate(0.04),
        rollout_noise=Estimate(None),
        trainer_noise=Estimate(0.01),
    )
    rows = {name: rest for name, *rest in _triangle_section(triangle).tables[0].rows}
    assert rows["engine: batches – single"] == ["—", "—"]
    assert rows["trainer: micro-batches"] == ["0.0100", "25.0 %"]
    data = replace(searches["whole"])
    vars(data)["triangle"] = replace(triangle, trainer_reference=Estimate(None))
    corners = drawn(plots_of("bisection")["triangle"], data, WIDE).axes[0]
    texts = {text.get_text() for text in corners.texts}
    assert "—" in texts and "0" not in texts


def test_what_could_not_be_decided_is_not_ruled_out(searches):
    """Settings whose share is unknown, or notable without an interval, beside small, certain and
    negative ones, and a cause.
    """
    result = searches["whole"].result
    row = next(row for row in result.tested if row.setting == "attn_implementation")
    shares = {
        "unknown": Estimate(None),
        "few prompts": Estimate(0.15, note=FEW_PROMPTS),
        "small": Estimate(0.04, note=FEW_PROMPTS),
        "clear": Estimate(0.06, 0.03, 0.09),
        "same": Estimate(0.06, note=NO_SPREAD),
        "less": Estimate(-0.01, note=FEW_PROMPTS),
        "kv_cache_dtype": Estimate(None),
    }
    tested = [replace(row, setting=setting, share=share) for setting, share in shares.items()]
    tested.append(replace(row, setting="unknown", share=Estimate(0.0, -0.1, 0.1)))
    remarks = dict(_remarks(replace(result, tested=tested)))
    assert remarks["Undecided"] == "unknown, few prompts"
    assert remarks["Not a cause"] == "small, clear, same, less"


def test_no_tensor_compared_is_not_called_equal():
    text = weights_section(differences({"compared": 0, "unread": ["a: packed"]})).text
    assert text == (
        "No tensor of the engine could be compared with the trainer’s. 1 tensor could not be read."
    )
    text = weights_section(differences({"compared": 1})).text
    assert text == "1 tensor of the engine compared with the trainer’s: all are equal."


def test_models_that_differ_are_the_headline_whatever_their_share(searches, tmp_path):
    """The tensors that one of them lacks, the classes, the numbers and the settings: on the
    screen, on the page and in the JSON; a budget that ended comes after them.
    """
    lacking = [f"model.layers.{n}.self_attn.{kind}_norm.weight" for n in range(4) for kind in "qk"]
    analysis = searches["whole"]
    weights = {
        "compared": 39,
        "unread": [f"{lacking[0]}: the trainer's folder has no such tensor"],
        "architectures": {"rollout": "Qwen3ForCausalLM", "trainer": "LlamaForCausalLM"},
        "lacking": {"rollout": [], "trainer": lacking},
        "config": [
            {"key": "mlp_bias", "rollout": None, "trainer": False, "inner": []},
            {"key": "rms_norm_eps", "rollout": 1e-6, "trainer": 3e-3, "inner": []},
        ],
    }
    stages = {"0": {"status": "not reached", "why": "the 0.1 minutes were over", "seconds": 9.0}}
    for budget, line in ((0.1, "--budget 10"), (30, "--budget 60")):
        search = replace(
            analysis.search,
            weights=weights,
            stages=stages,
            experiments=[],
            flags={"budget": budget},
        )
        view = page_of(replace(analysis, search=search))
        first = view.verdict
        assert (first.words, first.status) == ("THE MODELS DIFFER, NOT FINISHED", "bad")
        assert first.text.startswith(
            "8 tensors of the engine’s model have no counterpart in the trainer’s: "
            "model.layers.*.self_attn.q_norm.weight (4 ×), model.layers.*.self_attn.k_norm.weight "
            "(4 ×) (Qwen3ForCausalLM against LlamaForCausalLM). rms_norm_eps is 1e-06 in the engine"
            " and 0.003 in the trainer. Not tested: bookkeeping and weights, legs, settings, "
            "modules. No cause yet: "
        )
        assert view.next[0][0].endswith(f"--resume {line}")
    result = replace(analysis, search=search).to_json()
    assert len(result["differences"]) == 2 and len(result["not_tested"]) == 4
    assert result["verdict"].startswith(result["differences"][0])
    text = in_words(printed(view, 120, full=True))
    assert f"{lacking[-1]} the trainer’s model" in text and "could not be read" not in text
    assert "architectures Qwen3ForCausalLM LlamaForCausalLM" in text


def test_a_tensor_or_setting_that_differs_is_named_before_the_shares(searches, views):
    """With what the shares say behind it; a setting that moves nothing is of no account."""
    verdict = views["whole"].verdict
    assert verdict.words.startswith("THE MODELS DIFFER, 3 CAUSES FOUND")
    assert verdict.text.startswith("2 tensors differ: ") and "× 1.0100" in verdict.text
    weights = {"config": [{"key": "logits_cap", "rollout": 1, "trainer": 2, "inner": []}]}
    assert list(differences(weights).clauses()) == [
        "logits_cap is 1 in the engine and 2 in the trainer"
    ]
    assert list(differences(weights).clauses({"logits_cap"})) == []
    other = {"architectures": {"rollout": "A", "trainer": "B"}}
    assert list(differences(other).clauses()) == ["The models are of two classes: A against B"]
    extra = {"lacking": {"rollout": ["model.layers.0.self_attn.q_proj.bias"], "trainer": []}}
    assert list(differences(extra).clauses()) == [
        "1 tensor of the trainer’s model has no counterpart in the engine’s: "
        "model.layers.0.self_attn.q_proj.bias"
    ]
    assert list(differences({}).clauses()) == []


def test_the_result_is_read_back_from_its_json(searches):
    for search in searches.values():
        content = {
            key: value
            for key, value in search.to_json().items()
            if key not in ("format", "version")
        }
        assert to_json(from_json(BisectionResult, content)) == content


def test_what_the_stages_keep_is_in_the_result_key_by_key():
    """The state of a search, as its stages write it, and the same parts of the JSON."""
    differing = DifferingTensor("layers.0.up", "scaled", 0.01, 1.0, "× 1.0100")
    tensors = WeightComparison(3, {"layers.1.up": "packed"}, (differing,))
    group = asdict(TensorGroup("layers.0.up", "scaled", ("layers.0.up",)))
    config = [ConfigDifference("rope", {"theta": 1.0}, {"theta": 2.0}, ("theta",)).to_json()]
    for structure in (StructureDifference(), StructureDifference(("A", "B"), (), ("q",))):
        weights = tensors.to_json() | {"groups": [group], "config": config} | structure.to_json()
        written = json.dumps(weights)
        assert json.dumps(to_json(from_json(ComparedModels, json.loads(written)))) == written
    logp = [np.array([-0.5, -1.0], dtype=np.float32)]
    findings = ModuleFindings(
        logp_prefill=logp,
        logp_trainer=[logp[0] - 0.1],
        grafted={"norm": logp, "all": logp},
        alone={"norm": logp},
        isolated={"norm": IsolatedModule("layers.0.norm", "norm")},
        missing=["rotary"],
    )
    stream = {"before": {"inherited": 0.0}, "mlp": {"inherited": 0.1, "added": 0.2}}
    written = json.dumps(findings.to_json() | {"layers": [{"layer": 0} | stream]})
    assert json.dumps(to_json(from_json(Modules, json.loads(written)))) == written


def test_everything_is_printed_in_full(views):
    text = in_words(printed(views["whole"], 120, full=True))
    for said in (
        "Ruled out",
        "makes it larger",
        "× 1.0100",
        "rope_theta",
        "DIFFERENT",
        "The end-of-sequence token",
        "this machine has none",
        "modules 3 38",
    ):
        assert said in text.replace("3 modules done 38", "modules 3 38"), said
    for view in views.values():
        printed(view, 60, full=True)


def test_a_cause_links_to_the_tokens_that_it_moves(searches, views):
    search, view = searches["whole"], views["whole"]
    html = render_html(view)
    causes = causes_of(view)
    for row, link, cause in zip(causes.rows, causes.row_links, search.causes, strict=True):
        section = next(section for section in view.sections if section.anchor == link)
        assert section.title.startswith(row[0])
        assert f'<a href="#{link}">' in html and f'<section id="{link}">' in html
        moved = search.moved(cause, 8)
        assert len(section.excerpts) == len(moved) > 0
        assert [abs(token.after) < abs(token.before) for token in moved] == [True] * len(moved)
        step, prompt, sample = search.key(moved[0].response)
        facts = dict(section.excerpts[0].facts)
        assert (step, facts["prompt"], facts["sample"]) == (0, str(prompt), str(sample))
        assert facts["position"] == f"{moved[0].position} of {LENGTH}"


def test_text_of_tokens_and_names_of_tensors_stay_text(views):
    for name, view in views.items():
        html, terminal = render_html(view), printed(view, 100, full=True)
        assert "<script>alert" not in html and HOSTILE not in html, name
        assert not CONTROL.search(html) and not CONTROL.search(terminal), name
    whole = render_html(views["whole"])
    assert "&lt;script&gt;alert(1)" in whole and "{{ 7 * 7 }}" in whole


def test_places_on_a_page_are_shortened(searches, views):
    assert str(searches["whole"].folder.parent) not in render_html(views["whole"])


def test_the_figures_of_a_search(searches):
    drawn_of = {
        name: [view.name for view in figure_views(search)] for name, search in searches.items()
    }
    assert drawn_of == {"whole": PLOTS, "no gap": PLOTS[1:], "stopped": PLOTS[1:2]}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLOTS)
def test_text_in_figures_is_legible_inside_and_apart(name, searches):
    plot = plots_of(BisectionAnalysis.STUDY)[name]
    assert plot.TITLE.strip() and plot.CAPTION.strip().endswith(".")
    for search in searches.values():
        if plot.needs(search):
            for style in (WIDE, NARROW, PAPER):
                check_texts(drawn(plot, search, style), style)


def test_the_waterfall_ends_at_what_is_left(searches):
    """Shares and the bar for their overlap add up: the last bar ends where all causes together
    do.
    """
    search = searches["whole"]
    taken = sum(row.share.value for row in search.named)
    assert search.overlap == pytest.approx(taken - (1 - search.remaining.value), abs=1e-9)
    # The precision, which is not among them
    assert search.remaining.value == pytest.approx(0.05, abs=0.02)
    texts = [
        text.get_text()
        for text in drawn(plots_of("bisection")["waterfall"], search, WIDE).axes[0].texts
    ]
    assert f"{100 * search.overlap:.0f} %" in texts and texts[0] == "100 %"


def test_many_layers_and_equal_ones_are_drawn(searches, tmp_path):
    search = analysis(tmp_path / "many")
    plot = plots_of("bisection")["layer-error"]
    many = modules(80)
    search = replace(search, search=replace(search.search, modules=many))
    check_texts(drawn(plot, search, NARROW), NARROW)
    # A stream that overflows
    for layer, error in ((3, np.inf), (4, np.nan)):
        many["layers"][layer] |= {"mlp": {"inherited": error, "added": error}}
    axes = drawn(plot, replace(search), WIDE).axes
    stream, _, mlp = (line.get_xdata() for line in (*axes[0].lines, *axes[1].lines))
    # Nothing precedes the first layer, which is equal there.
    assert len(stream) == 3 * 80 - 1 - 2 and not {3, 4} & set(mlp)
    for row in many["layers"]:
        row |= {point: {"inherited": 0.0, "added": 0.0} for point in ("before", "attention", "mlp")}
    equal = replace(search, search=replace(search.search, modules=many))
    assert not plot.needs(equal)  # equal to the bit: nothing to draw


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_the_page(width, browser: Browser, searches, views, tmp_path: Path):
    page = tmp_path / "report.html"
    page.write_text(
        render_html(replace(views["whole"], figures=figure_views(searches["whole"]))),
        encoding="utf-8",
    )
    browser.open(page, width, dark=width == 400)
    layout = browser.run(LAYOUT)
    assert (layout["scroll"], layout["beyond"]) == (width, [])
    browser.run("document.querySelector('#causes tbody a').click()")
    assert browser.run("location.hash") == "#kv_cache_dtype-rollout-tokens-that-it-moves"
