"""The files of a host's environment, listed and fetched through an agent; and what is said where they do not come."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_packages import info_of, install, make_venv

from paceline.cluster.spec import parse_hosts
from paceline.envs import fetching, listing
from paceline.envs.fetching import Spool, fetch
from paceline.envs.listed import Listing, read_listing
from paceline.errors import HostError
from paceline.launch.errands import Errand, run_errands
from paceline.launch.hosts import Hosts, open_hosts

pytestmark = pytest.mark.launcher

ASKED = {"names": ["greet"], "is_packed": False}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = make_venv(tmp_path / "env")
    install(site, "greet", files={"greet/empty.py": "", "greet/more.txt": "\nnull\n" * 50_000, "z_last": "end\nnull\n"})
    return site


@pytest.fixture
def hosts(site: Path, tmp_path: Path) -> Iterator[Hosts]:
    with open_hosts(parse_hosts("localhost"), queue.SimpleQueue()) as opened:
        opened.open("fetching", [str(tmp_path / "env/bin/python")], grace_s=0.1)
        yield opened


def list_files(hosts: Hosts) -> Listing:
    [reply] = run_errands(hosts, [Errand(host=0, module=listing.__name__, argument=ASKED)], timeout_s=30.0)
    return read_listing("localhost", reply.value)


def test_what_is_listed_comes_and_nothing_else(hosts: Hosts, site: Path, tmp_path: Path) -> None:
    listed = list_files(hosts)
    told: list[int] = []
    spool = Spool(tmp_path / "spool", listed.files)
    fetch(hosts, ASKED, spool, told.append)
    assert spool.is_complete and told[-1] == sum(file.size_bytes for file in listed.files)
    paths = {file.path for file in listed.files}
    assert {"greet/empty.py", "greet/more.txt", "z_last", f"{info_of('greet')}/METADATA"} <= paths
    assert all((spool.root(0) / path).read_bytes() == (site / path).read_bytes() for path in paths)
    (spool.root(0) / listed.files[-1].path).unlink()
    told.clear()
    fetch(hosts, ASKED, Spool(tmp_path / "spool", listed.files), told.append)
    assert told[-1] == listed.files[-1].size_bytes, "what was there did not come again"


def test_each_end_that_is_none_has_a_remedy(
    hosts: Hosts, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list_files(hosts)

    def fails(name: str, names: tuple[str, ...] = ("greet",)) -> HostError:
        with pytest.raises(HostError) as raised:
            fetch(hosts, {**ASKED, "names": names}, Spool(tmp_path / name, listed.files), lambda _: None)
        assert raised.value.hint is not None
        assert raised.value.hint.endswith("the same command again goes on from what has come")
        return raised.value

    (site / "z_last").write_text("another\n")
    assert "z_last was changed while it was fetched" in str(fails("changed"))
    assert "localhost: its files ended too early" in str(fails("early", ()))
    (site / "z_last").unlink()
    (site / "z_last").mkdir()
    broken = fails("broken")
    assert broken.message.startswith("localhost: cannot read its files: IsADirectoryError")
    assert "ssh localhost" in str(broken)
    monkeypatch.setattr(fetching, "_STALL_LIMIT_S", 0.0)
    assert "cannot read its files: nothing came for 0 s\n  does a disk hang there?" in str(fails("idle"))
