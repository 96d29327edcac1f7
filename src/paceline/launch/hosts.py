"""All hosts of a run at once: open the channels, ask every host the same kind of question, keep the line alive."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeVar

from paceline.cluster.spec import Host
from paceline.errors import HostError, PacelineError
from paceline.launch import bootstrap, protocol
from paceline.launch.facts import Facts
from paceline.launch.transport import Channel, Closed, Inbox, Received, Signalled, open_channel

HEARTBEAT_S = 1.0
HOST_SILENCE_LIMIT_S = 7.0
"""A host that was not heard for this long is gone."""
LEASE_S = 12.0
"""A host that has not heard the driver for this long ends the run on its side."""
START_LIMIT_S = 30.0
"""For ssh, the agent's start and the host's facts."""

M = TypeVar("M", bound=protocol.Message)


class InterruptedEarlyError(PacelineError):
    """A signal came before the first rank was started."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped before the ranks were started")
        self.number = number
        self.exit_code = 128 + number


class HostsError(HostError):
    """One or several hosts can't take part; `failures` has the reason of each, by its index."""

    def __init__(self, failures: Mapping[int, HostError]) -> None:
        self.failures = dict(sorted(failures.items()))
        first, *others = self.failures.values()
        if not others:
            super().__init__(first.message, hint=first.hint)
            return
        reasons = (
            f"  {failure.message}" + (f"\n    {failure.hint}" if failure.hint else "")
            for failure in self.failures.values()
        )
        super().__init__("\n".join([f"{len(failures)} hosts can't take part", *reasons]))


class Hosts:
    """The open channels to the hosts of one run."""

    def __init__(self, hosts: Sequence[Host], inbox: Inbox) -> None:
        self.hosts = hosts
        self.inbox = inbox
        self.channels: list[Channel] = []
        self.clock_offset_s: list[float] = [0.0] * len(hosts)
        """Add it to a host's monotonic time to get the driver's."""
        self.closed: dict[int, HostError] = {}
        """Hosts whose channel has ended, by index, and why; it is said once, to whoever waits then."""
        self.run_id = ""
        self.runtime_digest = ""
        """Names the folder on each host in which this package now lies."""
        self._stop_heart = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    def open(self, run_id: str, pythons: Sequence[str], *, grace_s: float) -> list[Facts]:
        """Start an agent on every host; the facts of each. Raises HostsError."""
        self.run_id = run_id
        failures: dict[int, HostError] = {}
        for index, (host, python) in enumerate(zip(self.hosts, pythons, strict=True)):
            try:
                self.channels.append(open_channel(index, host, python, self.inbox))
            except HostError as error:
                failures[index] = error
        if failures:
            raise HostsError(failures)
        self.runtime_digest, data = bootstrap.pack_runtime()  # while ssh shakes hands
        for channel in self.channels:
            channel.send_bytes(bootstrap.first_bytes(self.runtime_digest, data))
        hellos = self._gather(protocol.Hello, START_LIMIT_S, "start the agent", range(len(self.hosts)))
        for index, (hello, at_s) in hellos.items():
            self.clock_offset_s[index] = at_s - hello.monotonic_s
        for index, channel in enumerate(self.channels):
            setup = protocol.Setup(
                run_id=run_id,
                host_index=index,
                lease_s=LEASE_S,
                heartbeat_s=HEARTBEAT_S,
                grace_s=grace_s,
            )
            channel.send(setup)
        self._heart.start()
        return [Facts(**hellos[index][0].facts) for index in range(len(self.hosts))]

    def ask(
        self, questions: Mapping[int, protocol.Message], answer: type[M], *, timeout_s: float, doing: str
    ) -> dict[int, M]:
        """Send each host its question and wait for all answers. Raises HostsError."""
        for index, question in questions.items():
            self.channels[index].send(question)
        return self.gather(answer, questions, timeout_s=timeout_s, doing=doing)

    def gather(
        self,
        answer: type[M],
        indices: Iterable[int],
        *,
        timeout_s: float,
        doing: str,
        last_moved_s: Callable[[], float] | None = None,
    ) -> dict[int, M]:
        """Wait for one answer of each of these hosts, `timeout_s` from now or from when something last moved."""
        answers = self._gather(answer, timeout_s, doing, indices, last_moved_s)
        return {index: message for index, (message, _) in answers.items()}

    def _gather(
        self,
        answer: type[M],
        timeout_s: float,
        doing: str,
        wanted: Iterable[int],
        last_moved_s: Callable[[], float] | None = None,
    ) -> dict[int, tuple[M, float]]:
        waiting = set(wanted)
        answers: dict[int, tuple[M, float]] = {}
        failures = {index: self.closed[index] for index in waiting & self.closed.keys()}
        waiting -= failures.keys()
        deadline = time.monotonic() + timeout_s
        while waiting:
            try:
                received = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if last_moved_s is not None and last_moved_s() + timeout_s > deadline:
                    deadline = last_moved_s() + timeout_s
                    continue
                for index in waiting:
                    text = f"{self.hosts[index].name}: no answer within {timeout_s:.0f} s when asked to {doing}"
                    failures[index] = HostError(text, hint=f"try: ssh {self.hosts[index].ssh_destination} true")
                break
            match received:
                case Signalled():
                    raise InterruptedEarlyError(received.number)
                case Closed():
                    self.closed[received.host_index] = failures[received.host_index] = received.reason
                    waiting.discard(received.host_index)
                case Received():
                    if isinstance(received.message, answer):
                        answers[received.host_index] = (received.message, received.at_s)
                        waiting.discard(received.host_index)
                    elif isinstance(received.message, protocol.Problem):
                        problem = received.message
                        text = f"{self.hosts[received.host_index].name}: cannot {doing}: {problem.message}"
                        failures[received.host_index] = HostError(text, hint=problem.hint or None)
                        waiting.discard(received.host_index)
        if failures:
            raise HostsError(failures)
        return answers

    def find_silent(self) -> dict[int, HostError]:
        """Hosts that were not heard for too long, though their channel is open: stopped, or cut off."""
        now_s = time.monotonic()
        return {
            index: HostError(
                f"{channel.host.name}: not heard for {HOST_SILENCE_LIMIT_S:.0f} s (machine down, stopped, or network)",
                hint=f"try: ssh {channel.host.ssh_destination} true",
            )
            for index, channel in enumerate(self.channels)
            if index not in self.closed and now_s - channel.heard_at_s > HOST_SILENCE_LIMIT_S
        }

    def close(self) -> None:
        """Close every channel, which ends everything on every host; all at the same time."""
        self._stop_heart.set()
        closers = [threading.Thread(target=channel.close) for channel in self.channels]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        if self._heart.is_alive():
            self._heart.join()

    def _beat(self) -> None:
        while not self._stop_heart.wait(HEARTBEAT_S):
            for channel in self.channels:
                if channel.waiting < 2:  # else it is being written to, or stuck: more would only pile up
                    channel.send(protocol.Heartbeat())


@contextlib.contextmanager
def open_hosts(hosts: Sequence[Host], inbox: Inbox) -> Generator[Hosts]:
    """The channels are closed, and so everything on the hosts is ended, whatever happens."""
    opened = Hosts(hosts, inbox)
    try:
        yield opened
    finally:
        opened.close()
