"""Which rank this process is, read from the environment of whoever started it.

The only module that knows the launchers' variable names. `detect_place` is pure: it takes the environment and
returns the place together with the reason for it.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping

from paceline.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among the processes of the run."""

    rank: int = 0
    """0 to world_size - 1."""
    world_size: int = 1
    """Number of processes in the run."""
    local_rank: int = 0
    """0 to local_world_size - 1, among the processes of this host."""
    local_world_size: int = 1
    """Number of processes on this host."""
    master_addr: str | None = None
    """Address or name on which rank 0 is found; None when there is only one process."""
    master_port: int | None = None
    """TCP port on which rank 0 listens; None when there is only one process."""
    attempt: int = 0
    """How often the launcher has started all ranks again."""
    host: str | None = None
    """What the launcher calls this host; None when it has no name for it."""
    store_is_hosted: bool = False
    """True when the launcher itself listens on master_port (torchrun), so that rank 0 must not."""
    launcher: str
    """Who started this process."""
    reason: str
    """Why we think so, for people."""

    def __post_init__(self) -> None:
        for what, value, end in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < end:
                raise InputError(f"{self.launcher} says {what} {value} of {end}; expected 0 to {end - 1}")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise InputError(f"MASTER_PORT is {self.master_port}; expected 1 to 65535")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Names:
    """What one launcher calls the four numbers."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN = _Names(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", local_world_size="LOCAL_WORLD_SIZE")
_OPEN_MPI = _Names(
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_SRUN = _Names(
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
)
_SRUN_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_OPEN_MPI_URI = ("OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21", "PMIX_SERVER_URI3")
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
_SLURM_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are the batch, extern and interactive steps, which start one process whatever was
asked."""

_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
"""Derived ports lie below the range from which Linux takes the ports of outgoing connections (32768 and
above)."""


def detect_place(environ: Mapping[str, str]) -> Place:
    """The place of this process: paceline run, torchrun, Open MPI, srun, or alone, in this order.

    Raises InputError when the variables of a launcher are there in part, or can't be used.
    """
    if _TORCHRUN.rank in environ or _TORCHRUN.world_size in environ:
        return _from_torchrun(environ)
    if _OPEN_MPI.rank in environ or _OPEN_MPI.world_size in environ:
        return _from_open_mpi(environ)
    if "SLURM_STEP_ID" in environ and _number(environ, "SLURM_STEP_ID") < _SLURM_SPECIAL_STEP:
        return _from_srun(environ)
    if "SLURM_JOB_ID" in environ:
        return Place(launcher="nobody", reason="inside a Slurm job, but not started by srun")
    return Place(launcher="nobody", reason="no launcher's variables are set")


def _from_torchrun(environ: Mapping[str, str]) -> Place:
    launcher, reason = _torchrun_kind(environ)
    _require(environ, (_TORCHRUN.rank, _TORCHRUN.world_size), launcher)
    world_size = _number(environ, _TORCHRUN.world_size)
    if world_size > 1:
        _require(environ, ("MASTER_ADDR", "MASTER_PORT"), launcher)
    if _TORCHRUN.local_rank not in environ:
        reason += "; LOCAL_RANK is not, so one process per host"
    local_rank = _number(environ, _TORCHRUN.local_rank, default=0)
    restarts = "PACELINE_ATTEMPT" if "PACELINE_ATTEMPT" in environ else "TORCHELASTIC_RESTART_COUNT"
    return Place(
        rank=_number(environ, _TORCHRUN.rank),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_number(environ, _TORCHRUN.local_world_size, default=local_rank + 1),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        attempt=_number(environ, restarts, default=0),
        host=environ.get("PACELINE_HOST"),
        store_is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher=launcher,
        reason=reason,
    )


def _torchrun_kind(environ: Mapping[str, str]) -> tuple[str, str]:
    if "PACELINE_RUN_ID" in environ:
        return "paceline run", "PACELINE_RUN_ID is set"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun", "TORCHELASTIC_RUN_ID is set"
    return "the environment", "RANK and WORLD_SIZE are set"


