"""OpenRLHF: `vllm_kl` and `ppo_kl`."""

from mismatch_cli.frameworks.dialects._line import ENGINE_GAP, UPDATE, Line

WHEN = "vllm_kl needs --algo.advantage.is_correction_enable and the ppo loss."
_LOSS = "openrlhf/models/loss.py"

LINES = (
    Line("vllm_kl", ENGINE_GAP, "E (−d)", _LOSS, metric="k1", word="KL"),
    Line("ppo_kl", UPDATE, "E (−d)", _LOSS, metric="k1", word="KL",
         note="change by the update, not the engine gap"),
)  # fmt: skip
