"""Options of every command that samples with a rollout engine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

PROMPTS, SAMPLING, ENGINE = "Prompts", "Sampling", "Rollout engine"


def option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    """A flag under the title of its panel in `--help`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Model = Annotated[
    str | None, typer.Argument(help="Model folder or hub name; without one, the bundled model.", show_default=False)
]
Prompts = Annotated[
    str | None,
    option(PROMPTS, "--prompts", help="A .jsonl, .json, .parquet or .csv file, or a data set on the hub."),
]
PromptField = Annotated[str | None, option(PROMPTS, "--prompt-field", help="Field that holds the prompt.")]
AnswerField = Annotated[str | None, option(PROMPTS, "--answer-field", help="Field that holds the answer.")]
Split = Annotated[str, option(PROMPTS, "--split", help="Split of a hub data set.")]
Subset = Annotated[str | None, option(PROMPTS, "--subset", help="Configuration of a hub data set.")]
Shuffle = Annotated[bool, option(PROMPTS, "--shuffle", help="Take them in an order shuffled by --seed.")]
PromptTemplate = Annotated[
    str, option(PROMPTS, "--prompt-template", help="How a problem is put: chat, raw, or r1-distill.")
]
Reward = Annotated[
    str | None,
    option(PROMPTS, "--reward", help="A reward of your own, path/to/file.py:function, in place of math-verify."),
]
MaxTokens = Annotated[int, option(SAMPLING, "--max-tokens", help="Longest response.")]
Temperature = Annotated[float, option(SAMPLING, "--temperature", help="Above 0.")]
TopP = Annotated[float, option(SAMPLING, "--top-p", help="Nucleus; 1 = off.")]
TopK = Annotated[int, option(SAMPLING, "--top-k", help="The sampler's top-k; 0 = off.")]
MinP = Annotated[float, option(SAMPLING, "--min-p", help="0 = off.")]
Seed = Annotated[int, option(SAMPLING, "--seed", min=0, max=2**32 - 1, help="Seed of sampling and shuffling.")]
EngineName = Annotated[str, option(ENGINE, "--engine", help="vllm, hf, or server: a vLLM server by its URL.")]
EngineUrl = Annotated[
    str | None, option(ENGINE, "--engine-url", help="The server, such as http://localhost:8000; key: VLLM_API_KEY.")
]
ServedModel = Annotated[str | None, option(ENGINE, "--served-model", help="MODEL's name on the server, if it differs.")]
RolloutDtype = Annotated[str, option(ENGINE, "--rollout-dtype", help="auto, float32, bfloat16 or float16.")]
KvCacheDtype = Annotated[
    str | None, option(ENGINE, "--kv-cache-dtype", help="Such as fp8; a strong source of mismatch.")
]
TensorParallel = Annotated[int | None, option(ENGINE, "--tensor-parallel", min=1, help="GPUs to shard over.")]
Eager = Annotated[
    bool | None, option(ENGINE, "--eager/--compiled", help="Without or with compilation and CUDA graphs.")
]
PrefixCaching = Annotated[
    bool | None, option(ENGINE, "--prefix-caching/--no-prefix-caching", help="Share the prompts' KV cache.")
]
MaxModelLen = Annotated[int | None, option(ENGINE, "--max-model-len", min=2, help="Context of the engine.")]
EngineArg = Annotated[list[str] | None, option(ENGINE, "--engine-arg", help="Any other engine setting, as key=value.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; by default 1 for a small model, else all.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output where it was stopped.")]
