"""How the agent gets onto a host, through any login shell and past any noise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

from paceline.launch import bootstrap, protocol

pytestmark = pytest.mark.launcher

SHELLS = ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh", "ksh"]
SITE_NOISE = "import os; os.write(1, b'Welcome! {}\\n' * 50)\n"


def first_bytes() -> bytes:
    return bootstrap.first_bytes(*bootstrap.pack_runtime())


def run_shell(shell: str, command: str, home: Path, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """As sshd does: the login shell gets the command as one word after -c."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    path = shutil.which(shell)
    assert path is not None
    return subprocess.run([path, "-c", command], input=data, env=env, capture_output=True, timeout=20)


def hear(stdout: bytes) -> list[protocol.Message]:
    _, mark, rest = stdout.partition(protocol.MARKER)
    assert mark, stdout
    return [message for message, _ in protocol.Decoder().feed(rest)]


@pytest.mark.parametrize("shell", SHELLS)
def test_any_login_shell_starts_the_interpreter(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    for folder in ("plain", "with space", "quote'd", 'double"d', "$HOME", "a;b&c|d", "größe", "*"):
        # What is started need not be a Python: what counts is that it gets its two words whole.
        python = tmp_path / folder / "python"
        python.parent.mkdir()
        python.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$1" "$2" "$#"\n')
        python.chmod(0o755)
        for path in (str(python), f"~/{folder}/python"):
            done = run_shell(shell, bootstrap.remote_command(path), tmp_path)
            expected = [str(python), *bootstrap.local_command("")[1:], "2"]
            assert done.stdout.decode().splitlines() == expected, done.stderr


def test_a_name_without_a_folder_is_looked_up(tmp_path: Path) -> None:
    done = run_shell("sh", bootstrap.remote_command("python3"), tmp_path, b"'print(123)'\n")
    assert done.stdout == b"123\n"


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "~/none", "two words", "/tmp"])
def test_without_that_interpreter_the_others_are_listed(tmp_path: Path, python: str) -> None:
    venv = tmp_path / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    done = run_shell("sh", bootstrap.remote_command(python), tmp_path)
    noise, mark, listed = done.stdout.partition(bootstrap.NO_PYTHON)
    assert (done.returncode, noise, mark) == (127, b"", bootstrap.NO_PYTHON)
    version = ".".join(map(str, sys.version_info[:2]))
    line = next(line for line in listed.decode().splitlines() if line.startswith(str(venv)))
    assert line.split(maxsplit=2)[1] == version and line.endswith(("with torch", "without torch"))


def test_nothing_of_the_users_stands_on_the_command_line() -> None:
    command = bootstrap.remote_command("/usr/bin/python3")
    assert "\n" not in command and "!" not in command, "csh would take them for something else"
    assert len(command) < 4000


def start_here(state: Path, data: bytes, *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        bootstrap.local_command(sys.executable),
        input=data,
        env={"PATH": "/usr/bin:/bin", "HOME": str(state), "XDG_STATE_HOME": str(state), **(env or {})},
        capture_output=True,
        timeout=20,
    )


