"""open-instruct: `debug/vllm_vs_local_logprob_diff_*` and `debug/vllm_local_reverse_kl`."""

from mismatch_cli.dialects._line import ABS_D, CURRENT, TWICE_WEIGHTED, Line, largest, sample_sd

WHEN = "Always logged, against the policy that is being trained in that minibatch."
_FILE = "open_instruct/grpo_utils.py"
_DIFF = "debug/vllm_vs_local_logprob_diff"

LINES = (
    Line(f"{_DIFF}_mean", CURRENT, "E |d|", _FILE, metric="abs_d_mean", word="gap"),
    Line(f"{_DIFF}_max", CURRENT, "max |d|", _FILE, ABS_D, largest),
    Line(f"{_DIFF}_std", CURRENT, "standard deviation of |d|, ÷ (n − 1)", _FILE, ABS_D, sample_sd),
    Line("debug/vllm_local_reverse_kl", CURRENT, "E μ·(−d)", _FILE, TWICE_WEIGHTED, word="KL",
         note="sampled by μ already, so μ counts twice: no estimate of a KL; versions without that weight show E (−d)"),
)  # fmt: skip
