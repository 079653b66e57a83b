"""What a manifest says of each side: its precision, its temperature, and whether it has experts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_cli.limits.model_names import EXPERTS, Family

_EITHER = re.compile("nemotronh|jamba", re.IGNORECASE)  # architectures with and without experts
_PRECISIONS = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_COARSEST_FIRST = ("fp4", "fp8", "int8", "bf16", "fp16", "fp32")
_SIDES = ("rollout", "trainer", "recomputed")
_DTYPES = ("dtype", "kv_cache_dtype", "quantization")
# As a person states them, and those that are the type of all weights
DTYPES = ("bf16", "fp16", "fp32", "fp8", "int8", "fp4", "bfloat16", "float16", "float32")
_FULL_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WIDE = ("bfloat16", "float16", "float32")
_WORDS = {"fp32": "float32", "fp16": "float16", "bf16": "bf16", "": "a precision not on record"}


@dataclass(frozen=True)
class Numerics:
    """How one side of a gap computes; `dtype` is that of its weights, empty if unknown."""

    dtype: str
    temperature: float

    @property
    def is_16_bits(self) -> bool:
        """Whether its layers compute in 16 bits, as nearly all do if nothing is said."""
        return self.dtype != "fp32"

    @property
    def step_of_bfloat16(self) -> float:
        """The step of its logits, relative to bfloat16: float16 has three bits more."""
        return 2.0**-3 if self.dtype == "fp16" else 1.0


def recorded_dtype(dtype: str | None) -> dict[str, str | None]:
    """One of `DTYPES` as a manifest has it: below 16 bits it counts as quantisation."""
    full = _FULL_NAMES.get(dtype or "", dtype)
    return {"quantization": full} if full and full not in _WIDE else {"dtype": full}


def sides_of_gap(about: Mapping[str, Any]) -> tuple[Numerics, Numerics]:
    """The engine, and the trainer at the weights that sampled if there is one, else as it is."""
    trainer = trainer_of(about)
    sampling = (about.get("config") or {}).get("sampling") or {}
    sampled_at = _temperature(sampling, 1.0)
    rollout = about.get("rollout") or {}
    # The engine's log-probabilities are those before its sampler in this mode
    raw = str(rollout.get("logprobs_mode", "")).startswith("raw")
    return (
        _side(rollout, 1.0 if raw else sampled_at),
        _side(trainer, _temperature(trainer, sampled_at)),
    )


def trainer_of(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a manifest says of the trainer at the weights that sampled, or as it is."""
    trainer: Mapping[str, Any] = about.get("recomputed") or about.get("trainer") or {}
    return trainer


def _temperature(settings: Mapping[str, Any], otherwise: float) -> float:
    value = settings.get("temperature")
    return float(value) if isinstance(value, int | float) and value > 0 else otherwise


def _side(about: Mapping[str, Any], temperature: float) -> Numerics:
    dtype = _short(about.get("dtype"))
    return Numerics(dtype if dtype in _WORDS else "", temperature)


def temperatures_of(about: Mapping[str, Any]) -> tuple[float, float]:
    """That of the engine's log-probabilities, and of the trainer's."""
    engine, trainer = sides_of_gap(about)
    return engine.temperature, trainer.temperature


def precisions_in_words(about: Mapping[str, Any]) -> str:
    """`bf16 against float32`, or `an fp8 side`: the precisions of both sides."""
    coarsest = precision(about)
    if coarsest not in _WORDS:
        return {"fp4": "a 4-bit side", "fp8": "an fp8 side", "int8": "an int8 side"}[coarsest]
    if not coarsest:
        return _WORDS[""]
    first, second = (_WORDS[side.dtype] for side in sides_of_gap(about))
    return f"{first} against {second}"


def family(about: Mapping[str, Any]) -> Family:
    """`moe` or `dense` from the number of experts or the architecture's name; empty if unknown."""
    sides = list(_sides(about))
    experts = [side["num_experts"] for side in sides if isinstance(side.get("num_experts"), int)]
    if experts:
        return "moe" if max(experts) > 1 else "dense"
    names = [str(side["architecture"]) for side in sides if side.get("architecture")]
    if any(EXPERTS.search(name) for name in names):
        return "moe"
    return "dense" if names and not any(_EITHER.search(name) for name in names) else ""


def precision(about: Mapping[str, Any]) -> str:
    """The coarsest precision of weights, KV cache or quantisation on either side; empty if
    unknown.
    """
    names = [_short(side.get(key)) for side in _sides(about) for key in _DTYPES]
    return next((known for known in _COARSEST_FIRST if any(known in name for name in names)), "")


def _short(name: Any) -> str:
    return _PRECISIONS.get(str(name).lower(), str(name).lower()) if name else ""


def _sides(about: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (about[name] for name in _SIDES if isinstance(about.get(name), Mapping))
