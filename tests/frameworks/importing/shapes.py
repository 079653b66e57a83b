"""Records in shapes that people have, made of responses of the bundled trace: what servers answer,
what other programs save.
"""

from __future__ import annotations

from typing import Any

from tests.frameworks.importing.layouts import Row, column

Record = dict[str, Any]


def whole(row: Row, values: list[Any], filler: float = 0.0) -> list[Any]:
    """Values of the response, after one for each token of the prompt."""
    return [filler] * len(row["prompt_ids"]) + values


def ones(row: Row) -> list[int]:
    return [1] * len(row["response_ids"])


def atropos(rows: list[Row]) -> Record:
    """A `ScoredDataGroup`: whole sequences, labels of −100 and log-probs of 1.0 at the prompt."""
    tokens, masks, logprobs = [], [], []
    for row in rows:
        tokens.append(row["prompt_ids"] + row["response_ids"])
        masks.append(whole(row, row["response_ids"], -100))
        logprobs.append(whole(row, row["logp_rollout"], 1.0))
    return {
        "tokens": tokens,
        "masks": masks,
        "scores": column(rows, "reward"),
        "advantages": None,
        "inference_logprobs": logprobs,
        "messages": None,
        "group_overrides": {},
    }


def sglang(row: Row) -> Record:
    """An answer of `/generate`: a log-prob, an id and a text for each token."""
    before = [[-1.5, token, None] for token in row["prompt_ids"]]
    before[0][0] = None
    pairs = zip(row["logp_rollout"], row["response_ids"], strict=True)
    return {
        "text": "so",
        "output_ids": row["response_ids"],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": len(row["prompt_ids"]),
            "input_token_logprobs": before,
            "output_token_logprobs": [[*pair, None] for pair in pairs],
        },
    }


def vllm_chat(rows: list[Row]) -> Record:
    """A chat completion of vLLM with `return_token_ids`: the choices of one prompt."""
    choices = []
    for number, row in enumerate(rows):
        content = [
            {"token": "so", "logprob": logp, "top_logprobs": [{"logprob": 0.0}]}
            for logp in row["logp_rollout"]
        ]
        choices.append(
            {
                "index": number,
                "token_ids": row["response_ids"],
                "finish_reason": row["finish_reason"],
                "logprobs": {"content": content},
            }
        )
    prompt = rows[0]["prompt_ids"]
    return {"object": "chat.completion", "prompt_token_ids": prompt, "choices": choices}


def harbor(rows: list[Row]) -> Record:
    """The `rollout_details` of a trial: an agent's turns, each with its own prompt."""
    detail = {
        "prompt_token_ids": column(rows, "prompt_ids"),
        "completion_token_ids": column(rows, "response_ids"),
        "logprobs": column(rows, "logp_rollout"),
    }
    return {"trial_name": "a", "agent_result": {"n_input_tokens": 3, "rollout_details": [detail]}}


def verifiers(rows: list[Row]) -> Record:
    """A state with its trajectory: a step for each model call."""
    trajectory = []
    messages = [{"role": "user", "content": "1 + 1?"}]
    for row in rows:
        tokens = {
            "prompt_ids": row["prompt_ids"],
            "prompt_mask": [0] * len(row["prompt_ids"]),
            "completion_ids": row["response_ids"],
            "completion_mask": ones(row),
            "completion_logprobs": row["logp_rollout"],
            "is_truncated": False,
        }
        trajectory.append({"prompt": messages, "tokens": tokens, "reward": None})
    return {"example_id": 0, "reward": 1.0, "trajectory": trajectory}


def tinker(row: Row, *, mask: bool = False) -> Record:
    """A `Datum`: the inputs, and what each position of them predicts."""
    sequence = row["prompt_ids"] + row["response_ids"]
    data = {
        "target_tokens": sequence,
        "logprobs": whole(row, row["logp_rollout"]),
        "advantages": whole(row, [0.5] * len(row["response_ids"])),
    }
    if mask:
        data["mask"] = whole(row, [1.0] * len(row["response_ids"]))
    inputs = {}
    for name, values in data.items():
        inputs[name] = {"data": values[1:], "shape": [len(values) - 1]}
    chunk = {"type": "encoded_text", "tokens": sequence[:-1]}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}


def shifted(row: Row) -> Record:
    """Inputs and targets of a training step, with both sides' log-probs of the targets."""
    sequence = row["prompt_ids"] + row["response_ids"]
    return {
        "input_ids": sequence[:-1],
        "target_ids": sequence[1:],
        "loss_mask": whole(row, ones(row), 0)[1:],
        "inference_logprobs": whole(row, row["logp_rollout"])[1:],
        "trainer_logprobs": whole(row, row["logp_trainer"])[1:],
    }


def pair(row: Row) -> Record:
    """Log-probs of both sides, and nothing else."""
    return {"sampler_logprobs": row["logp_rollout"], "trainer_logprobs": row["logp_trainer"]}


def document(row: Row) -> Record:
    """One record of a fixture: a pair with identities, over several lines."""
    return {
        "run_id": "demo",
        "rollout_engine": {"name": "vllm", "version": "0.6.0"},
        "prompt_id": "prompt-001",
        "rollout_logprobs": row["logp_rollout"],
        "trainer_logprobs": row["logp_trainer"],
        "mask": ones(row),
        "notes": ["synthetic"],
    }


def agent_loop(row: Row) -> Record:
    """A row of an agent loop."""
    return {
        "prompt_ids": row["prompt_ids"],
        "response_ids": row["response_ids"],
        "response_mask": ones(row),
        "response_logprobs": row["logp_rollout"],
        "num_turns": 2,
    }


def parity(row: Row) -> Record:
    """A record of a parity test between two engines."""
    return {
        "prompt_token_ids": row["prompt_ids"],
        "response_token_ids": row["response_ids"],
        "vllm_logprobs": row["logp_rollout"],
        "hf_logprobs": row["logp_trainer"],
    }
