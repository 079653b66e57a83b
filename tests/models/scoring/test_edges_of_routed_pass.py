"""Routes at the limits of what a trainer's routers have."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.routers import LIVE
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.routed_pass import TrainerRouting
from mismatch_cli.trace.routes import UNKNOWN


def request(expert: int) -> ScoreRequest:
    """Two tokens and one layer, one expert each."""
    routes_FMK = np.full((2, 1, 1), expert, dtype=np.uint16)
    return ScoreRequest([1, 2], [3], routes_FMK=routes_FMK)


@pytest.mark.parametrize("experts", [1, 2])
def test_the_last_expert_is_known_and_the_one_after_it_is_not(experts):
    routing = TrainerRouting(SimpleNamespace(layers=[0], experts=experts), replays=False)
    routing.check([request(0), request(experts - 1), request(UNKNOWN)])
    with pytest.raises(MismatchError, match=f"experts up to {experts}; the trainer has 1 layers"):
        routing.check([request(experts)])


@pytest.mark.parametrize("replays", [False, True])
def test_one_request_with_routes_is_enough_to_listen_and_to_replay(replays):
    calls = []
    routers = SimpleNamespace(
        layers=[0],
        experts=2,
        listen=lambda: calls.append("listen"),
        prescribe=lambda routes: calls.append(None if routes is None else routes.ravel().tolist()),
    )
    routing, without = TrainerRouting(routers, replays), ScoreRequest([1, 2], [3])
    routing.set_routes([without, request(1)], packed=True)
    routing.set_routes([without], packed=True)
    routes = [LIVE, LIVE, 1, 1]  # two tokens of each are read
    assert calls == (["listen", routes, None] if replays else ["listen"])


def test_routes_of_an_engine_whose_trainer_has_no_routers_are_refused():
    routing = TrainerRouting(None, replays=False)
    routing.set_routes([ScoreRequest([1, 2], [3])], packed=True)
    with pytest.raises(MismatchError, match="the trainer has no routers"):
        routing.set_routes([ScoreRequest([1, 2], [3]), request(1)], packed=True)
