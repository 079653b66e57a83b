"""verl V1: `VERL_USE_EXTERNAL_MODULES=mismatch_cli.frameworks.verl.recorder` and
`trainer.v1.trainer_mode=sync_recorded`.
"""

from functools import cached_property
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1 import trainer_base

from mismatch_cli.frameworks.recording.recorder import Recorder, after

_FIELDS = {"prompt_ids": "prompts", "response_ids": "responses", "loss_mask": "loss_mask",
           "reward": "rm_scores",
           "logp_rollout": "rollout_log_probs", "logp_trainer": "old_log_probs",
           "advantage": "advantages"}  # fmt: skip


class Recorded:
    """Any V1 trainer: records a batch once its advantages are known, into `recorded` next to the
    checkpoints.
    """

    @cached_property
    def _recorder(self: Any) -> Recorder:
        folder, sides = (
            f"{self.config.trainer.default_local_dir}/recorded",
            self.config.actor_rollout_ref,
        )
        facts, tokenizer, first = (
            lambda: run_facts(sides),
            getattr(self, "tokenizer", None),
            self.global_steps <= 1,
        )
        # Steps count from 1
        return Recorder(folder, manifest=facts, tokenizer=tokenizer, resume=not first)

    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        return after(super()._compute_advantage, lambda _: self._keep(batch))(batch, metrics)  # type: ignore[misc]

    def _keep(self: Any, batch: Any) -> None:
        bypassed = (self.config.algorithm.get("rollout_correction") or {}).get(
            "bypass_mode"
        ) and "old_log_probs"
        data = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, [*_FIELDS.values()])
        found = {
            ours: data[name].unbind()
            for ours, name in _FIELDS.items()
            if name in data.keys() - {bypassed}
        }
        found["reward"] = [scores.sum() for scores in found["reward"]]
        for tag, *row in zip(batch.tags, *found.values(), strict=True):
            if not tag.get("is_padding"):
                named = dict(zip(found, row, strict=True)) | {
                    "version_rollout": tag.get("min_global_steps")
                }
                self._recorder.add(
                    step=self.global_steps, version_trainer=self.global_steps - 1, **named
                )

    def on_train_end(self: Any) -> None:
        super().on_train_end()  # type: ignore[misc]
        self._recorder.close()  # Ray may end this process without notice


def run_facts(config: Any) -> dict[str, Any]:
    """The run's facts from verl's configuration."""
    rollout, trainer = config.rollout, {"name": "verl", "model": config.model.path}
    engine = {"engine": rollout.name, "model": config.model.path, "dtype": rollout.dtype}
    return {"rollout": engine, "trainer": trainer, "sampling": {"temperature": rollout.temperature}}


for mode, trainer in [*trainer_base.TRAINER_REGISTRY.items()]:
    trainer_base.register_trainer(f"{mode}_recorded")(
        type(f"Recorded{trainer.__name__}", (Recorded, trainer), {})
    )
