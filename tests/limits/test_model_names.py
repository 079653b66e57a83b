"""What names of models say: names of the hub, with those that mislead."""

from __future__ import annotations

import pytest

from mismatch_cli.limits.manifest_sides import family
from mismatch_cli.limits.model_names import is_kind, named_model

DENSE = {
    "Qwen/Qwen3-0.6B": "0.6b",
    "Qwen/Qwen3-4B-Instruct-2507": "4b",
    "Qwen/Qwen3-1.7B-FP8": "1.7b",
    "Qwen/Qwen3-VL-8B-Thinking": "8b",
    "Qwen/Qwen3.5-27B": "27b",
    "Qwen/Qwen2.5-7B-Instruct-1M": "7b",
    "Qwen/Qwen2.5-Math-1.5B": "1.5b",
    "Qwen/Qwen2.5-Coder-32B-Instruct-AWQ": "32b",
    "Qwen/Qwen1.5-110B-Chat": "110b",
    "Qwen/QwQ-32B": "32b",
    "unsloth/Qwen3-14B-unsloth-bnb-4bit": "14b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "7b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "70b",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "8b",
    "deepseek-ai/deepseek-math-7b-rl": "7b",
    "deepseek-ai/DeepSeek-Prover-V2-7B": "7b",
    "moonshotai/Kimi-Dev-72B": "72b",
    "MiniMaxAI/Llama-3.1-8B": "8b",
    "meta-llama/Llama-2-7b-hf": "7b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "8b",
    "meta-llama/Llama-3.1-405B": "405b",
    "meta-llama/Llama-3.2-1B": "1b",
    "NousResearch/Hermes-3-Llama-3.1-8B": "8b",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": "49b",
    "nvidia/Nemotron-4-340B-Instruct": "340b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "1.1b",
    "mistralai/Mistral-7B-v0.1": "7b",
    "mistralai/Mistral-Small-24B": "24b",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "24b",
    "mistralai/Mistral-Nemo-Instruct-2407": "",
    "google/gemma-2b": "2b",
    "google/gemma-2-9b-it": "9b",
    "google/gemma-3-27b-it": "27b",
    "microsoft/phi-4": "",
    "microsoft/Phi-3-mini-4k-instruct": "",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "135m",
    "HuggingFaceTB/SmolLM3-3B": "3b",
    "allenai/OLMo-2-1124-7B": "7b",
    "allenai/Olmo-3-32B-Think": "32b",
    "THUDM/glm-4-9b": "9b",
    "THUDM/GLM-4-32B-0414": "32b",
    "zai-org/GLM-4.1V-9B-Thinking": "9b",
    "zai-org/GLM-4.6V-Flash": "",
    "THUDM/chatglm-6b": "6b",
    "ibm-granite/granite-3.3-8b-instruct": "8b",
    "ibm-granite/granite-4.0-h-micro": "",
    "EleutherAI/pythia-160m": "160m",
    "openai-community/gpt2": "",
}
EXPERTS = {
    "Qwen/Qwen3-30B-A3B": "30b",
    "Qwen/Qwen3-30B": "30b",
    "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8": "235b",
    "Qwen/Qwen3.5-35B-A3B": "35b",
    "Qwen/Qwen1.5-MoE-A2.7B": "",
    "Qwen/Qwen2-57B-A14B": "57b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "80b",
    "Qwen/Qwen3-Coder-Next": "",
    "deepseek-ai/DeepSeek-V2-Lite": "",
    "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct": "",
    "deepseek-ai/DeepSeek-V3.1": "",
    "deepseek-ai/DeepSeek-V4-Flash": "",
    "deepseek-ai/DeepSeek-R1": "",
    "deepseek-ai/DeepSeek-R1-0528": "",
    "nvidia/DeepSeek-R1-FP4": "",
    "deepseek-ai/deepseek-moe-16b-base": "16b",
    "mistralai/Mixtral-8x7B-v0.1": "8x7b",
    "mistralai/Mistral-Large-3-675B-Instruct-2512": "675b",
    "NousResearch/Nous-Hermes-2-Mixtral-8x7B-DPO": "8x7b",
    "openai/gpt-oss-20b": "20b",
    "unsloth/gpt-oss-120b-BF16": "120b",
    "moonshotai/Moonlight-16B-A3B": "16b",
    "moonshotai/Kimi-K2-Instruct-0905": "",
    "moonshotai/Kimi-VL-A3B-Thinking": "",
    "zai-org/GLM-4.5-Air": "",
    "zai-org/GLM-4.6": "",
    "zai-org/GLM-5": "",
    "MiniMaxAI/MiniMax-M1-80k": "",
    "MiniMaxAI/MiniMax-M2": "",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "17b",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": "17b",
    "allenai/OLMoE-1B-7B-0924": "7b",
    "microsoft/Phi-3.5-MoE-instruct": "",
    "microsoft/Phi-mini-MoE-instruct": "",
    "ibm-granite/granite-3.1-3b-a800m-instruct": "3b",
    "ibm-granite/granite-4.0-h-tiny": "",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "30b",
    "xai-org/grok-2": "",
    "tencent/Hunyuan-A13B-Instruct": "",
    "inclusionAI/Ring-1T": "1t",
    "baidu/ERNIE-4.5-21B-A3B-PT": "21b",
    "/models/Qwen3-30B-A3B/": "30b",
    "https://huggingface.co/openai/gpt-oss-20b": "20b",
}
UNKNOWN = (
    "nvidia/Nemotron-H-8B",
    "ai21labs/AI21-Jamba-Reasoning-3B",
    "my-org/my-model",
    "mixtral/my-model",  # an owner's name says nothing
    "my-org/Moebius-7B",
    "my-org/nemo-en",
    "my-org/delphi-3",
    "Qwen/Qwen3-Max",
    "community/DeepSeek-R1-Medical-COT",
    "community/Qwen3-4B-gpt-oss-120b-reasoning",
    "community/Qwen3-8B-from-Qwen3-235B-A22B-distill",
    "run/step-300",
    "./checkpoint-500",
    "7b",
    "",
)


