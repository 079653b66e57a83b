"""Sampling as every recording does it: seeds that depend on what is sampled, and log-probs that a sampler can have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np

from mismatch_cli.batch import Rollout
from mismatch_cli.engines import Engine, FullEngine, Request, Sink
from mismatch_cli.errors import MismatchError, first_line


def sample_seed(seed: int, prompt_id: int, sample_index: int, step: int = 0) -> int:
    """A 31-bit seed from hash(seed, prompt, sample, step): a resumed run samples what the unbroken one would have."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample_index}/{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def engine_failures(doing: str, kept: str) -> Iterator[None]:
    """Whatever breaks inside an engine is a `MismatchError` that says what is kept and how to go on."""
    try:
        yield
    except MismatchError:
        raise
    except Exception as error:  # a foreign library can fail in any way: out of memory, a lost worker
        raise MismatchError(
            f"The rollout engine failed while {doing} ({type(error).__name__}: {first_line(error)}). "
            f"{kept}: go on with --resume. --debug shows where it failed."
        ) from error


def sample_checked(
    engine: Engine,
    requests: Sequence[Request],
    prompt_id_S: Sequence[int],
    on_finished: Callable[[int], None],
    sinks: Sequence[Sink] = (),
) -> list[Rollout]:
    """Sample, and refuse what no sampler can have drawn; a `MismatchError` says which response of which prompt.

    `sinks` take the whole distributions of the first responses.
    """
    with engine_failures("sampling", "What was sampled before is kept"):
        if sinks:
            rollouts = cast(FullEngine, engine).sample_full(requests, sinks, on_finished)
        else:
            rollouts = engine.sample(requests, on_finished)
    for prompt_id, rollout in zip(prompt_id_S, rollouts, strict=True):
        _check(prompt_id, rollout)
    return rollouts


def _check(prompt_id: int, rollout: Rollout) -> None:
    """Refuse what no sampler can have drawn: everything after this would be computed from it."""
    logp_T = rollout.logp_rollout_T
    bad_T = ~np.isfinite(logp_T) | (logp_T > 0)
    if bad_T.any():
        position = int(bad_T.argmax())
        raise MismatchError(
            f"The engine reported log μ = {logp_T[position]:g} for token {position} of a response to prompt "
            f"{prompt_id}. A sampled token has a finite log-probability of at most 0: "
            "try another --rollout-dtype, or report it to the engine's authors."
        )
    # A certain token has rank 1; exactly 0.0 elsewhere is a placeholder for "not computed".
    placeholder_T = (logp_T == 0) & (rollout.rank_rollout_T > 1)
    if placeholder_T.any():
        position = int(placeholder_T.argmax())
        raise MismatchError(
            f"The engine reported log μ = 0.0 (certain) for token {position} of a response to prompt "
            f"{prompt_id}, but rank {rollout.rank_rollout_T[position]}: a placeholder for a missing value. "
            "Switch off what skips the computation (speculative decoding, a sampler plug-in)."
        )
