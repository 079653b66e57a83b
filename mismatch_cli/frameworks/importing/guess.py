"""An unknown file beside what a trace needs: its columns and paths with kind and length, and those
that fit.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, permutations, zip_longest
from types import MappingProxyType
from typing import Any

from mismatch_cli.base.text import visible
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.naming import (
    OPEN,
    Row,
    fits,
    kind_and_length,
    schema_columns,
)
from mismatch_cli.frameworks.importing.paths import EACH, paths_in

_LOGP = r"log_?p(rob|s?(_|$))|log_?likelihood|(^|_)lps?(_|$)"
_SAMPLED = r"rollout|sampl|infer|behav|vllm|sglang|engine|server|generat"
_TRAINED = r"train|learner|policy|actor|action|current|new|fsdp|megatron|(^|_)(pi|hf)(_|$)"
_EARLIER = r"(^|_)(old|prev)|recomput|prox"
_NOT_SAMPLED = r"(^|_)(ref|reference|teacher|input|prompt|top)|^logp_average$"
_PROMPT = r"prompt|query|context|ctx|question|problem|input"
_RESPONSE = r"response|completion|output|(^|_)out|generat|answer|action"
_NAMES = {
    "prompt_ids": _PROMPT,
    "response_mask": f"({_RESPONSE})\\w*_mask",
    "loss_mask": "mask",
    "advantage": "(^|_)adv",
    "reward": "reward|score",
    "prompt_id": "(^|_)((prompt|group|problem|question|query|example)_id|uid|group)$",
    "step": "(^|_)((global_|train_|training_)?step|it|iter|iteration)$",
    "finish_reason": "(finish|stop)_reason$",
    "entropy_trainer": "entrop",
}
_LISTS = "_ids|_mask|logp|entropy|advantage"  # in names of ours with a value per token
_WANTED = ("prompt_ids", "response_ids", "token_ids", "logp_rollout", "logp_trainer", "loss_mask")
_MOST_ROWS = 40  # of the two lists
_Columns = dict[str, list[Any]]  # the values of each row, by name or path


def columns_in(rows: Sequence[Row]) -> _Columns:
    """The values under each name and path that can be typed, if at least one is not empty."""
    rows = [{**row, **paths_in(row)} for row in rows]
    columns: _Columns = {}
    for name in filter(_can_be_typed, dict.fromkeys(chain.from_iterable(rows))):
        values = [row.get(name) for row in rows]
        if any(map(_is_evidence, values)):
            columns[name] = values
    for name in list(columns):
        holds_others = any(other.startswith(f"{name}.") for other in columns)
        if holds_others:
            del columns[name]  # an object, or a list of some
    return columns


def guess_columns(columns: _Columns, stated: Mapping[str, str]) -> dict[str, str]:
    """Our names that differ from the file's, with its own, as far as kinds, lengths and names tell;
    `stated` ones stay, and `OPEN` marks one of several.

    Empty if nothing can be log μ, or if there is nothing to compare it with: neither token ids nor
    a second side.
    """
    guess = {ours: its for ours, its in stated.items() if its != OPEN}
    # The order matters: a column that is taken is free for none of the later names.
    _take_log_probabilities(columns, guess)
    if "logp_rollout" in guess:
        _take_ids(columns, guess)
    if guess.keys().isdisjoint(("logp_trainer", "response_ids", "token_ids")):
        return {}
    for ours, pattern in _NAMES.items():
        if ours == "prompt_ids" and "token_ids" in guess:
            continue
        fitting = _fitting(columns, guess, ours, pattern)
        _take(guess, ours, [name for name in fitting if not _is_whole(columns, guess, name)])
    names: dict[str, str] = {}
    for ours in (*_WANTED, *schema_columns()):
        if guess.get(ours, ours) != ours:
            names[ours] = guess[ours]
    return names


def log_probabilities(
    columns: _Columns, guess: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The columns that may hold log-probabilities of sampled tokens: by their names, or, if none
    is called so, lists as long as one of ids and without a number above 0.
    """
    by_name = _fitting(columns, guess, "logp_rollout", _LOGP)
    of_others = _named(by_name, _NOT_SAMPLED)
    own = [name for name in by_name if name not in of_others and not _has_ids(columns[name])]
    if own:
        return own
    lengths_of_ids = [_all_lengths(values) for values in columns.values() if _has_ids(values)]
    by_values: list[str] = []
    for name, values in columns.items():
        if _are_negative(values) and _all_lengths(values) in lengths_of_ids:
            by_values.append(name)
    return by_values


