"""What a model's name says: whether it has experts, and its size.

The name is a kind as people type it (`dense-7b`), a hub's name (`Qwen/Qwen3-30B-A3B`), or the path
of a folder that is called like one. A name of which nothing is known stays unknown.
"""

import re
from typing import Literal, NamedTuple

Family = Literal["dense", "moe", ""]


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_MOE = r"(?-i:MoE|MOE|[Mm]oe(?![a-z]))"  # OLMoE, Qwen3Moe; not Moebius
# Names of models and of their architectures (`GptOssForCausalLM`) that mean experts
EXPERTS = _any(
    _MOE,
    r"mixtral",
    r"mistral-?large-?3",
    r"gpt-?oss",
    r"deepseek(-?(coder|math))?-?v[2-9]",
    r"deepseek-?vl-?v?2",
    r"deepseek-prover-v2-671b",
    r"deepseek-r1(-zero|-0528)?$",  # many others by this name are distilled from it
    r"qwen3-?(coder-?)?next",
    r"qwen3(-[a-z]+)*-(30|235|480)b",
    r"llama-?4(?![b\d])",
    r"kimi[-_]?(k\d|vl|linear)",
    r"(?<![a-z])glm-(4\.5|4\.6(?!v-flash)|4\.[789]|[5-9])",
    r"minimax",
    r"granite-4\.0-(h-)?(tiny|small)",
    r"grok-?(\d|for)",
    r"dbrx",
    r"longcat",
    r"^step-?3(?!\d)",
    r"^(ling|ring)-(lite|mini|flash|plus|1t)",
    r"hunyuan-large",
    r"mimo-?v2",
    r"dots\.?(llm)?1",
    r"arcticfor|snowflake-arctic-(base|instruct)",
)
# Words that mean experts whatever the family
_WORDS_OF_EXPERTS = _any(
    _MOE,
    r"(?<![a-z\d.])a\d+(\.\d+)?[bm](?![a-z\d])",  # A3B, a800m: the active parameters
    r"(?<![a-z\d])\d+x\d+(\.\d+)?b(?![a-z\d])",  # 8x7B
    r"b-\d+e(?![a-z\d])",  # 17B-16E
)
# Families that have models with experts are listed with the sizes of those without
_DENSE = _any(
    r"deepseek-r1-distill-(qwen|llama)",
    r"deepseek-((llm|math|coder)-[\d.]+b|prover-v1\.5|prover-v2-7b)",
    r"qwen[\w.-]*-(0\.[568]|1\.[578]|[1234789]|14|27|32|72|110)b(?![a-z\d])",
    r"(qwq-32|kimi-dev-72)b",
    r"llama-?[123](?!\d)",
    r"llama-(7|13|30|65)b",
    r"(tiny|code)llama",
    r"(open)?mistral-7b",
    r"mistral-nemo",
    r"mistral-small(-[\d.]+)?-(22b|24b|instruct)",
    r"mistral-large-instruct-24",
    r"ministral",
    r"(codestral|pixtral|mathstral)-",
    r"(devstral|magistral)-small",
    r"zephyr-7b",
    r"gemma-(1\.1-)?[27]b",
    r"gemma-?[23]n?(?!\d)",
    r"gemma-4-(31b|e[24]b)",
    r"(?<![a-z])phi-?[1234](?!\d)",
    r"smollm",
    r"(?<![a-z])olmo-?[23]?-[\w.-]*\d+b",
    r"glm-(4|z1)-(9|32)b",
    r"glm-(4\.1v-9b|4\.6v-flash)",
    r"chatglm",
    r"granite-(3\.\d-)?(2|3|7|8|13|20|34)b",
    r"granite-4\.0-(h-)?(micro|1b|350m)",
    r"nemotron-(4|mini)-\d+b",
    r"(?<![a-z])(falcon3?|yi|starcoder2|internlm\d(_5)?|pythia|opt|exaone-[\d.]+)-[\d.]+[bm]",
    r"(?<![a-z])gpt2",
    r"mimo-7b",
    r"seed-oss",
)
# What follows is how the weights are stored: `-AWQ`, `-bnb-4bit`
_STORED_AS = re.compile(
    r"-(fp8|fp4|nvfp4|mxfp4|bf16|awq|gptq|gguf|mlx|bnb|int[48]|[48]bit)(?![a-z]).*", re.IGNORECASE
)
_KIND = re.compile(r"([Dd]ense|DENSE|[Mm]oe|MoE|MOE)(?![a-z])")
_SIZE = re.compile(r"(?<![a-z\d.])(?:\d+x)?(\d+(?:\.\d+)?)([bmt])(?![a-z\d])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


class NamedModel(NamedTuple):
    """What a name says: the family, and the size as written there (`30b`); empty if it does not.

    Of several sizes it is the largest, and never that of the active parameters (A3B).
    """

    family: Family
    size: str

    @property
    def kind(self) -> str:
        """As people type it: `moe-30b`, or `moe` without a size; empty if the family is."""
        if not self.family:
            return ""
        return "-".join(filter(None, self))


def is_kind(name: str) -> bool:
    """Whether a name is `dense` or `moe`, perhaps with a size."""
    return "/" not in name and _KIND.match(name) is not None


def named_model(name: str) -> NamedModel:
    """What is known of a model by its name, without its owner on the hub."""
    own_name = name.rstrip("/").rpartition("/")[2].replace("_", "-")
    if is_kind(name):
        family: Family = "moe" if own_name.lower().startswith("moe") else "dense"
    else:
        family = _family(_STORED_AS.sub("", own_name))
    return NamedModel(family, _size(own_name))


def _family(name: str) -> Family:
    """The family that a name says; empty for a name with families of both kinds, and for a model
    distilled from one with experts.
    """
    says_experts = bool(_WORDS_OF_EXPERTS.search(name))
    has_experts = says_experts or bool(EXPERTS.search(name))
    is_dense = bool(_DENSE.search(name))
    # What a model was distilled from says nothing of its own layers.
    if has_experts and "distil" in name.lower():
        return ""
    if has_experts and (says_experts or not is_dense):
        return "moe"
    if is_dense and not has_experts:
        return "dense"
    return ""


def _size(name: str) -> str:
    """The largest size: `OLMoE-1B-7B` has 7B."""
    sizes = list(_SIZE.finditer(name.lower()))
    if not sizes:
        return ""
    return max(sizes, key=lambda size: float(size[1]) * _UNITS[size[2]])[0]
