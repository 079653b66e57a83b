"""The page in a real browser: on a phone and a desktop, in light and dark, with and without its
script.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.report.drawing.style import DARK, LIGHT, Theme
from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Column, Outline, Profile, Section, Table, Verdict
from tests.golden.lines import TRACES
from tests.paths import ROOT
from tests.report.browser import CONTRASTS, LAYOUT, Browser

NUMBERS = (
    "0.5 %",
    "—",
    "−3.1e−5 ± 2e−6",
    "12,300",
    "28 ×",
    "< 1e−7",
    "0.06 – 0.1",
    "",
    "0",
    ".25",
    "1e3",
    "7",
    "−2",
)
ASCENDING = [
    "−2",
    "−3.1e−5 ± 2e−6",
    "0",
    "< 1e−7",
    "0.06 – 0.1",
    ".25",
    "0.5 %",
    "7",
    "28 ×",
    "1e3",
    "12,300",
    "—",
    "",
]
NEXT = (("mismatch-cli report run --full", "every metric"), ("mismatch-cli diagnose 'a b'", ""))
ALGORITHMS = ("ppo", "gspo", "dppo-binary-tv", "minirl", "relax-both:alpha=0.1")
WITHIN = "document.querySelector('#sorted .grid')"
SHOWN = (
    f"[...{WITHIN}.tBodies[0].rows].filter(row => row.checkVisibility()).map(row => "
    "row.cells[1].textContent)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, view: Outline) -> Path:
    """A page with one of each element that the script changes."""
    columns = (Column("name", kind="text"), Column("value"))
    rows = tuple((f"row {n}", text) for n, text in enumerate(NUMBERS))
    folds = tuple(
        replace(Table("", columns, rows[:2]), fold=f"{name}, by step") for name in ALGORITHMS
    )
    profile = Profile("By μ", (0.1, None, 0.3), "0", "1", "mean |Δlog p|")
    answer = {
        "subject": ("vllm against transformers", "T = 1"),
        "verdict": Verdict("HEALTHY", "All hold.", "good"),
        "profiles": (profile,),
        "next": NEXT,
    }
    wide = Table(
        "Wide",
        (*columns, *(Column(f"column {n}") for n in range(7))),
        (("a row", *["0.0152 ± 0.0047 [0.0105, 0.0199]"] * 8),),
    )
    sections = (
        *view.parts,
        Section("Sorted", tables=(Table("Values", columns, rows),)),
        Section("Wide", tables=(wide, replace(wide, fold="Wide, folded"))),
        Section("Chosen", tables=folds),
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(replace(view, parts=sections, **answer)), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["report", "clipstats"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that a command wrote, with an explorer."""
    folder = tmp_path_factory.mktemp(request.param)
    assert run([request.param, "fp8-kv", "--no-plots", "--quiet", "-o", str(folder)]) == 0
    return folder / "report.html"


@pytest.mark.parametrize("width", [360, 420, 700, 1000, 1300])
def test_a_real_page_fits_every_width_and_can_be_read(
    browser: Browser, real: Path, width: int
) -> None:
    for dark in (False, True):
        browser.open(real, width, dark=dark)
        browser.run("document.querySelector('#explorer').remove()")
        assert browser.run("document.documentElement.scrollWidth") == width
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert browser.run(LAYOUT) == {"scroll": width, "beyond": [], "images": []}
        assert browser.run(CONTRASTS) == {}


STOPS = "a[href], button, select, input, summary, [tabindex='0']"


def test_at_most_sixty_tab_stops_come_before_the_explorer(browser: Browser, real: Path) -> None:
    for width in (420, 1300):
        browser.open(real, width)
        preceding = (
            f"[...document.querySelectorAll(`{STOPS}`)].filter(each => each.checkVisibility() && "
            "each.compareDocumentPosition(document.querySelector('#explorer')) === 4).length"
        )
        assert 10 < browser.run(preceding) <= 60


NARROW = "[...document.querySelectorAll('img.narrow')]"  # loaded when they are scrolled to
CASES = [(400, LIGHT), (400, DARK), (1280, LIGHT), (1280, DARK)]


