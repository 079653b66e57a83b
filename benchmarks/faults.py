"""Faults as people have had them, planted into healthy traces: what `mismatch-cli diagnose` has to find.

A `Pool` is a healthy trace laid flat, with log π of some variants of the trainer (another temperature, perturbed
weights, another RoPE base, text tokenised otherwise) scored by the real model on the same responses. A fault takes some
responses of a pool and a severity, and answers with the table that a broken framework would have written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.trace.schema import ROW_KEY

_TOKEN_COLUMNS = ("response_ids", "logp_rollout", "logp_trainer", "entropy_trainer")
_TOPK_COLUMNS = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer")


@dataclass
class Scores:
    """What a variant of the trainer says of a pool's tokens."""

    logp_T: np.ndarray
    entropy_T: np.ndarray
    topk_logp_TK: np.ndarray | None = None


@dataclass
class Pool:
    """Responses laid flat: `_T` tokens, `_TK` tokens × ranks, `_S` responses."""

    offset_S1: np.ndarray
    rows: dict[str, Any]  # per response: prompt_id, sample_index, step, finish_reason, prompt_ids
    tokens: dict[str, np.ndarray]  # _T
    ranks: dict[str, np.ndarray]  # _TK
    variants: dict[str, Scores] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)  # of the manifest
    about: dict[str, Any] = field(default_factory=dict)  # the manifest

    @classmethod
    def of(cls, table: pa.Table, most_responses: int | None = None) -> Pool:
        table = table.slice(0, most_responses).combine_chunks()
        offsets = np.concatenate([[0], np.cumsum(table["response_ids"].combine_chunks().value_lengths().to_numpy())])
        names = (*ROW_KEY, "finish_reason", "version_rollout", "version_trainer")
        rows = {name: np.array(table[name].to_pylist()) for name in names}
        rows["prompt_ids"] = np.empty(len(offsets) - 1, dtype=object)
        rows["prompt_ids"][:] = table["prompt_ids"].to_pylist()
        columns = {
            n: table[n].combine_chunks().flatten().to_numpy().copy() for n in _TOKEN_COLUMNS if n in table.column_names
        }
        ranks = {n: table[n].combine_chunks().flatten().to_numpy() for n in _TOPK_COLUMNS if n in table.column_names}
        return cls(offsets, rows, columns, {n: v.reshape(offsets[-1], -1).copy() for n, v in ranks.items()})

    @property
    def num_responses(self) -> int:
        return len(self.offset_S1) - 1

    @property
    def length_S(self) -> np.ndarray:
        return np.diff(self.offset_S1)

    @property
    def response_T(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_responses), self.length_S)

    @property
    def position_T(self) -> np.ndarray:
        return np.arange(int(self.offset_S1[-1])) - self.offset_S1[self.response_T]

    @property
    def last_T(self) -> np.ndarray:
        return self.offset_S1[1:] - 1

    def take(self, index_S: np.ndarray) -> Pool:
        """Some responses, copied: what is planted into them leaves the pool as it is."""
        tokens = np.concatenate([np.arange(self.offset_S1[s], self.offset_S1[s + 1]) for s in index_S])
        return Pool(
            np.concatenate([[0], np.cumsum(self.length_S[index_S])]),
            {name: values[index_S].copy() for name, values in self.rows.items()},
            {name: values[tokens].copy() for name, values in self.tokens.items()},
            {name: values[tokens].copy() for name, values in self.ranks.items()},
            {
                name: Scores(
                    v.logp_T[tokens], v.entropy_T[tokens], None if v.topk_logp_TK is None else v.topk_logp_TK[tokens]
                )
                for name, v in self.variants.items()
            },
            self.sampling,
            self.about,
        )

    def table(self) -> pa.Table:
        """The columns of a trace."""
        offsets = pa.array(self.offset_S1, pa.int32())
        columns: dict[str, Any] = {
            n: pa.array(v) for n, v in self.rows.items() if n not in ("prompt_ids", "finish_reason")
        }
        columns["finish_reason"] = pa.array(self.rows["finish_reason"].tolist(), pa.string())
        columns["prompt_ids"] = pa.array(list(self.rows["prompt_ids"]), pa.list_(pa.int32()))
        columns |= {n: pa.ListArray.from_arrays(offsets, pa.array(v)) for n, v in self.tokens.items()}
        for name, values_TK in self.ranks.items():
            width = values_TK.shape[1]
            columns[name] = pa.ListArray.from_arrays(
                pa.array(self.offset_S1 * width, pa.int32()), pa.array(values_TK.ravel())
            )
        return pa.table(columns)

    def use(self, variant: str, where_T: np.ndarray | None = None) -> None:
        """Let a variant's numbers stand in the trainer's place, on some tokens or on all."""
        scores, everywhere = self.variants[variant], where_T is None
        where_T = np.ones(len(scores.logp_T), dtype=bool) if everywhere else where_T
        self.tokens["logp_trainer"][where_T] = scores.logp_T[where_T]
        if "entropy_trainer" in self.tokens:
            self.tokens["entropy_trainer"][where_T] = scores.entropy_T[where_T]
        if "topk_logp_trainer" in self.ranks and scores.topk_logp_TK is not None:
            self.ranks["topk_logp_trainer"][where_T] = scores.topk_logp_TK[where_T]


