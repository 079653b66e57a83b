"""Faults from practice, planted into healthy traces, for `mismatch-cli diagnose` to find.

A fault takes some responses of a pool and a severity, and returns the table that a broken framework
would have written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab import bookkeeping
from lab.pool import Pool, some, some_tokens


def positive_values(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = some_tokens(pool, share, rng)
    pool.tokens["logp_trainer"][tokens] = rng.choice([0.03125, 0.0625, 0.125], len(tokens))


def not_a_number(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = some_tokens(pool, share, rng)
    pool.tokens["logp_trainer"][tokens] = np.nan


def zeros(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = some_tokens(pool, share, rng)
    pool.tokens["logp_rollout"][tokens] = 0.0


def minus_one(pool: Pool, share: float, rng: np.random.Generator) -> None:
    tokens = some_tokens(pool, share, rng)
    pool.tokens["logp_rollout"][tokens] = -1.0


def appended_eos(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Append a stop token to responses that did not stop: 0.0 from the engine, improbable for
    the trainer.
    """
    last_T = pool.last_T[some(pool, share, rng)]
    pool.tokens["logp_rollout"][last_T] = 0.0
    pool.tokens["logp_trainer"][last_T] = -rng.uniform(2, 12, len(last_T))


def other_eos(pool: Pool, nats: float, _: np.random.Generator) -> None:
    """End the two sides on different tokens, whose log-probabilities are some nats apart."""
    pool.tokens["logp_rollout"][pool.last_T] -= np.float32(nats)


