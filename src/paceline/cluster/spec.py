"""Hosts as the user names them, and which rank runs where."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterable

from paceline.errors import HostError, InputError

MAX_SLOTS = 1024
"""More ranks than this on one host is a typing mistake, most often a port written after the colon."""

_NAME = re.compile(r"[A-Za-z0-9_.:%+][A-Za-z0-9_.:%+-]*")
_USER = re.compile(r"[^\s@-][^\s@]*(@[^\s@]+)?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One machine as written by the user. A value that can't be right raises InputError naming `origin`."""

    name: str
    """What ssh is told, without the user: a name of the ssh config or of DNS, or an address (no brackets)."""
    user: str | None = None
    """None leaves it to the ssh config."""
    port: int | None = None
    """ssh port; None leaves it to the ssh config."""
    slots: int | None = None
    """Ranks to start; None means one per GPU, or one where there is none: see `resolve_slots`."""
    ip: str | None = None
    """The literal address that the other hosts reach this one by; None means found by trying."""
    python: str | None = None
    """The interpreter to use on this host."""
    gpus: tuple[int, ...] | None = None
    """The GPUs to use, by their index on the host; None means all."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the ranks of this host."""
    origin: str = "-H"
    """Where it was written: `-H`, or `hosts.txt:3`."""

    def __post_init__(self) -> None:
        name = f"host name {self.name!r}"
        self._expect(_NAME.fullmatch(self.name), name, "letters, digits and . _ - only")
        if ":" in self.name:
            self._expect(is_address(self.name), name, "HOST:SLOTS, or an IPv6 address as in [fe80::1]:4")
        if self.user is not None:
            self._expect(_USER.fullmatch(self.user), f"user {self.user!r}", "a login name")
        if self.port is not None:
            self._expect(1 <= self.port <= 65535, f"port={self.port}", "a port from 1 to 65535")
        if self.slots is not None:
            in_range = 1 <= self.slots <= MAX_SLOTS
            self._expect(in_range, f"slots={self.slots}", f"a whole number from 1 to {MAX_SLOTS}")
        if self.ip is not None:
            self._expect(is_address(self.ip), f"ip={self.ip}", "a literal IPv4 or IPv6 address")
        if self.python is not None:
            self._expect(self.python.strip(), "python=", "the path of an interpreter")
        if self.gpus is not None:
            self._check_gpus(self.gpus)
        for key, value in self.env:
            self._expect(_ENV_NAME.fullmatch(key), f"env.{key}", "a variable name: letters, digits and _")
            self._expect(not {"\n", "\0"} & set(value), f"env.{key}", "a value of one line")

    def _check_gpus(self, gpus: tuple[int, ...]) -> None:
        found = f"gpus={','.join(map(str, gpus))}"
        self._expect(gpus and min(gpus) >= 0, found, "GPU numbers, as in gpus=0,2")
        self._expect(len(set(gpus)) == len(gpus), found, "each GPU once")
        # Fewer slots than GPUs is a rank with several cards; more would make ranks share one.
        fits = self.slots is None or self.slots <= len(gpus)
        self._expect(fits, f"slots={self.slots} with {found}", f"no more slots than GPUs, here {len(gpus)}")

    def _expect(self, ok: object, found: str, expected: str) -> None:
        if not ok:
            raise InputError(f"{self.origin}: {found}: expected {expected}")

    @property
    def ssh_destination(self) -> str:
        """What is handed to ssh: `alice`, `carol@alice`, `carol@fe80::1%eth0`."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def is_address(text: str) -> bool:
    """Whether this is a literal IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_hosts(text: str, *, origin: str = "-H") -> tuple[Host, ...]:
    """The value of `-H`: `alice:2,carol@bob:4,[fe80::1]:2`. Raises InputError."""
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise InputError(f"{origin}: no hosts: expected HOST[:SLOTS],HOST[:SLOTS],...")
    if not all(words):
        raise InputError(f"{origin}: {text!r}: a host is missing next to a comma: expected HOST[:SLOTS],...")
    hosts: list[Host] = []
    for word in words:
        user, name, slots = split_host(word, origin=origin)
        hosts.append(Host(name=name, user=user, slots=slots, origin=origin))
    refuse_duplicates(hosts)
    return tuple(hosts)


def split_host(word: str, *, origin: str) -> tuple[str | None, str, int | None]:
    """`carol@[fe80::1]:2` -> ('carol', 'fe80::1', 2); what is absent is None. Raises InputError."""
    user, at, rest = word.rpartition("@")
    if rest.startswith("["):
        name, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")) or not is_address(name):
            raise InputError(f"{origin}: {word!r}: expected an IPv6 address in brackets, as in [fe80::1]:4")
        has_slots, slots = bool(tail), tail[1:]
    elif rest.count(":") > 1:
        raise InputError(f"{origin}: {word!r}: expected HOST:SLOTS, or an IPv6 address as in [fe80::1]:4")
    else:
        name, colon, slots = rest.partition(":")
        has_slots = bool(colon)
    number = parse_number(slots, f"slots in {word!r}", origin=origin) if has_slots else None
    return (user if at else None), name, number


def parse_number(text: str, what: str, *, origin: str) -> int:
    """A whole number in plain digits, of a sane length. Raises InputError."""
    if not (text.isascii() and text.removeprefix("-").isdecimal() and len(text) <= 9):
        raise InputError(f"{origin}: {what}: found {text!r}, expected a whole number")
    return int(text)


def refuse_duplicates(hosts: Iterable[Host]) -> None:
    """Raises InputError for a host that is there twice; ports tell containers behind one name apart."""
    seen: dict[tuple[str, int | None], Host] = {}
    for host in hosts:
        key = (host.name.lower(), host.port)
        if key in seen:
            first = seen[key].origin
            where = "" if first == host.origin else f", first at {first}"
            raise InputError(
                f"{host.origin}: {host.name} is there twice{where}: expected each host once, "
                f"with all its slots ({host.name}:2 or {host.name} slots=2)"
            )
        seen[key] = host


def resolve_slots(host: Host, num_gpus: int) -> tuple[int, str]:
    """How many ranks a host gets, and why, once it has said how many GPUs it has. Raises HostError."""
    if host.gpus is not None and max(host.gpus) >= num_gpus:
        found = f"has {num_gpus} GPUs, numbered from 0" if num_gpus else "has no GPU"
        raise HostError(f"{host.origin}: gpus={','.join(map(str, host.gpus))} was asked for, but {host.name} {found}")
    if host.slots is not None:
        return host.slots, f"{host.slots} asked for in {host.origin}"
    if host.gpus is not None:
        return len(host.gpus), f"one per GPU named in {host.origin}"
    if num_gpus:
        return num_gpus, f"one per GPU, {num_gpus} found"
    return 1, "one, as no GPU was found"
