"""The routes of a mixture of experts, from the engine through the trace to the trainer, and how
much of the gap a replay removes; with an engine whose routing is perturbed on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.routers import Routers
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.probe.score import requests_of
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.routes import route_columns
from tests.moe_models import EXPERTS, TOP_K, with_tokenizer

SAMPLING = SamplingSettings(max_tokens=24)
SHARE = 0.15  # of choices that a perturbed router changes
FLOOR = 1e-5
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return with_tokenizer(tmp_path_factory.mktemp("moe"), num_hidden_layers=LAYERS)


def rollouts_of(model: str, perturb: bool) -> list:
    """Responses of the HF engine, of several lengths and prompts."""
    torch.set_num_threads(1)
    engine = create_engine(
        "hf", EngineSettings(model, SAMPLING, 4, dtype="float32", extra={"batch_size": 3})
    )
    if perturb:
        perturb_routers(engine.model)  # type: ignore[attr-defined]
    requests = [Request(list(range(40, 45 + 3 * i)), seed=i) for i in range(7)]
    rollouts = engine.sample(requests, lambda _: None)
    engine.close()
    return rollouts


def perturb_routers(loaded) -> None:
    """Every router gives some of its last places to the best expert it left out, with that
    expert's weight.
    """
    random = torch.Generator().manual_seed(1)

    def swap(_module, _inputs, output):
        logits_NE, _, chosen_NK = output
        moved_N = torch.rand(len(chosen_NK), generator=random) < SHARE
        left_out_N = logits_NE.topk(TOP_K + 1).indices[:, -1]
        told_NK = chosen_NK.clone()
        told_NK[moved_N, -1] = left_out_N[moved_N]
        weight_NK = logits_NE.softmax(-1).gather(1, told_NK)
        return logits_NE, weight_NK / weight_NK.sum(-1, keepdim=True), told_NK

    for module in loaded.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(swap, prepend=True)  # the engine records the result


def test_the_engine_reports_the_experts_of_every_token_that_it_read(model):
    loaded = load_causal_lm(model, "float32")
    routers = Routers.proven(loaded)
    assert routers is not None
    for rollout in rollouts_of(model, perturb=False):
        fed = (rollout.prompt_ids + rollout.response_ids)[:-1]
        with torch.inference_mode():
            loaded(input_ids=torch.tensor([fed]))
        chosen_NMK, _ = routers.choices()
        assert rollout.routes_FMK.dtype == np.uint16
        assert np.array_equal(np.sort(rollout.routes_FMK), np.sort(chosen_NMK.numpy()))


def test_replay_reduces_the_gap_to_the_floor_if_only_routing_differs(model):
    """And a known share of flips is read back from the trainer's routers while they follow the
    engine.
    """
    rollouts = rollouts_of(model, perturb=True)
    gaps, flips = {}, {}
    for replay in (False, True):
        trainer = Trainer.load(model, sampling=SAMPLING, dtype="float32", replay_routes=replay)
        for budget in (40, 4096):  # alone, and padded as rows of a batch
            scores = trainer.score(list(map(ScoreRequest.of, rollouts)), token_budget=budget)
            pairs = zip(scores, rollouts, strict=True)
            gaps[replay, budget] = max(
                float(np.abs(s.logp_T - r.logp_rollout_T).max()) for s, r in pairs
            )
            flips[replay, budget] = [s.routes for s in scores]
    assert max(gaps[True, 40], gaps[True, 4096]) <= FLOOR
    assert min(gaps[False, 40], gaps[False, 4096]) > 1000 * FLOOR
    choices = sum(len(r.response_ids) for r in rollouts) * LAYERS
    for budget in (40, 4096):
        counted = sum(int(comparison.flips_T.sum()) for comparison in flips[True, budget])
        by_layer = sum(comparison.layers_MC for comparison in flips[True, budget])
        assert by_layer[:, 0].sum() == choices and by_layer[:, 1].sum() == counted
        assert by_layer[:, 2].sum() == TOP_K * choices - counted
        assert abs(counted / choices - SHARE) < 4 * (SHARE * (1 - SHARE) / choices) ** 0.5


def test_flips_put_into_a_trace_are_read_back_one_by_one(model, tmp_path, rng):
    """The exact number, whatever effect the trainer's own choices have on later ones."""
    assert (
        run(
            [
                "probe",
                model,
                *_SMALL,
                "--rollout-dtype",
                "float32",
                "--output",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    table = next(Trace.open(tmp_path / "run").tables())
    trainer = Trainer.load(model, sampling=SAMPLING, dtype="float32")
    requests = requests_of(table, LAYERS)
    assert sum(int(s.routes.flips_T.sum()) for s in trainer.score(requests, token_budget=4096)) == 0
    planted = []
    for request in requests:
        routes_FMK = request.routes_FMK.copy()
        moved_FM = rng.random(routes_FMK.shape[:2]) < SHARE
        # The first expert that is not among the chosen ones
        is_chosen_FME = (routes_FMK[..., None] == np.arange(EXPERTS)).any(axis=2)
        spare_FM = is_chosen_FME.argmin(axis=-1)
        routes_FMK[moved_FM, 0] = spare_FM[moved_FM]
        planted.append(moved_FM[len(request.prompt_ids) - 1 :])
        object.__setattr__(request, "routes_FMK", routes_FMK)
    columns = route_columns([s.routes for s in trainer.score(requests, token_budget=4096)])
    assert [flips_T.tolist() for flips_T in columns["route_flips"]] == [
        moved.sum(1).tolist() for moved in planted
    ]


_SMALL = [
    "--engine", "hf", "--trainer-dtype", "float32", "--num-prompts", "16", "--samples-per-prompt",
    "2", "--max-tokens",
    "12", "--quiet", "--no-plots", "--noise-responses", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def probed(model, tmp_path_factory) -> Path:
    """An engine in bfloat16, which flips near ties, and the trainer that scores with its own
    routes.
    """
    folder = tmp_path_factory.mktemp("routes")
    assert (
        run(
            [
                "probe",
                model,
                *_SMALL,
                "--rollout-dtype",
                "bfloat16",
                "--output",
                str(folder / "own"),
            ]
        )
        == 0
    )
    again = [
        "rescore",
        str(folder / "own"),
        "--trainer-dtype",
        "float32",
        "--quiet",
        "--no-plots",
        "--replay-routes",
    ]
    assert run([*again, "--output", str(folder / "replayed")]) == 0
    return folder


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_probe_measures_routing(probed):
    summary = summary_of(probed / "own")
    routing, gap = summary["routing"], summary["pairs"]["mismatch"]
    (batch,) = Trace.open(probed / "own").batches()
    flips_T, d_T = (
        batch.route_flips_T,
        np.abs(batch.logp_trainer_T.astype(np.float64) - batch.logp_rollout_T),
    )
    metrics = {key: metric["value"] for key, metric in routing["metrics"].items()}
    assert 0 < (flips_T > 0).sum() < len(flips_T)
    assert metrics["flipped_tokens"] == pytest.approx((flips_T > 0).mean())
    assert metrics["flipped_routers"] == pytest.approx(flips_T.mean() / LAYERS)
    assert metrics["share_of_gap"] == pytest.approx(d_T[flips_T > 0].sum() / d_T.sum(), rel=1e-5)
    assert metrics["abs_d_flipped"] == pytest.approx(d_T[flips_T > 0].mean(), rel=1e-5)
    assert metrics["abs_d_other"] == pytest.approx(d_T[flips_T == 0].mean(), rel=1e-5)
    assert metrics["abs_d_flipped"] > 2 * metrics["abs_d_other"], "a flip costs more than rounding"
    assert routing["tokens"] == gap["counts"]["tokens"] and not routing["replayed"]
    assert [row["layer"] for row in routing["layers"]] == list(range(LAYERS))
    flipped = sum(row["flipped"]["value"] * row["tokens"] for row in routing["layers"])
    assert flipped == pytest.approx(flips_T.sum())
    assert 1 - flips_T.mean() / LAYERS < metrics["agreement"] <= 1 - flips_T.mean() / LAYERS / TOP_K
    assert sum(row["tokens"] for row in routing["by_flips"]) == len(flips_T)
    assert sum(row["share_of_gap"] for row in routing["by_flips"]) == pytest.approx(1)
    assert sum(routing["first"]) == (flips_T > 0).sum()
    margins = routing["margins"]
    assert margins["flipped"]["count"] == flips_T.sum()
    assert margins["flipped"]["p50"] < margins["agreeing"]["p50"], "near ties"
    first = summary["suspects"][0]
    assert first["setting"] == "rollout.num_experts" and "--replay-routes" in first["test"][0]


def test_replay_is_paired_with_the_gap_that_it_removes(probed, capsys):
    own, replayed = (
        summary_of(probed / name)["pairs"]["mismatch"]["metrics"] for name in ("own", "replayed")
    )
    assert replayed["abs_d_mean"]["value"] < 0.7 * own["abs_d_mean"]["value"]
    assert summary_of(probed / "replayed")["routing"]["replayed"]
    names = [str(probed / name) for name in ("own", "replayed")]
    assert (
        run(
            [
                "compare",
                *names,
                "--json",
                "--quiet",
                "--no-plots",
                "--output",
                str(probed / "compared"),
            ]
        )
        == 0
    )
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert comparison["pairing"] == "tokens"
    difference = comparison["metrics"]["abs_d_mean"]["difference"]
    assert difference["high"] < 0 and comparison["metrics"]["abs_d_mean"]["more_than_noise"]
    assert [row["setting"] for row in comparison["settings"] if not row["harmless"]] == [
        "trainer.routes"
    ]


def test_full_routes_are_kept_only_for_the_first_responses(model, probed, tmp_path, capsys):
    keep = ["--keep-routes", "5", "--rollout-dtype", "bfloat16", "--output", str(tmp_path / "run")]
    assert run(["probe", model, *_SMALL, *keep]) == 0
    table = next(Trace.open(tmp_path / "run").tables())
    assert table["routes"].is_valid().to_pylist() == [True] * 5 + [False] * 27
    whole = next(Trace.open(probed / "own").tables())
    for name in ("route_flips", "route_first", "route_layers", "route_margins"):
        assert table[name].equals(whole[name]), name
    capsys.readouterr()
    assert (
        run(
            [
                "rescore",
                str(tmp_path / "run"),
                "--replay-routes",
                "--output",
                str(tmp_path / "again"),
            ]
        )
        == 1
    )
    printed = " ".join(capsys.readouterr().err.split())
    assert (
        "lacks the routes of 27 of its 32 responses" in printed
        and "MISMATCH_KEEP_ROUTES=32" in printed
    )


def test_a_dense_model_has_none(tmp_path, capsys):
    small = [
        *_SMALL[:5],
        "4",
        "--samples-per-prompt",
        "1",
        "--max-tokens",
        "4",
        "--quiet",
        "--no-plots",
    ]
    assert run(["probe", *small, "--output", str(tmp_path / "run")]) == 0
    assert summary_of(tmp_path / "run")["routing"] is None
    assert not any(name.startswith("route") for name in Trace.open(tmp_path / "run").columns())
    for flag in ("--routes", "--replay-routes"):
        assert run(["probe", *small, flag, "--output", str(tmp_path / "other")]) == 1
        assert "has no routers whose choices can be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ("--engine", "vllm", "--routes"),
            1,
            "vLLM on a CPU does not report which experts it chose",
        ),
        (
            ("--engine", "server", "--engine-url", "http://localhost:1", "--routes"),
            2,
            "--engine server does not report",
        ),
        (
            ("--engine", "hf", "--replay-routes", "--no-routes"),
            2,
            "--replay-routes needs the engine's routes",
        ),
    ],
)
def test_an_engine_or_model_without_routes_says_so(flags, code, message, model, tmp_path, capsys):
    assert run(["probe", model, *flags, "--output", str(tmp_path / "run"), "--quiet"]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_page_shows_the_pair_whose_flips_were_counted(model, probed, tmp_path):
    """With other weights in the trainer, flips are those of the weights that sampled."""
    newer = with_tokenizer(tmp_path, num_hidden_layers=LAYERS, initializer_range=0.21)
    flags = [
        "--trainer-model",
        newer,
        "--rollout-dtype",
        "bfloat16",
        "--output",
        str(tmp_path / "run"),
    ]
    assert run(["probe", model, *_SMALL, *flags]) == 0
    trace, own = (Trace.open(folder) for folder in (tmp_path / "run", probed / "own"))
    assert {"logp_recomputed", "route_flips"} <= trace.columns()
    assert analyse_mismatch([trace]).main_pair == PAIRS["mismatch"]
    for name in ("route_flips", "route_layers"):
        assert next(trace.tables())[name].equals(next(own.tables())[name])
