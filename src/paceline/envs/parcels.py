"""What is sent to a host, cut into parcels, so that no host has to hash more than a few seconds' worth at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.envs.listed import ListedFile
from paceline.launch.receive import Entry, digest_of
from paceline.launch.ship import Cargo

PARCEL_BYTES = 256 << 20
"""A file that is larger is a parcel of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parcel:
    """Files of one folder that travel together."""

    kind: str
    """Where they belong: `site` (site-packages), `prefix` (the environment's folder), `wheel` (to be installed)."""
    cargo: Cargo


def make_parcels(name: str, roots: Sequence[tuple[str, Path]], files: Iterable[ListedFile]) -> list[Parcel]:
    """`roots`: (kind, folder on this machine). Always cut in the same way."""
    of_root: dict[int, list[Entry]] = {}
    for file in files:
        of_root.setdefault(file.root, []).append((file.path, file.mode, file.size_bytes, file.sha256, None))
    parcels: list[Parcel] = []
    for root, found in of_root.items():
        kind, folder = roots[root]
        for group in _cut(found):
            cargo = Cargo(
                name=f"environment-{name}-{len(parcels)}", root=folder, entries=group, digest=digest_of(group)
            )
            parcels.append(Parcel(kind=kind, cargo=cargo))
    return parcels


def _cut(entries: Iterable[Entry]) -> list[list[Entry]]:
    groups: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not groups or entry[2] > room:
            groups.append([])
            room = PARCEL_BYTES
        groups[-1].append(entry)
        room -= entry[2]
    return groups
