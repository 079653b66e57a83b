"""TRL's own scoring as a racer: GRPOTrainer's `_get_per_token_logps_and_entropies`, as its step
pads and calls it.
"""

from __future__ import annotations

from scored import ROOT, Response, options, take_turns

# isort: split
import tempfile

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad


def main() -> None:
    asked = options()
    tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "sample_data/model"))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_generations=8,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": asked.dtype},
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=asked.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "1"}]),
            processing_class=tokenizer,
        )
    fill = tokenizer.pad_token_id

    def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [torch.tensor(row) for row in rows]
        masks = [torch.ones_like(row) for row in tensors]
        return pad(tensors, padding_value=fill, padding_side=side), pad(
            masks, padding_value=0, padding_side=side
        )

    @torch.no_grad()
    def score(responses: list[Response]) -> list[float]:
        prompt_ids, prompt_mask = padded([r.prompt_ids for r in responses], "left")
        response_ids, response_mask = padded([r.response_ids for r in responses], "right")
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt_ids, response_ids], dim=1),
            torch.cat([prompt_mask, response_mask], dim=1),
            response_ids.size(1),
            batch_size=asked.batch,
            compute_entropy=True,
        )
        found: list[float] = logps[response_mask.bool()].tolist()
        return found

    take_turns(score, asked.responses)


if __name__ == "__main__":
    main()
