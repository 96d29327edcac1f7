"""The police around each test, pools of real ranks, the tiers, and the last lines of a test run."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import pathlib
from collections import Counter
from collections.abc import Iterator

import pytest

import police
from rank_pool import RankPool

# Tier -> seconds that one test of it may take before it is listed.
TIERS = {"pure": 1.0, "ranks": 10.0, "launcher": 10.0, "lab": 30.0}
# Where even the time limit's signal can't reach (in a C call that hangs), the process ends with all stacks.
HARD_LIMIT_GRACE_S = 20.0

os.environ[police.MARK] = str(os.getpid())


@dataclasses.dataclass
class Tier:
    """What happened to the tests of one tier."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    duration_s: float = 0.0


@dataclasses.dataclass
class Ledger:
    """What the last lines are made from."""

    tiers: dict[str, Tier] = dataclasses.field(default_factory=lambda: {name: Tier() for name in TIERS})
    tier_of: dict[str, str] = dataclasses.field(default_factory=dict)
    slow: list[tuple[float, str, str]] = dataclasses.field(default_factory=list)


_LEDGER = pytest.StashKey[Ledger]()
_pools: list[RankPool] = []
_STDERR = pytest.StashKey[int]()


def find_tier(path: pathlib.Path, markers: set[str]) -> str:
    """By marker, else by folder, else pure."""
    for name in reversed(TIERS):
        if name in markers or name in path.parts:
            return name
    return "pure"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEDGER] = Ledger()
    config.stash[_STDERR] = os.dup(2)  # the real one: output is not captured yet
    config.pluginmanager.register(_Recorder(config.stash[_LEDGER]))


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)  # before any test is deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ledger = config.stash[_LEDGER]
    for item in items:
        tier = find_tier(item.path.relative_to(config.rootpath), {marker.name for marker in item.iter_markers()})
        ledger.tier_of[item.nodeid] = tier
        if item.get_closest_marker("large") and "PACELINE_LARGE_TESTS" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="one of a kind that runs: PACELINE_LARGE_TESTS=1"))
    items.sort(key=lambda item: list(TIERS).index(ledger.tier_of[item.nodeid]))  # what is cheap fails first


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 60)
    stderr = item.config.stash[_STDERR]
    faulthandler.dump_traceback_later(limit_s + HARD_LIMIT_GRACE_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaked, naming what; see `tests/police.py`."""
    before, environ, folder = police.take_snapshot(), dict(os.environ), os.getcwd()
    yield
    leaks = police.find_leaks(before)
    gone = environ.keys() - os.environ.keys() - {"PYTEST_CURRENT_TEST"}
    if leaks or gone:
        lines = [police.describe(leaks), *(f"environment variable removed: {name}" for name in sorted(gone))]
        with contextlib.suppress(OSError):
            os.chdir(folder)
        police.clean_up(leaks, environ)
        pytest.fail("this test left behind:\n" + "\n".join(lines).strip(), pytrace=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The last test of the ranks tier has ended: what waits for nothing any more would only use the processor."""
    if item.config.stash[_LEDGER].tier_of[item.nodeid] in ("launcher", "lab"):
        for pool in _pools:
            pool.stop()


def _pool(size: int) -> Iterator[RankPool]:
    pool = RankPool(size)
    _pools.append(pool)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks_of_session() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks_of_session() -> Iterator[RankPool]:
    yield from _pool(4)


def _kept_fresh(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    failed_before = request.session.testsfailed
    yield pool
    if request.session.testsfailed > failed_before or pool.is_worn:
        with police.lasting():
            pool.stop()
            pool.start()


@pytest.fixture
def two_ranks(two_ranks_of_session: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from _kept_fresh(two_ranks_of_session, request)


@pytest.fixture
def four_ranks(four_ranks_of_session: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from _kept_fresh(four_ranks_of_session, request)


class _Recorder:
    """Counts each report into its tier."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier_name = self.ledger.tier_of[report.nodeid]
        tier = self.ledger.tiers[tier_name]
        tier.duration_s += report.duration
        if report.failed:
            tier.outcomes["failed"] += 1
        elif report.skipped:
            tier.outcomes["skipped"] += 1
            tier.reasons[_read_reason(report)] += 1
        elif report.when == "call":
            tier.outcomes["passed"] += 1
        if report.when == "call" and report.duration > TIERS[tier_name]:
            self.ledger.slow.append((report.duration, tier_name, report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            tier = self.ledger.tiers[find_tier(pathlib.Path(report.nodeid), set())]
            tier.outcomes["skipped"] += 1
            tier.reasons[_read_reason(report)] += 1

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.ledger.tiers[self.ledger.tier_of[item.nodeid]].outcomes["deselected"] += 1


def _read_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return getattr(report, "wasxfail", "") or "expected to fail"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ledger = config.stash[_LEDGER]
    terminalreporter.section("tiers")
    for name, tier in ledger.tiers.items():
        ran = tier.outcomes["passed"] + tier.outcomes["failed"]
        what = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tier.outcomes.items()))
        state = f"ran      {tier.duration_s:6.1f} s  " if ran else "not run           "
        terminalreporter.write_line(f"{name:10}{state}{what or 'no test asked for'}")
        for reason, count in tier.reasons.most_common():
            terminalreporter.write_line(f"{'':10}skipped {count}: {reason}")
    for duration_s, tier_name, nodeid in sorted(ledger.slow, reverse=True)[:20]:
        limit = f"over the {tier_name} tier's {TIERS[tier_name]:g} s"
        terminalreporter.write_line(f"slow: {duration_s:.1f} s, {limit}: {nodeid}")
