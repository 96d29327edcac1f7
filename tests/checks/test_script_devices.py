"""Rules about which GPU a rank takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import IMPORTS, Case, confirm, look

CASES = [
    Case(
        check="hard-coded-device",
        bad="""
        device = torch.device("cuda:0")  #!
        model = nn.Linear(1, 1).cuda(0)  #!
        torch.cuda.set_device(0)  #!
        wrapped = DDP(model, device_ids=[0])  #!
        """,
        good="""
        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local_rank)
        model = nn.Linear(1, 1).cuda()
        torch.cuda.set_device(local_rank)
        wrapped = DDP(model, device_ids=[local_rank])
        if device == "cuda:0" or str(device) in ("cuda:0", "cpu"):
            pass
        """,
        remedy='device = torch.device("cuda:" + os.environ.get("LOCAL_RANK", "0"))',
    ),
    Case(
        check="hard-coded-device",
        bad="""
        if dist.get_world_size() > 1:
            device = "cuda:0"  #!
        """,
        good="""
        if dist.get_world_size() == 1:
            device = "cuda:0"
        """,
    ),
    Case(
        check="hard-coded-device",
        bad="""
        device = "cuda:0" if torch.cuda.is_available() else "cpu"  #!
        """,
        good="""
        device = "cuda:0"
        if len(sys.argv) > 1:
            device = f"cuda:{local_rank}"
        """,
    ),
    Case(
        check="hard-coded-device",
        bad="""
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
        device = torch.device("cuda:0")  #!
        """,
        good="""
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
        device = torch.device("cuda:0")
        """,
    ),
    Case(
        check="device-from-rank",
        status="failure",
        bad="""
        rank = dist.get_rank()
        torch.cuda.set_device(rank)  #!
        model = DDP(nn.Linear(1, 1), device_ids=[int(os.environ["RANK"])])  #!
        """,
        good="""
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        model = DDP(nn.Linear(1, 1), device_ids=[rank])
        """,
        remedy='torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))',
    ),
    Case(
        check="device-from-rank",
        bad="""
        def main(rank):
            model = nn.Linear(1, 1).to(rank)  #!
        runner.start(main)
        """,
        good="""
        def main(local_rank):
            model = nn.Linear(1, 1).to(local_rank)
        runner.start(main)
        """,
        head=IMPORTS + "import runner\n",
    ),
    Case(
        check="local-rank-argument",
        status="failure",
        bad="""
        parser.add_argument("--local_rank", type=int, default=-1)  #!
        torch.cuda.set_device(parser.parse_args().local_rank)
        """,
        good="""
        parser.add_argument("--local_rank", type=int, default=-1)  # given by torch.distributed.launch
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        """,
        remedy='default=int(os.environ.get("LOCAL_RANK", 0))',
        head=IMPORTS + "import argparse\nparser = argparse.ArgumentParser()\ndist.init_process_group('nccl')\n",
    ),
    Case(
        check="local-rank-argument",
        status="failure",
        bad="""
        parser.add_argument("--local-rank", type=int)  #!
        torch.cuda.set_device(parser.parse_args().local_rank)
        """,
        good="""
        import deepspeed
        parser.add_argument("--local_rank", type=int)
        deepspeed.initialize(parser.parse_args().local_rank)
        """,
        head=IMPORTS + "import argparse\nparser = argparse.ArgumentParser()\ndist.init_process_group('nccl')\n",
    ),
    Case(
        check="local-rank-argument",
        status="failure",
        bad="""
        parser.add_argument("--local_rank", type=int, required=True)  #!
        torch.cuda.set_device(parser.parse_args().local_rank)
        """,
        good="""
        parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(parser.parse_args().local_rank)
        """,
        remedy="add_argument('--local_rank', type=int, default=int(os.environ.get(\"LOCAL_RANK\", 0)))",
        head=IMPORTS + "import argparse\nparser = argparse.ArgumentParser()\ndist.init_process_group('nccl')\n",
    ),
    Case(
        check="hard-coded-device",
        bad="""
        def load(device="cuda:0"):  #!
            return device
        load(device)
        load()
        """,
        good="""
        def load(device="cuda:0"):
            return device
        load(device)
        """,
    ),
    Case(
        check="local-rank-argument",
        status="failure",
        bad="""
        parser.add_argument("--local_rank", type=int, default=0)  #!
        args = parser.parse_args()
        torch.cuda.set_device(args.local_rank)
        """,
        good="""
        parser.add_argument("--local_rank", type=int, default=0)
        args = parser.parse_args()
        args.local_rank = find_number()
        torch.cuda.set_device(args.local_rank)
        """,
        head=IMPORTS + "import argparse\nparser = argparse.ArgumentParser()\ndist.init_process_group('nccl')\n",
    ),
    Case(
        check="data-parallel",
        bad="model = nn.DataParallel(nn.Linear(1, 1))  #!\n",
        good="""
        if dist.is_initialized():
            model = DDP(nn.Linear(1, 1))
        else:
            model = nn.DataParallel(nn.Linear(1, 1))
        """,
        remedy="torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1), device_ids=[int(os.environ.get(",
        head=IMPORTS,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)


def test_a_default_that_a_helper_returns_is_left_alone_where_ranks_choose(tmp_path: Path) -> None:
    text = 'import os, torch\ndef select():\n    arg = "cuda:0"\n    return torch.device(arg)\ndevice = select()\n'
    assert {one.check for one in look(tmp_path, text)} == {"hard-coded-device"}
    assert look(tmp_path, text + 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n') == []


def test_all_lines_with_the_rank_as_a_device_are_named(tmp_path: Path) -> None:
    text = IMPORTS + "rank = dist.get_rank()\nx.to(rank)\ny.to(rank)\nz.to(rank)\n"
    (found,) = [one for one in look(tmp_path, text) if one.check == "device-from-rank"]
    assert found.where == "train.py:9"
    assert found.remedy == 'x.to(int(os.environ.get("LOCAL_RANK", 0)))  # and the same in lines 10, 11'


def test_a_remedy_that_needs_torch_says_so(tmp_path: Path) -> None:
    text = "from torch.distributed import init_process_group as join\nfrom torch import save\njoin()\nsave(1, 'm.pt')\n"
    (found,) = look(tmp_path, text)
    assert found.remedy == "if torch.distributed.get_rank() == 0: save(1, 'm.pt')  # with import torch"


def test_a_remedy_that_needs_os_says_so(tmp_path: Path) -> None:
    (found,) = look(tmp_path, "import torch\ntorch.cuda.set_device(0)\n")
    assert found.remedy == 'torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # with import os'
