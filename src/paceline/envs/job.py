"""What is done on the open hosts: look, send, make, compare."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.envs import listing, looking, making
from paceline.envs.fetching import Spool, fetch
from paceline.envs.inventory import Inventory
from paceline.envs.listed import ListedFile, read_listing
from paceline.envs.lock import Lock
from paceline.envs.looking import Look
from paceline.envs.opening import Opened
from paceline.envs.options import Outcome, SyncOptions, Tell, open_source
from paceline.envs.parcels import Parcel, make_parcels
from paceline.envs.sending import send_parcels
from paceline.envs.verdict import judge_host
from paceline.errors import HostError, InputError
from paceline.launch.errands import Errand, Reply, run_errands
from paceline.launch.facts import state_folder
from paceline.launch.receive import file_sha256
from paceline.launch.transport import is_this_machine
from paceline.units import format_bytes

_QUICK_LIMIT_S = 60.0
_LIST_LIMIT_S = 1800.0
_OFFLINE_LIMIT_S = 1800.0
_ONLINE_LIMIT_S = 8000.0
_TELL_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One environment for the hosts that are open."""

    options: SyncOptions
    inventory: Inventory
    lock: Lock
    opened: Opened
    tell: Tell

    def do(self) -> dict[int, Outcome]:
        """An outcome for each open host, by its index. Raises HostError for what fails at the source, InputError,
        InterruptedEarlyError."""
        outcomes: dict[int, Outcome] = {}
        wanted: dict[int, Look] = {}
        for index, reply in enumerate(self._look()):
            if reply.problem:
                remedy = f"paceline check -H {self.opened.name(index)}"
                outcomes[index] = self._failed(index, f"can't be looked at: {reply.problem}", remedy)
                continue
            look = Look(**reply.value)
            problem = judge_host(self.opened.facts[index], look, self.inventory, self.lock)
            if look.state == "finished":
                outcomes[index] = self._outcome(index, "there", "is there already", look)
            elif problem is not None:
                outcomes[index] = self._failed(index, *problem)
            elif self.options.dry_run:
                how = "send" if self.options.offline else "install"
                text = f"would {how} {len(self.lock.packages)} packages, {format_bytes(self.lock.num_bytes)}"
                outcomes[index] = self._outcome(index, "planned", text, look)
            else:
                wanted[index] = look
        return outcomes | (self._make(wanted) if wanted else {})

    def _look(self) -> list[Reply]:
        argument = {"sha256": self.lock.sha256, "name": self.lock.name, "to": self.options.to}
        errands = [
            Errand(host=index, module=looking.__name__, argument=argument) for index in range(len(self.opened.facts))
        ]
        return run_errands(self.opened.hosts, errands, timeout_s=_QUICK_LIMIT_S)

    def _make(self, wanted: Mapping[int, Look]) -> dict[int, Outcome]:
        parcels, spool = self._collect() if self.options.offline else (self._wheels(), None)
        outcomes: dict[int, Outcome] = {}
        total_bytes = sum(parcel.cargo.num_bytes for parcel in parcels)
        progress = _Progress(self, total_bytes, wanted)
        arrivals = send_parcels(self.opened.hosts, parcels, wanted, progress.tell)
        ready = [index for index, arrival in arrivals.items() if not arrival.problem]
        for index in arrivals.keys() - set(ready):
            outcomes[index] = self._failed(index, f"not all has arrived: {arrivals[index].problem}", "sync again")
        errands: list[Errand] = []
        for index in ready:
            doing = "unpacking" if self.options.offline else "installing from its own index"
            self.tell(self.opened.name(index), f"{doing} {len(self.lock.packages)} packages", False)
            folders = [[parcel.kind, at] for parcel, at in zip(parcels, arrivals[index].folders, strict=True)]
            errands.append(self._making(index, wanted[index], folders))
        limit_s = _OFFLINE_LIMIT_S if self.options.offline else _ONLINE_LIMIT_S
        replies = run_errands(self.opened.hosts, errands, timeout_s=limit_s)
        for index, reply in zip(ready, replies, strict=True):
            sent = f", {format_bytes(arrivals[index].num_sent_bytes)} sent" if parcels else ""
            outcomes[index] = self._judge(index, wanted[index], reply, sent)
        if spool is not None:
            shutil.rmtree(spool, ignore_errors=True)
        return outcomes

    def _making(self, index: int, look: Look, parcels: list[list[str]]) -> Errand:
        argument = {
            "folder": look.folder,
            "sha256": self.lock.sha256,
            "lock": self.lock.text,
            "packages": self.lock.packages,
            "python": self.inventory.python,
            "machine": self.inventory.machine,
            "is_offline": self.options.offline,
            "parcels": parcels,
        }
        return Errand(host=index, module=making.__name__, argument=argument)

    def _judge(self, index: int, look: Look, reply: Reply, sent: str) -> Outcome:
        problem = reply.problem or reply.value
        if problem:
            remedy = "" if self.options.offline else "--offline sends what is installed on the source itself"
            return self._failed(index, problem, remedy)
        return self._outcome(index, "made", f"made in {look.folder}{sent}", look)

    def _outcome(self, index: int, status: Any, text: str, look: Look) -> Outcome:
        python = os.path.join(look.folder, "bin", "python")
        return Outcome(host=self.opened.name(index), status=status, text=text, python=python)

    def _failed(self, index: int, text: str, remedy: str = "") -> Outcome:
        return Outcome(host=self.opened.name(index), status="failed", text=text, remedy=remedy)

    def _collect(self) -> tuple[list[Parcel], Path | None]:
        """The installed files, and the folder of ours in which they lie if they are another host's."""
        source = self.options.source.name
        self.tell(source, "listing the installed files", False)
        asked = {"names": sorted(self.lock.packages), "is_packed": self.lock.is_packed}
        with open_source(self.options) as opened:
            errand = Errand(host=0, module=listing.__name__, argument=asked)
            [reply] = run_errands(opened.hosts, [errand], timeout_s=_LIST_LIMIT_S)
            if reply.problem:
                text = f"{source}: can't list the installed files: {reply.problem}"
                raise HostError(text, hint=f"On {source}:  {opened.facts[0].python_path} -m pip check")
            listed = read_listing(source, reply.value)
            for sentence in listed.left_out:
                self.tell(source, f"left out: {sentence}", False)
            if is_this_machine(self.options.source):
                places = [(kind, Path(folder)) for kind, folder in listed.roots]
                return make_parcels(self.lock.name, places, listed.files), None
            folder = Path(state_folder(), "environments", f"from-{source}-{self.lock.name}")
            spool = Spool(folder, listed.files)
            fetch(opened.hosts, asked, spool, lambda n: self.tell(source, f"{format_bytes(n)} fetched", True))
            places = [(kind, spool.root(number)) for number, (kind, _) in enumerate(listed.roots)]
            return make_parcels(self.lock.name, places, listed.files), folder

    def _wheels(self) -> list[Parcel]:
        """Wheel files that were installed here by their path. Raises InputError where one is gone."""
        gone = [
            path for path in self.lock.wheels if not os.path.isfile(path) or not is_this_machine(self.options.source)
        ]
        if gone:
            raise InputError(
                f"installed from wheel files that are not there any more: {', '.join(gone)}",
                hint="--offline sends the installed files themselves",
            )
        roots = [("wheel", Path(path).parent) for path in self.lock.wheels]
        files = [
            ListedFile(number, os.path.basename(path), 0o644, os.path.getsize(path), file_sha256(path))
            for number, path in enumerate(self.lock.wheels)
        ]
        return make_parcels(self.lock.name, roots, files)


class _Progress:
    """Says of each host how far it is, now and then."""

    def __init__(self, job: Job, total_bytes: int, indices: Iterable[int]) -> None:
        self._job = job
        self._total_bytes = total_bytes
        self._told = {index: (time.monotonic(), 0) for index in indices}

    def tell(self, index: int, num_bytes: int) -> None:
        """`num_bytes` are there by now."""
        told_s, told_bytes = self._told[index]
        passed_s = time.monotonic() - told_s
        if passed_s >= _TELL_S:
            self._told[index] = (told_s + passed_s, num_bytes)
            rate = f"{format_bytes((num_bytes - told_bytes) / passed_s)}/s"
            text = f"{format_bytes(num_bytes)} of {format_bytes(self._total_bytes)}, {rate}"
            self._job.tell(self._job.opened.name(index), text, True)
