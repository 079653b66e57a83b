"""Routes from vLLM, which returns them only on a GPU: its answer there is a mock, its layers are
real.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, vllm
from mismatch_cli.rules.batch import Rollout

# Of 6 tokens; the second layer is dense
EXPERTS_OF_ALL_LAYERS = np.arange(6 * 3 * 2, dtype=np.uint8).reshape(6, 3, 2)


@pytest.mark.parametrize("routes", [True, False, None])
def test_rollouts_report_the_experts_of_the_layers_with_a_router(routes, monkeypatch):
    nothing = np.zeros(4, dtype=np.float32)
    rollout = Rollout(
        [1, 2, 3], [4, 5, 6, 7], nothing, nothing.astype(np.int32), None, None, "length"
    )
    monkeypatch.setattr(vllm, "to_rollout", lambda *_: rollout)
    settings = EngineSettings("model", SamplingSettings(), 0, routes=routes)
    completion = SimpleNamespace(routed_experts=EXPERTS_OF_ALL_LAYERS)
    outputs = [SimpleNamespace(outputs=[completion])]
    llm = SimpleNamespace(  # mocks vLLM on a GPU
        apply_model=lambda _: [[0, 2]],
        reset_prefix_cache=lambda: True,
        generate=lambda prompts, *_, **__: outputs * len(prompts),
    )
    engine = vllm.VllmEngine(llm, settings, SimpleNamespace(), SimpleNamespace())
    (response,) = engine.sample([Request([1, 2, 3], 0)], lambda _: None)
    if not routes:
        assert response.routes_FMK is None
        return
    assert response.routes_FMK.dtype == np.uint16
    assert np.array_equal(response.routes_FMK, EXPERTS_OF_ALL_LAYERS[:, [0, 2]])
    (response, *_) = engine.sample_full([Request([1, 2, 3], 0)], [lambda _: None], lambda _: None)
    assert np.array_equal(response.routes_FMK, EXPERTS_OF_ALL_LAYERS[:, [0, 2]])