def _some(pool: Pool, share: float, rng: np.random.Generator, longer_than: int = 0) -> np.ndarray:
    """A share of the responses, two at least, of those that are long enough."""
    long_S = np.flatnonzero(pool.length_S > longer_than)
    return rng.choice(long_S, size=min(len(long_S), max(2, round(share * pool.num_responses))), replace=False)


def _some_tokens(pool: Pool, share: float, rng: np.random.Generator) -> np.ndarray:
    """A share of the tokens, one at least."""
    count = int(pool.offset_S1[-1])
    return rng.choice(count, max(1, round(share * count)), False)


def positive_values(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = _some_tokens(pool, share, rng)
    pool.tokens["logp_trainer"][tokens] = rng.choice([0.03125, 0.0625, 0.125], len(tokens))


def not_a_number(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = _some_tokens(pool, share, rng)
    pool.tokens["logp_trainer"][tokens] = np.nan


def zeros(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = _some_tokens(pool, share, rng)
    pool.tokens["logp_rollout"][tokens] = 0.0


def minus_one(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = _some_tokens(pool, share, rng)
    pool.tokens["logp_rollout"][tokens] = -1.0


def appended_eos(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """A stop token put behind responses that did not stop: the engine gave it nothing, the trainer little."""
    last_T = pool.last_T[_some(pool, share, rng)]
    pool.tokens["logp_rollout"][last_T] = 0.0
    pool.tokens["logp_trainer"][last_T] = -rng.uniform(2, 12, len(last_T))


def other_eos(pool: Pool, nats: float, _: np.random.Generator) -> None:
    """The two sides end on different tokens, whose log-probabilities are some nats apart."""
    pool.tokens["logp_rollout"][pool.last_T] -= np.float32(nats)


def tool_tokens(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """A block of 6 to 16 tokens in the middle that nobody sampled: 0.0 by the engine, improbable for the trainer."""
    for s in _some(pool, share, rng, longer_than=24):
        length = int(rng.integers(6, 17))
        start = int(pool.offset_S1[s] + rng.integers(2, pool.length_S[s] - length - 2))
        pool.tokens["logp_rollout"][start : start + length] = 0.0
        pool.tokens["logp_trainer"][start : start + length] = -rng.gamma(2.0, 3.0, length)


def shifted(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """μ one position late or early, as a slice with other bounds leaves it."""
    lag = int(rng.choice([-1, 1]))
    for s in _some(pool, share, rng):
        own = slice(pool.offset_S1[s], pool.offset_S1[s + 1])
        pool.tokens["logp_rollout"][own] = np.roll(pool.tokens["logp_rollout"][own], lag)


def from_variant(name: str) -> Callable[[Pool, Any, np.random.Generator], None]:
    """The trainer's numbers from a variant whose name ends in the severity."""
    return lambda pool, severity, _: pool.use(f"{name}{severity:g}")


def temperature_alone(pool: Pool, temperature: float, _: np.random.Generator) -> None:
    """As an imported dump shows it: nothing but the log-probabilities of the sampled tokens."""
    pool.use(f"temperature{temperature:g}")
    pool.ranks.clear()
    pool.tokens.pop("entropy_trainer", None)


def retokenised(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """The trainer scored some responses with one token of their text split in two."""
    chosen = np.zeros(pool.num_responses, dtype=bool)
    chosen[_some(pool, share, rng, longer_than=16)] = True
    pool.use("retokenised", chosen[pool.response_T])


def in_steps(pool: Pool, rng: np.random.Generator) -> np.ndarray:
    """Six steps; of every second prompt half the samples come a step later. Answers which responses are such."""
    prompts, of_S = np.unique(pool.rows["prompt_id"], return_inverse=True)
    order_P = rng.permutation(len(prompts))
    again_S = (order_P % 2 == 0)[of_S] & (pool.rows["sample_index"] % 2 == 1)
    pool.rows["step"] = ((order_P // 2 % 5)[of_S] + again_S).astype(np.int32)
    return again_S


def grows(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """Six steps; the weights of the two sides drift apart from the second on."""
    prompts, of_S = np.unique(pool.rows["prompt_id"], return_inverse=True)
    step_S = rng.permutation(len(prompts))[of_S] % 6
    pool.rows["step"] = step_S.astype(np.int32)
    scores, share_T = pool.variants[f"weights{scale:g}"], (step_S / 5)[pool.response_T]
    own_T = pool.tokens["logp_trainer"]
    drifted_T = own_T + share_T * (scores.logp_T - own_T)
    pool.tokens["logp_trainer"] = np.minimum(drifted_T, 0).astype(np.float32)
    pool.ranks.pop("topk_logp_trainer", None)


def stale_prefixes(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """Where a prompt came before, its numbers are from other weights."""
    again_S = in_steps(pool, rng)
    pool.use(f"weights{scale:g}", again_S[pool.response_T])


def onset(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """From one position on the two sides use other weights, as far as the numbers show."""
    pool.use(f"weights{scale:g}", pool.position_T >= int(rng.integers(16, 48)))


def routing(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Some tokens take another expert: their logit moves by a nat or two."""
    logp_T = pool.tokens["logp_trainer"].astype(np.float64)
    flipped = np.flatnonzero((rng.random(len(logp_T)) < share) & (logp_T < -0.02))
    logit = logp_T[flipped] - np.log(-np.expm1(logp_T[flipped])) + rng.normal(0, 1.5, len(flipped))
    pool.tokens["logp_trainer"][flipped] = -np.logaddexp(0, -logit)


def broken_responses(pool: Pool, share: float, rng: np.random.Generator) -> None:
    chosen = np.zeros(pool.num_responses, dtype=bool)
    chosen[_some(pool, share, rng, longer_than=10)] = True
    pool.use("weights0.1", chosen[pool.response_T])


def stored_in_bfloat16(pool: Pool, _: float, __: np.random.Generator) -> None:
    import torch

    rounded = torch.from_numpy(pool.tokens["logp_rollout"]).to(torch.bfloat16).float()
    pool.tokens["logp_rollout"] = rounded.numpy()


@dataclass(frozen=True)
class Fault:
    """One way to break a trace: which check has to name it first, and how hard it is planted."""

    name: str
    check: str
    severities: tuple[float, ...]
    unit: str
    plant: Callable[[Pool, Any, np.random.Generator], None]


SHARES = (0.02, 0.1, 0.5)
FAULTS = (
    Fault("log-probs above 0", "values", (1e-4, 1e-3, 1e-2), "of the tokens", positive_values),
    Fault("not a number", "values", (1e-4, 1e-3, 1e-2), "of the tokens", not_a_number),
    Fault("0.0 for a missing log-prob", "placeholders", (1e-4, 1e-3, 1e-2), "of the tokens", zeros),
    Fault("−1.0 for a missing log-prob", "placeholders", (3e-3, 1e-2, 3e-2), "of the tokens", minus_one),
    Fault("appended end-of-sequence, 0.0", "end-of-sequence", SHARES, "of the responses", appended_eos),
    Fault("another end-of-sequence token", "end-of-sequence", (0.02, 0.1, 0.5), "nats", other_eos),
    Fault("tool tokens in the loss", "masked-tokens", SHARES, "of the responses", tool_tokens),
    Fault("shifted by one", "index-shift", SHARES, "of the responses", shifted),
    Fault("retokenised", "retokenised", SHARES, "of the responses", retokenised),
    Fault("temperature on one side", "temperature", (1.005, 1.01, 1.02, 1.05, 1.4), "T", from_variant("temperature")),
    Fault("temperature, sampled tokens alone", "temperature", (1.005, 1.01, 1.02, 1.05, 1.4), "T", temperature_alone),
    Fault(
        "other weights on one side",
        "stale-weights",
        (0.003, 0.01, 0.03, 0.1),
        "noise / weight",
        from_variant("weights"),
    ),
    Fault(
        "weights that drift apart", "growth-over-steps", (0.003, 0.01, 0.03, 0.1), "noise / weight, at the end", grows
    ),
    Fault("stale prefix cache", "prefix-cache", (0.003, 0.01, 0.03, 0.1), "noise / weight", stale_prefixes),
    Fault("RoPE base", "position-drift", (1.1, 1.5, 2, 4, 10), "times", from_variant("rope")),
    Fault("other numbers from one position on", "sharp-onset", (0.003, 0.01, 0.03, 0.1), "noise / weight", onset),
    Fault("log-probs stored in bfloat16", "lm-head", (1,), "", stored_in_bfloat16),
    Fault("routing flips", "heavy-tail", (0.003, 0.01, 0.03), "of the tokens", routing),
    Fault("broken responses", "heavy-tail", (0.02, 0.05, 0.1), "of the responses", broken_responses),
)


def planted(pool: Pool, fault: Fault, severity: float, index_S: np.ndarray, rng: np.random.Generator) -> Pool:
    """Some responses of a pool with the fault in them."""
    broken = pool.take(index_S)
    fault.plant(broken, severity, rng)
    return broken
