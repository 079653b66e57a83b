"""Exported tokens: a spreadsheet runs none of them, and every other reader gets the text back."""

from __future__ import annotations

import csv
import re
import string

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.trace.export import export_tokens

FORMULAS = (
    '=HYPERLINK("http://x.test";"a")',
    "+cmd|'/c calc'!A0",
    "-1+1",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "＝1",
    "'=1",
)
HARMLESS = ("a", " =1", "'s", "''", "1-2", "", "⟨7⟩", 'say "=1", please')


def tables(texts) -> list[pa.Table]:
    numbers = pa.array([-1.5] * len(texts), pa.float32())
    plain = pa.array(texts, pa.string())
    table = pa.table({"logp_rollout": numbers, "token": plain.dictionary_encode(), "note": plain})
    return [table, pa.concat_tables([table, table])]  # a column of several chunks too


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    path = export_tokens(
        tables([*FORMULAS, *HARMLESS, *string.printable]), tmp_path_factory.mktemp("csv"), "csv"
    )
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_text_that_looks_like_a_formula_is_quoted(cells):
    for name in ("token", "note"):
        written = [row[name] for row in cells]
        assert written[: len(FORMULAS)] == [f"'{text}" for text in FORMULAS]
        assert written[len(FORMULAS) :][: len(HARMLESS)] == list(HARMLESS)
        assert not [text for text in written if text[:1] in tuple("=+-@\t\r\n＝＋－＠")]


def test_numbers_stay_numbers(cells):
    assert {row["logp_rollout"] for row in cells} == {"-1.5"}


def test_dropping_one_apostrophe_restores_the_text(cells):
    texts = [*FORMULAS, *HARMLESS, *string.printable]
    assert [
        re.sub(r"^'(?='*[=+\-@\t\r\n＝＋－＠])", "", row["token"]) for row in cells
    ] == texts * 3


def test_parquet_keeps_texts_as_they_are(tmp_path):
    path = export_tokens(tables(FORMULAS), tmp_path, "parquet")
    assert pq.read_table(path).column("token").to_pylist() == list(FORMULAS) * 3
