"""Pulls the trainer to the other policy, as a term: the gradient of −(β/2) (log r)², which also
acts at A = 0.

Used by DRO (in tinker from μ, in verl from π′) and, over the response, Kimi k1.5 (in ROLL token by
token, from π′); with β = 2 · kl_tau it is the term of prime-rl's
losses and Kimi K2.5.

Source: DRO (tinker from μ, verl from π′); Kimi k1.5, of the response; prime-rl and Kimi K2.5 with β
= 2 · kl_tau.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = "−{beta} log {r}"
SYMBOLS = {"beta": "β"}


def weight(compared: Compared, level: Level, advantage_T: Array, *, beta: float = 0.05) -> Array:
    """−β d, or −β Σd over the response, nats."""
    if not beta >= 0:
        raise UsageError(f"β={beta:g} is out of range: choose a number of at least 0.")
    return -beta * compared.level_log_ratio_T(level)
