"""Whether two answers are equal by the rule of oat (`oat/utils/math_grader.py`, read at c1a074c),
which rewards in the scripts of the sanity test (arXiv 2510.26788, which arXiv 2602.04879 follows).

They are equal after either of two normalisations, or by math-verify. What the rule does is oat's,
its false ones included: it ignores single letters that could be units. How it is written is not.

`comparison` is what a child runs.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from os.path import commonprefix

from mismatch_cli.probe.tasks.reward_worker import start_math_verify

# 1. As text, after Hendrycks' MATH: units, signs and the spelling of fractions do not count.
_WORDS = (
    "inch|inches|ft|feet|yard|mile|mm|cm|dm|m|km|metre|meter|mtr|mt|acre|hectare|ohm"
    "|cc|liter|litre|l|gal|gallon|g|gm|kg|lb|unit|deg|degree|percent|number|ratio"
    "|sec|second|min|minute|minw|hr|hour|h|day|month|year|yr|noon|am|pm|mph|kmph|kmh|mp"
    "|sq|square|cube|cubic|Surface|prime|mark|pure|rounds|rise|increase|decrease|more|less"
    "|per|by|gain|loss|profit|excess|rs|rupee|coin|way|east|west"
    "|man|men|woman|women|soldier|monkey|apple|pie|tile|toy"
    "|st|rd|th|ab|bc|are|lt|a|c|d|o|s|t"
)
_PHRASES = "° f|cm 2|cu cm|pi sq m|profit of rs|no change"
# The dot is any character, as in oat: `a +` counts as a unit too.
_WITH_DOTS = "p . m|a . m|sq . m|cu . m|rs .|[a-hqs] ."
_UNIT = re.compile(rf"(?<!\w)(?:{_WITH_DOTS}|{_PHRASES}|{_WORDS})s?(?!\w)")
_ENCLOSED = re.compile(r"^\\text\{(.+?)\}$")
_LAST_TEXT = re.compile(r"\\text\{.*?\}$")
_INTEGER = r"(0|-?[1-9][0-9]*)"
_Table = list[tuple[re.Pattern[str], str]]


def _table(*rows: tuple[str, str]) -> _Table:
    return [(re.compile(pattern), replacement) for pattern, replacement in rows]


_SPELLINGS = _table(
    (r"\n|\\!", ""),
    (r"\\\\", r"\\"),
    (r"\\begin\{array\}\{.*?\}", r"\\begin{pmatrix}"),
    (r"\\end\{array\}", r"\\end{pmatrix}"),
    ("bmatrix", "pmatrix"),
    ("[td]frac", "frac"),
    (r"(\\[nlg]e)q", r"\1"),
    (r"\\left|\\right", ""),
)
_SIGNS = _table(
    (r"\^\{\\circ\}|\^\\circ|\\\$", ""),
    (r"(?s)\\text\{ .*", ""),
    (r"\\%", ""),
    (r"(^|[ {])\.", r"\g<1>0."),
    (r"(?s)^[^=]{0,2}=([^=]*)$", r"\1"),
    (r"\\sqrt([^{])", r"\\sqrt{\1}"),
    (" ", ""),
    (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
    (r"\\frac([^{])(?=\{)", r"\\frac{\1}"),
    (r"^0\.5$", r"\\frac{1}{2}"),
    (f"^{_INTEGER}/{_INTEGER}$", r"\\frac{\1}{\2}"),
)


def _rewritten(answer: str, table: _Table) -> str:
    for pattern, replacement in table:
        answer = pattern.sub(replacement, answer)
    return answer


def _as_text(answer: str) -> str:
    """The answer without units and signs; what would be left empty stays."""
    answer = answer.strip()
    enclosed = _ENCLOSED.search(answer)
    if enclosed:
        answer = enclosed[1].strip()
    answer = _rewritten(answer, _SPELLINGS)
    answer = _LAST_TEXT.sub("", answer).strip() or answer
    return _rewritten(_UNIT.sub("", answer) or answer, _SIGNS)


# 2. As an expression, after OpenAI's PRM800K: LaTeX is read as words, and sympy compares.
_LATEX = re.compile(r"\\[a-zA-Z]+\s*|\\.|.", re.DOTALL)
_MACROS = _table(
    (r"left|right|[bB]igg?[lr]?|displaystyle|limits|overline|underline", ""),
    (r"text(?:bf|rm)?|mathrm|operatorname|!|\|", ""),
    ("[,;: ]|q?quad", " "),
    ("([{}&#_]|sin|cos|tan|log|ln|exp|max|min|lim|gcd|pi)", r"\1"),
    ("infty", "inf"),
    ("cup", "U"),
    ("cap", "∩"),
    ("cdot|times", "*"),
    ("div", "÷"),
    ("pm", "±"),
    ("mp", "∓"),
    ("leq?", "≤"),
    ("geq?", "≥"),
    ("neq?", "≠"),
    ("in", "∈"),
    ("circ", "∘"),
    ("emptyset", "∅"),
    ("angle", "∠"),
    (r"\\", ";"),
)
_CHARACTERS = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
_BEFORE = _table((r"\\[td]frac", r"\\frac"), (r"\\frac", r" \\frac"))
_MEASURES = (
    "(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year"
    "|foot|feet|inch|yard)(?:es)?s? *(?:\\^[0-9]+)?"
)
_MEANING = _table(
    (r"\\?[$%]", ""),
    (" or | and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
    (_MEASURES, ""),
    (r"\^ *\\circ", ""),
    (r"(?s)^\{(.*)\}$", r"\1"),
    (r",\\! *", ""),
)
_SPACING = _table((r"- *", "-"), ("([0-9]) +([0-9])", r"\1+\2"), ("[ {}]", ""))
_THOUSANDS = re.compile(r"([0-9]),([0-9]{3})(?![0-9])")
_TUPLE = re.compile(r"(?s)[()\[\]]([^()\[\]]+)[()\[\]]")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_WORKABLE = re.compile(r"(?:[a-z0-9+\-*/^() ]|_(?!_)|\.(?![a-z_]))*")
_TOWER = re.compile(r"\^[0-9]+\^|\^[0-9][0-9]+|\^\(")
_MOST_LETTERS = 2


def _in_words(latex: str) -> str:
    """LaTeX as plain text: `\\frac{a}{b}` is a/b, a matrix [ a b; c d ].

    A macro that the tables do not list keeps its name: it equals itself alone. An `IndexError` if
    an argument lacks.
    """
    tokens = _LATEX.findall(_rewritten(latex, _BEFORE))[::-1]
    pieces = []
    while tokens:
        pieces.append(_piece(tokens))
    return "".join(pieces).translate(_CHARACTERS).strip()


def _piece(tokens: list[str]) -> str:
    """The text of the next token, with its arguments, or of the next group."""
    token = tokens.pop()
    if len(token) > 2:
        # The blanks after a macro belong to it; a blank by itself is a token of its own.
        token = token.rstrip()
    if token == "{":
        return _group(tokens)
    if token == "\\frac":
        return f"{_piece(tokens)}/{_piece(tokens)}"
    if token == "\\sqrt":
        return f"sqrt({_radicand(tokens)})"
    if token == "\\mbox":
        _piece(tokens)
        return ""
    if token in ("\\begin", "\\end"):
        return _bracket(token, tokens)
    return _symbol(token)


def _group(tokens: list[str]) -> str:
    """The text up to the closing brace, or to the end."""
    pieces = []
    while tokens and tokens[-1] != "}":
        pieces.append(_piece(tokens))
    del tokens[-1:]
    return "".join(pieces)


def _radicand(tokens: list[str]) -> str:
    """The argument of a root; its degree is dropped, as oat does."""
    if tokens[-1] == "[":
        while tokens.pop() != "]":
            pass
    return _piece(tokens)


def _bracket(token: str, tokens: list[str]) -> str:
    kind = _piece(tokens)
    if token == "\\begin" and kind == "array":
        _piece(tokens)
    if "matrix" not in kind and kind != "array":
        return ""
    return "[ " if token == "\\begin" else " ]"


def _symbol(token: str) -> str:
    if token[0] != "\\":
        return " " if token in "&~" else token
    name = token[1:]
    for pattern, replacement in _MACROS:
        macro = pattern.fullmatch(name)
        if macro:
            return macro.expand(replacement)
    if not name.isalpha():
        return token
    case = "CAPITAL" if name[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {case} LETTER {name.upper()}")
    except KeyError:
        return token


def _integer(text: str) -> int | None:
    """The number that a text writes, if it is an integer to within 1e-7: `2.0`, `1,000`, `1e3`."""
    try:
        number = float(text)
        return round(number) if abs(number - round(number)) <= 1e-7 else None
    except (ValueError, OverflowError):
        return None


def _without_thousands(text: str) -> str:
    # A number has several commas, and one substitution sees every second: 1,000,000 needs two.
    while _THOUSANDS.search(text):
        text = _THOUSANDS.sub(r"\1\2", text)
    return text


def _as_expression(answer: str) -> str:
    """The answer as sympy could read it, in lower case."""
    enclosed = _ENCLOSED.search(answer)
    if enclosed:
        answer = enclosed[1]
    answer = _rewritten(answer, _MEANING)
    number = _integer(answer)
    if number is not None:
        answer = str(number)
    if "\\" in answer:
        with contextlib.suppress(IndexError, RecursionError):
            answer = _in_words(answer)
    answer = _rewritten(answer, _SPACING).lower()
    if _integer(_without_thousands(answer)) is None:
        return answer
    return str(int(float(answer.replace(",", ""))))


def _elements(expression: str) -> list[str]:
    """The elements of a tuple or interval, else the whole."""
    expression = _without_thousands(expression)
    brackets = _TUPLE.fullmatch(expression)
    if not brackets:
        return [expression]
    return [element.strip() for element in brackets[1].split(",")]


def _equal_expressions(stated: str, gold: str) -> bool:
    """Equal texts, or tuples with the same brackets and equal elements."""
    if stated == gold or not stated:
        return stated == gold
    stated_elements, gold_elements = _elements(stated), _elements(gold)
    if len(stated_elements) != len(gold_elements):
        return False
    if len(gold_elements) > 1 and (stated[0], stated[-1]) != (gold[0], gold[-1]):
        return False
    return all(map(_equal_elements, stated_elements, gold_elements))


def _equal_elements(stated: str, gold: str) -> bool:
    """Fractions must be written alike, an integer as an integer; sympy compares the rest."""
    if _FRACTION.fullmatch(stated) and _FRACTION.fullmatch(gold):
        return stated == gold
    if (_integer(stated) is None) != (_integer(gold) is None):
        return False
    return _no_difference(f"({gold})-({stated})")


def _no_difference(expression: str) -> bool:
    """Whether sympy simplifies it to 0.

    Its parser evaluates Python. So an expression has no quotes, no attributes, and, as in oat, at
    most two letters beside `sqrt`: no function of so short an alphabet does harm.
    """
    from sympy import simplify
    from sympy.parsing import sympy_parser

    letters = set(filter(str.isalpha, expression.replace("sqrt", "")))
    workable = _WORKABLE.fullmatch(expression) and not _TOWER.search(expression)
    if not workable or len(letters) > _MOST_LETTERS:
        return False
    rules = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )
    try:
        parsed = sympy_parser.parse_expr(expression.replace("^", "**"), transformations=rules)
        return bool(simplify(parsed) == 0)
    except Exception:  # of any kind: it is Python
        return False


# 3. As LaTeX: math-verify compares formulas.
_LONGEST_REPEATED, _MOST_REPEATED = 128, 0.2


def _repeats(text: str) -> bool:
    """Whether a long text repeats itself: the common beginnings of neighbouring suffixes add up to
    a fifth of all.
    """
    if len(text) <= _LONGEST_REPEATED:
        return False
    suffixes = sorted(text[start:] for start in range(len(text)))
    shared = sum(len(commonprefix(pair)) for pair in pairwise(suffixes))  # noqa: RUF071
    return 2 * shared > _MOST_REPEATED * len(text) * (len(text) + 1)


def _formula(answer: str) -> str:
    return answer if "$" in answer else f"${answer}$"


def _verified(stated: str, gold: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if _repeats(stated) or _repeats(gold):
        return False
    parsed = [
        parse(
            _formula(answer),
            (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()),
            fallback_mode="no_fallback",
            extraction_mode=["first_match"],
            parsing_timeout=None,
        )
        for answer in (gold, stated)
    ]
    return bool(verify(*parsed, timeout_seconds=None))


def equal(stated: str, gold: str) -> bool:
    """Whether oat rewards the answer `stated` (the content of a box) where `gold` is right."""
    return (
        _as_text(stated) == _as_text(gold)
        or _equal_expressions(_as_expression(stated), _as_expression(gold))
        or _verified(stated, gold)
    )


def comparison() -> Callable[[list[str]], bool]:
    """`equal` with math-verify loaded: compares a stated answer and the right one."""
    start_math_verify()
    return lambda answers: equal(*answers)
