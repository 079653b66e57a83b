"""What kind of token it is, from its text: for the table of blocked tokens."""

from __future__ import annotations

import re
import unicodedata

# Words that open or turn a step of reasoning: the examples in the appendix of arXiv 2602.04879, and their like.
_CONNECTIVE = re.compile(
    "wait|thus|since|so|therefore|hence|however|but|then|next|also|because|instead|first|second|finally|now|if|let|"
    "alternatively|and|or|while|as|for|given|suppose|assume|note|recall|here|this|that|we|when|where"
)
_OPERATORS = frozenset("+-*/=<>^%×÷·±≤≥≠≈√∑∏∫−→|&")
_OPERATOR_COMMANDS = re.compile(r"\\(times|cdot|div|frac|sqrt|sum|prod|int|pm|leq|geq|neq|approx|equiv|to|le|ge)")


def token_class(text: str) -> str:
    """digit, operator, connective (Wait, Thus, Since …), structure (punctuation, spaces, markup), or other."""
    core = text.strip()
    if core and all(unicodedata.category(c) == "Nd" for c in core):
        return "digit"
    if core and (all(c in _OPERATORS for c in core) or _OPERATOR_COMMANDS.fullmatch(core)):
        return "operator"
    if _CONNECTIVE.fullmatch(core.lower()):
        return "connective"
    if not any(c.isalnum() for c in core) or re.fullmatch(r"<[^<>\s]*>|\\[a-z]*", core):
        return "structure"
    return "other"
