"""The pictures of README.md and of the guide, made again from bundled data: python -m
tests.docs.images [NAME…]

Figures are those that the commands draw, the explorer is its page in a real browser; all are
reduced to few colours. `bisect` searches for a minute with vLLM. Take over a figure of a longer run
by its path: RUN/plots/training-curves.png
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from PIL import Image

from mismatch_cli.app.cli import run
from tests.docs.pages import DOCS, File, steps
from tests.report.browser import Browser

IMAGES = DOCS / "images"
COLOURS, WIDTH = 128, 1100
_WINDOW, _SHARP = (1160, 1080), 1.5
_EXPLORED = """(async () => {
  const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));
  while (!explorer.dataset.ready) await pause(10);
  for (const [name, value] of [["colour", "blocked"], ["sort", "absolute"]]) {
    const list = document.querySelector(`[data-x=${name}]`);
    list.value = value;
    list.dispatchEvent(new Event("change"));
  }
  dispatchEvent(new Event("resize"));
  document.querySelector("nav").remove();
  scrollTo({ top: explorer.getBoundingClientRect().top + scrollY + 6, behavior: "instant" });
  const token = [...explorer.querySelectorAll("[data-t]")].find(each => each.style.backgroundColor);
  token.click();
})()"""


def explorer(folder: Path) -> bytes:
    """The responses with the largest gaps, coloured by the mask that blocks a token, and one
    token's details.
    """
    typed(f"report --output {folder / 'page'} --quiet --no-plots")
    browser = Browser(folder / "profile")
    try:
        browser.open(folder / "page" / "report.html", *_WINDOW)
        sharp = dict(zip(("width", "height"), _WINDOW, strict=True)) | {
            "deviceScaleFactor": _SHARP,
            "mobile": False,
        }
        browser.call("Emulation.setDeviceMetricsOverride", **sharp)
        browser.run(_EXPLORED)
        time.sleep(1)  # the card fades in
        return browser.screenshot()
    finally:
        browser.close()


def typed(line: str) -> None:
    assert run(line.split()) == 0, line


def drawn(line: str, figure: str) -> Callable[[Path], bytes]:
    """A figure that a command draws."""

    def draw(folder: Path) -> bytes:
        typed(f"{line} --quiet --output {folder / 'page'}")
        return narrow((folder / "page" / "plots" / f"{figure}.png").read_bytes())

    return draw


def shifted(folder: Path) -> bytes:
    """What `diagnose` draws of the fault that its page makes: log-probabilities that are one
    token late.
    """
    (script,) = (
        step
        for step in steps(DOCS / "diagnose.md")
        if isinstance(step, File) and step.name == "shift_by_one.py"
    )
    with chdir(folder):
        exec(script.text, {})
        typed("import late/dump.parquet --quiet --output late-run")
        return drawn("diagnose late-run --plots png", "lag-scan")(folder)


def narrow(png: bytes) -> bytes:
    picture, written = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    height = round(picture.height * WIDTH / picture.width)
    picture.resize((WIDTH, height), Image.Resampling.LANCZOS).save(written, "PNG")
    return written.getvalue()


MADE: dict[str, Callable[[Path], bytes]] = {
    "explorer": explorer,
    "ratio-and-tv": drawn("report --plots png", "ratio-and-tv"),
    "position-profile": drawn("report --plots png", "position-profile"),
    "mask-regions": drawn("clipstats --plots png", "mask-regions"),
    "sweeps": drawn("clipstats --plots png", "sweeps"),
    "gap-distribution": drawn("compare float32 fp8-kv --plots png", "gap-distribution"),
    "lag-scan": shifted,
    "waterfall": drawn("bisect plots=png", "waterfall"),
}


def reduced(png: bytes) -> bytes:
    """The same picture in few colours, half of the bytes or less: the commonest ones, and others
    that lie far apart.
    """
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    common = sorted(picture.getcolors(picture.width * picture.height), reverse=True)[: COLOURS // 2]
    apart = picture.quantize(COLOURS - len(common), Image.Quantize.MAXCOVERAGE).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(channel for _, colour in common for channel in colour), *apart])
    written = io.BytesIO()
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


def make(names: list[str]) -> None:
    for name in names or MADE:
        if name.endswith(".png"):
            picture = reduced(narrow(Path(name).read_bytes()))
        else:
            with tempfile.TemporaryDirectory() as folder:
                picture = reduced(MADE[name](Path(folder)))
        (IMAGES / f"{Path(name).stem}.png").write_bytes(picture)
        print(f"{Path(name).stem}.png: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    make(sys.argv[1:])
