"""OpenRLHF: `record` as Ray's `worker_process_setup_hook`, into the folder `$MISMATCH_RECORD`."""

import os
from itertools import count
from typing import Any

import numpy as np

from mismatch_cli.frameworks.recording._responses import copied
from mismatch_cli.frameworks.recording.recorder import Recorder, after, never_raises


def record() -> None:
    """Record in the process that makes experiences; steps are counted, and a resumed run counts
    on.
    """
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    @never_raises
    def keep(maker: Any, experiences: Any) -> None:
        if not hasattr(maker, "recorder"):
            folder, tokenizer = (
                os.environ.get("MISMATCH_RECORD", "recorded"),
                getattr(maker, "tokenizer", None),
            )
            facts, resumed = (
                {"trainer": {"name": "OpenRLHF"}},
                is_resumed(getattr(maker, "args", None)),
            )
            maker.recorder = Recorder(folder, manifest=facts, tokenizer=tokenizer, resume=resumed)
            maker.steps = count(maker.recorder.next_step)
        step = next(maker.steps)
        for experience in experiences:
            maker.recorder.add_padded(step=step, **columns(experience))

    make = RemoteExperienceMaker.compute_advantages_and_returns
    RemoteExperienceMaker.compute_advantages_and_returns = lambda maker, samples: after(
        make, lambda experiences: keep(maker, experiences)
    )(maker, samples)


def is_resumed(args: Any) -> bool:
    """Whether it loads a checkpoint: `--ckpt.load_enable`, and there is one of the actor, as
    OpenRLHF itself asks; before its flags had sections, `--load_checkpoint`.
    """
    checkpoint = getattr(args, "ckpt", None)
    if checkpoint is None:
        loads, folder = getattr(args, "load_checkpoint", False), getattr(args, "ckpt_path", None)
    else:
        loads, folder = checkpoint.load_enable, checkpoint.path
    return bool(loads and folder and os.path.exists(os.path.join(folder, "_actor")))


def columns(experience: Any) -> dict[str, Any]:
    """An Experience for `add_padded`: its action columns begin with the second token, and masks
    leave out tools.
    """
    ids, real, actions = (
        copied(getattr(experience, name)) for name in ("sequences", "attention_mask", "action_mask")
    )
    first_S, place_T = (actions > 0).argmax(1)[:, None], np.arange(ids.shape[1])
    masks = {
        "prompt_mask": real * (place_T <= first_S),
        "response_mask": (real * (place_T > first_S))[:, 1:],
    }
    names = {
        "logp_rollout": "rollout_log_probs",
        "logp_trainer": "action_log_probs",
        "advantage": "advantages",
    }
    found = {
        ours: getattr(experience, name) for ours, name in (names | {"reward": "rewards"}).items()
    }
    ended = ["length" if cut else "stop" for cut in copied(experience.truncated)]
    return dict(
        prompt_ids=ids,
        response_ids=ids[:, 1:],
        loss_mask=actions,
        finish_reason=ended,
        **masks,
        **found,
    )
