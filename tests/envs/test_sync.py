"""The whole of it on this machine: two names for it, one agent for each, an environment of made-up packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_packages import info_of, install, make_venv

from paceline.cluster.spec import parse_hosts
from paceline.envs.job import Job
from paceline.envs.looking import MARKER, read_state
from paceline.envs.options import Outcome, SyncOptions
from paceline.envs.sync import sync
from paceline.launch.hosts import InterruptedEarlyError

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(120)]

Sync = Callable[..., Outcome]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with two packages, a command, a manual and a raw script."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = make_venv(tmp_path / "env")
    commands = {f"{info_of('greet')}/entry_points.txt": "[console_scripts]\ngreet = greet.main:go\n"}
    code = {"greet/main.py": "from data_of_greet import text\n\ndef go():\n    print(text)\n"}
    install(folder, "greet", files={**commands, **code}, more="../../../share/greet.txt,,\n../../../bin/raw,,\n")
    install(
        folder, "data_of_greet", "2.0+cpu", {"data_of_greet/__init__.py": "text = 'hello'\n", "big.bin": "x" * 300_000}
    )
    (tmp_path / "env/share").mkdir()
    (tmp_path / "env/share/greet.txt").write_text("manual")
    (tmp_path / "env/bin/raw").write_text("#!/old/python\nimport greet; print(greet.version)\n")
    return folder


@pytest.fixture
def sync_there(site: Path, tmp_path: Path) -> Sync:
    """`paceline env sync -H localhost,127.0.0.1 --offline`, of the environment above."""
    hosts = parse_hosts("localhost,127.0.0.1")

    def call(**changes: object) -> Outcome:
        values = {"hosts": hosts, "source": hosts[0], "python": str(tmp_path / "env/bin/python"), "offline": True}
        [outcome] = sync(SyncOptions(**{**values, **changes}), lambda host, text, is_state: None).outcomes
        return outcome

    return call


def run(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=30).stdout


def test_made_then_found(sync_there: Sync, tmp_path: Path) -> None:
    planned = sync_there(dry_run=True)
    assert planned.status == "planned" and "2 packages" in planned.text and not Path(planned.python).exists()
    made = sync_there()
    assert made.status == "made", made
    folder = Path(made.python).parents[1]
    assert folder.parent == tmp_path / "state/paceline/environments"
    assert run(folder / "bin/greet") == "hello\n" and run(folder / "bin/raw") == "1.0\n"
    assert (folder / "share/greet.txt").read_text() == "manual"
    assert not list((tmp_path / "state/paceline/projects").iterdir()), "what was on its way is gone"
    again = sync_there()
    assert (again.status, again.python) == ("there", made.python)


def test_what_has_arrived_stays(sync_there: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise InterruptedEarlyError(2)

    with monkeypatch.context() as patched:
        patched.setattr(Job, "_making", stop)
        with pytest.raises(InterruptedEarlyError):
            sync_there()
    [big] = (tmp_path / "state/paceline/projects").rglob("big.bin")
    [init] = (tmp_path / "state/paceline/projects").rglob("greet/__init__.py")
    init.unlink()
    made = sync_there()
    assert made.status == "made" and made.text.endswith(", 16 B sent"), (made, big)


def test_an_unfinished_one_is_made_anew(sync_there: Sync) -> None:
    folder = Path(sync_there().python).parents[1]
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({**marker, "is_finished": False}))
    (folder / "bin/greet").unlink()
    assert sync_there().status == "made" and run(folder / "bin/greet") == "hello\n"


def test_another_lock_is_another_environment(sync_there: Sync, site: Path) -> None:
    first = sync_there()
    install(site, "third")
    second = sync_there()
    assert second.status == "made" and second.python != first.python
    assert run(first.python, "-c", "import importlib.util; print(importlib.util.find_spec('third'))") == "None\n"


def test_to_a_folder_of_ones_own(sync_there: Sync, site: Path, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    to.mkdir()
    (to / "thesis.txt").write_text("years of work")
    refused = sync_there(to=str(to))
    assert refused.status == "failed" and "not made by paceline" in refused.text and refused.remedy
    assert [path.name for path in to.iterdir()] == ["thesis.txt"]
    shutil.rmtree(to)
    assert sync_there(to=str(to)).python == str(to / "bin/python")
    install(site, "third")
    assert sync_there(to=str(to)).status == "made", "its own it may replace"
    assert run(to / "bin/python", "-c", "import third") == ""


def test_a_host_that_fails_does_not_hold_up_the_others(site: Path, tmp_path: Path) -> None:
    hosts = parse_hosts("localhost,127.0.0.1,no-such-host.invalid")
    options = SyncOptions(hosts=hosts, source=hosts[0], python=str(tmp_path / "env/bin/python"), offline=True)
    outcomes = sync(options, lambda host, text, is_state: None).outcomes
    assert [(outcome.host, outcome.status) for outcome in outcomes] == [
        ("127.0.0.1", "made"),
        ("no-such-host.invalid", "failed"),
    ]


def pack_wheel(site: Path, name: str, version: str, folder: Path) -> Path:
    """A wheel of what is installed."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = site / info_of(name, version)
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    with zipfile.ZipFile(path, "w") as wheel:
        for file in [*(site / name).rglob("*.py"), info / "METADATA", info / "WHEEL"]:
            wheel.write(file, file.relative_to(site))
        wheel.writestr(f"{info.name}/RECORD", "")
    return path


def test_online_from_the_hosts_own_index(
    sync_there: Sync, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One package from there, one from the wheel file that it was installed from here."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pack_wheel(site, "greet", "1.0", tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    wheel = pack_wheel(site, "data_of_greet", "2.0+cpu", tmp_path / "wheels")
    origin = {"url": wheel.as_uri(), "archive_info": {}}
    (site / info_of("data_of_greet", "2.0+cpu") / "direct_url.json").write_text(json.dumps(origin))
    made = sync_there(offline=False)
    assert made.status == "made", made
    assert run(made.python, "-c", "import greet.main; greet.main.go()") == "hello\n"


def test_online_with_uv_that_finds_nothing(
    sync_there: Sync, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "programs/uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "error: no greet at https://me:secret@x.org" >&2\nexit 1\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    failed = sync_there(offline=False)
    assert failed.text == "could not install from the index: error: no greet at https://x.org"
    assert failed.status == "failed" and "--offline" in failed.remedy
    folder = tmp_path / "state/paceline/environments"
    [python] = folder.glob("*/bin/python")
    lock = python.parents[1] / "requirements.lock"
    assert (tmp_path / "programs/uv.asked").read_text().split() == [
        *("pip", "install", "--python", str(python)),
        *("--no-deps", "-r", str(lock)),
    ]
    assert lock.read_text().splitlines()[1:] == ["data-of-greet==2.0+cpu", "greet==1.0"]


def test_state_follows_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / MARKER).write_text('{"lock": "ab", "is_finished": true}')
    assert read_state(str(tmp_path), "ab") == "unfinished", "its Python is gone"
    (tmp_path / "bin/python").write_text("")
    assert read_state(str(tmp_path), "ab") == "finished"
    assert read_state(str(tmp_path), "cd") == "other"
    assert read_state(str(tmp_path / "nowhere"), "ab") == "absent"
