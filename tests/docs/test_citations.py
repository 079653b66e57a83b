"""Citations of the DPPO paper: every number is one of its third version, and has there what it
is cited for.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mismatch_cli import DPPO
from mismatch_cli.metrics.gap_table import METRICS, VOLATILITY
from mismatch_cli.metrics.update_table import CLIPPING, TRAINING
from mismatch_cli.rules.algorithms.table import TABLE
from tests.paths import DOCS, ROOT

TEXTS = sorted(
    path
    for folder in ("mismatch_cli", "docs", "tests", "lab", "README.md")
    for path in ([ROOT / folder] if folder.endswith(".md") else (ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".toml") and path != Path(__file__)
)

# What arXiv 2602.04879v3 has under each number that is cited.
V3 = {
    "eq. 5": "surrogate L′",
    "eq. 6": "error term Δ",
    "eq. 7": "quadratic bound by the largest TV",
    "eq. 8": "linear bound by the summed TV",
    "eq. 11": "TV = E |r − 1| / 2",
    "eq. 12": "the DPPO objective and its mask",
    "eq. 13": "binary TV",
    "eq. 14": "binary KL",
    "eq. 15": "top-K TV",
    "eq. 16": "top-K KL",
    "eq. 23": "one gradient for all algorithms, min(r, C)",
    "section 4.1": "PPO and the advantage R − mean R",
    "section 5": "the sanity test",
    "figure 1": "the masks of PPO and DPPO",
    "figure 2": "ratio and TV against μ",
    "figure 3": "training curves: reward, AIME, mean and extremes of π − μ",
    "figure 4": "DPPO-KL against its decoupled form",
    "figure 5": "minimal masks and bad updates",
    "figure 6": "α: reward, μ and entropy of clipped tokens",
    "figure 7": "relaxation by direction: reward, policy entropy",
    "figure 8": "a mixture of experts without and with router replay: AIME24 and AIME25",
    "figure 9": "a thinking mixture of experts, and a dense model",
    "figure 10": "binary against top-K divergences",
    "figure 12": "the mass of the top 20, 99.4 % at first and 99.9 % after 100 steps",
    **dict.fromkeys(
        (f"figure {n}" for n in range(13, 19)), "six panels: reward, AIME, length, entropy, |π − μ|"
    ),
    "figure 19": "final numbers by δ: TV 0.1 to 0.2, KL 0.05 to 0.15",
    "figure 20": "other families of models, other problems",
    "App. B.1": "a partition's TV is a lower bound",
    "App. B.3": "the linear bound, and the composite one: the higher of both",
    "App. C": "the sanity test's settings",
    "App. C.1": "gradients, masks, ε, δ and C of the sanity test",
    "App. D": "the most frequently clipped tokens",
    "App. E": "settings of the scaling runs: C = 5, δ = 0.2",
    "App. F.2": "mean |μ − π| at equal weights",
    "App. F.3": "top-K divergences with K = 20, δ of TV 0.2 and of KL 0.05",
}
_KINDS = (
    ("eq. ", r"\b[Ee]q(?:uations?|s?\.) (\d+(?:(?:, | to | and |–)\d+)*)"),
    ("figure ", r"\b[Ff]ig(?:ures?|s?\.) (\d+(?:(?:, | to | and |–)\d+)*)"),
    ("App. ", r"\b[Aa]pp(?:endix|\.) ([A-Z])\b(?!\.\d)"),
    ("App. ", r"\b([A-G]\.\d)\b"),
    ("section ", r"\b[Ss]ections? (\d(?:\.\d)?)"),
)
_NAMED = re.compile(r"DPPO|2602\.04879")
_OTHERS = re.compile(
    r"1707\.06347|2507\.18071|2512\.01374|1912\.09729|GSPO|PPO, arXiv|FP16|2510\.26788"
)


def cited(text: str) -> set[str]:
    """The numbers in a clause, as the keys of `V3`."""
    cited_numbers = set()
    for kind, pattern in _KINDS:
        for numbers in re.findall(pattern, text):
            first, *rest = re.split(r", | to | and |–", numbers)
            last = rest[-1] if " to " in numbers or "–" in numbers else None
            if last and last.isdigit():
                cited_numbers |= {f"{kind}{n}" for n in range(int(first), int(last) + 1)}
            else:
                cited_numbers |= {f"{kind}{n}" for n in (first, *rest)}
    return cited_numbers


def clauses(path: Path) -> list[str]:
    """The text from a name of the paper to the next semicolon, cell or line's end but one."""
    text = re.sub(r"\bDPPO\}", "DPPO, arXiv 2602.04879", path.read_text(encoding="utf-8"))
    starts = [match.start() for match in _NAMED.finditer(text)]
    pieces = [
        re.split(r"\||\n\n|\"\"\"|\"\n|\",|\. [A-Z](?!\.)", text[start : start + 160])[0]
        for start in starts
    ]
    return [_OTHERS.split(piece)[0] for piece in pieces]


