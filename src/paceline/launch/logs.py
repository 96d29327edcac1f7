"""From what the ranks write to what a person sees: whole lines, each with the name of its rank.

Raw bytes go to one file per rank and stream, unchanged. The screen gets lines with a prefix; a progress bar (a line
that is written over with carriage returns) is shown for rank 0 alone, and in place where the screen is a terminal.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
LONGEST_LINE_BYTES = 1 << 20
"""What is longer is cut on the screen; the file has it whole."""
_CLEAR_LINE = "\r\x1b[2K"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a rank. `live`: a progress bar that is still being drawn."""

    text: str
    is_bar: bool = False
    live: bool = False


class LineSplitter:
    """Bytes of one stream in, lines out, however the bytes were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that are complete now, and the present state of a progress bar, if one is being drawn."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            complete, self._rest = [*complete, self._rest], b""
        lines = [_line(raw) for raw in complete]
        if b"\r" in self._rest.rstrip(b"\r"):
            lines.append(dataclasses.replace(_line(self._rest), live=True))
            self._rest = b"\r" + self._rest[self._rest.rstrip(b"\r").rindex(b"\r") + 1 :]
        return lines

    def end(self) -> list[Line]:
        """What was written without a line end."""
        rest, self._rest = self._rest, b""
        return [_line(rest)] if rest.strip() else []


def _line(raw: bytes) -> Line:
    raw = raw.rstrip(b"\r")
    states = raw.split(b"\r")
    # A bar that was wiped with spaces, and then a line in its place: that line is no bar.
    is_bar = len(states) > 1 and not states[-2].isspace()
    return Line(text=states[-1].decode(errors="replace"), is_bar=is_bar)


class TextSink(Protocol):
    """What Screen needs of a text stream."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...

    def isatty(self) -> bool: ...


class Screen:
    """The driver's terminal, or whatever stands in its place. Every line is written in one piece."""

    def __init__(self, prefixes: Sequence[str], stdout: TextSink, stderr: TextSink, *, colour: bool) -> None:
        self._prefixes = [
            f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m" if colour else prefix
            for rank, prefix in enumerate(prefixes)
        ]
        self._streams: dict[str, TextSink] = {"stdout": stdout, "stderr": stderr}
        self._bar = ""

    def show(self, rank: int, stream: str, line: Line) -> None:
        """Show one line of a rank, or none where it is a bar that nobody should see."""
        if line.is_bar and rank != 0:
            return
        out = self._streams[stream]
        text = f"{self._prefixes[rank]} {line.text}"
        if line.live:
            if out.isatty():
                self._bar = text
                self._write(out, _CLEAR_LINE + text)
            return
        if line.is_bar:
            self._bar = ""
            self._write(out, (_CLEAR_LINE if out.isatty() else "") + text + "\n")
            return
        self._print(out, text)

    def say(self, text: str) -> None:
        """A line of paceline's own, on stderr."""
        self._print(self._streams["stderr"], text)

    def _print(self, out: TextSink, text: str) -> None:
        """A line above the bar, which stays the last line of the screen."""
        bar = self._bar if out.isatty() else ""
        self._write(out, f"{_CLEAR_LINE}{text}\n{bar}" if bar else f"{text}\n")

    def _write(self, out: TextSink, text: str) -> None:
        try:
            out.write(text)
            out.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC and out is self._streams["stdout"]:
                self._streams["stderr"].write(f"paceline: stdout: {error.strerror}; the logs have what is missing\n")
            # Whoever read our output has gone (`paceline run ... | head`, a closed terminal): the run goes on, and
            # the files have it all.
            self._streams = {name: _Nowhere() if stream is out else stream for name, stream in self._streams.items()}
        except UnicodeEncodeError:
            out.write(text.encode("ascii", "backslashreplace").decode())


class _Nowhere:
    """A stream that is read by nobody."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None

    def isatty(self) -> bool:
        return False


class RankLogs:
    """One raw file per rank and stream in the run's folder, and the same on the screen."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self._folder = folder
        self._screen = screen
        self._attempt = 0
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self.problem: str | None = None
        """Why the files are incomplete (a full disk, most often)."""

    def begin_attempt(self, attempt: int) -> None:
        """The ranks start (again): new files."""
        self.close()
        self._attempt = attempt

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """What a rank wrote."""
        self._store(rank, stream, data)
        splitter = self._splitters.setdefault((rank, stream), LineSplitter())
        for line in splitter.feed(data):
            self._screen.show(rank, stream, line)

    def end(self, rank: int) -> None:
        """The rank has ended: show what it wrote without a line end."""
        for (number, stream), splitter in list(self._splitters.items()):
            if number == rank:
                for line in splitter.end():
                    self._screen.show(rank, stream, line)

    def store(self, rank: int, stream: str, text: str) -> None:
        """Into the file only."""
        self._store(rank, stream, text.encode(errors="backslashreplace"))

    def path(self, rank: int, stream: str) -> Path:
        """The file of a rank's stream in the present attempt."""
        restart = f".restart-{self._attempt}" if self._attempt else ""
        return self._folder / f"rank-{rank}{restart}.{stream}.log"

    def close(self) -> None:
        """Close all files."""
        for rank in {rank for rank, _ in self._splitters}:
            self.end(rank)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._splitters.clear()

    def _store(self, rank: int, stream: str, data: bytes) -> None:
        try:
            file = self._files.get((rank, stream))
            if file is None:
                file = open(self.path(rank, stream), "ab", buffering=0)  # noqa: SIM115  # open as long as the rank lives
                self._files[rank, stream] = file
            file.write(data)
        except OSError as error:
            # The screen still has it all: a full disk here must not end a run that may last for days.
            self.problem = self.problem or f"{error.strerror}: {self._folder}"
