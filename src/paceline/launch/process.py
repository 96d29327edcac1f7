"""The processes of a run on one host: start them, find them, end them.

Every program of a run inherits `PACELINE_LEASE=<run id>/<host index>` in its environment. That mark finds what a rank
left behind, also what moved into a session of its own. (The kernel shows a process's environment as it was when its
program began: an errand's fork has none, and is found by its session.) Standard library only: this module runs on every
host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Container, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.events import name_descriptor

if TYPE_CHECKING:
    from paceline.launch.forks import ForkedProcess

LEASE_VARIABLE = "PACELINE_LEASE"
_PR_SET_CHILD_SUBREAPER = 36
SIGTERM_GRACE_S = 1.0
"""What a process that is not a rank gets between SIGTERM and SIGKILL."""


class RankProcess:
    """One rank, or an errand: its process and the descriptors that the agent reads, each with its stream's name."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes] | ForkedProcess, streams: dict[int, str]) -> None:
        self.rank = rank
        self.process = process
        self.streams = streams
        self.unfinished_line = b""
        self.ended = False
        self.has_session = True
        """Its pid still names a session in which something lives, or may."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def close_stream(self, descriptor: int) -> None:
        """It has ended, or nobody is to read it any more. Does nothing to one that is closed."""
        if self.streams.pop(descriptor, None) is not None:
            os.close(descriptor)


def start_rank(spec: dict[str, Any]) -> RankProcess:
    """Start the process {rank, argv, env, cwd}: in a session of its own, without stdin. Raises OSError."""
    if not os.path.isdir(spec["cwd"]):
        raise OSError(errno.ENOTDIR, "there is no such folder here", spec["cwd"])
    with open_pipes("stdout", "stderr", "events") as (streams, (out, err, events)):
        env = rank_environment(spec["env"], os.environ, sys.executable)
        env["PACELINE_EVENT_FD"] = name_descriptor(events)
        process = subprocess.Popen(
            spec["argv"],
            env=env,
            cwd=spec["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=(events,),
        )
    return RankProcess(int(spec["rank"]), process, streams)


@contextlib.contextmanager
def open_pipes(*names: str) -> Generator[tuple[dict[int, str], list[int]]]:
    """A pipe for each name: (the ends to read, which don't block, each with its name; the ends to write).

    The ends to write are closed on the way out; those to read, too, if something is raised. Raises OSError.
    """
    streams: dict[int, str] = {}
    ends: list[int] = []
    try:
        for name in names:
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            streams[read_end] = name
            ends.append(write_end)
        yield streams, ends
    except BaseException:
        for descriptor in streams:
            os.close(descriptor)
        raise
    finally:
        for descriptor in ends:
            os.close(descriptor)


def close_inherited() -> None:
    """In a fork: every descriptor but stdin, stdout and stderr. The channel must close when the agent dies, so that no
    copy of its ends may live on."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of this listing itself
                os.close(int(name))


def rank_environment(asked: Mapping[str, str], here: Mapping[str, str], python: str) -> dict[str, str]:
    """The driver's variables on top of this host's own; the interpreter's folder leads the PATH of the two."""
    env = {**here, **asked}
    env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", os.defpath)])
    if "PYTHONPATH" in here and "PYTHONPATH" in asked:
        env["PYTHONPATH"] = os.pathsep.join([asked["PYTHONPATH"], here["PYTHONPATH"]])
    return env


def find_marked(lease: str) -> list[int]:
    """The living processes that carry this lease in their environment, by a look at all of /proc."""
    mark = f"{LEASE_VARIABLE}={lease}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
            if mark in environment.split(b"\0") and is_alive(int(name)):
                found.append(int(name))
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return found


def find_family(sessions: Iterable[int], *, spare: Container[int]) -> list[int]:
    """The living processes of these sessions and process groups, and the orphans that this process has adopted.

    Both are found also when they have cleared their environment. `spare`: children that are none of the run's.
    """
    wanted = set(sessions)
    found: list[int] = []
    for pid, parent, group, session in _living():
        is_orphan = parent == os.getpid() and pid not in wanted
        if pid not in spare and (is_orphan or group in wanted or session in wanted):
            found.append(pid)
    return found


def session_is_empty(session: int) -> bool:
    """No living process belongs to this session or process group."""
    return all(session not in (its_group, its_session) for _, _, its_group, its_session in _living())


def _living() -> Iterator[tuple[int, int, int, int]]:
    """(pid, parent, process group, session) of every process that has not ended."""
    for name in os.listdir("/proc"):
        fields = _stat_fields(int(name)) if name.isdigit() else []
        if fields and fields[0] not in "ZX":
            yield int(name), int(fields[1]), int(fields[2]), int(fields[3])


def reap_orphans(spare: Container[int]) -> None:
    """Wait for the adopted processes that have ended, or their numbers would never be free again.

    `spare`: children that somebody else waits for; the next call goes on where such a one has been in the way.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in spare:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def adopt_orphans() -> None:
    """From now on, a process of the run whose parent has died becomes a child of this one, and is found as such."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # no error is possible on a kernel of this century


def is_alive(pid: int) -> bool:
    """False for a process that has ended and only waits for its parent to notice."""
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stat_fields(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on: state, parent, process group, session, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signal each of these processes; those that have ended meanwhile are no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Ending:
    """How the processes of a run are ended: the ranks first, then all that they left, then by force.

    A rank gets SIGTERM alone, so that it can write a checkpoint while its loader processes still live. What remains
    after `grace_s` gets SIGTERM too, and a second later SIGKILL, again and again until nothing is left.
    """

    def __init__(
        self, lease: str, ranks: Iterable[RankProcess], *, spare: Container[int], grace_s: float, now: float
    ) -> None:
        self._lease = lease
        self._spare = spare
        self._ranks = tuple(ranks)
        self._term_all_at = self._kill_at = now
        self._term_sent = False
        self._set_times(now + grace_s, grace_s)
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGTERM)  # does nothing to one that has been waited for

    def hasten(self, *, grace_s: float, now: float) -> None:
        """Asked again, with less patience."""
        if now + grace_s < self._term_all_at:
            self._set_times(now + grace_s, grace_s)

    def _set_times(self, term_all_at: float, grace_s: float) -> None:
        self._term_all_at = term_all_at
        self._kill_at = term_all_at + (SIGTERM_GRACE_S if grace_s > 0 else 0.0)

    def step(self, now: float) -> bool:
        """Do what is due; True when no process of the run is left. To be called about ten times a second."""
        if now < self._term_all_at and any(rank.process.poll() is None for rank in self._ranks):
            return False
        sessions = [rank.pid for rank in self._ranks if rank.has_session]
        remaining = set(find_marked(self._lease)) | set(find_family(sessions, spare=self._spare))
        if not remaining:
            return True
        if not self._term_sent:
            self._term_sent = True
            self._kill_at = min(self._kill_at, now + SIGTERM_GRACE_S)
            send_signal(remaining, signal.SIGTERM)
        if now >= self._kill_at:
            send_signal(remaining, signal.SIGKILL)
        return False


def kernel_says(pid: int) -> str:
    """The kernel's own words about why it killed this process, where its log may be read; else nothing."""
    lines = [line for line in read_kernel_log() or () if f"Killed process {pid} " in line]
    return lines[-1] if lines else ""


def read_kernel_log() -> list[str] | None:
    """The lines that it still holds, without waiting for more; None where it may not be read."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while True:
            with contextlib.suppress(BrokenPipeError):  # overwritten: the next read goes on with what is still there
                record = os.read(descriptor, 8192).decode(errors="replace")
                lines += record.partition(";")[2].splitlines()[:1]
    except OSError:
        return lines  # the end of the log
    finally:
        os.close(descriptor)
