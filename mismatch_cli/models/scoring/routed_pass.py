"""The experts in a pass of the trainer: the engine's choices replayed, or compared with the
trainer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.models.routers import LIVE, Routers
from mismatch_cli.models.scoring.layout import fed_rows
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.trace.routes import UNKNOWN, RouteComparison, compare_routes


@dataclass(frozen=True)
class TrainerRouting:
    """The routers of a trainer's model, None for a dense one; `replays`: they follow the
    engine's known routes.
    """

    routers: Routers | None
    replays: bool

    @classmethod
    def of(cls, model: Any, name: str, replays: bool) -> TrainerRouting:
        """The routing of a model; a `UsageError` for routes to replay in a model without
        routers.
        """
        routers = Routers.of(model)
        if replays and routers is None:
            raise UsageError(
                f"{name} has no known routers, so no routes to replay. Leave out --replay-routes."
            )
        return cls(routers, replays)

    @property
    def layers(self) -> int:
        """The number of layers with a router."""
        return 0 if self.routers is None else len(self.routers.layers)

    def describe(self) -> dict[str, Any]:
        """What a manifest records of the routing; nothing for a dense model."""
        if self.routers is None:
            return {}
        return self.routers.describe() | {"routes": "replayed" if self.replays else "own"}

    def set_routes(self, requests: Sequence[ScoreRequest], packed: bool) -> None:
        """Call before a pass: checks the engine's routes, and sends tokens there if they are
        replayed.
        """
        routed = any(request.routes_FMK is not None for request in requests)
        if self.routers is None:
            if routed:
                raise MismatchError(
                    "The engine's routes are of a mixture of experts, but the trainer has no "
                    "routers."
                )
            return
        if routed:
            self.check(requests)
            self.routers.listen()
        if self.replays:
            self.routers.prescribe(_routes_of_rows(requests, packed) if routed else None)

    def compare(
        self, requests: Sequence[ScoreRequest], packed: bool
    ) -> list[RouteComparison | None]:
        """Call after the pass: the engine's experts and the trainer's own, at the tokens that
        predict each response.
        """
        if self.routers is None or all(request.routes_FMK is None for request in requests):
            return [None] * len(requests)
        chosen_NMK, margin_NM = (choices.cpu().numpy() for choices in self.routers.choices())
        spans, _ = fed_rows(requests, packed)
        comparisons: list[RouteComparison | None] = []
        for request, span in zip(requests, spans, strict=True):
            if request.routes_FMK is None:
                comparisons.append(None)
            else:
                comparisons.append(_compare(request, chosen_NMK[span], margin_NM[span]))
        return comparisons

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Raise a `MismatchError` for routes of another model."""
        assert self.routers is not None
        layers = self.layers
        experts = self.routers.experts
        for request in requests:
            routes_FMK = request.routes_FMK
            if routes_FMK is None:
                continue
            named = routes_FMK[routes_FMK != UNKNOWN]
            if routes_FMK.shape[1] != layers or named.max(initial=0) >= experts:
                raise MismatchError(
                    f"The engine's routes name {routes_FMK.shape[1]} layers and experts up to "
                    f"{named.max(initial=0)}; the trainer has {layers} layers with a router and "
                    f"{experts} experts. Score with the model that sampled."
                )


def _routes_of_rows(requests: Sequence[ScoreRequest], packed: bool) -> torch.Tensor:
    """Routes `[N, M, K]` of every row of the pass, `LIVE` where none are known."""
    spans, rows = fed_rows(requests, packed)
    routed = []
    for request, span in zip(requests, spans, strict=True):
        if request.routes_FMK is not None:
            routed.append((span, request.routes_FMK))
    first_FMK = routed[0][1]
    routes_NMK = np.full((rows, *first_FMK.shape[1:]), LIVE, dtype=np.int64)
    for span, routes_FMK in routed:
        routes_NMK[span] = np.where(routes_FMK == UNKNOWN, LIVE, routes_FMK.astype(np.int64))
    return torch.from_numpy(routes_NMK)


def _compare(
    request: ScoreRequest, chosen_FMK: np.ndarray, margin_FM: np.ndarray
) -> RouteComparison:
    """Compare routes at the tokens that predict the response: the prompt's last, and all but the
    response's last.
    """
    assert request.routes_FMK is not None
    first = len(request.prompt_ids) - 1
    counted_T = request.counted_T
    if counted_T is None:
        counted_T = np.ones(len(request.response_ids), dtype=bool)
    return compare_routes(
        request.routes_FMK[first:], chosen_FMK[first:], margin_FM[first:], counted_T
    )
