"""What a lab is: names, addresses, rate, places; and the record of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from paceline.errors import InputError

LAB_ROOT = Path("/var/lib/paceline-lab")
"""Each lab has one folder here, and nothing anywhere else."""

STAY = b"stay"
"""What the maker of a lab writes into its lease to let it go on alone."""

MAX_HOSTS = 64

_OWN_PLACES = {"/tmp": "tmp", "/var/tmp": "var-tmp", "/run": "run", "/var/log": "log"}
_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabSpec:
    """A lab as it was asked for. Raises InputError for what no lab can be."""

    name: str
    """The lab's own name, so that several can be up: small letters, digits, hyphens."""
    num_hosts: int
    """Hosts are called h1 to hN."""
    rate_bits_per_s: int | None
    """What each link carries in each direction; None leaves links as fast as the machine."""
    home: str
    """Root's home folder; each host has its own at this path."""
    keep: tuple[str, ...]
    """Folders that stay shared, at their own paths, below places of which each host has its own."""

    def __post_init__(self) -> None:
        lab_folder(self.name)
        if not 1 <= self.num_hosts <= MAX_HOSTS:
            raise InputError(
                f"a lab of {self.num_hosts} hosts was asked for; it can have 1 to {MAX_HOSTS}",
                hint="paceline lab up --hosts 4",
            )
        if self.rate_bits_per_s is not None and self.rate_bits_per_s < 10_000:
            raise InputError(
                f"a link of {self.rate_bits_per_s} bit/s was asked for; the least is 10kbit",
                hint="paceline lab up --rate 1gbit",
            )

    @property
    def folder(self) -> Path:
        """Where everything of this lab lies."""
        return lab_folder(self.name)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in order."""
        return tuple(f"h{number}" for number in range(1, self.num_hosts + 1))

    @property
    def own_places(self) -> dict[str, str]:
        """Path inside every host -> name in the host's folder."""
        return {self.home: "home", **_OWN_PLACES}

    def address(self, host: str) -> str:
        """The host's address on its eth0, as text; the network is a /24."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def write(self) -> None:
        """Put the record into the lab's folder."""
        (self.folder / "spec.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> LabSpec:
        """The record in a lab's folder. Raises OSError if there is none."""
        fields: dict[str, Any] = json.loads((folder / "spec.json").read_text())
        fields["keep"] = tuple(fields["keep"])
        return cls(**fields)


def lab_folder(name: str) -> Path:
    """Where everything of the lab of that name lies. Raises InputError for what can't be a name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name):
        raise InputError(
            f"a lab can't be called {name!r}: small letters, digits and hyphens, at most 32 of them",
            hint="paceline lab up --name lab2",
        )
    return LAB_ROOT / name


def folders_to_keep(needed: Iterable[str], *, asked: Iterable[str], home: str) -> tuple[str, ...]:
    """Those that each host's own places would hide, as named and as resolved.

    What is itself such a place stays hidden. Raises InputError if that, or what is no folder, was asked for.
    """
    places = [home, *_OWN_PLACES, "/dev/shm"]
    for path in asked:
        if not os.path.isdir(path):
            raise InputError(f"--keep {path}: there is no such folder", hint=f"mkdir -p {path}")
        if os.path.realpath(path) in places:
            raise InputError(f"--keep {path}: each host has its own", hint=f"--keep {path}/FOLDER")
    found: set[str] = set()
    for path in [*needed, *asked]:
        for form in (os.path.abspath(path), os.path.realpath(path)):
            if os.path.isdir(form) and form not in places and any(form.startswith(f"{place}/") for place in places):
                found.add(form)
    return tuple(path for path in sorted(found) if found.isdisjoint(map(str, Path(path).parents)))


def parse_rate(text: str) -> int:
    """'1gbit' -> 1000000000 (bits per second, as `tc` writes them). Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None:
        raise InputError(
            f"--rate {text}: expected a number with kbit, mbit or gbit",
            hint="paceline lab up --rate 1gbit",
        )
    return round(float(match[1]) * _BITS[match[2]])


def format_rate(rate_bits_per_s: int | None) -> str:
    """1000000000 -> '1gbit'."""
    if rate_bits_per_s is None:
        return "unshaped"
    for unit, size in reversed(_BITS.items()):
        if rate_bits_per_s >= size:
            return f"{rate_bits_per_s / size:g}{unit}"
    return f"{rate_bits_per_s}bit"


def bucket_bytes(rate_bits_per_s: int) -> int:
    """How much a link may send at once before its rate holds: one millisecond's worth, at least ten frames.

    Less costs rate (the kernel's timers are not that fine); more lets short messages through for nothing.
    """
    return max(rate_bits_per_s // 8 // 1000, 16 * 1024)


def hosts_file(spec: LabSpec, host: str) -> str:
    """/etc/hosts as Debian's installer leaves it, own name on 127.0.1.1 and all, and the other hosts.

    Every address has a name, also in the form ::ffff:10.77.0.1: PyTorch asks for it, and warns on each rank where there
    is none.
    """
    mapped = "".join(f"::ffff:{spec.address(other)}\t{other}-mapped\n" for other in spec.hosts)
    others = "".join(f"{spec.address(other)}\t{other}\n" for other in spec.hosts if other != host)
    own = f"127.0.1.1\t{host}\n{spec.address(host)}\t{host}-eth0\n"
    return f"127.0.0.1\tlocalhost\n{own}::1\tlocalhost ip6-localhost ip6-loopback\n{others}{mapped}"


def cores_of(spec: LabSpec, host: str, available: Collection[int]) -> set[int]:
    """The host's share of the machine's cores, at least one: so that it tells its ranks an honest number of them."""
    cores, index, num_hosts = sorted(available), spec.hosts.index(host), len(spec.hosts)
    return set(cores[index::num_hosts]) or {cores[index % len(cores)]}


def sshd_config() -> str:
    """The server's whole configuration: what is not named here is OpenSSH's own default, limits included."""
    return (
        "HostKey /run/paceline-lab/host_key\n"
        "PidFile none\n"
        "UsePAM no\n"
        "UseDNS no\n"
        "PermitRootLogin prohibit-password\n"
        "AuthenticationMethods publickey\n"
        "PrintMotd no\n"
        "PrintLastLog no\n"
        "Subsystem sftp internal-sftp\n"
        # This key exchange keeps both ends' cores busy for a tenth of a second; here all ends share one machine's.
        "KexAlgorithms -sntrup761*\n"
    )


def ssh_config() -> str:
    """The client's ~/.ssh/config: no questions, no unknown hosts."""
    return "Host *\n  BatchMode yes\n  StrictHostKeyChecking yes\n"
