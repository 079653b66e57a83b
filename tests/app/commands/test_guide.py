"""`guide`: every page opens, on a terminal without Markdown's marks and without a link that
leads nowhere.
"""

from __future__ import annotations

import re
import sys

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.app.commands.guide import for_reading
from mismatch_cli.app.guide_pages import all_pages, options_page
from mismatch_cli.app.guide_search import search
from tests.docs.pages import DOCS, ROOT, anchors
from tests.terminal import Terminal


def test_without_a_name_it_lists_every_page_with_its_title(capsys):
    assert run(["guide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if "  " in line)
    assert listed.keys() == all_pages().keys() and lines[0].startswith("README ")
    assert listed["normal"] == "Is my number normal?" and all(listed.values())


NAMES = {
    "gate": "gate.md",
    "gate.md": "gate.md",
    "docs/gate.md": "gate.md",
    "json/gate": "json/gate.md",
}
NAMES |= {
    "summary": "json/summary.md",
    "json": "json/README.md",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_gets_the_page_unchanged(capsys, name):
    assert run(["guide", name]) == 0
    assert capsys.readouterr().out == (DOCS / NAMES[name]).read_text(encoding="utf-8")


def test_the_options_of_a_command_are_made_from_its_settings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("options/gate", "docs/options/gate.md"):
        assert run(["guide", name]) == 0
        assert capsys.readouterr().out == options_page("gate")
    assert "| `--limits " in options_page("gate")
    assert run(["guide", "options/gate", "--path"]) == 2
    assert "options/gate.md has no path" in capsys.readouterr().err
    assert run(["guide", "adam_eps"]) == 0
    assert "options/train " in capsys.readouterr().out
    assert not (DOCS / "options").exists()


def test_the_path_of_a_page_and_a_missing_page(capsys):
    assert run(["guide", "gate", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(DOCS / "gate.md")
    assert run(["guide", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(DOCS)
    assert run(["guide", "gaet"]) == 2
    assert "Unknown page 'gaet'. Did you mean gate" in capsys.readouterr().err
    assert run(["guide", "which", "--path"]) == 2
    assert "Unknown page 'which'. Did you mean which-knob?" in capsys.readouterr().err


ANSWERS = {
    "which": "which-knob",
    "notebook polars": "library",
    "equivalent epsilon delta": "choosing-a-threshold",
    "top-p on one side": "which-knob",
    "slack alert": "watch",
    "how do I record": "record",
    "is my number normal?": "normal",
}


def test_other_words_find_the_pages_that_say_most_about_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for words, page in ANSWERS.items():
        assert run(["guide", *words.split()]) == 0
        head, blank, *hits, again, use = capsys.readouterr().out.splitlines()
        assert head == f"No page is called {words}. These say most about it:"
        assert hits[0].split()[0] == page, words
        assert not blank and not again and use.startswith("Use: ") and 1 <= len(hits) <= 5
        assert all(len(hit) < 130 for hit in hits)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("token-budget", "--token-budget N "),
        ("token_budget", "--token-budget N "),
        ("token budget", "--token-budget N "),
        ("--token-budget", "--token-budget N "),
        ("max-tokens", "--max-tokens N "),
        ("--adam-eps", "adam_eps = X "),
        ("no-plots", "--no-plots · Draw no figures."),
    ],
)
def test_the_name_of_a_flag_or_key_finds_the_options_that_define_it_first(
    capsys, monkeypatch, words, line
):
    monkeypatch.setenv("COLUMNS", "200")  # a hit in one line
    assert run(["guide", *words.split()]) == 0
    head, _, *hits, _, _ = capsys.readouterr().out.splitlines()
    assert head.startswith(f"No page is called {words}. ")
    pages = [hit.split()[0] for hit in hits]
    assert pages[0].startswith("options/") and hits[0].split(maxsplit=1)[1].startswith(line)
    # There is room for pages that explain it, and no page is listed twice.
    assert not pages[-1].startswith("options/") and len({*pages}) == len(pages) <= 5


def test_dashes_and_underscores_are_as_good_as_blanks(capsys):
    for words in ("exit code", "exit-codes", "exit_code"):
        assert run(["guide", *words.split()]) == 0
        assert capsys.readouterr().out.splitlines()[2].startswith("README "), words


def test_an_anchor_opens_the_page_at_its_section(capsys):
    text = (DOCS / "formulas.md").read_text(encoding="utf-8")
    for name in ("formulas#intervals", "docs/formulas.md#intervals"):
        assert run(["guide", name]) == 0
        assert capsys.readouterr().out == text[text.index("## Intervals\n") :]
    assert run(["guide", "formulas#interval"]) == 2
    assert "Unknown section 'interval'. Did you mean intervals?" in capsys.readouterr().err


def test_the_anchor_of_every_heading_opens(capsys):
    for name, page in all_pages().items():
        if page.path is not None:
            for anchor in anchors(page.path):
                assert run(["guide", f"{name}#{anchor}"]) == 0, (name, anchor)
                assert capsys.readouterr().out in page.text


def test_a_word_that_no_page_has_is_named_and_the_line_has_the_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["guide", "qwertz", "placeholders"]) == 0
    *hits, absent, _, _ = capsys.readouterr().out.splitlines()[2:]
    assert absent == "On no page: qwertz"
    assert all(re.search("placeholder", hit, re.IGNORECASE) for hit in hits)


def test_rare_words_and_headings_count_more_and_no_page_needs_every_word():
    texts = {
        "a": "# A page\n\nrare, and of common words\n",
        "b": "# Common words\n\ncommon common\n",
        "c": "# Another\n\n## Common\n\n* A [common](b.md) **line** with top-p\n",
    }
    assert search("rare common", texts).hits[0].page == "a"
    assert search("common", texts).hits[0].page == "b"
    hits, absent = search("top_p common nowhere", texts)
    assert hits[0] == ("c", "A common line with top-p") and absent == ["nowhere"]
    assert search("", texts) == search("?", texts) == search("- -", texts) == ([], [])


def test_what_is_read_on_a_terminal_names_only_what_can_be_typed_or_found():
    for name, page in all_pages().items():
        text = for_reading(page.text, page.file)
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        assert not re.search(r"\]\([^)]*\)|^<!--", prose, re.M), name
        assert set(re.findall(r"\(guide ([\w/-]+)\)", prose)) <= all_pages().keys(), name
        sources = re.findall(r"\(([^()]+) in the source code\)", prose)
        assert all((ROOT / source.partition("#")[0]).exists() for source in sources), (
            name,
            sources,
        )
    formulas = for_reading((DOCS / "formulas.md").read_text(encoding="utf-8"), "formulas.md")
    assert "(lab/README.md in the source code)" in formulas


def test_on_a_terminal_a_page_is_formatted_and_no_cell_is_cut():
    terminal = Terminal([sys.executable, "-m", "mismatch_cli", "guide", "gate"], 70, PAGER="cat")
    assert terminal.finish() == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.text).splitlines()
    assert max(map(len, lines)) <= 70 and len(lines) > 100
    text = " ".join(" ".join(lines).split())
    assert "A file of limits" in text and "**" not in text and "## " not in text
    assert not re.search(r"\w…( |$)", text)
