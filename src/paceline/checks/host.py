"""What can be wrong with one host by itself: its interpreter, and what it has room for.

Pure: a state in, results out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.checks.findings import check
from paceline.checks.host_states import HostState
from paceline.checks.results import Result, failure, ok, skipped, warning
from paceline.units import format_bytes

HostCheck = Callable[[HostState], Iterator[Result]]

MB, GB = 10**6, 10**9

# One segment of NCCL's has 9.6 MB, and it makes several for each pair of GPUs.
SHM_NEEDED_BYTES = 16 * MB
# Docker gives 64 MB, which the loaders' batches of images fill at once; half a gigabyte holds some dozens of them.
SHM_WANTED_BYTES = 512 * MB
# The driver's default on most systems; below it a few loader processes are enough to run out.
NOFILE_WANTED = 1024
# A rank with two neighbours, a log and a loader needs some hundred.
NOFILE_NEEDED = 256
# InfiniBand pins what it sends; the usual 8 MB hold not even one of its queues of buffers.
MEMLOCK_WANTED_BYTES = 64 * MB
# OpenMP and the autograd engine run deep; glibc gives each thread as much as this limit says.
STACK_WANTED_BYTES = 1 << 20
# A rank has some threads per core, each of which counts as a process.
PROCESSES_WANTED = 1024
# The runtime and the logs; whether the project fits is looked at when its size is known.
STATE_NEEDED_BYTES = 5 * MB
# A checkpoint of a model of a hundred million parameters with its optimizer.
STATE_WANTED_BYTES = 2 * GB
# Sockets, compiled kernels, what libraries unpack.
TEMPORARY_WANTED_BYTES = 200 * MB
INODES_WANTED = 1000
# PyTorch takes this for itself in each rank before the model is there; with CUDA four times as much.
RANK_BYTES, CUDA_RANK_BYTES = 500 * MB, 2 * GB
# Above it, more runs here than the machine can serve, and the slowest rank sets everybody's pace.
BUSY_PER_CORE = 1.5


@check("python-environment")
def check_python_environment(state: HostState) -> Iterator[Result]:
    """The interpreter, and where its packages come from.

    What it looks at
        Which Python runs there, in which environment (a venv, a conda environment, the system), and whether PyTorch is
        taken from that environment.

    Why it matters
        In a conda environment, packages that were once installed with `pip install --user` come before those of the
        environment: the script then runs with another PyTorch than `conda list` shows.

    How to mend it
        Give the ranks `PYTHONNOUSERSITE=1`, or remove the user's copy.
    """
    facts, details = state.facts, state.details
    if details.torch_path and details.user_site and details.torch_path.startswith(details.user_site):
        yield warning(
            f"torch comes from the user's own folder {details.user_site}, not from {details.prefix}",
            f"paceline run --env PYTHONNOUSERSITE=1 ...   (or there: {facts.python_path} -m pip uninstall torch)",
        )
        return
    yield ok(f"Python {facts.python_version} ({details.environment}, {facts.python_path})")


@check("torch")
def check_torch(state: HostState) -> Iterator[Result]:
    """PyTorch is there, and not too old.

    What it looks at
        The version file of the PyTorch that the interpreter would import. It is not imported.

    Why it matters
        paceline is tested with PyTorch 2.4 and newer; before 2.4 the store that all ranks meet at was another one. That
        there is a PyTorch at all, and the same one everywhere, is what `same-torch` looks at.

    How to mend it
        Install a newer PyTorch, the same one on all hosts.
    """
    facts, details = state.facts, state.details
    if details.torch_version is None:
        yield skipped("there is no torch whose version could be read")
        return
    numbers = [int(word) for word in details.torch_version.split(".")[:2] if word.isdigit()]
    if numbers < [2, 4]:
        yield warning(
            f"torch {details.torch_version} is older than 2.4, with which paceline is not tested",
            f"{facts.python_path} -m pip install --upgrade torch",
        )
        return
    yield ok(f"torch {details.torch_version}")


@check("shared-memory")
def check_shared_memory(state: HostState) -> Iterator[Result]:
    """Room in /dev/shm.

    What it looks at
        The size of /dev/shm, and how much of it is free.

    Why it matters
        The loader's processes hand over batches there, and NCCL what goes between the GPUs of a host. Where it is full,
        a loader dies with "Bus error" and NCCL with "No space left on device". Docker gives 64 MB.

    How to mend it
        `mount -o remount,size=8G /dev/shm`; for a container `docker run --shm-size=8g` or `--ipc=host`.
    """
    shm = state.details.shm
    in_container = state.details.container not in ("", "wsl")
    remedy = "docker run --shm-size=8g ...   (or --ipc=host)" if in_container else ""
    remedy = remedy or f"On {state.name}:  mount -o remount,size=8G /dev/shm"
    if shm is None:
        yield failure("there is no /dev/shm", f"On {state.name}:  mkdir -m 1777 /dev/shm; mount -t tmpfs none /dev/shm")
        return
    text = f"/dev/shm has {format_bytes(shm['free'])} free of {format_bytes(shm['total'])}"
    if shm["free"] < SHM_NEEDED_BYTES and state.num_gpus > 1:
        yield failure(f"{text}: too little for NCCL between {state.num_gpus} GPUs", remedy)
    elif shm["free"] < SHM_WANTED_BYTES:
        yield warning(f"{text}: loaders with num_workers > 0 can die there", remedy)
    else:
        yield ok(text)


@check("open-files")
def check_open_files(state: HostState) -> Iterator[Result]:
    """How many files and sockets a process may hold.

    What it looks at
        The soft and the hard limit of open files (`ulimit -n`) that ranks get there.

    Why it matters
        Each connection to another rank is one, and so is each tensor that a loader's process hands over. Beyond the
        limit it is "Too many open files" or "received 0 items of ancdata", often after hours.

    How to mend it
        A line in /etc/security/limits.d/ on that host; it holds from the next login on.
    """
    soft, hard = state.details.limits["nofile"]
    file = "/etc/security/limits.d/paceline.conf"
    remedy = f'On {state.name}:  echo "$USER - nofile 65536" | sudo tee -a {file}   (then log in anew)'
    if 0 <= soft < NOFILE_NEEDED:
        yield failure(f"a process may open only {soft} files", remedy)
    elif 0 <= soft < NOFILE_WANTED:
        yield warning(f"a process may open only {soft} files; many loader processes need more", remedy)
    else:
        yield ok(f"a process may open {_limit(soft)} files (hard limit {_limit(hard)})")


def _limit(value: int) -> str:
    return str(value) if value >= 0 else "any number of"


@check("locked-memory")
def check_locked_memory(state: HostState) -> Iterator[Result]:
    """Memory that InfiniBand may pin.

    What it looks at
        On hosts with RDMA devices, the limit of locked memory (`ulimit -l`).

    Why it matters
        What such a card sends must be pinned. With the usual limit NCCL ends with "Cannot allocate memory" in
        ibv_reg_mr, or hangs at the start.

    How to mend it
        `* - memlock unlimited` in /etc/security/limits.d/; for a container `docker run --ulimit memlock=-1`.
    """
    if not state.details.rdma_devices:
        yield ok("no RDMA device, so nothing has to be pinned")
        return
    soft, _ = state.details.limits["memlock"]
    devices = ", ".join(state.details.rdma_devices)
    if 0 <= soft < MEMLOCK_WANTED_BYTES:
        yield warning(
            f"only {format_bytes(soft)} may be locked, but {devices} has to pin what it sends",
            f"On {state.name}:  echo '* - memlock unlimited' >> /etc/security/limits.d/paceline.conf   (log in anew)",
        )
    else:
        yield ok(f"enough memory may be locked for {devices}")


@check("stack-and-processes")
def check_stack_and_processes(state: HostState) -> Iterator[Result]:
    """Room for threads.

    What it looks at
        The limits of the stack, of processes per user, and of processes in the control group.

    Why it matters
        Each rank starts several threads per core. Too small a stack ends in a segmentation fault without a word, too
        few processes in "can't start new thread".

    How to mend it
        Raise the limit in /etc/security/limits.d/, or start the container with a larger `--pids-limit`.
    """
    details = state.details
    stack = details.limits["stack"][0]
    processes = [details.limits["nproc"][0], int(details.cgroup["processes"] or -1)]
    allowed = min((number for number in processes if number >= 0), default=-1)
    if 0 <= stack < STACK_WANTED_BYTES:
        yield warning(
            f"a thread's stack has only {format_bytes(stack)}",
            f"On {state.name}:  echo '* - stack 8192' >> /etc/security/limits.d/paceline.conf   (log in anew)",
        )
    if 0 <= allowed < PROCESSES_WANTED:
        by_group = allowed == processes[1]
        yield warning(
            f"only {allowed} processes and threads are allowed",
            "docker run --pids-limit=-1 ...   (or TasksMax=infinity in the systemd unit)"
            if by_group
            else f"On {state.name}:  echo '* - nproc 65536' >> /etc/security/limits.d/paceline.conf   (log in anew)",
        )
    if not 0 <= stack < STACK_WANTED_BYTES and not 0 <= allowed < PROCESSES_WANTED:
        yield ok("stack and number of processes are large enough")


@check("disk")
def check_disk(state: HostState) -> Iterator[Result]:
    """Room for the project, for checkpoints and for temporary files.

    What it looks at
        Free bytes and free inodes of paceline's folder and of the temporary folder, and whether they can be written.

    Why it matters
        The project's copy, the ranks' own parts of a checkpoint, and compiled kernels go there. A disk that fills up
        ends the run at its first checkpoint.

    How to mend it
        Make room, or point XDG_STATE_HOME or TMPDIR there to a folder on a larger disk.
    """
    for use, variable, needed, wanted in (
        ("state", "XDG_STATE_HOME", STATE_NEEDED_BYTES, STATE_WANTED_BYTES),
        ("temporary", "TMPDIR", MB, TEMPORARY_WANTED_BYTES),
    ):
        disk = state.details.disks[use]
        path, free = disk["path"], format_bytes(disk["free"])
        remedy = f"On {state.name}:  df -h {path}   (make room, or set {variable} there to another disk)"
        if not disk["is_writable"]:
            yield failure(f"{path} can't be written", f"On {state.name}:  ls -ld {path}; findmnt -T {path}")
        elif disk["inodes"] and not disk["free_inodes"]:
            yield failure(f"the disk of {path} has no room for another file (inodes)", remedy.replace("-h", "-i"))
        elif disk["free"] < needed:
            yield failure(f"{free} free in {path}: too little to start", remedy)
        elif disk["inodes"] and disk["free_inodes"] < INODES_WANTED:
            text = f"the disk of {path} has room for {disk['free_inodes']} more files only (inodes)"
            yield warning(text, remedy.replace("-h", "-i"))
        elif disk["free"] < wanted:
            purpose = "little for checkpoints" if use == "state" else "little for temporary files"
            yield warning(f"{free} free in {path}: {purpose}", remedy)
        else:
            yield ok(f"{free} free in {path}")


@check("memory")
def check_memory(state: HostState) -> Iterator[Result]:
    """Memory for the ranks.

    What it looks at
        Memory that is available now, and what the control group allows, against what PyTorch takes in each rank before
        any model is there: half a gigabyte, with CUDA two.

    Why it matters
        A host that runs out of memory kills a rank without a traceback; one that swaps slows down all others.

    How to mend it
        End what else runs there, start fewer ranks there (`-H HOST:SLOTS`), or raise the container's `--memory`.
    """
    details = state.details
    needed = state.slots * (CUDA_RANK_BYTES if state.num_gpus else RANK_BYTES)
    allowed = details.cgroup["memory"]
    ranks = f"{state.slots} rank{'s' if state.slots > 1 else ''}"
    if allowed is not None and allowed < min(needed, details.memory["total"]):
        yield warning(
            f"the control group allows {format_bytes(allowed)}, but {ranks} take {format_bytes(needed)} at the start",
            "docker run --memory=...   (or MemoryMax= in the systemd unit)",
        )
    elif details.memory["available"] < needed:
        yield warning(
            f"{format_bytes(details.memory['available'])} of memory are available, but {ranks} take "
            f"{format_bytes(needed)} at the start",
            f"On {state.name}:  ps -eo pid,user,rss,args --sort=-rss   (end what is not needed)",
        )
    else:
        yield ok(f"{format_bytes(details.memory['available'])} of memory available")


@check("cores")
def check_cores(state: HostState) -> Iterator[Result]:
    """Cores that are seen, and cores that may be used.

    What it looks at
        The control group's quota of processor time against the cores that a process sees.

    Why it matters
        PyTorch starts a thread for every core that it sees. With a quota below that, the kernel stops all of them for
        most of each tenth of a second, and this host becomes the one that all others wait for.

    How to mend it
        Give the ranks no more threads than the quota has cores (`--env OMP_NUM_THREADS=N`), or raise
        `docker run --cpus`.
    """
    quota, seen = state.details.cgroup["cores"], state.facts.num_cores
    if quota is not None and quota < seen:
        threads = max(1, int(quota) // state.slots)
        yield warning(
            f"{seen} cores are seen, but the control group allows the time of {quota:g}",
            f"paceline run --env OMP_NUM_THREADS={threads} ...   (or docker run --cpus={seen})",
        )
    elif seen < state.slots:
        yield warning(f"{state.slots} ranks share {seen} core{'s' if seen > 1 else ''}", f"-H {state.name}:{seen}")
    else:
        yield ok(f"{seen} core{'s' if seen > 1 else ''} for {state.slots} rank{'s' if state.slots > 1 else ''}")


@check("load")
def check_load(state: HostState) -> Iterator[Result]:
    """Whether somebody else is at work there.

    What it looks at
        The load average of the last minute, against the number of cores.

    Why it matters
        All ranks wait for the slowest one at every step, so that other people's work on one host slows down all.

    How to mend it
        Wait, end what is not needed, or leave the host out.
    """
    load, cores = state.details.load, state.details.num_cpus
    if load > BUSY_PER_CORE * cores:
        text = f"{load:.0f} processes want the {cores} core{'s' if cores > 1 else ''}"
        yield warning(text, f"On {state.name}:  ps -eo pcpu,pid,user,args --sort=-pcpu   (end what is not needed)")
    else:
        yield ok(f"load {load:.1f} on {cores} core{'s' if cores > 1 else ''}")


HOST_CHECKS: tuple[HostCheck, ...] = (
    check_python_environment,
    check_torch,
    check_shared_memory,
    check_open_files,
    check_locked_memory,
    check_stack_and_processes,
    check_disk,
    check_memory,
    check_cores,
    check_load,
)
