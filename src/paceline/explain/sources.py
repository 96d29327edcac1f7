"""Which files belong to a run, and what our own records say of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from paceline import events
from paceline.errors import InputError
from paceline.explain.lines import Line, local_time
from paceline.explain.reading import Hit, Log, read_log
from paceline.explain.signatures import Catalogue
from paceline.launch import stalls

EVENTS = "events.jsonl"

_ENDINGS = {".log", ".out", ".err", ".txt"}
_MOST_FILES = 4096
_TAIL_BYTES = 1 << 16
_HEAD_BYTES = 1 << 12
_COMPRESSED = (b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"BZh")
_MOST_STRANGE = 0.1
"""The share of bytes that is no UTF-8: logs in another encoding have some."""
_HAD_LEFT = "had left before"
"""In the headline of a run whose first failure is the consequence of that."""
_RANK_IN_NAME = re.compile(r"rank[-_ .]?(\d+)")
_OURS = re.compile(r"rank-(?P<rank>\d+)(?:\.restart-(?P<attempt>\d+))?\.(?:stdout|stderr)\.log")
# Frequent, and of no interest here.
_SKIPPED = ('"kind": "progress"', '"kind": "logged"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
    """What `events.jsonl` says of a run."""

    hosts: dict[int, str]
    """Of each rank."""
    ended_s: dict[int, float]
    """When each rank raised or ended."""
    attempt: int
    num_ranks: int
    words: tuple[Line, ...]
    """Who waited for whom when the run stood still, and what it ended with, as lines of a log."""
    num_lines: int


def read_folder(folder: Path, catalogue: Catalogue) -> list[Log]:
    """The logs of a run's folder, or of any other. Raises InputError if there are none."""
    if (folder / EVENTS).is_file():
        return read_run(folder, catalogue)
    paths = sorted(path for path in folder.rglob("*") if _is_log(path))
    if not paths:
        endings = ", ".join(sorted(_ENDINGS))
        raise InputError(
            f"{folder}: no logs there", hint=f"looked for files that end in {endings}, or have rank in them"
        )
    return [read_file(path, catalogue, name=str(path.relative_to(folder))) for path in paths[:_MOST_FILES]]


def read_run(folder: Path, catalogue: Catalogue, *, tail_bytes: int | None = None) -> list[Log]:
    """What a run of ours wrote in its last attempt; of each log only the end, where `tail_bytes` says so."""
    return list(_read_run(folder, catalogue, tail_bytes))


def read_file(
    path: Path,
    catalogue: Catalogue,
    *,
    name: str | None = None,
    host: str | None = None,
    tail_bytes: int | None = None,
) -> Log:
    """One log, under this name. Raises InputError if it can't be read."""
    match = _RANK_IN_NAME.search(path.name)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: this is no regular file", hint=f"cat {path} | paceline explain -")
        with open(path, "rb") as file:
            _require_text(path, file.read(_HEAD_BYTES))
            file.seek(0)
            if tail_bytes is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            return read_log(file.read, name or str(path), catalogue, rank=int(match[1]) if match else None, host=host)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _require_text(path: Path, head: bytes) -> None:
    """Raises InputError for what no line can be found in."""
    if head.startswith(_COMPRESSED):
        raise InputError(f"{path}: this is compressed", hint=f"zcat {path} | paceline explain -   (or xzcat, zstdcat)")
    if not _is_text(head):
        raise InputError(f"{path}: this is no text", hint="name the log that the run printed")


def _is_text(head: bytes) -> bool:
    return head.decode(errors="replace").count("\ufffd") <= _MOST_STRANGE * len(head)


def read_stream(stream: BinaryIO, catalogue: Catalogue) -> Log:
    """Standard input."""
    return read_log(stream.read, "stdin", catalogue)


def newest_failed_run(runs: Path) -> tuple[Path | None, Path | None]:
    """The folder of the newest run of ours that failed, and of the newest that was stopped after it, if any: that one
    may have hung. A run that still goes on is neither."""
    stopped: Path | None = None
    for folder in sorted(runs.iterdir(), reverse=True) if runs.is_dir() else ():
        end = _last_record(folder / EVENTS)
        if end.get("kind") != events.RunEnded.kind or not end.get("exit_code"):
            continue
        if end.get("headline"):
            return folder, stopped
        stopped = stopped or folder
    return None, stopped


def _is_log(path: Path) -> bool:
    if not (path.suffix in _ENDINGS or _RANK_IN_NAME.search(path.name)) or not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            return _is_text(file.read(_HEAD_BYTES))  # or it is a checkpoint of that rank
    except OSError:
        return True  # and is told of when it is read


def _last_record(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
        return json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}


def _read_run(folder: Path, catalogue: Catalogue, tail_bytes: int | None) -> Iterator[Log]:
    record = _read_record(folder / EVENTS)
    yield _log_of_record(record, catalogue)
    for path in sorted(folder.iterdir()):
        match = _OURS.fullmatch(path.name)
        if match is None or int(match["attempt"] or 0) != record.attempt:
            continue
        rank = int(match["rank"])
        host = record.hosts.get(rank)
        log = read_file(path, catalogue, name=path.name, host=host, tail_bytes=tail_bytes)
        yield _with_end(log, record.ended_s.get(rank))


