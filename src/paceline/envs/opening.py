"""The hosts that can be opened, and why the others can't."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
from collections.abc import Generator, Sequence

from paceline.cluster.spec import Host
from paceline.errors import HostError
from paceline.launch.facts import Facts
from paceline.launch.hosts import Hosts, HostsError, open_hosts
from paceline.launch.signals import signals_into

_GRACE_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """Open channels."""

    hosts: Hosts
    facts: list[Facts]
    places: list[int]
    """Of each open host its place among those that were asked for."""
    failures: dict[int, HostError]
    """Of the others, by their place."""

    def name(self, index: int) -> str:
        return self.hosts.hosts[index].name


@contextlib.contextmanager
def open_some(hosts: Sequence[Host], pythons: Sequence[Sequence[str]]) -> Generator[Opened]:
    """Opens those that can be opened. `pythons`: of each host the interpreters to try, in order.

    Raises InterruptedEarlyError for a signal.
    """
    left = {place: list(candidates) for place, candidates in enumerate(pythons)}
    failures: dict[int, HostError] = {}
    while True:
        places = sorted(place for place, candidates in left.items() if candidates)
        with contextlib.ExitStack() as stack:
            inbox = stack.enter_context(signals_into(queue.SimpleQueue()))
            opened = stack.enter_context(open_hosts([hosts[place] for place in places], inbox))
            run_id = f"env-{secrets.token_hex(4)}"
            try:
                facts = opened.open(run_id, [left[place][0] for place in places], grace_s=_GRACE_S)
            except HostsError as error:
                for index, failure in error.failures.items():
                    failures.setdefault(places[index], failure)  # the first choice's reason says most
                    left[places[index]].pop(0)
                continue
            kept = {place: failure for place, failure in failures.items() if place not in places}
            yield Opened(hosts=opened, facts=facts, places=places, failures=kept)
            return
