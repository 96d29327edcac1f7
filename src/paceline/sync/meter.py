"""What one rank has done so far: steps, samples, bytes sent to other hosts, seconds spent waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.events import Event, Progress

_PERIOD_S = 1.0


class Traffic:
    """What this rank has sent, counted where it is sent."""

    def __init__(self) -> None:
        self.sent_bytes = 0.0
        """To other hosts. What the ranks of a host send each other is not counted."""
        self.num_collectives = 0
        """All, those within the host included."""
        self._lock = threading.Lock()

    def count(self, num_bytes: float) -> None:
        with self._lock:
            self.sent_bytes += num_bytes
            self.num_collectives += 1


class Meter:
    """Adds up and tells about once a second. Time comes from `clock_s`, so that tests need not sleep."""

    def __init__(self, *, clock_s: Callable[[], float], tell: Callable[[Event], None], measures_wait: bool) -> None:
        self._clock_s = clock_s
        self._tell = tell
        self._started_s: float | None = None
        self._told_s = clock_s()
        self._ready_s = self._done_s = clock_s()
        self._logged_samples = 0
        self._logged_s = clock_s()
        self.traffic: list[Traffic] = []
        """Where the bytes sent to other hosts are counted."""
        self.steps = 0
        self.samples = 0
        self.sync_wait_s: float | None = 0.0 if measures_wait else None

    def begin(self) -> None:
        """The first step begins now, if it has not begun yet."""
        if self._started_s is None:
            self._started_s = self._logged_s = self._clock_s()

    def bucket_ready(self) -> None:
        """A bucket of gradients is complete here and goes out."""
        self._ready_s = self._clock_s()

    def bucket_done(self) -> None:
        """A bucket of averaged gradients has come in; told from any thread."""
        self._done_s = self._clock_s()

    def backward_ended(self, num_samples: int) -> None:
        """From when the last bucket was ready until the last one came in, this rank has only waited."""
        self.samples += num_samples
        self.waited(max(0.0, self._done_s - self._ready_s))
        self._ready_s = self._done_s

    def waited(self, seconds: float) -> None:
        """This rank has done nothing else for so long."""
        if self.sync_wait_s is not None:
            self.sync_wait_s += seconds

    def step_ended(self) -> None:
        """One more attempt at a step, be it skipped by a gradient scaler."""
        self.steps += 1
        if self._clock_s() - self._told_s >= _PERIOD_S:
            self.tell()

    def take_logged(self) -> tuple[int, float]:
        """Samples of this rank, and seconds, since this was last asked."""
        now = self._clock_s()
        taken = self.samples - self._logged_samples, now - self._logged_s
        self._logged_samples, self._logged_s = self.samples, now
        return taken

    def tell(self) -> None:
        """Sends the totals; nothing before the first step."""
        if self._started_s is None:
            return
        self._told_s = self._clock_s()
        self._tell(
            Progress(
                steps=self.steps,
                samples=self.samples,
                since_first_step_s=self._told_s - self._started_s,
                sync_wait_s=self.sync_wait_s,
                sent_bytes=round(sum(traffic.sent_bytes for traffic in self.traffic)),
            )
        )
