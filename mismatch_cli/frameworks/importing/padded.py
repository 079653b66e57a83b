"""Batches as trainers hold them: matrices with one padded response per row, and masks that mark
the tokens.
"""

from collections.abc import Container

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import HOLES, NO_IDS, WRONG_LENGTH, all_true_where_null
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import ALIASES, COLUMNS, PROMPT_COLUMN, TOKEN_COLUMNS, TOPK_COLUMNS

MASKS = ("prompt_mask", "response_mask")  # true where there is a token
# Prompt and response in one, and what each of its positions predicts
SEQUENCES = ("token_ids", "target_ids")
# A list per response, so a matrix per batch
LISTS = {PROMPT_COLUMN, *TOKEN_COLUMNS, *TOPK_COLUMNS, *MASKS, *SEQUENCES}
_SHARED = {PROMPT_COLUMN, "prompt_mask"}  # one may be of all responses of a batch
NO_BATCH = "batches without token ids"
OTHER_SIZE = "batches whose {name} and token ids differ in their number of rows"
HIDDEN = "responses whose {name} is all 0, so that their length is unknown"
WRONG_PROMPT = "responses whose prompt_mask does not have one value per prompt token"
PADDED = "prompts begin with a repeated token; without prompt_mask, padding counts as prompt"


def kind_of(name: str) -> pa.DataType:
    """The type of a column: that of the trace, or booleans for the masks of padding."""
    if name in SEQUENCES:
        return COLUMNS[PROMPT_COLUMN].type
    return pa.list_(pa.bool_()) if name in MASKS else COLUMNS[ALIASES.get(name, name)].type


def measure_of(names: Container[str]) -> str:
    """The column whose lists say how long each response, or each sequence, is."""
    ids = (name for name in ("response_ids", *SEQUENCES) if name in names)
    return next(ids, "logp_rollout")


def is_batch(ids: pa.DataType) -> bool:
    """Whether each row holds a matrix of token ids instead of the list of one response."""
    return foreign_values.is_list(ids) and foreign_values.is_list(ids.value_type)


def is_shared(name: str, kind: pa.DataType) -> bool:
    """Whether a column of a batch holds one list for all its responses."""
    return name in _SHARED and not is_batch(kind)


def apart(table: pa.Table, tally: Tally, where: str) -> pa.Table:
    """Split rows that hold a batch into one row per response; single values are repeated for
    each response.
    """
    columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
    measure = columns[measure_of(columns)]
    size_S = _lists.lengths_of(measure)
    rows = {
        name: column
        for name, column in columns.items()
        if foreign_values.is_list(column.type) and not is_shared(name, column.type)
    }
    bad_S = {NO_BATCH: _lists.is_null(measure)}
    for name, column in rows.items():
        bad_S[OTHER_SIZE.format(name=name)] = (
            _lists.lengths_of(column) != size_S
        ) & ~_lists.is_null(column)
    keep = pa.array(tally.sift(bad_S, where))
    batch_R = _lists.rows_of(size_S[np.asarray(keep)])
    return pa.table(
        {
            name: _rows_of(column.filter(keep), batch_R)
            if name in rows
            else column.filter(keep).take(pa.array(batch_R))
            for name, column in columns.items()
        }
    )


def _rows_of(column: pa.Array, batch_R: np.ndarray) -> pa.Array:
    """The values of each batch, one per response; null where a batch has none."""
    null_S, size_S = _lists.is_null(column), _lists.lengths_of(column)
    known_R = ~null_S[batch_R]
    first_R = np.searchsorted(batch_R, batch_R)  # of its batch
    index_R = _lists.offsets_of(size_S)[batch_R] + np.arange(len(batch_R)) - first_R
    return column.flatten().take(pa.array(index_R, mask=~known_R))


def without_padding(table: pa.Table, tally: Tally, where: str) -> pa.Table:
    """Cut responses and prompts by their masks; the columns have a trace's types.

    A response ends with the last 1 of `response_mask`; an earlier 0 is a token outside the loss. A
    prompt keeps the tokens where `prompt_mask` is 1.
    """
    columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
    if not any(mask in columns for mask in MASKS):
        return table
    if PROMPT_COLUMN not in columns:
        columns.pop("prompt_mask", None)
    keep = pa.array(tally.sift(_misfits(columns), where))
    columns = {name: column.filter(keep) for name, column in columns.items()}
    if PROMPT_COLUMN in columns:
        columns[PROMPT_COLUMN] = _unpadded(columns, tally)
    if "response_mask" in columns:
        columns |= _cut(columns, columns.pop("response_mask"))
    return pa.table(columns)