def test_the_agent_comes_up_past_noise_and_ends_with_its_channel(tmp_path: Path) -> None:
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "sitecustomize.py").write_text(SITE_NOISE)
    done = start_here(tmp_path / "state", first_bytes(), env={"PYTHONPATH": str(tmp_path / "noise")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Welcome! {}\n")
    (hello,) = hear(done.stdout)
    assert isinstance(hello, protocol.Hello) and hello.facts["python_path"] == sys.executable


def test_the_runtime_is_kept_once_whole_and_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert start_here(tmp_path, first_bytes()).returncode == 0
    (folder,) = (tmp_path / "paceline" / "runtime").iterdir()
    digest, data = bootstrap.pack_runtime()
    assert folder.name == digest
    for path, text in json.loads(zlib.decompress(data)).items():
        assert (folder / path).read_text(encoding="utf-8") == text
    # It is not unpacked again: what lies there under this hash is what runs.
    (folder / "paceline" / "launch" / "agent.py").write_text("def main(): print('this one')")
    assert start_here(tmp_path, first_bytes()).stdout == b"this one\n"


def test_a_channel_that_ends_too_early_leaves_nothing(tmp_path: Path) -> None:
    data = first_bytes()
    assert start_here(tmp_path, data[: len(data) // 2]).returncode == 1
    assert not list(tmp_path.iterdir())


def test_nobody_else_may_look_into_the_state_folder(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        start_here(tmp_path, first_bytes())
    finally:
        os.umask(before)
    assert (tmp_path / "paceline").stat().st_mode & 0o777 == 0o700


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "paceline").write_text("a file")  # in the way, for root as well
    done = start_here(tmp_path, first_bytes())
    assert done.returncode == 127
    assert done.stdout.startswith(bootstrap.NOT_INSTALLED)
    assert b"Not a directory: " + os.fsencode(tmp_path / "paceline") in done.stdout or b"File exists" in done.stdout


def test_a_read_only_state_folder() -> None:
    is_root = os.geteuid() == 0
    if is_root and (shutil.which("setpriv") is None or not os.path.exists("/usr/bin/python3")):
        pytest.skip("no setpriv and /usr/bin/python3, to be somebody else than root")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if is_root else []
    with tempfile.TemporaryDirectory() as home:  # not tmp_path, where nobody else may enter
        os.chmod(home, 0o555)
        done = subprocess.run(
            [*nobody, *bootstrap.local_command("/usr/bin/python3" if is_root else sys.executable)],
            input=first_bytes(),
            env={"PATH": "/usr/bin:/bin", "HOME": home},
            capture_output=True,
            timeout=20,
        )
        os.chmod(home, 0o755)
    if bootstrap.OLD_PYTHON in done.stdout:
        pytest.skip("the system's Python is too old")
    assert done.stdout.startswith(bootstrap.NOT_INSTALLED + b"Permission denied: "), done


def test_an_old_python_is_told_from_a_missing_one(tmp_path: Path) -> None:
    pretend = "import sys; sys.version_info = (3, 8, 0)\n"
    (tmp_path / "sitecustomize.py").write_text(pretend)
    done = start_here(tmp_path / "state", first_bytes(), env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == bootstrap.OLD_PYTHON + f"3.8 at {sys.executable}\n".encode()
    assert done.returncode == 127


def run_with_site(tmp_path: Path, users: str | None, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A rank's interpreter: our sitecustomize first on its path, the user's own after it."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    (ours / "sitecustomize.py").write_text(bootstrap.SITE_CUSTOMIZE)
    if users is not None:
        (theirs / "sitecustomize.py").write_text(users)
    package = str(Path(bootstrap.__file__).parents[2])
    path = os.pathsep.join([str(ours), str(theirs), package])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=20,
    )


WATCHING = "import sys; print(any(type(f).__name__ == '_AfterImport' for f in sys.meta_path))"


@pytest.mark.parametrize(
    ("env", "watching"),
    [
        ({}, "False"),
        ({"PACELINE_RUN_ID": "r", "PACELINE_WORLD_SIZE": "1"}, "False"),
        ({"PACELINE_RUN_ID": "r", "PACELINE_WORLD_SIZE": "2"}, "True"),
    ],
)
def test_the_guard_is_there_only_in_a_run_of_several_ranks(tmp_path: Path, env: dict[str, str], watching: str) -> None:
    done = run_with_site(tmp_path, None, WATCHING, **env)
    assert (done.stdout, done.stderr) == (f"{watching}\n", "")


def test_a_sitecustomize_of_the_users_own_runs_as_well(tmp_path: Path) -> None:
    users = "print('mine')\nimport sys\nsys.path.append('/added')\n"
    code = "import sys, sitecustomize as s; print('theirs' in s.__file__, '/added' in sys.path, 'ours' in sys.path[1])"
    done = run_with_site(tmp_path, users, code, PACELINE_RUN_ID="r", PACELINE_WORLD_SIZE="2")
    assert (done.stdout.splitlines(), done.stderr) == (["mine", "True True True"], "")


def test_a_mistake_in_the_users_sitecustomize_is_not_hidden(tmp_path: Path) -> None:
    done = run_with_site(tmp_path, "import no_such_module\n", "print('goes on')")
    assert done.stdout == "goes on\n", "as Python itself does"
    assert "no_such_module" in done.stderr


def test_what_runs_on_hosts_travels_whole(tmp_path: Path) -> None:
    """Every errand can be imported from what is sent, by a Python that has nothing else."""
    _, data = bootstrap.pack_runtime()
    files = json.loads(zlib.decompress(data))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    errands = [path for path in files if "/checks/" in path or "/envs/" in path]
    modules = [path.removesuffix(".py").replace("/", ".") for path in errands if "__init__" not in path]
    assert "paceline.checks.details" in modules and "paceline.checks.examine" not in modules
    code = (
        "import sys, importlib, types\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in ('torch', 'torch.distributed'): sys.modules[name] = types.ModuleType(name)\n"  # one has need of it
        "for name in sys.argv[2:]: importlib.import_module(name)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path), *modules], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
