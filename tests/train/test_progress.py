"""When a rank says that it stands still, and what it reads out of itself."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from paceline.train import progress
from paceline.train.progress import Stillness, find_unfinished


def looks(stillness: Stillness, *seen: tuple[float, int]) -> list[str]:
    return [stillness.look(now_s, count) for now_s, count in seen]


def test_said_once_when_nothing_moves_and_once_when_it_moves_again() -> None:
    stillness = Stillness(stall_s=3.0, period_s=1.0)
    said = looks(stillness, (0, 5), (1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 7), (7, 7))
    assert said == ["moving", "moving", "still", "still", "stalled", "still", "moves again", "still"]


def test_it_may_stall_again() -> None:
    stillness = Stillness(stall_s=2.0, period_s=1.0)
    assert looks(stillness, (0, 0), (2, 0), (3, 1), (5, 1)) == ["moving", "stalled", "moves again", "stalled"]


def test_a_process_that_was_stopped_has_not_stalled() -> None:
    stillness = Stillness(stall_s=60.0, period_s=1.0)
    assert looks(stillness, (0, 0), (1, 0), (10_000, 0)) == ["moving", "still", "still"]
    assert stillness.still_s == 3.0


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PACELINE_STALL_WARNING_S": "0", "PACELINE_WORLD_SIZE": "2", "PACELINE_EVENT_FD": "9:9"},
        {"PACELINE_STALL_WARNING_S": "60", "PACELINE_WORLD_SIZE": "1", "PACELINE_EVENT_FD": "9:9"},
        {"PACELINE_STALL_WARNING_S": "60", "PACELINE_WORLD_SIZE": "2"},
    ],
)
def test_not_started_where_nobody_asked_or_nobody_is_waited_for(environ: dict[str, str]) -> None:
    progress.start(environ)
    assert progress.count_steps() is None


def test_steps_are_those_of_the_optimizer_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_steps", {0: 0})
    one, two = object(), object()
    for optimizer in (one, two, one, two, one):
        progress._count_step(optimizer, (), {})
    assert progress.count_steps() == 3


def test_the_stack_of_a_thread_and_the_line_it_is_in(tmp_path: Path) -> None:
    go, there = threading.Event(), threading.Event()
    (tmp_path / "train.py").write_text("def wait():\n    there.set()\n    go.wait(30)\n\nwait()\n")
    code = compile((tmp_path / "train.py").read_text(), str(tmp_path / "train.py"), "exec")
    thread = threading.Thread(target=exec, args=(code, {"go": go, "there": there, "__name__": "train"}))
    thread.start()
    try:
        assert there.wait(30)
        while True:
            stack, text = progress._read_stack(thread.ident or 0)
            if text == "go.wait(30)":
                break
    finally:
        go.set()
        thread.join()
    assert [frame.function for frame in stack if frame.path.endswith("train.py")] == ["wait", "<module>"]
    assert not any(frame.is_main for frame in stack)


def test_the_first_collective_that_nccl_has_not_ended() -> None:
    entries = [
        {"profiling_name": "nccl:broadcast", "state": "completed"},
        {"profiling_name": "nccl:all_reduce", "state": "started"},
        {"profiling_name": "nccl:all_gather", "state": "scheduled"},
    ]
    assert find_unfinished({"entries": entries}) == "all_reduce"
    assert find_unfinished({"entries": entries[:1]}) is None
    assert find_unfinished({}) is None
