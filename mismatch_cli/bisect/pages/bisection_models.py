"""What a search found in the models: tensors, configurations and modules that differ."""

from collections.abc import Sequence

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
_SAID = {
    "different": "differ by more than rounding",
    "rounding": "differ by rounding",
    "bits": "match to the bit",
}
_UNLIKE = {"scaled": "scaled", "rounded": "rounded", "other": "different numbers"}
_MODELS = {"trainer": "the trainer’s model", "rollout": "the engine’s model"}
_FEW = 12  # rows that are not folded away
_SEEN = 0.005  # of a gap
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
    differing = len(models.weights.differing)
    differ = "differs" if differing == 1 else "differ"
    answer = f"{differing} {differ}" if differing else "all are equal"
    compared = numbers.things(models.weights.compared, "tensor")
    summary = [f"{compared} of the engine compared with the trainer’s: {answer}."]
    if models.lacking:
        summary.append(f"{numbers.things(len(models.lacking), 'tensor')} without a counterpart.")
    if models.unread:
        summary.append(f"{numbers.things(len(models.unread), 'tensor')} could not be read.")
    return " ".join(summary)


def _listed(title: str, head: str, rows: Sequence[str]) -> Table:
    """Lines that only the page shows, folded."""
    return table("", rows, [text(head, str)], fold=title, terminal_rows=0)


def modules_remark(modules: Modules | None) -> str:
    """The kinds of modules that cause most of the gap that remains after settings; empty where
    none were compared.
    """
    if modules is None:
        return ""
    kinds = [row for row in _largest_first(modules.grafts) if row.kind != "all"]
    shares = [f"{row.kind} {100 * row.share:.0f} %" for row in kinds if row.share >= _SEEN]
    different = sum(row.relation == "different" for row in modules.isolated)
    beyond = f"{numbers.things(different, 'module') if different else 'none'} beyond rounding"
    if not shares:
        return f"none causes a gap; {beyond}"
    gap = f"{numbers.number(modules.gap, 2)} nats that remain after settings"
    return f"{', '.join(shares[:_KINDS])} of {gap}; {beyond}"


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
    relations = [row.relation for row in rows]
    counted = (f"{relations.count(name)} {words}" for name, words in _SAID.items())
    return table(
        "Each module on the trainer’s input",
        sorted(rows, key=lambda row: list(_SAID).index(row.relation)),
        [
            text("module", lambda row: row.module),
            text("kind", lambda row: row.kind),
            text("answer", lambda row: _RELATIONS[row.relation]),
            col("relative difference", lambda row: number(row.relative)),
            col("elements that differ", lambda row: share(row.differing)),
        ],
        note=f"{', '.join(counted)}.",
        fold="Each module on the trainer’s input" if len(rows) > _FEW else "",
        terminal_rows=_FEW,
    )


def _layers(rows: Sequence[StreamErrors]) -> Table:
    errors = [(row.layer, *point) for row in rows for point in _points(row)]
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


def _points(row: StreamErrors) -> list[tuple[str, PointError]]:
    points = {
        "before the layer": row.before,
        "after attention": row.attention,
        "after the MLP": row.mlp,
    }
    return [(name, error) for name, error in points.items() if error is not None]