def _unpadded(columns: dict[str, pa.Array], tally: Tally) -> pa.Array:
    """The prompts without padding, as far as they have a mask, which is taken out."""
    prompts = unmasked = columns[PROMPT_COLUMN]
    if "prompt_mask" in columns:
        mask = columns.pop("prompt_mask")
        prompts, unmasked = _masked(prompts, mask), prompts.filter(mask.is_null())
    tally.note(PADDED, _repeated_at_the_beginning(unmasked))
    return prompts


def _misfits(columns: dict[str, pa.Array]) -> dict[str, np.ndarray]:
    """Rows without ids, and rows whose masks have the wrong length or mask everything."""
    measure = measure_of(columns)
    held = [columns[name] for name in (measure, PROMPT_COLUMN) if name in columns]
    bad_S = {NO_IDS: np.logical_or.reduce([_lists.is_null(column) for column in held])}
    lists = dict.fromkeys(("response_mask", "loss_mask"), measure) | {"prompt_mask": PROMPT_COLUMN}
    for name, ids in lists.items():
        if name in columns:
            mask, known_S = columns[name], ~_lists.is_null(columns[name])
            wrong = WRONG_PROMPT if ids == PROMPT_COLUMN else WRONG_LENGTH.format(name=name)
            bad_S[wrong] = known_S & (_lists.lengths_of(mask) != _lists.lengths_of(columns[ids]))
            bad_S[HOLES.format(name=name)] = known_S & _lists.holds_null(mask)
            if name in MASKS:
                bad_S[HIDDEN.format(name=name)] = _hides_all(mask)
    return bad_S


def _hides_all(mask: pa.Array) -> np.ndarray:
    lengths_S = _lists.lengths_of(mask)
    flags_T = pc.fill_null(mask.flatten(), False).to_numpy(zero_copy_only=False)
    return (lengths_S > 0) & (_lists.ends_of(flags_T, lengths_S)[1] < 0)


def _masked(lists: pa.Array, mask: pa.Array) -> pa.Array:
    """The values where the mask is true; rows without a mask stay complete."""
    lengths_S = _lists.lengths_of(lists)
    keep_T = _lists.flat(all_true_where_null(mask, lengths_S))
    kept_S = np.bincount(_lists.rows_of(lengths_S)[keep_T], minlength=len(lists))
    return _lists.from_flat(_lists.flat(lists)[keep_T], kept_S)


def _cut(columns: dict[str, pa.Array], mask: pa.Array) -> dict[str, pa.Array]:
    """Columns with a value, or K values, per padded token, cut after the last token; and the
    loss mask.
    """
    width_S = _lists.lengths_of(columns[measure_of(columns)])
    loss_T = tokens_T = _lists.flat(all_true_where_null(mask, width_S))
    if "loss_mask" in columns:
        loss_T = tokens_T & _lists.flat(all_true_where_null(columns["loss_mask"], width_S))
    length_S = _lists.ends_of(tokens_T, width_S)[1] + 1
    of_tokens = LISTS - {PROMPT_COLUMN}
    padded = {
        name: c
        for name, c in columns.items()
        if name in of_tokens and foreign_values.is_list(c.type)
    }
    found = {}
    for name, column in (padded | {"loss_mask": _lists.from_flat(loss_T, width_S)}).items():
        given_S = _lists.lengths_of(column)
        times_S, rest_S = np.divmod(given_S, np.maximum(width_S, 1))
        found[name] = _lists.first_of_each(
            column, np.where(rest_S == 0, times_S * length_S, given_S)
        )
    return found


def _repeated_at_the_beginning(prompts: pa.Array) -> int:
    long = prompts.filter(pa.array(_lists.lengths_of(prompts) > 1))
    return int(pc.sum(pc.equal(pc.list_element(long, 0), pc.list_element(long, 1))).as_py() or 0)
