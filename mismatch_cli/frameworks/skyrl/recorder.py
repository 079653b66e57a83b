"""SkyRL: `trainer.add_callback(Recording("recorded"))`, or `RayPPOTrainer(…,
callbacks=[Recording("recorded")])`.
"""

from typing import Any

from skyrl.train.utils.callbacks import TrainingCallback

from mismatch_cli.frameworks.recording._responses import copied
from mismatch_cli.frameworks.recording.recorder import Recorder, never_raises


class Recording(TrainingCallback):
    """Records each trained batch, with the engine's log μ and log π from the pass before the
    update.
    """

    def __init__(self, folder: str, every: int = 1) -> None:
        self.recorder: Recorder | None = None
        self._folder, self._every = folder, every

    @never_raises
    def on_step_end(self, trainer: Any, callback_input: Any, _: Any) -> None:
        if self.recorder is None:
            manifest, tokenizer = (
                lambda: run_facts(trainer.cfg),
                getattr(trainer, "tokenizer", None),
            )
            resumed = callback_input.global_step > 1  # steps count from 1
            self.recorder = Recorder(
                self._folder, self._every, manifest=manifest, tokenizer=tokenizer, resume=resumed
            )
        self.recorder.add_padded(step=callback_input.global_step, **columns(callback_input.batch))

    def on_train_end(self, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.close()


def run_facts(cfg: Any) -> dict[str, Any]:
    """The run's facts from SkyRL's configuration."""
    model, sampling = (
        cfg.trainer.policy.model.path,
        {"temperature": cfg.generator.sampling_params.temperature},
    )
    return {
        "rollout": {"model": model},
        "trainer": {"name": "SkyRL", "model": model},
        "sampling": sampling,
    }


def columns(batch: Any) -> dict[str, Any]:
    """A SkyRL batch for `add_padded`: everything is left-padded, and response columns to the
    responses' width.
    """
    real = len(batch["sequences"]) - (getattr(batch, "metadata", None) or {}).get(
        "pad_size", 0
    )  # without padding rows, which copy a response
    ids, prompt, response = (
        copied(batch[name][:real]) for name in ("sequences", "attention_mask", "response_mask")
    )
    prompt[:, (width := ids.shape[1] - response.shape[1]) :] *= response == 0
    names = {
        "logp_rollout": "rollout_logprobs",
        "logp_trainer": "action_log_probs",
        "advantage": "advantages",
    }
    present = {
        ours: name
        for ours, name in (names | {"loss_mask": "loss_mask"}).items()
        if batch.get(name) is not None
    }
    found = {ours: batch[name][:real] for ours, name in present.items()}
    return dict(
        prompt_ids=ids,
        prompt_mask=prompt,
        response_ids=ids[:, width:],
        response_mask=response,
        **found,
    )
