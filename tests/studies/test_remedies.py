"""What `diagnose` proposes fits the trace: every check's advice and every line to type, for traces
of each framework, of the recorder, of `probe`, `rescore` and `train`, with what was typed already.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from mismatch_cli.app.cli import build_app
from mismatch_cli.base import registry
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.diagnose import module, names
from mismatch_cli.diagnosis.evidence import Finding, untested
from mismatch_cli.frameworks import IMPORTERS
from mismatch_cli.limits.causes import framework_remedy
from mismatch_cli.limits.suspects import MODEL
from mismatch_cli.report.pages import page_of
from mismatch_cli.studies.algorithm_support import PAPER, Support
from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, analyse_diagnosis
from mismatch_cli.studies.remedies import clauses_without, framework_of, has_fixed_models
from mismatch_cli.trace.manifest import read_manifest, write_manifest
from mismatch_cli.trace.reader import Trace

SOURCE = bundled("traces") / "bfloat16"
IMPORTED = ("verl", "trl", "prime-rl", "nemo-rl", "slime", "miles", "open-instruct", "plain")
RECORDED = ("TRL", "verl", "SkyRL", "slime", "OpenRLHF")
COUNTS = {"title": "x", "file_count": 1, "left_out": {}, "left_out_first": {}, "noted": {}}
EARLIER, NOW = {"earlier_model": "old"}, {"trainer_model": "now"}
TYPED: tuple[dict[str, str], ...] = ({}, EARLIER, NOW, EARLIER | NOW)


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of trace, with what its manifest says; a dump says nothing of its models."""
    ours = {name: value for name, value in read_manifest(SOURCE).items() if name != "rescored"}
    # A trainer in float32 beside a bfloat16 engine: what `rescore` tests
    ours["trainer"] = ours["trainer"] | {"dtype": "float32"}
    shards = {name: value for name, value in ours.items() if name.startswith("shard")}
    for command in ("probe", "rescore", "train"):
        yield command, ours | {"command": command}
    for name in IMPORTED:
        imported = {"imported": COUNTS | {"format": name}}
        yield f"import-{name}", shards | {"command": "import"} | imported
    for name in RECORDED:
        sides = {"rollout": ours["rollout"], "trainer": ours["trainer"] | {"name": name}}
        imported = {"imported": COUNTS | {"format": "record"}}
        yield f"recorded-{name}", shards | sides | {"command": "record"} | imported


@pytest.fixture(scope="module")
def diagnosed() -> DiagnosisAnalysis:
    return analyse_diagnosis([Trace.open(SOURCE)])


@pytest.fixture
def analyses(diagnosed, tmp_path, monkeypatch) -> list[tuple[str, DiagnosisAnalysis]]:
    """The same diagnosis of each kind of trace, with each flag typed or not."""
    monkeypatch.chdir(tmp_path)
    every = []
    for name, manifest in manifests():
        folder = Path(name) / "trace"
        shutil.copytree(SOURCE, folder)
        write_manifest(folder, read_manifest(SOURCE))
        trace = Trace.open(Path(name))
        trace.__dict__["manifest"] = manifest
        for typed in TYPED:
            missing = [untested(check, "x", needs) for check, needs in needed(typed)]
            # Two of four are explained by nothing
            left = [Finding("unexplained-gap", "found")] * ("trainer_model" in typed)
            diagnosis = replace(diagnosed.diagnosis, findings=(*missing, *left))
            every.append((name, replace(diagnosed, traces=[trace], diagnosis=diagnosis, **typed)))
    return every


def needed(typed: dict[str, str]) -> list[tuple[str, str]]:
    """What checks still need, once these flags are typed."""
    needs = {"stale-weights": "earlier_model", "another-prompt": "trainer_model"}
    return [
        (check, f"--{flag.replace('_', '-')} MODEL")
        for check, flag in needs.items()
        if flag not in typed
    ]


def lines_of(analysis: DiagnosisAnalysis) -> Iterator[str]:
    yield from (line for line, _ in page_of(analysis).next if line)
    yield from (line for suspect in analysis.suspects for line in suspect.test)


def test_every_line_can_be_typed_and_is_not_refused(analyses):
    """It parses, names what exists, repeats nothing, and has the models that its trace lacks."""
    group: Any = typer.main.get_command(build_app())
    context = group.make_context("mismatch-cli", [], resilient_parsing=True)
    commands = set()
    for name, analysis in analyses:
        manifest, typed = analysis.traces[0].manifest, ["diagnose", name, *analysis.typed_models]
        for line in lines_of(analysis):
            _, command, *words = shlex.split(line)
            commands.add(command)
            group.get_command(context, command).make_context(command, list(words))
            assert [command, *words] != typed, line
            if command == "diagnose":
                assert words[:1] == [name] and typed[2:] == words[1 : len(typed) - 1], line
            if command == "bisect":
                assert has_fixed_models(manifest), (name, line)
            if command == "rescore":
                assert has_fixed_models(manifest) or "--trainer-model" in words, (name, line)
            if command == "probe" and "--like" in words:
                assert manifest["command"] == "probe", (name, line)
    assert commands >= {"diagnose", "rescore", "compare", "probe", "bisect"}