@pytest.mark.parametrize(("name", "size"), DENSE.items())
def test_models_without_experts(name, size):
    assert named_model(name) == ("dense", size)


@pytest.mark.parametrize(("name", "size"), EXPERTS.items())
def test_models_with_experts(name, size):
    assert named_model(name) == ("moe", size)


@pytest.mark.parametrize("name", UNKNOWN)
def test_names_of_which_nothing_is_known(name):
    assert (named_model(name).family, named_model(name).kind) == ("", "")


@pytest.mark.parametrize("name", ["dense", "moe", "dense-7b", "MoE-30B", "Moe", "dense_0.6B"])
def test_a_kind_is_typed_as_one(name):
    expected = "dense" if name.lower().startswith("dense") else "moe"
    assert is_kind(name) and named_model(name).family == expected
    assert family({"rollout": {"architecture": name}}) == expected


@pytest.mark.parametrize("name", ["dense-org/Qwen3-30B-A3B", "moebius-7b", "densenet", "a-moe"])
def test_a_name_that_begins_like_a_kind_is_not_one(name):
    assert not is_kind(name)


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, *UNKNOWN])
def test_a_kind_in_a_manifest_has_the_family_of_the_name(name):
    assert family({"rollout": {"architecture": named_model(name).kind}}) == named_model(name).family


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen3ForCausalLM", "dense"),
        ("KimiAudioForConditionalGeneration", "dense"),
        ("GraniteMoeHybridForCausalLM", "moe"),
        ("PhiMoEForCausalLM", "moe"),
        ("DeepseekV32ForCausalLM", "moe"),
        ("Qwen3NextForCausalLM", "moe"),
        ("Llama4ForConditionalGeneration", "moe"),
        ("MiniMaxText01ForCausalLM", "moe"),
        ("Kimi_K25ForConditionalGeneration", "moe"),
        ("Step3VLForConditionalGeneration", "moe"),
        ("Grok1ForCausalLM", "moe"),
        ("ArcticForCausalLM", "moe"),
        ("LongcatFlashForCausalLM", "moe"),
        ("DbrxForCausalLM", "moe"),
        ("Dots1ForCausalLM", "moe"),
    ],
)
def test_names_of_architectures_are_read_by_the_same_words(architecture, expected):
    assert family({"trainer": {"architecture": architecture}}) == expected
