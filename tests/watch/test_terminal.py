"""What a run looks like on a terminal."""

from __future__ import annotations

from paceline.events import CheckpointSaved, Progress
from paceline.watch.fold import RunView
from paceline.watch.terminal import render_summary, rule

FOLDER = "/home/u/.local/state/paceline/runs/20260101-120000-abcd"


def test_a_rule_is_as_wide_as_the_terminal_but_not_wider_than_100() -> None:
    assert rule("stopped", 40) == "─ paceline ─ stopped ───────────────────"
    assert len(rule("stopped", 80)) == 80
    assert len(rule("stopped", 300)) == 100
    assert rule("stopped", 0) == "─ paceline ─ stopped "


def test_summary_of_a_script_with_nothing_of_ours_in_it() -> None:
    view = RunView(hosts=("alice",), num_ranks=1)
    assert render_summary(view, duration_s=3.21, log_folder=FOLDER, width=80) == [
        "─ paceline ─ 1 rank on alice · 3.2s ────────────────────────────────────────────",
        f"  logs        {FOLDER}",
    ]


def test_one_host_sends_nothing_to_others() -> None:
    one = Progress(steps=400, samples=4000, since_first_step_s=100.0, sync_wait_s=12.0, sent_bytes=0)
    view = RunView(hosts=("alice",), num_ranks=2, progress={0: one, 1: one})
    facts = render_summary(view, duration_s=192, log_folder=FOLDER, width=80)[1]
    assert facts == "  80 samples/s · 12% of the time in synchronisation"


def test_summary_with_progress_and_a_checkpoint() -> None:
    one = Progress(steps=400, samples=41_200, since_first_step_s=100.0, sync_wait_s=12.0, sent_bytes=950_000_000)
    view = RunView(
        hosts=("alice", "bob"),
        num_ranks=2,
        progress={0: one, 1: one},
        checkpoint=CheckpointSaved(step=400, path="/home/u/p/checkpoints/00400", num_bytes=250_000_000),
    )
    assert render_summary(view, duration_s=192, log_folder=FOLDER, width=80) == [
        "─ paceline ─ 2 ranks on alice, bob · 3m12s ─────────────────────────────────────",
        "  824 samples/s · 12% of the time in synchronisation · 1.9 GB sent to other hosts",
        "  checkpoint  alice:/home/u/p/checkpoints/00400 (250.0 MB)",
        f"  logs        {FOLDER}",
    ]
