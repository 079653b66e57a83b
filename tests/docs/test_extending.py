"""The examples of docs/extending.md do what they say; that they load and run, test_commands shows line by line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mismatch_cli import registry
from mismatch_cli.algorithms.algorithm import Mask
from mismatch_cli.policies import Policies
from mismatch_cli.report.figures import draw, plots_of
from mismatch_cli.report.plots._style import DARK, LIGHT, NARROW, WIDE, Style
from mismatch_cli.studies.mismatch_plot_data import PlotData
from tests.docs.pages import DOCS, File, steps
from tests.docs.reader import save


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The files of the package that the page shows, in their places."""
    for step in steps(DOCS / "extending.md"):
        if isinstance(step, File) and step.name.startswith("mismatch_cli/"):
            save(step, tmp_path, monkeypatch)


def test_each_is_found_by_its_name_and_gone_afterwards(saved):
    for package, name in (("trust_regions", "two-sided-tv"), ("engines", "coarse"), ("importers", "toy")):
        assert name in registry.names(f"mismatch_cli.{package}")
        assert registry.load(f"mismatch_cli.{package}", name, "example").__doc__


def test_without_the_page_they_are_not_there():
    assert "coarse" not in registry.names("mismatch_cli.engines")


def test_the_mask_with_equal_limits_is_binary_tv(saved, rng):
    logp_2T = torch.from_numpy(np.log(rng.uniform(0.001, 0.999, (2, 500))))
    advantage_T = torch.from_numpy(rng.normal(size=500))
    policies = Policies(*logp_2T, None, torch.tensor([0, 500]))
    limits = (("max_rise", 0.15), ("max_fall", 0.15))
    mine, theirs = Mask("two-sided-tv", chosen=limits), Mask("binary-tv")
    assert torch.equal(mine.decide(policies, advantage_T).keep_T, theirs.decide(policies, advantage_T).keep_T)
    other = Mask("two-sided-tv").decide(policies, advantage_T).keep_T  # 0.3 up, 0.1 down
    kept = theirs.decide(policies, advantage_T).keep_T
    assert (other >= kept)[advantage_T > 0].all() and (other <= kept)[advantage_T < 0].all()
    assert (other != kept).any()


@pytest.mark.parametrize("layout", [WIDE, NARROW], ids=lambda layout: layout.name)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_plot_draws_its_tokens(saved, rng, layout, theme):
    plot = plots_of(PlotData.STUDY)["gap-histogram"]
    logq_N = -rng.exponential(size=300).astype(np.float32)
    data = PlotData({}, logq_N=logq_N, logp_N=logq_N + rng.normal(0, 0.01, 300).astype(np.float32))
    assert plot.needs(data) and not plot.needs(PlotData({}))
    (axes,) = draw(plot, data, Style(layout, theme)).axes
    assert sum(bar.get_height() for bar in axes.patches) == 300
