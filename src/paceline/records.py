"""Frozen, keyword-only records, as `dataclass(frozen=True, kw_only=True)` makes them, but cheap to define.

dataclasses writes and compiles six methods for each class: about a millisecond each, and a fifth of an agent's start,
which every host pays while the user waits. Used where agents and ranks import; elsewhere plain dataclasses will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Any:
        """For type checkers only."""
        return lambda cls: cls


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """The base: a subclass's annotations are its fields, the values they are given there the defaults."""

    field_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        # Annotations are text here, as every module of ours imports them from __future__.
        own = [name for name, kind in cls.__annotations__.items() if not str(kind).startswith("ClassVar")]
        cls.field_names = (*cls.field_names, *own)

    def __init__(self, **values: Any) -> None:
        """Raises TypeError for a field that is missing or unknown."""
        if unknown := values.keys() - set(self.field_names):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        for name in self.field_names:
            if name not in values and not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} needs {name}")
        self.__dict__.update(values)

    def as_dict(self) -> dict[str, Any]:
        """Field names and values, in order."""
        return {name: getattr(self, name) for name in self.field_names}

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return type(self)(**{**self.as_dict(), **changes})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.as_dict() == other.as_dict()  # type: ignore[union-attr]

    def __hash__(self) -> int:
        return hash((type(self), *self.as_dict().values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"{type(self).__name__}({values})"
