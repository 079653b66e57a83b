"""Routes in a trace's form, and where the trainer's routers choose different experts from the
engine's.

`_F` are the tokens that the model reads: prompt and response without the last token. The routers at
the previous token affect the log-probability of a response token, so response token t belongs to
row `prompt length − 1 + t`. `_M` are the layers with a router, `_K` the experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.errors import MismatchError

UNKNOWN = 2**16 - 1  # instead of an expert that the engine did not name
NOT_MEASURED = NO_FLIP = 255  # in the token columns
_MOST = 254  # of a uint8, since 255 has a meaning
# Bins of router margins, in logits: half octaves from 2⁻¹⁶ to 2⁶, with one bin below and one above.
MARGIN_EDGES = 2.0 ** np.arange(-16, 6.5, 0.5)
MARGIN_BINS = len(MARGIN_EDGES) + 1
MOST_LAYERS = 1024  # with a router; readers keep sums of each
LAYER_COUNTS = ("tokens", "flips", "shared", "first")


@dataclass(frozen=True)
class RouteComparison:
    """Where the trainer would route the tokens of one response differently, as columns of a
    trace.
    """

    flips_T: np.ndarray  # uint8, number of layers with different experts; 255 = not measured
    # uint8, index of the first of these among the layers with a router; 255 = none
    first_T: np.ndarray
    layers_MC: np.ndarray  # int32, `LAYER_COUNTS` of each layer
    margins_2B: np.ndarray  # int32, the trainer's margins where it agrees, and where it differs


def compare_routes(
    engine_TMK: np.ndarray, trainer_TMK: np.ndarray, margin_TM: np.ndarray, counted_T: np.ndarray
) -> RouteComparison:
    """Compare both sides' experts, most likely first, at the tokens that predict a response.

    The counts by layer and by margin cover the tokens in `counted_T`: `tokens` with known routes,
    `flips` (different experts, in any order), `shared` (Σ of the experts that both chose), `first`
    (the same most likely expert).
    """
    named_TM = (engine_TMK != UNKNOWN).all(-1)
    shared_TM = (engine_TMK[..., :, None] == trainer_TMK[..., None, :]).any(-1).sum(-1)
    flipped_TM = (shared_TM < max(engine_TMK.shape[-1], trainer_TMK.shape[-1])) & named_TM
    flips_T = flipped_TM.sum(-1)
    first_T = flipped_TM.argmax(-1)  # the first True of each row

    counted_TM = named_TM & counted_T[:, None]
    same_first_TM = counted_TM & (engine_TMK[..., 0] == trainer_TMK[..., 0])
    layers_CM = [
        counted_TM.sum(0),
        (flipped_TM & counted_TM).sum(0),
        (shared_TM * counted_TM).sum(0),
        same_first_TM.sum(0),
    ]
    return RouteComparison(
        _as_uint8(flips_T, named_TM.any(-1), otherwise=NOT_MEASURED),
        _as_uint8(first_T, flips_T > 0, otherwise=NO_FLIP),
        np.stack(layers_CM, -1).astype(np.int32),
        _margins(margin_TM, counted_TM, flipped_TM),
    )


def _as_uint8(value_T: np.ndarray, has_one_T: np.ndarray, otherwise: int) -> np.ndarray:
    """The values as a column holds them: at most 254, and `otherwise` for tokens without one."""
    return np.where(has_one_T, np.minimum(value_T, _MOST), otherwise).astype(np.uint8)


def _margins(margin_TM: np.ndarray, counted_TM: np.ndarray, flipped_TM: np.ndarray) -> np.ndarray:
    """How often the router's margin is in each bin: where both sides agree, and where they do
    not.
    """
    bin_TM = np.searchsorted(MARGIN_EDGES, margin_TM, side="right")
    has_margin_TM = counted_TM & ~np.isnan(margin_TM)
    agree_B = np.bincount(bin_TM[has_margin_TM & ~flipped_TM], minlength=MARGIN_BINS)
    differ_B = np.bincount(bin_TM[has_margin_TM & flipped_TM], minlength=MARGIN_BINS)
    return np.stack([agree_B, differ_B]).astype(np.int32)


def route_columns(
    comparison_S: Sequence[RouteComparison | None],
) -> dict[str, list[np.ndarray | None]]:
    """The columns of a trace, one item per response; null where the engine's routes are unknown."""

    def column(field: str) -> list[np.ndarray | None]:
        return [None if each is None else getattr(each, field) for each in comparison_S]

    return {
        "route_flips": column("flips_T"),
        "route_first": column("first_T"),
        "route_layers": column("layers_MC"),
        "route_margins": column("margins_2B"),
    }


def check_routes(routes_FMK: np.ndarray, fed: int, prompt_id: int) -> None:
    """Raise a `MismatchError` for impossible routes: not of the `fed` tokens that the model read,
    or an expert named twice.
    """
    if len(routes_FMK) != fed:
        raise MismatchError(
            f"The engine returned routes of {len(routes_FMK)} tokens for a response to prompt "
            f"{prompt_id}, but the model read {fed}. Leave out routes, or report it to the "
            "engine's authors."
        )
    sorted_FMK = np.sort(routes_FMK, -1)
    twice_FMK = (sorted_FMK[..., 1:] == sorted_FMK[..., :-1]) & (sorted_FMK[..., 1:] != UNKNOWN)
    if twice_FMK.any():
        token, layer, index = np.argwhere(twice_FMK)[0]
        raise MismatchError(
            f"The engine sent token {token} of prompt {prompt_id} twice to expert "
            f"{sorted_FMK[token, layer, index]} in layer {layer}: a stale or damaged capture. "
            "Leave out routes, or report it to the engine's authors."
        )