def tool_tokens(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """A block of 6 to 16 unsampled tokens in the middle: 0.0 from the engine, improbable for the
    trainer.
    """
    for s in some(pool, share, rng, longer_than=24):
        length = int(rng.integers(6, 17))
        start = int(pool.offset_S1[s] + rng.integers(2, pool.length_S[s] - length - 2))
        pool.tokens["logp_rollout"][start : start + length] = 0.0
        pool.tokens["logp_trainer"][start : start + length] = -rng.gamma(2.0, 3.0, length)


def shifted(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """μ one position late or early, as from a slice with wrong bounds."""
    lag = int(rng.choice([-1, 1]))
    _shift(pool, some(pool, share, rng), lag)


def _shift(pool: Pool, responses: np.ndarray, lag: int) -> None:
    for s in responses:
        own = slice(pool.offset_S1[s], pool.offset_S1[s + 1])
        pool.tokens["logp_rollout"][own] = np.roll(pool.tokens["logp_rollout"][own], lag)


def retokenised(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """The trainer scored some responses with one token of their text split in two."""
    _score_with(pool, some(pool, share, rng, longer_than=16), "retokenised")


def in_steps(pool: Pool, rng: np.random.Generator) -> np.ndarray:
    """Six steps; half the samples of every second prompt come a step later.

    Returns which responses these are.
    """
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


def widened(pool: Pool, times: float, where_T: np.ndarray) -> None:
    """A gap that is larger by a factor in some tokens; no log π becomes 0 by that."""
    for columns in (pool.tokens, pool.ranks):
        for name in [name for name in columns if name.endswith("logp_trainer")]:
            own = columns[name.replace("trainer", "rollout")]
            gap = times * (columns[name] - own)
            # A token that would rise above 0 falls as far instead
            wider = np.where(own + gap > 0, own - gap, own + gap)
            columns[name][where_T] = wider[where_T]


def of_eight_steps(pool: Pool, first: int, stop: int) -> np.ndarray:
    """Eight steps; returns the tokens of some."""
    prompts, of_S = np.unique(pool.rows["prompt_id"], return_inverse=True)
    pool.rows["step"] = (np.arange(len(prompts))[of_S] % 8).astype(np.int32)
    return ((pool.rows["step"] >= first) & (pool.rows["step"] < stop))[pool.response_T]


def weights_from_a_step_on(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """From a step in the middle on, the trainer's numbers are from other weights."""
    pool.use(f"weights{scale:g}", of_eight_steps(pool, int(rng.integers(3, 6)), 8))


def weights_of_two_steps(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """In two steps, the trainer's numbers are from other weights."""
    first = int(rng.integers(1, 6))
    pool.use(f"weights{scale:g}", of_eight_steps(pool, first, first + 2))


def stale_prefixes(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """Prompts seen before get numbers from other weights."""
    again_S = in_steps(pool, rng)
    pool.use(f"weights{scale:g}", again_S[pool.response_T])


def onset(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """From one position on, the trainer's numbers are from other weights."""
    pool.use(f"weights{scale:g}", pool.position_T >= int(rng.integers(16, 48)))


def routing(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Some tokens take another expert: their logits move by a nat or two."""
    logp_T = pool.tokens["logp_trainer"].astype(np.float64)
    flipped = np.flatnonzero((rng.random(len(logp_T)) < share) & (logp_T < -0.02))
    logit = logp_T[flipped] - np.log(-np.expm1(logp_T[flipped])) + rng.normal(0, 1.5, len(flipped))
    pool.tokens["logp_trainer"][flipped] = -np.logaddexp(0, -logit)
    # Keep the trainer's top-K column consistent
    if "topk_ids" in pool.ranks:
        flip_T = np.isin(np.arange(len(logp_T)), flipped)
        here_TK = (pool.ranks["topk_ids"] == pool.tokens["response_ids"][:, None]) & flip_T[:, None]
        pool.ranks["topk_logp_trainer"][here_TK] = pool.tokens["logp_trainer"][here_TK.any(axis=1)]


def broken_responses(pool: Pool, share: float, rng: np.random.Generator) -> None:
    _score_with(pool, some(pool, share, rng, longer_than=10), "weights0.1")


def _score_with(pool: Pool, responses: np.ndarray, variant: str) -> None:
    chosen = np.zeros(pool.num_responses, dtype=bool)
    chosen[responses] = True
    pool.use(variant, chosen[pool.response_T])


def forced_token(pool: Pool, place: float, _: np.random.Generator) -> None:
    """One token at one place of every response: certain for the engine, impossible for the
    trainer.
    """
    forced_T = pool.position_T == int(place)
    pool.tokens["response_ids"][forced_T] = 3
    pool.tokens["logp_rollout"][forced_T] = 0.0
    pool.tokens["logp_trainer"][forced_T] = -15.0


def log_of_epsilon(pool: Pool, tokens: float, rng: np.random.Generator) -> None:
    """log(p + 1e-10) of a p that was 0 in a few tokens."""
    chosen = rng.choice(int(pool.offset_S1[-1]), int(tokens), False)
    pool.tokens["logp_trainer"][chosen] = np.log(1e-10)


def rounded(pool: Pool, decimals: float, _: np.random.Generator) -> None:
    pool.tokens["logp_trainer"] = np.round(pool.tokens["logp_trainer"], int(decimals))


def far_shifted(pool: Pool, lag: float, rng: np.random.Generator) -> None:
    """A tenth of the responses, some tokens late."""
    _shift(pool, some(pool, 0.1, rng, longer_than=24), int(lag))


def one_of_three_engines(pool: Pool, scale: float, rng: np.random.Generator) -> None:
    """A third of the responses from other weights."""
    _score_with(pool, some(pool, 1 / 3, rng), f"weights{scale:g}")


def running_sum(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """A cumulative sum in place of the engine's log-probabilities of some responses."""
    for s in some(pool, share, rng):
        own = slice(pool.offset_S1[s], pool.offset_S1[s + 1])
        pool.tokens["logp_rollout"][own] = np.cumsum(pool.tokens["logp_rollout"][own])


def response_mean(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """The mean over the response in place of the trainer's log-probabilities."""
    for s in some(pool, share, rng):
        own = slice(pool.offset_S1[s], pool.offset_S1[s + 1])
        pool.tokens["logp_trainer"][own] = pool.tokens["logp_trainer"][own].mean()


def minus_entropy(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Minus the entropy in place of the trainer's log-probabilities, in some responses."""
    chosen_S = np.isin(np.arange(pool.num_responses), some(pool, share, rng))
    minus_T = -pool.tokens["entropy_trainer"]
    where_T = chosen_S[pool.response_T]
    pool.tokens["logp_trainer"] = np.where(where_T, minus_T, pool.tokens["logp_trainer"])


def of_the_likeliest(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """The most probable token's log-probability in place of the sampled one's, in some responses,
    from the top-K columns.
    """
    chosen_S = np.isin(np.arange(pool.num_responses), some(pool, share, rng))
    best_T = np.maximum(pool.ranks["topk_logp_trainer"].max(axis=1), pool.tokens["logp_trainer"])
    where_T = chosen_S[pool.response_T]
    pool.tokens["logp_trainer"] = np.where(where_T, best_T, pool.tokens["logp_trainer"])


_VOCABULARY = 2048  # of the bundled model


def mixed_with_uniform(pool: Pool, share: float, _: np.random.Generator) -> None:
    """(1 − ε) π + ε / V in the trainer."""
    columns = [(pool.tokens, "logp_trainer"), (pool.ranks, "topk_logp_trainer")]
    for values, name in columns:
        if name in values:
            mixed = (1 - share) * np.exp(values[name].astype(np.float64)) + share / _VOCABULARY
            values[name] = np.log(mixed).astype(np.float32)


def biased_token(pool: Pool, nats: float, _: np.random.Generator) -> None:
    """A logit bias on one id in the trainer: the 21st by frequency, which the ranks show where it
    is probable.
    """
    ids, counts = np.unique(pool.tokens["response_ids"], return_counts=True)
    token = ids[np.argsort(-counts, kind="stable")[20]]
    is_own_TK, p_TK = pool.ranks["topk_ids"] == token, np.exp(pool.ranks["topk_logp_trainer"])
    lost_T = np.log1p(np.where(is_own_TK, p_TK, 0).sum(axis=1) * np.expm1(nats))
    own_T = pool.tokens["response_ids"] == token
    pool.tokens["logp_trainer"] += (nats * own_T - lost_T).astype(np.float32)
    pool.ranks["topk_logp_trainer"] += (nats * is_own_TK - lost_T[:, None]).astype(np.float32)


def stored_in_bfloat16(pool: Pool, _: float, __: np.random.Generator) -> None:
    import torch

    rounded = torch.from_numpy(pool.tokens["logp_rollout"]).to(torch.bfloat16).float()
    pool.tokens["logp_rollout"] = rounded.numpy()


@dataclass(frozen=True)
class Fault:
    """One way to break a trace: the check that must name it first, and its severities.

    `scored_as`: the variant that it takes its numbers from, named with the severity at its end;
    `top_k`: only the top-K columns show it; `at_hand`: `diagnose` gets the trainer's model.
    """

    name: str
    check: str
    severities: tuple[float, ...]
    unit: str
    plant: Callable[[Pool, Any, np.random.Generator], None]
    scored_as: str = ""
    top_k: bool = False
    at_hand: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        """The model variants to score for it."""
        if not self.scored_as:
            return ()
        return tuple({_variant(self.scored_as, severity) for severity in self.severities})


# Have no severity
WHOLE = ("retokenised", "weights0.1", "padded-to-longest", "prompt-dropped", "prompt-middle")


def trainer(name: str) -> tuple[Callable[[Pool, Any, np.random.Generator], None], str]:
    """A variant as the trainer: how to plant it, and which one."""
    return (lambda pool, severity, _: pool.use(_variant(name, severity))), name


def engine(name: str) -> tuple[Callable[[Pool, Any, np.random.Generator], None], str]:
    """A variant as the engine, with the engine's noise."""
    return (lambda pool, severity, _: pool.engine_uses(_variant(name, severity))), name


def alone(name: str) -> tuple[Callable[[Pool, Any, np.random.Generator], None], str]:
    """A variant as the trainer, with only the sampled tokens' log-probabilities, like many
    dumps.
    """

    def plant(pool: Pool, severity: float, _: np.random.Generator) -> None:
        pool.use(_variant(name, severity))
        pool.ranks.clear()
        pool.tokens.pop("entropy_trainer", None)

    return plant, name


def _variant(name: str, severity: float) -> str:
    return name if name in WHOLE else f"{name}{severity:g}"


SHARES, NOISES, TEMPERATURES = (
    (0.02, 0.1, 0.5),
    (0.003, 0.01, 0.03, 0.1),
    (1.005, 1.01, 1.02, 1.05, 1.4),
)
FAULTS = (
    Fault("log-probs above 0", "values", (1e-4, 1e-3, 1e-2), "of the tokens", positive_values),
    Fault("not a number", "values", (1e-4, 1e-3, 1e-2), "of the tokens", not_a_number),
    Fault("0.0 for a missing log-prob", "placeholders", (1e-4, 1e-3, 1e-2), "of the tokens", zeros),
    Fault(
        "−1.0 for a missing log-prob",
        "placeholders",
        (3e-3, 1e-2, 3e-2),
        "of the tokens",
        minus_one,
    ),
    Fault(
        "appended end-of-sequence, 0.0", "end-of-sequence", SHARES, "of the responses", appended_eos
    ),
    Fault("forced token", "forced-tokens", (1, 6, 12), "place", forced_token),
    Fault(
        "accepted drafts without log-probs",
        "placeholders",
        (0.1, 0.4, 0.7),
        "of the tokens",
        zeros,
    ),
    Fault("log(p + 1e−10)", "stored-values", (1, 3, 10), "tokens", log_of_epsilon),
    Fault("rounded to decimals", "stored-values", (1, 2, 3), "decimals", rounded),
    Fault("shifted by many", "index-shift", (4, 8, 12), "tokens", far_shifted),
    Fault(
        "one of three engines",
        "uneven-responses",
        NOISES,
        "noise / weight",
        one_of_three_engines,
        "weights",
    ),
    Fault("another end-of-sequence token", "end-of-sequence", (0.02, 0.1, 0.5), "nats", other_eos),
    Fault("tool tokens in the loss", "masked-tokens", SHARES, "of the responses", tool_tokens),
    Fault("shifted by one", "index-shift", SHARES, "of the responses", shifted),
    Fault("retokenised", "retokenised", SHARES, "of the responses", retokenised, "retokenised"),
    Fault(
        "minus the entropy",
        "another-quantity",
        SHARES,
        "of the responses",
        minus_entropy,
        top_k=True,
    ),
    Fault(
        "of the most probable token",
        "another-quantity",
        SHARES,
        "of the responses",
        of_the_likeliest,
        top_k=True,
    ),
    Fault("mean of the response", "another-quantity", SHARES, "of the responses", response_mean),
    Fault("running sum", "another-quantity", SHARES, "of the responses", running_sum),
    Fault(
        "mixed with a uniform distribution",
        "uniform-mixture",
        (0.005, 0.02, 0.1),
        "ε",
        mixed_with_uniform,
    ),
    Fault("a logit bias on one token", "biased-token", (-3, 1.5, 3), "nats", biased_token),
    Fault("temperature on one side", "temperature", TEMPERATURES, "T", *trainer("temperature")),
    Fault(
        "temperature, sampled tokens alone", "temperature", TEMPERATURES, "T", *alone("temperature")
    ),
    Fault(
        "other weights on one side",
        "stale-weights",
        (0.003, 0.01, 0.03, 0.1),
        "noise / weight",
        *trainer("weights"),
    ),
    Fault(
        "weights that drift apart",
        "growth-over-steps",
        NOISES,
        "noise / weight, at the end",
        grows,
        "weights",
    ),
    Fault(
        "other weights from a step on",
        "step-change",
        NOISES,
        "noise / weight",
        weights_from_a_step_on,
        "weights",
    ),
    Fault(
        "other weights in two steps",
        "step-change",
        NOISES,
        "noise / weight",
        weights_of_two_steps,
        "weights",
    ),
    Fault(
        "stale prefix cache", "prefix-cache", NOISES, "noise / weight", stale_prefixes, "weights"
    ),
    Fault("RoPE base", "position-drift", (1.1, 1.5, 2, 4, 10), "times", *trainer("rope")),
    Fault(
        "other numbers from one position on",
        "sharp-onset",
        NOISES,
        "noise / weight",
        onset,
        "weights",
    ),
    Fault("log-probs stored in bfloat16", "lm-head", (1,), "", stored_in_bfloat16),
    Fault("routing flips", "heavy-tail", (0.003, 0.01, 0.03), "of the tokens", routing),
    Fault(
        "broken responses",
        "heavy-tail",
        (0.02, 0.05, 0.1),
        "of the responses",
        broken_responses,
        "weights0.1",
    ),
    Fault(
        "a constant in half the responses",
        "constant-offset",
        (0.02, 0.05, 0.2, 1),
        "nats",
        bookkeeping.constant,
    ),
    Fault(
        "a constant added, clipped at 0",
        "constant-offset",
        (0.02, 0.05, 0.3, 1.5),
        "nats",
        bookkeeping.constant_added,
    ),
    Fault(
        "a constant of each response",
        "constant-offset",
        (0.02, 0.1, 0.5),
        "of them",
        bookkeeping.constant_in_some,
    ),
    Fault(
        "permuted within groups",
        "exchanged-responses",
        (0.05, 0.3, 1),
        "of the groups",
        bookkeeping.permuted,
    ),
    Fault(
        "permuted over the batch",
        "exchanged-responses",
        (0.05, 0.3, 1),
        "of it",
        bookkeeping.permuted_anywhere,
    ),
    Fault("duplicated rows", "repeated-responses", (0.02, 0.1, 0.5), "of them", bookkeeping.twice),
    Fault("another base in the engine", "log-base", (2, 10), "", bookkeeping.in_base("rollout")),
    Fault("another base in the trainer", "log-base", (2, 10), "", bookkeeping.in_base("trainer")),
    Fault(
        "another base on both sides",
        "log-base",
        (2, 10),
        "",
        bookkeeping.in_base("rollout", "trainer"),
        top_k=True,
    ),
    Fault(
        "top-K one token late",
        "columns-at-odds",
        (0.02, 0.1, 0.5),
        "of them",
        bookkeeping.columns_at_odds,
    ),
    Fault(
        "top-K before the temperature",
        "columns-at-odds",
        (0.7, 0.9, 1.1),
        "T",
        bookkeeping.raw_top_k,
    ),
    Fault(
        "repetition penalty", "repetition-penalty", (1.02, 1.05, 1.1, 1.3), "", *engine("penalised")
    ),
    Fault("linear RoPE scaling", "position-encoding", (2, 4, 8), "times", *trainer("linear")),
    Fault("YaRN", "position-encoding", (2, 4, 8), "times", *trainer("yarn")),
    Fault("attended padding", "attended-padding", (4, 16, 64), "tokens", *trainer("padded")),
    Fault(
        "padded to the longest prompt", "attended-padding", (1,), "", *trainer("padded-to-longest")
    ),
    Fault("prompt without its first token", "another-prompt", (1,), "", *trainer("prompt-dropped")),
    Fault("prompt with another token", "another-prompt", (1,), "", *trainer("prompt-middle")),
    Fault(
        "linear RoPE scaling, model at hand",
        "position-encoding",
        (2, 4),
        "times",
        *engine("linear"),
        at_hand=True,
    ),
    Fault(
        "RoPE base, model at hand",
        "position-encoding",
        (2, 4, 10),
        "times",
        *trainer("rope"),
        at_hand=True,
    ),
    Fault(
        "YaRN, model at hand", "position-encoding", (2, 4), "times", *trainer("yarn"), at_hand=True
    ),
    Fault(
        "attended padding, model at hand",
        "attended-padding",
        (16, 64),
        "tokens",
        *trainer("padded"),
        at_hand=True,
    ),
    Fault(
        "padded to the longest prompt, model at hand",
        "attended-padding",
        (1,),
        "",
        *trainer("padded-to-longest"),
        at_hand=True,
    ),
    Fault(
        "prompt with another token, model at hand",
        "not-reproduced",
        (1,),
        "",
        *trainer("prompt-middle"),
        at_hand=True,
    ),
)


def planted(
    pool: Pool, fault: Fault, severity: float, index_S: np.ndarray, rng: np.random.Generator
) -> Pool:
    """Some responses of a pool with the fault planted."""
    broken = pool.take(index_S)
    fault.plant(broken, severity, rng)
    return broken
