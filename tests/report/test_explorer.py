"""The token explorer in a real browser: counted, followed, framed, filtered and read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.report.explorer import explorer_view
from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Outline
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.clipping import analyse_clipping
from tests.metrics.clipping.world import world
from tests.report.browser import Browser
from tests.report.explored import (
    ALGORITHMS,
    GSPO,
    READY,
    Explored,
    choose,
    click,
    counts,
    every_part,
    look,
    number_shown,
    shown_tokens,
    text_of,
)
from tests.studies.written import write_trace


@pytest.mark.parametrize(
    ("side", "name", "keys"), [("a", "grpo-clip-higher", 7), ("b", "dppo-binary-tv", -5)]
)
def test_the_slider_counts_what_clipstats_counts(
    browser: Browser, explored: Explored, side: str, name: str, keys: int
) -> None:
    look(browser, explored)
    algorithm = browser.run(
        f"(s => s.options[s.value].textContent)(document.querySelector('[data-x={side}]'))"
    )
    assert algorithm == name
    browser.run(f"document.querySelector('[data-x=slide-{side}]').focus()")
    for presses in (0, abs(keys)):
        for _ in range(presses):
            browser.press("ArrowRight" if keys > 0 else "ArrowLeft")
        settings = browser.run(f"document.querySelector('[data-x=at-{side}]').textContent").replace(
            " ", ""
        )
        settings = re.sub("ε=(.*)/(.*)", r"ε_low=\1,ε_high=\2", settings)
        chosen = parse_algorithm(f"{name}:{settings}")
        rows = analyse_clipping([explored.trace], (chosen, *ALGORITHMS)).to_json()["algorithms"]
        blocked, judged = counts(browser, side)
        assert 0 < blocked < judged
        assert blocked / judged == pytest.approx(rows[0]["blocked"]["all"]["value"], abs=1e-12)
    assert chosen.masks[0].parameters != parse_algorithm(name).masks[0].parameters  # it has moved


def test_every_algorithm_is_counted_to_the_token(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    rows = {
        row["name"]: row
        for row in analyse_clipping([explored.trace], ALGORITHMS).to_json()["algorithms"]
    }
    for place, algorithm in enumerate(ALGORITHMS):
        choose(browser, "a", str(place))
        blocked, judged = counts(browser, "a")
        assert blocked == np.count_nonzero(explored.payload.blocked(place))
        assert blocked / judged == pytest.approx(
            rows[algorithm.name]["blocked"]["all"]["value"], abs=1e-12
        )


def test_tokens_are_filtered_by_mask_and_by_advantage(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    payload, advantage_T = explored.payload, explored.payload.advantage_T
    a, b = payload.blocked(0), payload.blocked(GSPO)
    choose(browser, "b", str(GSPO))
    for value, expected in {
        "a": a,
        "ab": a & b,
        "a-b": a & ~b,
        "b-a": b & ~a,
        "": a | True,
    }.items():
        choose(browser, "show", value)
        assert number_shown(browser) == np.count_nonzero(expected) > 0
        assert shown_tokens(browser) == np.flatnonzero(expected).tolist()
    choose(browser, "show", "a")
    choose(browser, "sign", "<")
    assert shown_tokens(browser) == np.flatnonzero(a & (advantage_T < 0)).tolist()
    judged = payload.judged(0) & (advantage_T < 0)
    assert counts(browser, "a") == (np.count_nonzero(a & judged), np.count_nonzero(judged))
    choose(browser, "step", "2")  # of the whole trace before, now of the tokens here
    judged &= payload.of_response("step") == 2
    assert counts(browser, "a") == (np.count_nonzero(a & judged), np.count_nonzero(judged))
    assert "tokens here" in text_of(browser, "share-a")


CARD = "document.querySelector('.x-card').getBoundingClientRect().toJSON()"


@pytest.mark.parametrize(("width", "height"), [(420, 900), (700, 900), (1000, 700), (1000, 500)])
def test_the_card_of_any_dot_is_in_the_window(
    browser: Browser, explored: Explored, width: int, height: int
) -> None:
    look(browser, explored, width)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.run("""document.querySelector("[data-x=plot]")
      .scrollIntoView({ behavior: "instant", block: "end" })""")
    for _ in range(8):
        browser.run("""document.querySelector("[data-x=plot]")
          .dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }))""")
        card = browser.run(CARD)
        assert 0 <= card["top"] < card["bottom"] <= height
        assert 0 <= card["left"] < card["right"] <= width


def test_on_a_wide_window_the_card_is_docked_beside_the_text(
    browser: Browser, explored: Explored
) -> None:
    look(browser, explored, 1300)
    assert "Point at a token" in text_of(browser, "card")
    browser.run("document.querySelector('[data-x=texts]').focus()")
    browser.press("ArrowRight")
    # At one moment: the page may still scroll
    card, texts = browser.run("""[".x-card", "[data-x=texts]"]
      .map(name => document.querySelector(name).getBoundingClientRect().toJSON())""")
    assert card["right"] <= texts["left"] and card["bottom"] <= texts["bottom"]
    words = "log μ is shown to ± 0.0488 %, its gap to ± 0.195 %"  # what their precision costs
    assert words in text_of(browser, "card")
    browser.press("Escape")
    assert "Point at a token" in text_of(browser, "card")


def test_a_slider_says_its_threshold(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    for side in "ab":
        said, shown = browser.run(f"""[
          document.querySelector("[data-x=slide-{side}]").getAttribute("aria-valuetext"),
          document.querySelector("[data-x=at-{side}]").textContent,
        ]""")
        assert said == shown and said.startswith(("ε = ", "δ = ", "TV δ"))


def test_an_algorithm_without_a_slider_says_why(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    choose(browser, "a", str([each.name for each in ALGORITHMS].index("pg-is")))
    assert text_of(browser, "at-a") == "no threshold to move"
    shown = "document.querySelector('[data-x={}]').checkVisibility()"
    assert browser.run(shown.format("at-a")) and not browser.run(shown.format("slide-a"))


def test_responses_are_filtered_and_sorted(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    payload = explored.payload
    rewarded_T = payload.of_response("reward") == 1
    choose(browser, "reward", "1")
    assert number_shown(browser) == np.count_nonzero(rewarded_T)
    choose(browser, "step", "2")
    assert number_shown(browser) == np.count_nonzero(
        rewarded_T & (payload.of_response("step") == 2)
    )
    for name in ("reward", "step"):
        choose(browser, name, "")
    responses = payload.head["responses"]
    sums = {
        "length": np.array(responses["length"]),
        "absolute": payload.columns["response_absolute"],
        "signed": -payload.columns["response_signed"],
    }
    for name, values in sums.items():
        choose(browser, "sort", name)
        first = browser.run("document.querySelector('[data-x=texts] h3').textContent")
        best = int(np.argmax(values))
        step, prompt, sample = (responses[key][best] for key in ("step", "prompt", "sample"))
        assert first.startswith(f"step {step} · prompt {prompt} · sample {sample}"), name


def test_a_list_has_its_tokens_and_orders_responses_by_its_first(
    browser: Browser, explored: Explored
) -> None:
    look(browser, explored)
    payload = explored.payload
    assert len(payload.head["lists"]) == 4
    for entry in payload.head["lists"]:
        choose(browser, "list", entry["name"])
        list_U = payload.columns[f"list_{entry['name']}"]
        assert set(shown_tokens(browser)) == set(list_U.tolist())
        assert entry["note"] in text_of(browser, "said")
        choose(browser, "list", entry["name"])  # back to its first part
        first = payload.owner_T[list_U[0]]
        heading = browser.run("document.querySelector('[data-x=texts] h3').textContent")
        assert f"prompt {payload.head['responses']['prompt'][first]}" in heading


def test_the_strip_of_the_run_leads_to_a_response(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    total = len(explored.payload.head["responses"]["length"])
    strip = browser.run("document.querySelector('[data-x=run]').getBoundingClientRect().toJSON()")
    x, y = strip["x"] + strip["width"] * 10.5 / total, strip["y"] + strip["height"] / 2
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseReleased", x, y)
    here = int(browser.run("document.querySelector('.here').dataset.t"))
    payload = explored.payload
    assert payload.owner_T[here] == 10
    own = payload.owner_T == 10
    assert abs(payload.columns["d"][here]) == np.nanmax(np.abs(payload.columns["d"][own]))
    browser.run("document.querySelector('[data-x=run]').focus()")
    browser.press("ArrowRight")
    assert payload.owner_T[int(browser.run("document.querySelector('.here').dataset.t"))] == 11
    words = browser.run("document.querySelector('[data-x=run]').getAttribute('aria-valuetext')")
    assert f"prompt {payload.head['responses']['prompt'][11]}" in words


PIXELS = """(canvas => {
  const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return [width, [...data]];
})(document.querySelector("[data-x=plot]"))"""
BOX = "document.querySelector('[data-x=plot]').getBoundingClientRect().toJSON()"


def key(explored: Explored, token: int) -> str:
    """A token as a link names it."""
    payload, owner = explored.payload, int(explored.payload.owner_T[token])
    responses = payload.head["responses"]
    position = token - int(np.flatnonzero(payload.owner_T == owner)[0])
    where = [responses[name][owner] for name in ("step", "prompt", "sample")]
    return ".".join(map(str, [*where, position, responses["trace"][owner]]))


def test_a_dot_leads_to_its_token(browser: Browser, explored: Explored) -> None:
    """A token in the address has a ring in the plot; a click there on a fresh page finds the
    same token.
    """
    payload = explored.payload
    lonely = lonely_token(payload.columns["logq"], payload.columns["d"])
    look(browser, explored)
    before = pixels(browser)
    look(browser, explored, fragment=f"view?token={key(explored, lonely)}")
    rows, columns = np.nonzero((pixels(browser) != before).any(axis=2))
    look(browser, explored)
    box = browser.run(BOX)
    x, y = box["x"] + (columns.min() + columns.max()) / 2, box["y"] + (rows.min() + rows.max()) / 2
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseReleased", x, y)
    assert browser.run("Number(document.querySelector('.here').dataset.t)") == lonely
    token, texts = (
        browser.run(f"document.querySelector('{name}').getBoundingClientRect().toJSON()")
        for name in (".here", "[data-x=texts]")
    )
    assert texts["top"] <= token["top"] < token["bottom"] <= texts["bottom"]
    card = browser.run("document.querySelector('[data-x=card]').innerText")
    assert browser.run("!document.querySelector('[data-x=card]').hidden") and "advantage" in card
    owner = payload.owner_T[lonely]
    position = lonely - int(np.flatnonzero(payload.owner_T == owner)[0])
    length = payload.head["responses"]["length"][owner]
    assert re.search(rf"position\s+{position} of {length}", card)


def pixels(browser: Browser) -> np.ndarray:
    width, flat = browser.run(PIXELS)
    return np.array(flat, dtype=np.uint8).reshape(-1, width, 4)


def lonely_token(logq_T: np.ndarray, d_T: np.ndarray) -> int:
    """The token farthest from all others in the plot, among those within its axes."""
    inside = np.flatnonzero(np.isfinite(d_T) & (np.abs(d_T) < np.nanquantile(np.abs(d_T), 0.98)))
    places = np.stack(
        [logq_T[inside] / 14, d_T[inside] / (2 * np.abs(d_T[inside]).max())], axis=1
    ).astype(np.float64)
    away = np.linalg.norm(places[:, None] - places[None], axis=2) + np.eye(len(places)) * 9
    return int(inside[away.min(axis=1).argmax()])


def test_a_frame_around_dots_shows_only_their_tokens(browser: Browser, explored: Explored) -> None:
    """The left half of the plot has exactly the improbable tokens."""
    look(browser, explored)
    box = browser.run(BOX)
    x, y, width, height = (box[key] for key in ("x", "y", "width", "height"))
    drag(browser, (x + 1, y + 1), (x + 0.55 * width, y + height - 1))
    shown = shown_tokens(browser)
    logq_T = explored.payload.columns["logq"]
    measured = np.isfinite(logq_T) & ~np.isnan(explored.payload.columns["d"])
    assert 10 < len(shown) == number_shown(browser) < 0.9 * np.count_nonzero(measured)
    assert set(shown) == set(np.flatnonzero(measured & (logq_T <= logq_T[shown].max())).tolist())
    click(browser, "clear")
    assert number_shown(browser) == explored.payload.total


def drag(browser: Browser, start: tuple[float, float], end: tuple[float, float]) -> None:
    browser.mouse("mousePressed", *start)
    for part in (0.3, 0.7, 1.0):
        browser.mouse("mouseMoved", *(a + part * (b - a) for a, b in zip(start, end, strict=True)))
    browser.mouse("mouseReleased", *end)


def test_keys_step_from_token_to_token(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    browser.run("document.querySelector('[data-x=texts]').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert browser.run("document.querySelector('.here').dataset.t") == "1"
    choose(browser, "show", "a")
    browser.press("ArrowRight")
    following = int(browser.run("document.querySelector('.here').dataset.t"))
    assert (
        following
        == np.flatnonzero(explored.payload.blocked(0) & (np.arange(explored.payload.total) > 1))[0]
    )


def test_a_card_shows_what_both_sides_preferred(browser: Browser, explored: Explored) -> None:
    payload = explored.payload
    texts = np.array(payload.head["texts"])
    ranks_UK = payload.columns["rank_text"].reshape(-1, payload.head["ranks"])
    row = int(np.flatnonzero((texts[ranks_UK] == " word20").any(axis=1))[0])
    token = int(payload.columns["rank_token"][row])
    look(browser, explored, fragment=f"view?token={key(explored, token)}")
    cells = browser.run(
        "[...document.querySelectorAll('.x-card tbody tr')].map(r => [...r.cells].map(c => "
        "c.textContent))"
    )
    assert [line[0] for line in cells] == texts[ranks_UK[row]].tolist()
    logq_K = payload.columns["rank_logq"].reshape(ranks_UK.shape)[row].astype(np.float64)
    assert [float(line[1].replace("−", "-")) for line in cells] == pytest.approx(
        np.exp(logq_K), rel=0.02
    )
    assert browser.run("document.querySelector('.x-card h4').textContent").strip("“”")


def test_pooled_traces_are_distinguished(browser: Browser, tmp_path: Path) -> None:
    traces = [write_trace(tmp_path / f"<b>{n}", world(n, 6), seed=n) for n in (0, 1)]
    exploration = analyse_clipping(traces, ALGORITHMS[:2]).exploration()
    assert exploration is not None
    view = Outline("Tokens", (), (), explorer=explorer_view(exploration))
    (tmp_path / "report.html").write_text(render_html(view), encoding="utf-8")
    browser.open(tmp_path / "report.html", 1280, 1000)
    browser.run(READY)
    heads = "[...document.querySelectorAll('#explorer article h3')].map(each => each.textContent)"
    names = {head.split(" · ")[0] for part in every_part(browser, heads) for head in part}
    assert {name.rpartition("/")[2] for name in names} == {"<b>0", "<b>1"}
    choose(browser, "trace", "1")
    assert {head.split(" · ")[0].rpartition("/")[2] for head in browser.run(heads)} == {"<b>1"}


def test_hostile_texts_are_texts(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    texts = "".join(every_part(browser, "document.querySelector('[data-x=texts]').textContent"))
    assert browser.run("typeof pwned") == "undefined"
    assert (
        browser.run("document.querySelectorAll('#explorer :is(img, script, a, iframe)').length")
        == 0
    )
    for spelled in (
        "<script>pwned = 1</script>",
        "<img src=x",
        "<!--",
        "]]>&lt;",
        r"\x1b[2J",
        r"\u202eevil",
        "{{ 7",
    ):
        assert spelled in texts, spelled
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e]", texts)
    assert "x" * 121 not in texts  # unreadably long text is cut
    assert len(explored.page.read_bytes()) < 400_000


def test_no_network_request_and_no_policy_violation(browser: Browser, explored: Explored) -> None:
    browser.call("Network.enable")
    browser.call("Log.enable")
    browser.call("Runtime.enable")
    browser.messages.clear()
    look(browser, explored)
    shown_tokens(browser)
    choose(browser, "show", "a")
    urls = [
        m["params"]["request"]["url"]
        for m in browser.messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert {url.partition(":")[0] for url in urls} <= {"file", "about", "data"}
    spoken = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert [m for m in browser.messages if m["method"] in spoken] == []
    policy = browser.run(
        "document.querySelector('meta[http-equiv=Content-Security-Policy]').content"
    )
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_without_script_the_explorer_is_hidden(browser: Browser, explored: Explored) -> None:
    browser.open(explored.page, 1280, scripts=False)
    assert browser.run("document.querySelector('#explorer').checkVisibility()") is False
    links = browser.run(
        "[...document.querySelectorAll('nav a')].filter(a => a.checkVisibility()).map(a => a.hash)"
    )
    assert "#answer" in links and "#explorer" not in links


WIDER = """[...document.querySelectorAll("#explorer *")].filter(e => e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 99))"""


@pytest.mark.parametrize("width", [360, 400, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_a_desktop(
    browser: Browser, explored: Explored, width: int, dark: bool
) -> None:
    look(browser, explored, width, dark=dark, fragment=f"view?token={key(explored, 3)}")
    assert browser.run(WIDER) == []
    assert browser.run("document.documentElement.scrollWidth") == width
    card: dict[str, Any] = browser.run(
        "document.querySelector('[data-x=card]').getBoundingClientRect().toJSON()"
    )
    assert card["left"] >= 0 and card["right"] <= width and card["top"] >= 0 and card["height"] > 50


LEAST_CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (...layers) => {
    for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const linear = c => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = getComputedStyle(document.querySelector("[data-x=texts]")).backgroundColor;
  const contrasts = [...document.querySelectorAll("[data-t]")].map(token => {
    const style = getComputedStyle(token), ends = [light(style.color), light(paper, style.backgroundColor)];
    return (Math.max(...ends) + 0.05) / (Math.min(...ends) + 0.05);
  });
  return Math.min(...contrasts);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_letters_stay_legible_on_their_colours(
    browser: Browser, explored: Explored, dark: bool
) -> None:
    look(browser, explored, dark=dark)
    for mode in ("blocked", "d", "dp", "entropy", "advantage"):
        choose(browser, "colour", mode)
        assert browser.run(LEAST_CONTRAST) >= 4.5, mode
