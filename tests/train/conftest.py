"""Pools of real ranks, started once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool

import police


def _pool(size: int) -> Iterator[RankPool]:
    pool = RankPool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks_of_session() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks_of_session() -> Iterator[RankPool]:
    yield from _pool(4)


def _fresh_after_failure(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    failed_before = request.session.testsfailed
    yield pool
    if request.session.testsfailed > failed_before:
        with police.lasting():
            pool.stop()
            pool.start()


@pytest.fixture
def two_ranks(two_ranks_of_session: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from _fresh_after_failure(two_ranks_of_session, request)


@pytest.fixture
def four_ranks(four_ranks_of_session: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from _fresh_after_failure(four_ranks_of_session, request)