def test_every_number_is_one_of_the_third_version() -> None:
    places: dict[str, set[str]] = {}
    for path in TEXTS:
        for clause in clauses(path):
            for key in cited(clause) - set(V3):
                places.setdefault(key, set()).add(f"{path.relative_to(ROOT)}: {clause[:80]!r}")
    # In the sentence that says what other versions number
    places.pop("eq. 9", None), places.pop("eq. 10", None)
    assert not places
    # It reads them
    assert sum(len(cited(clause)) for path in TEXTS for clause in clauses(path)) > 100


WORDS = {
    metric.key: metric
    for table in (METRICS, VOLATILITY, CLIPPING, TRAINING)
    for metric in table.values()
}
WHERE = {
    "surrogate": "eq. 5", "correction": "eq. 6", "quadratic_bound": "eq. 7",
    "linear_bound": "eq. 8",
    "tv_sum": "eq. 11", "blocked": "eq. 12", "masked": "eq. 23", "capped": "eq. 23",
    "kl_binary_mean": "eq. 14",
    "tv_topk_mean": "eq. 15", "kl_topk_mean": "eq. 16", "tv_binary_mean": "App. F.2",
    "tv_signed_max": "figure 3",
    "ratio_sd": "figure 2", "tv_topk_sd": "figure 2", "bad": "figure 5", "mu_blocked": "figure 6",
    "entropy_blocked": "figure 6", "entropy_mean": "figure 7", "entropy": "figure 7",
    "blocked_tokens": "App. D",
    "low": "App. B.1", "abs_dp_first": "figure 3",
}  # fmt: skip


@pytest.mark.parametrize("key", WHERE)
def test_a_metric_cites_the_place_that_has_it(key: str) -> None:
    assert DPPO in WORDS[key].source and cited(WORDS[key].source) == {WHERE[key]}


ROWS = {
    "pg-is": {"App. C.1"}, "minirl-tis": {"App. C.1"}, "grpo-clip-higher": {"App. C.1"},
    "dppo-binary-tv": {"eq. 13"}, "dppo-binary-kl": {"eq. 14"},
    "dppo-binary-kl-recompute": {"figure 4"},
    "dppo-topk-tv": {"App. F.3", "App. E"}, "dppo-topk-kl": {"App. F.3", "App. E"},
    "mask-0.8": {"figure 5"},
    "relax-both": {"figure 6", "figure 7"}, "relax-high": {"figure 7"},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_cites_the_place_that_has_it(name: str) -> None:
    assert DPPO in TABLE[name].source and cited(TABLE[name].source) == ROWS[name]


def test_the_version_is_said_once_in_the_code_and_once_in_the_guide() -> None:
    """What prints it takes it from there; elsewhere the paper is named without a version."""
    code = [path for path in TEXTS if path.suffix == ".py" and "mismatch_cli" in path.parts]
    said = [path.name for path in code if "2602.04879v" in path.read_text(encoding="utf-8")]
    assert said == ["__init__.py"]
    guide = (DOCS / "formulas.md").read_text(encoding="utf-8")
    assert guide.count("third version") == 1


def test_the_reader_of_citations_reads() -> None:
    assert cited("eq. 13 to 15, figures 6 and 7, App. C.1, section 4.1; Fig. 2, appendix D") == {
        "eq. 13",
        "eq. 14",
        "eq. 15",
        "figure 6",
        "figure 7",
        "App. C.1",
        "section 4.1",
        "figure 2",
        "App. D",
    }
