"""A log as a stream of bytes, of any size: what is in it that the catalogue knows, and who the lines are from."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from collections.abc import Callable, Iterator

from paceline.explain import tracebacks
from paceline.explain.lines import COLLECTORS, ESCAPES, SLURM, Line, read_line
from paceline.explain.signatures import Catalogue, Signature
from paceline.explain.tracebacks import Collector, Crash

CHUNK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 8 << 10
"""What is longer is looked at around the text that was found in it."""
_MANY = 1000
"""So often a text is looked at line by line in one file; after that only where it stands last in a piece."""
_MOST_CRASHES = 64
_DIGITS = b"0123456789"
_MOST_SHAPES = 50_000
_LONGEST_SHAPE_BYTES = 400
_LOOK_BACK_LINES = 60
_LONGEST_TRACEBACK_LINES = 2000
"""With the lines of other ranks between its own."""
_SNIFFED_LINES = 2000

_FIRST_FAILURE = "Root Cause (first observed failure)"
_FAILURE_FIELD = re.compile(r"\s+(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_FAILURE_LINES = 6
_NCCL_HOST = re.compile(rb"([A-Za-z0-9][\w.-]*):\d+:\d+ \[-?\d+\] (?:\S+:\d+ )?NCCL ")
_WORLD_SIZE = re.compile(r"\(rank=\d+, size=(\d+)|\bnranks (\d+)|\bworld_size=(\d+)")
_TRACEBACKS = tuple(text.encode() for text in (tracebacks.HEADER, *tracebacks.CHAINED))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """An entry of the catalogue in one stream of a log: where first, where last, and how often."""

    signature: Signature
    first: Line
    last: Line
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blame:
    """Whom torchrun's summary names as the first to fail on its host."""

    line: Line
    exit_code: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """What one file holds."""

    name: str
    num_lines: int
    hits: tuple[Hit, ...]
    crashes: tuple[Crash, ...]
    blames: tuple[Blame, ...]
    hosts: frozenset[str]
    ranks: frozenset[int]
    world_size: int | None


def read_log(
    read: Callable[[int], bytes], name: str, catalogue: Catalogue, *, rank: int | None = None, host: str | None = None
) -> Log:
    """Read a log to its end, in pieces. `rank` and `host`: whose it is, where its lines don't say."""
    reader = _Reader(name, catalogue, rank, host)
    rest = b""
    while piece := read(CHUNK_BYTES):
        complete, newline, rest = (rest + piece).rpartition(b"\n")
        reader.feed(complete + newline)
        if len(rest) > CHUNK_BYTES:  # a progress bar that never ends its line
            reader.feed(rest)
            rest = b""
    reader.feed(rest)
    return reader.end()


