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
    if name in MASKS:
        return pa.list_(pa.bool_())
    return COLUMNS[ALIASES.get(name, name)].type


def measure_of(names: Container[str]) -> str:
    """The column whose lists say how long each response, or each sequence, is."""
    for name in ("response_ids", *SEQUENCES):
        if name in names:
            return name
    return "logp_rollout"


def is_batch(ids: pa.DataType) -> bool:
    """Whether each row holds a matrix of token ids instead of the list of one response."""
    return foreign_values.is_list(ids) and foreign_values.is_list(ids.value_type)


def is_shared(name: str, kind: pa.DataType) -> bool:
    """Whether a column of a batch holds one list for all its responses."""
    return name in _SHARED and not is_batch(kind)


def split_batches(table: pa.Table, tally: Tally, where: str) -> pa.Table:
    """Split rows that hold a batch into one row per response; single values are repeated for
    each response.
    """
    columns = _lists.columns_of(table)
    measure = columns[measure_of(columns)]
    size_S = _lists.lengths_of(measure)
    divided: set[str] = set()
    bad_S = {NO_BATCH: _lists.is_null(measure)}
    for name, column in columns.items():
        if foreign_values.is_list(column.type) and not is_shared(name, column.type):
            divided.add(name)
            differs_S = _lists.lengths_of(column) != size_S
            bad_S[OTHER_SIZE.format(name=name)] = differs_S & ~_lists.is_null(column)
    keep_S = tally.sift(bad_S, where)
    batch_R = _lists.rows_of(size_S[keep_S])  # the batch of each response
    responses: dict[str, pa.Array] = {}
    for name, column in _lists.select_rows(columns, keep_S).items():
        if name in divided:
            responses[name] = _rows_of(column, batch_R)
        else:
            responses[name] = column.take(pa.array(batch_R))
    return pa.table(responses)


def _rows_of(column: pa.Array, batch_R: np.ndarray) -> pa.Array:
    """The values of each batch, one per response; null where a batch has none."""
    recorded_R = ~_lists.is_null(column)[batch_R]
    first_R = np.searchsorted(batch_R, batch_R)  # of its batch
    number_R = np.arange(len(batch_R)) - first_R
    index_R = _lists.offsets_of(_lists.lengths_of(column))[batch_R] + number_R
    return column.flatten().take(pa.array(index_R, mask=~recorded_R))


def without_padding(table: pa.Table, tally: Tally, where: str) -> pa.Table:
    """Cut responses and prompts by their masks; the columns have a trace's types.

    A response ends with the last 1 of `response_mask`; an earlier 0 is a token outside the loss. A
    prompt keeps the tokens where `prompt_mask` is 1.
    """
    columns = _lists.columns_of(table)
    if columns.keys().isdisjoint(MASKS):
        return table
    if PROMPT_COLUMN not in columns:
        columns.pop("prompt_mask", None)
    columns = _lists.select_rows(columns, tally.sift(_misfits(columns), where))
    if PROMPT_COLUMN in columns:
        columns[PROMPT_COLUMN] = _unpadded(columns, tally)
    if "response_mask" in columns:
        columns |= _cut(columns, columns.pop("response_mask"))
    return pa.table(columns)


def _unpadded(columns: dict[str, pa.Array], tally: Tally) -> pa.Array:
    """The prompts without padding, as far as they have a mask, which is taken out."""
    prompts = columns[PROMPT_COLUMN]
    if "prompt_mask" not in columns:
        tally.note(PADDED, _repeated_at_the_beginning(prompts))
        return prompts
    mask = columns.pop("prompt_mask")
    tally.note(PADDED, _repeated_at_the_beginning(prompts.filter(mask.is_null())))
    return _masked(prompts, mask)


def _misfits(columns: dict[str, pa.Array]) -> dict[str, np.ndarray]:
    """Rows without ids, and rows whose masks have the wrong length or mask everything."""
    measure = measure_of(columns)
    no_ids_S = _lists.is_null(columns[measure])
    if PROMPT_COLUMN in columns:
        no_ids_S = no_ids_S | _lists.is_null(columns[PROMPT_COLUMN])
    bad_S = {NO_IDS: no_ids_S}
    ids_of = {"response_mask": measure, "loss_mask": measure, "prompt_mask": PROMPT_COLUMN}
    for name, ids in ids_of.items():
        if name not in columns:
            continue
        mask = columns[name]
        recorded_S = ~_lists.is_null(mask)
        differs_S = _lists.lengths_of(mask) != _lists.lengths_of(columns[ids])
        wrong = WRONG_PROMPT if ids == PROMPT_COLUMN else WRONG_LENGTH.format(name=name)
        bad_S[wrong] = recorded_S & differs_S
        bad_S[HOLES.format(name=name)] = recorded_S & _lists.holds_null(mask)
        if name in MASKS:
            bad_S[HIDDEN.format(name=name)] = _hides_all(mask)
    return bad_S


def _hides_all(mask: pa.Array) -> np.ndarray:
    """Rows of which no flag is set, though they have some."""
    lengths_S = _lists.lengths_of(mask)
    flags_T = pc.fill_null(mask.flatten(), False).to_numpy(zero_copy_only=False)
    _, last_S = _lists.ends_of(flags_T, lengths_S)
    return (lengths_S > 0) & (last_S < 0)


def _masked(lists: pa.Array, mask: pa.Array) -> pa.Array:
    """The values where the mask is true; rows without a mask stay complete."""
    lengths_S = _lists.lengths_of(lists)
    keep_T = _lists.flat(all_true_where_null(mask, lengths_S))
    masked_S = np.bincount(_lists.rows_of(lengths_S)[keep_T], minlength=len(lists))
    return _lists.from_flat(_lists.flat(lists)[keep_T], masked_S)


def _cut(columns: dict[str, pa.Array], mask: pa.Array) -> dict[str, pa.Array]:
    """Columns with a value, or K values, per padded token, cut after the last token; and the
    loss mask.
    """
    width_S = _lists.lengths_of(columns[measure_of(columns)])
    tokens_T = _lists.flat(all_true_where_null(mask, width_S))
    loss_T = tokens_T
    if "loss_mask" in columns:
        loss_T = tokens_T & _lists.flat(all_true_where_null(columns["loss_mask"], width_S))
    _, last_S = _lists.ends_of(tokens_T, width_S)
    padded = columns | {"loss_mask": _lists.from_flat(loss_T, width_S)}
    cut: dict[str, pa.Array] = {}
    for name in (LISTS - {PROMPT_COLUMN}) & padded.keys():
        column = padded[name]
        if not foreign_values.is_list(column.type):
            continue  # an advantage of the whole response
        values_S = _lists.lengths_of(column)
        k_S, rest_S = np.divmod(values_S, np.maximum(width_S, 1))
        # A column of another length stays whole, and is refused later with its name.
        cut_S = np.where(rest_S == 0, k_S * (last_S + 1), values_S)
        cut[name] = _lists.first_of_each(column, cut_S)
    return cut


def _repeated_at_the_beginning(prompts: pa.Array) -> int:
    """How many prompts begin with the same token twice."""
    long = prompts.filter(pa.array(_lists.lengths_of(prompts) > 1))
    are_equal = pc.equal(pc.list_element(long, 0), pc.list_element(long, 1))
    return int(pc.sum(are_equal).as_py() or 0)
