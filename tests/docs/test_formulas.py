"""docs/formulas.md has every formula that the code computes.

To renew its tables: python -m tests.docs.test_formulas
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from math import erf, exp, pi, sqrt
from types import ModuleType
from typing import Any

import pytest
import torch

from mismatch_cli import DPPO
from mismatch_cli.base import registry
from mismatch_cli.frameworks.importing.padded import kind_of
from mismatch_cli.frameworks.plain.importer import meanings
from mismatch_cli.metrics.gap_table import METRICS, VOLATILITY, Metric
from mismatch_cli.metrics.route_flips import ROUTING
from mismatch_cli.metrics.update_table import CLIPPING, TRAINING
from mismatch_cli.rules import trust_regions, weights
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask
from mismatch_cli.rules.algorithms.table import ALIASES, TABLE, VARIANTS
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from tests.docs.pages import DOCS, is_renewed, renewed
from tests.docs.test_help import the_command

PAGE = DOCS / "formulas.md"
CHECKS = "mismatch_cli.diagnosis.checks"
# Cases on which masks disagree.
_VECTORS = (
    (1e-4, 1e-2),
    (0.99, 0.8),
    (0.8, 0.99),
    (0.99, 0.4),
    (0.1, 0.129),
    (0.5, 0.34),
    (0.95, 0.999),
    (0.02, 0.2),
)
_JUDGES = ("ratio-clip", "binary-tv", "binary-kl", "minimal-negative")


def table(head: str, rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * (len(head.split(" | "))), *lines]) + "\n"


def metrics(rows_by_key: Mapping[str, Metric]) -> str:
    rows = [[f"`{m.key}`", m.label, m.formula, m.unit, m.source] for m in rows_by_key.values()]
    return table("| key | name | formula | unit | source |", rows)


# What the page says once, above its tables.
_SAID_ABOVE = (
    (r"(DPPO[\w-]*), arXiv 2602\.04879(v3)?,?", r"\1"),
    ("^elementary$|arXiv (?=\\d)", ""),
    (r"mean over responses of |mean of (?=R |Σ|\(w)", "E_y "),
    (r"mean over (all )?tokens of (?=[|(])|mean of (?=−Σ|π/μ)", "E "),
    ("number of tokens", "tokens"),
    ("number with", "tokens with"),
    ("−Σ π log π over the vocabulary", "entropy"),
)
_SYMBOLS = {"L′", "Δ", "ξ", "T"}


def short(text: str) -> str:
    for said, shorter in _SAID_ABOVE:
        text = re.sub(said, shorter, text)
    return text


def numbers(rows_by_key: Mapping[str, Metric]) -> str:
    """Metrics of updates, with their names where key and formula do not remind of them."""
    rows = []
    for m in rows_by_key.values():
        formula = short(m.formula)
        named = _stems(m.label) & _stems(m.key.replace("_", " ")) or formula.startswith(m.label)
        named = named or len(_stems(m.label) & _stems(formula)) > 2
        name = f", {m.label}" if not named or set(m.label.split()) & _SYMBOLS else ""
        rows.append([f"`{m.key}`{name}", formula, short(m.source).removeprefix("DPPO ")])
    return table("| number | formula | source (eq., Fig., App.: DPPO) |", rows)


def _stems(text: str) -> set[str]:
    return {word[:4].lower() for word in re.findall(r"[^\W\d_]+", text)}


def of_runs() -> str:
    """The metrics of `TRAINING` without those of `CLIPPING`, which the page says once."""
    again = {m.label for m in CLIPPING.values() if m.key not in ("reward", "ratio")}
    named = [m.key for m in TRAINING.values() if m.label in again or m.key[:8] == "blocked_"]
    own = {key: m for key, m in TRAINING.items() if key not in named}
    same = ", ".join(f"`{key}`" for key in named)
    return f"{numbers(own)}\nAs in the table above, of either sign of A or both, mean over steps: {same}.\n"


def scatter() -> str:
    """The numbers in a bin of μ, by what they are the spread of."""
    quantities: dict[str, list[str]] = {}
    for m in VOLATILITY.values():
        quantity, _, statistic = m.key.rpartition("_")
        quantities.setdefault(quantity, []).append(f"`_{statistic}`")
        assert m.formula.endswith("in the bin of μ") and m.source == f"{DPPO}, Fig. 2"
    (statistics,) = {", ".join(found) for found in quantities.values()}
    return f"{', '.join(f'`{quantity}`' for quantity in quantities)} + {statistics}\n"


def source_of(rule: ModuleType) -> str:
    """The paragraph of its docstring that names its source."""
    paragraphs = (inspect.getdoc(rule) or "").split("\n\nSource: ")
    return short(" ".join(paragraphs[-1].split()).removesuffix(".")) if paragraphs[1:] else ""


_GREEK = {"β": "beta", "τ": "tau", "α": "alpha", "ε": "epsilon", "λ": "lambda"}


def parameters(module: ModuleType, values: Mapping[str, Any]) -> str:
    """`max_kl` 0.05, with its letter where the name does not show it."""
    letters = trust_regions.symbols(module)
    given = []
    for name, value in values.items():
        letter = letters.get(name, "")
        root, _, side = letter.partition("_")
        shown = _GREEK.get(root, root) in name or (side and name.endswith(side))
        number = f"{value:g}" if isinstance(value, float) else str(value)
        given.append(f"{'' if shown else letter} `{name}` {number}".strip())
    return ", ".join(given)


def masks() -> str:
    rows = []
    for name in registry.names(trust_regions.PACKAGE):
        mask = Mask(name)
        formula = mask.formula.removesuffix(f" ({mask.settings})")
        given = parameters(mask.module, mask.parameters)
        rows.append([f"`{name}`", formula, given, source_of(mask.module)])
    return table("| mask | blocks when | thresholds | source |", rows)


def weight_functions() -> str:
    rows = []
    for name in registry.names(weights.PACKAGE):
        module = weights.find(name)
        given = parameters(module, weights.parameters(module))
        formula = (
            str(Factor(TRAINER_ROLLOUT, name))
            if name != "capped-ratio"
            else "max(min(r, C), floor)"
        )
        rows.append([f"`{name}`", formula, given, source_of(module)])
    return table("| weight | formula | parameters | source |", rows)


def algorithms(named: Mapping[str, Algorithm] = TABLE) -> str:
    return table("| algorithm | masks | weight |", [composed(row) for row in named.values()])


def composed(row: Algorithm) -> list[str]:
    """The names of an algorithm, its masks, and its weight with its term."""
    names = [row.name, *(alias for alias, name in ALIASES.items() if name == row.name)]
    blocking = ", ".join(f"`{applied(mask)}`" for mask in row.masks)
    weight = " · ".join(
        str(factor) if factor.function == "capped-ratio" else f"`{applied(factor)}`"
        for factor in row.weight
    )
    if row.term is not None:
        weight = f"{weight or '1'}; term `{applied(row.term)}`"
    return [", ".join(f"`{name}`" for name in names), blocking, weight or "1"]


def applied(rule: Mask | Factor) -> str:
    """A rule as a function of its ratio and thresholds: `ratio-clip(r′, 0.2)`, `icepop(ρ, [0.5,
    5])`; those that differ from the rule's own, where there are several of a kind.
    """
    letters, values = trust_regions.symbols(rule.module), dict(rule.parameters)
    given = [str(rule.ratio)]
    if isinstance(rule, Mask):
        defaults: Mapping[str, Any] = trust_regions.thresholds(rule.module)
        if "band_low" in values:
            given.append(f"[{values.pop('band_low'):g}, {values.pop('band_high'):g}]")
        if rule.settings:
            one = rule.settings.count("=") == 1
            given.append(rule.settings.partition(" = ")[2] if one else rule.settings)
        values = {name: value for name, value in values.items() if name not in letters}
    else:
        defaults = weights.parameters(rule.module)
    given += [
        f"{letters.get(name, name)} = {value}"
        for name, value in values.items()
        if value != defaults[name]
    ]
    return f"{rule.name}({', '.join(given)})"


def vectors() -> str:
    """The divergences of single tokens, and what masks say of them for either sign of A."""
    rows = []
    for mu, now in _VECTORS:
        policies = one_token(mu, now)
        compared = policies.compare(Mask("none").ratio)
        numbers = [compared.ratio_T, compared.difference_T.abs(), compared.binary_kl_T]
        cells = [f"{mu:g}", f"{now:g}", *(f"{x.item():.4g}" for x in numbers)]
        for name in _JUDGES:
            signs = {"A > 0": 1.0, "A < 0": -1.0}
            cells.append(
                ", ".join(
                    sign
                    for sign, a in signs.items()
                    if not Mask(name).decide(policies, torch.tensor([a])).keep_T.item()
                )
            )
        rows.append(cells)
    return table("| μ | π | r | TV | KL, nats | ratio | TV | KL | minimal |", rows)


def one_token(mu: float, now: float) -> Policies:
    logp_rollout_T, logp_trainer_T = (
        torch.tensor([mu]).double().log(),
        torch.tensor([now]).double().log(),
    )
    return Policies(logp_rollout_T, logp_trainer_T, None, torch.tensor([0, 1]))


def rosetta() -> str:
    """d normal with mean 0 and spread s: E|d|, k3 and E exp|d| in closed form."""
    rows = []
    for s, reading in _SPREADS:
        cells = [
            s * sqrt(2 / pi),
            s * s / 2,
            exp(s * s / 2) - 1,
            exp(s * s / 2) * (1 + erf(s / sqrt(2))),
        ]
        rows.append([f"{s:g}", *(f"{x:.3g}" if x < 1 else f"{x:.3f}" for x in cells), reading])
    return table("| s | mean \\|Δlog p\\| | k2 | k3 | mean exp \\|Δlog p\\| | |", rows)


_SPREADS = (
    (0.002, "float32 of a real model"),
    (0.03, "bfloat16, heads in float32"),
    (0.05, "bfloat16, a small model"),
    (0.061, "NeMo-RL investigates above"),
    (0.125, "slime's CI fails above"),
    (0.141, "Tinker calls it a problem above"),
    (0.173, "prime-rl merges no model above"),
)


def findings() -> str:
    """What `diagnose` prints for each check, in the order in which it looks."""
    checks = [registry.load(CHECKS, name, "check") for name in registry.names(CHECKS)]
    rows = [
        [c.TITLE, c.CAUSE, c.CHANGE, c.SOURCE]
        for c in sorted(checks, key=lambda check: (check.STAGE, check.NAME))
    ]
    return table("| finding | likely cause | what to change | seen in |", rows)


def columns() -> str:
    """What `import --schema` prints, for the page of the schema."""
    rows = [
        [f"`{name}`", f"`{kind_of(name)}`".replace("item: ", ""), words]
        for name, words in meanings().items()
    ]
    return table("| column | type | meaning |", rows)


CHOOSING = DOCS / "choosing-a-threshold.md"
NORMAL, KNOBS = DOCS / "normal.md", DOCS / "which-knob.md"
ROUTES, SCHEMA, SUMMARY = (
    DOCS / "json" / f"{name}.md" for name in ("routing", "schema", "summary")
)
PARTS = {
    (PAGE, "volatility"): scatter,
    (PAGE, "masks"): masks,
    (PAGE, "weights"): weight_functions,
    (PAGE, "algorithms"): algorithms,
    (PAGE, "owners"): lambda: algorithms(VARIANTS),
    (PAGE, "clipping"): lambda: numbers(CLIPPING),
    (PAGE, "training"): of_runs,
    (SCHEMA, "columns"): columns,
    (SUMMARY, "metrics"): lambda: metrics(METRICS),
    (ROUTES, "routing"): lambda: metrics(ROUTING),
    (CHOOSING, "vectors"): vectors,
    (NORMAL, "rosetta"): rosetta,
    (KNOBS, "findings"): findings,
}


@pytest.mark.parametrize(("page", "part"), PARTS, ids=lambda one: str(getattr(one, "stem", one)))
def test_the_tables_are_what_the_code_computes(page, part):
    assert is_renewed(page, part, PARTS[page, part]()), (
        "renew it: python -m tests.docs.test_formulas"
    )


def test_the_settings_of_vllm_have_these_names():
    """The third column of the knobs: arguments of the engine, as the installed vLLM has them."""
    from vllm.engine.arg_utils import EngineArgs

    text = KNOBS.read_text(encoding="utf-8").split("## The knobs by name")[1]
    rows = [
        line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and line.count(" | ") >= 3
    ]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row[2])} - {"head_dtype"}
    arguments = {field.name for field in fields(EngineArgs)}
    assert len(named) > 8 and named <= arguments
    given = set(re.findall(r"--engine-arg (\w+)=", text))
    assert given <= arguments
    flags = set(re.findall(r"`(--[a-z0-9-]+)", " ".join(row[1] for row in rows)))
    params = {
        name
        for command in ("probe", "train")
        for p in the_command(command).params
        for name in [*p.opts, *p.secondary_opts]
    }
    assert flags <= params


def test_every_mask_and_weight_names_its_source():
    for package, find in (
        (trust_regions.PACKAGE, trust_regions.find),
        (weights.PACKAGE, weights.find),
    ):
        for name in registry.names(package):
            assert name == "none" or source_of(find(name)), name


def test_every_paper_of_an_algorithm_is_on_the_page():
    """The table has no column for them: most are those of its masks and weights."""
    text = PAGE.read_text(encoding="utf-8")
    for name, row in {**TABLE, **VARIANTS}.items():
        assert all(paper in text for paper in re.findall(r"\d{4}\.\d{5}", row.source)), name


def test_the_vectors_are_those_of_the_paper():
    """Worked by hand: r, TV and KL(q‖p) = q log(q/p) + (1 − q) log((1 − q)/(1 − p)), and the
    four decisions.
    """
    expected = {
        (1e-4, 1e-2): (100, 0.0099, 0.00949), (0.99, 0.8): (0.8081, 0.19, 0.18100),
        (0.8, 0.99): (1.2375, 0.19, 0.42867), (0.95, 0.999): (1.0516, 0.049, 0.14782),
    }  # fmt: skip
    for (mu, now), numbers in expected.items():
        compared = one_token(mu, now).compare(Mask("none").ratio)
        found: list[Any] = [compared.ratio_T, compared.difference_T.abs(), compared.binary_kl_T]
        assert [x.item() for x in found] == pytest.approx(numbers, rel=2e-3)


def test_what_a_gap_is_made_of_is_in_the_formulas():
    formulas = PAGE.read_text(encoding="utf-8")
    for number in (
        "k1",
        "k2",
        "k3",
        "binary",
        "top-K",
        "full",
        "floor",
        "jackknife",
        "advantage",
        "token-mean",
    ):
        assert number in formulas


if __name__ == "__main__":
    for (page, part), make in PARTS.items():
        renewed(page, part, make())
