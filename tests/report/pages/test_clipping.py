"""The report of a result agrees with its JSON: every number, every reason, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mismatch_cli.metrics.clipping.sweeps import BELOW_SWEEP
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.outline import Outline, Table
from tests.paths import DOCS
from tests.report.pages.clipping_result import (
    NAMES,
    equal_weights_result,
    nothing_judged,
    page_of,
    sample_result,
)

PAGE = DOCS / "json" / "clipstats.md"


JACCARD = "Jaccard index of pairs of algorithms"
NAMED = [part for name in NAMES for part in ("--algorithm", name)]


def tables(view: Outline) -> dict[str, Table]:
    all_tables = [table for section in view.sections for table in section.tables]
    assert len({table.title for table in all_tables}) == len(all_tables)
    assert all(len(row) == len(table.columns) for table in all_tables for row in table.rows)
    return {table.title: table for table in all_tables}


def column(table: Table, title: str) -> list[str]:
    place = [each.title for each in table.columns].index(title)
    return [row[place] for row in table.rows]


def shown(cell: str) -> float | None:
    """The value of a cell, without its interval, mark and thousands separators."""
    text = re.sub(r"°| [±†[].*", "", cell).removesuffix(" %").replace("−", "-").replace(",", "")
    return None if text == "—" else float(text)


def all_text(view: Outline) -> str:
    parts = [view.headline, *view.notes, *(text for fact in view.about for text in fact)]
    for section in view.sections:
        parts += [section.title, section.text]
        parts += [text for table in section.tables for text in (table.title, table.note)]
        parts += [column.title for table in section.tables for column in table.columns]
    return "\n".join(parts)


def assert_shows(cells: list[str], estimates: list[Any], scale: float = 1.0) -> None:
    for cell, estimate in zip(cells, estimates, strict=True):
        value = estimate["value"] if isinstance(estimate, dict) else estimate
        assert shown(cell) == (None if value is None else pytest.approx(scale * value, rel=0.06))


def test_every_algorithm_with_its_numbers_the_compared_ones_first_then_by_strictness():
    result = sample_result()
    table = tables(page_of(result))["Blocked tokens and lost update"]
    marks, names = zip(*((cell[:2], cell[2:]) for cell in column(table, "algorithm")), strict=True)
    assert sorted(names) == sorted(NAMES)
    assert set(names[:2]) == {"grpo-clip-higher", "dppo-binary-tv"}
    assert marks == ("▸ ", "▸ ", *["  "] * (len(NAMES) - 2)) and "▸ compared" in table.note
    rows = {row["name"]: row for row in result["algorithms"]}
    ordered = [rows[name] for name in names]
    blocked = [row["blocked"]["all"]["value"] for row in ordered]
    assert blocked[2:] == sorted(blocked[2:], reverse=True)
    assert column(table, "anchor") == [row["anchor"] for row in ordered]
    for title, key in (("blocked, %", "all"), ("A > 0, %", "positive"), ("A < 0, %", "negative")):
        assert_shows(column(table, title), [row["blocked"][key] for row in ordered], 100)
    assert_shows(column(table, "lost update, %"), [row["lost"]["all"] for row in ordered], 100)
    assert_shows(
        column(table, "responses hit, %"), [row["responses_touched"] for row in ordered], 100
    )


def test_recomputed_anchors_follow_the_rollout_in_any_order_asked_for():
    view = page_of(
        sample_result(("minirl", "dppo-binary-tv-recompute", "grpo-clip-higher", "dppo-binary-tv"))
    )
    names = column(tables(view)["Mean probability and entropy"], "algorithm")
    assert names == ["grpo-clip-higher", "minirl", "dppo-binary-tv", "dppo-binary-tv-recompute"]


def test_rows_whose_weight_is_not_r_are_marked_and_explained():
    view = page_of(sample_result())
    table = tables(view)["Blocked tokens and lost update"]
    marked = {
        row[0][2:]
        for row, cell in zip(table.rows, column(table, "lost update, %"), strict=True)
        if "†" in cell
    }
    assert marked == {"ppo-icepop", "gspo"}
    text = view.sections[0].text
    assert "†" in text and "Σ |A|" in text and "not a gradient norm" in text
    assert "†" not in all_text(page_of(sample_result(("dppo-binary-tv",)))) + str(table.note)


def test_named_algorithms_are_shown_in_detail_else_the_compared_pair():
    result = sample_result()
    pair = {"grpo-clip-higher", "dppo-binary-tv"}

    def detailed_masks(view: Outline, end: str) -> list[str]:
        return [title.removesuffix(end) for title in tables(view) if title.endswith(end)]

    view = page_of(result)
    assert {*detailed_masks(view, ", by μ")} == pair
    assert {*detailed_masks(view, ", A < 0: most frequently blocked tokens")} == pair
    assert "of any other: clipstats -a NAME, or --json" in view.sections[0].text
    named = page_of({**result, "arguments": NAMED})
    assert {*detailed_masks(named, ", by μ")} == {*NAMES} - {
        "pg-is",
        "pg-tis",
    }  # which block nothing
    assert "clipstats -a" not in named.sections[0].text


def test_details_come_before_what_covers_all_algorithms():
    titles = list(tables(page_of(sample_result())))
    overviews = ("Same strictness", "Breakdown of the lost update")
    details = titles.index("dppo-binary-tv, by μ")
    assert titles[0] == "Blocked tokens and lost update"  # the compared pair first
    assert all(details < titles.index(title) for title in overviews)
    tokens = "dppo-binary-tv, A < 0: most frequently blocked tokens"
    assert titles.index(tokens) < titles.index("Mean probability and entropy")


def test_the_lost_update_by_mask_and_by_cap():
    result = sample_result()
    table = tables(page_of(result))["Breakdown of the lost update"]
    rows = {row["name"]: row for row in result["algorithms"]}
    assert "pg-is" not in column(table, "algorithm")  # it loses nothing
    ordered = [rows[name] for name in column(table, "algorithm")]
    assert_shows(column(table, "by the mask, %"), [row["lost"]["masked"] for row in ordered], 100)
    for row, cell in zip(ordered, column(table, "by the cap, %"), strict=True):
        assert (cell == "—") == (not row["weighs_by_ratio"])


def test_headline_and_leading_numbers_compare_the_papers_pair():
    result = sample_result()
    view = page_of(result)
    rows = {row["name"]: row for row in result["algorithms"]}
    leading = {row.name or row.metric.key: shown(row.value) for row in view.leading}
    for name in ("grpo-clip-higher", "dppo-binary-tv"):
        assert name in view.headline
        assert leading[f"blocked · {name}"] == pytest.approx(
            100 * rows[name]["blocked"]["all"]["value"], rel=0.01
        )
        assert leading[f"lost · {name}"] == pytest.approx(
            100 * rows[name]["lost"]["all"]["value"], rel=0.01
        )
    bad = result["bad_updates"]
    assert leading["over_negative"] == pytest.approx(100 * bad["over_negative"]["value"], rel=0.01)
    assert "tokens with A < 0" in view.headline and "A ≠ 0" in view.headline
    assert "bad updates: pushed down although they already lost" in view.headline


def test_the_algorithms_asked_for_lead():
    result = sample_result()
    result["compared"] = ["mask-0.5", "ipo"]
    leading = [row.name for row in page_of(result).leading]
    assert leading[:2] == ["blocked · mask-0.5", "blocked · ipo"]


def test_the_compared_pair_leads():
    headline = page_of(sample_result(("ipo", "gspo", "mask-0.5"))).headline
    assert (
        headline.startswith("ipo loses") and "gspo loses" in headline and "mask-0.5" not in headline
    )
    assert "Σ |A|" in headline  # gspo does not weigh by r


def test_the_headline_distinguishes_a_cap_from_a_mask():
    assert page_of(sample_result(("pg-tis",))).headline.startswith(
        "pg-tis blocks no token, but its cap takes "
    )


@pytest.mark.parametrize("by", ["μ", "position"])
def test_breakdowns_show_their_bins(by):
    result = sample_result(("dppo-binary-tv",))
    (row,) = result["algorithms"]
    table = tables(page_of(result))[f"dppo-binary-tv, by {by}"]
    parts = row["by_mu" if by == "μ" else "by_position"]
    assert_shows(column(table, "tokens"), [part["tokens"] for part in parts])
    assert_shows(column(table, "A < 0, %"), [part["blocked"]["negative"] for part in parts], 100)


def test_by_step():
    result = sample_result(("dppo-binary-tv",))
    table = tables(page_of(result))["dppo-binary-tv, by step"]
    parts = result["algorithms"][0]["by_step"]
    assert column(table, "step") == [str(part["first"]) for part in parts]
    assert_shows(column(table, "blocked, %"), [part["blocked"]["all"] for part in parts], 100)
    assert_shows(column(table, "mean μ of blocked"), [part["mu_blocked"] for part in parts])


def test_pairs_carry_the_counts_of_both_directions():
    result = sample_result()
    overlap = result["overlap"]
    place = {name: number for number, name in enumerate(overlap["names"])}
    table = tables(page_of(result))["Pairs of algorithms, in tokens"]
    assert table.rows[0][:2] == ("grpo-clip-higher", "dppo-binary-tv")
    for first, second, both, only_first, only_second, jaccard in table.rows:
        i, j = place[first], place[second]
        assert shown(both) == overlap["both"][i][j]
        assert shown(only_first) == overlap["only_row"][i][j]
        assert shown(only_second) == overlap["only_row"][j][i]
        assert_shows([jaccard], [overlap["jaccard"][i][j]])
    assert table.terminal_rows == 10


def test_the_jaccard_table_leaves_out_algorithms_that_block_nothing():
    result = sample_result()
    columns = [each.title for each in tables(page_of(result))[JACCARD].columns[1:]]
    assert sorted(columns) == ["dppo-binary-tv", "grpo-clip-higher"]  # the compared pair
    result["arguments"] = NAMED
    table = tables(page_of(result))[JACCARD]
    names = [row[0] for row in table.rows]
    assert [each.title for each in table.columns[1:]] == names
    assert set(NAMES) - set(names) == {"pg-is", "pg-tis"}
    overlap = result["overlap"]
    place = {name: number for number, name in enumerate(overlap["names"])}
    for row in table.rows:
        assert_shows(
            list(row[1:]), [overlap["jaccard"][place[row[0]]][place[name]] for name in names]
        )


def test_blocked_tokens_with_rate_and_over_representation():
    result = sample_result()
    row = next(row for row in result["algorithms"] if row["name"] == "grpo-clip-higher")
    for sign, title in (("positive", "A > 0"), ("negative", "A < 0")):
        for number, token in enumerate(row["blocked_tokens"][sign]):
            token["lift"] = number / 4 if number % 2 else None
        table = tables(page_of(result))[
            f"grpo-clip-higher, {title}: most frequently blocked tokens"
        ]
        tokens = row["blocked_tokens"][sign][: len(table.rows)]
        assert len(tokens) == 25
        assert column(table, "token") == [f"“{token['text']}”" for token in tokens]
        assert_shows(column(table, "rate, %"), [token["rate"] for token in tokens], 100)
        assert column(table, "blocked") == [
            f"{token['blocked']:,} of {token['tokens']:,}" for token in tokens
        ]
        for key, head in (
            ("mu", "μ"),
            ("pi", "π"),
            ("ratio", "r"),
        ):
            assert_shows(column(table, head), [token[key] for token in tokens])
        by_lift = zip(column(table, "× over-represented"), tokens, strict=True)
        beyond = [(cell, token["lift"]) for cell, token in by_lift if token["lift"] is not None]
        cells, lifts = zip(*beyond, strict=True)
        assert_shows(cells, lifts)
        assert column(table, "× over-represented").count("—") == len(tokens) - len(beyond) > 0
        assert table.terminal_rows == 10
    named = tables(page_of({**result, "arguments": NAMED}))
    assert named["gspo, A > 0: most frequently blocked tokens"].terminal_rows == 0


def test_bad_updates_name_both_denominators():
    result = sample_result()
    bad, page_tables = result["bad_updates"], tables(page_of(result))
    for title, rows in (("By the threshold δ", bad["sweep"]), ("By step, δ = 0.5", bad["by_step"])):
        assert_shows(column(page_tables[title], "bad updates"), [row["bad"] for row in rows])
        for key, head in (
            ("over_tokens", "of tokens with A ≠ 0, %"),
            ("over_negative", "of tokens with A < 0, %"),
        ):
            assert_shows(column(page_tables[title], head), [row[key] for row in rows], 100)
    correlations = page_tables["Over the steps"]
    assert shown(column(correlations, "value")[0]) == pytest.approx(
        bad["correlations"][0]["value"], rel=0.01
    )
    assert column(correlations, "95 % interval")[1] == "fewer than 10 steps: no interval"
    (section,) = [section for section in page_of(result).sections if section.title == "Bad updates"]
    assert "tokens with A ≠ 0" in section.text and "of those with A < 0" in section.text
    assert "training trace" not in section.text


def test_equal_thresholds_and_sweeps():
    result = sample_result()
    page_tables = tables(page_of(result))
    cells = column(page_tables["Equal thresholds"], "equal δ or ε")
    below = [row["threshold"]["note"] == BELOW_SWEEP for row in result["equivalents"]]
    assert [cell == "<\u00a00.0039" for cell in cells] == below and any(below)
    within = [cell.replace("<\u00a00.0039", "—") for cell in cells]
    assert_shows(within, [row["threshold"] for row in result["equivalents"]])
    families = column(page_tables["Equal thresholds"], "mask family")
    assert families[:5] == ["binary TV", "binary KL", "top-K TV", "top-K KL", "ratio clip"]
    sweep = page_tables["Ratio clip, by ε"]
    assert_shows(
        column(sweep, "threshold"), [row["threshold"] for row in result["sweeps"]["ratio_clip"]]
    )
    assert_shows(
        column(sweep, "blocked, %"), [row["blocked"] for row in result["sweeps"]["ratio_clip"]], 100
    )
    caps = [row["cap"] for row in result["sweeps"]["cap"]]
    assert_shows(column(page_tables["Cap of the weight, by C"], "C"), caps)


def test_approximations_are_compared_with_the_full_divergence():
    result = sample_result()
    table = tables(page_of(result))["Approximations of TV and KL"]
    rows = result["approximation"]["rows"]
    assert column(table, "K") == ["binary", "1", "5", "10", "20"] * 2
    for head, key, scale in (
        ("mean", "mean", 1),
        ("bias", "bias", 1),
        ("wrong mask, %", "wrong_mask", 100),
    ):
        assert_shows(column(table, head), [row[key] for row in rows], scale)


def test_a_rank_correlation_close_to_1_does_not_read_1():
    result = sample_result()
    result["approximation"]["rows"][0]["rank_correlation"] = {
        "value": 0.99985,
        "low": 0.9998,
        "high": 0.9999,
    }
    table = tables(page_of(result))["Approximations of TV and KL"]
    assert column(table, "rank correlation")[0] == "0.99985"


def test_without_the_full_divergence_bounds_and_how_to_record_it():
    result = sample_result()
    result["approximation"]["truth"] = None
    for row in result["approximation"]["rows"]:
        row |= {key: {"value": None} for key in ("bias", "rank_correlation", "wrong_mask")}
    rows = result["approximation"]["bracket"]
    rows[1]["decided"] = {"value": 0.99996}
    view = page_of(result)
    page_tables = tables(view)
    assert [column.title for column in page_tables["Approximations of TV and KL"].columns][
        -1
    ] == "mean"
    bracket = page_tables["Bounds on the mean full TV"]
    assert column(bracket, "from K") == ["binary", "1", "5", "10", "20"]
    for head, key in (("at least", "low"), ("at most", "high")):
        assert_shows(column(bracket, head), [row[key] for row in rows])
    assert shown(column(bracket, "decided, %")[1]) == pytest.approx(99.996)  # not 100
    assert "--full-divergence" in all_text(view)


def test_theory_is_shown_only_on_request_with_its_limits():
    result = sample_result(theory=True)
    bounds = [estimate for name, estimate in result["theory"].items() if name.endswith("_bound")]
    for bound in bounds:
        bound["value"] = 1.0
    view = page_of(result)
    (section,) = [section for section in view.sections if section.title == "Theory"]
    assert (
        "not a certificate" in section.text
        and "full TV" in section.text
        and "Vacuous" not in section.text
    )
    result["theory"]["quadratic_bound"]["value"] = -80.0
    (section,) = [section for section in page_of(result).sections if section.title == "Theory"]
    assert "Vacuous here" in section.text and "the quadratic bound" in section.text
    values = {row.metric.key: row.value for row in section.groups[0].rows}
    assert shown(values["longest"]) == result["theory"]["longest"] > 1
    assert_shows([values["tv_max"]], [result["theory"]["tv_max"]])
    assert view.command.endswith(" --theory")
    bare = page_of(sample_result(theory=False))
    assert (
        "Theory" not in [section.title for section in bare.sections]
        and "--theory" not in bare.command
    )


def test_without_advantages_everything_is_hypothetical():
    view = page_of(sample_result(advantages=False, steps=1))
    text = all_text(view)
    assert "would block" in view.headline
    assert "MISMATCH_ANSWER_FIELD" in text
    heads = {column.title for table in tables(view).values() for column in table.columns}
    assert {"if A > 0, %", "if A < 0, %", "lost if A > 0, %"} <= heads
    assert not {"blocked, %", "A > 0, %", "A < 0, %"} & {
        c.title for c in view.sections[0].tables[0].columns
    }
    assert "tokens with an advantage (" not in text
    assert {row.metric.key for row in view.leading} == {"blocked"}


def test_left_out_tokens_and_skipped_algorithms_are_named():
    result = equal_weights_result()
    notes = "\n".join(page_of(result).notes)
    assert "minirl, ppo: not applicable: the trainer has the weights that sampled" in notes
    assert "dppo-topk-tv: needs the top 20 log-probs, but the trace has none" in notes
    for key, words in (
        ("masked", "tokens are masked"),
        ("not_measured", "tokens lack a column"),
        ("zero_advantage", "tokens have an advantage of 0"),
    ):
        result["counts"][key] = 9216
        assert f"9,216 {words}" in "\n".join(page_of(result).notes)


def test_nothing_blocked_and_no_steps():
    view = page_of(sample_result(steps=1, gap=False))
    assert view.headline.startswith(
        "grpo-clip-higher blocks no token. dppo-binary-tv blocks no token."
    )
    titles = [section.title for section in view.sections]
    assert "Overlap" not in titles and "Which tokens are blocked" not in titles
    assert not [title for title in tables(view) if "by μ" in title or "by step" in title.lower()]
    assert "training trace with several steps" in all_text(view)


def test_one_algorithm_has_no_pairs():
    view = page_of(sample_result(("dppo-binary-tv",)))
    assert "Overlap" not in [section.title for section in view.sections]
    assert [row.name for row in view.leading][:2] == [
        "blocked · dppo-binary-tv",
        "lost · dppo-binary-tv",
    ]


def test_no_algorithm_at_all():
    result = nothing_judged()
    result["skipped"] = [{"algorithm": "minirl", "reason": "nobody recomputed π′"}]
    view = page_of(result)
    assert view.verdict and view.verdict.text == "No algorithm can be applied to this trace."
    assert "minirl: nobody recomputed π′." in view.notes


def test_every_metric_has_a_key_that_the_documentation_names():
    documented = set(re.findall(r"`([a-z_]+)`", PAGE.read_text(encoding="utf-8")))
    assert set(CLIPPING) <= documented


def test_columns_with_numbers_link_to_their_definition():
    view = page_of(sample_result())
    named = {
        "tokens",
        "with A < 0",
        "steps",
        "μ",
        "δ",
        "step",
        "position",
        "K",
        "threshold δ",
        "threshold",
        "C",
    }
    for table in tables(view).values():
        for each in table.columns[1:]:
            linked = (
                each.metric
                or each.kind != "number"
                or each.title in named
                or each.title == "95 % interval"
            )
            assert linked, (table.title, each.title)
    assert set(view.definitions()) <= set(CLIPPING.values())


def test_a_trace_without_updates_and_one_with_an_infinite_ratio_say_so():
    result = sample_result(("grpo-clip-higher", "dppo-binary-tv"))
    for row in result["algorithms"]:
        row["lost"]["all"] = {
            "value": None,
            "low": None,
            "high": None,
            "note": "a ratio is larger than a float can hold",
        }
    headline = page_of(result).headline
    assert "loses is unknown: a ratio is larger than a float can hold." in headline
    result["counts"]["tokens"] = 0
    verdict = page_of(result).verdict
    assert verdict and verdict.text.startswith("Every advantage is 0")
