"""Python tracebacks in a stream of lines: the exception, what it says, and the last frame of the user's own code."""

from __future__ import annotations

import dataclasses
import re

from paceline.explain.lines import Line
from paceline.explain.signatures import Catalogue, Signature

HEADER = "Traceback (most recent call last)"

CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
"""The next traceback belongs to the one before."""
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: |:?$)")
# Another process's, that prints to the same place; NCCL's own words (`ncclRemoteError: ...`) do belong to the message.
_OTHER_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")
# What a user has not written. Our own frames lie above those of a script that we have started.
_NOT_OWN = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|/torch/|^<frozen|^<string>|/paceline/(?:train|sync)/|/bin/[^/]+$"
)
_MOST_LINES = 400
_MOST_MESSAGE_LINES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """A place in a program."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}" + (f", in {self.function}" if self.function else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crash:
    """An exception that a process has printed with its traceback."""

    line: Line
    """The one with the exception's name."""
    first_number: int
    last_number: int
    frame: Frame | None
    """The last one of the user's own code."""
    last_frame: Frame | None
    signature: Signature | None
    """What the catalogue knows of its message."""
    before: Crash | None
    """The exception in whose handling, or because of which, this one was raised."""

    @property
    def is_raised_by_own(self) -> bool:
        """Whether the user's own code raised it, no library."""
        return self.frame is not None and self.frame == self.last_frame

    @property
    def cause(self) -> Crash:
        """The one of a chain that says most: what the catalogue knows, the origin first; else what was raised last."""
        chain: list[Crash] = [self]
        while chain[0].before is not None:
            chain.insert(0, chain[0].before)
        for role in ("root", "cascade", "symptom"):
            for crash in chain:
                if crash.signature is not None and crash.signature.role == role:
                    return crash
        return self


class Collector:
    """Takes the lines after a header until the exception's message has ended."""

    def __init__(self, header: Line, before: Crash | None) -> None:
        self._header = header
        # torchrun prints a rank's traceback in its summary, moved to the right.
        self._margin = "  " if header.text.startswith("  traceback") else ""
        self._before = before
        self._frames: list[Frame] = []
        self._message: list[Line] = []
        self._num_lines = 0
        self.is_done = False

    def feed(self, line: Line) -> bool:
        """The next line of the same stream. Whether it is a frame, whose code says nothing of what happened."""
        line = dataclasses.replace(line, text=line.text.removeprefix(self._margin))
        self._num_lines += 1
        if self._num_lines > _MOST_LINES:
            self.is_done = True
        elif self._message:
            self.is_done = self._ends_message(line)
            if not self.is_done:
                self._message.append(line)
        elif match := _FRAME.match(line.text):
            self._frames.append(
                Frame(path=match["path"], line=int(match["line"]), function=(match["function"] or "").strip())
            )
        elif _EXCEPTION.match(line.text) and not line.is_stamped and not _FRAME.search(line.text):
            self._message.append(line)
        return not self._message and line.text.startswith(" ")

    def _ends_message(self, line: Line) -> bool:
        if len(self._message) >= _MOST_MESSAGE_LINES or not line.text.strip() or line.is_stamped:
            return True
        return line.text.startswith((*CHAINED, "=====")) or _OTHER_EXCEPTION.match(line.text) is not None

    def crash(self, catalogue: Catalogue) -> Crash | None:
        """What was collected; None if no exception's name came."""
        if not self._message:
            return None
        own = [frame for frame in self._frames if not _NOT_OWN.search(frame.path)]
        line = self._message[0]
        return Crash(
            line=self._header.lend_to(line),
            first_number=self._header.number,
            last_number=self._message[-1].number,
            frame=own[-1] if own else None,
            last_frame=self._frames[-1] if self._frames else None,
            signature=_most_telling([catalogue.match(line.text) for line in self._message]),
            before=self._before,
        )


def _most_telling(signatures: list[Signature | None]) -> Signature | None:
    """Of what was found in one message: a cause before a consequence before what is vague."""
    found = [signature for signature in signatures if signature is not None]
    for role in ("root", "cascade", "symptom"):
        of_role = [signature for signature in found if signature.role == role]
        if of_role:
            return min(of_role, key=lambda signature: signature.is_vague)
    return None