def test_a_run_that_trains_is_scored_with_the_weights_of_its_step(analyses):
    """The model on record is where it began: a line with it would measure the training."""
    for name, analysis in analyses:
        lines = [shlex.split(line) for line in lines_of(analysis)]
        scored = [line for line in lines if line[1] == "rescore" and "--trainer-model" in line]
        if name in ("probe", "rescore"):
            continue
        for line in scored:
            assert line[line.index("--trainer-model") + 1] == MODEL, (name, line)


def test_bisect_is_proposed_where_the_models_are_on_record(analyses):
    can = {name for name, analysis in analyses if analysis.can_be_bisected}
    assert can == {"probe", "rescore"}


def test_no_advice_repeats_what_was_typed(analyses):
    """Each check's, for each kind of trace; its answer is said instead."""
    for name, analysis in analyses:
        for check in names():
            finding = Finding(check, "found")
            analysis = replace(analysis, diagnosis=with_stale(analysis))
            advice = analysis.change(finding)
            needs_more = check != "unexplained-gap" or analysis.diagnosis.allowed_by_more
            assert advice.endswith("."), (name, check)
            assert needs_more or "untested check" not in advice
            for flag in analysis.typed_models[::2]:
                assert flag not in advice, (name, check, advice)
        grown = analysis.change(Finding("growth-over-steps", "found"))
        tried = "The earlier checkpoint that you named was tried: it shows no stale weights."
        assert (tried in grown) == bool(analysis.earlier_model)
        assert ("--earlier-model" in grown) != bool(analysis.earlier_model)


def with_stale(analysis: DiagnosisAnalysis) -> Any:
    answer = Finding("stale-weights", "clear")
    others = [f for f in analysis.diagnosis.findings if f.check != "stale-weights"]
    return replace(analysis.diagnosis, findings=(*others, answer))


def test_the_framework_that_made_the_trace_is_named_by_its_own_settings(analyses):
    said = {}
    for name, analysis in analyses:
        said[name] = analysis.change(Finding("temperature", "found"))
    assert "In verl: actor_rollout_ref.rollout.temperature" in said["import-verl"]
    assert said["recorded-verl"] == said["import-verl"]
    assert "generation_kwargs overrides it" in said["recorded-TRL"]
    assert "inference.vllm_extra" in said["import-prime-rl"]
    assert "policy.generation.temperature" in said["import-nemo-rl"]
    assert "--rollout-temperature" in said["recorded-slime"]
    generic = module("temperature").CHANGE
    assert said["probe"] == said["import-plain"] == said["import-open-instruct"] == generic


def test_settings_are_of_checks_that_exist():
    for framework, settings in registry.tables("mismatch_cli.frameworks.NAME.causes").items():
        for check, words in settings.items():
            assert check in names() and not words.endswith("."), (framework, check)
            assert words.startswith("In ") and ": " in words
            assert framework_remedy(framework, check) == words
    assert framework_remedy("nobody", "temperature") == framework_remedy("verl", "nothing") == ""


def test_the_framework_of_a_trace():
    frameworks = {name: framework_of(manifest) for name, manifest in manifests()}
    assert frameworks["import-trl"] == frameworks["recorded-TRL"] == "trl"
    assert frameworks["recorded-SkyRL"] == "skyrl" and frameworks["recorded-OpenRLHF"] == "openrlhf"
    assert frameworks["probe"] == frameworks["train"] == frameworks["import-plain"] == ""
    assert {*registry.names(IMPORTERS)} >= {*IMPORTED}


def test_clauses_go_with_their_flag():
    advice = "Use --earlier-model; reset the cache; vLLM: --logprobs-mode."
    assert clauses_without(advice, ()) == clauses_without(advice, ["--trainer-model"]) == advice
    assert clauses_without(advice, ["--earlier-model"]) == "Reset the cache; vLLM: --logprobs-mode."
    assert clauses_without("Use --earlier-model.", ["--earlier-model"]) == ""


def test_what_an_algorithm_lacks_is_asked_of_whoever_can_record_it(analyses):
    """Top-K columns of a dump come from the dump, those of a probe from a probe like it."""
    from mismatch_cli.rules.algorithms.parse import parse_algorithm

    algorithms = [parse_algorithm("dppo-topk-tv:k=512"), *map(parse_algorithm, PAPER)]
    reasons = {
        name: Support.of(analysis.traces, algorithms).skipped["dppo-topk-tv:k=512"]
        for name, analysis in analyses[:: len(TYPED)]
    }
    assert "MISMATCH_TOP_LOGPROBS=512 mismatch-cli probe --like probe" in reasons["probe"]
    for name in reasons.keys() - {"probe", "rescore", "train"}:
        assert "probe" not in reasons[name] and "import --schema" in reasons[name], name
