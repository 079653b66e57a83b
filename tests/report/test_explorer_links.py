"""A view of the explorer as a link, and a token as a picture, in a real browser."""

from __future__ import annotations

import base64
import io
from typing import Any
from urllib.parse import parse_qs

import matplotlib.image
import numpy as np

from tests.report.browser import Browser
from tests.report.explored import Explored, choose, click, look, number_shown, text_of

STATE = """Object.fromEntries([...document.querySelectorAll("#explorer [data-x]")]
  .filter(each => each.matches("select, input"))
  .map(each => [each.dataset.x, each.value]))"""
COPIES = """(() => {
  window.copied = "";
  Object.defineProperty(navigator, "clipboard", { value: {
    writeText: async words => { window.copied = words; },
    write: async items => { window.pictures = items.length; },
  }, configurable: true });
})()"""
SAVES = """HTMLAnchorElement.prototype.click = function () {
  window.saved = [this.download, this.href];
}"""
SAID = """new Promise(done => {
  const said = document.querySelector("[data-x=done]");
  const wait = () => said.textContent ? done() : setTimeout(wait, 20);
  wait();
})"""
SETTLED = "new Promise(done => setTimeout(done, 300))"


def link_of(browser: Browser) -> str:
    browser.run(COPIES)
    click(browser, "link")
    browser.run(SETTLED)
    assert "copied" in text_of(browser, "done")
    return str(browser.run("window.copied"))


def test_every_control_the_frame_and_the_token_are_in_the_link(
    browser: Browser, explored: Explored
) -> None:
    look(browser, explored)
    choices = {"colour": "dp", "list": "gap", "sort": "length", "sign": ">", "y": "dp", "b": "4"}
    for name, value in choices.items():
        choose(browser, name, value)
    browser.run("document.querySelector('[data-x=slide-a]').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    box = browser.run("document.querySelector('[data-x=plot]').getBoundingClientRect().toJSON()")
    browser.mouse("mousePressed", box["x"] + 50, box["y"] + 5)
    browser.mouse("mouseMoved", box["x"] + 0.8 * box["width"], box["y"] + box["height"] - 40)
    browser.mouse("mouseReleased", box["x"] + 0.8 * box["width"], box["y"] + box["height"] - 40)
    browser.run("document.querySelector('[data-x=texts]').focus()")
    browser.press("ArrowRight")
    before: dict[str, Any] = browser.run(STATE)
    token, shown = (
        browser.run("document.querySelector('.here').dataset.t"),
        number_shown(browser),
    )
    link = link_of(browser)
    words = parse_qs(link.partition("#view?")[2])
    assert {"colour", "list", "sort", "sign", "y", "a", "b", "frame", "token"} == set(words)
    assert words["a"] == ["grpo-clip-higher@3"]

    look(browser, explored, fragment=link.partition("#")[2])
    assert browser.run(STATE) == before
    assert number_shown(browser) == shown
    assert browser.run("document.querySelector('.here').dataset.t") == token
    assert browser.run("!document.querySelector('[data-x=clear]').hidden")


def test_the_page_as_it_opens_needs_no_fragment(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    assert "#" not in link_of(browser)
    choose(browser, "colour", "dp")
    assert link_of(browser).endswith("#view?colour=dp")
    choose(browser, "colour", "blocked")
    assert "#" not in link_of(browser)


def test_a_link_that_is_pasted_into_an_open_page_is_followed(
    browser: Browser, explored: Explored
) -> None:
    look(browser, explored)
    browser.run("location.hash = 'view?colour=dp&a=gspo'")
    browser.run(SETTLED)
    state = browser.run(STATE)
    assert (state["colour"], state["a"]) == ("dp", "4")


def test_nonsense_in_a_link_is_ignored(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    before = browser.run(STATE)
    nonsense = "view?colour=__proto__&a=no@x&frame=1,a&token=9.9.9.9.9&y=%3Cscript%3E&at=1"
    look(browser, explored, fragment=nonsense)
    assert browser.run(STATE) | {"colour": "", "y": ""} == before | {"colour": "", "y": ""}
    assert number_shown(browser) == explored.payload.total


def test_a_token_is_saved_as_a_picture_of_1200_by_630(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    assert browser.run("document.querySelector('[data-x=picture]').disabled")
    browser.run("document.querySelector('[data-x=texts]').focus()")
    browser.run(COPIES)
    browser.run(SAVES)
    pictures = []
    for _ in range(2):
        browser.press("ArrowRight")
        browser.run("document.querySelector('[data-x=done]').textContent = ''")
        click(browser, "picture")
        browser.run(SAID)
        name, address = browser.run("window.saved")
        assert name.startswith("token-") and name.endswith(".png")
        assert f"Saved {name}, and copied." == text_of(browser, "done")
        content = base64.b64decode(address.partition(",")[2])
        pictures.append(matplotlib.image.imread(io.BytesIO(content), format="png"))
    first, second = pictures
    assert first.shape[:2] == (630, 1200)
    paper = first[0, 0]
    for top, bottom in ((50, 115), (190, 240), (450, 505), (528, 554), (580, 600)):
        assert (first[top:bottom] != paper).any(), (top, bottom)
    assert not np.array_equal(first, second)
