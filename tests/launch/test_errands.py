"""Functions that run on a host in processes of their own: what comes back, whatever they do."""

from __future__ import annotations

import queue
import sys
import time

import pytest

from paceline.cluster.spec import parse_hosts
from paceline.launch.errands import Errand, Reply, run_errands
from paceline.launch.hosts import HostsError, open_hosts

pytestmark = pytest.mark.launcher


def test_errands_side_by_side() -> None:
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        facts = hosts.open("errands", [sys.executable] * 2, grace_s=0.1)
        began_s = time.monotonic()
        found = run_errands(
            hosts,
            facts,
            [
                Errand(host=0, module="operator", argument=None),
                Errand(host=1, module="calendar", argument=["2026", "1"]),
                Errand(host=1, module="no_such_module"),
                Errand(host=0, module="timeit", argument=["-n", "1", "import time; time.sleep(60)"]),
            ],
            timeout_s=3.0,
        )
    assert "cannot import name 'main'" in found[0].problem
    assert found[1] == Reply(value=None), "what it has printed before its value does no harm"
    assert found[2] == Reply(problem="ModuleNotFoundError: No module named 'no_such_module'")
    assert found[3] == Reply(problem="no answer within 3 s")
    assert time.monotonic() - began_s < 30, "closing the channel has ended what was still running"


def test_hosts_that_failed_are_named_by_their_place() -> None:
    with open_hosts(parse_hosts("localhost,127.0.0.1"), queue.SimpleQueue()) as hosts:
        with pytest.raises(HostsError) as raised:
            hosts.open("errands", [sys.executable, "/no/such/python"], grace_s=0.1)
    assert list(raised.value.failures) == [1] and "no Python at /no/such/python" in str(raised.value)
