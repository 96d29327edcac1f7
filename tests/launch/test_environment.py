"""What each rank finds in its environment: torchrun's names and Open MPI's, all of them."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.launch.environment import HostPlan, RunPlan, choose_num_threads, rank_environments, secret_names
from paceline.strategy import parse_sync

ALICE = HostPlan(
    name="alice",
    slots=2,
    num_cores=8,
    interface="eth0",
    gpus=None,
    python="/usr/bin/python3",
    cwd="/home/u/p",
    python_path=("/state/runtime/abc",),
    env={},
)
BOB = dataclasses.replace(ALICE, name="bob", slots=3, num_cores=2, interface="enp3s0", gpus=(0, 2, 5))
PLAN = RunPlan(run_id="20260101-120000-abcd", hosts=(ALICE, BOB), master_addr="10.0.0.5", max_restarts=2)

# Variable -> its value in each of the five ranks.
TABLE = {
    # torchrun
    "RANK": "0 1 2 3 4",
    "LOCAL_RANK": "0 1 0 1 2",
    "GROUP_RANK": "0 0 1 1 1",
    "ROLE_RANK": "0 1 2 3 4",
    "ROLE_NAME": "default default default default default",
    "LOCAL_WORLD_SIZE": "2 2 3 3 3",
    "WORLD_SIZE": "5 5 5 5 5",
    "GROUP_WORLD_SIZE": "2 2 2 2 2",
    "ROLE_WORLD_SIZE": "5 5 5 5 5",
    "MASTER_ADDR": "10.0.0.5 10.0.0.5 10.0.0.5 10.0.0.5 10.0.0.5",
    "MASTER_PORT": "29500 29500 29500 29500 29500",
    "TORCHELASTIC_RESTART_COUNT": "1 1 1 1 1",
    "TORCHELASTIC_MAX_RESTARTS": "2 2 2 2 2",
    "TORCHELASTIC_RUN_ID": " ".join([PLAN.run_id] * 5),
    "TORCHELASTIC_USE_AGENT_STORE": "False False False False False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1 1 1 1 1",
    "OMP_NUM_THREADS": "4 4 1 1 1",
    # Open MPI
    "OMPI_COMM_WORLD_RANK": "0 1 2 3 4",
    "OMPI_COMM_WORLD_SIZE": "5 5 5 5 5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0 1 0 1 2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2 2 3 3 3",
    "OMPI_COMM_WORLD_NODE_RANK": "0 1 0 1 2",
    # The wires
    "GLOO_SOCKET_IFNAME": "eth0 eth0 enp3s0 enp3s0 enp3s0",
    "NCCL_SOCKET_IFNAME": "=eth0 =eth0 =enp3s0 =enp3s0 =enp3s0",
    # Ours
    "PACELINE_RANK": "0 1 2 3 4",
    "PACELINE_WORLD_SIZE": "5 5 5 5 5",
    "PACELINE_NUM_HOSTS": "2 2 2 2 2",
    "PACELINE_STALL_WARNING_S": "60 60 60 60 60",
    "PACELINE_HOST": "alice alice bob bob bob",
    "PACELINE_RUN_ID": " ".join([PLAN.run_id] * 5),
    "PACELINE_ATTEMPT": "1 1 1 1 1",
    "PACELINE_LEASE": " ".join([f"{PLAN.run_id}/0"] * 2 + [f"{PLAN.run_id}/1"] * 3),
    "PYTHONPATH": " ".join(["/state/runtime/abc"] * 5),
}


def all_ranks(plan: RunPlan) -> list[dict[str, str]]:
    return [env for index in range(len(plan.hosts)) for env in rank_environments(plan, index, port=29500, attempt=1)]


def with_env(**env: str) -> dict[str, str]:
    host = dataclasses.replace(BOB, env=env)
    return rank_environments(dataclasses.replace(PLAN, hosts=(host,)), 0, port=29500, attempt=0)[0]


@pytest.mark.parametrize("name", TABLE)
def test_variable_in_each_rank(name: str) -> None:
    assert [env[name] for env in all_ranks(PLAN)] == TABLE[name].split()


def test_there_is_nothing_else_but_the_gpus_asked_for() -> None:
    extra = [env.keys() - TABLE.keys() for env in all_ranks(PLAN)]
    assert extra == [set(), set(), *[{"CUDA_VISIBLE_DEVICES"}] * 3]
    assert all_ranks(PLAN)[4]["CUDA_VISIBLE_DEVICES"] == "0,2,5", "each rank picks its own by LOCAL_RANK"


def test_how_hosts_synchronise_is_told_to_each_rank() -> None:
    plan = dataclasses.replace(PLAN, sync=parse_sync("streaming:int4:H=30"))
    told = {env["PACELINE_SYNC"] for env in all_ranks(plan)}
    assert {str(parse_sync(text)) for text in told} == {"streaming:H=30"}
    assert all("PACELINE_SYNC" not in env for env in all_ranks(PLAN))


def test_ranks_follow_the_hosts() -> None:
    assert PLAN.num_ranks == 5
    assert PLAN.host_of_ranks() == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "MY_OWN"]
)
def test_what_the_user_says_wins(name: str) -> None:
    assert with_env(**{name: "7"})[name] == "7"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PACELINE_LEASE"])
def test_but_not_who_a_rank_is(name: str) -> None:
    assert with_env(**{name: "7"})[name] == with_env()[name]


@pytest.mark.parametrize(
    ("asked", "path"),
    [({}, "/state/runtime/abc"), ({"PYTHONPATH": ""}, "/state/runtime/abc"),
     ({"PYTHONPATH": "/a:/b"}, "/state/runtime/abc:/a:/b")],
)  # fmt: skip
def test_the_users_python_path_comes_after_ours(asked: dict[str, str], path: str) -> None:
    assert with_env(**asked)["PYTHONPATH"] == path


@pytest.mark.parametrize(
    ("slots", "num_cores", "env", "expected"),
    [
        (1, 8, {}, ("8", "8 cores for 1 rank")),
        (3, 8, {}, ("2", "8 cores for 3 ranks")),
        (4, 2, {}, ("1", "2 cores for 4 ranks")),
        (1, 8, {"OMP_NUM_THREADS": "4,2"}, ("4,2", "asked for")),
    ],
)
def test_threads_and_why(slots: int, num_cores: int, env: dict[str, str], expected: tuple[str, str]) -> None:
    assert choose_num_threads(dataclasses.replace(ALICE, slots=slots, num_cores=num_cores, env=env)) == expected


def test_secrets_are_known_by_their_names() -> None:
    names = ["WANDB_API_KEY", "hf_token", "MY_PASSWORD", "AWS_SECRET", "NCCL_DEBUG", "PATH"]
    assert secret_names(names) == set(names[:4])
