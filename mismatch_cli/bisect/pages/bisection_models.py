"""What a search found in the models: tensors, configurations and modules that differ."""

from collections.abc import Sequence

from mismatch_cli.base import numbers
from mismatch_cli.bisect.studies.model_differences import LackingTensor, ModelDifferences
from mismatch_cli.report.tables import (
    Row,
    col,
    filled,
    named,
    percent,
    share,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import Section, Table

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
_POINTS = {"before": "before the layer", "attention": "after attention", "mlp": "after the MLP"}


def bookkeeping_section(result: Row) -> Section:
    """What `diagnose` finds in the recorded columns, where the search begins."""
    faults = table(
        "",
        result["findings"] or (),
        [
            named("fault", "title"),
            col("explains", lambda row: share(row["explains"])),
            named("seen", "sentence"),
            named("what to change", "change"),
        ],
    )
    text = (
        "Faults that `diagnose` finds in the recorded tokens. The legs show whether they cause "
        "the gap."
    )
    return Section("Bookkeeping", text, tables=filled(faults))


def weights_section(models: ModelDifferences) -> Section:
    """Tensors, by their names in the trainer, and configuration settings that differ."""
    found = models.weights
    if not found:
        return Section("Weights and configurations")
    differing = found.get("differing", ())
    tensors = table(
        "Tensors that differ",
        differing,
        [
            text("tensor", lambda row: row["tensor"]),
            text("relation", lambda row: _UNLIKE.get(row["relation"], row["relation"])),
            col("relative difference", lambda row: numbers.number(row["relative"])),
            named("how", "detail"),
        ],
    )
    config = table(
        "Configurations that differ",
        models.settings,
        [
            named("setting", "key"),
            text("rollout", lambda row: str(row["rollout"])),
            text("trainer", lambda row: str(row["trainer"])),
        ],
    )
    return Section(
        "Weights and configurations",
        _compared(models, found.get("compared", 0), len(differing)),
        tables=filled(_lacking(models.lacking), tensors, config, _unread(models.unread)),
        stays=True,
    )


def _compared(models: ModelDifferences, compared: int, differing: int) -> str:
    """How many tensors were compared, differ, are on one side alone, or could not be read."""
    differ = "differs" if differing == 1 else "differ"
    answer = f"{differing} {differ}." if differing else "all are equal."
    summary = [
        f"{numbers.things(compared, 'tensor')} of the engine compared with the trainer’s: {answer}"
    ]
    if models.lacking:
        summary.append(f"{numbers.things(len(models.lacking), 'tensor')} without a counterpart.")
    if models.unread:
        summary.append(f"{numbers.things(len(models.unread), 'tensor')} could not be read.")
    return " ".join(summary)


def _lacking(rows: Sequence[LackingTensor]) -> Table:
    return table(
        "Tensors that one model lacks",
        rows,
        [
            text("tensor", lambda row: row.tensor),
            text("missing in", lambda row: _MODELS[row.side]),
        ],
    )


def _unread(rows: Sequence[str]) -> Table:
    return table(
        "", rows, [text("not read", str)], fold="Tensors that could not be read", terminal_rows=0
    )


def modules_section(result: Row) -> Section:
    """What each kind of module causes, each module on the trainer's input, and the errors by
    layer.
    """
    found = result["modules"] or {}
    if not found:
        return Section("Modules")
    responses = numbers.things(found["responses"], "response")
    summary = f"{_MODULES} Measured on {responses}, with the settings that cause gaps undone."
    tables = (
        _grafts(found.get("grafts") or (), found.get("gap")),
        _isolated(found.get("isolated") or ()),
        _layers(found.get("layers") or ()),
        _missing(found.get("missing") or ()),
    )
    return Section("Modules", summary, tables=filled(*tables))


def _grafts(rows: Sequence[Row], gap: float | None) -> Table:
    return table(
        "The engine’s modules in the trainer’s pass",
        sorted(rows, key=lambda row: -(value_of(row["share"]) or 0.0)),
        [
            text(
                "kind of module", lambda row: "all of them" if row["kind"] == "all" else row["kind"]
            ),
            col("share of the gap, %", lambda row: percent(row["share"])),
            col("left, nats", lambda row: numbers.number(row["left"])),
        ],
        note=f"Shares of the {numbers.number(gap)} nats that remain on these responses.",
    )


def _isolated(rows: Sequence[Row]) -> Table:
    """The engine's modules on the trainer's input, those that differ first."""
    order = list(_SAID)
    ordered = sorted(
        rows,
        key=lambda row: order.index(row["relation"]) if row["relation"] in order else len(order),
    )
    counted = (
        f"{sum(row['relation'] == name for row in rows)} {words}" for name, words in _SAID.items()
    )
    return table(
        "Each module on the trainer’s input",
        ordered,
        [
            named("module", "module"),
            named("kind", "kind"),
            text("answer", lambda row: _RELATIONS.get(row["relation"]) or str(row["relation"])),
            col("relative difference", lambda row: numbers.number(row["relative"])),
            col("elements that differ", lambda row: numbers.share(row["differing"])[0]),
        ],
        note=f"{', '.join(counted)}.",
        fold="Each module on the trainer’s input" if len(rows) > _FEW else "",
        terminal_rows=_FEW,
    )


def _layers(rows: Sequence[Row]) -> Table:
    errors = [
        (row["layer"], _POINTS[point], row[point])
        for row in rows
        for point in _POINTS
        if row.get(point) is not None
    ]
    return table(
        "Errors by layer",
        errors,
        [
            text("layer", lambda row: str(row[0])),
            text("point", lambda row: row[1]),
            col("inherited", lambda row: numbers.number(row[2].get("inherited"))),
            col("added", lambda row: numbers.number(row[2].get("added"))),
        ],
        fold="Errors by layer",
        terminal_rows=0,
    )


def _missing(rows: Sequence[str]) -> Table:
    return table(
        "",
        rows,
        [text("not compared", str)],
        fold="Modules that could not be compared",
        terminal_rows=0,
    )
