"""What the driver and an agent say to each other: one JSON object per line, some followed by raw bytes.

    {"type":"output","payload_bytes":6,"rank":0,"stream":"stdout"}\\n
    hello\\n

Every message is a frozen record below. Standard library only: this module runs on every host.
"""

from __future__ import annotations

import errno
import json
from typing import Any, ClassVar

from paceline.records import Record

MAX_PAYLOAD_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20

MARKER = b"\x01paceline-agent\x01"
"""Stands before the agent's first line; all that a login shell prints before it is noise."""


class ProtocolError(Exception):
    """The bytes on the channel are not this protocol."""


class Message(Record):
    """The base of all messages; `type` is the name on the wire."""

    type: ClassVar[str] = ""


# From the driver to an agent


class Setup(Message):
    """The first message: who this host is in the run, and how long it may live without hearing from the driver."""

    type: ClassVar[str] = "setup"
    run_id: str
    host_index: int
    lease_s: float
    heartbeat_s: float
    grace_s: float
    """What ranks get between SIGTERM and SIGKILL when there is no driver left to ask."""


class Heartbeat(Message):
    """Both ways: I am here."""

    type: ClassVar[str] = "heartbeat"


class Listen(Message):
    """Open a listener on each of these addresses. Answer: Listening."""

    type: ClassVar[str] = "listen"
    addresses: list[str]
    nonce: str


class Dial(Message):
    """Connect to all targets (see network/probe.py). Answer: Dialled."""

    type: ClassVar[str] = "dial"
    targets: list[Any]
    nonce: str
    timeout_s: float


class FindToken(Message):
    """Is this token file there? Then the host shares the driver's file system. Answer: TokenFound."""

    type: ClassVar[str] = "find_token"
    path: str
    token: str


class OfferFiles(Message):
    """The files of a project (or of a package that the host lacks); see launch/receive.py. Answer: MissingFiles."""

    type: ClassVar[str] = "offer_files"
    project: str
    entries: list[list[Any]]
    take_another: bool
    """Where another run is using the first copy: take the next one."""


class FileData(Message):
    """The next piece of a file (payload). Not answered, but for the last of all: Shipped."""

    type: ClassVar[str] = "file_data"
    project: str
    path: str
    last_of_file: bool
    last_of_all: bool


class HoldPort(Message):
    """Bind a port (0: any free one) until rank 0 listens on it. Answer: PortHeld."""

    type: ClassVar[str] = "hold_port"
    port: int


class StartRanks(Message):
    """Start these processes; each is {rank, argv, env, cwd}. Answers: RankBegan for each, later RankEnded."""

    type: ClassVar[str] = "start_ranks"
    ranks: list[dict[str, Any]]


class StartErrand(Message):
    """Run `module.main(argument)` in a fork of the agent. Answers: as for a rank of this number."""

    type: ClassVar[str] = "start_errand"
    number: int
    module: str
    argument: Any


class StopRanks(Message):
    """End every process of the run on this host: SIGTERM, `grace_s`, SIGKILL. Answer: AllStopped."""

    type: ClassVar[str] = "stop_ranks"
    grace_s: float


# From an agent to the driver


class Hello(Message):
    """The agent's first message: the facts of its host (see launch/facts.py)."""

    type: ClassVar[str] = "hello"
    monotonic_s: float
    facts: dict[str, Any]


class Listening(Message):
    """Pairs of address and port; pairs of address and reason where one could not be bound."""

    type: ClassVar[str] = "listening"
    ports: list[Any]
    failures: list[Any]


class Dialled(Message):
    """One result per target, in the same order."""

    type: ClassVar[str] = "dialled"
    results: list[Any]


class TokenFound(Message):
    """Answer to FindToken."""

    type: ClassVar[str] = "token_found"
    found: bool


class MissingFiles(Message):
    """Paths that this host lacks or has otherwise; `folder` is its copy of the project, `digest` that of the copy."""

    type: ClassVar[str] = "missing_files"
    folder: str
    paths: list[str]
    digest: str
    busy: bool
    """Another run is using the copy, and nothing else here counts."""


class Shipped(Message):
    """All files are in place; `digest` is that of what now lies on the disk."""

    type: ClassVar[str] = "shipped"
    folder: str
    digest: str


class PortHeld(Message):
    """Answer to HoldPort; port 0 says that it is taken, and `holder` by whom."""

    type: ClassVar[str] = "port_held"
    port: int
    holder: str


class RankBegan(Message):
    """A rank's process exists."""

    type: ClassVar[str] = "rank_began"
    rank: int
    pid: int


class Output(Message):
    """What a rank wrote (payload); `stream` is stdout or stderr."""

    type: ClassVar[str] = "output"
    rank: int
    stream: str


class RankSaid(Message):
    """An event record that a rank emitted (see events.py)."""

    type: ClassVar[str] = "rank_said"
    rank: int
    record: dict[str, Any]


class RankEnded(Message):
    """A rank's process has ended; all that it wrote was sent before. Times are the agent's monotonic clock."""

    type: ClassVar[str] = "rank_ended"
    rank: int
    exit_code: int
    at_s: float
    kernel_says: str


class AllStopped(Message):
    """No process of the run is left on this host."""

    type: ClassVar[str] = "all_stopped"


class Problem(Message):
    """The agent could not do what was asked."""

    type: ClassVar[str] = "problem"
    message: str
    hint: str


_HINTS = {
    errno.ENOSPC: "make room on that disk, or set XDG_STATE_HOME there to a folder on another one",
    errno.EDQUOT: "make room within that user's quota",
    errno.ENOENT: "check the spelling; it must be on that host, too",
    errno.ENOTEMPTY: "a script has made a folder there where the project has a file: remove it",
    errno.ENOTDIR: "with --no-ship the project must lie at the same path on every host",
}


def problem_of(error: OSError | ValueError) -> Problem:
    """What an agent says of an error, with what mends it where that is known."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return Problem(message=f"{error.strerror}{where}", hint=_HINTS.get(error.errno or 0, ""))
    return Problem(message=str(error), hint="")


_TYPES: dict[str, type[Message]] = {cls.type: cls for cls in Message.__subclasses__()}


def encode(message: Message, payload: bytes = b"") -> bytes:
    """A message, and the raw bytes that follow it, as they go over the channel."""
    record: dict[str, Any] = {"type": message.type, **message.as_dict()}
    if payload:
        record["payload_bytes"] = len(payload)
    return json.dumps(record, separators=(",", ":")).encode() + b"\n" + payload


class Decoder:
    """Bytes in, messages out, however the bytes were cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: tuple[Message, int] | None = None

    def feed(self, data: bytes) -> list[tuple[Message, bytes]]:
        """All messages that are complete now, each with its payload. Raises ProtocolError."""
        self._buffer += data
        complete: list[tuple[Message, bytes]] = []
        while True:
            if self._waiting is None and not self._read_line():
                return complete
            assert self._waiting is not None
            message, payload_bytes = self._waiting
            if len(self._buffer) < payload_bytes:
                return complete
            complete.append((message, bytes(self._buffer[:payload_bytes])))
            del self._buffer[:payload_bytes]
            self._waiting = None

    def _read_line(self) -> bool:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise ProtocolError("a line without an end")
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            record = json.loads(line)
            payload_bytes = int(record.pop("payload_bytes", 0))
            message = _TYPES[record.pop("type")](**record)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"not a message: {line[:200]!r}") from error
        if not 0 <= payload_bytes <= MAX_LINE_BYTES:
            raise ProtocolError(f"a payload of {payload_bytes} bytes")
        self._waiting = (message, payload_bytes)
        return True
