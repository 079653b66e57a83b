"""What a test does on every rank: `run_on(2, "gradients", folder)` calls that function on two of
them.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mismatch_cli.base.options import build, replace_settings
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.diagnosis.hypotheses import scaled_positions
from mismatch_cli.models.adapters import start_lora
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.sharding import Sharding, saved_state, whole
from mismatch_cli.processes.ranks import World
from mismatch_cli.processes.ranks.joined import joined
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train.checkpoint import latest_checkpoint, save_checkpoint
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.learner import Learner
from mismatch_cli.train.loop import train
from mismatch_cli.train.train_config import TrainConfig, load_config
from tests.train.learners import requests_of
from tests.train.small_runs import (
    ON_RANKS,
    SHORT,
    SMALL,
    reward_file,
    talk_file,
    trained_dynamically,
)
from tests.warm import Forked

PLAIN = SamplingSettings()
CONFIG = build(TrainConfig, {"max_tokens": 60, "token_budget": 150, "learning_rate": 1e-3})
TOPK, VOCABULARY = 20, 211
ADAPTED = ("untied", "experts")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "untied": ("Qwen2", {"tie_word_embeddings": False}),
    "no plan": (
        "GPT2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "divides": ("Granite", {"tie_word_embeddings": False, "logits_scaling": 2.0}),
    "experts": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def run_on(ranks: int, what: str, folder: Path) -> None:
    """Run on this many gloo ranks of this machine, one thread each; a single one without a
    process group.
    """
    places = as_ranks(ranks) if ranks > 1 else [dict(os.environ)]
    processes = [
        Forked("tests.train.ranks.on_ranks", what, str(folder), env=environment)
        for environment in places
    ]
    for process in processes:
        said = process.ended(within=240)
        assert process.returncode == 0, said


def as_ranks(count: int) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun would make it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    shared |= {"TORCHELASTIC_RUN_ID": "test"}
    ranks = map(str, range(count))
    return [os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def model(folder: Path, kind: str) -> str:
    return str(folder / "models" / kind / MODELS[kind][0])


def samples(recomputed: bool = True) -> list[LearnedResponse]:
    """Nine responses of random tokens with top-K columns, some without an advantage; the last one,
    which the second rank has, has one.
    """
    rng = np.random.default_rng(0)
    results = []
    for i, length in enumerate((21, 9, 55, 14, 1, 30, 8, 17, 40)):
        ids = rng.integers(0, VOCABULARY, length).tolist()
        topk_ids = np.stack([rng.permutation(VOCABULARY)[:TOPK] for _ in ids]).astype(np.int32)
        topk = np.log(rng.dirichlet(np.ones(TOPK + 1), length)[:, :TOPK]).astype(np.float32)
        logp = np.log(rng.uniform(0.001, 0.02, length)).astype(np.float32)
        prompt, ranks = rng.integers(0, VOCABULARY, 5).tolist(), np.ones(length, dtype=np.int32)
        rollout = Rollout(prompt, ids, logp, ranks, topk_ids, topk, "stop")
        advantage = float(rng.normal()) if i < 5 or i >= 7 else 0.0
        noise = 0.1 * rng.normal(size=(2, length))
        moved, average = np.minimum(logp + noise, -1e-3).astype(np.float32)
        sample = LearnedResponse(rollout, advantage, moved, topk, (0, 0, 0, i // 3, i % 3), average)
        nothing = dict.fromkeys(("logp_recomputed_T", "topk_logp_recomputed_TK", "logp_average_T"))
        results.append(sample if recomputed else replace(sample, **nothing))
    return results


def loaded(
    folder: Path, kind: str, world: World, dtype: str = "float32", learns: bool = True
) -> Trainer:
    sharding = Sharding(world, learns) if world.size > 1 else None
    return Trainer.load(model(folder, kind), sampling=PLAIN, dtype=dtype, sharding=sharding)


def share(world: World, things: list) -> list:
    """Unequal shares: the first rank has the most."""
    bounds = [0, *(len(things) - (world.size - 1 - rank) for rank in range(world.size))]
    return things[bounds[world.rank] : bounds[world.rank + 1]]


def gathered(world: World, things: list) -> list:
    return list(itertools.chain.from_iterable(world.gather(things)))


def gradients(folder: Path, world: World) -> None:
    """Gradients, and weights after a step of SGD, of every algorithm, and of one on every kind
    of model.
    """
    trainers = {kind: loaded(folder, kind, world) for kind in MODELS}
    cases = list(itertools.product(["tied"], TABLE))
    cases += itertools.product(MODELS, ["dppo-binary-tv"])
    cases += [("untied", "gspo"), ("tied", "pg-is/token-mean"), ("tied", "pg-is/sequence-mean")]
    for kind in ADAPTED:
        trainers[f"{kind} adapted"] = adapted = loaded(folder, kind, world)
        _adapt(adapted)
        cases.append((f"{kind} adapted", "dppo-binary-tv"))
    results = {f"{kind} {case}": _step(trainers[kind], case, world) for kind, case in cases}
    _keep(results, folder, world)
    if world.size == 2:
        saved(trainers["tied"], folder, world)
    scores(folder, world)


def _adapt(trainer: Trainer) -> None:
    start_lora(trainer.model, rank=4, alpha=8, targets="all-linear", seed=0)
    # With B at 0, A would have no gradient
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if ".lora_B" in name:
                weight.copy_(torch.linspace(-0.05, 0.05, weight.numel()).view_as(weight))


def _step(trainer: Trainer, case: str, world: World) -> dict[str, Any]:
    """One step of SGD by an algorithm, after which the trainer has its weights back."""
    name, _, aggregation = case.partition("/")
    config = replace_settings(CONFIG, aggregation=aggregation or CONFIG.aggregation)
    learner = Learner(trainer, parse_algorithm(name, training=True), PLAIN, config, world)
    (optimised,) = learner.optimizer.param_groups
    names = [n for n, weight in learner.model.named_parameters() if weight.requires_grad]
    masters = dict(zip(names, optimised["params"], strict=True))
    # A step of SGD shows the gradient in the weights, one of AdamW only its sign
    learner.optimizer = torch.optim.SGD(masters.values(), lr=0.1)
    learned = samples(recomputed=parse_algorithm(name).needs_recomputed)
    before = [master.detach().clone() for master in masters.values()]
    update = learner.update(share(world, learned))
    result = {
        "norm": update.grad_norm,
        "gradient": {name: whole(master.grad).clone() for name, master in masters.items()},
        "after": {name: whole(master).detach().clone() for name, master in masters.items()},
        "logp": gathered(world, update.logp),
    }
    # The weights that compute have learnt
    if case == "dppo-binary-tv":
        scores_of = trainer.score(share(world, requests_of(samples())), token_budget=1)
        result["next"] = gathered(world, [score.logp_T for score in scores_of])
    with torch.no_grad():
        for master, weight in zip(masters.values(), before, strict=True):
            master.copy_(weight)
            master.grad = None
    return result


def scores(folder: Path, world: World) -> None:
    """Scores of responses that are dealt to ranks, in two dtypes, by a trainer that scores and
    one that learns.
    """
    requests = requests_of(samples())
    results = {}
    for kind in ("tied", "no plan", "experts"):
        for dtype, learns in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            trainer, own = loaded(folder, kind, world, dtype, learns), share(world, requests)
            scored = gathered(world, list(map(vars, trainer.score(own, token_budget=1))))
            # As `diagnose` reads responses
            with scaled_positions(2.0).changed(trainer.model):
                moved = [{"logp_T": s.logp_T} for s in trainer.score(own, token_budget=1)]
            # That model has no such positions
            if kind != "no plan":
                scored += gathered(world, moved)
            # No rank waits for the others
            trainer.score_again(own, token_budget=100)
            described = trainer.describe()
            del described["threads"]
            results[kind, dtype, learns] = scored, described
    _keep(results, folder, world, "scores")


def of_learner(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).clone() for name, tensor in learner.tensors().items()}


def saved(trainer: Trainer, folder: Path, world: World) -> None:
    """Two steps of AdamW, and a checkpoint."""
    learner = Learner(trainer, parse_algorithm("pg-is"), PLAIN, CONFIG, world)
    for _ in range(2):
        learner.update(share(world, samples(recomputed=False)))
    save_checkpoint(folder / "run", 2, learner.tensors(), {"learner": learner.facts()}, world=world)
    _keep(of_learner(learner), folder, world, "saved")


def restored(folder: Path, world: World) -> None:
    """What a different number of ranks finds in it, and the next step."""
    learner = Learner(loaded(folder, "tied", world), parse_algorithm("pg-is"), PLAIN, CONFIG, world)
    checkpoint = latest_checkpoint(folder / "run", world)
    assert checkpoint is not None
    learner.restore(checkpoint.facts["learner"], checkpoint.load)
    state = of_learner(learner)
    learner.update(share(world, samples(recomputed=False)))
    after = of_learner(learner)
    _keep({"found": state, "after": after, "version": learner.version}, folder, world)


def trained(folder: Path, world: World) -> None:
    """Three steps by algorithms that look beyond a micro-batch."""
    reward = reward_file(folder)
    for name in ON_RANKS:
        config = load_config("miniature", SMALL | SHORT | {"algorithm": name, "reward": reward})
        train(config, folder / name, lambda _: None, world=world)
    talk = {
        "environment": talk_file(folder),
        "episodes": 4,
        "eval_episodes": 3,
        "max_tokens": 60,
        "turn_tokens": 6,
    }
    config = load_config("miniature", SMALL | SHORT | talk | {"algorithm": "gspo"})
    train(config, folder / "episodes", lambda _: None, world=world)


def dynamic(folder: Path, world: World) -> None:
    """Groups that teach nothing are replaced, whichever rank sampled them."""
    trained_dynamically(folder, world)


# 150 MB in float32, nearly all of it in the experts.
MIXTURE: dict[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "hidden_size": 256,
    "num_hidden_layers": 12, "eos_token_id": 1,
}  # fmt: skip


def sent(folder: Path, world: World) -> None:
    """What a sync sends of a sharded mixture: every tensor of the folder, with little alive at a
    time.
    """
    path = str(folder / "mixture" / "Qwen3Moe")
    trainer = Trainer.load(path, sampling=PLAIN, dtype="float32", sharding=Sharding(world, True))
    expected = load_file(f"{path}/model.safetensors")
    alive, names, before = [], set[str](), _storage_bytes()
    for place, (name, weight) in enumerate(saved_state(trainer.model).items()):
        assert torch.equal(weight, expected[name]), name
        names.add(name)
        del weight
        if place % 40 == 0:
            alive.append(_storage_bytes() - before)
    assert names == expected.keys()
    _keep({"alive": max(alive)}, folder, world, "sent")


def _storage_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    sizes = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def deserted(_: Path, world: World) -> None:
    """The first rank waits for one that has ended."""
    if world.first:
        world.barrier()


def _keep(result: object, folder: Path, world: World, name: str = "found") -> None:
    if world.first:
        torch.save(result, folder / f"{name}-{world.size}.pt")


def kept(folder: Path, ranks: int, name: str = "found") -> dict:
    return torch.load(folder / f"{name}-{ranks}.pt", weights_only=False)


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    functions: dict[str, Callable[[Path, World], None]] = {
        "gradients": gradients,
        "restored": restored,
        "trained": trained,
        "dynamic": dynamic,
        "sent": sent,
        "deserted": deserted,
    }
    with joined("What was made is kept.") as world:
        functions[what](Path(folder), world)


if __name__ == "__main__":
    main(*sys.argv[1:])
