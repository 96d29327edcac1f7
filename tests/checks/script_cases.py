"""Small scripts, and what is found in them."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

from paceline.checks.findings import Finding, Status
from paceline.checks.script import check_script

MARK = "  #!"
"""Ends the line on which something must be found."""

# What most training scripts begin with.
IMPORTS = """\
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
SETUP = IMPORTS + 'dist.init_process_group("nccl")\n'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A script in which one check must find something, on the marked lines, and one nearby in which it must not."""

    check: str
    bad: str
    good: str
    status: Status = "warning"
    remedy: str = ""
    """What the first finding's remedy must be, or hold."""
    head: str = SETUP


def look(folder: Path, text: str, *, modules: dict[str, str] | None = None) -> list[Finding]:
    """All that is found in a script, with these modules beside it."""
    for name, content in {"train.py": text, **(modules or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))
    return check_script(folder / "train.py", folder)


def confirm(folder: Path, case: Case) -> None:
    """The check finds what it must, where it must, and nothing where it must not."""
    bad, good = (case.head + textwrap.dedent(text) for text in (case.bad, case.good))
    found = [one for one in look(folder, bad) if one.check == case.check]
    lines = [f"train.py:{number}" for number, line in enumerate(bad.splitlines(), 1) if line.endswith(MARK)]
    assert lines and [one.where for one in found] == lines, look(folder, bad)
    assert {one.status for one in found} == {case.status}
    assert case.remedy in found[0].remedy.replace(MARK, "")
    everything = look(folder, good)
    assert [one for one in everything if one.check == case.check or one.status == "crashed"] == []
