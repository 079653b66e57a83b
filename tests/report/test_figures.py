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
from mismatch_cli.report.drawing.style import LIGHT, WIDE
from mismatch_cli.report.figures import FigureView, figure_views
from mismatch_cli.report.picture_files import PictureFiles, page_svg

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
            sizes = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
            assert [round(points / 0.75) for points in sizes] == [picture.width, picture.height]
            assert "<text" in svg  # real text, sharp at any zoom
            assert "system-ui" in svg


def test_the_same_data_gives_the_same_bytes_and_files(
    tmp_path: Path, measured: SimpleNamespace, figures: list[FigureView]
) -> None:
    from PIL import Image

    settings = dict(mpl.rcParams)
    views = figure_views(measured.plot_data, tmp_path / "plots", PictureFiles(("png",)))
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
    axes.set_xlim(1e-6, 1)
    axes.logarithmic("x")
    words = re.findall(r">([^<>]*)</text>", page_svg(sheet))
    assert {"10⁻⁶", "10⁻⁴", "0.01", "1"} <= {*words}
    assert not any("$" in text for text in words)


def test_a_hundred_thousand_tokens_stay_small_and_quick(
    batch_maker: Callable[..., object], measurer: Callable[..., SimpleNamespace]
) -> None:
    data = measurer(batch_maker(640, 200), tokens=100_000).plot_data
    assert len(data.logq_N) == 100_000
    began = time.process_time()
    size = sum(
        len(getattr(view, variant).uri) for view in figure_views(data) for variant in VARIANTS
    )
    assert size < 2e6
    assert time.process_time() - began < 15  # 3 s when measured


def test_dots_of_the_explorer_are_not_drawn_again_beside_it(measured: SimpleNamespace) -> None:
    alone = {view.name for view in figure_views(measured.plot_data, explored=False)}
    beside = {view.name for view in figure_views(measured.plot_data, explored=True)}
    assert alone - beside == {"ratio-and-tv", "logp-agreement"}


def test_colours_of_a_page_s_picture_are_the_reader_s(figures: list[FigureView]) -> None:
    svg = svg_of(figures[0].wide.uri)
    assert "prefers-color-scheme:dark" in svg and "--ink:" in svg and "fill: var(--ink)" in svg


def test_words_and_numbers_in_a_picture_stay_as_they_are() -> None:
    sheet = Sheet(WIDE)
    (axes,) = sheet.panels(1)
    name = f"a: {LIGHT.blue} 0.012345"
    axes.plot([0, 1e-4], [0, 1.23456789], color=LIGHT.blue, label=name)
    axes.headline(name)
    svg = page_svg(sheet)
    assert f">{name}</text>" in svg and ">0.0001</text>" in svg
    assert not re.search(r'd="[^"]*\.\d{3}', svg) and "stroke: var(--blue)" in svg
