"""What surrounds the ranks of a host: its name, its language, settings that nobody thinks of, what other runs left.
Pure: a state in, results out."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from paceline.checks.findings import check
from paceline.checks.host_states import HostState
from paceline.checks.results import Result, ok, skipped, warning
from paceline.units import format_bytes, format_duration

# What a process waits for a name when the name server is a room away, several times over.
SLOW_RESOLVER_S = 1.0
# A run is in the middle of its start for seconds; what nobody has mapped for so long is no part of one.
LEFTOVER_S = 600.0
# Of a file's kind, enough to know it by.
_SHOWN = 3

# Set for an hour of debugging, and forgotten in a shell's profile.
_COSTLY = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "waits for the GPU after every kernel",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "checks every collective with a second one",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "waits in every collective",
    ("NCCL_P2P_DISABLE", "1"): "takes the way through the host's memory from GPU to GPU",
    ("NCCL_SHM_DISABLE", "1"): "takes the way over the network card within the host",
    ("NCCL_DEBUG", "TRACE"): "writes a line for every step of every collective",
}
# Chosen by NCCL for each message; a fixed choice must be the same on all hosts, and is seldom the best one.
_FIXED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_BUFFSIZE")


@check("host-name")
def check_host_name(state: HostState) -> Iterator[Result]:
    """What the host's own name resolves to, and how fast.

    What it looks at
        The addresses that the host finds for its own name, with a time limit.

    Why it matters
        Many libraries ask for it at the start of each process. A name server that doesn't answer costs each of them
        seconds. An address of loopback, as Debian writes it into /etc/hosts, does no harm: paceline gives the ranks
        literal addresses and names their interfaces.

    How to mend it
        A line in /etc/hosts on that host.
    """
    name, resolved = state.details.hostname, state.details.resolved
    remedy = f"On {state.name}:  echo '127.0.1.1 {name}' >> /etc/hosts"
    if resolved["problem"] == "no answer" and resolved["elapsed_s"] < SLOW_RESOLVER_S:
        yield skipped(f"the name server had not answered within {resolved['elapsed_s']:.2g} s")
    elif resolved["problem"] == "no answer":
        yield warning(f"its name {name} was not resolved within {resolved['elapsed_s']:.1f} s", remedy)
    elif resolved["problem"]:
        yield warning(f"its own name {name} can't be resolved ({resolved['problem']})", remedy)
    elif resolved["elapsed_s"] > SLOW_RESOLVER_S:
        yield warning(f"it took {resolved['elapsed_s']:.1f} s to resolve its own name {name}", remedy)
    else:
        addresses = resolved["addresses"]
        loop = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
        note = "; loopback, which is why paceline names the interfaces" if loop else ""
        yield ok(f"{name} resolves to {', '.join(addresses)}{note}")


@check("encoding")
def check_encoding(state: HostState) -> Iterator[Result]:
    """The encoding of text files.

    What it looks at
        The encoding with which Python opens text there, as the locale says.

    Why it matters
        Labels or file names outside ASCII are read wrongly, or raise UnicodeDecodeError, on this host alone.

    How to mend it
        `--env PYTHONUTF8=1` for the ranks, or a UTF-8 locale on the host.
    """
    encoding = state.details.encoding
    if encoding.lower().replace("-", "") != "utf8":
        yield warning(f"text is read as {encoding}, not as UTF-8", "paceline run --env PYTHONUTF8=1 ...")
    else:
        yield ok("text is read as UTF-8")


@check("settings")
def check_settings(state: HostState) -> Iterator[Result]:
    """Variables of NCCL, Gloo, CUDA and PyTorch that were once set and forgotten.

    What it looks at
        The environment that ranks inherit there, /etc/nccl.conf, ~/.nccl.conf and the file that NCCL_CONF_FILE names.

    Why it matters
        Some make everything slow, some fix what NCCL would choose better, some can't work.

    How to mend it
        Remove the line from the file that sets it: ~/.bashrc, /etc/environment, /etc/nccl.conf.
    """
    settings = {**state.details.nccl_conf, **state.details.variables}
    found = False
    for name, raw in settings.items():
        value = raw.partition(" (/")[0]
        place = raw[len(value) + 2 : -1] or "~/.bashrc ~/.profile /etc/environment"
        remedy = f"On {state.name}:  grep -n {name} {place}   (and remove the line)"
        result = _judge_setting(name, value, remedy)
        if result is not None:
            found = True
            yield result
    if not found:
        yield ok("no setting that slows down or breaks a run")


def _judge_setting(name: str, value: str, remedy: str) -> Result | None:
    if name == "NCCL_CONF_FILE":
        return None
    if cost := _COSTLY.get((name, value.upper())):
        return warning(f"{name}={value} {cost}", remedy)
    if name in _FIXED:
        return warning(f"{name}={value} takes the choice from NCCL, and must be the same on all hosts", remedy)
    if name == "NCCL_SOCKET_FAMILY" and value not in ("AF_INET", "AF_INET6"):
        return warning(f"{name}={value} does nothing: NCCL knows AF_INET and AF_INET6", remedy)
    return None


@check("other-runs")
def check_other_runs(state: HostState) -> Iterator[Result]:
    """Processes of other runs of paceline's.

    What it looks at
        Processes that carry another run's mark (the variable PACELINE_LEASE), and whether their agent still lives.

    Why it matters
        What a run left behind holds GPUs, memory and ports. A run that is still going on shares the host with yours,
        and both are slower for it.

    How to mend it
        End what nobody leads any more; wait for, or stop, a run that is going on.
    """
    lost = [process for process in state.details.processes if not process["is_led"]]
    led = [process for process in state.details.processes if process["is_led"]]
    if lost:
        oldest = max(process["age_s"] for process in lost)
        pids = " ".join(str(process["pid"]) for process in lost)
        yield warning(
            f"{_count(lost, 'process')} of run {lost[0]['run']} left there, {format_duration(oldest)} old: "
            f"{lost[0]['command'][:60]}",
            f"On {state.name}:  kill -9 {pids}",
        )
    if led:
        runs = ", ".join(sorted({process["run"] for process in led}))
        yield warning(
            f"{_count(led, 'process')} of another run at work there ({runs})",
            f"On {state.name}:  ps -fp {','.join(str(process['pid']) for process in led)}   (wait, or end that run)",
        )
    if not lost and not led:
        yield ok("no process of another run")


def _count(things: list[object] | list[dict[str, object]], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 'es' if noun.endswith('s') else 's'}"


@check("shared-memory-leftovers")
def check_shared_memory_leftovers(state: HostState) -> Iterator[Result]:
    """Files in /dev/shm that nobody uses any more.

    What it looks at
        NCCL's and PyTorch's files in /dev/shm, older than ten minutes, that no process has mapped.

    Why it matters
        Runs that were killed leave them; they take memory until the next boot, and fill /dev/shm.

    How to mend it
        Remove them.
    """
    old = [file for file in state.details.shm_leftovers if file["age_s"] > LEFTOVER_S]
    if old:
        size = format_bytes(sum(file["bytes"] for file in old))
        paths = " ".join(file["path"] for file in old[:_SHOWN])
        more = f" and {len(old) - _SHOWN} more" if len(old) > _SHOWN else ""
        yield warning(
            f"{_count(old, 'file')} of dead processes in /dev/shm, {size}", f"On {state.name}:  rm {paths}{more}"
        )
    else:
        yield ok("nothing left in /dev/shm")


SURROUNDINGS_CHECKS = (
    check_host_name,
    check_encoding,
    check_settings,
    check_other_runs,
    check_shared_memory_leftovers,
)
