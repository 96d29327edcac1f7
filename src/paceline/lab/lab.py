"""A lab as its user holds it: bring up, run commands on hosts, cut cables, look at processes, take down."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import paceline
from paceline.errors import HostError, InputError, PacelineError
from paceline.lab import namespaces
from paceline.lab.enter import host_environment, wrap_command
from paceline.lab.folder import write_folder
from paceline.lab.lock import lock
from paceline.lab.report import wait_for_hosts
from paceline.lab.requirements import require_all, tool
from paceline.lab.spec import LAB_ROOT, STAY, LabSpec, folders_to_keep, lab_folder

_LOCK_TIMEOUT_S = 0.5
_UP_TIMEOUT_S = 30.0
_DOWN_TIMEOUT_S = 10.0
_LINK_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostProcess:
    """A process of a host, as the machine around the lab sees it."""

    pid: int
    """The machine's own number for it, so that os.kill works."""
    command: tuple[str, ...]
    """Its argument list."""
    environ: Mapping[str, str]
    """The environment that it was started with."""


class Lab:
    """A lab that is up. Made by `Lab.up` or `Lab.find`; as a context manager it is taken down at the end."""

    def __init__(self, spec: LabSpec, *, keeper_pid: int, lease: int | None = None) -> None:
        self.spec = spec
        self._keeper_pid = keeper_pid
        self._lease = lease

    @classmethod
    def up(
        cls,
        name: str = "lab",
        *,
        num_hosts: int = 4,
        rate_bits_per_s: int | None = None,
        keep: Iterable[str] = (),
        tied: bool = False,
    ) -> Lab:
        """Start the hosts h1 to hN and return when `ssh` between them works.

        What a dead lab of the same name left is removed first. A tied lab ends with this process, however
        that ends; another one stays until `down`. The current folder, the interpreter and all that it
        imports from stay visible at their paths, and shared, even below the home folder or /tmp; `keep` names
        more such folders. Other files there (pytest's tmp_path, say) are not seen on the hosts.

        Raises InputError for what can't be asked or is missing here, PacelineError if a host does not start.
        """
        require_all()
        home = os.path.realpath(pwd.getpwuid(0).pw_dir)
        needed = [os.getcwd(), sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
        spec = LabSpec(
            name=name,
            num_hosts=num_hosts,
            rate_bits_per_s=rate_bits_per_s,
            home=home,
            keep=folders_to_keep(needed, asked=keep, home=home),
        )
        spec.folder.mkdir(parents=True, exist_ok=True)
        with lock(spec.folder, timeout_s=_LOCK_TIMEOUT_S) as held:
            if held is None:
                raise InputError(f"a lab called {name!r} is up already", hint=f"paceline lab down --name {name}")
            for remains in spec.folder.iterdir():
                shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
            write_folder(spec)
            lease = _start_keeper(spec, held)
        if not tied:
            os.write(lease, STAY)
            os.close(lease)
        return cls(spec, keeper_pid=_read_pid(spec.folder), lease=lease if tied else None)

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """The lab of that name that is up. Raises InputError if there is none."""
        folder = lab_folder(name)
        try:
            with lock(folder, timeout_s=0) as held:
                if held is None:
                    return cls(LabSpec.read(folder), keeper_pid=_read_pid(folder))
        except OSError:
            pass
        others = ", ".join(names()) or "none"
        raise InputError(f"no lab called {name!r} is up (up are: {others})", hint=f"paceline lab up --name {name}")

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.spec.name

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in order."""
        return self.spec.hosts

    def address(self, host: str) -> str:
        """The host's address on eth0, as text."""
        return self.spec.address(self._known(host))

    def home(self, host: str) -> Path:
        """Where the host's home folder lies on the machine around it."""
        return self.spec.folder / self._known(host) / "home"

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on a host: its pid is that of the command itself, nothing stands in between.

        `cwd` is this process's own unless given, or the home folder where the host has no such folder; `env`
        stands in for this process's environment, see `host_environment`. Raises HostError if the host has
        ended.
        """
        pid = self._pid(host)
        command = wrap_command(argv, pid=pid, cwd=os.getcwd() if cwd is None else cwd)
        environ = host_environment(os.environ if env is None else env, home=self.spec.home)
        try:
            with namespaces.children_on(os.sched_getaffinity(pid)), namespaces.children_in(f"/proc/{pid}/ns/pid"):
                return subprocess.Popen(command, env=environ, **options)
        except OSError as error:
            # ENOMEM is also what the kernel says when process 1 is just ending.
            if error.errno != errno.ENOMEM and os.path.exists(f"/proc/{pid}"):
                raise
            raise self._gone(host) from error

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        timeout_s: float = 30.0,
        input: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, as text, both outputs captured; `cwd` and `env` as for `popen`.

        Raises HostError; and subprocess.TimeoutExpired after `timeout_s`, all of the command killed.
        """
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(host, argv, cwd=cwd, env=env, text=True, start_new_session=True, **pipes) as process:
            try:
                stdout, stderr = process.communicate(input, timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def link(self, host: str, *, up: bool) -> None:
        """Pull the host's cable out of the switch, or put it back in. Raises PacelineError."""
        into_switch = [tool("nsenter") or "nsenter", f"--net=/proc/{self._keeper_pid}/ns/net"]
        command = [*into_switch, tool("ip") or "ip", "link", "set", self._known(host), "up" if up else "down"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LINK_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise self._gone(host)

    def processes(self, host: str) -> list[HostProcess]:
        """All living processes of a host (no zombies) but its process 1; its sshd is the first of them."""
        first = self._pid(host)
        found: list[HostProcess] = []
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{first}/ns/pid")
            for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
                process = _look_at(pid, namespace) if pid != first else None
                if process is not None:
                    found.append(process)
        return found

    def down(self) -> None:
        """End every process of the lab and remove all of it; nothing happens to one that has ended already.

        Raises PacelineError if something of it is still there after ten seconds.
        """
        take_down(self.name)
        if self._lease is not None:
            os.close(self._lease)
            self._lease = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    def _known(self, host: str) -> str:
        if host not in self.hosts:
            raise InputError(
                f"lab {self.name!r} has no host {host!r}; its hosts are {', '.join(self.hosts)}",
                hint=f"paceline lab exec --name {self.name} {self.hosts[0]} -- hostname",
            )
        return host

    def _pid(self, host: str) -> int:
        try:
            return _read_pid(self.spec.folder / self._known(host))
        except OSError as error:
            raise self._gone(host) from error

    def _gone(self, host: str) -> HostError:
        again = f"paceline lab down --name {self.name} && paceline lab up --name {self.name}"
        return HostError(f"host {host} of lab {self.name!r} has ended", hint=again)


def names() -> tuple[str, ...]:
    """The labs that are up."""
    found: list[str] = []
    for folder in sorted(LAB_ROOT.glob("*/")):
        with contextlib.suppress(OSError), lock(folder, timeout_s=0) as held:
            if held is None:
                found.append(folder.name)
    return tuple(found)


def take_down(name: str) -> bool:
    """Remove the lab of that name, alive, dead or half; says whether there was one. Raises PacelineError."""
    folder = lab_folder(name)
    try:
        with lock(folder, timeout_s=0) as held:
            if held is None:
                _kill_keeper(folder)
        with lock(folder, timeout_s=_DOWN_TIMEOUT_S) as held:
            if held is None:
                raise PacelineError(
                    f"processes of lab {name!r} are still there after {_DOWN_TIMEOUT_S:g} s",
                    hint="ps -eo pid,stat,wchan:20,args | grep paceline.lab.keeper",
                )
            shutil.rmtree(folder)
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):
        LAB_ROOT.rmdir()  # only if this was the last lab
    return True


def _kill_keeper(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # it may be ending by itself, or never have written its number
        keeper = os.pidfd_open(_read_pid(folder))
        try:
            signal.pidfd_send_signal(keeper, signal.SIGKILL)
            # Readable only when every process of its namespace, and of the namespaces in it, has ended.
            select.select([keeper], [], [], _DOWN_TIMEOUT_S)
        finally:
            os.close(keeper)


def _start_keeper(spec: LabSpec, held: int) -> int:
    """Returns the maker's end of the lease, open, when all hosts are there."""
    command = [sys.executable, "-m", "paceline.lab.keeper", str(spec.folder)]
    source = str(Path(paceline.__file__).parents[1])
    theirs, lease = os.pipe()
    try:
        with open(spec.folder / "keeper.log", "wb") as log:
            starter = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": source},
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                pass_fds=(held,),
                start_new_session=True,
            )
        with starter:
            wait_for_hosts(spec, starter, timeout_s=_UP_TIMEOUT_S)
    except BaseException:
        os.close(lease)  # whatever has started ends itself
        _kill_keeper(spec.folder)
        shutil.rmtree(spec.folder, ignore_errors=True)
        raise
    finally:
        os.close(theirs)
    return lease


def _read_pid(folder: Path) -> int:
    """The living process 1 that this folder belongs to. Raises OSError if it has ended."""
    pid, namespace = (folder / "pid").read_text().split()
    if os.readlink(f"/proc/{pid}/ns/pid") != namespace:
        raise ProcessLookupError(f"process {pid} is another one by now")
    return int(pid)


def _look_at(pid: int, namespace: str) -> HostProcess | None:
    folder = Path(f"/proc/{pid}")
    try:
        if os.readlink(folder / "ns" / "pid") != namespace:
            return None
        if (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return None
        command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return None  # it has ended while we looked
    pairs = (variable.partition("=") for variable in variables)
    return HostProcess(pid=pid, command=tuple(command), environ={name: value for name, _, value in pairs})
