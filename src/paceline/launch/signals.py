"""The signals that ask a process to end, as messages of the inbox that the driver reads anyway."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator

from paceline.launch.transport import Inbox, Signalled


@contextlib.contextmanager
def signals_into(inbox: Inbox) -> Generator[Inbox]:
    """SIGINT, SIGTERM and SIGHUP become messages; Ctrl-Z, which would starve the hosts' leases, does nothing."""

    def forward(number: int, frame: object) -> None:
        inbox.put(Signalled(number=number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield inbox
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