def _with_end(log: Log, ended_s: float | None) -> Log:
    """What a rank wrote without a time, it wrote before it ended."""

    def dated(line: Line) -> Line:
        return line if line.time_s is not None else dataclasses.replace(line, time_s=ended_s)

    return dataclasses.replace(
        log,
        hits=tuple(dataclasses.replace(hit, first=dated(hit.first), last=dated(hit.last)) for hit in log.hits),
        crashes=tuple(dataclasses.replace(crash, line=dated(crash.line)) for crash in log.crashes),
    )


def _read_record(path: Path) -> _Record:
    hosts: dict[int, str] = {}
    ended_s: dict[int, float] = {}
    attempt, num_ranks, number = 0, 0, 0
    first_failed: events.RankExited | None = None
    left: events.RankExited | None = None
    still = _Still()
    words: list[Line] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, entry in _entries(file):
            event = events.from_record(entry)
            at_s = local_time(float(entry.get("at", 0.0)))
            still.see(event, int(entry.get("rank", -1)), number, at_s)
            match event:
                case events.RunStarted():
                    num_ranks = event.num_ranks
                case events.RankStarted():
                    if event.attempt > attempt:
                        attempt, first_failed, left = event.attempt, None, None
                        ended_s.clear()
                        still = _Still()
                    hosts[event.rank] = event.host
                case events.RankRaised():
                    ended_s.setdefault(int(entry.get("rank", -1)), at_s)
                case events.RankExited():
                    ended_s.setdefault(event.rank, at_s)
                    if event.exit_code:
                        first_failed = first_failed or event
                    else:
                        left = left or event
                case events.RunEnded() if event.headline and event.exit_code:
                    words += _last_words(event, first_failed, left, ended_s, number)
                case _:
                    pass
    return _Record(
        hosts=hosts,
        ended_s=ended_s,
        attempt=attempt,
        num_ranks=num_ranks,
        words=(*still.words(hosts), *words),
        num_lines=number,
    )


class _Still:
    """The ranks that stand still, until they move again."""

    def __init__(self) -> None:
        self._stalled: dict[int, events.RankStalled] = {}
        self._finished: dict[int, int | None] = {}
        self._at: tuple[int, float] = (0, 0.0)

    def see(self, event: events.Event | None, rank: int, number: int, at_s: float) -> None:
        """An event of a rank."""
        match event:
            case events.RankStalled():
                self._at = self._at if self._stalled else (number, at_s)
                self._stalled[rank] = event
            case events.RankMoved():
                self._stalled.pop(rank, None)
            case events.RankFinished():
                self._stalled.pop(rank, None)
                self._finished[rank] = None
            case _:
                pass

    def words(self, hosts: Mapping[int, str]) -> list[Line]:
        """Who waited for whom, as one line."""
        if set(hosts) != set(range(len(hosts))):
            return []
        names = [hosts[rank] for rank in sorted(hosts)]
        number, at_s = self._at
        lines = stalls.explain(names, self._stalled, self._finished)
        return [Line(file=EVENTS, number=number, text=line, time_s=at_s) for line in lines[:1]]


def _entries(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if any(skipped in line for skipped in _SKIPPED):
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut by a full disk
        if isinstance(entry, dict):
            yield number, entry


def _last_words(
    event: events.RunEnded,
    failed: events.RankExited | None,
    left: events.RankExited | None,
    ended_s: dict[int, float],
    number: int,
) -> Iterator[Line]:
    """What the run ended with, which are the words for the end of a rank where they tell how it ended."""

    def line(text: str, of: events.RankExited | None) -> Line:
        at_s = min(ended_s.values(), default=None) if of is None else ended_s.get(of.rank)
        rank, host = (None, None) if of is None else (of.rank, of.host)
        return Line(file=EVENTS, number=number, text=text, rank=rank, host=host, time_s=at_s)

    if left is not None and _HAD_LEFT in event.headline:
        yield line(f"rank {left.rank} {_HAD_LEFT}, with exit code 0", left)
    ends = () if failed is None else (f"signal {-failed.exit_code} ", f"exit code {failed.exit_code}")
    tells_of_it = bool(ends) and (ends[0] in event.headline or event.headline == ends[1])
    yield line(event.headline, failed if tells_of_it else None)


def _log_of_record(record: _Record, catalogue: Catalogue) -> Log:
    hits = (
        Hit(signature=signature, first=line, last=line, count=1)
        for line in record.words
        if (signature := catalogue.match(line.text)) is not None
    )
    return Log(
        name=EVENTS,
        num_lines=record.num_lines,
        hits=tuple(hits),
        crashes=(),
        blames=(),
        hosts=frozenset(record.hosts.values()),
        ranks=frozenset(record.hosts),
        world_size=record.num_ranks or None,
    )
