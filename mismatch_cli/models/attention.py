"""What a model requires of attention, and which implementations in transformers support it.

transformers passes all arguments to each implementation, and one that does not know an argument
drops it: no error, no warning, different numbers. What transformers refuses itself (ALiBi or chunks
with flash attention) is not here.
"""

from collections.abc import Mapping
from typing import Any

# In transformers
USUAL = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
SAFE = "eager"  # each model's own code, which defines the correct result
_SOFTCAP, _SINKS = "attn_logit_softcapping", "sinks"
# A configuration field or a parameter of attention layers, and name parts of the implementations
# that honour it. sdpa drops both without an error, and log π would not be the model's.
HONOURED_BY = {
    _SOFTCAP: (SAFE, "flex", "flash"),
    _SINKS: (
        SAFE,
        "flex",
        "flash_attention_4",
        "vllm-flash-attn3",
        "metal-flash-sdpa",
        "aiter-flash-attn",
    ),
}


def unsupported_features(implementation: str, required: tuple[str, ...]) -> tuple[str, ...]:
    """The required features that an implementation silently drops."""
    dropped = []
    for feature in required:
        if not any(part in implementation for part in HONOURED_BY[feature]):
            dropped.append(feature)
    return tuple(dropped)


def required_features(model: Any) -> tuple[str, ...]:
    """The features of `HONOURED_BY` that a Hugging Face model requires of its attention."""
    features = []
    if getattr(model.config.get_text_config(), _SOFTCAP, None):
        features.append(_SOFTCAP)
    if any(name.endswith(f".{_SINKS}") for name, _ in model.named_parameters()):
        features.append(_SINKS)
    return tuple(features)


def attention_facts(model: Any) -> dict[str, str]:
    """What a manifest records: the features that a model's attention leaves out; empty if none."""
    implementation = model.config._attn_implementation
    dropped = unsupported_features(implementation, required_features(model))
    return {"attention_leaves_out": ", ".join(dropped)} if dropped else {}


def attention_warning(side: Mapping[str, Any]) -> str:
    """One sentence about a side's attention, from its manifest; empty if nothing is wrong."""
    if not side.get("attention_leaves_out"):
        return ""
    if "engine" in side:
        who = "rollout engine"
        implementation = side["attention_backend"]
        setting = "--engine-arg attn_implementation="
    else:
        who = "trainer"
        implementation = side["attn_implementation"]
        setting = "attn = "
    return (
        f"The {who}'s {implementation} attention "
        f"leaves out {side['attention_leaves_out']}, which {side['model']} needs: its "
        f"log-probabilities are not the model's. Use {setting}{SAFE}."
    )
