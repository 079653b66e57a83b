"""An unknown file beside what a trace needs: its columns and paths with kind and length, and those
that fit.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, permutations, zip_longest
from types import MappingProxyType
from typing import Any

from mismatch_cli.base.text import visible
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.naming import OPEN, Row, fits, known, said
from mismatch_cli.frameworks.importing.paths import EACH, paths_in

_LOGP = r"log_?p(rob|s?(_|$))|log_?likelihood|(^|_)lps?(_|$)"
_SAMPLED = r"rollout|sampl|infer|behav|vllm|sglang|engine|server|generat"
_TRAINED = r"train|learner|policy|actor|action|current|new|fsdp|megatron|(^|_)(pi|hf)(_|$)"
_EARLIER = r"(^|_)(old|prev)|recomput|prox"
_NOT_SAMPLED = r"(^|_)(ref|reference|teacher|input|prompt|top)"
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
    for name in [*columns]:
        if any(other.startswith(f"{name}.") for other in columns):
            del columns[name]  # an object, or a list of some
    return columns


def guessed(columns: _Columns, given: Mapping[str, str]) -> dict[str, str]:
    """Our names that differ from the file's, with its own, as far as kinds, lengths and names tell;
    `given` ones stay, and `OPEN` marks one of several.

    Empty if nothing can be log μ, or if there is nothing to compare it with: neither token ids nor
    a second side.
    """
    guess = {ours: its for ours, its in given.items() if its != OPEN}
    _take_log_probabilities(columns, guess)
    if "logp_rollout" in guess:
        _take_ids(columns, guess)
    if not {"logp_trainer", "response_ids", "token_ids"} & guess.keys():
        return {}
    for ours, pattern in _NAMES.items():
        if ours != "prompt_ids" or "token_ids" not in guess:
            fitting = _fitting(columns, guess, ours, pattern)
            _take(guess, ours, [name for name in fitting if not _is_whole(columns, guess, name)])
    order = dict.fromkeys((*_WANTED, *known()))
    return {ours: guess[ours] for ours in order if guess.get(ours, ours) != ours}


def log_probabilities(
    columns: _Columns, guess: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The columns that may hold log-probabilities of sampled tokens: by their names, or, if none
    is called so, lists as long as one of ids and without a number above 0.
    """
    every = _fitting(columns, guess, "logp_rollout", _LOGP)
    others = _named(every, _NOT_SAMPLED)
    named = [name for name in every if name not in others and not _has_ids(columns[name])]
    if named:
        return named
    lengths = [list(map(_lengths, values)) for values in filter(_has_ids, columns.values())]
    negative = filter(lambda name: _are_negative(columns[name]), columns)
    return [name for name in negative if list(map(_lengths, columns[name])) in lengths]


def may_be_sampled(name: str) -> bool:
    """Whether a column of this name may hold an engine's log-probabilities."""
    words = _last_names(name)
    others = f"{_TRAINED}|{_EARLIER}|{_NOT_SAMPLED}"
    return bool(re.search(_LOGP, words)) and not re.search(others, words)


def side_by_side(columns: _Columns, guess: Mapping[str, str], file: str) -> str:
    """What is wanted, and what is in the file with its kind and length, the longest first."""
    names = dict.fromkeys((*_WANTED, *guess))
    wanted = ["wanted", *(f"{ours} = {guess.get(ours, '')}" for ours in names)]
    held = sorted(columns, key=lambda name: -_size(columns[name]))[:_MOST_ROWS]
    right = [f"in {file}", *(f"{visible(name)}: {said(columns[name][0])}" for name in held)]
    width = max(map(len, wanted))
    rows = zip_longest(wanted, right, fillvalue="")
    return "\n".join(f"{left:{width}}  {its}".rstrip() for left, its in rows)


def _take(guess: dict[str, str], ours: str, candidates: Sequence[str]) -> None:
    if candidates and ours not in guess:
        known_as = ours if ours in candidates else candidates[0]
        guess[ours] = known_as if known_as == ours or len(candidates) == 1 else OPEN


def _fitting(columns: _Columns, guess: Mapping[str, str], ours: str, pattern: str) -> list[str]:
    """The free columns of our name, or that this pattern finds, whose values fit."""
    return [
        name
        for name, values in columns.items()
        if name not in guess.values()
        and (name == ours or re.search(pattern, _last_names(name)))
        and _all_fit(ours, values)
        and (not _is_per_token(ours, values) or _is_as_long(columns, guess, name))
        and (not ours.endswith("_ids") or _has_ids(values))
    ]


def _all_fit(ours: str, values: Sequence[Any]) -> bool:
    return all(fits(ours, row) for value in values for row in _by_response(ours, value))


