"""Measures the bundled model: how often its answers are right, and how long the tail of its
token distribution is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

MAX_NEW_TOKENS = 128
BATCH = 100


@dataclass(frozen=True)
class Responses:
    """The sampled responses: share of right answers per problem, log-probabilities of all tokens,
    lengths, texts.

    EOS counts as a token.
    """

    accuracy_G: list[float]
    logp_T: torch.Tensor
    lengths_S: list[int]
    unfinished: int
    texts_S: list[str]

    @property
    def accuracy(self) -> float:
        """Share of right answers over all responses."""
        return sum(self.accuracy_G) / len(self.accuracy_G)

    def share_between(self, low: float, high: float) -> float:
        """Share of sampled tokens with a probability in [low, high)."""
        p = self.logp_T.exp()
        return ((p >= low) & (p < high)).double().mean().item()


def load(folder: Path, dtype: torch.dtype) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A stored model, computing in `dtype`, and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def boxed(text: str) -> str | None:
    """The content of the last box, or None."""
    return text.rpartition("\\boxed{")[2].partition("}")[0] if "\\boxed{" in text else None


@torch.no_grad()
def respond(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    samples: int,
    seed: int,
    greedy: bool = False,
) -> Responses:
    """Samples at temperature 1 from the whole distribution (or greedily) and grades."""
    torch.manual_seed(seed)
    repeated = [row for row in rows for _ in range(samples)]
    right: list[bool] = []
    logps, lengths, texts = [], [], []
    unfinished = 0
    for k in range(0, len(repeated), BATCH):
        part = repeated[k : k + BATCH]
        ids, logp = sample_batch(model, tokenizer, [row["problem"] for row in part], greedy)
        is_end = ids == tokenizer.eos_token_id
        # The first EOS counts, what follows it does not
        before_end = (is_end.cumsum(1) - is_end.long()) == 0
        logps.append(logp[before_end])
        lengths += before_end.sum(1).tolist()
        unfinished += int((~is_end.any(1)).sum())
        answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts += answers
        right += [boxed(text) == row["answer"] for text, row in zip(answers, part, strict=True)]
    accuracy = [sum(right[k : k + samples]) / samples for k in range(0, len(right), samples)]
    return Responses(accuracy, torch.cat(logps), lengths, unfinished, texts)


def sample_batch(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[str], greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Response ids and the log-probability of each under the model, both (batch, longest
    response).
    """
    chats = [[{"role": "user", "content": problem}] for problem in problems]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    how = (
        {"do_sample": False}
        if greedy
        else {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    )
    out = model.generate(
        **inputs,
        **how,
        max_new_tokens=MAX_NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[:, inputs["input_ids"].shape[1] :]
    logp = [z.float().log_softmax(-1).gather(1, ids[:, [t]]) for t, z in enumerate(out.logits)]
    return ids, torch.cat(logp, 1)


def standard_error(shares: list[float]) -> float:
    """Standard error of a mean over problems."""
    mean = sum(shares) / len(shares)
    return math.sqrt(sum((s - mean) ** 2 for s in shares) / (len(shares) - 1) / len(shares))
