"""Positions whose scale depends on the length: LongRoPE and dynamic NTK encode a token differently
in longer batches.

transformers scales a whole micro-batch by its longest sequence, and mixes keys of different scales
while it generates; vLLM scales everything by its context. Within the context of a model's first
training all agree.
"""

from collections.abc import Mapping
from typing import Any

_FACT = "positions_rescaled_above"


def first_context(config: Any) -> int | None:
    """The longest sequence whose positions all programs encode alike; None if the scale never
    changes.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    # A model may have one set of parameters, or one for each kind of layer.
    if not all(isinstance(value, dict) for value in ropes.values()):
        ropes = {"": ropes}
    lengths = []
    for rope in ropes.values():
        # LongRoPE and dynamic NTK scale positions by the longest sequence of a batch.
        # Beyond the context of the first training, log π of a token depends on its neighbours.
        if rope.get("rope_type") == "longrope":
            own_length = rope.get("original_max_position_embeddings")
            lengths.append(own_length or getattr(text, "original_max_position_embeddings", None))
        elif rope.get("rope_type") == "dynamic":
            lengths.append(text.max_position_embeddings)
    return min(map(int, filter(None, lengths)), default=None)


def positions_facts(config: Any) -> dict[str, int]:
    """What a manifest records: the length up to which positions do not depend on it; empty if
    they never do.
    """
    length = first_context(config)
    return {} if length is None else {_FACT: length}


def rescaling_warning(rollout: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """One sentence if the engine's context is so long that positions depend on the length; else
    empty.
    """
    length = trainer.get(_FACT)
    context = rollout.get("max_model_len")
    if not (length and context and context > length):
        return ""
    flag = f"--engine-arg max_model_len={length} (train: max_context_tokens = {length})"
    return (
        f"{trainer['model']} scales its positions differently in sequences above {length} "
        f"tokens, and the engine's context is {context}: the trainer's log-probabilities then "
        "depend on the longest sequence of a micro-batch, and differ from the engine's. Use "
        f"{flag}."
    )
