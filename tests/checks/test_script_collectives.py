"""Rules about what all ranks must do together."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import SETUP, Case, confirm, look

MODEL = SETUP + "rank = dist.get_rank()\nmodel = DDP(nn.Linear(1, 1))\n"
BUFFERS = MODEL + "norm = nn.BatchNorm1d(1)\n"

CASES = [
    Case(
        check="collective-on-one-rank",
        status="failure",
        bad="""
        if rank == 0:
            print("saving")
            dist.barrier()  #!
        """,
        good="""
        if rank == 0:
            print("saving")
        dist.barrier()
        if rank == 0:
            dist.all_reduce(x, group=hosts)
        """,
        remedy="dist.barrier()  # outside of the branch",
        head=MODEL,
    ),
    Case(
        check="collective-on-one-rank",
        status="failure",
        bad="""
        def mean(value):
            if dist.is_initialized():
                dist.all_reduce(value)
            return value
        def report():
            if rank != 0:
                return
            print(mean(torch.ones(1)))  #!
        report()
        """,
        good="""
        def mean(value, everywhere):
            if everywhere:
                dist.all_reduce(value)
            return value
        def report():
            if rank != 0:
                return
            print(mean(torch.ones(1), False))
        report()
        """,
        head=MODEL,
    ),
    Case(
        check="collective-on-one-rank",
        status="failure",
        bad="""
        if rank != 0:
            dist.barrier()  #!
        prepare()
        """,
        good="""
        if rank != 0:
            dist.barrier()
        prepare()
        if rank == 0:
            dist.barrier()
        if rank == 0:
            dist.broadcast_object_list([1])
        else:
            dist.broadcast_object_list([None])
        """,
        head=MODEL,
    ),
    Case(
        check="collective-on-one-rank",
        status="failure",
        bad="""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        sharded = FSDP(nn.Linear(1, 1))
        if rank == 0:
            sharded(x)  #!
        """,
        good="""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        plain = nn.Linear(1, 1)
        if rank == 0:
            plain(x)
        """,
        head=MODEL,
    ),
    Case(
        check="collective-on-one-rank",
        status="failure",
        bad="if accelerator.is_main_process:\n    accelerator.wait_for_everyone()  #!\n",
        good="accelerator.wait_for_everyone()\nif accelerator.is_main_process:\n    accelerator.print(1)\n",
        head="from accelerate import Accelerator\naccelerator = Accelerator()\n",
    ),
    Case(
        check="collective-on-one-rank",
        status="failure",
        bad="if hvd.rank() == 0:\n    hvd.allreduce(x)  #!\n",
        good="hvd.allreduce(x)\nif hvd.rank() == 0 or debug:\n    hvd.allreduce(y)\n",
        head="import horovod.torch as hvd\nhvd.init()\n",
    ),
    Case(
        check="forward-on-one-rank",
        bad="""
        if rank == 0:
            y = model(x)  #!
        """,
        good="""
        if rank == 0:
            y = model.module(x)
            plain = nn.Linear(1, 1)
            plain(x)
        """,
        remedy='y = getattr(model, "module", model)(x)',
        head=BUFFERS,
    ),
    Case(
        check="forward-on-one-rank",
        bad="""
        def validate(net):
            net.eval()
            return net(x)
        if rank == 0:
            validate(model)  #!
        """,
        good="""
        def validate(net):
            net.eval()
            return net(x)
        validate(model)
        if rank == 0:
            validate(model.module)
        """,
        remedy='return getattr(net, "module", net)(x)',
        head=BUFFERS,
    ),
    Case(
        check="forward-on-one-rank",
        bad="""
        class Trainer:
            def __init__(self):
                self.model = DDP(nn.Linear(1, 1))
            def evaluate(self):
                return self.model(x)
            def train(self):
                if rank == 0:
                    self.evaluate()  #!
        Trainer().train()
        """,
        good="""
        raw_model = model.module if isinstance(model, DDP) else model
        class Trainer:
            def __init__(self):
                self.model = raw_model
            def evaluate(self):
                return self.model(x)
            def train(self):
                if rank == 0:
                    self.evaluate()
        Trainer().train()
        """,
        head=BUFFERS,
    ),
    Case(
        check="forward-on-one-rank",
        bad="""
        def test():
            net = load()
            if rank >= 0:
                net = DDP(net)
            if rank == 0:
                net(x)  #!
        test()
        """,
        good="""
        def test():
            net = DDP(load())
            if rank == 0:
                net = load()
                net(x)
        test()
        """,
        head=BUFFERS,
    ),
    Case(
        check="one-rank-leaves",
        status="failure",
        bad="""
        for epoch in range(9):
            model(x).sum().backward()
            if rank == 0:
                if loss < best:
                    break  #!
        """,
        good="""
        for epoch in range(9):
            model(x).sum().backward()
            if rank == 0:
                for name in names:
                    break
            if loss < best:
                break
        """,
        head=MODEL,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)


def test_a_hang_in_another_file_is_told_with_its_place(tmp_path: Path) -> None:
    tools = "import torch.distributed as dist\ndef total(x):\n    dist.all_reduce(x)\n"
    text = SETUP + "from tools import total\nif dist.get_rank() == 0:\n    total(x)\n"
    (found,) = look(tmp_path, text, modules={"tools.py": tools})
    assert (found.where, found.status) == ("train.py:11", "failure")
    assert (
        found.text
        == "only one rank comes to total, which calls all_reduce at tools.py:3: it waits for the others for ever"
    )


def test_functions_that_call_each_other_come_to_an_end(tmp_path: Path) -> None:
    text = SETUP + "def a(): b()\ndef b(): a()\nif dist.get_rank() == 0:\n    a()\n"
    assert look(tmp_path, text) == []


def test_buffers_that_are_not_broadcast_are_no_matter(tmp_path: Path) -> None:
    text = BUFFERS.replace("DDP(nn.Linear(1, 1))", "DDP(nn.Linear(1, 1), broadcast_buffers=False)")
    assert text != BUFFERS
    assert look(tmp_path, text + "if rank == 0:\n    model(x)\n") == []


def test_without_buffers_a_rank_may_go_alone(tmp_path: Path) -> None:
    """A mask that only some versions of PyTorch need is no reason to warn."""
    text = (
        MODEL
        + """
class Net(nn.Module):
    def __init__(self):
        if old:
            self.register_buffer("mask", 1)
if rank == 0:
    model(x)
"""
    )
    assert look(tmp_path, text) == []
