"""Rules about the order of what is done with gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import IMPORTS, Case, confirm

HEAD = IMPORTS + "model = DDP(nn.Linear(1, 1))\nfrom torch.nn.utils import clip_grad_norm_\n"

CASES = [
    Case(
        check="clip-before-unscale",
        bad="""
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)  #!
        scaler.step(optimizer)
        """,
        good="""
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        """,
        remedy="scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0)",
        head=HEAD,
    ),
    Case(
        check="clip-before-unscale",
        bad="""
        if use_amp:
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #!
            scaler.step(optimizer)
        """,
        good="""
        if use_amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
        head=HEAD,
    ),
    Case(
        check="no-sync-around-backward-only",
        bad="""
        loss = model(x).sum()
        with model.no_sync():  #!
            loss.backward()
        """,
        good="""
        with model.no_sync():
            loss = model(x).sum()
            loss.backward()
        with model.no_sync():
            step(batch).backward()
        """,
        remedy="with model.no_sync():  # above the line that computes loss",
        head=HEAD,
    ),
    Case(
        check="no-sync-around-backward-only",
        bad="""
        for step in range(8):
            loss = model(x).sum()
            if ddp:
                model.require_backward_grad_sync = step == 7  #!
            loss.backward()
        """,
        good="""
        for step in range(8):
            if ddp:
                model.require_backward_grad_sync = step == 7
            loss = model(x).sum()
            loss.backward()
        """,
        remedy="model.require_backward_grad_sync = step == 7  # above the call of model",
        head=HEAD,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)