class _Reader:
    def __init__(self, name: str, catalogue: Catalogue, rank: int | None, host: str | None) -> None:
        self._name = name
        self._catalogue = catalogue
        self._rank = rank
        self._host = host
        self._fragments = [fragment.encode() for fragment in catalogue.fragments]
        self._without_digits = {one: one.translate(None, _DIGITS) for one in (*self._fragments, *_TRACEBACKS)}
        self._harmless: set[bytes] = set()
        self._times_seen: collections.Counter[bytes] = collections.Counter()
        self._is_slurm: bool | None = None
        self._collector: re.Pattern[str] | None = None
        self._number = 1
        self._ends_line = True
        self._hits: dict[tuple[str, str, int | None], Hit] = {}
        self._collectors: dict[str, Collector] = {}
        self._collect_until = 0
        self._crashes: collections.deque[Crash] = collections.deque(maxlen=_MOST_CRASHES)
        self._chained: set[str] = set()
        self._blames: list[Blame] = []
        self._first_failure_at: int | None = None
        self._hosts: set[str] = set()
        self._ranks: set[int] = set()
        self._world_size: int | None = None
        self._newest_time_s: dict[str, float] = {}
        self._dated_to: dict[str, int] = {}
        self._first_time_s: float | None = None

    def feed(self, chunk: bytes) -> None:
        """Some whole lines."""
        if not chunk:
            return
        self._ends_line = chunk.endswith(b"\n")
        chunk = _normalise(chunk)
        if self._is_slurm is None:
            self._sniff(chunk)
        if len(self._hosts) < 64 and b" NCCL " in chunk:
            self._hosts.update(host.decode() for host in set(_NCCL_HOST.findall(chunk)))
        wanted = self._find_lines(chunk)
        starts = sorted(wanted)
        position, counted = 0, 0
        while position < len(chunk):
            if not self._collectors:
                index = bisect.bisect_left(starts, position)
                if index == len(starts):
                    break
                position = starts[index]
            end = _line_end(chunk, position)
            self._number += chunk.count(b"\n", counted, position)
            counted = position
            self._take(chunk, position, end, is_wanted=position in wanted)
            position = end + 1
        self._number += chunk.count(b"\n", counted)
        self._remember_times(chunk)

    def end(self) -> Log:
        """What was found."""
        for stream in list(self._collectors):
            self._close(stream)
        return Log(
            name=self._name,
            num_lines=self._number - self._ends_line,
            hits=tuple(
                dataclasses.replace(hit, first=self._complete(hit.first), last=self._complete(hit.last))
                for hit in self._hits.values()
            ),
            crashes=tuple(dataclasses.replace(crash, line=self._complete(crash.line)) for crash in self._crashes),
            blames=tuple(self._blames),
            hosts=frozenset(self._hosts),
            ranks=frozenset(self._ranks),
            world_size=self._world_size,
        )

    # Finding lines

    def _find_fragments(self, chunk: bytes) -> list[bytes]:
        """Which texts may be in it. Of lines that differ in digits only, as most of a log's do, one is searched."""
        shapes = set(chunk.translate(None, _DIGITS).split(b"\n")) - self._harmless
        joined = b"\n".join(shapes)
        found = {one: plain for one, plain in self._without_digits.items() if plain in joined}
        if len(self._harmless) + len(shapes) <= _MOST_SHAPES:
            short = (shape for shape in shapes if len(shape) <= _LONGEST_SHAPE_BYTES)
            self._harmless.update(shape for shape in short if not any(plain in shape for plain in found.values()))
        return list(found)

    def _find_lines(self, chunk: bytes) -> set[int]:
        """Where the lines begin that hold a text of the catalogue, or a traceback's header."""
        starts: set[int] = set()
        for fragment in self._find_fragments(chunk):
            position = chunk.find(fragment)
            while position >= 0:
                starts.add(_line_start(chunk, position))
                self._times_seen[fragment] += 1
                if self._times_seen[fragment] > _MANY:
                    starts.update(_last_lines(chunk, fragment, _MOST_CRASHES if fragment in _TRACEBACKS else 1))
                    break
                position = chunk.find(fragment, _line_end(chunk, position))
        return starts

    def _sniff(self, chunk: bytes) -> None:
        """Whether Slurm or a collector has labelled the lines, and which ranks speak, by the file's first lines."""
        lines = [line for line in chunk.split(b"\n", _SNIFFED_LINES)[:_SNIFFED_LINES] if line.strip()]
        labelled = [match for line in lines if (match := SLURM.match(line[:16].decode("utf-8", "replace")))]
        self._is_slurm = len(lines) > 0 and len(labelled) >= 0.9 * len(lines)
        heads = [line[:80].decode("utf-8", "replace") for line in lines]
        labels = (pattern for pattern in COLLECTORS if heads and all(map(pattern.match, heads)))
        self._collector = next(labels, None)
        for raw in lines:
            self._meet(self._read(raw))

    # One line

    def _read(self, raw: bytes) -> Line:
        return read_line(
            raw, file=self._name, number=self._number, is_slurm=bool(self._is_slurm), collector=self._collector
        )

    def _take(self, chunk: bytes, start: int, end: int, *, is_wanted: bool) -> None:
        line = self._read(self._cut(chunk, start, end))
        has_header = tracebacks.HEADER in line.text
        is_frame = self._collect(line, has_header=has_header)
        if not is_wanted or is_frame:
            return
        line = self._of_failure(chunk, start, self._dated(chunk, start, line))
        if has_header:
            self._open(line)
        if line.text.startswith(tracebacks.CHAINED):
            self._chained.add(line.stream)
        signature = self._catalogue.match(line.text)
        if signature is not None:
            self._record(signature, line)
        if _FIRST_FAILURE in line.text:
            self._first_failure_at = line.number

    def _cut(self, chunk: bytes, start: int, end: int) -> bytes:
        if end - start <= _LONGEST_LINE_BYTES:
            return chunk[start:end]
        found = [at for fragment in self._fragments if (at := chunk.find(fragment, start, end)) >= 0]
        begin = max(start, min(found, default=start) - _LONGEST_LINE_BYTES // 2)
        return chunk[begin : begin + _LONGEST_LINE_BYTES]

    def _dated(self, chunk: bytes, start: int, line: Line) -> Line:
        """With the time of the nearest line before it in the same stream, if it has none of its own."""
        if line.time_s is None:
            time_s = self._newest_time_s.get(line.stream)
            since = line.number - self._dated_to.get(line.stream, 0)  # the rest was looked at before
            for before in _lines_before(chunk, start, min(_LOOK_BACK_LINES, since)):
                earlier = self._read(before)
                if earlier.stream == line.stream and earlier.time_s is not None:
                    time_s = earlier.time_s
                    break
            line = dataclasses.replace(line, time_s=time_s)
        self._dated_to[line.stream] = line.number
        if line.time_s is not None:
            self._newest_time_s[line.stream] = line.time_s
            self._first_time_s = line.time_s if self._first_time_s is None else self._first_time_s
        return line

    def _remember_times(self, chunk: bytes) -> None:
        """What stands at the end of a chunk is near to what the next one begins with."""
        times: dict[str, float] = {}
        for raw in _lines_before(chunk, len(chunk), _LOOK_BACK_LINES):
            line = self._read(raw)
            if line.time_s is not None:
                times.setdefault(line.stream, line.time_s)
        self._newest_time_s.update(times)

    def _record(self, signature: Signature, line: Line) -> None:
        self._meet(line)
        if match := _WORLD_SIZE.search(line.text):
            self._world_size = max(self._world_size or 0, int(match[match.lastindex or 0]))
        key = (signature.id, line.stream, line.rank)
        hit = self._hits.get(key)
        if hit is None:
            self._hits[key] = Hit(signature=signature, first=line, last=line, count=1)
        else:
            self._hits[key] = dataclasses.replace(hit, last=line, count=hit.count + 1)

    def _of_failure(self, chunk: bytes, start: int, line: Line) -> Line:
        """A line of torchrun's summary speaks of the rank, host and time that stand in the lines before it."""
        own = _FAILURE_FIELD.match(line.text)
        if own is None or own["name"] not in ("exitcode", "traceback"):
            return line
        values: dict[str, str] = {}
        for raw in _lines_before(chunk, start, 5):
            text = self._read(raw).text
            match = _FAILURE_FIELD.match(text)
            if match is None:
                break
            values.setdefault(match["name"], match["value"])
        rank = re.match(r"\d+", values.get("rank", ""))
        line = dataclasses.replace(line, host=values.get("host", line.host), rank=int(rank[0]) if rank else line.rank)
        is_first = self._first_failure_at is not None and line.number - self._first_failure_at <= _FAILURE_LINES
        code = re.match(r"-?\d+", own["value"])
        if is_first and own["name"] == "exitcode" and code:
            self._blames.append(Blame(line=line, exit_code=int(code[0])))
        return line

    # Tracebacks

    def _collect(self, line: Line, *, has_header: bool) -> bool:
        """Give a line to the traceback of its stream, if one is open. Whether it was a frame of it."""
        is_frame = False
        if collector := self._collectors.get(line.stream):
            if line.text.startswith("Original Traceback"):
                del self._collectors[line.stream]  # a DataLoader's worker: what counts is its own traceback
            elif has_header:
                self._close(line.stream)
            else:
                is_frame = collector.feed(line)
                if collector.is_done:
                    self._close(line.stream)
        if self._collectors and line.number > self._collect_until:
            for stream in list(self._collectors):
                self._close(stream)
        return is_frame

    def _open(self, header: Line) -> None:
        before = None
        if header.stream in self._chained:
            self._chained.discard(header.stream)
            before = next((crash for crash in reversed(self._crashes) if crash.line.stream == header.stream), None)
            if before is not None:
                self._crashes.remove(before)
        self._collectors[header.stream] = Collector(header, before)
        self._collect_until = header.number + _LONGEST_TRACEBACK_LINES

    def _close(self, stream: str) -> None:
        crash = self._collectors.pop(stream).crash(self._catalogue)
        if crash is not None:
            self._crashes.append(crash)
            self._meet(crash.line)

    # Who it was

    def _meet(self, line: Line) -> None:
        if line.rank is not None:
            self._ranks.add(line.rank)
        if line.host is not None:
            self._hosts.add(line.host)

    def _complete(self, line: Line) -> Line:
        """What its own text didn't tell."""
        host = line.host or self._host or (next(iter(self._hosts)) if len(self._hosts) == 1 else None)
        rank = line.rank if line.rank is not None else self._rank
        time_s = line.time_s if line.time_s is not None else self._first_time_s
        return dataclasses.replace(line, host=host, rank=rank, time_s=time_s)


def _normalise(chunk: bytes) -> bytes:
    """Without colours, NULs and the carriage returns of other systems; as many lines as before."""
    if b"\x1b" in chunk:
        chunk = ESCAPES.sub(b"", chunk)
    if b"\0" in chunk:
        chunk = chunk.replace(b"\0", b"")
    return re.sub(rb"\r+\n", b"\n", chunk) if b"\r" in chunk else chunk


def _line_start(chunk: bytes, position: int) -> int:
    """A carriage return ends a line, too: a progress bar's states are lines of their own, all with one number."""
    start = chunk.rfind(b"\n", 0, position) + 1
    return max(start, chunk.rfind(b"\r", start, position) + 1)


def _last_lines(chunk: bytes, fragment: bytes, count: int) -> Iterator[int]:
    """Where the last lines begin that hold a text."""
    position = len(chunk)
    for _ in range(count):
        position = chunk.rfind(fragment, 0, position)
        if position < 0:
            return
        position = _line_start(chunk, position)
        yield position


def _line_end(chunk: bytes, position: int) -> int:
    end = chunk.find(b"\n", position)
    end = len(chunk) if end < 0 else end
    bar_end = chunk.find(b"\r", position, end)
    return end if bar_end < 0 else bar_end


def _lines_before(chunk: bytes, start: int, count: int) -> Iterator[bytes]:
    """The lines before a place, the nearest first."""
    for _ in range(count):
        if start <= 0:
            return
        begin = chunk.rfind(b"\n", 0, start - 1) + 1
        yield chunk[max(begin, start - 1 - _LONGEST_LINE_BYTES) : start - 1]
        start = begin
