"""`probe --full-divergence`: correct against float64, without effect on other columns,
resumable, and within limits.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.options import build
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.probe import full_divergence
from mismatch_cli.probe.config import ProbeConfig, RolloutConfig
from mismatch_cli.probe.full_divergence import Distributions
from mismatch_cli.rules.divergences import sampled_in_topk, topk_divergences
from mismatch_cli.trace.reader import Trace
from tests.rules.test_divergences import binary_kl, binary_tv

MODEL = str(bundled("model"))
N = 5
pytestmark = pytest.mark.usefixtures("no_report")
SIZE = [
    "--num-prompts",
    "4",
    "--samples-per-prompt",
    "3",
    "--max-tokens",
    "40",
    "--temperature",
    "0.8",
]
DTYPES = ["--rollout-dtype", "bfloat16", "--trainer-dtype", "float32"]
PROBE = ["probe", *SIZE, *DTYPES, "--noise-responses", "4", "--quiet"]
FULL = ["--full-divergence", str(N)]


def probe(folder: Path, engine: str, *flags: str) -> dict[str, list]:
    assert run([*PROBE, "--engine", engine, *flags, "--output", str(folder)]) == 0
    return pq.read_table(sorted((folder / "trace").glob("shard-*.parquet"))).to_pydict()


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def recorded(request, tmp_path_factory) -> tuple[Path, dict[str, list]]:
    """A run of four shards, with a copy of its distributions, which are removed once scored."""
    folder, remove = tmp_path_factory.mktemp(request.param), Distributions.remove

    def keep(self: Distributions) -> None:
        shutil.copytree(self.folder, folder / "kept")
        remove(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distributions, "remove", keep)
        patch.setattr(RolloutConfig, "prompts_per_shard", 1)
        columns = probe(folder / "run", request.param, *FULL)
    return folder, columns


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> dict[str, list]:
    return probe(tmp_path_factory.mktemp("without") / "run", "hf")


def test_tv_and_kl_are_those_of_both_distributions_in_float64(recorded):
    folder, columns = recorded
    model, sampling = load_causal_lm(MODEL, dtype="float32"), SamplingSettings(temperature=0.8)
    for row in range(N):
        prompt, ids = columns["prompt_ids"][row], columns["response_ids"][row]
        stored_file = folder / "kept" / f"response-{row:05d}.float32"
        mu_TV = (
            torch.from_numpy(np.fromfile(stored_file, dtype=np.float32).reshape(len(ids), 2048))
            .double()
            .log_softmax(1)
        )
        with torch.inference_mode():
            logits_TV = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        pi_TV = sampling.process(logits_TV).double().log_softmax(1)
        tv_T = (mu_TV.exp() - pi_TV.exp()).abs().sum(1) / 2
        kl_T = (mu_TV.exp() * (mu_TV - pi_TV)).sum(1)
        assert tv_T.mean() > 3e-4
        np.testing.assert_allclose(columns["tv_full"][row], tv_T, rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(columns["kl_full"][row], kl_T, rtol=2e-3, atol=2e-9)


def test_only_the_first_responses_have_one_and_no_files_remain(recorded):
    folder, columns = recorded
    for name in ("tv_full", "kl_full"):
        assert [value is not None for value in columns[name]] == [row < N for row in range(12)]
    assert not (folder / "run" / "distributions").exists()
    assert len(list((folder / "kept").iterdir())) == N


def test_binary_is_at_most_top_k_is_at_most_full(recorded):
    batches = Trace.open(recorded[0] / "run").batches()
    measured = [batch for batch in batches if batch.tv_full_T is not None]
    assert [batch.num_responses for batch in measured] == [3, 3], "two shards of N = 5 responses"
    for batch in measured:
        known_T, ids_T = ~np.isnan(batch.tv_full_T), batch.response_ids_T
        logp = (batch.logp_rollout_T, batch.logp_trainer_T)
        topk = (batch.topk_logp_rollout_TK, batch.topk_logp_trainer_TK)
        mu_T, pi_T, mu_TK, pi_TK = (column.astype(np.float64) for column in (*logp, *topk))
        rows = [(binary_tv(mu_T, pi_T), binary_kl(mu_T, pi_T))]
        for k in (1, 5, 20):
            in_topk_T = sampled_in_topk(ids_T, batch.topk_ids_TK[:, :k])
            rows.append(topk_divergences(mu_T, pi_T, mu_TK[:, :k], pi_TK[:, :k], in_topk_T))
        rows.append((batch.tv_full_T.astype(np.float64), batch.kl_full_T.astype(np.float64)))
        for (tv_T, kl_T), (finer_tv_T, finer_kl_T) in pairwise(rows):
            assert (finer_tv_T - tv_T)[known_T].min() > -2e-6
            assert (finer_kl_T - kl_T)[known_T].min() > -2e-7
        assert rows[-1][0][known_T].mean() > 1.2 * rows[0][0][known_T].mean()


def test_the_other_columns_are_the_same_without_it(without, tmp_path):
    """With `hf` to the bit: its batches are the same.

    Where vLLM differs is in tests/models/engines/test_engines.py.
    """
    columns = probe(tmp_path / "run", "hf", *FULL)
    assert columns.keys() - without.keys() == {"tv_full", "kl_full"}
    assert {name: columns[name] for name in without} == without


def test_clipstats_shows_how_close_the_approximations_come(recorded, tmp_path, capsys):
    folder, columns = recorded
    shutil.copytree(folder / "run", tmp_path / "run")
    assert run(["clipstats", str(tmp_path / "run"), "--json", "--quiet"]) == 0
    approximation = json.loads(capsys.readouterr().out)["approximation"]
    full = {name: np.concatenate(columns[f"{name}_full"][:N]) for name in ("tv", "kl")}
    assert approximation["truth"] == "full" and approximation["tokens"] == len(full["tv"])
    for row in approximation["rows"]:
        assert row["mean"]["value"] - row["bias"]["value"] == pytest.approx(
            full[row["divergence"]].mean(), rel=1e-3
        )
    biases = [row["bias"]["value"] for row in approximation["rows"] if row["divergence"] == "tv"]
    assert biases == sorted(biases) and biases[-1] <= 1e-6


@pytest.mark.slow
def test_a_run_stopped_before_scoring_resumes_with_its_distributions(
    without, tmp_path, monkeypatch, capsys
):
    from mismatch_cli.models.scoring.trainer import Trainer

    def broken(*arguments, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "score", broken)
        assert run([*PROBE, "--engine", "hf", *FULL, "--output", str(tmp_path / "run")]) == 130
    folder = tmp_path / "run" / "distributions"
    assert len(list(folder.iterdir())) == N
    shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    assert run(["probe", "--resume", "--quiet", "--output", str(tmp_path / "run")]) == 0
    columns = pq.read_table(tmp_path / "run" / "trace" / "shard-00000.parquet").to_pydict()
    assert {name: columns[name] for name in without} == without
    assert columns["tv_full"][N - 1] is not None and not folder.exists()
    shutil.copy(
        folder.parent.parent / "damaged/distributions/response-00000.float32", tmp_path / "other"
    )
    shutil.move(
        tmp_path / "other", tmp_path / "damaged" / "distributions" / "response-00001.float32"
    )
    capsys.readouterr()
    assert run(["probe", "--resume", "--quiet", "--output", str(tmp_path / "damaged")]) == 1
    assert "response-00001.float32 lacks the full distributions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "10000000"], "in vllm, and half of the free memory is"),
        (
            ["--full-divergence-memory", "0.001"],
            "--max-tokens 3 would fit; --engine hf keeps one token at a time",
        ),
        (["--engine", "hf", "--max-tokens", "1000000000"], "GiB of disk until scoring"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_loads(flags, message, tmp_path, capsys):
    assert run([*PROBE, *FULL, *flags, "--output", str(tmp_path / "run")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "trace").exists()


def test_the_disk_needs_four_bytes_for_every_token_of_the_vocabulary(monkeypatch, tmp_path):
    """At every token of five responses of 40; a byte less has room for four of them."""
    config = build(ProbeConfig, {"engine": "hf", "full_divergence": 5, "max_tokens": 40})
    needed = 4 * 2048 * 40 * 5
    monkeypatch.setattr(full_divergence, "_free_disk", lambda _: needed)
    full_divergence.check_room(config, 2048, tmp_path, 5)
    monkeypatch.setattr(full_divergence, "_free_disk", lambda _: needed - 1)
    with pytest.raises(MismatchError, match="Use at most --full-divergence 4, "):
        full_divergence.check_room(config, 2048, tmp_path, 5)


def test_only_the_responses_that_there_will_be_need_room(monkeypatch, tmp_path):
    """1000 are asked for, and two problems have three each."""
    settings = {"engine": "hf", "full_divergence": 1000, "max_tokens": 40, "samples_per_prompt": 3}
    config = build(ProbeConfig, settings)
    of_one = 4 * 2048 * 40
    monkeypatch.setattr(full_divergence, "_free_disk", lambda _: 6 * of_one)
    full_divergence.check_room(config, 2048, tmp_path, 2)
    for free, words in (
        (6 * of_one - 1, "Use at most --full-divergence 5, "),
        (1, "Use a smaller"),
    ):
        monkeypatch.setattr(full_divergence, "_free_disk", lambda _, free=free: free)
        with pytest.raises(MismatchError, match=f"--full-divergence 6 would .*{words}"):
            full_divergence.check_room(config, 2048, tmp_path, 2)


@pytest.mark.slow
def test_hf_is_the_engine_that_can(tmp_path, capsys):
    """Where vLLM is refused, the same limit allows hf: it keeps one token at a time."""
    columns = probe(tmp_path / "run", "hf", *FULL, "--full-divergence-memory", "0.001")
    assert columns["tv_full"][0] is not None


@pytest.mark.slow
def test_asking_for_more_responses_than_exist_gives_all(tmp_path):
    columns = probe(tmp_path / "run", "hf", "--full-divergence", "1000")
    assert None not in columns["tv_full"]


def test_free_memory_is_found():
    assert 2**26 < full_divergence.free_memory() < 2**50


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", 700, 3072), (None, 700, 3072), (9000, 700, 3072), (1000, 700, 450), (1000, 1200, 0)],
)
def test_free_memory_is_that_of_the_container(limit, used, free, tmp_path, monkeypatch):
    """3 KiB are free in the system, and 150 bytes of what is used are files that were read."""
    monkeypatch.setattr(full_divergence, "Path", lambda name: tmp_path / name[1:])
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 3 kB\n")
    if limit is not None:
        (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text("anon 550\ninactive_file 150\n")
    assert full_divergence.free_memory() == free
