"""Records the bundled traces of the dense model with vLLM: `python -m lab.makers.make_traces`
writes traces/fp8-kv, traces/float32 and traces/bfloat16.

The first is a training run in miniature. vLLM samples in bfloat16 with an fp8 KV cache; the trainer
scores the responses in bfloat16 at the same weights, learns from them in a few updates, and scores
them again; then vLLM gets the new weights. The second is the control: the same prompts at the same
weights with everything in float32. The third is what most people run, bfloat16 on both sides at
equal weights, on enough tokens to show how the ratio fans out at small μ (arXiv 2602.04879, figure
2).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from lab.makers import SAMPLE_DATA
from lab.makers.learner import Learner, minibatches
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.base.options import flat, replaced
from mismatch_cli.models.engines import EngineSettings
from mismatch_cli.models.engines import vllm as vllm_engine
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.probe.record import record
from mismatch_cli.probe.rollouts import ShardPlan, plan_shards, sample_shard
from mismatch_cli.probe.score import Pass, score_shard
from mismatch_cli.probe.tasks.grading import Grader
from mismatch_cli.probe.tasks.prompts import encode_prompts, load_problems
from mismatch_cli.rules.divergences import full_kl, full_tv
from mismatch_cli.trace.columns import TOPK_COLUMNS
from mismatch_cli.trace.manifest import read_manifest, write_manifest
from mismatch_cli.trace.reader import open_shard, table_to_batch
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import rows_to_table, write_shard

MODEL = "sample_data/model"

STEPS = 6
PROMPTS_PER_STEP = 4
TOP_K = 20

CONTROL = ProbeConfig.of(
    {
        "model": MODEL,
        "prompts": "sample_data/problems.jsonl",
        "num_prompts": STEPS * PROMPTS_PER_STEP,
        "max_tokens": 128,
        "trainer_dtype": "float32",
        "samples_per_prompt": 4,
        "top_logprobs": TOP_K,
        "rollout_dtype": "float32",
    }
)
PRECISION = replaced(
    CONTROL,
    num_prompts=128,
    trainer_dtype="bfloat16",
    samples_per_prompt=2,
    top_logprobs=8,
    rollout_dtype="bfloat16",
)
SAMPLES = 8
TRAINING = replaced(
    CONTROL,
    trainer_dtype="bfloat16",
    noise_responses=STEPS * PROMPTS_PER_STEP * SAMPLES,
    samples_per_prompt=SAMPLES,
    rollout_dtype="bfloat16",
    kv_cache_dtype="fp8",
)


def flags_of(config: ProbeConfig) -> dict[str, Any]:
    """The flags that `probe --like` takes over: all non-default ones, without the bundled paths,
    which it finds.
    """
    usual, bundled = flat(ProbeConfig()), ("model", "prompts")
    return {
        key: value
        for key, value in flat(config).items()
        if key not in bundled and value != usual[key]
    }


def record_step(
    plan: ShardPlan, engine: vllm_engine.VllmEngine, grader: Grader, learner: Learner, folder: Path
) -> None:
    """Samples, scores, learns, scores again: one step is one shard."""
    sampled_at = learner.version
    sample_shard(
        plan,
        engine,
        grader,
        folder=folder,
        samples_per_prompt=TRAINING.sampler.samples_per_prompt,
        seed=TRAINING.sampler.seed,
        on_finished=lambda _: None,
    )
    shard = plan.path(folder)
    score(shard, learner, Pass("logp_recomputed"))
    learner.learn(shard)
    score(shard, learner, Pass("logp_trainer", version_trainer=learner.version))
    finish_shard(shard, step=plan.index, version_rollout=sampled_at)


def score(shard: Path, learner: Learner, this: Pass) -> None:
    """Makes one pass over a shard; the trainer's own pass scores every response twice."""
    score_shard(
        shard,
        learner.trainer,
        this,
        token_budget=TRAINING.scorer.token_budget,
        repeat=[True] * open_shard(shard).metadata.num_rows,
        on_scored=lambda _: None,
    )


