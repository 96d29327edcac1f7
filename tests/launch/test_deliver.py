"""A project on its way to an agent: which copy it gets, and what waits where."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cluster.spec import Host
from paceline.errors import HostError
from paceline.launch import deliver as delivery
from paceline.launch import protocol, ship
from paceline.launch.deliver import copy_name, deliver
from paceline.launch.environment import HostPlan, RunPlan
from paceline.launch.hosts import Hosts, open_hosts
from paceline.launch.reasons import Place, explain_choices, summarise_choices
from paceline.launch.receive import ProjectCopy
from paceline.launch.ship import Cargo, load_project
from paceline.launch.transport import Channel
from paceline.network.wires import Wire

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(30)]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Two agents here, as two hosts that share a home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open_hosts([Host(name="localhost"), Host(name="127.0.0.1")], queue.SimpleQueue()) as opened:
        opened.open("test-run", [sys.executable] * 2, grace_s=1.0)
        yield opened


@pytest.fixture
def cargo(tmp_path: Path) -> Cargo:
    root = tmp_path / "project"
    root.mkdir()
    (root / "train.py").write_text("x")
    (root / "data.bin").write_bytes(b"x" * 5_000_000)
    return load_project(ship.Project(root=root, cwd=root, reason=""))


def projects(tmp_path: Path) -> Path:
    return tmp_path / "state" / "paceline" / "projects"


def test_hosts_that_share_a_home_have_a_copy_each(hosts: Hosts, cargo: Cargo, tmp_path: Path) -> None:
    found = deliver(hosts, cargo, {0, 1}, in_use_limit_s=0)
    names = [f"{cargo.name}-localhost", f"{cargo.name}-127.0.0.1"]
    assert [Path(found[index].folder) for index in (0, 1)] == [projects(tmp_path) / name for name in names]
    assert [(found[index].num_sent, found[index].is_spare) for index in (0, 1)] == [(2, False)] * 2
    assert (Path(found[1].folder) / "data.bin").stat().st_size == 5_000_000


def test_a_copy_in_use_is_waited_for(
    hosts: Hosts, cargo: Cargo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ProjectCopy(str(projects(tmp_path)), copy_name(cargo, "localhost"), take_another=False)
    monkeypatch.setattr(delivery, "_ASK_AGAIN_S", 0.0)
    asked: list[bool] = []
    ask = hosts.ask

    def ask_and_close(questions: dict[int, protocol.OfferFiles], *args: object, **words: object) -> object:
        asked.append(questions[0].take_another)
        if len(asked) == 3:
            other.close()
        return ask(questions, *args, **words)  # pyright: ignore

    monkeypatch.setattr(hosts, "ask", ask_and_close)
    found = deliver(hosts, cargo, [0], in_use_limit_s=20)
    assert asked == [False] * 3
    assert found[0].folder == other.folder and not found[0].is_spare


def test_in_the_end_another_copy_is_taken(hosts: Hosts, cargo: Cargo, tmp_path: Path) -> None:
    other = ProjectCopy(str(projects(tmp_path)), copy_name(cargo, "localhost"), take_another=False)
    found = deliver(hosts, cargo, [0, 1], in_use_limit_s=0.0)
    other.close()
    assert found[0].folder == other.folder + ".2" and found[0].is_spare and not found[1].is_spare


def test_a_host_that_takes_nothing_is_given_up_and_one_that_takes_slowly_is_not(
    hosts: Hosts, cargo: Cargo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_STALL_LIMIT_S", 0.5)
    monkeypatch.setattr(ship, "pieces", slowly(ship.pieces, 0.25))
    assert deliver(hosts, cargo, [0], in_use_limit_s=0)[0].num_sent == 2  # over a second in all
    monkeypatch.setattr(ship, "pieces", lambda cargo, missing: iter(()))
    with pytest.raises(HostError, match=r"no answer within 0 s|no answer within 1 s"):
        deliver(hosts, cargo, [1], in_use_limit_s=0)


def slowly(pieces: Callable[..., Iterator[tuple[protocol.FileData, bytes]]], pause_s: float) -> Callable[..., object]:
    def slow(*args: object) -> Iterator[tuple[protocol.FileData, bytes]]:
        for piece in pieces(*args):
            time.sleep(pause_s)
            yield piece

    return slow


def test_pieces_are_fetched_as_they_are_taken_and_no_more_after_the_end() -> None:
    fetched: list[int] = []

    def fetch() -> Iterator[bytes]:
        for number in range(1000):
            fetched.append(number)
            yield bytes(1 << 20)

    takes_nothing = [sys.executable, "-c", "import time; time.sleep(60)"]
    channel = Channel(0, Host(name="localhost"), takes_nothing, queue.SimpleQueue())
    channel.send_pieces(fetch())
    time.sleep(0.3)
    assert fetched == [0], "a pipe takes less than a piece"
    channel.close(timeout_s=0.1)
    takes_all = [sys.executable, "-c", "import sys\nwhile sys.stdin.buffer.read(1 << 20): pass"]
    channel = Channel(0, Host(name="localhost"), takes_all, queue.SimpleQueue())
    channel._closing.set()
    before = len(fetched)
    channel.send_pieces(fetch())
    channel.close()
    assert len(fetched) == before, "Ctrl-C need not wait for what nobody wants any more"


def test_which_folder_was_copied_is_shown_and_which_copy_it_is() -> None:
    host = HostPlan(
        name="h2",
        slots=1,
        num_cores=4,
        interface="eth0",
        gpus=None,
        python="python",
        cwd="/copy.2",
        python_path=(),
        env={},
    )
    plan = RunPlan(run_id="r", hosts=(host,), master_addr="10.0.0.2", max_restarts=0)
    wires = [Wire(interface="eth0", address="10.0.0.2", reason="")]
    place = Place(
        cwd="/copy.2", script=None, num_sent=1, num_files=2, copy_of="the git repository /home/u/p", is_spare=True
    )
    explained = {
        reason.what: reason.why for reason in explain_choices(plan, wires, [place], hosts_why="", slots_why=[""])
    }
    assert explained["project on h2"] == "has a copy of the git repository /home/u/p, in /copy.2"
    said = {reason.what: reason.why for reason in summarise_choices(plan, wires, [place], [])}
    assert said["second copy"].startswith("h2, as another run is using the first")
