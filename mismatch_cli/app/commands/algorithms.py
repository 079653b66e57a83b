"""`mismatch-cli algorithms`: the table of algorithms with their formulas, and the masks by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mismatch_cli.app.common import Common, print_parts
from mismatch_cli.app.flags import flags
from mismatch_cli.base.json_form import to_json
from mismatch_cli.base.options import settings_group

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.rules.algorithms.listing import ListedAlgorithm, ListedMask, Listing

PANEL, PLACE = "Explain", 4

_LETTERS = (
    "p = π (trainer), q = μ (rollout), p′ = π′ (recomputed), all of the sampled token; r = p/q, "
    "r′ = p/p′, ρ = p′/q; r̄ = p/p̄, where p̄ is from an average of the trainer's weights; A is "
    "the advantage."
)
_USE = "Use: mismatch-cli clipstats --algorithm NAME:PARAMETER=VALUE --algorithm my_mask.py"


@flags()
def command(*, common: Common = settings_group(Common, "json", "debug")) -> None:
    """List the algorithms that clipstats knows: when each blocks a token, and how it weights the
    rest.

    Examples:
      mismatch-cli algorithms
      mismatch-cli algorithms --json | jq '.algorithms[].name'
    """
    from mismatch_cli.rules.algorithms.listing import listing

    listed = listing()
    if common.json:
        print(json.dumps(to_json(listed), indent=2, ensure_ascii=False))
    else:
        print_parts(*_lines(listed))


def _lines(listed: Listing) -> Iterator[RenderableType]:
    """Names and formulas as a list, not a table: they are long, and a terminal is narrow."""
    from rich.text import Text

    yield Text(_LETTERS)
    yield from _algorithms(listed.algorithms)
    for title, rows in (
        ("Variants of single frameworks and experiments", listed.owners),
        ("Weights of installed packages, without a mask", listed.weights),
    ):
        if rows:
            yield from (Text(""), Text(title, style="bold underline"))
            yield from _algorithms(rows)
    yield from (Text(""), Text("Masks by name (anchor rollout, weight r)", style="bold underline"))
    yield from _masks(listed.masks)
    yield from (Text(""), Text(_USE))


def _algorithms(rows: Iterable[ListedAlgorithm]) -> Iterator[RenderableType]:
    from rich.text import Text

    for row in rows:
        yield Text("")
        yield Text.assemble((row.name, "bold"), *(f", {alias}" for alias in row.aliases))
        yield _below(f"blocked when  {row.blocked_when}\nweight        {row.weight}")
        yield _below(row.source, "dim")


def _masks(masks: Iterable[ListedMask]) -> Iterator[RenderableType]:
    from rich.text import Text

    for mask in masks:
        yield Text(mask.typed)
        yield _below(mask.blocked_when, "dim")


def _below(text: str, style: str = "") -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text, style=style), (0, 0, 0, 2))
