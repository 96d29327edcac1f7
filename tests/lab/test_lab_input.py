"""What people get wrong: one clear message each, the line that mends it, no traceback, nothing left running."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_runs import of_runs, run, wait_until, write

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(60)]

DEBIAN_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def folder(lab: Lab) -> str:
    return write(lab, "h1", "input/hello.py", "import os; print('hello', os.environ['RANK'], flush=True)")


def refused(lab: Lab, folder: str, *arguments: str, exit_code: int = 3) -> str:
    """What the user reads when `paceline run ARGUMENTS` can't start."""
    done = run(lab, *arguments, cwd=folder)
    assert done.process.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr and "hello" not in done.stdout
    wait_until(lambda: not of_runs(lab), 10, lambda: of_runs(lab))
    return done.stderr


def hostfile(lab: Lab, text: str) -> str:
    write(lab, "h1", "input/hosts.txt", text)
    return "hosts.txt"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h1\nh2 slots=0\n", "hosts.txt:2"),
        ("h1\nh1\n", "hosts.txt:2"),
        ("h1 slots=two\n", "hosts.txt:1"),
        ("h1\nh2 cores=3\n", "hosts.txt:2"),
        ("# nobody\n", "hosts.txt"),
    ],
)
def test_hostfile_mistakes_name_file_and_line(lab: Lab, folder: str, text: str, found: str) -> None:
    message = refused(lab, folder, "--hostfile", hostfile(lab, text), "hello.py", exit_code=2)
    assert message.startswith("paceline: ") and found in message and "expected" in message


def test_missing_hostfile(lab: Lab, folder: str) -> None:
    assert "nowhere.txt" in refused(lab, folder, "--hostfile", "nowhere.txt", "hello.py", exit_code=2)


def test_unknown_host(lab: Lab, folder: str) -> None:
    message = refused(lab, folder, "-H", "h1,nohost", "hello.py")
    assert "nohost: no such host" in message and "~/.ssh/config" in message


def test_refused_key(lab: Lab, folder: str) -> None:
    message = refused(lab, folder, "-H", "h1,stranger@h2", "hello.py")
    assert "h2: ssh refused the key" in message and "ssh-copy-id stranger@h2" in message


def test_unknown_host_key(lab: Lab, folder: str) -> None:
    known = lab.home("h1") / ".ssh/known_hosts"
    kept = known.read_text()
    known.write_text("".join(line for line in kept.splitlines(keepends=True) if not line.startswith("h3")))
    try:
        message = refused(lab, folder, "-H", "h1,h3", "hello.py")
    finally:
        known.write_text(kept)
    assert "h3: its host key is not known here" in message and "ssh h3" in message


def test_several_hosts_fail_at_once_and_all_are_named(lab: Lab, folder: str) -> None:
    message = refused(lab, folder, "-H", "h1,nohost,stranger@h2", "hello.py")
    assert "2 hosts can't take part" in message and "nohost" in message and "ssh-copy-id" in message


def test_no_python_there(lab: Lab, folder: str) -> None:
    hosts = hostfile(lab, "h1\nh2 python=/opt/nope/python\n")
    message = refused(lab, folder, "--hostfile", hosts, "hello.py")
    assert "h2: there is no Python at /opt/nope/python. Found: " in message
    assert f"{DEBIAN_PYTHON} 3." in message and "without torch" in message and "python=PATH" in message


