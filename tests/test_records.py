"""Records behave as frozen keyword-only dataclasses do."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from paceline.records import Record


class Base(Record):
    kind: ClassVar[str] = "base"


class Point(Base):
    """One."""

    kind: ClassVar[str] = "point"
    x: int
    y: float = 2.0
    """With a default."""


class Named(Point):
    name: str


def test_fields_and_defaults() -> None:
    point = Point(x=1)
    assert (point.x, point.y, point.kind) == (1, 2.0, "point")
    assert Point.field_names == ("x", "y") and Named.field_names == ("x", "y", "name")
    assert point.as_dict() == {"x": 1, "y": 2.0} and repr(point) == "Point(x=1, y=2.0)"


@pytest.mark.parametrize(("values", "words"), [({}, "Point needs x"), ({"x": 1, "z": 2}, "Point has no field z")])
def test_wrong_fields(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Point(**values)


def test_equal_by_value_and_class_and_usable_in_sets() -> None:
    assert Point(x=1) == Point(x=1, y=2.0) != Point(x=2)
    assert Point(x=1) != Named(x=1, name="a") and Point(x=1) != (1, 2.0)
    assert len({Point(x=1), Point(x=1), Point(x=2)}) == 2


def test_frozen_and_replaced() -> None:
    point = Point(x=1)
    with pytest.raises(AttributeError, match="Point is frozen"):
        point.x = 3  # type: ignore[misc]
    assert point.replace(x=3) == Point(x=3) and point.x == 1


def test_patterns_match_by_attribute() -> None:
    match Point(x=5):
        case Point(x=5, y=y):
            assert y == 2.0
        case _:
            pytest.fail("no match")
