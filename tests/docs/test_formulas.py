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
from mismatch_cli.frameworks.plain.importer import meanings
from mismatch_cli.metrics.gap_table import METRICS, VOLATILITY, Metric
from mismatch_cli.metrics.route_flips import ROUTING
from mismatch_cli.metrics.update_table import CLIPPING, TRAINING
from mismatch_cli.rules import trust_regions, weights
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask
from mismatch_cli.rules.algorithms.table import ALIASES, TABLE, VARIANTS
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from mismatch_cli.trace.columns import COLUMNS, Shape
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
_PAPERS = {
    DPPO: "DPPO",
    "Schulman": "Schulman (2020)",
    "FP16 mismatch paper": "Precision-RL",
    "Kong": "Kong (1992)",
    "R3": "arXiv 2510.11370 (R3)",
}
_SHAPES = {
    "a list, one per response token": (Shape.TOKENS,),
    "one per response": (Shape.RESPONSE,),
    "a list of its own length": (Shape.PROMPT, Shape.TOP_K, Shape.LIST),
}
_JUDGES = ("ratio-clip", "binary-tv", "binary-kl", "minimal-negative")


def table(head: str, rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * (len(head.split(" | "))), *lines]) + "\n"


def looked_up(rows_by_key: Mapping[str, Metric]) -> str:
    """Metrics for pages of keys, without units of plain numbers, and without sources other than
    papers: `report --as` has those of frameworks.
    """
    rows = []
    for m in rows_by_key.values():
        unit = "" if m.unit in ("1", "share", "probability") else m.unit
        papers = [short for long, short in _PAPERS.items() if long in m.source]
        place = re.search(r"\b(App|Fig|eq)\.[^;]*", m.source)
        source = f"{' '.join(papers)} {place[0] if place and papers else ''}".strip()
        rows.append([f"`{m.key}`", m.formula, unit, source])
    return table("| key | formula | unit | source |", rows)


def short(source: str) -> str:
    """A source without what the page says once, above its tables."""
    if source == "elementary":
        return ""
    return re.sub(r"arXiv 2602\.04879(v3)?,? ?", "", source).replace("arXiv ", "").strip()


def numbers(rows_by_key: Mapping[str, Metric]) -> str:
    """Metrics of updates."""
    rows = []
    for m in rows_by_key.values():
        rows.append([f"`{m.key}`", m.formula, short(m.source).removeprefix("DPPO, ")])
    return table("| number | formula | source (eq., Fig., App.: DPPO) |", rows)


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
    (statistics,) = {", ".join(names) for names in quantities.values()}
    return f"{', '.join(f'`{quantity}`' for quantity in quantities)} + {statistics}\n"


def source_of(rule: ModuleType) -> str:
    """The paragraph of its docstring that names its source."""
    paragraphs = (inspect.getdoc(rule) or "").split("\n\nSource: ")
    return short(" ".join(paragraphs[-1].split()).removesuffix(".")) if paragraphs[1:] else ""


def parameters(module: ModuleType, values: Mapping[str, Any]) -> str:
    """`δ max_kl 0.05`: each with its letter, if it has one, and its default."""
    letters = trust_regions.symbols(module)
    thresholds = []
    for name, value in values.items():
        number = f"{value:g}" if isinstance(value, float) else str(value)
        thresholds.append(f"{letters.get(name, '')} `{name}` {number}".strip())
    return ", ".join(thresholds)


def masks() -> str:
    rows = []
    for name in registry.names(trust_regions.PACKAGE):
        mask = Mask(name)
        formula = mask.formula.removesuffix(f" ({mask.settings})")
        values = parameters(mask.module, mask.parameters)
        rows.append([f"`{name}`", formula, values, source_of(mask.module)])
    return table("| mask | blocks when | thresholds | source |", rows)


def weight_functions() -> str:
    rows = []
    for name in registry.names(weights.PACKAGE):
        module = weights.find(name)
        values = parameters(module, weights.parameters(module))
        formula = (
            str(Factor(TRAINER_ROLLOUT, name))
            if name != "capped-ratio"
            else "max(min(r, C), floor)"
        )
        rows.append([f"`{name}`", formula, values, source_of(module)])
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
    """A rule as a function of its ratio, its thresholds, and the parameters that differ from its
    own defaults: `ratio-clip(r′, ε = 0.2)`.
    """
    arguments = [str(rule.ratio)]
    if isinstance(rule, Mask) and rule.settings:
        arguments.append(rule.settings)
    letters = trust_regions.symbols(rule.module) if isinstance(rule, Mask) else {}
    for name, value in rule.chosen:
        if name not in letters:
            arguments.append(f"{name} = {value}")
    return f"{rule.name}({', '.join(arguments)})"


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
    """What to change for each finding of `diagnose`, in the order in which it looks.

    Of what the command prints: the first sentence, without asides of more than six words.
    """
    checks = [registry.load(CHECKS, name, "check") for name in registry.names(CHECKS)]
    rows = []
    for c in sorted(checks, key=lambda check: (check.STAGE, check.NAME)):
        change = re.sub(r" \((\S+ ){6,}\S+\)", "", c.CHANGE)
        first, *_ = re.split(r"(?<=\.) (?=[A-Z])", change)
        rows.append([c.TITLE, f"`{c.NAME}`", str(c.STAGE), first])
    return table("| finding | name | stage | what to change |", rows)


def columns() -> str:
    """What `import --schema` prints, for the page of the schema: by shape instead of by type."""
    rows: dict[str, list[list[str]]] = {head: [] for head in _SHAPES}
    for name, words in meanings().items():
        shape = COLUMNS[name].shape if name in COLUMNS else Shape.LIST
        head = next(head for head, shapes in _SHAPES.items() if shape in shapes)
        rows[head].append([f"`{name}`", words])
    return "\n".join(table(f"| {head} | |", rows[head]) for head in rows)


NORMAL, KNOBS, FINDINGS = (DOCS / f"{name}.md" for name in ("normal", "which-knob", "findings"))
CHOOSING = DOCS / "choosing-a-threshold.md"
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
    (SUMMARY, "metrics"): lambda: looked_up(METRICS),
    (ROUTES, "routing"): lambda: looked_up(ROUTING),
    (CHOOSING, "vectors"): vectors,
    (NORMAL, "rosetta"): rosetta,
    (FINDINGS, "findings"): findings,
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
    engine_args = set(re.findall(r"--engine-arg (\w+)=", text))
    assert engine_args <= arguments
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
        quantities: list[Any] = [
            compared.ratio_T,
            compared.difference_T.abs(),
            compared.binary_kl_T,
        ]
        assert [x.item() for x in quantities] == pytest.approx(numbers, rel=2e-3)


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
