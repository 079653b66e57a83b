"""A synthetic measurement that looks real: long-tailed μ, logits rounded to bf16, a little
noise, a heavy tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.retained_rows import ScatterSample
from mismatch_cli.metrics.route_flips import RouteFlips
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.report.figures import FigureView, figure_views
from mismatch_cli.report.outline import Excerpt, Outline, Section, TokenText
from mismatch_cli.report.pages import mismatch
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.mismatch import PlotData, analyse_mismatch
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.routes import compare_routes, route_columns
from mismatch_cli.trace.writer import rows_to_table
from tests.report.browser import CHROMIUM, Browser
from tests.report.explored import Explored, hostile_page
from tests.studies.compared import analysis, float32_rows, perturbed, plot_data, result, traces  # noqa: F401  # noqa: F401

TOP_K = 8
HOSTILE = (
    "<script>alert(1)</script> </style>{{ 7 * 7 }} $\\frac{1}{2}$ \x1b[2J \u202eevil\u202c \x00 "
    "\ud800 [bold]x[/bold]"
)


def make_batch(responses: int, mean_length: int) -> TokenBatch:
    """Responses of geometric length; the trainer's logits differ by rounding in steps of 1/8 and
    1/4, and by noise.
    """
    rng = np.random.default_rng(0)
    length_S = 1 + rng.geometric(1 / mean_length, responses)
    count = int(length_S.sum())
    logq_T = _log_mu(rng, count)
    x_T = 0.125 * rng.choice([-2, -1, 0, 1, 2], count, p=[0.02, 0.2, 0.56, 0.2, 0.02]) + rng.normal(
        0, 0.012, count
    )
    x_T += rng.standard_t(2.5, count) * 0.01 - 0.004
    # Odds change by e^x
    d_T = x_T - np.log1p(np.exp(logq_T) * np.expm1(x_T))
    tensors = {
        "response_ids_T": np.zeros(count, dtype=np.int32),
        "loss_mask_T": np.ones(count, dtype=bool),
        "logp_rollout_T": _float32(logq_T),
        "logp_trainer_T": _float32(np.minimum(logq_T + d_T, 0)),
    }
    tensors["logp_recomputed_T"] = tensors["logp_trainer_T"]
    tensors["logp_trainer_repeat_T"] = _float32(
        np.minimum(logq_T + d_T + rng.normal(0, 3e-3, count) * (1 - np.exp(logq_T)), 0)
    )
    tensors |= _topk_columns(rng, logq_T, tensors["logp_trainer_T"])
    names = set(TokenBatch.__dataclass_fields__) - set(tensors)
    rows = {
        "offset_S1": np.concatenate([[0], np.cumsum(length_S)]),
        "prompt_id_S": np.arange(responses) // 8,
        "sample_index_S": (np.arange(responses) % 8).astype(np.int32),
        "step_S": (np.arange(responses) * 4 // responses).astype(np.int32),
        **{f"{name}_S": np.zeros(responses, dtype=np.int32) for name in ("epoch", "minibatch")},
        "prompt_length_S": np.full((responses,), 20),
        "truncated_S": np.zeros(responses, dtype=bool),
        "reward_S": _float32(rng.random(responses) < 0.55),
    }
    return TokenBatch(**(dict.fromkeys(names) | tensors | rows))


def _log_mu(rng: np.random.Generator, count: int) -> np.ndarray:
    near_one = -(rng.exponential(1, count) ** 3) * 2e-3
    spread = np.log(rng.beta(0.9, 0.9, count))
    tail = -rng.gamma(3.0, 1.6, count)
    kind = rng.choice(3, count, p=[0.72, 0.23, 0.05])
    return np.clip(np.choose(kind, [near_one, spread, tail]), -13.8, -1e-7)


def _topk_columns(
    rng: np.random.Generator, logq_T: np.ndarray, logp_T: np.ndarray
) -> dict[str, np.ndarray]:
    """The sampled token is rank 1 where μ > ½ and outside otherwise; the other ranks share most
    of the rest.
    """
    mu_T, pi_T = np.exp(logq_T), np.exp(logp_T)
    inside_T = mu_T > 0.5
    shares = rng.dirichlet(np.full(TOP_K, 0.6), len(mu_T)) * 0.97
    noise = np.exp(rng.normal(0, 0.05, shares.shape))
    topk_mu, topk_pi = (1 - mu_T)[:, None] * shares, (1 - pi_T)[:, None] * shares * noise
    # The named tokens may have no more than what the sampled one leaves
    topk_pi *= np.minimum(
        1, 0.999 * (1 - pi_T)[:, None] / np.maximum(topk_pi.sum(1, keepdims=True), 1e-30)
    )
    topk_mu[inside_T, 0], topk_pi[inside_T, 0] = mu_T[inside_T], pi_T[inside_T]
    ids_TK = np.tile(np.arange(1, TOP_K + 1), (len(mu_T), 1))
    ids_TK[inside_T, 0] = 0
    with np.errstate(divide="ignore"):
        return {
            "topk_ids_TK": ids_TK.astype(np.int32),
            "topk_logp_rollout_TK": _float32(np.log(topk_mu)),
            "topk_logp_trainer_TK": _float32(np.log(topk_pi)),
            "topk_logp_recomputed_TK": _float32(np.log(topk_pi)),
        }


def _float32(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def route(batch: TokenBatch) -> tuple[TokenBatch, dict[str, Any]]:
    """The batch as if from a mixture of experts: deeper layers flip more, and near ties more
    than others.
    """
    layers, experts, k = 24, 16, 4
    rng, offset_S1 = np.random.default_rng(1), batch.offset_S1
    every_TMK = np.tile(np.arange(experts), (batch.num_tokens, layers, 1))
    trainer_TMK = rng.permuted(every_TMK, axis=-1)[..., : k + 1]
    margin_TM = np.exp(rng.normal(-0.5, 1.2, (batch.num_tokens, layers)))
    flipped_TM = rng.random(margin_TM.shape) < 0.3 * np.exp(-6 * margin_TM) * np.linspace(
        0.3, 2, layers
    )
    engine_TMK = np.where(flipped_TM[..., None], trainer_TMK[..., 1:], trainer_TMK[..., :k])
    columns = (engine_TMK, trainer_TMK[..., :k], margin_TM, batch.loss_mask_T)
    parts = zip(*(np.split(column, offset_S1[1:-1]) for column in columns), strict=True)
    by_column = route_columns([compare_routes(*part) for part in parts])
    flat = {f"{name}_T": np.concatenate(by_column[name]) for name in ("route_flips", "route_first")}
    return replace(batch, **flat), by_column


def measure(
    batch: TokenBatch, *, tokens: int = 20_000, routes: dict[str, Any] | None = None
) -> SimpleNamespace:
    """The plot data of one batch."""
    summary = MismatchSummary(PAIRS["mismatch"])
    sample, routing = ScatterSample(tokens=tokens), RouteFlips()
    summary.update(batch, routing)
    if routes is not None:
        routing.update_responses(rows_to_table(routes), batch.prompt_id_S)
    for gaps in token_gaps(batch, PAIRS["mismatch"]):
        sample.update(gaps)
    gap = summary.result()
    subject = "Qwen2.5-0.5B-Instruct · vLLM bfloat16 against Hugging Face bfloat16 · temperature 1"
    data = PlotData.of(gap, sample.result(), (0.125, 0.25), subject)
    flips = routing.result(gap.counts.prompts, {"experts_per_token": 4})
    return SimpleNamespace(plot_data=replace(data, routing=flips))


def make_view(figures: list[FigureView]) -> Outline:
    """The page of a bundled trace with these figures, and hostile texts."""
    page = mismatch.page(analyse_mismatch([Trace.open(bundled("traces") / "fp8-kv")], 0), worst=0)
    sections = {section.title: section for section in page.sections}
    scatter = "Ratio and TV by probability"
    parts = [sections[title] for title in ("The gap", scatter, "Whole responses")]
    return Outline(
        title=f"Rollout and trainer {HOSTILE}",
        about=(*page.about, ("Prompts", "/a/path/without/any/place/to/break/it/" + "x" * 80)),
        notes=("3 prompts were skipped (too long).", HOSTILE),
        headline="The policies differ by 0.00318 in probability on the average token.",
        leading=page.leading,
        parts=(*parts, Section("Worst tokens", excerpts=_excerpts())),
        figures=[replace(figure, sections=(scatter,)) for figure in figures],
        settings=(*page.settings, ("Trainer", (("a" * 60, "b" * 60),))),
        command="mismatch-cli report " + "probe-model-with-a-long-name " * 6,
    )


def _excerpts() -> tuple[Excerpt, ...]:
    pieces = (
        TokenText("Let's factor: $x^2 - 5x + 6 = (x - 2)(x - 3)$, so the roots are"),
        TokenText(" 2", 1, "log π − log μ = −0.08"),
        TokenText(" and"),
        TokenText(" 3", 2),
        TokenText(". The sum of\n"),
        TokenText(" squares", 4, HOSTILE),
        TokenText(" is 13.\n\nשלום 漢字 "),
        TokenText(HOSTILE, 3),
    )
    facts = (("μ", "0.981"), ("π", "0.088"), ("position", "312 of 840"))
    return (
        Excerpt(f"“{HOSTILE}”", facts, pieces, "What is the sum of squares?\n"),
        Excerpt("“\n”", facts, pieces),
    )


@pytest.fixture(scope="session")
def batch_maker() -> Callable[..., TokenBatch]:
    return make_batch


@pytest.fixture(scope="session")
def measurer() -> Callable[..., SimpleNamespace]:
    return measure


@pytest.fixture(scope="session")
def measured() -> SimpleNamespace:
    """A measurement in which one response in three has turns, with tool output between them."""
    batch = make_batch(240, 120)
    mask_T = np.ones(batch.num_tokens, dtype=bool)
    for first, end in zip(
        batch.offset_S1[:-1:3].tolist(), batch.offset_S1[1::3].tolist(), strict=True
    ):
        mask_T[first:end] = np.arange(end - first) % 50 < 40
    batch, routes = route(replace(batch, loss_mask_T=mask_T))
    return measure(batch, routes=routes)


@pytest.fixture(scope="session")
def figures(measured: SimpleNamespace) -> list[FigureView]:
    return figure_views(measured.plot_data)


@pytest.fixture(scope="session")
def view(figures: list[FigureView]) -> Outline:
    return make_view(figures)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    """The page of a short run with the token explorer alone."""
    return hostile_page(tmp_path_factory.mktemp("run"))