def may_be_sampled(name: str) -> bool:
    """Whether a column of this name may hold an engine's log-probabilities."""
    last_names = _last_names(name)
    others = f"{_TRAINED}|{_EARLIER}|{_NOT_SAMPLED}"
    return bool(re.search(_LOGP, last_names)) and not re.search(others, last_names)


def side_by_side(columns: _Columns, guess: Mapping[str, str], file: str) -> str:
    """What is wanted, and what is in the file with its kind and length, the longest first."""
    left = ["wanted"]
    for ours in dict.fromkeys((*_WANTED, *guess)):
        left.append(f"{ours} = {guess.get(ours, '')}")
    right = [f"in {file}"]
    longest_first = sorted(columns, key=lambda name: -_size(columns[name]))
    for name in longest_first[:_MOST_ROWS]:
        right.append(f"{visible(name)}: {kind_and_length(columns[name][0])}")
    width = max(map(len, left))
    lines: list[str] = []
    for wanted, its in zip_longest(left, right, fillvalue=""):
        lines.append(f"{wanted:{width}}  {its}".rstrip())
    return "\n".join(lines)


def _take(guess: dict[str, str], ours: str, candidates: Sequence[str]) -> None:
    """Give our name the only candidate, or the one of the same name; several leave it open."""
    if not candidates or ours in guess:
        return
    if ours in candidates:
        guess[ours] = ours
    else:
        guess[ours] = candidates[0] if len(candidates) == 1 else OPEN


def _fitting(columns: _Columns, guess: Mapping[str, str], ours: str, pattern: str) -> list[str]:
    """The free columns of our name, or that this pattern finds, whose values fit."""
    fitting: list[str] = []
    for name, values in columns.items():
        is_called_so = name == ours or re.search(pattern, _last_names(name))
        if name in guess.values() or not is_called_so or not _all_fit(ours, values):
            continue
        if _is_per_token(ours, values) and not _is_as_long(columns, guess, name):
            continue
        if ours.endswith("_ids") and not _has_ids(values):
            continue
        fitting.append(name)
    return fitting


def _all_fit(ours: str, values: Sequence[Any]) -> bool:
    return all(fits(ours, response) for response in _responses(ours, values))


def _is_per_token(ours: str, values: Sequence[Any]) -> bool:
    if ours == "advantage":
        return any(map(_lists.depth_of, values))
    return ours in ("loss_mask", "response_mask", "entropy_trainer")


def _is_as_long(columns: _Columns, guess: Mapping[str, str], name: str) -> bool:
    """Whether every row of a column is as long as log μ, response by response."""
    logp = columns.get(guess.get("logp_rollout", ""), columns[name])
    return _all_lengths(columns[name]) == _all_lengths(logp)


def _take_log_probabilities(columns: _Columns, guess: dict[str, str]) -> None:
    """Those of an engine, or of nobody in particular, are μ; others are the trainer's."""
    candidates = log_probabilities(columns, guess)
    trained = _named(candidates, _TRAINED)
    others = [name for name in candidates if name not in trained]
    _take(guess, "logp_rollout", _named(others, _SAMPLED) or others)
    if not trained:
        free = [name for name in others if name not in guess.values()]
        # The whole path counts: what an engine's object holds is not the trainer's.
        trained = [name for name in free if not re.search(_SAMPLED, name)]
    _take(guess, "logp_trainer", trained)


