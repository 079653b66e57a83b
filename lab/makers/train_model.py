"""Trains the bundled language model from scratch on one CPU thread: next-token prediction on
generated solutions.

Two stages in one run: first clean calculations, half of them dense drills without a story, until
the model knows arithmetic; then solutions as it should sample them, with mistakes. Muon (torch 2.9
or later) trains the matrices of the layers, AdamW the embedding and the norms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lab.makers.solutions import MISTAKES, NO_MISTAKES, MistakeRates, solve, write_solution
from lab.makers.tokenizer import VOCABULARY
from lab.makers.word_problems import WordProblem, problems

BATCH = 32
CHUNK = 64 * BATCH
IGNORED = -100
BALANCE = 0.01


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    steps: int = 1500
    clean_share: float = 0.5
    drill_share: float = 0.5
    learning_rate: float = 4e-3
    warmup: int = 40
    final_decay: float = 0.35
    seed: int = 0
    experts: int = 0  # in each layer; 0 for a dense model


def build_model(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """A small Qwen3 with random weights, dense or a mixture of experts with two experts per
    token.
    """
    torch.manual_seed(recipe.seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not recipe.experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    routed = {"num_experts": recipe.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **routed, norm_topk_prob=True))


Example = tuple[list[int], int]  # token ids, and how many of them are the prompt


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> list[Example]:
    """Prompt and response ids; the prompt uses the chat template as at inference, the response
    ends with EOS.
    """
    chats = [[{"role": "user", "content": problem}] for problem, _ in pairs]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    responses = tokenizer([response for _, response in pairs]).input_ids
    return [
        (p + r + [tokenizer.eos_token_id], len(p)) for p, r in zip(prompts, responses, strict=True)
    ]


def drill(rng: random.Random, source: Iterator[WordProblem]) -> tuple[str, str]:
    """The bare calculations of a few problems, asked and answered at once."""
    equations: list[str] = []
    for problem in islice(source, 3):
        equations += solve(rng, problem, NO_MISTAKES)[0]
    rng.shuffle(equations)
    return ", ".join(e.split("=")[0] for e in equations), ", ".join(equations)


def examples(
    rng: random.Random, source: Iterator[WordProblem], rates: MistakeRates, drill_share: float
) -> Iterator[tuple[str, str]]:
    """Problem and solution texts, some of them drills."""
    while True:
        if rng.random() < drill_share:
            yield drill(rng, source)
        else:
            problem = next(source)
            yield problem.text, write_solution(rng, problem, rates)


def batches(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels; examples of similar length share a batch, to reduce padding."""
    rng = random.Random(recipe.seed)
    source = problems(recipe.seed + 1, for_training=True)
    clean = examples(rng, source, NO_MISTAKES, recipe.drill_share)
    careless = examples(rng, source, MISTAKES, 0.0)
    done = 0
    while True:
        stream = clean if done < recipe.steps * recipe.clean_share else careless
        chunk = sorted(encode(tokenizer, list(islice(stream, CHUNK))), key=lambda e: len(e[0]))
        grouped = [chunk[k : k + BATCH] for k in range(0, CHUNK, BATCH)]
        rng.shuffle(grouped)
        yield from (pad(group, tokenizer.pad_token_id) for group in grouped)
        done += len(grouped)


def pad(group: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids, and labels for the response tokens only."""
    width = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), width), pad_id)
    labels = torch.full((len(group), width), IGNORED)
    for row, (tokens, n_prompt) in enumerate(group):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, n_prompt : len(tokens)] = torch.tensor(tokens[n_prompt:])
    return ids, labels


def loss_on_responses(
    model: Any, ids: torch.Tensor, labels: torch.Tensor, experts: int
) -> torch.Tensor:
    """Mean cross entropy of the response tokens; the head runs only at their positions, which
    halves its time.

    No attention mask: the padding is on the right, where causal attention never looks. A
    load-balancing loss keeps all experts in use (Switch Transformer).
    """
    options = {"output_router_logits": True} if experts else {}
    decoded = model.model(ids[:, :-1], **options)
    wanted = labels[:, 1:]
    chosen = wanted != IGNORED
    loss = F.cross_entropy(model.lm_head(decoded.last_hidden_state[chosen]), wanted[chosen])
    if experts:
        loss = loss + BALANCE * load_balancing_loss_func(decoded.router_logits, experts, 2)
    return loss


def optimizers(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest, including routers and stacked
    experts.
    """
    inside = model.model.layers.named_parameters()
    matrices = [p for name, p in inside if p.ndim == 2 and not name.endswith("mlp.gate.weight")]
    # By identity: tensors are compared element by element
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]


def schedule(step: int, recipe: Recipe) -> float:
    """Factor of the learning rate: linear warm-up, constant, linear decay to zero."""
    return min(
        1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / (recipe.steps * recipe.final_decay)
    )


def train(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe, on_step: Callable[[int, float], None]
) -> Any:
    """A trained model in float32; `on_step` gets the step and its loss in nats."""
    model = build_model(tokenizer, recipe)
    steppers = optimizers(model, recipe.learning_rate)
    for step, (ids, labels) in enumerate(islice(batches(tokenizer, recipe), recipe.steps)):
        loss = loss_on_responses(model, ids, labels, recipe.experts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in steppers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * schedule(step, recipe)
            optimizer.step()
            optimizer.zero_grad()
        on_step(step, loss.item())
    return model
