"""One vLLM for all lines of the guide that start it alike: a start takes seconds, and there are many such lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.engines import EngineSettings


class OneVllm:
    """Keeps the last vLLM after its run, for the next run that asks for the same; one whose weights changed goes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from mismatch_cli.engines import vllm

        self._load, self._close, self._take_weights = vllm._load, vllm.VllmEngine.close, vllm.VllmEngine.load_weights
        self._key = ""
        self._llm: Any = None
        self._engine: Any = None  # the last one that was closed, and can close its vLLM
        self.starts = 0
        patch.setattr(vllm, "_load", self.load)
        patch.setattr(vllm.VllmEngine, "close", lambda engine: self.close(engine))
        patch.setattr(vllm.VllmEngine, "load_weights", lambda engine, model: self.load_weights(engine, model))

    def load(self, settings: EngineSettings, more: dict[str, Any]) -> Any:
        weights = Path(settings.model, "model.safetensors").resolve()
        asked = (weights, settings.dtype, settings.seed, settings.whole, settings.top_logprobs)
        key = repr((asked, settings.extra, more))
        if key != self._key:
            self.drop()
            self._llm, self._key = self._load(settings, more), key
            self.starts += 1
        return self._llm

    def load_weights(self, engine: Any, model: Any) -> None:
        self._key = "other weights"
        self._take_weights(engine, model)

    def close(self, engine: Any) -> None:
        engine._before.restore()
        self._engine = engine

    def drop(self) -> None:
        """Close what is kept."""
        engine, self._engine, self._llm, self._key = self._engine, None, None, ""
        if engine is not None:
            self._close(engine)
