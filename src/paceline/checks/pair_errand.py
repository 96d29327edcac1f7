"""Runs on each host: on which ports the others get through to it, and it to the others.

Standard library only: this module runs on every host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from paceline.checks.calls import Peer, Station, WrongHostError

OK, REFUSED, SILENT, UNREACHABLE, ABSENT, FORBIDDEN, WRONG_HOST = (
    "ok",
    "refused",
    "silent",
    "unreachable",
    "absent",
    "forbidden",
    "wrong host",
)
"""What came of a knock. ABSENT: nobody on this wire has the address; FORBIDDEN: this host's own rules."""

RETRY_S = 2.0
"""How long a refusal may mean that the other host's process is only starting."""
CONNECT_S = 2.0
"""A first packet that is lost is sent again after one second."""
ERRAND_S = RETRY_S + 2 * CONNECT_S
"""How long a host listens for the others at most."""
_RULES_LIMIT_S = 1.0


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """Knocks at `ports` and `doors` of all `others` ([index, address]), while it answers on `ports` itself.

    `doors` are ports behind which something of the other host's own listens, such as its sshd. Gives the `knocks`,
    each [index, port, outcome, milliseconds, what was found], the ports that were `taken`, and this host's `firewall`.
    """
    station = Station(address=argument["address"], index=argument["index"], nonce=argument["nonce"])
    ports: list[int] = argument["ports"]
    others: list[tuple[int, str]] = [(index, address) for index, address in argument["others"]]
    limit_s = time.monotonic() + ERRAND_S
    with _Answering(station, ports, {index for index, _ in others}) as answering:
        targets = [Peer(index=i, address=address, port=port) for i, address in others for port in ports]
        doors = [Peer(index=i, address=address, port=port) for i, address in others for port in argument["doors"]]
        knocks = _knock_at_all(station, targets, doors)
        is_heard = answering.all_heard.wait(max(0.0, limit_s - time.monotonic()))
    is_open = is_heard and all(knock[2] == OK for knock in knocks)
    return {"knocks": knocks, "taken": answering.taken, "firewall": {} if is_open else find_firewall()}


class _Answering:
    """Listens on the ports until the end of the with-statement; a thread answers."""

    def __init__(self, station: Station, ports: Iterable[int], expected: set[int]) -> None:
        self.taken: list[int] = []
        self.all_heard = threading.Event()
        """Every other host got an answer on every port."""
        self._station = station
        self._selector = selectors.DefaultSelector()
        self._is_over = threading.Event()
        for port in ports:
            try:
                listener = station.listen(port)
            except OSError:
                self.taken.append(port)
                continue
            self._selector.register(listener, selectors.EVENT_READ, port)
        listening = {key.data for key in self._selector.get_map().values()}
        self._waiting = {(index, port) for index in expected for port in listening}
        self._thread = threading.Thread(target=self._answer_all, name="answering", daemon=True)

    def __enter__(self) -> _Answering:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _answer_all(self) -> None:
        while self._waiting and not self._is_over.is_set():
            for key, _ in self._selector.select(0.1):
                if isinstance(key.fileobj, socket.socket):
                    self._answer(key.fileobj, key.data)
        if not self._waiting:
            self.all_heard.set()

    def _answer(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            caller = self._station.hear(listener.accept()[0])
            if caller is not None:
                with self._station.answer(caller):
                    self._waiting.discard((caller.index, port))


def _knock_at_all(station: Station, targets: Iterable[Peer], doors: Iterable[Peer]) -> list[list[Any]]:
    """All at the same time: one that nobody answers takes seconds."""
    asked = [*((peer, False) for peer in targets), *((peer, True) for peer in doors)]
    knocks: list[list[Any]] = [[] for _ in asked]

    def knock(place: int) -> None:
        peer, is_door = asked[place]
        knocks[place] = _knock(station, peer, is_door=is_door)

    threads = [threading.Thread(target=knock, args=[place]) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return knocks


def _knock(station: Station, peer: Peer, *, is_door: bool) -> list[Any]:
    limit_s = time.monotonic() + RETRY_S
    while True:
        began_s = time.monotonic()
        outcome, detail = _try_once(station, peer, is_door=is_door)
        if outcome != REFUSED or is_door or time.monotonic() > limit_s:
            return [peer.index, peer.port, outcome, round((time.monotonic() - began_s) * 1000, 1), detail]
        time.sleep(0.1)


def _try_once(station: Station, peer: Peer, *, is_door: bool) -> tuple[str, str]:
    try:
        if is_door:
            socket.create_connection((peer.address, peer.port), CONNECT_S, (station.address, 0)).close()
        else:
            station.call(peer, connect_s=CONNECT_S, answer_s=CONNECT_S).close()
    except WrongHostError as error:
        return WRONG_HOST, str(error)
    except TimeoutError:
        return (ABSENT, "no answer to ARP") if _is_absent(peer.address) else (SILENT, "")
    except ConnectionResetError:
        return REFUSED, "ECONNRESET"
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error))
        if error.errno == errno.ECONNREFUSED:
            return REFUSED, name
        if error.errno in (errno.EPERM, errno.EACCES):
            return FORBIDDEN, name
        return (ABSENT if _is_absent(peer.address) else UNREACHABLE), name
    return OK, ""


def _is_absent(address: str) -> bool:
    """Whether this host has asked its wire for the address, and nobody has answered."""
    with contextlib.suppress(OSError):
        with open("/proc/net/arp", encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
        return any(row[0] == address and row[3] == "00:00:00:00:00:00" for row in rows)
    return False


def find_firewall() -> dict[str, str]:
    """What filters packets on this host: `tool`, and for nftables the `chain` that sees what comes in. May be empty."""
    if "firewalld" in _running_commands():
        return {"tool": "firewalld"}
    if re.search(r"^\s*ENABLED\s*=\s*yes", _read("/etc/ufw/ufw.conf"), re.MULTILINE | re.IGNORECASE):
        return {"tool": "ufw"}
    chain = read_input_chain(_say("nft", "list", "ruleset"))
    if chain:
        return {"tool": "nftables", "chain": chain}
    return {"tool": "iptables"} if "-A INPUT" in _say("iptables", "-S") else {}


def read_input_chain(ruleset: str) -> str:
    """`inet filter input`: the first chain of `nft list ruleset` that sees what comes in, and holds a rule or drops."""
    for table, chains in re.findall(r"^table (\w+ \S+) {\n(.*?)^}", ruleset, re.MULTILINE | re.DOTALL):
        for chain, text in re.findall(r"^\tchain (\S+) {\n(.*?)^\t}", chains, re.MULTILINE | re.DOTALL):
            if "type filter hook input" in text and ("policy drop" in text or text.count("\n") > 1):
                return f"{table} {chain}"
    return ""


def _running_commands() -> set[str]:
    return {_read(f"/proc/{name}/comm").strip() for name in os.listdir("/proc") if name.isdigit()}


def _say(program: str, *arguments: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_RULES_LIMIT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
