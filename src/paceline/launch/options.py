"""What the user asked for, after parsing: one frozen record, the only thing that the launcher is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from paceline.cluster.spec import Host
from paceline.network.candidates import Nic
from paceline.strategy import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One `paceline run`."""

    hosts: tuple[Host, ...]
    hosts_reason: str
    """Where the hosts were found: `-H`, a hostfile, or this machine because nothing was said."""
    kind: Literal["script", "module", "command"]
    target: str
    """The script's path as typed, the module's name, or the command's first word."""
    arguments: tuple[str, ...]
    cwd: Path
    python: str | None = None
    """The interpreter on all hosts that don't name their own; None: the one that runs paceline."""
    env: tuple[tuple[str, str], ...] = ()
    nic: Nic | None = None
    """Where the addresses of all hosts must lie; None: found by trying."""
    sync: Strategy | None = None
    """How the ranks of a script or module synchronise; None: as the script does it."""
    ship: bool = True
    allow_mismatch: bool = False
    restarts: int = 0
    grace_s: float = 5.0
    stall_warning_s: float = 60.0
    """Ranks in which nothing moves for so long say where they stand; 0: never."""

    @property
    def script(self) -> Path | None:
        """The script's absolute path, where there is one."""
        return (self.cwd / self.target).absolute() if self.kind == "script" else None