@pytest.mark.parametrize(("width", "theme"), CASES, ids=lambda value: getattr(value, "name", value))
def test_nothing_overflows_and_the_theme_is_the_readers(
    browser: Browser, page: Path, width: int, theme: Theme
) -> None:
    from PIL import Image

    browser.open(page, width, 1600, dark=theme is DARK)
    shown = [True, 1080, 1032] if width > 900 else [True, 344, 368]
    browser.run(
        f"Promise.all({NARROW}.map(each => {{ each.loading = 'eager'; return each.decode(); }}))"
    )
    layout = browser.run(LAYOUT)
    assert layout == {"scroll": width, "beyond": [], "images": [shown] * len(layout["images"])}
    with Image.open(io.BytesIO(browser.screenshot())) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    paper = np.array([int(theme.page[i : i + 2], 16) for i in (1, 3, 5)])
    share = np.mean(np.all(pixels == paper, axis=1))
    assert 0.6 < share < 0.97  # mostly background, with something on it
    assert len(np.unique(pixels[::7], axis=0)) > 30


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, 1280, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.run(CONTRASTS) == {}


def test_the_answer_and_its_figure_come_first(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, 800)
    bottom = (
        "(selector => Math.max(...[...document.querySelectorAll(selector)].map(e => "
        "e.getBoundingClientRect().bottom)))"
    )
    assert browser.run(f"{bottom}('.verdict')") < browser.run(f"{bottom}('.leading li')") < 420
    box = browser.run("document.querySelector('figure img').getBoundingClientRect().toJSON()")
    assert (box["top"] + box["bottom"]) / 2 < 800  # most of it is visible


