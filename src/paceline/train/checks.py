"""What a script may pass, checked where it comes in. Each refusal is an InputError that names the argument, what
it was and what was expected."""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InputError
from paceline.strategy import EveryStep, Outer, Strategy

_SHOWN_CHARACTERS = 60


def whole(name: str, value: Any, expected: str, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """`value` as an int: what counts as one (also numpy's), but no bool and no tensor."""
    try:
        if isinstance(value, (bool, torch.Tensor)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise InputError(f"{name} is {_shown(value)}; expected {expected}")
    return number


def one_number(name: str, value: Any) -> float:
    """`value` as a float, from a number or a tensor with one real element; NaN and infinities are numbers too."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise InputError(f"{name} is {_shown(value)}; expected one real number, such as its mean")
        return float(value.item())
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} is {_shown(value)}; expected one real number") from None


def bounded(name: str, value: Any, expected: str, *, at_least: float, at_most: float) -> float:
    """`value` as a float in a range, which NaN is not in."""
    number = one_number(name, value)
    if not at_least <= number <= at_most or not math.isfinite(number):
        raise InputError(f"{name} is {_shown(value)}; expected {expected}")
    return number


def folder(asked: str, value: Any) -> Path:
    """`value` as a path that an operating system can be asked for."""
    try:
        text = os.fsdecode(value)
    except TypeError:
        text = None
    if not text or "\0" in text:
        raise InputError(f"{asked}: folder is {_shown(value)}; expected the path of a folder")
    return Path(text)


def strategy(name: str, value: Any) -> Strategy:
    """`value`, if it says how to synchronise."""
    if not isinstance(value, (EveryStep, Outer)):
        hint = f"from text: {name}=paceline.parse_sync({value!r})" if isinstance(value, str) else None
        raise InputError(f"{name} is {_shown(value)}; expected an EveryStep or an Outer", hint=hint)
    return value


def printable(text: str) -> str:
    """`text` with whatever would move the cursor, or can't be encoded, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, os.PathLike)):
        try:
            text = repr(value)
        except ValueError:  # of an int with thousands of digits
            return f"an {type(value).__name__} that is too long to show"
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return f"a {type(value).__name__}"
