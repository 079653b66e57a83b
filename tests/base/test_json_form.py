"""Results as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.json_form import beside, beside_if_any, from_json, left_out_if_none, to_json
from mismatch_cli.metrics.estimate import Estimate


@dataclass(frozen=True)
class Part:
    low: int


@dataclass(frozen=True)
class Other:
    name: str


@dataclass(frozen=True)
class Noise:
    floor: float
    times: float | None


@dataclass(frozen=True)
class Measured(Estimate):
    noise: Noise | None = beside_if_any()


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    from_: float
    share: Estimate
    metrics: Mapping[str, Estimate] = beside()
    note: str | None = left_out_if_none()
    ends: tuple[float, float] | None = None
    parts: tuple[Part | Other, ...] = ()
    times: float | str | None = None
    free: Mapping[str, object] | None = None


FULL = Row(
    name="a",
    from_=0.5,
    share=Estimate(0.1, 0.0, 0.2),
    metrics={"k1": Estimate(1.0), "k2": Estimate(None, note="not measured")},
    note="few",
    ends=(1.0, 2.0),
    parts=(Part(1), Other("b")),
    times="below resolution",
    free={"any": [1, {"thing": None}]},
)


def test_the_keys_are_the_fields_in_their_order():
    content = to_json(FULL)
    assert list(content) == [
        *("name", "from", "share", "k1", "k2", "note", "ends", "parts", "times", "free")
    ]
    assert content["share"] == {"value": 0.1, "low": 0.0, "high": 0.2, "note": None}
    assert content["parts"] == [{"low": 1}, {"name": "b"}]


def test_a_stored_result_is_read_as_it_was_written():
    for row in (FULL, Row(name="b", from_=1, share=Estimate(None))):
        content = json.loads(json.dumps(to_json(row)))
        assert from_json(Row, content) == row
        assert to_json(from_json(Row, content)) == content


def test_a_field_without_a_value_may_have_no_key():
    bare = to_json(Row(name="b", from_=1, share=Estimate(None)))
    assert "note" not in bare and bare["ends"] is None


def test_a_missing_key_is_named():
    with pytest.raises(MismatchError, match="Row lacks from"):
        from_json(Row, {"name": "a", "share": {"value": 1.0}})


def test_a_key_of_a_later_version_is_ignored():
    assert from_json(Part, {"low": 1, "new": 2}) == Part(1)


def test_a_part_may_be_written_beside_the_other_fields():
    noisy, plain = Measured(1.0, noise=Noise(0.5, None)), Measured(1.0)
    assert list(to_json(noisy)) == ["value", "low", "high", "note", "floor", "times"]
    assert list(to_json(plain)) == ["value", "low", "high", "note"]
    for measured in (noisy, plain):
        assert from_json(Measured, to_json(measured)) == measured
