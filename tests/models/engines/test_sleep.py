"""vLLM asleep while the trainer learns, which needs a GPU: here a mock records the calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, vllm

REQUEST = Request([1, 2, 3], seed=0)


class Sleeper:
    """Mocks vLLM: it refuses whatever vLLM could not do asleep."""

    def __init__(self) -> None:
        self.awake, self.asked = {"weights", "kv_cache"}, []

    def sleep(self, level: int) -> None:
        assert level == 1  # keeps weights in main memory instead of dropping them
        self.asked.append("sleep")
        self.awake.clear()

    def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & set(tags)
        self.asked.append(f"wake {tags[0]}")
        self.awake.update(tags)

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        self.asked.append("generate")
        return [SimpleNamespace(outputs=[None])] * len(prompts)


def engine(monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> tuple[vllm.VllmEngine, Sleeper]:
    llm = Sleeper()

    def replace_weights(_: Any, __: Any) -> None:
        assert "weights" in llm.awake
        llm.asked.append("load")

    monkeypatch.setattr(vllm, "replace_weights", replace_weights)
    monkeypatch.setattr(vllm, "to_rollout", lambda *_: None)
    settings = EngineSettings("model", SamplingSettings(), 0, sleeps=sleeps)
    return vllm.VllmEngine(llm, settings, SimpleNamespace(), SimpleNamespace()), llm


def test_weights_wake_for_the_sync_and_the_cache_for_the_next_response(monkeypatch):
    sleeping, llm = engine(monkeypatch, sleeps=True)
    for _ in range(2):
        sleeping.sample([REQUEST], lambda _: None)
        sleeping.load_weights(None)
    step = ["generate", "sleep", "wake weights", "load"]
    assert llm.asked == [*step, "wake kv_cache", *step]
    sleeping.sample_full([REQUEST], [], lambda _: None)
    assert llm.asked[-3:] == ["wake kv_cache", "generate", "sleep"]


def test_without_a_gpu_nothing_sleeps(monkeypatch):
    waking, llm = engine(monkeypatch, sleeps=False)
    waking.sample([REQUEST], lambda _: None)
    waking.load_weights(None)
    assert llm.asked == ["generate", "load"]
