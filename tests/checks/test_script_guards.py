"""What conditions say of ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline.checks.guards import guards_of
from paceline.checks.program import Program
from paceline.checks.reading import Reader
from paceline.checks.source import Source

HEAD = """
import os
import torch.distributed as dist
import horovod.torch as hvd
rank = int(os.environ["RANK"])
local = int(os.environ.get("LOCAL_RANK", 0))
world_size = dist.get_world_size()
ddp = world_size > 1
is_first = dist.get_rank() == 0
is_alone_or_first = not ddp or rank == 0
is_first_of_all = args.node_id == 0 and local == 0
writer = open("log") if rank == 0 else None
nothing = None
def get_my_rank():
    if not dist.is_initialized():
        return 0
    return dist.get_rank()
def get_local_rank():
    return dist.get_rank()
def is_chosen():
    return get_my_rank() == 0
"""


def parse(folder: Path, text: str) -> Source:
    (folder / "train.py").write_text(HEAD + text)
    reader = Reader(folder / "train.py", folder)
    reader.read()
    return Program(reader.sources).main


def who(folder: Path, condition: str) -> str | None:
    """Who passes a condition, in short: `one`, `one per host`, `perhaps one`, and so on."""
    source = parse(folder, f"if {condition}:\n    pass\n")
    test = next(node.test for node in source.nodes[::-1] if isinstance(node, ast.If))
    found = guards_of(source.program).who(source, test)
    if found is None:
        return None
    return f"{'' if found.is_sure else 'perhaps '}{found.kind}{' per host' if found.scope == 'host' else ''}"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("rank == 0", "one"),
        ("0 == rank", "one"),
        ("rank < 1", "one"),
        ("not rank", "one"),
        ("rank in (-1, 0)", "one"),
        ("dist.get_rank() == 0", "one"),
        ("hvd.rank() == 0", "one"),
        ('int(os.environ["RANK"]) == 0', "one"),
        ("is_first", "one"),
        ("is_chosen()", "one"),
        ("get_my_rank() == 0", "one"),
        ("args.rank == 0", "one"),
        ("is_main_process()", "one"),
        ("accelerator.is_main_process", "one"),
        ("rank == 0 and epoch > 3", "one"),
        ("not ddp or rank == 0", "one"),
        ("rank == 0 or epoch > 3", "perhaps one"),
        ("writer is not None", "perhaps one"),
        ("tp_rank == 0", "perhaps one"),
        ("local == 0", "one per host"),
        ("get_local_rank() == 0", "one per host"),
        ("rank % number == 0", "perhaps one"),
        ("args.gpu == 0", "one per host"),
        ("hvd.local_rank() == 0", "one per host"),
        ("accelerator.is_local_main_process", "one per host"),
        ("rank % 8 == 0", "one per host"),
        ("node_rank == 0 and local == 0", "one"),
        ("is_alone_or_first", "one"),
        ("is_first_of_all", "one"),
        ("rank != 0", "others"),
        ("rank > 0", "others"),
        ("rank", "others"),
        ("not is_first", "others"),
        ("rank not in [-1, 0]", "others"),
        ("rank == -1", "single"),
        ("world_size == 1", "single"),
        ("not ddp", "single"),
        ("not args.distributed", "single"),
        ('"RANK" not in os.environ', "single"),
        ("nothing is not None", "single"),
        ("rank != -1", "many"),
        ("dist.is_initialized()", "many"),
        ("args.distributed", "many"),
        ("hvd.size() > 1", "many"),
        ("epoch == 0", None),
        ("lora_rank > 0", None),
        ("args.gpu", None),
        ("loss < best", None),
    ],
)
def test_conditions(tmp_path: Path, condition: str, expected: str | None) -> None:
    assert who(tmp_path, condition) == expected


PLACES = [
    ("if rank == 0:\n    here()\n", "one"),
    ("if rank == 0:\n    pass\nelse:\n    here()\n", "others"),
    ("if rank != 0:\n    exit()\nhere()\n", "one"),
    ("for x in y:\n    if rank:\n        continue\n    here()\n", "one"),
    ("assert rank == 0\nhere()\n", "one"),
    ("x = here() if rank == 0 else None\n", "one"),
    ("rank == 0 and here()\n", "one"),
    ("rank == 0 or here()\n", "others"),
    ("def f():\n    here()\nif rank == 0:\n    f()\n", "one"),
    ("def f():\n    here()\nif rank == 0:\n    f()\nf()\n", None),
    ("def f():\n    g()\ndef g():\n    here()\nif rank == 0:\n    f()\n", "one"),
    ("@rank_zero_only\ndef f():\n    here()\nf()\n", "one"),
    ("def f():\n    here()\n    f()\nf()\n", None),
    ("if epoch == 0:\n    here()\n", None),
    ("def f(step):\n    if step % 10 == 0:\n        here()\nfor step in range(99):\n    f(step)\n", None),
    ("def f(step):\n    if step == 0:\n        here()\nfor step in range(99):\n    f(step)\n", None),
    ("class A:\n    def f(self):\n        here()\na = A()\nif rank == 0:\n    a.f()\n", "one"),
    ("def f():\n    here()\nwith torch_distributed_zero_first(rank):\n    f()\n", "one"),
    ("def f(is_new):\n    if is_new:\n        here()\nf(False)\n", "single"),
    ("def f():\n    is_new = False\n    if is_new:\n        here()\nf()\n", "single"),
    ("def f():\n    is_new = False\n    for is_new in y:\n        if is_new:\n            here()\nf()\n", None),
    ("is_new = False\ndef f():\n    if is_new:\n        here()\nf()\n", None),
    ("def f(is_new):\n    if is_new:\n        here()\nf(False)\nf(True)\n", None),
    ("while rank == 0:\n    here()\n", "one"),
]


@pytest.mark.parametrize(("text", "expected"), PLACES)
def test_places(tmp_path: Path, text: str, expected: str | None) -> None:
    source = parse(tmp_path, text)
    calls = [node for node in source.find(ast.Call) if isinstance(node.func, ast.Name) and node.func.id == "here"]
    found = guards_of(source.program).guard(source, calls[0])
    assert (found and found.kind) == expected
