"""What a search found in the models: tensors, configurations and modules that differ."""

from collections.abc import Iterator, Sequence
from itertools import chain

from mismatch_cli.base import numbers
from mismatch_cli.bisect.studies.bisection_result import (
    BisectionResult,
    GraftRow,
    ModuleRow,
    Modules,
    PointError,
    StreamErrors,
)
from mismatch_cli.bisect.studies.model_differences import ModelDifferences
from mismatch_cli.report.outline import Section, Table
from mismatch_cli.report.tables import col, filled, number, percent, share, table, text

_MODULES = (
    "Both models on the same responses. Inherited: the distance between both residual streams at "
    "a point, relative to their size; added: what attention or the MLP of that layer adds. "
    "Grafting puts the engine’s modules of one kind into the trainer’s forward pass: the part of "
    "the gap that disappears is caused by that kind. Shares of kinds overlap because errors of "
    "one kind pass through the others."
)
_RELATIONS = {"bits": "same bits", "rounding": "rounding", "different": "DIFFERENT"}
_OUTCOMES = {
    "different": "differ by more than rounding",
    "rounding": "differ by rounding",
    "bits": "match to the bit",
}
_UNLIKE = {"scaled": "scaled", "rounded": "rounded", "other": "different numbers"}
_MODELS = {"trainer": "the trainer’s model", "rollout": "the engine’s model"}
_FEW = 12  # rows that are not folded away
_LEAST = 0.005  # of a gap
_KINDS = 3  # of modules, in a remark


def bookkeeping_section(result: BisectionResult) -> Section:
    """What `diagnose` finds in the recorded columns, where the search begins."""
    faults = table(
        "",
        result.findings or (),
        [
            text("fault", lambda row: row.title),
            col("explains", lambda row: share(row.explains)),
            text("seen", lambda row: row.sentence),
            text("what to change", lambda row: row.change),
        ],
    )
    return Section(
        "Bookkeeping",
        "Faults that `diagnose` finds in the recorded tokens. The legs show whether they cause "
        "the gap.",
        tables=filled(faults),
    )


def weights_section(models: ModelDifferences) -> Section:
    """Tensors, by their names in the trainer, and configuration settings that differ."""
    lacking = table(
        "Tensors that one model lacks",
        models.lacking,
        [
            text("tensor", lambda row: row.tensor),
            text("missing in", lambda row: _MODELS[row.side]),
        ],
    )
    tensors = table(
        "Tensors that differ",
        models.weights.differing,
        [
            text("tensor", lambda row: row.tensor),
            text("relation", lambda row: _UNLIKE.get(row.relation, row.relation)),
            col("relative difference", lambda row: number(row.relative)),
            text("how", lambda row: row.detail),
        ],
    )
    config = table(
        "Configurations that differ",
        models.settings,
        [
            text("setting", lambda row: row.key),
            text("rollout", lambda row: str(row.rollout)),
            text("trainer", lambda row: str(row.trainer)),
        ],
    )
    unread = _listed("Tensors that could not be read", "not read", models.unread)
    return Section(
        "Weights and configurations",
        _compared(models),
        tables=filled(lacking, tensors, config, unread),
        stays=models.were_compared,
    )


def _compared(models: ModelDifferences) -> str:
    """How many tensors were compared, differ, are on one side alone, or could not be read."""
    compared = numbers.things(models.weights.compared, "tensor")
    differing = len(models.weights.differing)
    answer = "all are equal"
    if differing:
        answer = f"{differing} differs" if differing == 1 else f"{differing} differ"
    sentences = [f"{compared} of the engine compared with the trainer’s: {answer}."]
    if not models.weights.compared:
        sentences = ["No tensor of the engine could be compared with the trainer’s."]
    if models.lacking:
        sentences.append(f"{numbers.things(len(models.lacking), 'tensor')} without a counterpart.")
    if models.unread:
        sentences.append(f"{numbers.things(len(models.unread), 'tensor')} could not be read.")
    return " ".join(sentences)


def _listed(title: str, head: str, rows: Sequence[str]) -> Table:
    """Lines that only the page shows, folded."""
    return table("", rows, [text(head, str)], fold=title, terminal_rows=0)


def modules_remark(modules: Modules | None) -> str:
    """The kinds of modules that cause most of the gap that remains after settings; empty where
    none were compared.
    """
    if modules is None:
        return ""
    shares = []
    for row in _largest_first(modules.grafts):
        if row.kind != "all" and row.share >= _LEAST:
            shares.append(f"{row.kind} {100 * row.share:.0f} %")
    different = [row for row in modules.isolated if row.relation == "different"]
    count = numbers.things(len(different), "module") if different else "none"
    if not shares:
        return f"none causes a gap; {count} beyond rounding"
    gap = f"{numbers.number(modules.gap, 2)} nats that remain after settings"
    return f"{', '.join(shares[:_KINDS])} of {gap}; {count} beyond rounding"


def _largest_first(grafts: Sequence[GraftRow]) -> list[GraftRow]:
    return sorted(grafts, key=lambda row: -row.share)


def modules_section(result: BisectionResult) -> Section:
    """What each kind of module causes, each module on the trainer's input, and the errors by
    layer.
    """
    modules = result.modules
    if modules is None:
        return Section("Modules")
    grafts = table(
        "The engine’s modules in the trainer’s pass",
        _largest_first(modules.grafts),
        [
            text("kind of module", lambda row: {"all": "all of them"}.get(row.kind, row.kind)),
            col("share of the gap, %", lambda row: percent(row.share)),
            col("left, nats", lambda row: number(row.left)),
        ],
        note=f"Shares of the {number(modules.gap)} nats that remain on these responses.",
    )
    missing = _listed("Modules that could not be compared", "not compared", modules.missing)
    tables = filled(grafts, _isolated(modules.isolated), _layers(modules.layers), missing)
    responses = numbers.things(modules.responses, "response")
    measured = f"Measured on {responses}, with the settings that cause gaps undone."
    return Section("Modules", f"{_MODULES} {measured}", tables=tables)


def _isolated(rows: Sequence[ModuleRow]) -> Table:
    """The engine's modules on the trainer's input, those that differ first."""
    title = "Each module on the trainer’s input"
    relations = [row.relation for row in rows]
    counts = [f"{relations.count(name)} {outcome}" for name, outcome in _OUTCOMES.items()]
    return table(
        title,
        sorted(rows, key=lambda row: list(_OUTCOMES).index(row.relation)),
        [
            text("module", lambda row: row.module),
            text("kind", lambda row: row.kind),
            text("answer", lambda row: _RELATIONS[row.relation]),
            col("relative difference", lambda row: number(row.relative)),
            col("elements that differ", lambda row: share(row.differing)),
        ],
        note=f"{', '.join(counts)}.",
        fold=title if len(rows) > _FEW else "",
        terminal_rows=_FEW,
    )


def _layers(rows: Sequence[StreamErrors]) -> Table:
    errors = list(chain.from_iterable(map(_points, rows)))
    return table(
        "Errors by layer",
        errors,
        [
            text("layer", lambda row: str(row[0])),
            text("point", lambda row: row[1]),
            col("inherited", lambda row: number(row[2].inherited)),
            col("added", lambda row: number(row[2].added)),
        ],
        fold="Errors by layer",
        terminal_rows=0,
    )


def _points(row: StreamErrors) -> Iterator[tuple[int, str, PointError]]:
    """The layer, the name and the error of each point that was compared."""
    points = {
        "before the layer": row.before,
        "after attention": row.attention,
        "after the MLP": row.mlp,
    }
    for name, error in points.items():
        if error is not None:
            yield row.layer, name, error
