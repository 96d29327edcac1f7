"""One channel per host: the agent's stdin and stdout, through a subprocess here or through the system's ssh client.

A channel has three threads (write, read, collect stderr), so that a host that hangs never holds up the driver. All that
arrives goes into one inbox, stamped with the time at which it was read.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

from paceline.cluster.spec import Host
from paceline.errors import HostError
from paceline.launch import bootstrap, protocol

SSH_OPTIONS = (
    "-T", "-x", "-a",
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
    "-o", "StrictHostKeyChecking=yes",
    "-o", "ClearAllForwardings=yes",
    "-o", "EscapeChar=none",
)  # fmt: skip
"""No agent or X11 forwarding, no password prompt, no unknown host key: and all else from the user's own ssh config."""

_NOISE_LIMIT_BYTES = 1 << 20
_INBOX_LIMIT = 500
"""Messages that may wait for the driver; above it the channels are not read, and so the ranks' output slows down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Received:
    """A message of one host."""

    host_index: int
    at_s: float
    message: protocol.Message
    payload: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closed:
    """The channel of one host has come to its end; `reason` says why, in words for the user."""

    host_index: int
    at_s: float
    reason: HostError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signalled:
    """The driver itself got a signal."""

    number: int


Inbox = queue.SimpleQueue["Received | Closed | Signalled"]


def is_this_machine(host: Host) -> bool:
    """True when the agent can be a plain subprocess: the host is this machine, and the user is this user."""
    if host.port is not None or host.user not in (None, _this_user()):
        return False
    return host.name in {
        "localhost",
        "127.0.0.1",
        "::1",
        socket.gethostname(),
        socket.gethostname().split(".")[0],
    }


def _this_user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return None


class Channel:
    """The line to the agent of one host."""

    def __init__(self, index: int, host: Host, argv: Sequence[str], inbox: Inbox) -> None:
        self.index = index
        self.host = host
        self._inbox = inbox
        self._outbox: queue.SimpleQueue[bytes | Iterator[bytes] | None] = queue.SimpleQueue()
        self._noise = bytearray()
        self._errors = bytearray()
        self._is_ssh = argv[0] == "ssh"
        self._heard = False
        self.heard_at_s = time.monotonic()
        """When the host was last heard; while its messages wait for a busy driver it counts as heard."""
        self._closing = threading.Event()
        # A session of its own: Ctrl-C in the terminal is for the driver, which ends the run in good order.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=target, name=f"channel-{index}-{target.__name__}", daemon=True)
            for target in (self._collect_errors, self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: protocol.Message, payload: bytes = b"") -> None:
        """Queue a message; never blocks."""
        self.send_bytes(protocol.encode(message, payload))

    def send_bytes(self, data: bytes) -> None:
        """Queue raw bytes; never blocks."""
        self._outbox.put(data)

    def send_pieces(self, pieces: Iterator[bytes]) -> None:
        """Queue bytes that are fetched one by one as the channel takes them, and no more once it closes.

        Each piece is a whole message, and fetching it raises nothing: it happens in the channel's own thread.
        """
        self._outbox.put(pieces)

    @property
    def waiting(self) -> int:
        """How many queued pieces have not been written yet."""
        return self._outbox.qsize()

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the agent's stdin, which ends everything there, and wait a little for the channel's process."""
        self._closing.set()
        self._outbox.put(None)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(1.0)
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None:
                try:
                    file.close()
                except OSError:  # what was still buffered for a process that is gone
                    continue

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            while (queued := self._outbox.get()) is not None:
                for data in (queued,) if isinstance(queued, bytes) else self._until_closing(queued):
                    stdin.write(data)
                    stdin.flush()
            stdin.close()
        except OSError:
            return  # the reader notices the end, and says why

    def _until_closing(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        while not self._closing.is_set() and (piece := next(pieces, None)) is not None:
            yield piece

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        decoder = protocol.Decoder()
        try:
            while data := os.read(stdout.fileno(), 1 << 18):
                self.heard_at_s = time.monotonic()
                while self._inbox.qsize() > _INBOX_LIMIT and not self._closing.wait(0.005):
                    self.heard_at_s = time.monotonic()
                if not self._heard:
                    data = self._skip_noise(data)
                for message, payload in decoder.feed(data) if self._heard else ():
                    self._inbox.put(
                        Received(host_index=self.index, at_s=time.monotonic(), message=message, payload=payload)
                    )
        except (OSError, protocol.ProtocolError) as error:
            self._errors += f"\n{error}".encode()
        self._threads[0].join(1.0)
        self._inbox.put(Closed(host_index=self.index, at_s=time.monotonic(), reason=self._why_closed()))

    def _skip_noise(self, data: bytes) -> bytes:
        """What a login shell or a banner printed before the agent spoke is kept only to explain a failure."""
        self._noise += data
        _, mark, rest = bytes(self._noise).partition(protocol.MARKER)
        if mark:
            self._heard = True
            return rest
        if len(self._noise) > _NOISE_LIMIT_BYTES:
            raise protocol.ProtocolError("the login shell prints without end, and the agent was not heard")
        return b""

    def _collect_errors(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while data := os.read(stderr.fileno(), 1 << 16):
            self._errors = (self._errors + data)[-(1 << 16) :]

    def _why_closed(self) -> HostError:
        errors = self._errors.decode(errors="replace").strip()
        noise = bytes(self._noise)
        name = self.host.name
        if self._heard:
            detail = f": {errors.splitlines()[-1]}" if errors else ""
            return HostError(f"{name}: the agent there has ended{detail}")
        for mark, explain in (
            (bootstrap.NO_PYTHON, _no_python),
            (bootstrap.OLD_PYTHON, _old_python),
            (bootstrap.NOT_INSTALLED, _not_installed),
        ):
            _, found, text = noise.partition(mark)
            if found:
                return explain(name, text.decode(errors="replace").strip())
        if not self._is_ssh:
            last = (errors.splitlines() or ["it ended without a word"])[-1]
            return HostError(f"{name}: the agent could not be started: {last}", hint=_PYTHON_HINT)
        return explain_ssh(self.host, errors or noise.decode(errors="replace").strip())


def open_channel(index: int, host: Host, python: str, inbox: Inbox) -> Channel:
    """Start an interpreter on a host, which becomes the agent with the first bytes that it is sent.

    Raises HostError where there is no ssh client, or no such interpreter here.
    """
    if is_this_machine(host):
        python = os.path.expanduser(python)
        argv = bootstrap.local_command(python)
        if os.sep in python and not os.access(python, os.X_OK):
            raise HostError(f"{host.name}: there is no Python at {python}", hint=_PYTHON_HINT)
    else:
        port = ["-p", str(host.port)] if host.port is not None else []
        argv = ["ssh", *SSH_OPTIONS, *port, "--", host.ssh_destination, bootstrap.remote_command(python)]
    try:
        return Channel(index, host, argv, inbox)
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        missing = isinstance(error, FileNotFoundError)
        hint = ("install the OpenSSH client" if missing else "ulimit -n") if argv[0] == "ssh" else _PYTHON_HINT
        raise HostError(f"{host.name}: cannot start {argv[0]}: {error}", hint=hint) from error


_PYTHON_HINT = "name the right one: --python PATH for all hosts, or python=PATH in the hostfile for this one"


def _no_python(name: str, found: str) -> HostError:
    asked, *others = found.splitlines() or [""]
    listed = "; ".join(others) or "no other interpreter in the usual places"
    return HostError(f"{name}: there is no Python at {asked}. Found: {listed}", hint=_PYTHON_HINT)


def _old_python(name: str, found: str) -> HostError:
    return HostError(f"{name}: Python {found} is too old; paceline needs 3.10 or newer", hint=_PYTHON_HINT)


def _not_installed(name: str, found: str) -> HostError:
    return HostError(
        f"{name}: cannot write to paceline's folder there: {found}",
        hint="make room or set the rights there, or point XDG_STATE_HOME there to another folder",
    )


_SSH_SIGNS = (
    ("Permission denied", "ssh refused the key ({last})", "ssh-copy-id {destination}"),
    ("Too many authentication failures", "ssh refused the keys", "ssh-copy-id {destination}"),
    (
        "IDENTIFICATION HAS CHANGED",
        "its host key is not the one known here",
        "find out why; then: ssh-keygen -R {name}",
    ),
    ("Host key verification failed", "its host key is not known here", "log in once by hand, and accept it: {ssh}"),
    ("Could not resolve hostname", "no such host ({last})", "check the spelling, or add it to ~/.ssh/config"),
    ("Connection refused", "nothing listens for ssh there ({last})", "start sshd, or name its port in ~/.ssh/config"),
    ("No route to host", "there is no route to it ({last})", "check cable, address and that the machine is on"),
    ("Network is unreachable", "there is no route to it ({last})", "check cable, address and that the machine is on"),
    ("timed out", "it does not answer ({last})", "check that it is on, and that a firewall lets ssh through"),
)


def explain_ssh(host: Host, text: str) -> HostError:
    """The reason for which ssh could not start the agent, in the user's words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "ssh ended without a word"
    ssh = f"ssh {host.ssh_destination}"
    values = {"name": host.name, "destination": host.ssh_destination, "ssh": ssh, "last": last}
    for sign, meaning, remedy in _SSH_SIGNS:
        if sign in text:
            return HostError(f"{host.name}: {meaning.format(**values)}", hint=remedy.format(**values))
    return HostError(
        f"{host.name}: the agent could not be started: {last}", hint=f"try: ssh {host.ssh_destination} true"
    )
