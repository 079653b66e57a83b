"""The usual hand-written script: sample with vLLM, score with transformers, subtract.

As in public issues and repositories (vllm-project/vllm#18352, open-instruct's scripts/analysis):
vLLM's default settings, the sampled token's log-prob from a dict per token, padded batches through
the model one by one, a log_softmax over full logits in the model's dtype, gather, subtract.
`--corrected` avoids the known traps: log-probs as processed by the sampler, logits divided by the
temperature and converted to float32.
"""

# ruff: noqa: B905, E402, SIM115
import argparse
import json
import os
import sys
from typing import Any

# From here to the companions: needed to start on a CPU
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
for companion in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(companion, None)  # type: ignore[arg-type]

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("problems")
parser.add_argument("--num-prompts", type=int, default=64)
parser.add_argument("--samples-per-prompt", type=int, default=4)
parser.add_argument("--max-tokens", type=int, default=256)
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--top-p", type=float, default=1.0)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--corrected", action="store_true")
args = parser.parse_args()

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

tokenizer = AutoTokenizer.from_pretrained(args.model)
problems = [json.loads(line)["problem"] for line in open(args.problems)][: args.num_prompts]
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": problem}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    for problem in problems
]
mode: dict[str, Any] = {"logprobs_mode": "processed_logprobs"} if args.corrected else {}
llm = LLM(args.model, seed=0, enforce_eager=True, kv_cache_memory_bytes=1 << 30, **mode)
sampling = SamplingParams(
    n=args.samples_per_prompt,
    temperature=args.temperature,
    top_p=args.top_p,
    max_tokens=args.max_tokens,
    logprobs=0,
)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
rows = [
    (
        ids,
        list(sample.token_ids),
        [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs)],
    )
    for ids, output in zip(prompts, outputs)
    for sample in output.outputs
]
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
gaps, differences = [], []
with torch.no_grad():
    for start in range(0, len(rows), args.batch):
        part = rows[start : start + args.batch]
        longest = max(len(prompt) + len(response) for prompt, response, _ in part)
        ids = torch.full((len(part), longest), tokenizer.pad_token_id)
        seen = torch.zeros_like(ids)
        for i, (prompt, response, _) in enumerate(part):
            ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            seen[i, : len(prompt) + len(response)] = 1
        logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        if args.corrected:
            logits = logits.float() / args.temperature
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].float()
        for i, (prompt, response, logp_vllm) in enumerate(part):
            pi = logp[i, len(prompt) - 1 : len(prompt) - 1 + len(response)]
            mu = torch.tensor(logp_vllm)
            gaps.append((pi.exp() - mu.exp()).abs())
            differences.append((pi - mu).abs())
gap, difference = torch.cat(gaps), torch.cat(differences)
print(
    f"tokens {len(gap)}  mean |pi - mu| {gap.mean():.6g}  max {gap.max():.6g}  mean |dlogp| "
    f"{difference.mean():.6g}",
    flush=True,
)
