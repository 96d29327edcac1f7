"""Numbers that people give: within their bounds, or an error that says which these are."""

from __future__ import annotations

import math

from paceline.errors import InputError


def short(number: float) -> str:
    """As few digits as give the same number when they are read again."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


MOST_STEPS = 1_000_000_000
"""More steps than anybody trains."""
_LARGEST = 1e300  # whole numbers above it can't be compared with what is infinite
_SHOWN_CHARACTERS = 60


def shown(text: str) -> str:
    """What somebody typed, in a message: not longer than a line, and nothing in it that moves the cursor."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def require_whole(name: str, value: object, *, at_least: int, at_most: int | None = None, because: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least or (at_most or value) < value:
        most = f" and at most {at_most}" if at_most == MOST_STEPS and not because else ""
        reason = f", {because}" if because else ""
        raise InputError(f"{name} is {shown(repr(value))}; expected a whole number, at least {at_least}{most}{reason}")


def require_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float = math.inf,
    at_most: float = math.inf,
) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
        low = (above is None or value > above) and (at_least is None or value >= at_least)
        if low and value < below and value <= at_most:
            return
    bounds = [
        f"above {above:g}" if above is not None else f"at least {at_least:g}",
        f"below {below:g}" if math.isfinite(below) else f"at most {at_most:g}" if math.isfinite(at_most) else "",
    ]
    raise InputError(f"{name} is {shown(repr(value))}; expected a number {' and '.join(filter(None, bounds))}")
