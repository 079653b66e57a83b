"""The paper that is cited by equation, figure and appendix throughout, and the version whose numbers those are."""

# The third version, of 12 June 2026, which is also that of ICML 2026 (PMLR 306). What other versions number otherwise:
# docs/formulas.md.
DPPO = "DPPO, arXiv 2602.04879v3"
