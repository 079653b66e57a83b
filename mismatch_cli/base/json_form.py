"""Dataclasses as JSON and back, for every result: the names of the fields are the keys.

@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    from_: float                                  # the key `from`, which is a word of Python
    share: Estimate                               # {"value": …, "low": …, "high": …, "note": …}
    text: str | None = left_out_if_none()         # no key where it is None
    metrics: Mapping[str, Estimate] = beside()    # its entries are keys of the row itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mismatch_cli.base.errors import MismatchError

T = TypeVar("T")
_FORM = "json_form"
_LEFT_OUT = "left out if none"
_BESIDE = "beside the others"


def left_out_if_none() -> Any:
    """A field without a key in JSON where it is None."""
    return field(default=None, metadata={_FORM: _LEFT_OUT})


def beside() -> Any:
    """A field with a mapping whose entries are written beside the other fields, at its place."""
    return field(default_factory=dict, metadata={_FORM: _BESIDE})


def beside_if_any() -> Any:
    """A field with a dataclass, or None, whose fields are written beside the others."""
    return field(default=None, metadata={_FORM: _BESIDE})


def to_json(value: Any) -> Any:
    """The value with every dataclass in it as a dict, in the order of its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return _object(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def _object(value: Any) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for each in fields(value):
        item = getattr(value, each.name)
        form = each.metadata.get(_FORM)
        if form == _BESIDE:
            content |= to_json(item or {})
        elif item is not None or form != _LEFT_OUT:
            content[_key(each)] = to_json(item)
    return content


def _key(each: Field[Any]) -> str:
    return each.name.removesuffix("_")


def from_json(kind: type[T], content: Any) -> T:
    """The inverse of `to_json` for a type: unknown keys are ignored, absent ones get the default.

    Raises a `MismatchError` that names the type and the key if one without a default is absent.
    """
    return cast(T, _read(kind, content))


def _read(kind: Any, content: Any) -> Any:
    """The value of a type, such as `Row`, `Row | None`, `list[Row]` or `dict[str, Row]`."""
    if is_dataclass(kind):
        return _read_object(cast(type, kind), content)
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, UnionType):
        return _read(_member_for(content, inner), content)
    if isinstance(content, list) and inner:
        return _read_list(origin, inner, content)
    if isinstance(content, dict) and len(inner) == 2:
        return {key: _read(inner[1], item) for key, item in content.items()}
    return content


def _read_list(origin: Any, inner: tuple[Any, ...], content: list[Any]) -> Any:
    has_type_for_each = origin is tuple and inner[-1:] != (...,)
    if has_type_for_each:
        return tuple(_read(each, item) for each, item in zip(inner, content, strict=True))
    items = [_read(inner[0], item) for item in content]
    return items if origin is list else tuple(items)


def _member_for(content: Any, union: Sequence[Any]) -> Any:
    """The member of a union that some content is of: a dataclass with these keys, or a
    collection.
    """
    if content is None:
        return NoneType
    if isinstance(content, dict):
        for kind in filter(is_dataclass, union):
            if _required(cast(type, kind)) <= content.keys():
                return kind
    for kind in union:
        if get_args(kind):
            return kind
    return Any


@cache
def _required(kind: type) -> frozenset[str]:
    """The keys that an object of this type must have."""
    return frozenset(_key(each) for each in fields(kind) if not _has_default(each))


def _has_default(each: Field[Any]) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


# Annotations are texts, and evaluating them takes longer than reading an object.
_types = cache(get_type_hints)


def _read_object(kind: type, content: Mapping[str, Any]) -> Any:
    absent = sorted(_required(kind) - content.keys())
    if absent:
        raise MismatchError(f"The JSON of a {kind.__name__} lacks {absent[0]}. Make it again.")
    types = _types(kind)
    names = {_key(each): each.name for each in fields(kind)}
    values = {}
    others = {}
    for key, item in content.items():
        if key in names:
            name = names[key]
            values[name] = _read(types[name], item)
        else:
            others[key] = item
    for each in fields(kind):
        if each.metadata.get(_FORM) == _BESIDE:
            values[each.name] = _read_beside(types[each.name], others)
    return kind(**values)


def _read_beside(kind: Any, others: Mapping[str, Any]) -> Any:
    """The value of a field from the keys that are no other field's: a mapping of them, or the
    dataclass of a union with None; None where its keys are absent.
    """
    if get_origin(kind) not in (Union, UnionType):
        return _read(kind, others)
    member = cast(type, next(filter(is_dataclass, get_args(kind))))
    if not _required(member) <= others.keys():
        return None
    return _read_object(member, others)
