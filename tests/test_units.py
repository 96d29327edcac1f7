"""Numbers as people read them."""

from __future__ import annotations

import pytest

from paceline.units import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1234567, "1.2 MB"),
        (4.7e9, "4.7 GB"),
        (2e15, "2000.0 TB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (10, "10s"),
        (59.6, "1m00s"),
        (75.2, "1m15s"),
        (3599.7, "1h00m00s"),
        (7384, "2h03m04s"),
    ],
)
def test_duration(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (12.34, "12.3"),
        (999, "999"),
        (41234, "41.2k"),
        (6.2e7, "62.0M"),
        (3e9, "3.0G"),
    ],
)
def test_count(count: float, text: str) -> None:
    assert format_count(count) == text
