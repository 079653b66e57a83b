"""SkyRL: `trainer.add_callback(Recording("recorded"))`, or `RayPPOTrainer(…,
callbacks=[Recording("recorded")])`.
"""

from typing import Any

from skyrl.train.utils.callbacks import TrainingCallback

from mismatch_cli.frameworks.recording._responses import copy_to_host
from mismatch_cli.frameworks.recording.recorder import Recorder, never_raises

_FIELDS = {
    "logp_rollout": "rollout_logprobs",
    "logp_trainer": "action_log_probs",
    "advantage": "advantages",
    "loss_mask": "loss_mask",
}


class Recording(TrainingCallback):
    """Records each trained batch, with the engine's log μ and log π from the pass before the
    update.
    """

    def __init__(self, folder: str, every: int = 1) -> None:
        self.recorder: Recorder | None = None
        self._folder = folder
        self._every = every

    @never_raises
    def on_step_end(self, trainer: Any, callback_input: Any, _: Any) -> None:
        step = callback_input.global_step
        if self.recorder is None:
            self.recorder = Recorder(
                self._folder,
                self._every,
                manifest=lambda: run_facts(trainer.cfg),
                tokenizer=getattr(trainer, "tokenizer", None),
                resume=step > 1,  # steps count from 1
            )
        self.recorder.add_padded(step=step, **columns(callback_input.batch))

    def on_train_end(self, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.close()


def run_facts(cfg: Any) -> dict[str, Any]:
    """The run's facts from SkyRL's configuration."""
    model = cfg.trainer.policy.model.path
    return {
        "rollout": {"model": model},
        "trainer": {"name": "SkyRL", "model": model},
        "sampling": {"temperature": cfg.generator.sampling_params.temperature},
    }


def columns(batch: Any) -> dict[str, Any]:
    """A SkyRL batch for `add_padded`: everything is left-padded, and response columns to the
    responses' width.
    """
    # The last rows fill the batch up with copies of a response.
    metadata = getattr(batch, "metadata", None) or {}
    real = len(batch["sequences"]) - metadata.get("pad_size", 0)
    ids_ST = copy_to_host(batch["sequences"][:real])
    prompt_ST = copy_to_host(batch["attention_mask"][:real])
    response_mask = copy_to_host(batch["response_mask"][:real])
    # The attention mask covers the whole sequence, at whose end the response is.
    width = ids_ST.shape[1] - response_mask.shape[1]
    prompt_ST[:, width:] *= response_mask == 0
    matrices = {
        "prompt_ids": ids_ST,
        "prompt_mask": prompt_ST,
        "response_ids": ids_ST[:, width:],
        "response_mask": response_mask,
    }
    for column, theirs in _FIELDS.items():
        if batch.get(theirs) is not None:
            matrices[column] = batch[theirs][:real]
    return matrices
