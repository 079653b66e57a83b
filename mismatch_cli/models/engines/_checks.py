"""Checks of what an engine reports and is asked to read: a `MismatchError` says what is wrong
with which response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch_cli.base.errors import MismatchError

if TYPE_CHECKING:
    import numpy as np

    from mismatch_cli.rules.batch import Rollout


def check_rollout(prompt_id: int, rollout: Rollout) -> None:
    """Refuse what no sampler can have drawn: everything later is computed from it."""
    if rollout.routes_FMK is not None:
        from mismatch_cli.trace.routes import check_routes

        # The last token is drawn, but not read, so no expert has seen it.
        fed = len(rollout.prompt_ids) + len(rollout.response_ids) - 1
        check_routes(rollout.routes_FMK, fed, prompt_id)
    check_finite(prompt_id, rollout.logp_rollout_T)
    _check_placeholders(prompt_id, rollout)


def check_replayed(prompt_id: int, rollout: Rollout) -> None:
    """Refuse impossible log-probs of recorded tokens, except −∞: settings that did not sample them
    may exclude them.
    """
    check_read(prompt_id, rollout.logp_rollout_T)
    _check_placeholders(prompt_id, rollout)


def _check_placeholders(prompt_id: int, rollout: Rollout) -> None:
    logp_T = rollout.logp_rollout_T
    # A certain token has rank 1, so exactly 0.0 elsewhere is a placeholder for "not computed".
    placeholder_T = (logp_T == 0) & (rollout.rank_rollout_T > 1)
    if placeholder_T.any():
        position = int(placeholder_T.argmax())
        raise MismatchError(
            f"The engine reported log μ = 0.0 (certain) for token {position} of a response to "
            f"prompt {prompt_id}, but rank {rollout.rank_rollout_T[position]}: a placeholder for "
            "a missing value. Switch off whatever skips the computation (speculative decoding, a "
            "sampler plug-in)."
        )


def check_finite(prompt_id: int, logp_T: np.ndarray) -> None:
    """Refuse what is not the log-probability of a token that can be sampled."""
    import numpy as np

    bad_T = ~np.isfinite(logp_T) | (logp_T > 0)
    _refuse(prompt_id, logp_T, bad_T, "A sampled token has a finite log-probability")


def check_read(prompt_id: int, logp_T: np.ndarray) -> None:
    """Refuse what is not a log-probability; −∞ is that of a token that truncation excludes."""
    import numpy as np

    bad_T = np.isnan(logp_T) | (logp_T > 0)
    _refuse(prompt_id, logp_T, bad_T, "A token has a log-probability")


def _refuse(prompt_id: int, logp_T: np.ndarray, bad_T: np.ndarray, rule: str) -> None:
    """Raise if a token is bad, with the rule that the first of them breaks."""
    if bad_T.any():
        position = int(bad_T.argmax())
        raise MismatchError(
            f"The engine reported log μ = {logp_T[position]:g} for token {position} of a "
            f"response to prompt {prompt_id}. {rule} of at most 0: try another --rollout-dtype, "
            "or report this to the engine's authors."
        )


def check_fits(prompt_id: int, length: int, max_model_len: int) -> None:
    """Refuse a prompt and response that do not fit the engine's context."""
    if length > max_model_len:
        raise MismatchError(
            f"Prompt {prompt_id} and a response to it have {length} tokens; the engine's context "
            f"is {max_model_len}. Set max_model_len={length}, if the model allows it."
        )


def check_token_ids(response_ids_S: Sequence[list[int]], vocabulary: int) -> None:
    """Refuse tokens that the engine's model does not have: kernels fail on them, or read out of
    bounds.
    """
    for response_ids in response_ids_S:
        for token in (min(response_ids), max(response_ids)):
            if not 0 <= token < vocabulary:
                raise MismatchError(
                    f"A recorded response has the token id {token}, and the engine's model has "
                    f"{vocabulary} tokens. Use the model that sampled it."
                )
