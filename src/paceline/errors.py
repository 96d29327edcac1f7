"""Every error that paceline raises on purpose.

PacelineError            anything below; the command line prints it without a traceback
├── InputError           what was typed or written in a file cannot be used           exit code 2
├── HostError            a host can't be reached or can't take part                   exit code 3
│   └── HostsError       (launch/hosts.py) the same of several, with the reason of each
├── CheckpointError      a checkpoint is damaged, missing or of another shape         exit code 1
├── WorldError           the script's process group is not the one that was started   exit code 1
└── InterruptedEarlyError  (launch/hosts.py) a signal came before the ranks started   exit code 128 + signal
"""

from __future__ import annotations


class PacelineError(Exception):
    """What was asked, what was found and where; `hint` is the command or line that mends it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class InputError(PacelineError):
    """What was typed, or written in a file, cannot be used."""

    exit_code = 2


class HostError(PacelineError):
    """A host cannot be reached, or cannot take part in the run."""

    exit_code = 3


class CheckpointError(PacelineError):
    """A checkpoint is damaged, missing, or belongs to another model."""


class WorldError(PacelineError):
    """The script's process group is not the one that was started."""
