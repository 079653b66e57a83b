"""The report agrees with the records: every number, and nothing else."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mismatch_cli.base import numbers
from mismatch_cli.metrics.correlation import series_correlation
from mismatch_cli.metrics.update_table import TRAINING
from mismatch_cli.report.figures import figure_views
from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Outline, Table
from mismatch_cli.report.screen import print_view
from mismatch_cli.report.terminal import print_report
from mismatch_cli.train.pages.training import page as page_of
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.report.browser import LAYOUT, Browser
from tests.train.training_runs import EIGHT, ending, make_run


def tables(view: Outline) -> dict[str, Table]:
    all_tables = [table for section in view.sections for table in section.tables]
    assert len({table.title for table in all_tables}) == len(all_tables)
    assert all(len(row) == len(table.columns) for table in all_tables for row in table.rows)
    return {table.title: table for table in all_tables}


def column(table: Table, title: str) -> list[str]:
    return [row[[each.title for each in table.columns].index(title)] for row in table.rows]


def view_of(runs: list[TrainingRun], reload_seconds: int = 0) -> Outline:
    return page_of(TrainingAnalysis(runs), reload_seconds)


def said(runs: list[TrainingRun]) -> str:
    """The text of the verdict."""
    verdict = view_of(runs).verdict
    assert verdict is not None
    return verdict.text


def drawn(runs: list[TrainingRun]) -> Outline:
    study = TrainingAnalysis.of(runs)
    return replace(page_of(study), figures=figure_views(study))


def printed(view: Outline, width: int = 100) -> str:
    file = io.StringIO()
    print_report(view, Console(file=file, width=width))
    return file.getvalue()


def test_each_of_several_evaluation_sets_has_a_row() -> None:
    def evaluated(run: TrainingRun, names: tuple[str, ...]) -> TrainingRun:
        accuracies = [(0.1, 0.3), (0.4, 0.9), (0.5, 0.2)]
        lines = [
            {
                "step": step,
                "eval_accuracy": sum(pair) / 2,
                "eval": dict(zip(names, pair, strict=False)),
            }
            for step, pair in zip((0, 1, 2), accuracies, strict=True)
        ]
        return replace(run, records=[lines[0], *({**r, **lines[r["step"]]} for r in run.records)])

    several = evaluated(make_run(steps=2), ("aime_2024", "[red]aime25"))
    view = view_of([several])
    table = tables(view)["Accuracy by evaluation set"]
    assert column(table, "set") == ["aime_2024", "[red]aime25"]
    assert [column(table, title) for title in ("before", "final accuracy", "best")] == [
        ["0.100", "0.300"],
        ["0.500", "0.200"],
        ["0.500", "0.900"],
    ]
    assert "Accuracy by evaluation set" in printed(view, 160) and "[red]aime25" in printed(
        view, 160
    )
    one = evaluated(make_run(steps=2), ("aime_2024",))
    assert one.accuracy_by_set == {} and "Accuracy by evaluation set" not in tables(view_of([one]))


def test_the_numbers_of_a_run() -> None:
    run = make_run(steps=60)
    view = view_of([run])
    table, reward = tables(view)["By run"], run.series("reward")
    gap = run.series("mismatch", "abs_dp_mean")
    expected = {
        "steps": "60", "final reward": f"{reward[-10:].mean():.3f}",
        "best reward": f"{max(reward[i : i + 10].mean() for i in range(51)):.3f}",
        "final accuracy": f"{run.records[-1]['eval_accuracy']:.3f}",
        "first |π − μ|": f"{gap[:5].mean():.5f}",
        "final |π − μ|": f"{gap[-10:].mean():.5f}",
        "s per step": f"{np.mean([sum(r['seconds'].values()) for r in run.records]):.2f}",
    }  # fmt: skip
    assert {title: column(table, title) for title in expected} == {
        key: [value] for key, value in expected.items()
    }
    blocked = tables(view)["Blocked tokens and bad updates by run"]
    assert column(blocked, "A < 0, %") == ["0.150"]
    assert column(blocked, "bad updates, % of A < 0") == [
        f"{100 * run.series('bad_over_negative').mean():.4f}"
    ]
    assert column(tables(view)["Trainer by run"], "updates") == ["120"]
    answers = [record["sync"] for record in run.records]
    proven = f"{answers.count('proven')} / {60 - (answers[0] == 'undecidable')}"
    assert column(tables(view)["Trainer by run"], "sync proven") == [proven]
    assert "By algorithm" not in tables(view)


def test_algorithm_and_seed_have_columns_unless_the_name_says_them() -> None:
    titles = [
        [each.title for each in tables(view_of([run]))["By run"].columns]
        for run in (make_run("mask-0.5:max_drop=0"), replace(make_run(), name="mine"))
    ]
    assert titles[0][:2] == ["run", "algorithm"]  # ":" is not part of a folder's name
    assert titles[1][:3] == ["run", "algorithm", "seed"]
    plain = tables(view_of([replace(make_run("a:b=1"), name="a-b=1-seed-0")]))["By run"]
    assert [each.title for each in plain.columns][:2] == ["run", "steps"]


def test_the_verdict_on_one_algorithm() -> None:
    runs = [make_run(seed=seed) for seed in range(3)]
    ends = np.array([run.series("reward")[-10:].mean() for run in runs])
    half = 4.303 * ends.std(ddof=1) / np.sqrt(3)
    verdict = view_of(runs).verdict
    assert (verdict.words, verdict.status) == ("DONE", "good")
    assert (
        f"final reward of {numbers.plus_minus(ends.mean(), ends.mean() - half, ends.mean() + half)}"
        in verdict.text
    )
    assert verdict.text.endswith("(3 seeds).") and said(runs) == verdict.text
    (alone,) = {row.note for row in view_of(runs[:1]).leading}
    assert alone == "one seed: no interval"


def test_an_accuracy_that_a_seed_lacks_is_of_the_others() -> None:
    runs = [make_run(seed=seed, steps=20) for seed in range(3)]
    for record in runs[1].records:
        record["eval_accuracy"] = None
    reward, accuracy = view_of(runs).leading
    assert reward.interval.endswith(", 95 % over 3 seeds")
    assert accuracy.interval.endswith(", 95 % over 2 seeds")
    assert " in 2 of 3 runs (3 seeds)." in said(runs) and " in 2 of" not in said(runs[::2])


def test_algorithms_are_ranked_only_if_the_difference_over_seeds_is_clear() -> None:
    part = {"good": (0.90, 0.92, 0.91), "bad": (0.50, 0.52, 0.53)}
    verdict = view_of(ending(part)).verdict
    assert verdict.words == "good ABOVE bad"
    assert verdict.text == (
        "Reward over steps 1 to 5: 0.910 ± 0.025, against 0.517 ± 0.038 of bad (higher by 0.393 ± "
        "0.029): 95 % over seeds, paired over 3 seeds."
    )
    near = view_of(ending(part | {"near": (0.90, 0.91, 0.89)})).verdict
    assert near.words == "good ABOVE 1 OF 2"
    assert near.text.endswith(
        "Not clearly below it: near. Chance sets 1 pair in 20 of equal algorithms apart; these are "
        "3 pairs."
    )
    overlap = view_of(ending({"a": (0.90, 0.6, 0.91), "b": (0.50, 0.72, 0.51)})).verdict
    assert (overlap.words, overlap.status) == ("NO CLEAR DIFFERENCE", "")
    assert overlap.text.endswith("Difference: 0.23 ± 0.75, paired over 3 seeds.")
    lucky = view_of(ending({"a": (0.9,), "b": (0.5,)})).verdict
    assert lucky.words == "NO CLEAR DIFFERENCE" and "One seed each" in lucky.text
    many = view_of(
        ending({name: (0.1 * place,) for place, name in enumerate("abcdefgh", start=1)})
    ).verdict
    assert "of 8 algorithms: from 0.100 (a) to 0.800 (h)" in many.text


def test_runs_of_different_length_are_compared_over_the_same_steps() -> None:
    """Each run rises by the same line: what differs is the length only."""

    def rising(name: str, seed: int, steps: int) -> TrainingRun:
        records = [{"step": n, "reward": n / 100 + seed / 1000} for n in range(1, steps + 1)]
        return TrainingRun(f"{name}-{seed}", name, seed, records, {"steps": 40})

    runs = [rising("a", seed, 40) for seed in range(3)] + [rising("b", seed, 20) for seed in (0, 1)]
    view = view_of(runs)
    assert view.notes[-1] == (
        "PARTIAL: 5 runs are compared over steps 1 to 20, which they share; b-0 and b-1 end there."
    )
    assert view.verdict.text == (
        "Rewards over steps 11 to 20: a 0.1560 ± 0.0025, b 0.1555 ± 0.0064. Difference: 0 (the same "
        "for all seeds: no interval), paired over 2 seeds."
    )
    assert column(tables(view)["By run"], "reward") == ["0.155", "0.156", "0.157", "0.155", "0.156"]
    alone = said([runs[2], rising("a", 0, 20)])
    assert alone == "a has a reward of 0.156 ± 0.013 over steps 11 to 20 (2 seeds) so far."
    shown = tables(view)["By algorithm"]
    assert "reward" in [each.title for each in shown.columns] and "steps 11 to 20" in shown.note
    apart = view_of(
        [rising("a", 0, 3), replace(rising("b", 0, 9), records=[{"step": 9, "reward": 1}])]
    )
    assert apart.verdict.text == "The runs share no step."
    assert "PARTIAL: 2 runs share no step, so they are not compared." in apart.notes


def test_rewards_are_ranked_only_within_a_task() -> None:
    def trained(ends: dict[str, tuple[float, ...]], **config: object) -> list[TrainingRun]:
        return ending(ends, dataset="set", **config)

    high, low = {"a": (0.90, 0.92, 0.91)}, {"a": (0.50, 0.52, 0.53)}
    replay = view_of(
        trained(high, model="m", lora=True) + trained(low, model="m", lora=False)
    ).verdict
    assert replay.words == "a · LoRA ABOVE a · no LoRA"
    models = view_of(trained(high, model="m") + trained(low, model="n"))
    assert models.verdict.words == "NO CLEAR DIFFERENCE"
    assert "within each of 2 models or problems; none is above another" in models.verdict.text
    graded = view_of(trained(high, reward="a.py:f") + trained(low, reward="b.py:f")).notes
    assert graded[-1].startswith("The runs use different problems or rewards, so their rewards")
    assert "not comparable" in models.notes[-1] and ("Settings", "m; n") in models.about
    within = high | {"b": (0.70, 0.72, 0.73)}
    settings = column(tables(models)["By run"], "setting")
    assert settings == ["m"] * 3 + ["n"] * 3
    assert (
        view_of(trained(within, model="m") + trained(low, model="n")).verdict.words
        == "a · m ABOVE b · m"
    )


def test_rewards_below_0_are_above_an_algorithm_without_one() -> None:
    runs = ending({"unknown": (None,), "low": (-0.5,), "high": (-0.2,)})
    rows = column(tables(view_of(runs))["By algorithm"], "algorithm")
    assert rows == ["high", "low", "unknown"]


def test_a_lost_reward_is_a_collapse(eight: list[TrainingRun]) -> None:
    fallen = TrainingRun(
        "a", "a", 0, [{"step": step, "reward": 0.9 if step < 20 else 0.1} for step in range(1, 41)]
    )
    verdict = view_of([fallen]).verdict
    assert (verdict.words, verdict.status) == ("COLLAPSED", "bad")
    assert "Reward fell below half of its best: a." in verdict.text
    beside = view_of([fallen, make_run()]).verdict
    assert beside.status == "mixed" and beside.text.endswith(
        "Reward fell below half of its best: a."
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_fits(width: int, eight: list[TrainingRun]) -> None:
    long = [make_run("my_mask_with_a_long_name:max_tv=0.123", seed) for seed in range(3)]
    models = [
        make_run(name, steps=20 + n, model=f"a-model-with-quite-a-long-name-{n}")
        for n in range(6)
        for name in EIGHT[:2]
    ]
    for runs in (
        eight,
        long,
        models,
        [make_run()],
        [make_run("pg-is", seed) for seed in range(14)],
    ):
        file = io.StringIO()
        print_view(view_of(runs), Console(file=file, width=width))
        lines = file.getvalue().splitlines()
        assert len(lines) <= (40 if width >= 80 else 50) and max(map(len, lines)) <= width
        if width >= 80 and runs is eight:
            assert all(f"\n{name} " in file.getvalue() for name in EIGHT)  # none is cut


def test_the_screen_excludes_undecidable_syncs_and_says_what_never_happened() -> None:
    run = make_run("pg-is")
    records = [record | {"sync": "proven", "bad_over_negative": 0.0} for record in run.records]
    view = view_of([replace(run, records=[records[0] | {"sync": "undecidable"}, *records[1:]])])
    remarks = dict(view.remarks)
    assert remarks["Weight sync"] == "proven at 59 of 59 checks"
    assert remarks["Bad updates"] == "none" and remarks["Blocked"] == "nothing at any step"
    assert column(tables(view)["Trainer by run"], "sync proven") == ["59 / 59"]
    text = next(section.text for section in view.sections if section.title.startswith("Bad"))
    assert text.startswith("There were no bad updates.")


def test_a_run_that_ends_no_higher_than_it_began_is_not_called_good() -> None:
    run = make_run(steps=20)
    ends = (run.records[-1]["eval_accuracy"] + sign * 0.1 for sign in (-1, 1))
    began = [
        replace(run, records=[{"step": 0, "eval_accuracy": end}, *run.records]) for end in ends
    ]
    statuses = [view_of([each]).verdict.status for each in began]
    assert statuses == ["good", "mixed"]
    assert view_of(ending({"a": (0.5,)})).verdict.status == "mixed"


def test_what_to_type_next(tmp_path: Path) -> None:
    runs = [
        replace(make_run(seed=seed, steps=2), folder=tmp_path / "a b" / f"run-{seed}")
        for seed in range(2)
    ]
    for step in (2, 10):
        (tmp_path / "a b" / "run-0" / "traces" / f"step-{step}").mkdir(parents=True)
    for name in ("run-0", "run-1"):
        (tmp_path / "a b" / name).mkdir(exist_ok=True)
        (tmp_path / "a b" / name / "metrics.jsonl").touch()
    lines = [line for line, _ in view_of(runs).next]
    assert lines == [
        f"mismatch-cli clipstats '{tmp_path}/a b/run-0/traces/step-10'",
        f"mismatch-cli report '{tmp_path}/a b' --full",
    ]
    # A third run beside them, of which nothing was said
    (tmp_path / "a b" / "run-2").mkdir()
    (tmp_path / "a b" / "run-2" / "metrics.jsonl").touch()
    line, _ = view_of(runs).next[-1]
    assert line == f"mismatch-cli report '{tmp_path}/a b/run-0' '{tmp_path}/a b/run-1' --full"


def test_many_algorithms_have_no_numbers_beside_the_headline(eight: list[TrainingRun]) -> None:
    view = view_of(eight)
    assert not view.leading and ("Steps", "45 to 60") in view.about


def test_correlations_are_those_of_the_metric() -> None:
    run = make_run("relax-low", steps=60)
    table = tables(view_of([run]))["Bad updates and reward over the steps"]
    bad, reward = run.series("bad_over_negative"), run.series("reward")
    expected = [series_correlation(bad, reward), series_correlation(bad[1:], np.diff(reward))]
    assert column(table, "steps") == ["60", "59"]
    shown = [float(value.replace("−", "-")) for value in column(table, "correlation")]
    np.testing.assert_allclose(shown, [estimate.value for estimate in expected], rtol=0.01)
    short = tables(view_of([make_run(steps=2)]))["Bad updates and reward over the steps"]
    assert set(column(short, "95 % interval")) == {"fewer than 3 steps"}
    good = replace(run, records=[record | {"bad_over_negative": 0.0} for record in run.records])
    assert "Bad updates and reward over the steps" not in tables(view_of([good]))


def test_time_by_phase_and_the_share_of_recomputing() -> None:
    run = make_run("dppo-binary-tv-recompute", steps=5)
    seconds = {
        key: np.mean([r["seconds"][key] for r in run.records]) for key in run.records[0]["seconds"]
    }
    share = seconds["recompute"] / sum(seconds.values())
    view = view_of([run, make_run(steps=5)])
    table = tables(view)["Seconds per step, by phase"]
    assert column(table, "recompute") == [f"{seconds['recompute']:.3f} ({100 * share:.0f} %)", "—"]
    text = next(section.text for section in view.sections if section.title == "Where the time goes")
    assert f"takes {100 * share:.0f} % of a step" in text
    skipped = replace(
        run, records=[{"seconds": {"sample": 1.0, "recompute": 2e-5, "evaluate": 3.0, "save": 1.0}}]
    )
    view = view_of([skipped])
    (row,) = tables(view)["Seconds per step, by phase"].rows
    assert row[1:] == ("5.00", "1.00 (20 %)", "3.00 (60 %)", "1.00 (20 %)")
    assert "Recomputing" not in str(view.sections)


def test_an_evaluation_before_the_first_step_is_not_a_step() -> None:
    run = make_run(steps=20)
    before = replace(run, records=[{"step": 0, "eval_accuracy": 0.1}, *run.records])
    assert tables(view_of([before])) == tables(view_of([run]))
    assert "accuracy" in said([run]) and ", from 0.100 before training" in said([before])
    unfinished = replace(
        before, records=before.records[:1], config=dict(run.config) | {"steps": 20}
    )
    assert "0.100" not in said([unfinished])


def test_coinciding_lines_are_named() -> None:
    run, other = make_run("pg-is"), make_run("pg-tis")
    twin = replace(run, algorithm="pg-is-twin", name="pg-is-twin-seed-0")
    assert view_of([run, other, twin]).notes == (
        "pg-is and pg-is-twin made the same updates at every step: their lines coincide.",
    )
    assert view_of([run, other]).notes == ()


def test_the_page_of_a_running_training_reloads() -> None:
    going = view_of([make_run(steps=2)], reload_seconds=60)
    assert '<meta http-equiv="refresh" content="60">' in render_html(going)
    assert "reloads itself" in going.notes[-1]
    assert 'http-equiv="refresh"' not in render_html(view_of([make_run(steps=2)]))


def test_a_running_run_says_its_step() -> None:
    going, done = make_run(steps=20), make_run("pg-is", steps=60)
    going = replace(going, config={**going.config, "steps": 1200})
    view = view_of([going, done])
    assert view.notes == (
        "PARTIAL: dppo-binary-tv-seed-0 is at step 20 of 1,200.",
        "PARTIAL: 2 runs are compared over steps 1 to 20, which they share; dppo-binary-tv-seed-0 "
        "ends there.",
    )
    assert view.verdict.text.startswith("Rewards over steps 11 to 20: ")
    alone = view_of([going]).verdict
    assert (alone.words, alone.status) == ("NOT DONE", "mixed") and alone.text.endswith(" so far.")
    assert [row.name for row in view.leading][:2] == [
        "reward so far · dppo-binary-tv",
        "reward, steps 11 to 20 · pg-is",
    ]
    other = replace(done, config={**done.config, "model": "another"})
    assert "not comparable" in view_of([done, other]).notes[-1]
    assert "6 of 6 runs" in view_of([going] * 6).notes[0]


def test_settings_that_differ_are_shown_by_run() -> None:
    view = view_of(
        [make_run("pg-is", 0, learning_rate=0.1), make_run("pg-is", 7, learning_rate=0.2)]
    )
    settings = dict(view.settings)
    assert ("temperature", "1.0") in settings["All runs"] and ("attn", "—") in settings["All runs"]
    assert settings["pg-is-seed-0"] == (("learning rate", "0.1"),)  # the table of runs has the seed
    assert settings["pg-is-seed-7"] == (("learning rate", "0.2"),)
    assert view_of([make_run("pg-is", 0), make_run("pg-is", 7)]).settings[1:] == ()
    assert ("Rollout engine", "vllm · bfloat16") in view.about and (
        "Trainer",
        "float32",
    ) in view.about
    fp8 = view_of([make_run(kv_cache_dtype="fp8")])
    assert ("Rollout engine", "vllm · bfloat16 · KV cache fp8") in fp8.about


def test_every_number_is_defined(eight: list[TrainingRun]) -> None:
    defined = view_of(eight).definitions()
    assert set(TRAINING.values()) <= set(defined)


NOTHING = {"step": 1, "reward": None, "mismatch": None, "seconds": {}}


@pytest.mark.parametrize(
    "records", [[{}], [{"step": 1}], [NOTHING], [{"reward": float("nan")}] * 3]
)
def test_almost_nothing_is_recorded(records: list[dict[str, object]]) -> None:
    runs = [TrainingRun("a", "a", None, records)]
    view = drawn(runs)
    assert view.verdict.text == "No reward was recorded."
    assert tables(view).keys() == {"By run", "Trainer by run"}
    assert "nan" not in printed(view)
    render_html(view)


def test_hostile_names_are_data() -> None:
    name = "<script>alert(1)</script>[red]\x1b[31m"
    runs = [make_run(name, seed, steps=4, model=name) for seed in range(2)]
    view = drawn(runs)
    page, text = render_html(view), printed(view)
    assert "<script>alert" not in page and "\x1b" not in page
    assert "\x1b" not in text and "[red]" in text
    assert "\\x1b[31m" in text


def test_the_command_that_reproduces_the_report() -> None:
    runs = [replace(make_run(steps=2), folder=Path("runs/a b"))]
    assert view_of(runs).command == "mismatch-cli report 'runs/a b'"


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out_in_a_browser(tmp_path: Path, browser: Browser, width: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        render_html(drawn([make_run(name, seed, 12) for name in EIGHT[:3] for seed in range(2)]))
    )
    browser.open(page, width)
    layout = browser.run(LAYOUT)
    assert (layout["scroll"], layout["beyond"]) == (width, [])
