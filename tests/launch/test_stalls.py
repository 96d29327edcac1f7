"""What is said of a run in which nothing moves: the sentences, and real ranks that wait for each other for ever."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_runs import start, wait_until

from paceline.events import RankStalled
from paceline.launch import stalls
from paceline.launch.stalls import SETTLE_S, Stalls, explain, name_ranks

HOSTS = ("alice", "bob")
THREE = ("alice", "bob", "bob")


def standing(doing: str = "all_reduce", **values: Any) -> RankStalled:
    known: dict[str, Any] = {
        "step": 10,
        "collectives": 37,
        "doing": doing,
        "waits": True,
        "busy": False,
        "where": "train.py:41",
        "text": "loss.backward()",
        "since_s": 60.2,
    }
    return RankStalled(**{**known, **values})


BACKWARD = standing("backward (gradients)")
BARRIER = standing("barrier", where="train.py:50", text="dist.barrier()")
ASLEEP = standing("the script, outside any collective", waits=False, where="train.py:44", text="time.sleep(1000)")


# The sentences


def test_a_rank_that_has_ended() -> None:
    assert explain(HOSTS, {0: BACKWARD}, {1: 10}) == [
        "nothing has moved for 60 s: rank 0 (alice) waits for rank 1 (bob), which has ended after step 10: "
        "uneven batches?",
        "  rank 0 (alice) waits in backward (gradients) of step 11 (train.py:41: loss.backward())",
        "  rank 1 (bob) has ended after step 10",
    ]


def test_a_rank_that_is_elsewhere_in_the_script() -> None:
    assert explain(THREE, {0: BACKWARD, 1: ASLEEP, 2: BACKWARD}, {}) == [
        "nothing has moved for 60 s: ranks 0, 2 (alice, bob) wait for rank 1 (bob), which is in the script, "
        "outside any collective (train.py:44)",
        "  ranks 0, 2 (alice, bob) wait in backward (gradients) of step 11 (train.py:41: loss.backward())",
        "  rank 1 (bob) is in the script, outside any collective, after step 10 (train.py:44: time.sleep(1000))",
    ]


def test_a_rank_that_says_nothing() -> None:
    heading, _, last = explain(HOSTS, {0: standing()}, {})
    assert heading == "nothing has moved for 60 s: rank 0 (alice) waits, and of rank 1 (bob) nothing is heard"
    assert last == "  rank 1 (bob): nothing heard: not come so far, moving, or unable to report"


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        (
            BACKWARD,
            BARRIER,
            "waits in the model for rank 1 (bob), which waits in barrier after step 10: uneven batches?",
        ),
        (standing("forward (buffers)"), BARRIER, "uneven batches? (a part of the ranks can run model.module)"),
        (standing("forward (buffers)"), BACKWARD, "in different passes of the model, which all must run together"),
        (standing(), BARRIER, "in different collectives: does some code run on a part of them only?"),
        (BARRIER, BARRIER.replace(collectives=39), "all wait, but rank 1 (bob) has begun more collectives"),
        (BARRIER, BARRIER.replace(where="train.py:9"), "in different lines"),
        (BARRIER, BARRIER, "all ranks wait in the same collective: sizes that differ, or the network"),
        (BARRIER.replace(collectives=-1), BARRIER, "all ranks wait in the same collective"),
        (ASLEEP, ASLEEP, "no rank waits for another, all are in the script"),
    ],
)
def test_the_cause(one: RankStalled, other: RankStalled, cause: str) -> None:
    heading = explain(HOSTS, {0: one, 1: other}, {})[0]
    assert heading.startswith("nothing has moved for 60 s: ")
    assert cause in heading


def test_ranks_that_stand_alike_share_a_line() -> None:
    lines = explain(("alice",) * 3, {0: BARRIER, 1: BARRIER.replace(busy=True), 2: BACKWARD}, {})
    assert [line.partition(" wait")[0] for line in lines[1:]] == ["  ranks 0, 1", "  rank 2"]


def test_many_ranks_in_few_lines() -> None:
    many = {rank: standing(where=f"train.py:{rank}") for rank in range(32)}
    lines = explain(("a",) * 32, many, {})
    assert len(lines) <= 10
    assert all(len(line) < 200 for line in lines)


def test_nobody_is_in_the_way_where_no_rank_waits_and_some_go_on() -> None:
    assert explain(HOSTS, {0: ASLEEP}, {}) == []


def test_hosts_are_named_where_there_are_several() -> None:
    assert name_ranks([1], HOSTS) == "rank 1 (bob)"
    assert name_ranks([0, 1, 2], THREE) == "ranks 0, 1, 2 (alice, bob)"
    assert name_ranks([1], ("here", "here")) == "rank 1"


# When they are said


def test_said_once_all_have_spoken() -> None:
    state = stalls.stall(Stalls(hosts=HOSTS), 0, BACKWARD, now=100.0)
    assert stalls.speak(state, now=101.0)[1] == []
    state = stalls.stall(state, 1, ASLEEP, now=101.5)
    state, lines = stalls.speak(state, now=101.6)
    assert "rank 0 (alice) waits for rank 1 (bob)" in lines[0]
    assert stalls.speak(state, now=200.0)[1] == []


def test_said_after_a_while_though_one_has_not_spoken_and_again_when_it_has() -> None:
    state = stalls.stall(Stalls(hosts=HOSTS), 0, BACKWARD, now=100.0)
    state, lines = stalls.speak(state, now=100.0 + SETTLE_S)
    assert "of rank 1 (bob) nothing is heard" in lines[0]
    state = stalls.stall(state, 1, ASLEEP, now=110.0)
    assert "which is in the script" in stalls.speak(state, now=110.0)[1][0]


def test_a_rank_that_ends_while_another_waits() -> None:
    state = stalls.stall(Stalls(hosts=HOSTS), 0, BACKWARD, now=100.0)
    state, _ = stalls.speak(state, now=110.0)
    state = stalls.end(state, 1, 10, now=120.0)
    assert "which has ended after step 10" in stalls.speak(state, now=120.0)[1][0]


def test_that_it_moves_again_is_said_once() -> None:
    state = stalls.stall(Stalls(hosts=HOSTS), 0, BACKWARD, now=100.0)
    state, _ = stalls.speak(stalls.stall(state, 1, ASLEEP, now=100.0), now=100.0)
    state, lines = stalls.move(state, 1, now=130.0)
    assert lines == []
    state, lines = stalls.move(state, 0, now=130.0)
    assert lines == ["the ranks move again, after 30 s more"]
    assert stalls.speak(state, now=200.0)[1] == []


def test_nothing_is_said_of_a_stall_that_was_over_before() -> None:
    state = stalls.stall(Stalls(hosts=HOSTS), 0, BACKWARD, now=100.0)
    state, lines = stalls.move(state, 0, now=101.0)
    assert lines == []
    assert stalls.speak(state, now=200.0)[1] == []


def test_that_all_are_in_the_script_is_told_once_in_a_run() -> None:
    state, told = Stalls(hosts=HOSTS), []
    for now in (100.0, 200.0):
        for rank in (0, 1):
            state = stalls.stall(state, rank, ASLEEP.replace(where=f"train.py:{now:.0f}"), now)
        state, lines = stalls.speak(state, now)
        told += lines[:1]
        for rank in (0, 1):
            state, _ = stalls.move(state, rank, now + 1)
    assert len(told) == 1


@given(
    st.dictionaries(st.integers(0, 3), st.sampled_from([BACKWARD, BARRIER, ASLEEP, standing()])),
    st.dictionaries(st.integers(0, 3), st.none() | st.integers(0, 9)),
)
def test_every_rank_is_in_one_line_or_nothing_is_said(
    stalled: dict[int, RankStalled], ended: dict[int, int | None]
) -> None:
    stalled = {rank: event for rank, event in stalled.items() if rank not in ended}
    lines = explain(("a",) * 4, stalled, ended)
    named = [word.strip(",:") for line in lines[1:] for word in line.partition("(")[0].split() if word[0].isdigit()]
    steps = [line for line in lines[1:] if "step" in line]
    assert not lines or {"0", "1", "2", "3"} <= set(named), steps


# Real ranks

TWO = ("-H", "localhost:2")
PREAMBLE = """
import time
import torch
import torch._dynamo  # DistributedDataParallel would import it, which takes longer than this run's patience
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

