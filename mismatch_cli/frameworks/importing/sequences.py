"""Cuts whole sequences, prompt and response in one list, where a mask says the response begins.

`token_ids` is the sequence. With `target_ids`, the same moved by one, index i of every other column
describes target i, so that nothing describes the first token.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.naming import IGNORED
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import advantages_per_token, split_sequences
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import TOKEN_COLUMNS, TOPK_COLUMNS

NOT_MOVED = "sequences whose target_ids are not token_ids moved by one"
NO_LABELS = "sequences whose {name} holds neither 0 and 1, nor the token ids and −100 elsewhere"
BY_ADVANTAGE = "sequences have no mask: the tokens with an advantage other than 0 are the response"
MASKS = ("response_mask", "loss_mask")  # of a sequence, the one that decides first
_Columns = dict[str, pa.Array]


def cut(table: pa.Table, tally: Tally, where: str) -> pa.Table:
    """The rows with `prompt_ids` and `response_ids` instead of `token_ids`; tables without these
    stay as they are. Raises `MismatchError` if nothing says which tokens are the response.
    """
    columns = _lists.columns_of(table)
    if "token_ids" not in columns:
        return table
    columns = _aligned(_with_advantages(columns), tally, where)
    columns = _with_flags(columns, tally, where)
    masks = {name: columns.pop(name) for name in MASKS if name in columns}
    mask = pc.coalesce(*(masks.values() or [_by_advantage(columns, tally, where)]))
    ids = columns.pop("token_ids")
    length_S = _lengths_without_padding(ids, masks.get("response_mask"))
    per_token = {*TOKEN_COLUMNS} - {"response_ids"}
    of_tokens = {name: columns.pop(name) for name in per_token & columns.keys()}
    if len(masks) > 1:
        of_tokens["loss_mask"] = masks["loss_mask"]
    # Top-K columns have K values per position, which nothing here cuts.
    for name in TOPK_COLUMNS:
        columns.pop(name, None)
    responses, keep_S = split_sequences(ids, mask, of_tokens, tally, where, length_S)
    return pa.table(_lists.select_rows(columns, keep_S) | responses)


def _with_advantages(columns: _Columns) -> _Columns:
    """One advantage of a sequence for each of its tokens, if a mask says where the response is."""
    if "advantage" not in columns or columns.keys().isdisjoint(MASKS):
        return columns
    measure = columns.get("target_ids", columns["token_ids"])
    return columns | {"advantage": advantages_per_token(columns["advantage"], measure)}


def _aligned(columns: _Columns, tally: Tally, where: str) -> _Columns:
    """The columns with index i at token i of the sequence."""
    if "target_ids" not in columns:
        return columns
    tokens = columns["token_ids"].to_pylist()
    targets = columns["target_ids"].to_pylist()
    moved_S = np.array(list(map(_is_moved, tokens, targets)), dtype=bool)
    columns = _lists.select_rows(columns, tally.sift({NOT_MOVED: ~moved_S}, where))
    # The sequence is the first token and then its targets, as `token_ids` may lack the last one.
    target_ids = columns.pop("target_ids")
    columns["token_ids"] = _after(pc.list_element(columns["token_ids"], 0), target_ids)
    for name in {*TOKEN_COLUMNS, *MASKS} & columns.keys():
        if not foreign_values.is_list(columns[name].type):
            continue  # an advantage of the whole response
        kind = columns[name].type.value_type
        filler = pa.scalar(None if pa.types.is_floating(kind) else 0).cast(kind)
        fillers = pa.array([filler.as_py()] * len(target_ids), kind)
        columns[name] = _after(fillers, columns[name])
    return columns


def _is_moved(tokens: list[int] | None, targets: list[int] | None) -> bool:
    """Whether each target is the token after the one at its index, in two lists of equal length or
    with one more token.
    """
    if not tokens or not targets:
        return False
    both = len(tokens) - 1  # targets whose token is there too
    return len(targets) - both in (0, 1) and tokens[1:] == targets[:both]


def _after(first: pa.Array, lists: pa.Array) -> pa.Array:
    """The lists with one more value at their beginning; null rows stay null."""
    lengths_S = _lists.lengths_of(lists)
    null_S = _lists.is_null(lists)
    # All first values, then those of the lists: `place_T` is where a row's values are in this.
    values = pa.concat_arrays([first, lists.flatten()])
    begin_S = len(first) + _lists.offsets_of(lengths_S)[:-1]
    total_S = np.where(null_S, 0, lengths_S + 1)
    place_T = _lists.ranges(begin_S - 1, begin_S - 1 + total_S)
    starts = _lists.offsets_of(total_S)[:-1][~null_S]
    place_T[starts] = np.flatnonzero(~null_S)
    return _lists.from_flat(values.take(pa.array(place_T)), total_S, null_S)


def _with_flags(columns: _Columns, tally: Tally, where: str) -> _Columns:
    """The masks as flags, where they hold labels: the token's own id, or −100 outside the loss."""
    columns = dict(columns)
    for name in MASKS:
        if name not in columns or pa.types.is_boolean(columns[name].type.value_type):
            continue
        mask = columns[name]
        ids = columns["token_ids"]
        flags = pa.array(map(_flags, mask.to_pylist(), ids.to_pylist()), pa.list_(pa.bool_()))
        # A mask of another length is left out later, with the reason that fits it.
        same_S = _lists.lengths_of(mask) == _lists.lengths_of(ids)
        odd_S = same_S & _lists.is_null(flags)
        columns[name] = flags
        keep_S = tally.sift({NO_LABELS.format(name=name): odd_S}, where)
        columns = _lists.select_rows(columns, keep_S)
    return columns


def _flags(mask: list[int] | None, ids: list[int] | None) -> list[bool] | None:
    """Which tokens a mask of flags or labels marks; None if it is neither."""
    if mask is None or ids is None:
        return None
    if set(mask) <= {0, 1}:
        return list(map(bool, mask))
    for label, own in zip(mask, ids, strict=False):
        if label not in (IGNORED, own):
            return None
    return [label != IGNORED for label in mask]


def _lengths_without_padding(ids: pa.Array, response_mask: pa.Array | None) -> np.ndarray:
    """Where each sequence ends: after the last 1 of its response mask, if it has one."""
    lengths_S = _lists.lengths_of(ids)
    if response_mask is None:
        return lengths_S
    flags_T = pc.fill_null(response_mask.flatten(), False).to_numpy(zero_copy_only=False)
    _, last_S = _lists.ends_of(flags_T, _lists.lengths_of(response_mask))
    # A mask of another length is left out later, with the reason that fits it.
    return np.where(last_S < 0, lengths_S, np.minimum(last_S + 1, lengths_S))


def _by_advantage(columns: Mapping[str, pa.Array], tally: Tally, where: str) -> pa.Array:
    """A mask of the tokens with an advantage other than 0, where advantages are per token."""
    advantage = columns.get("advantage")
    if advantage is None or not foreign_values.is_list(advantage.type):
        raise MismatchError(
            f"{where}: token_ids hold prompt and response, and nothing says where the response "
            "begins. Name the mask: --columns response_mask=… or loss_mask=…"
        )
    tally.note(BY_ADVANTAGE, len(advantage))
    flags_T = pc.fill_null(pc.not_equal(advantage.flatten(), 0), False)
    return _lists.from_flat(flags_T, _lists.lengths_of(advantage), _lists.is_null(advantage))
