"""One vLLM for all lines of the guide that start it alike: a start and an end take seconds, and
there are many.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.models.engines import EngineSettings


class SharedVllm:
    """Every vLLM stays after its run, for the next run that asks for the same; never one whose
    weights were changed.

    None is closed before the end: that would take the process groups away from the others.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from mismatch_cli.models.engines import vllm

        self._load, self._close, self._take_weights = (
            vllm.load_llm,
            vllm.VllmEngine.close,
            vllm.VllmEngine.load_weights,
        )
        self._shared: dict[str, Any] = {}
        self._all: list[Any] = []
        self._last: Any = None  # an engine that can end what all have in common
        patch.setattr(vllm, "load_llm", self.load)
        patch.setattr(vllm.VllmEngine, "close", lambda engine: self.close(engine))
        patch.setattr(
            vllm.VllmEngine, "load_weights", lambda engine, model: self.load_weights(engine, model)
        )

    def load(self, settings: EngineSettings, more: dict[str, Any]) -> Any:
        weights = Path(settings.model, "model.safetensors").resolve()
        engine_key = (weights, settings.dtype, settings.seed, settings.full, settings.top_logprobs)
        key = repr((engine_key, settings.extra, more))
        if key not in self._shared:
            self._shared[key] = self._load(settings, more)
            self._all.append(self._shared[key])
        return self._shared[key]

    def load_weights(self, engine: Any, model: Any) -> None:
        self._shared = {key: llm for key, llm in self._shared.items() if llm is not engine.llm}
        self._take_weights(engine, model)

    def close(self, engine: Any) -> None:
        engine._before.restore()
        self._last = engine

    def end(self) -> None:
        """Close the last one as after a run; the others before it, without a search for garbage
        after each.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "collect", lambda *_: 0)
            for llm in self._all:
                llm.llm_engine.engine_core.shutdown()
        self._shared, self._all = {}, []
        if self._last is not None:
            # The folder of its log is gone
            self._last.settings = replace(self._last.settings, log_file=None)
            self._close(self._last)