def train(model, batches, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in zip(range(steps), batches):
        model(batch).sum().backward()
        optimizer.step()

def wrap(*layers):
    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), *layers))

def batches():
    while True:
        yield torch.randn(8, 4)

"""
UNEVEN = """
train(wrap(), batches(), steps=10 if rank else 11)
dist.barrier()
"""
VALIDATES = """
model = wrap(torch.nn.BatchNorm1d(4))
train(model, batches())
if rank == 0:
    with torch.no_grad():
        model.train()(torch.randn(8, 4)).sum().item()
        model(torch.randn(8, 4))
dist.barrier()
"""
ENDLESS_LOADER = """
class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        while rank == 1 and index == 5:
            pass
        return torch.randn(4)

train(wrap(), torch.utils.data.DataLoader(Endless()))
"""
MISMATCH = """
train(wrap(), batches())
if rank == 1:
    dist.barrier()
else:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
"""


@pytest.mark.launcher
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(
            UNEVEN,
            [
                "rank 0 waits in the model for rank 1, which waits in barrier after step 10: uneven batches?",
                "  rank 0 waits in backward (gradients) of step 11 (train.py:14: model(batch).sum().backward())",
                "  rank 1 waits in barrier after step 10 (train.py:",
            ],
            id="uneven",
        ),
        pytest.param(
            VALIDATES,
            [
                "rank 0 waits in the model for rank 1, which waits in barrier after step 10: uneven batches? "
                "(a part of the ranks can run model.module)",
                "  rank 0 waits in forward (buffers) after step 10 (train.py:",
            ],
            id="validates-alone",
        ),
        pytest.param(
            ENDLESS_LOADER,
            ["rank 0 waits for rank 1, which is in the script", "busy, after step 5 (train.py:"],
            id="endless-loader",
            marks=pytest.mark.large,
        ),
        pytest.param(
            MISMATCH,
            [
                "the ranks wait in different collectives",
                "  rank 0 waits in wait() of a collective after step 10 (train.py:",
                ": work.wait())",
                "  rank 1 waits in barrier after step 10 (train.py:",
            ],
            id="mismatch",
            marks=pytest.mark.large,
        ),
    ],
)
def test_a_run_that_stands_still(tmp_path: Path, script: str, words: list[str]) -> None:
    with start(tmp_path, *TWO, "--stall-warning", "2", "--grace", "1", "train.py", script=PREAMBLE + script) as run:
        wait_until(lambda: all(word in run.err for word in words), 90, lambda: f"{words}\n{run.err}")
        run.signal(signal.SIGINT)
        run.wait()
    assert {event["kind"] for event in run.events()} >= {"rank_stalled", "run_ended"}


ASLEEP_FOR_A_WHILE = """
model = wrap()
train(model, batches(), steps=5)
if rank == 1:
    time.sleep(7)
