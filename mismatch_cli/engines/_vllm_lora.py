"""A LoRA adapter in vLLM: the settings that it needs, and loading it before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from mismatch_cli.adapters import Adapter


def lora_arguments(adapter: Adapter | None) -> dict[str, Any]:
    """For `LLM(…)`: room for one adapter, of the smallest rank that there are kernels for."""
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    rank = next((each for each in ranks if each >= adapter.rank), adapter.rank)  # one too large is vLLM's to refuse
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def load_adapter(llm: Any, adapter: Adapter | None) -> Any:
    """What each response is to be asked for with: None without an adapter."""
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    request = LoRARequest(Path(adapter.name).name, 1, str(adapter.folder))
    if not llm.llm_engine.add_lora(request):
        raise ValueError(f"it did not take the adapter {adapter.name}.")
    return request
