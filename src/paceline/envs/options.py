"""What is asked of `paceline env sync`, and what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator
from typing import Literal

from paceline.cluster.spec import Host
from paceline.envs.opening import Opened, open_some

Status = Literal["made", "there", "planned", "failed"]
Tell = Callable[[str, str, bool], None]
"""(host, what is going on there, whether the next such line replaces it)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """One `paceline env sync`."""

    hosts: tuple[Host, ...]
    """Those that are to get it; the source itself is left out."""
    source: Host
    """Whose environment it is."""
    python: str | None = None
    """The source's interpreter; None: its own in the hostfile, or the path of the one that runs paceline."""
    offline: bool = False
    """Send the installed files, instead of letting each host install from its own index."""
    to: str | None = None
    """The environment's folder on the hosts; None: one in paceline's own folder there."""
    dry_run: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it on one host."""

    host: str
    status: Status
    text: str
    python: str = ""
    """The interpreter of the environment there."""
    remedy: str = ""


@contextlib.contextmanager
def open_source(options: SyncOptions) -> Generator[Opened]:
    """The one host. Raises HostError."""
    python = options.python or options.source.python or sys.executable
    with open_some([options.source], [[python]]) as opened:
        if opened.failures:
            raise opened.failures[0]
        yield opened
