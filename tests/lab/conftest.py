"""One lab for all lab tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from paceline.lab import Lab, missing

GIGABIT_PER_S = 10**9


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skips where there can be no lab, and says why."""
    absent = missing()
    if absent:
        pytest.skip(f"no lab on this machine, it lacks {'; '.join(item.what for item in absent)}")


@pytest.fixture(scope="session")
def lab(lab_machine: None) -> Iterator[Lab]:
    """Four hosts at 1 Gb/s. Tied: it ends with this process even if that is killed."""
    with Lab.up(f"test-{os.getpid()}", num_hosts=4, rate_bits_per_s=GIGABIT_PER_S, tied=True) as lab:
        yield lab