train(model, batches(), steps=5)
time.sleep(1)
"""


@pytest.mark.large
@pytest.mark.launcher
@pytest.mark.timeout(120)
def test_a_rank_asleep_and_that_all_move_again(tmp_path: Path) -> None:
    script = PREAMBLE + ASLEEP_FOR_A_WHILE
    with start(tmp_path, *TWO, "--stall-warning", "2", "train.py", script=script) as run:
        assert run.wait(90) == 0, run.err
    assert "rank 0 waits for rank 1, which is in the script, outside any collective (train.py:" in run.err
    assert "  rank 1 is in the script, outside any collective, after step 5 (train.py:" in run.err
    assert ": time.sleep(7))" in run.err
    assert "paceline: the ranks move again, after " in run.err.partition(": time.sleep(7))")[2]


HEALTHY = """
def slowly():
    for batch in batches():
        time.sleep(0.7)
        yield batch
train(wrap(torch.nn.BatchNorm1d(4)), slowly(), steps=8)
if rank == 1:
    time.sleep(0.7)
dist.barrier()
"""


@pytest.mark.launcher
@pytest.mark.timeout(120)
def test_a_slow_run_that_is_well(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "--stall-warning", "4", "train.py", script=PREAMBLE + HEALTHY) as run:
        assert run.wait(90) == 0, run.err
    stalled = [event for event in run.events() if event["kind"] == "rank_stalled"]
    assert not [event for event in stalled if event["step"]], "ranks may wait for each other to start, not to train"
    assert stalled or "nothing has moved" not in run.err
    assert sorted(event["steps"] for event in run.events() if event["kind"] == "rank_finished") == [8, 8]
