"""What happened in a run: frozen records, one JSON line each.

A rank writes them to the descriptor that `PACELINE_EVENT_FD` names; the agent adds the rank; the driver keeps them all
in `events.jsonl` in the run's folder. Standard library only: this module runs on every host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.records import Record

SCHEMA_VERSION = 1


class Event(Record):
    """The base of all records; `kind` is the name on the wire."""

    kind: ClassVar[str] = ""


class RunStarted(Event):
    """Sent once, before the first rank starts."""

    kind: ClassVar[str] = "run_started"
    run_id: str
    command: tuple[str, ...]
    hosts: tuple[str, ...]
    num_ranks: int


class RankStarted(Event):
    """A rank's process exists."""

    kind: ClassVar[str] = "rank_started"
    rank: int
    host: str
    pid: int
    attempt: int


class RankRaised(Event):
    """The script of a rank ended with an exception. `summary` is its last line."""

    kind: ClassVar[str] = "rank_raised"
    summary: str
    traceback: str


class RankFinished(Event):
    """The script of a rank came to its end by itself; what the interpreter does afterwards can't fail the run."""

    kind: ClassVar[str] = "rank_finished"
    alone: bool = False
    """It was one of several ranks and used PyTorch, but made no process group: it trained by itself."""
    steps: int | None = None
    """Optimizer steps that it has done; None where they were not counted."""


class RankExited(Event):
    """A rank's process has ended; `exit_code` is negative for a signal."""

    kind: ClassVar[str] = "rank_exited"
    rank: int
    host: str
    exit_code: int
    attempt: int


class RankStalled(Event):
    """Nothing has moved in a rank for the time that `--stall-warning` names: where it stands."""

    kind: ClassVar[str] = "rank_stalled"
    step: int
    """Optimizer steps done so far."""
    collectives: int
    """Begun so far in the world's process group; -1 where that can't be asked."""
    doing: str
    """The collective, the part of a DistributedDataParallel model, or the script."""
    waits: bool
    """It waits for other ranks; else it is in the script, outside any collective."""
    busy: bool
    """Its main thread has used the processor meanwhile."""
    where: str
    """The script's own file and line: train.py:41."""
    text: str
    """What stands in that line."""
    since_s: float
    """Seconds since it last moved."""


class RankMoved(Event):
    """A rank that had stalled moves again."""

    kind: ClassVar[str] = "rank_moved"
    step: int


class Logged(Event):
    """`run.log(...)`: values already reduced over all ranks; sent by rank 0 only."""

    kind: ClassVar[str] = "logged"
    step: int
    values: Mapping[str, float]


class Progress(Event):
    """Totals of one rank since it started, sent about once a second and at the end."""

    kind: ClassVar[str] = "progress"
    steps: int
    samples: int
    since_first_step_s: float
    """Seconds since the first step began, busy or not."""
    sync_wait_s: float | None
    """Seconds in which this rank did nothing but wait for the others; None where that can't be measured."""
    sent_bytes: int
    """To other hosts."""


class CheckpointSaved(Event):
    """A whole checkpoint is on disk under its final name; sent by rank 0 only."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str
    num_bytes: int


class RunEnded(Event):
    """The last record. `exit_code` is that of the command."""

    kind: ClassVar[str] = "run_ended"
    exit_code: int
    headline: str


_KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


def to_record(event: Event) -> dict[str, Any]:
    """The event as a JSON object, with its kind and the schema version."""
    return {"v": SCHEMA_VERSION, "kind": event.kind, **event.as_dict()}


def from_record(record: Mapping[str, Any]) -> Event | None:
    """The event in a JSON object, or None for one that this version does not know."""
    cls = _KINDS.get(str(record.get("kind")))
    if cls is None:
        return None
    try:
        return cls(**{name: record[name] for name in cls.field_names if name in record})
    except TypeError:
        return None


def name_descriptor(descriptor: int) -> str:
    """The value of `PACELINE_EVENT_FD`: the number, and which pipe it was, for the number may be used again."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def emit(event: Event, environ: Mapping[str, str] = os.environ) -> None:
    """From inside a rank: tell the agent. Does nothing when the process was not started by `paceline run`.

    A process that a rank has started without this descriptor (multiprocessing's spawn) finds it at its parent.
    """
    name = environ.get("PACELINE_EVENT_FD")
    if name is None:
        return
    line = json.dumps(to_record(event), separators=(",", ":")) + "\n"
    try:
        _write(name, line.encode())
    except (OSError, ValueError):
        # The agent is gone, or a wrapper closed the descriptor: the rank must not die of it.
        return


def _write(name: str, line: bytes) -> None:
    descriptor = int(name.partition(":")[0])
    try:
        is_the_pipe = name_descriptor(descriptor) == name
    except OSError:
        is_the_pipe = False
    if is_the_pipe:
        os.write(descriptor, line)
        return
    parents = os.open(f"/proc/{os.getppid()}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if name.endswith(f":{os.fstat(parents).st_ino}"):
            os.write(parents, line)
    finally:
        os.close(parents)
