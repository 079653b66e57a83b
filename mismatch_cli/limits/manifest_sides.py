"""What a manifest says of each side: its precision, its temperature, and whether it has experts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_cli.limits.model_names import EXPERTS, Family

_SIDES = ("rollout", "trainer", "recomputed")
_DTYPE_KEYS = ("dtype", "kv_cache_dtype", "quantization")
_EITHER_FAMILY = re.compile("nemotronh|jamba", re.IGNORECASE)  # with experts and without
# As a person states them, and those that are the type of all weights
DTYPES = ("bf16", "fp16", "fp32", "fp8", "int8", "fp4", "bfloat16", "float16", "float32")
_WIDE = ("bfloat16", "float16", "float32")
_FULL_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
# Quantisations to 4 bits whose names do not say fp4; GPTQ and bitsandbytes have 8 bits, too, rarely
_FOUR_BITS = re.compile("(int|nf|w)4|4_?bit|awq|gptq|bitsandbytes")
_COARSEST_FIRST = ("fp4", "fp8", "int8", "bf16", "fp16", "fp32")
_WORDS = {"fp32": "float32", "fp16": "float16", "bf16": "bf16", "": "a precision not on record"}
_WORDS_OF_QUANTIZED = {"fp4": "a 4-bit side", "fp8": "an fp8 side", "int8": "an int8 side"}


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
    full_name = _FULL_NAMES.get(dtype or "", dtype)
    if not full_name or full_name in _WIDE:
        return {"dtype": full_name}
    return {"quantization": full_name}


def sides_of_gap(about: Mapping[str, Any]) -> tuple[Numerics, Numerics]:
    """The engine, and the trainer at the weights that sampled if there is one, else as it is."""
    rollout = about.get("rollout") or {}
    trainer = trainer_of(about)
    sampling = (about.get("config") or {}).get("sampling") or {}
    sampled_at = _temperature(sampling, 1.0)
    engine_temperature = sampled_at
    # In a raw mode the engine reports log-probabilities from before its sampler, which is what
    # applies the temperature.
    if str(rollout.get("logprobs_mode", "")).startswith("raw"):
        engine_temperature = 1.0
    return (
        _numerics(rollout, engine_temperature),
        _numerics(trainer, _temperature(trainer, sampled_at)),
    )


def trainer_of(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a manifest says of the trainer at the weights that sampled, or as it is."""
    trainer: Mapping[str, Any] = about.get("recomputed") or about.get("trainer") or {}
    return trainer


def _temperature(settings: Mapping[str, Any], otherwise: float) -> float:
    value = settings.get("temperature")
    if isinstance(value, int | float) and value > 0:
        return float(value)
    return otherwise


def _numerics(side: Mapping[str, Any], temperature: float) -> Numerics:
    dtype = _short_name(side.get("dtype"))
    return Numerics(dtype if dtype in _WORDS else "", temperature)


def temperatures_of(about: Mapping[str, Any]) -> tuple[float, float]:
    """The temperature of the engine's log-probabilities, and that of the trainer's."""
    engine, trainer = sides_of_gap(about)
    return engine.temperature, trainer.temperature


def precisions_in_words(about: Mapping[str, Any]) -> str:
    """`bf16 against float32`, or `an fp8 side`: the precisions of both sides."""
    coarsest = precision(about)
    if coarsest in _WORDS_OF_QUANTIZED:
        return _WORDS_OF_QUANTIZED[coarsest]
    if not coarsest:
        return _WORDS[""]
    engine, trainer = sides_of_gap(about)
    return f"{_WORDS[engine.dtype]} against {_WORDS[trainer.dtype]}"


def family(about: Mapping[str, Any]) -> Family:
    """`moe` or `dense` from the number of experts or the architecture's name; empty if unknown."""
    experts: list[int] = []
    architectures: list[str] = []
    for side in _recorded_sides(about):
        if isinstance(side.get("num_experts"), int):
            experts.append(side["num_experts"])
        if side.get("architecture"):
            architectures.append(str(side["architecture"]))
    if experts:
        return "moe" if max(experts) > 1 else "dense"
    if any(map(EXPERTS.search, architectures)):
        return "moe"
    if not architectures or any(map(_EITHER_FAMILY.search, architectures)):
        return ""
    return "dense"


def precision(about: Mapping[str, Any]) -> str:
    """The coarsest precision of weights, KV cache or quantisation on either side; empty if
    unknown, as with a quantisation of which nothing is known.
    """
    sides = _recorded_sides(about)
    recorded = " ".join(_short_name(side.get(key)) for side in sides for key in _DTYPE_KEYS)
    if _FOUR_BITS.search(recorded):
        return "fp4"
    # A name may hold more than the precision: `fp8_e4m3`, `nvfp4`.
    for coarsest in _COARSEST_FIRST:
        if coarsest in recorded and (coarsest not in _WORDS or not is_quantised(about)):
            return coarsest
    return ""


def is_quantised(about: Mapping[str, Any]) -> bool:
    """Whether the weights of either side have fewer bits than their dtype says."""
    return any(side.get("quantization") for side in _recorded_sides(about))


def _short_name(dtype: Any) -> str:
    if not dtype:
        return ""
    name = str(dtype).lower()
    return _SHORT_NAMES.get(name, name)


def _recorded_sides(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [about[name] for name in _SIDES if isinstance(about.get(name), Mapping)]
