"""`paceline env sync`: from what is installed on one host to the same environment on the others.

Quick first: what is there already is found before anything is hashed. A host that can't have it does not hold up the
others; its reason is in its outcome.
"""

from __future__ import annotations

import dataclasses

from paceline.cluster.spec import Host
from paceline.envs import inventory
from paceline.envs.inventory import Inventory
from paceline.envs.job import Job
from paceline.envs.lock import Lock, make_lock
from paceline.envs.opening import open_some
from paceline.envs.options import Outcome, SyncOptions, Tell, open_source
from paceline.errors import HostError, InputError
from paceline.launch.errands import Errand, run_errands

_LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synced:
    """What came of it all."""

    lock: Lock
    inventory: Inventory
    outcomes: tuple[Outcome, ...]
    """One for each host, in order."""


def sync(options: SyncOptions, tell: Tell) -> Synced:
    """Raises HostError where the source can't be opened or read, InputError for what can't be had elsewhere,
    InterruptedEarlyError for a signal."""
    targets = [host for host in options.hosts if not are_same(host, options.source)]
    if not targets:
        raise InputError(f"the environment is {options.source.name}'s own already", hint="-H names the other hosts")
    with open_source(options) as source:
        [facts] = source.facts
        errand = Errand(host=0, module=inventory.__name__)
        [reply] = run_errands(source.hosts, [errand], timeout_s=_LIMIT_S)
    if reply.problem:
        text = f"{options.source.name}: can't say what is installed: {reply.problem}"
        raise HostError(text, hint=f"On {options.source.name}:  {facts.python_path} -m pip check")
    found = Inventory.from_json(reply.value)
    lock = make_lock(found, offline=options.offline)
    with open_some(targets, [_pythons(host, found) for host in targets]) as opened:
        outcomes = {
            place: Outcome(host=targets[place].name, status="failed", text=_text(failure), remedy=failure.hint or "")
            for place, failure in opened.failures.items()
        }
        job = Job(options=options, inventory=found, lock=lock, opened=opened, tell=tell)
        outcomes |= {opened.places[index]: outcome for index, outcome in job.do().items()}
    return Synced(lock=lock, inventory=found, outcomes=tuple(outcomes[place] for place in sorted(outcomes)))


def are_same(one: Host, other: Host) -> bool:
    """Whether two names are one host, as far as names tell."""
    return (one.name, one.user, one.port) == (other.name, other.user, other.port)


def _pythons(host: Host, found: Inventory) -> list[str]:
    """What to make the environment with: any Python of the same minor version will do. The last one is only there to
    be told of, where there is none."""
    return [*([host.python] if host.python else []), f"python{found.python}", found.python_path, "python3"]


def _text(failure: HostError) -> str:
    return failure.message.partition(": ")[2] or failure.message