def _is_per_token(ours: str, values: Sequence[Any]) -> bool:
    if ours == "advantage":
        return any(map(_lists.depth_of, values))
    return ours in ("loss_mask", "response_mask", "entropy_trainer")


def _is_as_long(columns: _Columns, guess: Mapping[str, str], name: str) -> bool:
    """Whether every row of a column is as long as log μ, response by response."""
    logp = columns.get(guess.get("logp_rollout", ""), columns[name])
    return all(map(_are_as_long, columns[name], logp))


def _take_log_probabilities(columns: _Columns, guess: dict[str, str]) -> None:
    """Those of an engine, or of nobody in particular, are μ; others are the trainer's."""
    every = log_probabilities(columns, guess)
    trained = _named(every, _TRAINED)
    others = [name for name in every if name not in trained]
    _take(guess, "logp_rollout", _named(others, _SAMPLED) or others)
    rest = [name for name in others if name not in guess.values()]
    _take(guess, "logp_trainer", trained or [n for n in rest if not re.search(_SAMPLED, n)])


def _take_ids(columns: _Columns, guess: dict[str, str]) -> None:
    """Ids as long as log μ are the response's, or the sequence's if its mask begins outside."""
    ids = _fitting(columns, guess, "response_ids", "")
    long = [name for name in ids if _is_as_long(columns, guess, name)]
    pairs = permutations(long, 2)
    moved = [(a, b) for a, b in pairs if all(map(_is_moved, columns[a], columns[b]))]
    if moved:
        guess["token_ids"], guess["target_ids"] = moved[0]
    elif _begins_outside(columns, guess):
        _take(guess, "token_ids", long)
    else:
        own = _named(long, _RESPONSE) or long
        are_equal = all(columns[name] == columns[own[0]] for name in own)
        _take(guess, "response_ids", own[:1] if are_equal else own)


def _named(names: Sequence[str], pattern: str) -> list[str]:
    return [name for name in names if re.search(pattern, _last_names(name))]


def _last_names(path: str) -> str:
    """The last two names of a path, in lower case with underscores: camelCase is camel_case."""
    names = [part for part in path.split(".") if part != EACH and not part.isdigit()][-2:]
    return re.sub(r"(?<=[a-z])(?=[A-Z])|\W+", "_", "_".join(names)).lower()


def _begins_outside(columns: _Columns, guess: Mapping[str, str]) -> bool:
    masks = _fitting(columns, guess, "loss_mask", "mask")
    rows = [row for name in masks for row in _by_response("loss_mask", columns[name][0])]
    return bool(rows) and all(row and row[0] in (0, -100) for row in rows)


def _is_moved(tokens: Any, targets: Any) -> bool:
    return isinstance(tokens, list) and isinstance(targets, list) and tokens[1:] == targets[:-1]


def _is_whole(columns: _Columns, guess: Mapping[str, str], name: str) -> bool:
    """Whether a column has prompt and response in one."""
    response = columns.get(guess.get("response_ids", ""), [])
    return any(map(_ends_with, columns[name], response))


def _ends_with(ids: Any, response: Any) -> bool:
    lists = isinstance(ids, list) and isinstance(response, list)
    return lists and 0 < len(response) < len(ids) and ids[-len(response) :] == response


def _has_ids(values: Sequence[Any]) -> bool:
    """Whether these are whole numbers, and more than a mask."""
    if not _all_fit("response_ids", values):
        return False
    rows = chain.from_iterable(_by_response("response_ids", value) for value in values)
    return any(set(row or ()) - {None, 0, 1} for row in rows)


def _are_negative(values: Sequence[Any]) -> bool:
    """Whether these are lists of numbers, none above 0 and not all whole, as labels are."""
    if not _all_fit("logp_rollout", values) or not all(map(_lists.depth_of, values)):
        return False
    rows = chain.from_iterable(_by_response("logp_rollout", value) for value in values)
    numbers = [number for row in rows for number in row or () if number is not None]
    return max(numbers, default=1) <= 0 and any(number % 1 for number in numbers)


def _are_as_long(one: Any, other: Any) -> bool:
    return _lengths(one) == _lengths(other)


def _lengths(value: Any) -> list[int]:
    rows = _by_response("response_ids", value)
    return [len(row) if isinstance(row, list) else 0 for row in rows]


def _by_response(ours: str, value: Any) -> list[Any]:
    """The value of each response: a batch has a list of them."""
    in_list = bool(re.search(_LISTS, ours))
    return value if _lists.depth_of(value) > in_list else [value]


def _size(values: Sequence[Any]) -> int:
    return max(max(_lengths(value), default=0) for value in values)


def _is_evidence(value: Any) -> bool:
    return value is not None and (not isinstance(value, list) or any(v is not None for v in value))


def _can_be_typed(name: str) -> bool:
    return bool(name) and not set(name) & {",", "="} and visible(name) == name.strip() != OPEN
