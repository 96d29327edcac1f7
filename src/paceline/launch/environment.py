"""The environment of each rank: a pure function of the layout, the wires and the attempt.

Everything that torchrun sets is set, so that its scripts run as they are, and the Open MPI names beside it, for scripts
written for mpirun.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from paceline.launch.process import LEASE_VARIABLE
from paceline.strategy import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host of a run, with all that was decided about it."""

    name: str
    slots: int
    num_cores: int
    interface: str
    gpus: tuple[int, ...] | None
    """The GPUs to be used there; None: all that are visible."""
    python: str
    cwd: str
    python_path: tuple[str, ...]
    """Folders that stand before all else on the ranks' PYTHONPATH."""
    env: Mapping[str, str]
    """What the user asked for, with `--env` and in the hostfile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A whole run, ready to start."""

    run_id: str
    hosts: tuple[HostPlan, ...]
    master_addr: str
    max_restarts: int
    sync: Strategy | None = None
    """None: as the script does it."""
    stall_warning_s: float = 60.0
    """0: ranks are not watched."""

    @property
    def num_ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def host_of_ranks(self) -> dict[int, int]:
        """The index of each rank's host: ranks follow the hosts in the order given."""
        hosts = [index for index, host in enumerate(self.hosts) for _ in range(host.slots)]
        return dict(enumerate(hosts))


def choose_num_threads(host: HostPlan) -> tuple[str, str]:
    """OMP_NUM_THREADS for a rank, and why."""
    if "OMP_NUM_THREADS" in host.env:
        return host.env["OMP_NUM_THREADS"], "asked for"  # as it is: `4,2` is a value for nested teams
    threads = max(1, host.num_cores // host.slots)
    cores, ranks = (f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((host.num_cores, "core"), (host.slots, "rank")))
    return str(threads), f"{cores} for {ranks}"


def rank_environments(plan: RunPlan, host_index: int, *, port: int, attempt: int) -> list[dict[str, str]]:
    """The variables of each rank on one host, in the order of their local ranks."""
    first_rank = sum(host.slots for host in plan.hosts[:host_index])
    local_size = plan.hosts[host_index].slots
    shared = _shared_environment(plan, host_index, port=port, attempt=attempt)
    return [
        {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(rank),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
            "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),  # Open MPI's word for the rank on its node, not the node's
            "PACELINE_RANK": str(rank),
        }
        for local_rank, rank in enumerate(range(first_rank, first_rank + local_size))
    ]


def _shared_environment(plan: RunPlan, host_index: int, *, port: int, attempt: int) -> dict[str, str]:
    host = plan.hosts[host_index]
    world_size, num_hosts, local_size = str(plan.num_ranks), str(len(plan.hosts)), str(host.slots)
    environment = {
        "OMP_NUM_THREADS": choose_num_threads(host)[0],
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_SOCKET_IFNAME": f"={host.interface}",
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.gpus))} if host.gpus is not None else {}),
        **host.env,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": str(host_index),
        "GROUP_WORLD_SIZE": num_hosts,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMPI_COMM_WORLD_SIZE": world_size,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
        "PACELINE_RUN_ID": plan.run_id,
        "PACELINE_HOST": host.name,
        "PACELINE_ATTEMPT": str(attempt),
        "PACELINE_WORLD_SIZE": world_size,
        "PACELINE_NUM_HOSTS": num_hosts,
        "PACELINE_STALL_WARNING_S": f"{plan.stall_warning_s:g}",
        **({"PACELINE_SYNC": str(plan.sync)} if plan.sync is not None else {}),
        LEASE_VARIABLE: f"{plan.run_id}/{host_index}",
    }
    paths = [*host.python_path, *filter(None, [host.env.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": ":".join(paths)}


def secret_names(names: Sequence[str]) -> set[str]:
    """Those of these variables whose value must not be shown."""
    signs = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")
    return {name for name in names if any(sign in name.upper() for sign in signs)}
