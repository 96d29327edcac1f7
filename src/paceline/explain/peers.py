"""Whose log is missing: the ranks and hosts that lines name, and of which there is no log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.explain.lines import Line
from paceline.explain.reading import Log

_ADDRESS = re.compile(
    r"remote=\[?(?P<remote>[^\]\s,)]+)\]?|peer \[(?P<gloo>[^\]]+)\]|"
    r"srun: error: (?P<srun>\S+): task|process rank \d+ with PID \d+ on node (?P<mpi>\S+) exited|"
    r"(?:connect to|address of) \((?P<c10d>[^,()\s]+), \d+\)|"
    r"(?:remote peer|peer|from|to) (?P<nccl>[A-Za-z0-9][\w.:%-]*)<\d+>"
)
_RANKS = re.compile(
    r"from \[(?P<root>\d+)\] via c10d|timeout from\D{0,12}rank (?P<first>\d+)|aborted on rank (?P<aborted>\d+)|"
    r"[Rr]anks? (?P<barrier>[\d, ]+) failed to pass|\[(?P<lagging>[\d, ]+)\] (?:are|is) the lagging|"
    r"\[(?P<absent>\d+)\] finished collective|Proxy Call to rank (?P<proxy>\d+)|"
    r"srun: error: \S+: tasks? (?P<srun>\d+):|process rank (?P<mpi>\d+) with PID"
)
_OWN_ADDRESSES = re.compile(r"[\w.-]+:([0-9a-fA-F.:]+)(?:%[\w.-]+)?<\d+>")
_LOOPBACK = re.compile(r"127\.|localhost|::1$|0\.0\.0\.0")
_MOST_NAMED = 8


def missing_logs(logs: Sequence[Log], told: Iterable[Line], *, is_all: bool) -> list[str]:
    """What to give as well, as phrases. `told`: the lines that speak of others. `is_all`: something, in any case."""
    told = list(told)
    hosts = {host for log in logs for host in log.hosts}
    ranks = {rank for log in logs for rank in log.ranks}
    wanted = [*_blamed(logs), *_named_ranks(told, ranks), *_named_hosts(logs, told, hosts)]
    world_size = max((log.world_size for log in logs if log.world_size), default=0)
    silent = [rank for rank in range(world_size) if rank not in ranks]
    if silent and ranks:
        wanted.append(f"the log of {_name_ranks(silent)} (the run has {world_size})")
    if wanted:
        return list(dict.fromkeys(wanted))
    if not is_all:
        return []
    if world_size and not silent:
        return ['the kernel\'s log of every host (journalctl -k, or dmesg): is there "Killed process" or Xid?']
    return ["the stderr of all other ranks and hosts; no line here names one"]


def _blamed(logs: Sequence[Log]) -> list[str]:
    """torchrun's summaries name a rank, and none of these logs has its last words."""
    heard = {crash.line.rank for log in logs for crash in log.crashes}
    wanted: list[str] = []
    for log in logs:
        for blame in log.blames:
            if blame.exit_code < 0 or blame.line.rank in heard:
                continue  # a signal leaves nothing in the rank's own output
            host = f" on host {blame.line.host}" if blame.line.host else ""
            who = f"rank {blame.line.rank}{host}"
            wanted.append(f"the stderr of {who}, which ended first there, with exit code {blame.exit_code}")
    return wanted


def _named_ranks(told: list[Line], known: set[int]) -> list[str]:
    named: list[int] = []
    for line in told:
        for match in _RANKS.finditer(line.text):
            text = next(group for group in match.groups() if group is not None)
            named += [int(number) for number in re.findall(r"\d+", text)]
    others = sorted({rank for rank in named if rank not in known})
    return [f"the log of {_name_ranks(others)}, which these lines name"] if others else []


def _named_hosts(logs: Sequence[Log], told: list[Line], known: set[str]) -> list[str]:
    host_of = _addresses(logs)
    named: dict[str, None] = {}
    for line in told:
        for match in _ADDRESS.finditer(line.text):
            address = next(group for group in match.groups() if group is not None).removeprefix("::ffff:")
            address = address.partition("%")[0]
            name = host_of.get(address, address)
            if not _LOOPBACK.match(name) and not any(_is_same_host(name, host) for host in known):
                named[name] = None
    return [f"the log of host {name}, which these lines name" for name in list(named)[:_MOST_NAMED]]


def _addresses(logs: Sequence[Log]) -> dict[str, str]:
    """Address -> host, where NCCL says which interfaces it uses."""
    found: dict[str, str] = {}
    for log in logs:
        for hit in log.hits:
            if hit.signature.id in ("nccl-interfaces", "nccl-virtual-interface") and hit.first.host:
                for address in _OWN_ADDRESSES.findall(hit.first.text):
                    found[address] = hit.first.host
    return found


def _is_same_host(one: str, other: str) -> bool:
    """Whether a name is the other's with or without its domain."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _name_ranks(ranks: list[int]) -> str:
    """`ranks 0 to 7, 9`; sorted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs[:_MOST_NAMED])
    return f"rank{'' if len(ranks) == 1 else 's'} {named}" + (" ..." if len(runs) > _MOST_NAMED else "")