def test_the_first_stop_of_the_tab_key_skips_to_the_answer(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    browser.press("Tab")
    assert browser.run(
        "[document.activeElement.hash, document.activeElement.checkVisibility()]"
    ) == [
        "#answer",
        True,
    ]
    browser.press("Enter")
    assert browser.run("location.hash") == "#answer"


def test_buttons_that_sort_have_the_name_of_the_column(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    name = f"{WITHIN}.querySelectorAll('.sort')[1].getAttribute('aria-label')"
    assert browser.run(name) == "Sort by value"


def test_the_name_of_a_button_that_sorts_does_not_double_a_word(
    browser: Browser, view: Outline, tmp_path: Path
) -> None:
    table = Table("", (Column("by the mask, %"), Column("95 %")), (("1", "2"),) * 3)
    named = replace(view, parts=(Section("Named", tables=(table,)),))
    (tmp_path / "page.html").write_text(render_html(named), encoding="utf-8")
    browser.open(tmp_path / "page.html", 1280)
    names = "[...document.querySelectorAll('#named .sort')].map(each => each.ariaLabel)"
    assert [name.replace("\xa0", " ") for name in browser.run(names)] == [
        "Sort by the mask, %",
        "Sort by 95 %",
    ]


def arrow_down(browser: Browser) -> None:
    """Press the key on the focused element, as a menu reads it: by its number."""
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowDown", windowsVirtualKeyCode=40)


def test_folds_menus_and_lists_obey_the_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    browser.run("document.querySelector('#definitions summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('#definitions details').open")
    browser.run("document.querySelector('#chosen select').focus()")
    opened = "[...document.querySelectorAll('#chosen details')].map(each => each.open)"
    for place in range(2):
        arrow_down(browser)
        assert browser.run(opened) == [each == place for each in range(len(ALGORITHMS))]
    browser.run("document.querySelector('#sorted .more').focus()")
    browser.press("Enter")
    assert browser.run(SHOWN) == list(NUMBERS)
    assert browser.run("document.activeElement.matches('#sorted .more')")


@pytest.mark.parametrize("width", [420, 1280])
def test_the_keyboard_stops_at_boxes_that_scroll_and_at_no_others(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width)
    settled = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    boxes = (
        "[...document.querySelectorAll('.scroll, .tokens, pre')].filter(each => "
        "each.checkVisibility()).map(each => [each.tabIndex === 0, each.scrollWidth > "
        "each.clientWidth || each.scrollHeight > each.clientHeight])"
    )
    for script in ("0", "document.querySelectorAll('details').forEach(each => each.open = true)"):
        browser.run(script)
        browser.run(settled)
        boxed = browser.run(boxes)
        assert all(stops == scrolls for stops, scrolls in boxed)
        assert {stops for stops, _ in boxed} == {False, True}


RINGS = """(() => {
  const without = [];
  for (const each of document.querySelectorAll(`%s`)) {
    if (!each.checkVisibility()) continue;
    each.focus({ focusVisible: true });
    const style = getComputedStyle(each);
    const ring = `${style.outlineStyle} ${style.outlineWidth} ${style.outlineColor}`;
    if (ring !== "%s") without.push(`${ring}: ${each.outerHTML.slice(0, 100)}`);
  }
  return without;
})()"""


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_everything_in_focus_has_a_ring(browser: Browser, page: Path, theme: Theme) -> None:
    browser.open(page, 420, dark=theme is DARK)
    red, green, blue = (int(theme.blue[i : i + 2], 16) for i in (1, 3, 5))
    ring = f"solid 2px rgb({red}, {green}, {blue})"
    assert browser.run(RINGS % (STOPS, ring)) == []


ALLOWED = "writeText: async text => { window.copied = text; }"
REFUSED = "writeText: () => Promise.reject(new Error())"
COPY = "document.querySelectorAll('.copy')"


def on_clipboard(browser: Browser, clipboard: str) -> None:
    """Replace the clipboard, and note in `copied` what reaches it in the old way."""
    browser.run(f"Object.defineProperty(navigator, 'clipboard', {{ value: {{ {clipboard} }} }})")
    browser.run(
        "document.addEventListener('copy', event => { copied = event.target.value.slice("
        "event.target.selectionStart, event.target.selectionEnd); })"
    )


@pytest.mark.parametrize("clipboard", [ALLOWED, REFUSED], ids=["allowed", "refused"])
def test_a_button_beside_each_command_copies_it(
    browser: Browser, page: Path, view: Outline, clipboard: str
) -> None:
    browser.open(page, 1280)
    on_clipboard(browser, clipboard)
    commands = [*(command for command, _ in NEXT), view.command.strip()]
    names = f"[...{COPY}].map(each => each.ariaLabel)"
    assert browser.run(names) == [f"Copy: {command}" for command in commands]
    for place, command in enumerate(commands):
        browser.run(f"window.copied = ''; {COPY}[{place}].focus()")
        browser.press("Enter")
        browser.run("new Promise(done => setTimeout(done, 50))")
        assert browser.run("copied") == command
        assert browser.run(f"document.activeElement === {COPY}[{place}]")
    spoken = "document.querySelector('body > [aria-live]').textContent"
    assert browser.run(f"[{COPY}[0].textContent, {spoken}]") == ["Copied", "Copied"]
    browser.run("new Promise(done => setTimeout(done, 2100))")
    assert browser.run(f"[{COPY}[0].textContent, {spoken}]") == ["Copy", ""]
    assert browser.run("document.querySelectorAll('textarea').length") == 0


def test_a_command_that_cannot_be_copied_is_selected(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    on_clipboard(browser, REFUSED)
    browser.run("document.execCommand = () => false")
    browser.run(f"{COPY}[0].click()")
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert browser.run(f"[getSelection().toString(), {COPY}[0].textContent]") == [
        NEXT[0][0],
        "Selected",
    ]


def test_tables_sort_as_numbers_do(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    assert browser.run(SHOWN) == list(NUMBERS[:6])  # folded
    order = f"{WITHIN}.querySelectorAll('th[scope=col]')[1].getAttribute('aria-sort')"
    assert browser.run(order) == "none"
    browser.run(f"{WITHIN}.querySelectorAll('.sort')[1].focus()")
    browser.press("Enter")
    assert browser.run(order) == "descending"
    assert browser.run(SHOWN) == ASCENDING[:11][::-1][:6]
    browser.press("Enter")
    assert browser.run(order) == "ascending"
    browser.run("document.querySelector('#sorted .more').click()")
    assert browser.run(SHOWN) == ASCENDING
    browser.run(f"{WITHIN}.querySelectorAll('th[scope=col]')[1].click()")
    assert (browser.run(order), browser.run(SHOWN)) == ("none", list(NUMBERS))


def test_metrics_are_folded_after_six(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    table = "document.querySelector('#the-gap .metrics')"
    shown = (
        f"[...{table}.rows].filter(row => row.cells.length > 1 && row.checkVisibility()).length - 1"
    )
    count = browser.run(f"{table}.querySelectorAll('tbody tr:not(.group)').length")
    button = "document.querySelector('#the-gap .more')"
    assert (browser.run(shown), browser.run(f"{button}.textContent")) == (6, f"Show all {count}")
    browser.run(f"{button}.click()")
    assert (browser.run(shown), browser.run(f"{button}.ariaExpanded")) == (count, "true")


def test_a_menu_opens_one_of_many_folds(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    choose = "document.querySelector('#chosen select')"
    names = browser.run(f"[...{choose}.options].map(option => option.textContent)")
    assert names == ["choose one of 5", *ALGORITHMS]
    browser.run(f"{choose}.value = '3'; {choose}.dispatchEvent(new Event('change'))")
    tables = "[...document.querySelectorAll('#chosen details')].map(each => each.checkVisibility())"
    assert browser.run(tables) == [False, False, False, True, False]


def test_the_navigation_follows_the_reader_and_opens_folds(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    arrived = "new Promise(done => setTimeout(done, 300))"
    browser.run("document.querySelector('#sorted').scrollIntoView({ behavior: 'instant' })")
    browser.run(arrived)
    assert browser.run("document.querySelector('nav [aria-current]').textContent") == "Sorted"
    # It stays in sight
    assert browser.run("document.querySelector('nav').getBoundingClientRect().top") > 0
    browser.run("document.querySelector('.leading a').click()")
    browser.run(arrived)
    assert browser.run("document.querySelector(':target').checkVisibility()")


UNSEEN = """[...document.querySelectorAll("main td, main th, main .wide, main dd, main h2, main .excerpt, main p")]
  .filter(e => !e.checkVisibility({ contentVisibilityAuto: true, visibilityProperty: true })).length"""


def test_everything_is_visible_without_script(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, scripts=False)
    assert browser.run("document.querySelectorAll('button, select').length") == 0
    for _ in range(2):  # a fold in a fold
        browser.run(
            "document.querySelectorAll('summary').forEach(each => { each.parentElement.open || "
            "each.click() })"
        )
    assert browser.run(UNSEEN) == 0


# A4 between margins of 1 cm, which are Chromium's own: inches of the sheet, CSS pixels of the text.
A4, TEXT_WIDTH = {"paperWidth": 8.27, "paperHeight": 11.69}, 718
MOST_SHEETS = 12
# Texts that paper would cut, and the titles of folds that are open.
ON_PAPER = """(() => {
  const beyond = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (!text.data.trim() || !text.parentElement.checkVisibility() || text.parentElement.closest(".unseen")) continue;
    range.selectNodeContents(text);
    if ([...range.getClientRects()].some(box => box.right > innerWidth + 1)) beyond.push(text.data);
  }
  return { beyond, open: [...document.querySelectorAll("[open] > summary")].map(each => each.innerText) };
})()"""


def sheets(browser: Browser) -> int:
    pdf = base64.b64decode(browser.call("Page.printToPDF", **A4)["data"])
    return len(re.findall(rb"/Type /Page\b", pdf))


def test_paper_shows_what_the_page_shows_first(browser: Browser, page: Path) -> None:
    browser.open(page, TEXT_WIDTH, dark=True, media="print")
    browser.run("dispatchEvent(new Event('beforeprint'))")  # which scripts could open folds at
    assert browser.run(ON_PAPER) == {"beyond": [], "open": []}
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    visible = "[...document.querySelectorAll(`{}`)].filter(each => each.checkVisibility())"
    assert browser.run(f"{visible.format('nav, select, .copy, .sort, img.narrow')}.length") == 0
    images = browser.run(f"{visible.format('img')}.map(each => [each.complete, each.className])")
    assert images == [[True, "wide"]] * len(images)
    assert images
    # What is left out has its name
    folds = browser.run(f"{visible.format('#chosen summary')}.map(each => each.innerText)")
    assert folds == [f"{name}, by step" for name in ALGORITHMS]
    assert browser.run(SHOWN) == list(NUMBERS[:6])
    rest = "getComputedStyle(document.querySelector('#sorted .more'), '::after').content"
    assert browser.run(rest) == f'"The first 6 of {len(NUMBERS)}."'
    assert sheets(browser) <= MOST_SHEETS


def test_a_real_page_is_not_cut_on_paper(browser: Browser, real: Path) -> None:
    browser.open(real, TEXT_WIDTH, media="print")
    assert browser.run(ON_PAPER) == {"beyond": [], "open": []}
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.run(ON_PAPER)["beyond"] == []


EVIDENCE = [
    str(ROOT / f"lab/evidence/tokens-16-updates-{name}-21") for name in ("pg-is", "dppo-binary-tv")
]
PRINTED = {
    "training": ["report", *EVIDENCE],
    "pair": ["compare", "bfloat16", "fp8-kv"],
    **{
        f"{command}-{trace}": [command, trace]
        for trace in TRACES
        for command in ("report", "clipstats", "diagnose")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_a_page_with_figures_has_at_most_twelve_sheets(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    assert run([*PRINTED[name], "--quiet", "-o", str(tmp_path / name)]) == 0
    browser.open(tmp_path / name / "report.html", TEXT_WIDTH, media="print")
    assert browser.run(ON_PAPER) == {"beyond": [], "open": []}
    assert 1 < sheets(browser) <= MOST_SHEETS
