"""A script that makes a process group of its own is stopped at once; one that takes what it was given passes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from paceline.launch import bootstrap
from paceline.train import guard
from paceline.train.guard import find_problem

RANK_1_OF_2 = {
    "PACELINE_RUN_ID": "tuesday",
    "TORCHELASTIC_RUN_ID": "tuesday",
    "PACELINE_WORLD_SIZE": "2",
    "PACELINE_RANK": "1",
    "PACELINE_NUM_HOSTS": "2",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "MASTER_ADDR": "10.0.0.5",
}


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, {}),
        ({}, {"world_size": 2, "rank": 1}),
        ({}, {"meeting": "tcp://10.0.0.5:29500"}),
        ({}, {"meeting": "file:///shared/store"}),
        ({"MASTER_ADDR": "localhost"}, {"meeting": "a store"}),
        ({"MASTER_ADDR": "localhost", "PACELINE_NUM_HOSTS": "1"}, {}),
        ({"PACELINE_NUM_HOSTS": "1"}, {"meeting": "tcp://localhost:29500"}),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8"}, {"rank": 7}),  # `paceline run -- torchrun ...`
    ],
)
def test_no_problem(environ: dict[str, str], asked: dict[str, object]) -> None:
    assert find_problem({**RANK_1_OF_2, **environ}, **{"meeting": "env://", **asked}) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "asked", "words"),
    [
        ({}, {"world_size": 1, "rank": 0}, "started 2 ranks, but this script makes a process group of 1"),
        ({"WORLD_SIZE": "8"}, {}, "makes a process group of 8 of its own (at 10.0.0.5)"),
        ({}, {"world_size": 4, "meeting": "tcp://127.0.0.1:5"}, "of 4 of its own (at 127.0.0.1)"),
        ({}, {"world_size": 2, "rank": 0}, "as rank 1, but the script joins as rank 0"),
        ({"RANK": "0"}, {}, "as rank 1, but the script joins as rank 0"),
        ({"MASTER_ADDR": "localhost"}, {}, "to meet at localhost, which is another machine on each of the 2 hosts"),
        ({}, {"meeting": "tcp://[::1]:29500"}, "to meet at [::1]"),
    ],
)
def test_problems(environ: dict[str, str], asked: dict[str, object], words: str) -> None:
    problem = find_problem({**RANK_1_OF_2, **environ}, **{"meeting": "env://", **asked})  # type: ignore[arg-type]
    assert problem is not None and words in problem


def test_models_are_finished_where_the_script_ends_its_process_group_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch was imported before the watch began."""
    ended: list[object] = []
    c10d, home, parallel = ModuleType("c10d"), ModuleType("distributed"), ModuleType("parallel")
    c10d.destroy_process_group = home.destroy_process_group = ended.append  # type: ignore[attr-defined]
    c10d.GroupMember = SimpleNamespace(WORLD="world")  # type: ignore[attr-defined]
    parallel.DistributedDataParallel = type("Model", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed", home)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", parallel)
    monkeypatch.setattr(guard, "finish_models", lambda: ended.append("models"))
    guard.watch_models()
    assert c10d.destroy_process_group is home.destroy_process_group
    home.destroy_process_group()
    home.destroy_process_group("world")
    home.destroy_process_group("another")
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("no data")
        finally:
            home.destroy_process_group()
    assert ended == ["models", None, "models", "world", "another", None]


def start_rank(tmp_path: Path, code: str, rank: int, port: int) -> subprocess.Popen[str]:
    """As the agent does: through the worker, with our sitecustomize first on the path."""
    site = tmp_path / "runtime"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(bootstrap.SITE_CUSTOMIZE)
    (tmp_path / "train.py").write_text(code)
    env = {
        "PACELINE_RUN_ID": "r",
        "TORCHELASTIC_RUN_ID": "r",
        "PACELINE_WORLD_SIZE": "2",
        "PACELINE_RANK": str(rank),
        "PACELINE_NUM_HOSTS": "1",
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(site), str(Path(bootstrap.__file__).parents[2])]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", "from paceline.train.worker import main; main()", "script", "train.py"],
        cwd=tmp_path,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 50) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


RIGHT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(int(x), dist.init_process_group.__name__)
try:
    dist.init_process_group("gloo", no_such_argument=1)
except TypeError as error:
    print(type(error).__name__)
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_a_group_of_the_right_size_passes(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        ranks = [start_rank(tmp_path, RIGHT, rank, held.getsockname()[1]) for rank in (0, 1)]
        ended = [finish(rank) for rank in ranks]
    assert ended == [(0, "2 init_process_group\nTypeError\n", "")] * 2


WRONG = """
import os, torch.distributed as dist
os.environ["WORLD_SIZE"] = "1"  # what a script with a setup() of its own does
try:
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", None, 3)  # by position; nobody would ever come
except Exception as error:
    print(error.message)
dist.init_process_group("gloo")
"""


@pytest.mark.ranks
def test_a_group_of_another_size_fails_before_it_waits(tmp_path: Path) -> None:
    exit_code, out, err = finish(start_rank(tmp_path, WRONG, 0, 1))
    assert exit_code == 1
    assert out == (
        "paceline started 2 ranks, but this script makes a process group of 3 of its own (at 127.0.0.1): "
        "every host would train by itself\n"
    )
    assert err.startswith("paceline started 2 ranks, but this script makes a process group of 1 of its own")
    assert "let the script take RANK" in err and "Traceback" not in err
