"""KPop: a limit on the binary KL in both directions, whatever the advantage.

The report does not give φ; prime-rl has 0.1, AReaL's example 2.0; the authors' blog found 0.75 best
for math. They first clamp probabilities to 1e-6 or 1e-8 from 0 and 1; here no bound is needed, and
equal policies have KL 0.

AReaL's float32 code drops every token whose p or q rounds to 1 (within 3e-8, log p above −3e-8),
the most certain ones: 1 − 1e-8 is 1 there, the KL is NaN, and NaN is not at most φ. Here such a
token is kept, as the formula says.

Source: KPop of Ling and Ring 2.6, which give no φ; 0.1 is prime-rl's, 2 AReaL's, 0.75 the blog's.
"""

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.rules.decisions import not_negative, signed
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "binary KL({q}‖{p}) > {max_kl} or binary KL({p}‖{q}) > {max_kl}"
SYMBOLS = {"max_kl": "φ"}
NOT_ONE_SIDED = (
    "It ignores the advantage: a token far from q is dropped even if the update would bring it "
    "back."
)


def trust_region(compared: Compared, advantage_T: Array, *, max_kl: float = 0.1) -> Decision:
    """Block where the larger of the two KLs exceeds max_kl, nats.

    The statistic is this maximum, signed as p − q.
    """
    not_negative(φ=max_kl)
    larger_T = namespace(advantage_T).maximum(compared.binary_kl_T, compared.reverse_binary_kl_T)
    return Decision(larger_T <= max_kl, signed(larger_T, compared.log_ratio_T))
