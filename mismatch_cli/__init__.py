"""Measure the gap between the rollout engine and the trainer of a language model in reinforcement learning."""

__version__ = "0.1.0"

# The third version, of 12 June 2026, which is also that of ICML 2026 (PMLR 306). What other versions number otherwise:
# docs/formulas.md.
DPPO = "DPPO, arXiv 2602.04879v3"