def _take_ids(columns: _Columns, guess: dict[str, str]) -> None:
    """Ids as long as log μ are the response's, or the sequence's if its mask begins outside."""
    ids = _fitting(columns, guess, "response_ids", "")
    long = [name for name in ids if _is_as_long(columns, guess, name)]
    for tokens, targets in permutations(long, 2):
        if all(map(_is_moved, columns[tokens], columns[targets])):
            guess["token_ids"] = tokens
            guess["target_ids"] = targets
            return
    if _begins_outside(columns, guess):
        _take(guess, "token_ids", long)
        return
    own = _named(long, _RESPONSE) or long
    # Equal columns are one column under several names: the first of them will do.
    are_equal = all(columns[name] == columns[own[0]] for name in own)
    _take(guess, "response_ids", own[:1] if are_equal else own)


def _named(names: Sequence[str], pattern: str) -> list[str]:
    """The names that a pattern finds in the last two parts of their paths."""
    return [name for name in names if re.search(pattern, _last_names(name))]


def _last_names(path: str) -> str:
    """The last two names of a path, in lower case with underscores: camelCase is camel_case."""
    names = [name for name in path.split(".") if name != EACH and not name.isdecimal()]
    return re.sub(r"(?<=[a-z])(?=[A-Z])|\W+", "_", "_".join(names[-2:])).lower()


def _begins_outside(columns: _Columns, guess: Mapping[str, str]) -> bool:
    """Whether every mask of the first row begins outside the loss, as over prompt and response."""
    responses: list[Any] = []
    for name in _fitting(columns, guess, "loss_mask", "mask"):
        responses += _responses("loss_mask", columns[name][:1])
    return bool(responses) and all(flags and flags[0] in (0, -100) for flags in responses)


def _is_moved(tokens: Any, targets: Any) -> bool:
    return isinstance(tokens, list) and isinstance(targets, list) and tokens[1:] == targets[:-1]


def _is_whole(columns: _Columns, guess: Mapping[str, str], name: str) -> bool:
    """Whether a column has prompt and response in one."""
    response = columns.get(guess.get("response_ids", ""), [])
    return any(map(_ends_with, columns[name], response))


def _ends_with(ids: Any, response: Any) -> bool:
    are_lists = isinstance(ids, list) and isinstance(response, list)
    return are_lists and 0 < len(response) < len(ids) and ids[-len(response) :] == response


def _has_ids(values: Sequence[Any]) -> bool:
    """Whether these are whole numbers, and more than a mask."""
    if not _all_fit("response_ids", values):
        return False
    return any(set(ids or ()) - {None, 0, 1} for ids in _responses("response_ids", values))


def _are_negative(values: Sequence[Any]) -> bool:
    """Whether these are lists of numbers, none above 0 and not all whole, as labels are."""
    if not _all_fit("logp_rollout", values) or not all(map(_lists.depth_of, values)):
        return False
    numbers: list[float] = []
    for logp in _responses("logp_rollout", values):
        numbers += [number for number in logp or () if number is not None]
    return max(numbers, default=1) <= 0 and any(number % 1 for number in numbers)


def _all_lengths(values: Sequence[Any]) -> list[list[int]]:
    """The lengths of the responses in each row."""
    return list(map(_lengths, values))


def _lengths(value: Any) -> list[int]:
    responses = _by_response("response_ids", value)
    return [len(response) if isinstance(response, list) else 0 for response in responses]


def _responses(ours: str, values: Sequence[Any]) -> Iterator[Any]:
    """The values of all responses in some rows."""
    return chain.from_iterable(_by_response(ours, value) for value in values)


def _by_response(ours: str, value: Any) -> list[Any]:
    """The value of each response: a batch has a list of them."""
    depth_of_one = 1 if re.search(_LISTS, ours) else 0
    if _lists.depth_of(value) > depth_of_one:
        return list(value)
    return [value]


def _size(values: Sequence[Any]) -> int:
    """The length of the longest response."""
    return max(chain.from_iterable(_all_lengths(values)), default=0)


def _is_evidence(value: Any) -> bool:
    """Whether a value is neither null nor a list of nulls."""
    if isinstance(value, list):
        return _lists.first_value(value) is not None
    return value is not None


def _can_be_typed(name: str) -> bool:
    return bool(name) and not set(name) & {",", "="} and visible(name) == name.strip() != OPEN