def finish_shard(shard: Path, step: int, version_rollout: int) -> None:
    """Turns log-probs of the whole vocabulary into divergences and the top K, and records the
    step.
    """
    table = open_shard(shard).read()
    batch = table_to_batch(table.combine_chunks())
    rows = batch.num_responses
    mu_TV, pi_TV = batch.topk_logp_rollout_TK, batch.topk_logp_trainer_TK
    assert mu_TV is not None and pi_TV is not None
    tokens = {"tv_full": full_tv(mu_TV, pi_TV), "kl_full": full_kl(mu_TV, pi_TV)}
    tokens |= {name: getattr(batch, f"{name}_TK")[:, :TOP_K] for name in TOPK_COLUMNS}
    columns: dict[str, Any] = {
        "step": np.full(rows, step, dtype=np.int32),
        "minibatch": minibatches(rows).astype(np.int32),
        "version_rollout": np.full(rows, version_rollout, dtype=np.int32),
        **{name: np.split(values, batch.offset_S1[1:-1]) for name, values in tokens.items()},
    }
    added = rows_to_table(columns)
    table = table.drop_columns([name for name in columns if name in table.column_names])
    for name in added.column_names:
        table = table.append_column(name, added.column(name))
    write_shard(shard, table)


def record_training(
    folder: Path, log: Path, manifest: dict[str, Any], progress: TerminalProgress
) -> None:
    """Records the training run; what it shares with the control (prompts, libraries, threads) is
    from `manifest`.
    """
    tokenizer = load_tokenizer(MODEL)
    settings = EngineSettings(
        model=MODEL,
        sampling=TRAINING.sampling,
        # The whole distribution; `finish_shard` keeps its divergences and the top K
        top_logprobs=len(tokenizer),
        dtype=TRAINING.engine.dtype,
        seed=TRAINING.sampler.seed,
        log_file=log,
        extra=TRAINING.engine_args,
    )
    learner = Learner(TRAINING)
    engine = vllm_engine.create(settings)
    encoded = encode_prompts(
        load_problems(TRAINING.prompt_source),
        tokenizer,
        template=TRAINING.task.template,
        max_model_len=engine.max_model_len,
    )
    manifest = manifest | {
        "flags": flags_of(TRAINING),
        "config": TRAINING.to_json(),
        "rollout": engine.describe(),
        "shards": STEPS,
        "equal_weights": False,
        "trainer": learner.trainer.describe(),
        "recomputed": learner.trainer.describe(),
        "training": learner.describe(),
    }
    write_vocabulary(folder, tokenizer)
    write_manifest(folder, manifest)
    with Grader(tokenizer.decode) as grader:
        for plan in plan_shards(encoded.problems, encoded.prompt_ids, PROMPTS_PER_STEP):
            progress.say(f"Step {plan.index + 1} of {STEPS}")
            record_step(plan, engine, grader, learner, folder)
            engine.load_weights(learner.trainer.model)
    engine.close()


def main() -> None:
    """Records all traces under temporary names, and replaces the bundled ones at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLE_DATA / "traces",
        help="for the traces (default: traces/ here)",
    )
    output = parser.parse_args().output.resolve()
    os.chdir(
        SAMPLE_DATA.parent
    )  # the manifests name the model and the problems by their paths from here
    progress = TerminalProgress(quiet=False)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        record(CONTROL, run, {"flags": flags_of(CONTROL)}, progress)
        record_training(
            run / "training", run / "log" / "training.log", read_manifest(run / "trace"), progress
        )
        record(PRECISION, run / "precision", {"flags": flags_of(PRECISION)}, progress)
        made = {
            "float32": run / "trace",
            "fp8-kv": run / "training",
            "bfloat16": run / "precision" / "trace",
        }
        for name, recorded in made.items():
            shutil.rmtree(output / name, ignore_errors=True)
            shutil.copytree(recorded, output / name)


if __name__ == "__main__":
    main()
