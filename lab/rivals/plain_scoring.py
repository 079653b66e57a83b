"""A plain script's scoring as a racer: batches as they come, padded, log_softmax over full
logits, gather.
"""

from __future__ import annotations

from scored import Response, options, take_turns

# isort: split
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    asked = options()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=asked.dtype).eval()

    @torch.no_grad()
    def score(responses: list[Response]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(responses), asked.batch):
            part = responses[start : start + asked.batch]
            longest = max(len(r.prompt_ids) + len(r.response_ids) for r in part)
            ids = torch.zeros(len(part), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for i, r in enumerate(part):
                row = torch.tensor(r.prompt_ids + r.response_ids)
                ids[i, : len(row)], mask[i, : len(row)] = row, 1
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            for i, r in enumerate(part):
                first = len(r.prompt_ids) - 1
                found += logp[i, first : first + len(r.response_ids)].tolist()
        return found

    take_turns(score, asked.responses)


if __name__ == "__main__":
    main()
