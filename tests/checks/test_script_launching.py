"""Rules about who starts the ranks, and where they meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import IMPORTS, Case, confirm, look

SPAWN = """
import torch.multiprocessing as mp
def main(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
"""

CASES = [
    Case(
        check="hard-coded-master",
        status="failure",
        bad="""
        def setup():
            os.environ["MASTER_ADDR"] = "localhost"  #!
            os.environ["MASTER_PORT"] = "12355"
            dist.init_process_group("nccl")
        setup()
        """,
        good="""
        os.environ.setdefault("MASTER_ADDR", "localhost")
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = "12355"
        os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29500")
        """,
        remedy="os.environ.setdefault(\"MASTER_ADDR\", 'localhost'); os.environ.setdefault(\"MASTER_PORT\", '12355')",
        head=IMPORTS,
    ),
    Case(
        check="hard-coded-master",
        bad="""
        if sys.argv[1:]:
            os.environ["MASTER_PORT"] = "12355"  #!
        """,
        good="""
        if sys.argv[1:] == ["slurm"]:
            os.environ["MASTER_PORT"] = "12355"
        """,
    ),
    Case(
        check="hard-coded-master",
        status="failure",
        bad="""
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = "80000"  #!
        """,
        good="""
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = "8000"
        """,
    ),
    Case(
        check="fixed-meeting-point",
        status="failure",
        bad="""
        dist.init_process_group(
            "nccl",
            init_method="tcp://127.0.0.1:23456",  #!
        )
        """,
        good='dist.init_process_group("nccl", init_method="env://")',
        remedy='init_method="env://",',
        head=IMPORTS,
    ),
    Case(
        check="fixed-meeting-point",
        bad="""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--dist-url", default="tcp://224.66.41.62:23456")  #!
        args = parser.parse_args()
        dist.init_process_group("nccl", init_method=args.dist_url)
        """,
        good="""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--dist-url", default="env://")
        parser.add_argument("--tracker", default="tcp://localhost:1")
        args = parser.parse_args()
        if args.dist_url == "auto":
            assert args.num_machines == 1
            args.dist_url = "tcp://127.0.0.1:1"
        dist.init_process_group("nccl", init_method=args.dist_url)
        """,
        remedy="start it with --dist-url env://",
        head=IMPORTS,
    ),
    Case(
        check="fixed-meeting-point",
        bad="""
        url = f"file://{os.getcwd()}/meet"  #!
        dist.init_process_group("nccl", init_method=url)
        """,
        good="""
        if sys.platform == "win32":
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet")
        try:
            dist.init_process_group("nccl")
        except ValueError:
            dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
        """,
        head=IMPORTS,
    ),
    Case(
        check="own-workers",
        status="failure",
        bad=SPAWN + "mp.spawn(main, args=(4,), nprocs=4)  #!\n",
        good=SPAWN + 'main(int(os.environ["LOCAL_RANK"]), 4)\n',
        remedy="call main(int(os.environ.get('LOCAL_RANK', 0)), 4) once and start no processes",
        head=IMPORTS,
    ),
    Case(
        check="own-workers",
        bad=SPAWN + "if len(sys.argv) > 1:\n    mp.spawn(main, args=(4,), nprocs=4)  #!\n",
        good=SPAWN + "def fill(index): pass\nmp.spawn(fill, nprocs=4)\n",
        head=IMPORTS,
    ),
    Case(
        check="own-workers",
        status="failure",
        bad=SPAWN + "for rank in range(2):\n    mp.Process(target=main, args=(rank, 2)).start()  #!\n",
        good=SPAWN + "def fill(queue): pass\nmp.Process(target=fill, args=([],)).start()\n",
        remedy='call main(int(os.environ.get("RANK", 0)), 2) once and start no processes',
        head=IMPORTS,
    ),
    Case(
        check="one-host-world",
        status="failure",
        bad="""
        world_size = torch.cuda.device_count()  #!
        def start(rank):
            dist.init_process_group("nccl", rank=rank, world_size=world_size)
        start(0)
        """,
        good="""
        world_size = int(os.environ["WORLD_SIZE"])
        def start(rank):
            dist.init_process_group("nccl", rank=rank, world_size=world_size)
            print(torch.cuda.device_count())
        start(0)
        """,
        remedy='world_size = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count()))',
        head=IMPORTS,
    ),
    Case(
        check="one-host-world",
        bad="""
        nprocs = torch.cuda.device_count()
        def mean(value):
            dist.all_reduce(value)
            value /= nprocs  #!
            return value
        mean(torch.ones(1))
        """,
        good="""
        nprocs = dist.get_world_size()
        def mean(value):
            dist.all_reduce(value)
            value /= nprocs
            return value
        mean(torch.ones(1))
        workers = 8 / torch.cuda.device_count()
        """,
        remedy="value /= dist.get_world_size()",
    ),
    Case(
        check="one-host-world",
        bad="""
        local_rank = int(os.environ["LOCAL_RANK"])
        sampler = DistributedSampler([1], num_replicas=8, rank=local_rank)  #!
        """,
        good="""
        rank = int(os.environ["RANK"])
        sampler = DistributedSampler([1], num_replicas=8, rank=rank)
        """,
        remedy='rank=int(os.environ.get("RANK", local_rank))',
    ),
    Case(
        check="success-without-training",
        bad="""
        def are_enough(wanted):
            return torch.cuda.device_count() >= wanted
        if not are_enough(2):
            print("two GPUs are needed")
            sys.exit()  #!
        """,
        good="""
        def are_enough(wanted):
            return torch.cuda.device_count() >= wanted
        if not are_enough(2):
            sys.exit("two GPUs are needed")
        if args.is_only_shown:
            sys.exit()
        """,
        remedy="raise SystemExit(1)",
    ),
    Case(
        check="success-without-training",
        bad="gpus = torch.cuda.device_count()\nif gpus < 2:\n    exit(0)  #!\n",
        good="gpus = torch.cuda.device_count()\nif gpus < 2:\n    exit(1)\n",
    ),
    Case(
        check="no-process-group",
        status="failure",
        bad="torch.ones(1, requires_grad=True).sum().backward()  #!",
        good="torch.ones(1).sum()",
        remedy="for model and optimizer (make one if there is none)",
        head="import torch\n",
    ),
    Case(
        check="no-process-group",
        status="failure",
        bad="torch.ones(1, requires_grad=True).sum().backward()  #!",
        good="import paceline\nrun = paceline.init()\ntorch.ones(1, requires_grad=True).sum().backward()",
        head="import torch\n",
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)


def test_two_lines_of_one_function_are_one_finding(tmp_path: Path) -> None:
    text = 'import os\nos.environ["MASTER_ADDR"] = "h1"\nos.environ["MASTER_PORT"] = "1"\n'
    (found,) = look(tmp_path, text)
    assert found.where == "train.py:2"
    assert found.text == "MASTER_ADDR is set to 'h1' here, and MASTER_PORT in line 3, whatever the launcher has chosen"


def test_a_port_that_is_none_is_called_so(tmp_path: Path) -> None:
    found = look(tmp_path, 'import os\nos.environ["MASTER_PORT"] = "80000"\n')
    assert [one.text for one in found] == ["80000 is no port: the highest one is 65535"]
    assert found[0].remedy == "delete this line: the launcher sets MASTER_PORT"


def test_spawned_workers_are_not_accused_of_using_their_index(tmp_path: Path) -> None:
    text = IMPORTS + SPAWN + "    torch.cuda.set_device(rank)\nmp.spawn(main, args=(4,), nprocs=4)\n"
    assert "device-from-rank" not in {one.check for one in look(tmp_path, text)}
