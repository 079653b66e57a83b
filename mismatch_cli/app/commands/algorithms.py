"""`mismatch-cli algorithms`: the table of algorithms with their formulas, and the masks by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.common import Common, print_parts
from mismatch_cli.app.flags import flags
from mismatch_cli.base.options import part

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.rules.algorithms.algorithm import Algorithm

PANEL, PLACE = "Explain", 4


@flags()
def command(*, common: Common = part(Common, "json", "debug")) -> None:
    """List the algorithms that clipstats knows: when each blocks a token, and how it weights the
    rest.

    Examples:
      mismatch-cli algorithms
      mismatch-cli algorithms --json | jq '.algorithms[].name'
    """
    table = _table()
    if common.json:
        print(json.dumps(table, indent=2, ensure_ascii=False))
    else:
        print_parts(*_parts(table))


def _table() -> dict[str, list[dict[str, Any]]]:
    from mismatch_cli.base import registry
    from mismatch_cli.rules import trust_regions, weights
    from mismatch_cli.rules.algorithms.parse import find
    from mismatch_cli.rules.algorithms.parts import Mask
    from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS

    masks = [
        {"name": name, "thresholds": mask.parameters, "blocked_when": mask.formula}
        for name in registry.names(trust_regions.PACKAGE)
        for mask in [Mask(name)]
    ]
    return {
        "algorithms": [_row(row) for row in TABLE.values()],
        "owners": [_row(row) for row in VARIANTS.values()],
        "masks": masks,
        "weights": [_row(find(name)) for name in registry.installed(weights.PACKAGE)],
    }


def _row(row: Algorithm) -> dict[str, Any]:
    from mismatch_cli.rules.algorithms.table import ALIASES, MEANINGS, TAKEN

    blocked_when, weight = row.formulas
    names = ALIASES | {word: MEANINGS[word][0] for word in TAKEN}
    aliases = [alias for alias, name in names.items() if name == row.name]
    head = {"name": row.name, "aliases": aliases, "anchor": row.anchor}
    return head | {"blocked_when": blocked_when, "weight": weight, "source": row.source}


def _parts(table: dict[str, list[dict[str, Any]]]) -> list[RenderableType]:
    """Names and formulas as a list, not a table: they are long, and a terminal is narrow."""
    from rich.padding import Padding
    from rich.text import Text

    from mismatch_cli.rules import trust_regions

    def below(text: str, style: str = "") -> Padding:
        return Padding(Text(text, style=style), (0, 0, 0, 2))

    parts: list[RenderableType] = [
        Text(
            "p = π (trainer), q = μ (rollout), p′ = π′ (recomputed), all of the sampled token; r "
            "= p/q, r′ = p/p′, ρ = p′/q; r̄ = p/p̄, where p̄ is from an average of the trainer's "
            "weights; A is the advantage."
        )
    ]
    for heading, rows in (
        ("", table["algorithms"]),
        ("Variants of single frameworks and experiments", table["owners"]),
        ("Weights of installed packages, without a mask", table["weights"]),
    ):
        if not rows:
            continue
        parts += [Text(""), Text(heading, style="bold underline")] if heading else []
        for row in rows:
            title = Text.assemble(
                (row["name"], "bold"), *(f", {alias}" for alias in row["aliases"])
            )
            lines = f"blocked when  {row['blocked_when']}\nweight        {row['weight']}"
            parts += [Text(""), title, below(lines), below(row["source"], "dim")]
    parts += [Text(""), Text("Masks by name (anchor rollout, weight r)", style="bold underline")]
    for mask in table["masks"]:
        letters = trust_regions.symbols(trust_regions.find(mask["name"]))
        typed = {
            trust_regions.spelled(letters.get(name, name)): value
            for name, value in mask["thresholds"].items()
        }
        given = ",".join(f"{name}={value}" for name, value in typed.items())
        parts += [
            Text(mask["name"] + (f":{given}" if given else "")),
            below(mask["blocked_when"], "dim"),
        ]
    use = "Use: mismatch-cli clipstats --algorithm NAME:PARAMETER=VALUE --algorithm my_mask.py"
    return [*parts, Text(""), Text(use)]
