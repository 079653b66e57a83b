"""Every token of the first responses in a real browser: counted, followed, framed and filtered."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.algorithms.parse import find
from mismatch_cli.report.explorer import explorer_view
from mismatch_cli.report.html import render_html
from mismatch_cli.report.view import ReportView, Section
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.exploration.explored import NOT_JUDGED, Exploration
from mismatch_cli.trace.reader import Trace
from tests.metrics.clipping.world import VOCABULARY, world
from tests.report.browser import Browser
from tests.studies.written import write_trace

ALGORITHMS = tuple(
    map(find, ("grpo-clip-higher", "dppo-binary-tv", "dppo-topk-kl", "minirl", "gspo", "pg-is"))
)
GSPO = 4
HOSTILE = (
    b"<script>pwned = 1</script>",
    b"</script><img src=x onerror='pwned = 2'>",
    b"<!--",
    b"]]>&lt;&amp;",
    b"\x1b[2J\x1b]8;;http://localhost\x07",
    "\u202eevil\u202c".encode(),
    b"{{ 7 * 7 }}",
    b"\xff\xfe",
    b"\x00",
    b"\n\n",
    b"x" * 1_000_000,
    b"javascript:pwned=3",
)
TEXTS = HOSTILE + tuple(f" word{n}".encode() for n in range(VOCABULARY - len(HOSTILE)))
SHOWN = """[...document.querySelectorAll("#explorer [data-t]")]
  .filter(each => !each.classList.contains("dim")).map(each => Number(each.dataset.t))"""


@dataclass(frozen=True)
class Explored:
    page: Path
    trace: Trace
    found: Exploration

    def blocked(self, place: int) -> np.ndarray:
        """The tokens that an algorithm blocks with its published thresholds."""
        judged = self.found.judged[place]
        return (judged.level_T != NOT_JUDGED) & (judged.level_T > judged.published)


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    folder = tmp_path_factory.mktemp("run")
    write_trace(folder / "trace", world(0, 40))
    ids = pa.array(range(VOCABULARY), pa.int32())
    pq.write_table(pa.table({"id": ids, "bytes": list(TEXTS)}), folder / "trace" / "vocab.parquet")
    trace = Trace.open(folder)
    found = analyse_clipping([trace], ALGORITHMS).exploration()
    assert found is not None
    view = ReportView(
        "Tokens", (), (Section("More", text="Words.", stays=True),), "What is blocked."
    )
    (folder / "report.html").write_text(
        render_html(replace(view, explorer=explorer_view(found))), encoding="utf-8"
    )
    return Explored(folder / "report.html", trace, found)


def look(
    browser: Browser,
    explored: Explored,
    width: int = 1280,
    *,
    dark: bool = False,
    fragment: str = "",
) -> None:
    """Open the page, wait for its tokens, and fill in every response."""
    browser.open(explored.page, width, 1000, dark=dark, fragment=fragment)
    browser.run("""new Promise(done => {
      const wait = () => document.querySelector("#explorer").dataset.ready ? done() : setTimeout(wait, 10); wait();
    })""")
    browser.run("document.querySelector('#explorer').scrollIntoView({ behavior: 'instant' })")


def fill(browser: Browser) -> None:
    """Scroll through the text, so that every response has been near."""
    browser.run("""(async () => {
      const texts = document.querySelector("[data-x=texts]"), settle = () => new Promise(done => setTimeout(done, 60));
      for (let y = 0; y < texts.scrollHeight; y += 300) { texts.scrollTop = y; await settle(); }
      texts.scrollTop = 0; await settle();
    })()""")


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(f"""(() => {{
      const select = document.querySelector("[data-x={name}]");
      select.value = {value!r};
      select.dispatchEvent(new Event("change"));
    }})()""")


def counts(browser: Browser, side: str) -> tuple[int, int]:
    shares = browser.run(f"({{...document.querySelector('[data-x=share-{side}]').dataset}})")
    return int(shares["blocked"]), int(shares["judged"])


def number_shown(browser: Browser) -> int:
    said = browser.run("document.querySelector('[data-x=said]').textContent")
    return int(said.split(" of ")[0].replace(",", ""))


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
        asked = find(f"{name}:{settings}")
        rows = analyse_clipping([explored.trace], (asked, *ALGORITHMS)).to_json()["algorithms"]
        blocked, judged = counts(browser, side)
        assert 0 < blocked < judged
        assert blocked / judged == pytest.approx(rows[0]["blocked"]["all"]["value"], abs=1e-12)
    assert asked.masks[0].parameters != find(name).masks[0].parameters  # it has moved


def test_every_algorithm_is_counted_to_the_token(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    rows = {
        row["name"]: row
        for row in analyse_clipping([explored.trace], ALGORITHMS).to_json()["algorithms"]
    }
    for place, algorithm in enumerate(ALGORITHMS):
        choose(browser, "a", str(place))
        blocked, judged = counts(browser, "a")
        assert blocked == np.count_nonzero(explored.blocked(place))
        assert blocked / judged == pytest.approx(
            rows[algorithm.name]["blocked"]["all"]["value"], abs=1e-12
        )


def test_tokens_are_filtered_by_mask_and_by_advantage(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    fill(browser)
    a, b, advantage_T = (
        explored.blocked(0),
        explored.blocked(GSPO),
        explored.found.tokens.advantage_T,
    )
    assert advantage_T is not None
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
        assert set(np.flatnonzero(expected).tolist()) >= set(browser.run(SHOWN))
    choose(browser, "show", "a")
    choose(browser, "sign", "<")
    assert browser.run(SHOWN) == np.flatnonzero(a & (advantage_T < 0)).tolist()
    judged = (explored.found.judged[0].level_T != NOT_JUDGED) & (advantage_T < 0)
    assert counts(browser, "a") == (np.count_nonzero(a & judged), np.count_nonzero(judged))


@pytest.mark.parametrize(("width", "height"), [(420, 900), (1000, 500)])
def test_the_card_of_a_token_below_the_window_is_in_it(
    browser: Browser, explored: Explored, width: int, height: int
) -> None:
    look(browser, explored, width)
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=height, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    browser.run("""(() => {
      const plot = document.querySelector("[data-x=plot]");
      plot.scrollIntoView({ behavior: "instant", block: "end" });
      plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
    })()""")
    top, bottom = browser.run(
        "(box => [box.top, box.bottom])(document.querySelector('.x-card').getBoundingClientRect())"
    )
    assert 0 <= top < bottom <= height


def test_a_slider_says_its_threshold(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    for side in "ab":
        said, shown = browser.run(f"""[
          document.querySelector("[data-x=slide-{side}]").getAttribute("aria-valuetext"),
          document.querySelector("[data-x=at-{side}]").textContent,
        ]""")
        assert said == shown and said.startswith(("ε = ", "δ = ", "TV δ"))


def test_responses_are_filtered_and_sorted(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    responses = explored.found.response_S
    choose(browser, "reward", "1")
    rewarded_S = responses.reward == 1
    assert number_shown(browser) == responses.length[rewarded_S].sum()
    choose(browser, "step", "2")
    assert number_shown(browser) == responses.length[rewarded_S & (responses.step == 2)].sum()
    for name in ("reward", "step"):
        choose(browser, name, "")
    for name in ("length", "absolute"):
        choose(browser, "sort", name)
        first = browser.run("document.querySelector('[data-x=texts] h3').textContent")
        best = responses[int(np.argmax(responses[name]))]
        assert first.startswith(
            f"step {best.step} · prompt {best.prompt_id} · sample {best.sample_index}"
        ), name


PIXELS = """(canvas => {
  const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return [width, [...data]];
})(document.querySelector("[data-x=plot]"))"""
BOX = "document.querySelector('[data-x=plot]').getBoundingClientRect().toJSON()"


def test_a_dot_leads_to_its_token(browser: Browser, explored: Explored) -> None:
    """A token in the address has a ring in the plot; a click there on a fresh page finds the
    same token.
    """
    lonely = lonely_token(explored.found)
    look(browser, explored)
    before = pixels(browser)
    look(browser, explored, fragment=f"token-{lonely}")
    rows, columns = np.nonzero((pixels(browser) != before).any(axis=2))
    look(browser, explored)
    box = browser.run(BOX)
    x, y = box["x"] + (columns.min() + columns.max()) / 2, box["y"] + (rows.min() + rows.max()) / 2
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseReleased", x, y)
    assert browser.run("location.hash") == f"#token-{lonely}"
    assert browser.run("Number(document.querySelector('.here').dataset.t)") == lonely
    token, texts = (
        browser.run(f"document.querySelector('{name}').getBoundingClientRect().toJSON()")
        for name in (".here", "[data-x=texts]")
    )
    assert texts["top"] <= token["top"] < token["bottom"] <= texts["bottom"]
    card = browser.run("document.querySelector('[data-x=card]').innerText")
    assert browser.run("!document.querySelector('[data-x=card]').hidden") and "advantage" in card
    length_S = explored.found.response_S.length
    owner = np.repeat(np.arange(len(length_S)), length_S)
    position = lonely - int(np.flatnonzero(owner == owner[lonely])[0])
    assert re.search(rf"position\s+{position} of {length_S[owner[lonely]]}", card)


def pixels(browser: Browser) -> np.ndarray:
    width, flat = browser.run(PIXELS)
    return np.array(flat, dtype=np.uint8).reshape(-1, width, 4)


def lonely_token(found: Exploration) -> int:
    """The token farthest from all others in the plot, among those within its axes."""
    with np.errstate(invalid="ignore"):
        d_T = found.tokens.logp_T - found.tokens.logq_T
    inside = np.flatnonzero(np.isfinite(d_T) & (np.abs(d_T) < np.nanquantile(np.abs(d_T), 0.98)))
    places = np.stack(
        [found.logq_T[inside] / 14, d_T[inside] / (2 * np.abs(d_T[inside]).max())], axis=1
    )
    away = np.linalg.norm(places[:, None] - places[None], axis=2) + np.eye(len(places)) * 9
    return int(inside[away.min(axis=1).argmax()])


def test_a_frame_around_dots_shows_only_their_tokens(browser: Browser, explored: Explored) -> None:
    """The left half of the plot has exactly the improbable tokens."""
    look(browser, explored)
    fill(browser)
    box = browser.run(BOX)
    x, y, width, height = (box[key] for key in ("x", "y", "width", "height"))
    drag(browser, (x + 1, y + 1), (x + 0.55 * width, y + height - 1))
    shown = browser.run(SHOWN)
    logq_T = explored.found.tokens.logq_T
    measured = np.isfinite(logq_T) & ~np.isnan(explored.found.tokens.logp_T)
    assert 10 < len(shown) == number_shown(browser) < 0.9 * np.count_nonzero(measured)
    assert set(shown) == set(np.flatnonzero(measured & (logq_T <= logq_T[shown].max())).tolist())
    browser.run("document.querySelector('[data-x=clear]').click()")
    assert number_shown(browser) == len(explored.found.tokens.text_T)


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
        == np.flatnonzero(explored.blocked(0) & (np.arange(len(explored.found.tokens.text_T)) > 1))[
            0
        ]
    )


def test_a_card_shows_what_both_sides_preferred(browser: Browser, explored: Explored) -> None:
    ranks = explored.found.tokens.ranks
    assert ranks is not None
    token = next(
        t
        for t, texts in zip(ranks.token_U.tolist(), ranks.text_UK, strict=True)
        if " word20" in texts
    )
    look(browser, explored, fragment=f"token-{token}")
    rows = browser.run(
        "[...document.querySelectorAll('.x-card tbody tr')].map(r => [...r.cells].map(c => "
        "c.textContent))"
    )
    assert len(rows) == 5 and " word20" in [row[0] for row in rows]
    assert browser.run("document.querySelector('.x-card h4').textContent").strip("“”")


def test_pooled_traces_are_distinguished(
    browser: Browser, explored: Explored, tmp_path: Path
) -> None:
    both = explored.found.response_S.copy()
    both.trace_index[1::2], both.reward[0] = 1, np.inf
    found = replace(explored.found, response_S=both, traces=("runs/<b>a", "runs/b"))
    view = ReportView("Tokens", (), (), explorer=explorer_view(found))
    (tmp_path / "report.html").write_text(render_html(view), encoding="utf-8")
    look(browser, replace(explored, page=tmp_path / "report.html"))
    heads = "[...document.querySelectorAll('#explorer article h3')].map(each => each.textContent)"
    shown = browser.run(heads)
    assert [head.split(" · ")[0] for head in shown] == ["runs/<b>a", "runs/b"] * (len(both) // 2)
    assert "reward ∞" in shown[0]
    choose(browser, "trace", "1")
    assert {head.split(" · ")[0] for head in browser.run(heads)} == {"runs/b"}


def test_hostile_texts_are_texts(browser: Browser, explored: Explored) -> None:
    look(browser, explored)
    fill(browser)
    assert browser.run("typeof pwned") == "undefined"
    assert (
        browser.run("document.querySelectorAll('#explorer :is(img, script, a, iframe)').length")
        == 0
    )
    texts = browser.run("document.querySelector('[data-x=texts]').textContent")
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
    fill(browser)
    choose(browser, "show", "a")
    asked = [
        m["params"]["request"]["url"]
        for m in browser.messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert {url.partition(":")[0] for url in asked} <= {"file", "about", "data"}
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
    look(browser, explored, width, dark=dark, fragment="token-3")
    assert browser.run(WIDER) == []
    assert browser.run("document.documentElement.scrollWidth") == width
    card: dict[str, Any] = browser.run(
        "document.querySelector('[data-x=card]').getBoundingClientRect().toJSON()"
    )
    assert card["left"] >= 0 and card["right"] <= width and card["top"] >= 0 and card["height"] > 50


# Tokens are drawn when they come into view, which the browser says in its own time.
DRAWN = """new Promise(done => {
  const wait = () => document.querySelector("[data-t]") ? done() : setTimeout(wait, 10); wait();
})"""
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
        browser.run(DRAWN)
        assert browser.run(LEAST_CONTRAST) >= 4.5, mode
