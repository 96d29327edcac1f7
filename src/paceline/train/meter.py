"""What one rank has done so far: steps, samples, bytes sent, seconds spent waiting for gradients."""

from __future__ import annotations

from collections.abc import Callable

from paceline.events import Event, Progress

_PERIOD_S = 1.0


class Meter:
    """Adds up and tells about once a second. Time comes from `clock_s`, so that tests need not sleep."""

    def __init__(self, *, clock_s: Callable[[], float], tell: Callable[[Event], None], measures_wait: bool) -> None:
        self._clock_s = clock_s
        self._tell = tell
        self._started_s: float | None = None
        self._told_s = clock_s()
        self._bucket_ready_s: float | None = None
        self._logged_samples = 0
        self._logged_s = clock_s()
        self.steps = 0
        self.samples = 0
        self.sent_bytes = 0.0
        self.sync_wait_s: float | None = 0.0 if measures_wait else None

    def begin(self) -> None:
        """The first step begins now, if it has not begun yet."""
        if self._started_s is None:
            self._started_s = self._logged_s = self._clock_s()

    def bucket_ready(self, num_bytes: float) -> None:
        """A bucket of gradients is complete here and `num_bytes` of it go out."""
        self._bucket_ready_s = self._clock_s()
        self.sent_bytes += num_bytes

    def backward_ended(self, num_samples: int) -> None:
        """Since the last bucket was ready this rank has only waited for the others and the wire."""
        self.samples += num_samples
        if self._bucket_ready_s is not None and self.sync_wait_s is not None:
            self.sync_wait_s += self._clock_s() - self._bucket_ready_s
        self._bucket_ready_s = None

    def step_ended(self) -> None:
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
                sent_bytes=round(self.sent_bytes),
            )
        )
