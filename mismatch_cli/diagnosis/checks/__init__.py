"""The checks, one per file: NAME, STAGE, texts for reports, and `check(evidence) -> Finding`.

`diagnose` weighs them against each other on equal terms, so that a check follows these rules.

It does not say how much it explains. `left_N` has log π − log μ of each token that counts
(`evidence.sample.index_N`) with the fault really undone, NaN where that is impossible;
`diagnosis/diagnose.py` computes the share of Σ|d| that this removes. Parameters are fitted on
prompts (or, for a number per response, on tokens of it) other than those whose gap they remove, or
noise is explained too.

It has found something only if its own shape shows: a slope that is the same in every stratum, a
position, only one side. That undoing the fault removes some of the gap is not enough.

Stages 1 and 2 remove tokens: those that `left_N` makes NaN, and those of `spoiled_T(evidence)`.
Causes (3 to 5) compete: the one that explains most is undone, and the others must be found again in
what is left. Less than a tenth of the gap is not a cause, nor is less than half if the rest is
larger than expected (`evidence.expected`). Stage 8 is the gap that nothing explains.

    EXACT = True           counts at once, whatever it explains: a fact, such as stored precision
    NEEDS_A_GAP = False    also runs without a gap
    ANY_SHARE = True       is a cause however little it explains
    OF_SHAPE = True        is not tested where few tokens have a gap: `rare_gaps`
    ALONE = True           counts only if nothing else is found
    CLEARS = (…)           settings that are not suspects if it finds nothing

`untested(NAME, reason, needs)` says what to type in `needs` (`--trainer-model MODEL`); if a gap
remains unexplained, these are the suspects. `evidence.model` is the trainer's model if it was
named: `evidence.model.logp_T(hypothesis)` is log π of the sample's tokens, NaN where not scored,
under a `Hypothesis` of `diagnosis/model.py`. `evidence.family` is `moe`, `dense` or empty.
"""
