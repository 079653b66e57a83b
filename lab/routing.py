"""The cost of recording the experts of a mixture, of comparing both sides', and of replaying them.

    python -m lab.routing [--layers 8] [--experts 64] [--top-k 8] [--hidden 512] [--rounds 5]

A random Qwen3-MoE in float32, CPU time of one thread; in every round each variant runs once, in
turn. Sampling by the Hugging Face engine with and without routes; scoring by the trainer without
routes, with routes to compare, and with routes to replay. The figure is the median over rounds of
the ratio to the variant without routes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.torch_settings import prepare_imports

RESPONSES, PROMPT, TOKENS = 16, 64, 64
VOCABULARY = 4096


def saved_model(folder: Path, arguments: argparse.Namespace) -> str:
    """Experts with the proportions of Qwen3-30B-A3B: each narrower than the hidden size."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 8,
        intermediate_size=2 * arguments.hidden,
        moe_intermediate_size=arguments.hidden * 3 // 8,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        norm_topk_prob=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 8),
        ("experts", 64),
        ("top-k", 8),
        ("hidden", 512),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    prepare_imports()
    torch.set_num_threads(1)
    sampling = SamplingSettings(max_tokens=TOKENS)
    requests = [Request(list(range(1 + i, 1 + i + PROMPT)), seed=i) for i in range(RESPONSES)]
    with tempfile.TemporaryDirectory() as folder:
        model = saved_model(Path(folder), arguments)
        engines = {
            routes: create_engine(
                "hf", EngineSettings(model, sampling, 0, dtype="float32", routes=routes)
            )
            for routes in (False, True)
        }
        rollouts = engines[True].sample(requests, lambda _: None)
        with_routes = list(map(ScoreRequest.of, rollouts))
        without = [replace(request, routes_FMK=None) for request in with_routes]
        own, replaying = (
            Trainer.load(model, sampling=sampling, dtype="float32", replay_routes=replay)
            for replay in (False, True)
        )
        plain = Trainer.load(model, sampling=sampling, dtype="float32")
        variants = {
            "sampling": lambda: engines[False].sample(requests, lambda _: None),
            "sampling, routes taken down": lambda: engines[True].sample(requests, lambda _: None),
            "scoring": lambda: plain.score(without, token_budget=4096),
            "scoring, both sides compared": lambda: own.score(with_routes, token_budget=4096),
            "scoring, routes replayed": lambda: replaying.score(with_routes, token_budget=4096),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(arguments.rounds):
            for name, work in variants.items():
                times[name].append(seconds(work))
    for name, found in times.items():
        base = times[name.partition(",")[0]]
        ratios = [x / b for x, b in zip(found, base, strict=True)]
        print(
            f"{name:<30} {statistics.median(found):6.2f} s   {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}–{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