def _from_open_mpi(environ: Mapping[str, str]) -> Place:
    _require(environ, dataclasses.astuple(_OPEN_MPI), "Open MPI")
    world_size = _number(environ, _OPEN_MPI.world_size)
    local_world_size = _number(environ, _OPEN_MPI.local_world_size)
    reason = f"{_OPEN_MPI.rank} is set"
    addr = environ.get("MASTER_ADDR")
    if addr is None and world_size == local_world_size:
        addr, reason = "127.0.0.1", f"{reason}; all ranks are on this host"
    elif addr is None:
        addr, source = _open_mpi_address(environ, world_size)
        reason = f"{reason}; address of rank 0 from {source}"
    job = next((environ[name] for name in _OPEN_MPI_JOB if name in environ), "")
    return Place(
        rank=_number(environ, _OPEN_MPI.rank),
        world_size=world_size,
        local_rank=_number(environ, _OPEN_MPI.local_rank),
        local_world_size=local_world_size,
        master_addr=addr,
        master_port=_number(environ, "MASTER_PORT", default=_port_of(job)),
        launcher="Open MPI",
        reason=reason,
    )


def _open_mpi_address(environ: Mapping[str, str], world_size: int) -> tuple[str, str]:
    """The first address in mpirun's own contact line that other hosts can dial, and the variable it came
    from.

    That is the host of mpirun, where rank 0 normally is; if it is not, `init` says so when it can't listen
    there.
    """
    for name in _OPEN_MPI_URI:
        for addresses in re.findall(r"tcp[46]?://([^;]+):\d+", environ.get(name, "")):
            for address in addresses.split(","):
                if not address.startswith(("127.", "[::1", "::1")):
                    return address.strip("[]"), name
    raise InputError(
        f"mpirun started {world_size} ranks on several hosts and does not say where rank 0 is",
        hint="mpirun -x MASTER_ADDR=<address of the first host> -x MASTER_PORT=29500 ...",
    )


def _from_srun(environ: Mapping[str, str]) -> Place:
    _require(environ, (_SRUN.rank, _SRUN.world_size, _SRUN.local_rank), "srun")
    world_size = _number(environ, _SRUN.world_size)
    local_rank = _number(environ, _SRUN.local_rank)
    reason = f"{_SRUN.rank} is set"
    addr = environ.get("MASTER_ADDR")
    if addr is None:
        nodelist = next((name for name in _SRUN_NODELIST if name in environ), None)
        if nodelist is None and world_size > 1:
            _require(environ, _SRUN_NODELIST[:1], "srun")
        addr = first_host(environ[nodelist]) if nodelist is not None else None
        reason = f"{reason}; rank 0 is on the first host of {nodelist}"
    node = _number(environ, "SLURM_NODEID", default=0)
    counts = _tasks_per_node(environ.get(_SRUN.local_world_size, ""))
    return Place(
        rank=_number(environ, _SRUN.rank),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=counts[node] if node < len(counts) else local_rank + 1,
        master_addr=addr,
        master_port=_number(environ, "MASTER_PORT", default=_port_of(environ.get("SLURM_JOB_ID", ""))),
        attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
        host=environ.get("SLURMD_NODENAME"),
        launcher="srun",
        reason=reason,
    )


def first_host(nodelist: str) -> str:
    """'rack[2-3]n[07,09],x' -> 'rack2n07': the first name in Slurm's compressed list."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first).strip()


def _tasks_per_node(text: str) -> list[int]:
    """'2(x3),1' -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def _port_of(job: str) -> int:
    """The same port on every rank of a job without asking anybody, and most likely another one for another
    job."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _require(environ: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        found = [name for name in names if name in environ]
        raise InputError(
            f"{launcher}: {', '.join(missing)} not set" + (f", but {', '.join(found)} set" if found else ""),
            hint="start the script with: paceline run script.py   (or unset these variables to train alone)",
        )


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(f"{name} is {text!r}; expected a whole number") from None
