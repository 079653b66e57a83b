"""Records in shapes that people have, made of responses of the bundled trace: what servers answer,
what other programs save.
"""

from __future__ import annotations

from typing import Any

from tests.frameworks.importing.layouts import Row

Record = dict[str, Any]


def _zeros(row: Row) -> list[float]:
    return [0.0] * len(row["prompt_ids"])


def atropos(rows: list[Row]) -> Record:
    """A `ScoredDataGroup`: whole sequences, labels of −100 and log-probs of 1.0 at the prompt."""
    return {
        "tokens": [row["prompt_ids"] + row["response_ids"] for row in rows],
        "masks": [[-100] * len(row["prompt_ids"]) + row["response_ids"] for row in rows],
        "scores": [row["reward"] for row in rows],
        "advantages": None,
        "inference_logprobs": [
            [1.0] * len(row["prompt_ids"]) + row["logp_rollout"] for row in rows
        ],
        "messages": None,
        "group_overrides": {},
    }


def sglang(row: Row) -> Record:
    """An answer of `/generate`: a log-prob, an id and a text for each token."""
    triples = zip(row["logp_rollout"], row["response_ids"], strict=True)
    before = [[None, row["prompt_ids"][0], None]]
    before += [[-1.5, token, None] for token in row["prompt_ids"][1:]]
    return {
        "text": "so",
        "output_ids": row["response_ids"],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": len(row["prompt_ids"]),
            "input_token_logprobs": before,
            "output_token_logprobs": [[logp, token, None] for logp, token in triples],
        },
    }


def vllm_chat(rows: list[Row]) -> Record:
    """A chat completion of vLLM with `return_token_ids`: the choices of one prompt."""
    return {
        "object": "chat.completion",
        "prompt_token_ids": rows[0]["prompt_ids"],
        "choices": [
            {
                "index": number,
                "token_ids": row["response_ids"],
                "finish_reason": row["finish_reason"],
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logp, "top_logprobs": []}
                        for token, logp in zip(
                            row["response_ids"], row["logp_rollout"], strict=True
                        )
                    ]
                },
            }
            for number, row in enumerate(rows)
        ],
    }


def harbor(rows: list[Row]) -> Record:
    """The `rollout_details` of a trial: an agent's turns, each with its own prompt."""
    detail = {
        "prompt_token_ids": [row["prompt_ids"] for row in rows],
        "completion_token_ids": [row["response_ids"] for row in rows],
        "logprobs": [row["logp_rollout"] for row in rows],
    }
    return {"trial_name": "a", "agent_result": {"n_input_tokens": 3, "rollout_details": [detail]}}


def verifiers(rows: list[Row]) -> Record:
    """A state with its trajectory: a step for each model call."""
    return {
        "example_id": 0,
        "reward": 1.0,
        "trajectory": [
            {
                "prompt": [{"role": "user", "content": "1 + 1?"}],
                "tokens": {
                    "prompt_ids": row["prompt_ids"],
                    "prompt_mask": [0] * len(row["prompt_ids"]),
                    "completion_ids": row["response_ids"],
                    "completion_mask": [1] * len(row["response_ids"]),
                    "completion_logprobs": row["logp_rollout"],
                    "is_truncated": False,
                },
                "reward": None,
            }
            for row in rows
        ],
    }


def tinker(row: Row, *, mask: bool = False) -> Record:
    """A `Datum`: the inputs, and what each position of them predicts."""
    sequence, before = row["prompt_ids"] + row["response_ids"], _zeros(row)[1:]
    data = {
        "target_tokens": sequence[1:],
        "logprobs": before + row["logp_rollout"],
        "advantages": before + [0.5] * len(row["response_ids"]),
    }
    if mask:
        data["mask"] = before + [1.0] * len(row["response_ids"])
    inputs = {name: {"data": values, "shape": [len(values)]} for name, values in data.items()}
    chunk = {"type": "encoded_text", "tokens": sequence[:-1]}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}


def shifted(row: Row) -> Record:
    """Inputs and targets of a training step, with both sides' log-probs of the targets."""
    sequence, before = row["prompt_ids"] + row["response_ids"], _zeros(row)[1:]
    return {
        "input_ids": sequence[:-1],
        "target_ids": sequence[1:],
        "loss_mask": [0] * len(before) + [1] * len(row["response_ids"]),
        "inference_logprobs": before + row["logp_rollout"],
        "trainer_logprobs": before + row["logp_trainer"],
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
        "mask": [1] * len(row["response_ids"]),
        "notes": ["synthetic"],
    }


def agent_loop(row: Row) -> Record:
    """A row of an agent loop."""
    return {
        "prompt_ids": row["prompt_ids"],
        "response_ids": row["response_ids"],
        "response_mask": [1] * len(row["response_ids"]),
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
