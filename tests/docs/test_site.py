"""The guide as a site: it builds without a network, and in a real browser it is read and
searched without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from mismatch_cli.app.guide_pages import all_pages
from tests.docs import site
from tests.docs.pages import DOCS
from tests.report.browser import CHROMIUM, Browser

pytestmark = pytest.mark.slow

# What a page loads by itself, in HTML and CSS; links that need a click are not resources.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="?(?:canonical|prev|next|edit)))\b[^>]*?\b(?:src|href)="?([^"\s>]+)"""
)
_IN_CSS = re.compile(r"""(?:url\(|@import\s+)["']?([^"')\s]+)""")
_FOUND = """[...document.querySelectorAll("*")].flatMap(host => host.shadowRoot ?
    [...host.shadowRoot.querySelectorAll("a")].map(link => link.getAttribute("href")) : [])"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = site.build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    browser.call("Network.enable")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def served(built: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *said: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_every_page_of_the_guide_is_in_the_site(built: Path) -> None:
    names = {path.relative_to(built).with_suffix("").as_posix() for path in built.rglob("*.html")}
    folders = {name for name in all_pages() if (DOCS / name).is_dir()}
    assert {
        "contents" if n == "README" else f"{n}/index" if n in folders else n for n in all_pages()
    } <= names
    front = (built / "index.html").read_text(encoding="utf-8")
    assert "mismatch-cli guide json/gate" in front and 'href="json/gate.html"' in front


def test_no_page_shows_a_tag_where_a_cell_has_a_pipe(built: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in built.rglob("*.html")}
    assert any("|π − μ|" in text for text in pages.values())
    assert [path.name for path, text in pages.items() if "&lt;code&gt;" in text] == []


def test_a_page_asks_nobody_but_its_own_folder_and_every_picture_is_there(built: Path) -> None:
    loaded = 0
    for path in (path for path in built.rglob("*") if path.suffix in (".html", ".css")):
        pattern = _LOADED if path.suffix == ".html" else _IN_CSS
        for address in pattern.findall(path.read_text(encoding="utf-8")):
            if not address.startswith(("data:", "#")):
                assert not re.match(r"(\w+:)?//", address), f"{path.name} loads {address}"
                file = (path.parent / address.partition("#")[0].partition("?")[0]).resolve()
                assert path.name == "404.html" or file.exists(), f"{path.name} loads {address}"
                loaded += 1
    assert loaded > 300
    own = [path.read_text(encoding="utf-8") for path in (DOCS / "theme" / "assets").iterdir()]
    assert len(own) == 3 and not any(re.search(r"https?:", text) for text in own)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_front_page_and_a_page_of_a_command_stand_on_a_screen(
    built: Path, browser: Browser, width: int, dark: bool
) -> None:
    for name, heading in {"index": "mismatch-cli", "clipstats": "clipstats"}.items():
        browser.open(built / f"{name}.html", width, dark=dark)
        assert heading in browser.run("document.querySelector('h1').textContent")
        assert browser.run("document.documentElement.scrollWidth") <= width
        pictures = browser.run(
            "[...document.images].map(each => [each.complete, each.naturalWidth])"
        )
        assert all(complete and natural for complete, natural in pictures)
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        shades = [int(part) for part in re.findall(r"\d+", background)[:3]]
        assert (max(shades) < 60) if dark else (min(shades) > 200)


# The page that answers, where words are asked for that are not all on one section
_ANSWERS = {
    "volatility": "",
    "dppo-binary-tv": "",
    "notebook polars": "library.html",
    "equivalent epsilon delta": "choosing-a-threshold.html",
    "slack alert": "watch.html",
}


@pytest.mark.parametrize("word", _ANSWERS)
@pytest.mark.parametrize("from_files", [True, False])
def test_search_finds_a_word_and_no_request_leaves_the_machine(
    built: Path, served: str, browser: Browser, word: str, from_files: bool
) -> None:
    messages_before = len(browser.messages)
    browser.open(built / "index.html" if from_files else f"{served}/index.html", 1280)
    browser.run(
        "document.querySelector('[data-md-component=search] button, .md-search__button').click()"
    )
    browser.run("new Promise(done => setTimeout(done, 200))")
    browser.call("Input.insertText", text=word)
    browser.run(f"""(async () => {{
        for (let n = 0; n < 100 && !{_FOUND}.length; n++) await new Promise(done => setTimeout(done, 50));
    }})()""")
    root = built.as_uri() if from_files else served
    pages = [link.removeprefix(root).partition("?")[0].lstrip("/") for link in browser.run(_FOUND)]
    pages = [name.partition("#")[0] for name in pages]
    assert pages and all((built / name).is_file() for name in pages)
    assert pages[0].startswith(_ANSWERS[word])
    sent = [
        message
        for message in browser.messages[messages_before:]
        if message["method"] == "Network.requestWillBeSent"
    ]
    requests = [message["params"]["request"]["url"] for message in sent]
    own = ("file:", "data:", "about:") if from_files else (served, "data:", "about:")
    assert any(url.partition("?")[0].endswith(("search.js", "search.json")) for url in requests)
    assert [url for url in requests if not url.startswith(own)] == []


def test_a_broken_link_or_a_page_without_a_place_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = site.put_together(tmp_path)
    (tmp_path / "docs" / "gate.md").write_text(
        "# Gate\n\n[no such heading](probe.md#nowhere)\n", encoding="utf-8"
    )
    done = site.zensical("build", config)
    assert done.returncode != 0 and "anchor does not exist" in done.stdout + done.stderr
    places = site.pages() | {"docs/new.md": "new.md"}
    monkeypatch.setattr(site, "pages", lambda: places)
    with pytest.raises(AssertionError, match=r"nav of zensical.toml lacks \['new.md'\]"):
        site.put_together(tmp_path)
