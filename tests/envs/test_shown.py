"""What `paceline env sync` says, on the way and at the end."""

from __future__ import annotations

import sys

import pytest
from made_up_packages import installed, inventory

from paceline.cli.env import Teller, render_synced
from paceline.cluster.spec import parse_hosts
from paceline.envs.lock import make_lock
from paceline.envs.options import Outcome, SyncOptions
from paceline.envs.sync import Synced

HOSTS = parse_hosts("alice,bob,carol")
OPTIONS = SyncOptions(hosts=HOSTS, source=HOSTS[0])
MADE = Outcome(host="bob", status="made", text="made in /e, 1.0 GB sent", python="/e/bin/python")
FAILED = Outcome(host="carol", status="failed", text="1.0 GB free for /e", remedy="make room there")


def shown(*outcomes: Outcome) -> list[str]:
    found = inventory(installed("numpy"), *(installed(f"apt-{number}", has_record=False) for number in range(12)))
    lock = make_lock(found, offline=True)
    return render_synced(Synced(lock=lock, inventory=found, outcomes=outcomes), OPTIONS)


def test_each_host_has_its_line_and_the_hostfile_is_written_out() -> None:
    lines = shown(MADE, FAILED)
    assert lines[0].endswith(": 1 package for Python 3.11 on x86_64")
    assert lines[1] == "! left out: apt-0 1.0 has no RECORD of its files"
    assert lines[-8:] == [
        "! left out: apt-9 1.0 has no RECORD of its files",
        "! and 2 more were left out",
        "✓ bob: made in /e, 1.0 GB sent",
        "✗ carol: 1.0 GB free for /e",
        "    make room there",
        "To use it, in the hostfile:",
        "    alice python=/opt/env/bin/python",
        "    bob python=/e/bin/python",
    ]


def test_one_path_everywhere_is_one_option() -> None:
    [*_, last] = shown(Outcome(host="bob", status="there", text="is there already", python="/opt/env/bin/python"))
    assert last == "To use it:  paceline run --python /opt/env/bin/python ..."
    assert not [line for line in shown(FAILED) if "To use it" in line]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_states_are_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    teller = Teller()
    teller.tell("bob", "1 MB of 2 MB", True)
    teller.tell("carol", "2 MB of 2 MB", True)
    teller.tell("bob", "unpacking", False)
    teller.end()
    states = "\r\x1b[Kbob: 1 MB of 2 MB\r\x1b[Kbob: 1 MB of 2 MB   carol: 2 MB of 2 MB\n" if is_terminal else ""
    assert capsys.readouterr().err == f"{states}bob: unpacking\n"
