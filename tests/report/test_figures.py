"""Pictures as files and as data URIs."""

from __future__ import annotations

import base64
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl

from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.report.drawing.style import WIDE
from mismatch_cli.report.drawing.svg import to_svg
from mismatch_cli.report.figures import FigureView, figure_views

VARIANTS = ("wide", "narrow")


def svg_of(uri: str) -> str:
    head, _, content = uri.partition(",")
    assert head == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def test_both_variants_are_an_svg_of_their_size(figures: list[FigureView]) -> None:
    for view in figures:
        pictures = [getattr(view, variant) for variant in VARIANTS]
        assert [picture.width for picture in pictures] == [1080, 344]
        for picture in pictures:
            svg = svg_of(picture.uri)
            root = ET.fromstring(svg)
            assert (root.attrib["width"], root.attrib["height"]) == (
                str(picture.width),
                str(picture.height),
            )
            assert "<text" in svg  # real text, sharp at any zoom
            assert "system-ui" in svg


def test_the_same_data_gives_the_same_bytes_and_files(
    tmp_path: Path, measured: SimpleNamespace, figures: list[FigureView]
) -> None:
    from PIL import Image

    settings = dict(mpl.rcParams)
    views = figure_views(measured.plot_data, tmp_path / "plots")
    assert views == figures
    assert dict(mpl.rcParams) == settings  # nothing global was changed
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(
        f"{view.name}.png" for view in views
    )
    for path in (tmp_path / "plots").iterdir():
        with Image.open(path) as image:
            assert image.width == 2160
            assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


def test_a_logarithmic_axis_shows_powers_without_markup() -> None:
    sheet = Sheet(WIDE)
    (axes,) = sheet.panels(1)
    axes.set_xscale("log")
    axes.set_xlim(1e-6, 1)
    shown = re.findall(r">([^<>]*)</text>", to_svg(sheet))
    assert {"10⁻⁶", "10⁻⁴", "0.01", "1"} <= {*shown}
    assert not any("$" in text for text in shown)


def test_a_hundred_thousand_tokens_stay_small_and_quick(
    batch_maker: Callable[..., object], measurer: Callable[..., SimpleNamespace]
) -> None:
    data = measurer(batch_maker(640, 200), tokens=100_000).plot_data
    assert len(data.logq_N) == 100_000
    began = time.process_time()
    size = sum(
        len(getattr(view, variant).uri) for view in figure_views(data) for variant in VARIANTS
    )
    assert size < 1.2e6
    assert time.process_time() - began < 15  # 3 s when measured
