"""How large a page is: its elements outside the explorer, of which thousands more are felt when it
is opened, and its bytes.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.rules.batch import TokenBatch
from tests.metrics.clipping.world import VOCABULARY, simple
from tests.pictures import leave_blank
from tests.studies.written import write_trace

MOST = 4500
COMMANDS = (
    "clipstats",
    "clipstats fp8-kv -a ppo -a dppo-binary-tv",
    "report smollm2",
)


class Elements(HTMLParser):
    """Counts elements outside the explorer."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.count, self._explorer = 0, False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._explorer = dict(attrs).get("id") == "explorer"
        self.count += not self._explorer


def long_responses() -> TokenBatch:
    """26 responses of 8,192 tokens whose values do not compress."""
    rng, shape = np.random.default_rng(0), (26, 8192)
    logq_ST = -(rng.exponential(1.0, shape) ** 3)
    logp_ST = np.minimum(logq_ST + 0.1 * rng.standard_t(3, shape), 0)
    return simple(
        list(logq_ST),
        list(logp_ST),
        rng.choice([-1.0, 0.5], len(logq_ST)),
        response_ids_T=rng.integers(0, VOCABULARY, logq_ST.size).astype(np.int32),
        entropy_trainer_T=rng.exponential(1.0, logq_ST.size).astype(np.float32),
    )


@pytest.mark.slow
def test_a_page_of_every_algorithm_on_a_long_trace_has_at_most_3_2_megabytes(
    tmp_path: Path,
) -> None:
    """Half of it are the values of the explorer, a quarter the two figures with dots."""
    write_trace(tmp_path / "trace", long_responses())
    assert run(["clipstats", str(tmp_path), "--output", str(tmp_path / "made"), "--quiet"]) == 0
    page = (tmp_path / "made" / "report.html").read_bytes()
    assert " algorithms without a slider, as the trace is long" in page.decode()
    assert 1_500_000 < len(page) <= 3_200_000


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_few_elements(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_blank(monkeypatch)
    assert run([*command.split(), "--output", str(tmp_path / "made"), "--quiet"]) == 0
    page = (tmp_path / "made" / "report.html").read_text(encoding="utf-8")
    assert 1000 < Elements(page).count <= MOST
