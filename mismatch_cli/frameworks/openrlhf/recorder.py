"""OpenRLHF: `record` as Ray's `worker_process_setup_hook`, into the folder `$MISMATCH_RECORD`."""

import os
from itertools import count
from typing import Any

import numpy as np

from mismatch_cli.frameworks.recording._responses import copy_to_host
from mismatch_cli.frameworks.recording.recorder import Recorder, after, never_raises


def record() -> None:
    """Record in the process that makes experiences; steps are counted, and a resumed run counts
    on.
    """
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    @never_raises
    def keep(maker: Any, experiences: Any) -> None:
        if not hasattr(maker, "recorder"):
            maker.recorder = Recorder(
                os.environ.get("MISMATCH_RECORD", "recorded"),
                manifest={"trainer": {"name": "OpenRLHF"}},
                tokenizer=getattr(maker, "tokenizer", None),
                resume=is_resumed(getattr(maker, "args", None)),
            )
            maker.steps = count(maker.recorder.next_step)
        step = next(maker.steps)
        for experience in experiences:
            maker.recorder.add_padded(step=step, **columns(experience))

    make = RemoteExperienceMaker.compute_advantages_and_returns

    def make_and_record(maker: Any, samples: Any) -> Any:
        return after(make, lambda experiences: keep(maker, experiences))(maker, samples)

    RemoteExperienceMaker.compute_advantages_and_returns = make_and_record


def is_resumed(args: Any) -> bool:
    """Whether the run loads a checkpoint: `--ckpt.load_enable` is set, and there is one of the
    actor, which OpenRLHF itself tests too; before its flags had sections, `--load_checkpoint`.
    """
    checkpoint = getattr(args, "ckpt", None)
    if checkpoint is None:
        loads = getattr(args, "load_checkpoint", False)
        folder = getattr(args, "ckpt_path", None)
    else:
        loads = checkpoint.load_enable
        folder = checkpoint.path
    return bool(loads and folder and os.path.exists(os.path.join(folder, "_actor")))


def columns(experience: Any) -> dict[str, Any]:
    """An Experience for `add_padded`: its action columns begin with the second token, and masks
    leave out tools.
    """
    ids_ST = copy_to_host(experience.sequences)
    real_ST = copy_to_host(experience.attention_mask)
    action_ST = copy_to_host(experience.action_mask)
    # Action t is the choice of token t + 1, so the place of the first action is the prompt's last
    # token, and a response without its first place is as wide as the action columns.
    # Without an action there is no response: everything is prompt.
    is_action_ST = action_ST > 0
    first_S = np.where(is_action_ST.any(1), is_action_ST.argmax(1), ids_ST.shape[1])
    first_S1 = first_S[:, None]
    place_T = np.arange(ids_ST.shape[1])
    truncated_S = copy_to_host(experience.truncated)
    return {
        "prompt_ids": ids_ST,
        "prompt_mask": real_ST * (place_T <= first_S1),
        "response_ids": ids_ST[:, 1:],
        "response_mask": (real_ST * (place_T > first_S1))[:, 1:],
        "loss_mask": action_ST,
        "finish_reason": ["length" if truncated else "stop" for truncated in truncated_S],
        "logp_rollout": experience.rollout_log_probs,
        "logp_trainer": experience.action_log_probs,
        "advantage": experience.advantages,
        "reward": experience.rewards,
    }
