"""The page in a real browser: on a phone and on a desk, in light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.report.html import render_html
from mismatch_cli.report.plots._style import DARK, LIGHT, Theme
from mismatch_cli.report.view import ReportView

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1",
)  # fmt: skip
POLICY = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
# A headless window is at least 500 pixels wide, a frame in it is not.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe src="report.html" width="{width}" height="1600" style="border: 0"></iframe><pre id="measured"></pre>
<script>addEventListener("message", e => {{ document.getElementById("measured").textContent = e.data; }});</script>"""
MEASURE = """<script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, thead, nav"));
  const beyond = boxes.filter(e => e.getBoundingClientRect().right > innerWidth + 1);
  const width = element => Math.round(element.getBoundingClientRect().width);
  const images = [...document.images].map(i => [i.complete, i.naturalWidth, width(i)]);
  parent.postMessage(JSON.stringify({
    inner: innerWidth, scroll: document.documentElement.scrollWidth, beyond: beyond.length, images,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
  }), "*");
});</script>"""

CASES = [(375, LIGHT), (375, DARK), (1280, LIGHT), (1280, DARK)]


def browse(folder: Path, page: Path, width: int, theme: Theme, *extra: str) -> str:
    profile = folder / "profile"
    flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},1600", *extra]
    flags.append(f"--blink-settings=preferredColorScheme={0 if theme is DARK else 1}")
    done = subprocess.run(
        [str(BROWSER), *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.parametrize(("width", "theme"), CASES[::3], ids=lambda value: getattr(value, "name", value))
def test_nothing_sticks_out_and_the_right_pictures_are_shown(
    tmp_path: Path, view: ReportView, width: int, theme: Theme
) -> None:
    page = POLICY.sub("", render_html(view)).replace("</body>", MEASURE + "</body>")
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    dom = browse(tmp_path, frame, width + 200, theme, "--dump-dom", "--virtual-time-budget=10000")
    found = json.loads(dom.partition('<pre id="measured">')[2].partition("</pre>")[0])
    shown = [True, 1080, 1032] if width > 900 else [True, 344, 343]
    assert found == {
        "inner": width, "scroll": width, "beyond": 0, "dark": theme is DARK, "images": [shown] * 5,
    }  # fmt: skip


@pytest.mark.parametrize(("width", "theme"), CASES, ids=lambda value: getattr(value, "name", value))
def test_screenshot_has_ink_on_the_page_of_its_theme(
    tmp_path: Path, view: ReportView, width: int, theme: Theme
) -> None:
    from PIL import Image

    page, picture = tmp_path / "report.html", tmp_path / "page.png"
    page.write_text(render_html(view), encoding="utf-8")
    browse(tmp_path, page, width, theme, f"--screenshot={picture}")
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    paper = np.array([int(theme.page[i : i + 2], 16) for i in (1, 3, 5)])
    share = np.mean(np.all(pixels == paper, axis=1))
    assert 0.6 < share < 0.97  # most of it is paper, and something is printed on it
    assert len(np.unique(pixels[::7], axis=0)) > 30
