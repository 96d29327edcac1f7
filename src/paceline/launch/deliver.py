"""A cargo on its way to several hosts at once: offer it, send what is missing, compare the hashes.

Each host has a copy of its own, even where hosts share a home: the folder is called after the project and the host.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from paceline.errors import HostError
from paceline.launch import protocol, ship
from paceline.launch.hosts import LEASE_S, Hosts

IN_USE_LIMIT_S = LEASE_S + 3.0
"""An agent whose driver was killed holds its copy until the lease runs out, and while it ends its ranks."""
_ASK_AGAIN_S = 1.0
_COMPARE_LIMIT_S = 600.0
"""The host reads all of its copy once, perhaps from a slow disk."""
_STALL_LIMIT_S = 120.0
"""How long nothing at all may move; the whole may take as long as the network needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """The cargo as it now lies on a host."""

    folder: str
    num_sent: int
    is_spare: bool
    """Another run was using the first copy, and this is the next one."""


def deliver(hosts: Hosts, cargo: ship.Cargo, indices: Collection[int], *, in_use_limit_s: float) -> dict[int, Delivery]:
    """Bring these hosts up to date. A copy that another run uses is waited for before the next one is taken.

    Raises HostError.
    """
    cargos = {index: dataclasses.replace(cargo, name=copy_name(cargo, hosts.hosts[index].name)) for index in indices}
    answers = _offer(hosts, cargos, in_use_limit_s)
    incomplete = {index: answer for index, answer in answers.items() if answer.paths}
    progress = _Progress()
    for index, answer in incomplete.items():
        hosts.channels[index].send_pieces(progress.watch(ship.pieces(cargos[index], answer.paths)))
    shipped = hosts.gather(
        protocol.Shipped,
        incomplete,
        timeout_s=_STALL_LIMIT_S,
        doing="write the project's files",
        last_moved_s=lambda: progress.moved_s,
    )
    for index, answer in answers.items():
        digest = shipped[index].digest if index in shipped else answer.digest
        if digest != cargo.digest:
            raise HostError(
                f"{hosts.hosts[index].name}: the copy of {cargo.root} in {answer.folder} is not the same as here",
                hint="was a file changed while it was copied? start again",
            )
    return {
        index: Delivery(
            folder=answer.folder,
            num_sent=len(answer.paths),
            is_spare=answer.folder.rpartition("/")[2] != cargos[index].name,
        )
        for index, answer in answers.items()
    }


def copy_name(cargo: ship.Cargo, host: str) -> str:
    """The folder on this host: always the same for a project and a host as the user writes it."""
    return f"{cargo.name}-{re.sub('[^A-Za-z0-9._-]', '_', host)}"


def _offer(hosts: Hosts, cargos: Mapping[int, ship.Cargo], in_use_limit_s: float) -> dict[int, protocol.MissingFiles]:
    """What each host lacks. A host whose copy is in use is asked again until the limit, then to take another."""
    deadline = time.monotonic() + in_use_limit_s
    answers: dict[int, protocol.MissingFiles] = {}
    while open_indices := cargos.keys() - answers.keys():
        take_another = time.monotonic() >= deadline
        offers = {
            index: protocol.OfferFiles(
                project=cargos[index].name,
                entries=[list(entry) for entry in cargos[index].entries],
                take_another=take_another,
            )
            for index in sorted(open_indices)
        }
        found = hosts.ask(
            offers, protocol.MissingFiles, timeout_s=_COMPARE_LIMIT_S, doing="compare the project's files"
        )
        answers |= {index: answer for index, answer in found.items() if not answer.busy}
        if len(answers) < len(cargos) and not take_another:
            time.sleep(_ASK_AGAIN_S)
    return {index: answers[index] for index in cargos}


class _Progress:
    """When a channel last took a piece of any file."""

    def __init__(self) -> None:
        self.moved_s = time.monotonic()

    def watch(self, pieces: Iterable[tuple[protocol.FileData, bytes]]) -> Iterator[bytes]:
        for message, data in pieces:
            self.moved_s = time.monotonic()
            yield protocol.encode(message, data)