def stand_in(lab: Lab, host: str, name: str, before: str) -> str:
    """An interpreter that runs `before` first, for what can't be installed here."""
    code = f"import sys; code = sys.argv.pop(1); {before}; exec(code)"
    write(lab, host, f"{name}/python", f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    (lab.home(host) / name / "python").chmod(0o755)
    return f"~/{name}/python"


def test_python_too_old_there(lab: Lab, folder: str) -> None:
    python = stand_in(lab, "h2", "old", "sys.version_info = (3, 8)")
    message = refused(lab, folder, "--hostfile", hostfile(lab, f"h1\nh2 python={python}\n"), "hello.py")
    assert "h2: Python 3.8" in message and "3.10 or newer" in message


def test_another_python_there(lab: Lab, folder: str) -> None:
    python = stand_in(lab, "h2", "other", "sys.version_info = (3, 12, 1)")
    message = refused(lab, folder, "--hostfile", hostfile(lab, f"h1\nh2 python={python}\n"), "hello.py")
    assert "Python" in message and "3.12.1" in message and "python=PATH" in message and "--allow-mismatch" in message


def test_no_torch_there(lab: Lab, folder: str) -> None:
    hosts = hostfile(lab, f"h1\nh2 python={DEBIAN_PYTHON}\n")
    message = refused(lab, folder, "--hostfile", hosts, "hello.py")
    assert "none" in message and f"on h2: {DEBIAN_PYTHON} -m pip install torch==" in message
    done = run(lab, "--hostfile", hosts, "--allow-mismatch", "hello.py", cwd=folder)
    assert done.stdout.count("hello") == 2


def test_another_torch_there(lab: Lab, folder: str) -> None:
    write(lab, "h2", "fake/torch/__init__.py", "")
    write(lab, "h2", "fake/torch/version.py", "__version__ = '2.9.0+cu128'\ncuda: str = '12.8'\n")
    python = stand_in(lab, "h2", "newer", f"sys.path.insert(0, '{lab.spec.home}/fake')")
    message = refused(lab, folder, "--hostfile", hostfile(lab, f"h1\nh2 python={python}\n"), "hello.py")
    assert "2.9.0+cu128" in message and "on h2: python -m pip install torch==" in message


def test_script_missing(lab: Lab, folder: str) -> None:
    message = refused(lab, folder, "-H", "h1,h2", "helo.py", exit_code=2)
    assert "there is no script helo.py" in message


@pytest.mark.parametrize("hosts", ["h1:0", "h1:-1", "h1,h1", "", "h1:x"])
def test_hosts_that_can_not_be(lab: Lab, folder: str, hosts: str) -> None:
    assert "expected" in refused(lab, folder, "-H", hosts, "hello.py", exit_code=2)


def test_port_taken(lab: Lab, folder: str) -> None:
    serve = "import socket; s = socket.create_server(('', 29555)); print('up', flush=True); input()"
    with lab.popen("h1", [sys.executable, "-c", serve], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "up\n"
        message = refused(lab, folder, "-H", "h1,h2", "--env", "MASTER_PORT=29555", "hello.py", exit_code=1)
        holder.communicate("\n")
    assert "port 29555" in message and "has it" in message and "create_server" in message


@contextlib.contextmanager
def small_disk(lab: Lab, host: str, size: str) -> Iterator[None]:
    """The host's state folder lies on a disk of this size."""
    state = f"{lab.spec.home}/.local/state"
    mounted = lab.run(host, ["sh", "-c", f"mkdir -p {state} && mount -t tmpfs -o size={size} none {state}"])
    assert mounted.returncode == 0, mounted.stderr
    try:
        yield
    finally:
        assert lab.run(host, ["umount", "-l", state]).returncode == 0


def test_disk_full_before_the_agent_is_there(lab: Lab, folder: str) -> None:
    with small_disk(lab, "h2", "40k"):
        message = refused(lab, folder, "-H", "h1,h2", "hello.py")
    assert "h2: cannot write to paceline's folder there" in message and "No space left" in message


def test_disk_too_small_for_the_project(lab: Lab, folder: str) -> None:
    write(lab, "h1", "large/hello.py", "print('hello')")
    (lab.home("h1") / "large/data.bin").write_bytes(bytes(8 << 20))
    with small_disk(lab, "h2", "4m"):
        message = refused(lab, str(Path(folder).parent / "large"), "-H", "h1,h2", "hello.py")
    assert "h2" in message and "free" in message and "XDG_STATE_HOME" in message


def test_banner_noise_on_the_channel(lab: Lab, folder: str) -> None:
    noise = 'echo "Welcome to h2!"; printf "\\001\\002{\\"type\\":\\"hello\\"}\\n"; seq 2000\n'
    rc = write(lab, "h2", ".bashrc", noise) + "/.bashrc"
    try:
        done = run(lab, "-H", "h1,h2", "hello.py", cwd=folder)
    finally:
        lab.run("h2", ["rm", rc])
    assert sorted(done.stdout.splitlines()) == ["[h1:0] hello 0", "[h2:1] hello 1"], done.stderr
    assert "Welcome" not in done.stdout + done.stderr


def test_no_way_between_two_hosts(lab: Lab, folder: str) -> None:
    message = refused(lab, folder, "-H", "h1,h2", "--nic", "eth7", "hello.py")
    assert "--nic eth7 fits no interface of h1" in message and "eth0 10.77.0.1" in message
