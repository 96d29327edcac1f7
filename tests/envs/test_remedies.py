"""What can't be had says what mends it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from made_up_packages import installed, inventory

from made_up_hosts import DETAILS, FACTS
from paceline.checks.host_states import Reading
from paceline.cli.env import app
from paceline.cluster.spec import parse_hosts
from paceline.envs import job, sync, table
from paceline.envs.lock import make_lock
from paceline.envs.opening import Opened
from paceline.envs.options import SyncOptions
from paceline.errors import HostError, InputError
from paceline.launch.errands import Reply

HOSTS: Any = SimpleNamespace(hosts=parse_hosts("alice,bob"))
OPENED = Opened(hosts=HOSTS, facts=[FACTS, FACTS.replace(gpus=["L4"])], places=[0, 1], failures={})
OPTIONS = SyncOptions(hosts=parse_hosts("alice,bob"), source=parse_hosts("carol")[0], offline=True)


def fail(*_: object, **__: object) -> list[Reply]:
    return [Reply(problem="it hung")] * 2


def test_two_sources_are_one_too_many() -> None:
    done = CliRunner().invoke(app, ["sync", "-H", "alice,bob", "--from", "alice,bob"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).splitlines() == [
        "--from alice,bob: expected one host",
        "  paceline env sync -H HOST,... --from alice",
    ]


def test_a_host_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "run_errands", fail)
    found = inventory(installed("a"))
    lock = make_lock(found, offline=True)
    outcomes = job.Job(options=OPTIONS, inventory=found, lock=lock, opened=OPENED, tell=lambda *_: None).do()
    assert [(outcome.text, outcome.remedy) for outcome in outcomes.values()] == [
        ("can't be looked at: it hung", "paceline check -H alice"),
        ("can't be looked at: it hung", "paceline check -H bob"),
    ]


def test_a_source_that_cannot_say_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def open_source(_: SyncOptions) -> Iterator[Opened]:
        yield Opened(hosts=HOSTS, facts=[FACTS], places=[0], failures={})

    for module in (sync, job):
        monkeypatch.setattr(module, "run_errands", lambda *_, **__: [Reply(problem="KeyError: 'Name'")])
        monkeypatch.setattr(module, "open_source", open_source)
    by_hand = f"On carol:  {FACTS.python_path} -m pip check"
    with pytest.raises(HostError, match="carol: can't say what is installed: KeyError: 'Name'") as raised:
        sync.sync(OPTIONS, lambda *_: None)
    assert raised.value.hint == by_hand
    found = inventory(installed("a"))
    lock = make_lock(found, offline=True)
    asked = job.Job(options=OPTIONS, inventory=found, lock=lock, opened=OPENED, tell=lambda *_: None)
    with pytest.raises(HostError, match="carol: can't list the installed files: KeyError: 'Name'") as raised:
        asked._collect()
    assert raised.value.hint == by_hand


def test_a_host_that_cannot_tell_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [
        Reading(details=DETAILS, clock_ahead_s=(0.0, 0.1)),
        Reading(details=None, clock_ahead_s=(0.0, 0.0), problem="it hung"),
    ]
    monkeypatch.setattr(table, "read_details", lambda *_: readings)
    with pytest.raises(HostError, match="bob: a process there could not read its details: it hung") as raised:
        table.meet(OPENED)
    assert raised.value.hint == "paceline check -H bob"
    readings[1] = readings[0]
    alice, bob = table.meet(OPENED)
    assert (alice.name, alice.slots, alice.num_gpus) == ("alice", 1, 0) and (bob.name, bob.num_gpus) == ("bob", 1)
