"""The page as a file: well formed, self-contained, and safe from hostile token text."""

from __future__ import annotations

import itertools
import re
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mismatch_cli.report.explorer import ExplorerView
from mismatch_cli.report.html import render_html, write_html
from mismatch_cli.report.outline import Outline, Section

VOID = {"meta", "img", "source", "br", "link", "input"}


class Page(HTMLParser):
    """Elements in order, with a check that each is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def html(view: Outline) -> str:
    return render_html(view)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_nothing_is_loaded_and_only_scripts_of_the_page_run(html: str, page: Page) -> None:
    assert not page.all("link", "iframe", "object", "embed", "base", "form")
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "srcset", "href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/svg+xml;base64,"))
    css = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in css
    assert "@import" not in css
    policy = [
        meta["content"]
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    scripts = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    assert policy == [
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
    ]
    assert len(scripts) == len(page.all("script")) == html.count("<script")


def test_hostile_text_is_shown_and_never_run(html: str, page: Page) -> None:
    text = "".join(page.text)
    assert (
        text.count(
            "<script>alert(1)</script> </style>{{ 7 * 7 }} $\\frac{1}{2}$ \\x1b[2J "
            "\\u202eevil\\u202c \\x00"
        )
        >= 4
    )
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html
    )
    html.encode("utf-8")


def test_order_of_the_page(page: Page, view: Outline) -> None:
    text = "".join(page.text)
    order = [
        "mismatch-cli report",
        "Rollout engine",
        "3 prompts were skipped",
        "The policies differ by",
        "E |π − μ|",
    ]
    order += [
        "Each dot is a sampled token",
        "Worst tokens",
        "How it was measured",
        "Definitions",
        "Reproduce this report",
    ]
    places = [text.index(part) for part in order[:4]]
    for part in order[4:]:
        places.append(text.index(part, places[-1]))
    assert places == sorted(places)
    assert view.command.strip() in text


def test_accessible(page: Page, view: Outline) -> None:
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    images = page.all("img")
    assert len(images) == 2 * len(view.figures) > 0  # wide and narrow
    assert all(image["alt"] for image in images)
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell["scope"] in ("col", "row", "rowgroup") for cell in page.all("th"))


def test_every_link_has_a_target_and_every_metric_a_definition(page: Page, view: Outline) -> None:
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    links = {attributes["href"] for attributes in page.all("a")}
    assert {(link or "").removeprefix("#") for link in links} <= set(ids)
    text = "".join(page.text)
    for metric in view.definitions():
        assert metric.source in text


def test_links_skip_to_the_answer_and_to_the_explorer_of_a_page_that_has_one(
    page: Page, view: Outline
) -> None:
    def skips(shown: Page) -> list[dict[str, str | None]]:
        return [link for link in shown.all("a") if link.get("class") == "skip"]

    answer, explorer = ({"class": "skip", "href": f"#{name}"} for name in ("answer", "explorer"))
    assert skips(page) == [answer]
    explored = Page(render_html(replace(view, explorer=ExplorerView("Tokens.", ""))))
    assert skips(explored) == [answer, explorer | {"hidden": None}]  # its script shows it


def test_a_picture_for_each_width(page: Page, view: Outline) -> None:
    figure = view.leading_figure
    assert figure is not None
    pictures = [(image["class"], image["src"]) for image in page.all("img")[:2]]
    assert pictures == [("wide", figure.wide.uri), ("narrow", figure.narrow.uri)]


def test_empty_parts_are_left_out(view: Outline) -> None:
    alone = Section("Alone", "Nothing but text.", stays=True)
    bare = replace(view, notes=(), leading=(), parts=(alone,), figures=(), settings=())
    page = Page(render_html(bare))
    assert not page.all("figure", "table", "article")
    assert "Nothing but text." in "".join(page.text)


def test_the_page_is_written_completely_and_below_four_megabytes(
    tmp_path: Path, view: Outline, html: str
) -> None:
    path = tmp_path / "run" / "report.html"
    write_html(path, view)
    assert path.read_text(encoding="utf-8") == html
    assert path.stat().st_size < 4e6
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_only_one_file_says_what_is_safe():
    """Text of models, files and manifests is escaped wherever it is written: no template and no
    page can turn that off.
    """
    report = Path(render_html.__code__.co_filename).parent
    marked = [
        path.name
        for path in sorted(report.rglob("*"))
        if path.suffix in {".py", ".html", ".j2"} and path.name != "html.py"
        if re.search(r"\|\s*safe\b|\bMarkup\(", path.read_text(encoding="utf-8"))
    ]
    assert marked == []
