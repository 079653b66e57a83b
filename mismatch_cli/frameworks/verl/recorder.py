"""verl V1: `VERL_USE_EXTERNAL_MODULES=mismatch_cli.frameworks.verl.recorder` and
`trainer.v1.trainer_mode=sync_recorded`.
"""

from functools import cached_property
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1 import trainer_base

from mismatch_cli.frameworks.recording.recorder import Recorder, after

_FIELDS = {
    "prompt_ids": "prompts",
    "response_ids": "responses",
    "loss_mask": "loss_mask",
    "reward": "rm_scores",
    "logp_rollout": "rollout_log_probs",
    "logp_trainer": "old_log_probs",
    "advantage": "advantages",
}


class Recorded:
    """Any V1 trainer: records a batch once its advantages are known, into `recorded` next to the
    checkpoints.
    """

    @cached_property
    def _recorder(self: Any) -> Recorder:
        config = self.config.actor_rollout_ref
        return Recorder(
            f"{self.config.trainer.default_local_dir}/recorded",
            manifest=lambda: run_facts(config),
            tokenizer=getattr(self, "tokenizer", None),
            resume=self.global_steps > 1,  # steps count from 1
        )

    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        compute = super()._compute_advantage  # type: ignore[misc]
        return after(compute, lambda _: self._keep(batch))(batch, metrics)

    def _keep(self: Any, batch: Any) -> None:
        data = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, [*_FIELDS.values()])
        # In bypass mode `old_log_probs` are the rollout's own: the trainer's were not computed.
        correction = self.config.algorithm.get("rollout_correction") or {}
        bypassed = {"old_log_probs"} if correction.get("bypass_mode") else set()
        measured = data.keys() - bypassed
        columns = {
            ours: data[theirs].unbind() for ours, theirs in _FIELDS.items() if theirs in measured
        }
        # verl scores tokens; the reward of a response is their sum.
        if "reward" in columns:
            columns["reward"] = [scores.sum() for scores in columns["reward"]]
        for tag, *values in zip(batch.tags, *columns.values(), strict=True):
            if tag.get("is_padding"):
                continue
            self._recorder.add(
                step=self.global_steps,
                version_trainer=self.global_steps - 1,
                **dict(zip(columns, values, strict=True)),
                version_rollout=tag.get("min_global_steps"),
            )

    def on_train_end(self: Any) -> None:
        super().on_train_end()  # type: ignore[misc]
        self._recorder.close()  # Ray may end this process without notice


def run_facts(config: Any) -> dict[str, Any]:
    """The run's facts from verl's configuration."""
    rollout = config.rollout
    model = config.model.path
    return {
        "rollout": {"engine": rollout.name, "model": model, "dtype": rollout.dtype},
        "trainer": {"name": "verl", "model": model},
        "sampling": {"temperature": rollout.temperature},
    }


# The registry grows in this loop, which therefore goes through a copy.
for mode, trainer in [*trainer_base.TRAINER_REGISTRY.items()]:
    recorded_trainer = type(f"Recorded{trainer.__name__}", (Recorded, trainer), {})
    trainer_base.register_trainer(f"{mode}_recorded")(recorded_trainer)
