"""Which rank am I: one table of environments, and what each launcher's half-set variables are told."""

from __future__ import annotations

import pytest

from paceline import InputError
from paceline.cluster.detect import Place, detect_place, first_host

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ONE_HOST = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip


def place(environ: dict[str, str]) -> tuple[int, int, int, int, str | None, str]:
    found = detect_place(environ)
    assert found.reason
    return (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.master_addr,
        found.launcher,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, None, "nobody")),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "y"}, (0, 1, 0, 1, None, "nobody")),
        (TORCHRUN, (3, 4, 1, 2, "10.0.0.5", "the environment")),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (3, 4, 1, 2, "10.0.0.5", "torchrun")),
        # paceline run sets Open MPI's variables as well, for scripts that want them.
        ({**TORCHRUN, **OPEN_MPI, "PACELINE_RUN_ID": "r"}, (3, 4, 1, 2, "10.0.0.5", "paceline run")),
        # torchrun inside srun, mpirun inside a Slurm job: the inner one started us.
        ({**TORCHRUN, **SRUN}, (3, 4, 1, 2, "10.0.0.5", "the environment")),
        ({**ONE_HOST, **SRUN}, (3, 4, 1, 4, "127.0.0.1", "Open MPI")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, None, "the environment")),
        (ONE_HOST, (3, 4, 1, 4, "127.0.0.1", "Open MPI")),
        ({**OPEN_MPI, "MASTER_ADDR": "head"}, (3, 4, 1, 2, "head", "Open MPI")),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "12.0;tcp://127.0.0.1,10.0.0.7,192.168.0.7:41231"},
            (3, 4, 1, 2, "10.0.0.7", "Open MPI"),
        ),
        (
            {**OPEN_MPI, "PMIX_SERVER_URI2": "prterun-h-1@0.0;tcp4://10.0.0.8:4321"},
            (3, 4, 1, 2, "10.0.0.8", "Open MPI"),
        ),
        (SRUN, (3, 4, 0, 1, "gpu07", "srun")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, (3, 4, 0, 2, "gpu07", "srun")),
        ({**SRUN, "MASTER_ADDR": "head"}, (3, 4, 0, 1, "head", "srun")),
        # The batch script itself, and an interactive shell in an allocation, are not ranks.
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, (0, 1, 0, 1, None, "nobody")),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, (0, 1, 0, 1, None, "nobody")),
    ],
)
def test_place(environ: dict[str, str], expected: tuple[int, int, int, int, str | None, str]) -> None:
    assert place(environ) == expected


def test_ports_are_derived_from_the_job_and_alike_on_all_ranks() -> None:
    ports = {
        detect_place({**SRUN, "SLURM_PROCID": str(rank), "SLURM_JOB_ID": str(job)}).master_port
        for rank in range(4)
        for job in (1, 2)
    }
    assert len(ports) == 2 and all(10_000 <= (port or 0) < 30_000 for port in ports)
    assert detect_place({**SRUN, "MASTER_PORT": "4000"}).master_port == 4000


def test_attempt_host_and_store_come_from_the_launcher() -> None:
    ours = detect_place({**TORCHRUN, "PACELINE_RUN_ID": "r", "PACELINE_ATTEMPT": "2", "PACELINE_HOST": "bob"})
    assert (ours.attempt, ours.host, ours.store_is_hosted) == (2, "bob", False)
    torchrun = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    theirs = detect_place({**TORCHRUN, **torchrun})
    assert (theirs.attempt, theirs.host, theirs.store_is_hosted) == (1, None, True)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE not set, but RANK set"),
        ({"WORLD_SIZE": "2"}, "RANK not set, but WORLD_SIZE set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT not set"),
        ({**TORCHRUN, "RANK": "four"}, "RANK is 'four'; expected a whole number"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4; expected 0 to 3"),
        ({**TORCHRUN, "MASTER_PORT": "80000"}, "MASTER_PORT is 80000; expected 1 to 65535"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "Open MPI: OMPI_COMM_WORLD_SIZE, .* not set, but OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI, r"does not say where rank 0 is\n  mpirun -x MASTER_ADDR="),
        ({**OPEN_MPI, "PMIX_SERVER_URI2": "x@0.0;tcp4://127.0.0.1:4321"}, "does not say where rank 0 is"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "srun: SLURM_PROCID, SLURM_LOCALID not set"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_STEP_NODELIST not set"),
    ],
)
def test_half_set_environments_are_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        detect_place(environ)


def test_a_place_checks_itself() -> None:
    with pytest.raises(InputError, match="local rank 2 of 2"):
        Place(rank=2, world_size=4, local_rank=2, local_world_size=2, launcher="x", reason="y")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[07-09]", "gpu07"),
        ("gpu[3,5-6],x", "gpu3"),
        ("rack[2-3]n[07,09],x[1-2]", "rack2n07"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
