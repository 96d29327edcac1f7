"""What differs between hosts. Pure: states in; a row of the table is a result that knows each host's value.

What stops a run because of versions and GPUs is decided in launch/compare.py, for `paceline run` and for this table.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from paceline.checks.details import OTHER_NAMES
from paceline.checks.findings import Finding, Status, check
from paceline.checks.host_states import HostState
from paceline.checks.identities import check_one_machine_each
from paceline.checks.results import Result, as_findings, collect
from paceline.launch.compare import Difference, compare_facts
from paceline.units import format_bytes, format_duration

# Within it, lines of several hosts' logs can still be told in order, and make-like tools see no file of the future.
CLOCK_LIMIT_S = 1.0
# Must be the same on all hosts, or NCCL sends what the other side doesn't expect.
_MUST_AGREE = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "TORCH_DISTRIBUTED_DEBUG")
# May differ: names of interfaces and folders are each host's own, and so is what it shows.
_OWN = ("IFNAME", "_PATH", "_HOME", "_DEBUG", "_FILE", "_DIR", "VISIBLE_DEVICES", "_HCA", "_HOSTID", "_CACHE")

# Of a module that can be imported, but whose package isn't known by its name.
_THERE = "there"


_SAME_NAMES = {
    *("numpy", "scipy", "pandas", "matplotlib", "tqdm", "transformers", "datasets", "tokenizers", "einops", "timm"),
    *("accelerate", "torchvision", "torchaudio", "tensorboard", "wandb", "h5py", "numba", "safetensors", "requests"),
}
"""Imports whose package has the same name: another one may be somebody else's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Result):
    """One line of the table. Its status is the mark: a failure stops the run, a warning is worth a look."""

    what: str
    values: tuple[str, ...]
    """One per host, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came of comparing."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]


def compare_hosts(states: Sequence[HostState], *, needs_torch: bool = True) -> Comparison:
    """All rows and all findings. One host alone is compared as well: it may lack something by itself."""
    rows: list[Row] = []
    findings: list[Finding] = []
    stops = _find_stops(states, needs_torch=needs_torch)
    found = [(function, collect(function, states, stops)) for function in STOPPING_CHECKS]
    found += [(function, collect(function, states)) for function in OTHER_CHECKS]
    for function, results in found:
        rows += [result for result in results if isinstance(result, Row)]
        findings += as_findings(function, "", results)
    return Comparison(rows=tuple(rows), findings=tuple(findings))


def _find_stops(states: Sequence[HostState], *, needs_torch: bool) -> dict[str, Difference]:
    found = compare_facts(
        [state.name for state in states],
        [state.facts for state in states],
        [state.slots for state in states],
        num_gpus=[state.num_gpus for state in states],
        needs_torch=needs_torch,
    )
    return {difference.what: difference for difference in found}


@check("same-python")
def check_same_python(states: Sequence[HostState], stops: dict[str, Difference]) -> Iterator[Result]:
    """The same Python on all hosts.

    What it looks at
        The version of each host's interpreter; 3.11.4 and 3.11.7 are the same.

    Why it matters
        Objects that ranks send each other, and checkpoints with pickled parts, are not read by another Python.

    How to mend it
        Name the right interpreter: `--python PATH`, or `python=PATH` in the hostfile.
    """
    yield _row("Python", states, [state.facts.python_version for state in states], stop=stops.get("Python"))
    yield _row("environment", states, [state.details.environment for state in states])


@check("same-torch")
def check_same_torch(states: Sequence[HostState], stops: dict[str, Difference]) -> Iterator[Result]:
    """The same PyTorch on all hosts.

    What it looks at
        Whether there is a PyTorch, its version, and the CUDA that it was built for.

    Why it matters
        Ranks of different versions wait for each other at the start, or send what the other doesn't understand.

    How to mend it
        Install on one host what the other has; the line names the command that does it.
    """
    versions = [state.facts.torch_version or "none" for state in states]
    stop = stops.get("torch")
    if stop is not None and (sync := _sync_command(states, versions)):
        stop = dataclasses.replace(stop, hint=sync)
    yield _row("torch", states, versions, stop=stop)
    with_gpu = [state.details.torch_cuda or "none" if state.num_gpus else "" for state in states]
    yield _row("CUDA", states, with_gpu, status="warning", remedy=_sync_command(states, with_gpu))


@check("same-gpus")
def check_same_gpus(states: Sequence[HostState], stops: dict[str, Difference]) -> Iterator[Result]:
    """GPUs of one kind, and one for each rank.

    What it looks at
        How many GPUs each host has for the ranks, their models, and the driver's version.

    Why it matters
        Hosts with GPUs and hosts without can't form one NCCL group. With different models the slowest sets the pace,
        and the smallest memory bounds the batch.

    How to mend it
        Leave a host out, or give it fewer samples per step.
    """
    for what in ("GPUs", "slots per GPU"):
        if what in stops:
            yield _row(what, states, stops[what].values, stop=stops[what])
    models = [_models(state.facts.gpus) for state in states]
    if "GPUs" not in stops:
        kinds = [", ".join(sorted(set(state.facts.gpus))) for state in states]
        slower = "leave the slower host out, or give it a smaller batch"
        yield _row("GPU models", states, models, keys=kinds, status="warning", remedy=slower)
    yield _row("driver", states, [state.details.gpu["driver"] or "" for state in states])


def _models(gpus: Sequence[str]) -> str:
    return ", ".join(f"{count} × {model}" for model, count in Counter(gpus).items()) or "none"


@check("same-packages")
def check_same_packages(states: Sequence[HostState]) -> Iterator[Result]:
    """The same packages on all hosts, of those that the run uses.

    What it looks at
        NCCL, cuDNN and NumPy, and every package that the script imports: whether each host has it, and its version.

    Why it matters
        A host that lacks a package ends the run with ModuleNotFoundError. Different versions augment, tokenise and
        round differently, which nobody notices.

    How to mend it
        Install on one host what the other has; the line names the command that does it.
    """
    # Two versions of NCCL refuse to talk to each other: "Mismatched NCCL version".
    wheels: tuple[tuple[str, str, Status], ...] = (
        ("NCCL", "nvidia-nccl-cu", "failure"),
        ("cuDNN", "nvidia-cudnn-cu", "warning"),
    )
    for what, prefix, mark in wheels:
        found = [_wheel_version(state, prefix) if state.num_gpus else "" for state in states]
        yield _row(what, states, found, status=mark, remedy=_sync_command(states, found))
    for name in sorted({name for state in states for name in state.details.imports} | {"numpy"}):
        if name == "torch":
            continue
        versions = [_import_version(state, name) for state in states]
        lacking = "none" in versions and any(name in state.details.imports for state in states)
        if set(versions) == {"none"}:
            python = states[0].facts.python_path
            if lacking:
                package = OTHER_NAMES.get(name, (name,))[0]
                is_known = name in OTHER_NAMES or name in _SAME_NAMES
                what = package if is_known else f"PACKAGE   (the one that provides {name}, if it is spelled so)"
                remedy = f"On each host:  {python} -m pip install {what}"
                text = f"the script imports {name}, which no host has"
                yield Row(what=name, values=tuple(versions), status="failure", text=text, remedy=remedy)
            continue
        keys = ["" if version == _THERE else version for version in versions]
        if "none" in versions:
            keys = ["none" if version == "none" else "there" for version in versions]
        status: Status = "failure" if lacking else "warning"
        yield _row(name, states, versions, keys=keys, status=status, remedy=_sync_command(states, versions))


def _wheel_version(state: HostState, prefix: str) -> str:
    return next((version for name, version in state.details.packages.items() if name.startswith(prefix)), "")


def _import_version(state: HostState, name: str) -> str:
    found = state.details.imports.get(name)
    if found is None:
        return state.details.packages.get(name, "none")
    return found["version"] or _THERE if found["found"] else "none"


@check("same-settings")
def check_same_settings(states: Sequence[HostState]) -> Iterator[Result]:
    """The same settings of NCCL, Gloo and PyTorch on all hosts.

    What it looks at
        Variables NCCL_*, GLOO_*, TORCH_* and PYTORCH_* as the hosts themselves have them, and NCCL's own files; not
        those which name interfaces or folders.

    Why it matters
        With another algorithm or protocol on one host, NCCL hangs or reports a truncated message.

    How to mend it
        Give all ranks the same value with `--env NAME=VALUE`, or remove it where it is set.
    """
    settings = [{**_without_paths(state.details.nccl_conf), **state.details.variables} for state in states]
    names = sorted({name for of_host in settings for name in of_host if _is_shared(name)})
    for name in names:
        values = [of_host.get(name, "not set") for of_host in settings]
        status: Status = "failure" if name in _MUST_AGREE else "warning"
        value = next(value for value in values if value != "not set")
        yield _row(name, states, values, status=status, remedy=f"paceline run --env {name}={value} ...")
    if not names:
        yield Result(status="ok", text="no host has settings of its own")


def _without_paths(settings: dict[str, str]) -> dict[str, str]:
    return {name: raw.partition(" (/")[0] for name, raw in settings.items()}


def _is_shared(name: str) -> bool:
    if name in _MUST_AGREE:
        return True
    return name.startswith(("NCCL_", "GLOO_", "TORCH_", "PYTORCH_")) and not any(part in name for part in _OWN)


@check("clocks")
def check_clocks(states: Sequence[HostState]) -> Iterator[Result]:
    """Clocks that agree.

    What it looks at
        Each host's wall clock against this machine's, with the time that the question took as its uncertainty.

    Why it matters
        Logs of several hosts can't be put in order, checkpoints of the future confuse whatever compares dates, and
        certificates are refused.

    How to mend it
        Let all hosts follow a time server.
    """
    ahead = [state.clock_ahead_s for state in states]
    off = [index for index, (low, high) in enumerate(ahead) if low > CLOCK_LIMIT_S or high < -CLOCK_LIMIT_S]
    values = tuple(_describe_clock(low, high) for low, high in ahead)
    zones = [state.details.time_zone for state in states]
    if off:
        told = ", ".join(f"{states[index].name} is {values[index]}" for index in off)
        names = ", ".join(states[index].name for index in off)
        remedy = f"On {names}:  timedatectl set-ntp true   (or: chronyc makestep)"
        yield Row(what="clock", values=values, status="warning", text=f"clocks differ: {told}", remedy=remedy)
    else:
        yield Row(what="clock", values=values, status="ok", text="clocks agree to within a second")
    yield _row("time zone", states, zones)


def _describe_clock(low_s: float, high_s: float) -> str:
    middle_s, error_s = (low_s + high_s) / 2, (high_s - low_s) / 2
    if abs(middle_s) <= max(error_s, 0.1):
        return "0.0 s off"
    side = "ahead" if middle_s > 0 else "behind"
    return f"{format_duration(abs(middle_s))} {side} (± {format_duration(error_s)})"


@check("same-data")
def check_same_data(states: Sequence[HostState]) -> Iterator[Result]:
    """The same data on all hosts.

    What it looks at
        The number of files and bytes below the data folder that was named, as far as two seconds of counting reach.

    Why it matters
        Ranks with more batches wait for ever for those that have fewer; with other files they train on other data.

    How to mend it
        Copy the folder anew, for instance with `rsync -a`.
    """
    counts = [state.details.data for state in states]
    known = [count for count in counts if count is not None]
    if len(known) < len(states) or not known:
        return  # none was named
    path, best = known[0]["path"], max(range(len(known)), key=lambda index: known[index]["bytes"])
    missing = [states[index].name for index, count in enumerate(known) if not count["is_readable"]]
    if len(missing) == len(known):
        text = f"no host has a folder {path} that can be read"
        yield Result(status="failure", text=text, remedy=f"check the spelling: ls -d {path}")
        return
    if not all(count["is_complete"] for count in known):
        yield Result(status="skipped", text="the data folder has more files than could be counted in two seconds")
        return
    values = [
        f"{count['files']} file{'' if count['files'] == 1 else 's'}, {format_bytes(count['bytes'])}"
        if count["is_readable"]
        else "none that can be read"
        for count in known
    ]
    keys = [f"{count['files']} {count['bytes']} {count['is_readable']}" for count in known]
    others = " ".join(states[index].name for index in range(len(known)) if keys[index] != keys[best])
    copy = f"for host in {others}; do rsync -a --mkpath {path}/ $host:{path}/; done"
    remedy = f"On {states[best].name}:  {copy}" if others else ""
    yield _row("data", states, values, keys=keys, status="failure" if missing else "warning", remedy=remedy)


STOPPING_CHECKS = (check_same_python, check_same_torch, check_same_gpus)
"""They are told, too, what stops a run."""
OTHER_CHECKS = (check_same_packages, check_same_settings, check_clocks, check_one_machine_each, check_same_data)


def _row(
    what: str,
    states: Sequence[HostState],
    values: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    stop: Difference | None = None,
    status: Status = "ok",
    remedy: str = "",
) -> Row:
    """A row that has this status where the values differ. `keys`: what to compare instead of the values; an empty one
    is a host to which it doesn't apply. `stop`: what the launcher says of it."""
    text = _tell(what, states, values)
    if stop is not None:
        return Row(what=what, values=tuple(values), status="failure", text=text, remedy=stop.hint)
    differ = len({key for key in keys or values if key}) > 1
    mark: Status = status if differ else "ok"
    return Row(what=what, values=tuple(values), status=mark, text=text, remedy=remedy if differ else "")


def _tell(what: str, states: Sequence[HostState], values: Sequence[str]) -> str:
    """`torch 2.13.0 on alice and carol, none on bob`; `no torch on bob`."""
    groups: dict[str, list[str]] = {}
    for state, value in zip(states, values, strict=True):
        groups.setdefault(value or "none", []).append(state.name)
    lacking = groups.pop("none", [])
    told = [f"{value} on {_join(names)}" for value, names in groups.items()]
    if not told:
        return f"no {what} on {_join(lacking)}"
    return f"{what} {', '.join([*told, *([f'none on {_join(lacking)}'] if lacking else [])])}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sync_command(states: Sequence[HostState], versions: Iterable[str]) -> str:
    """The command that gives the others what the first host with a version has; empty where no host has one."""
    named = list(zip(states, versions, strict=True))
    source = next(((state, version) for state, version in named if version not in ("", "none")), None)
    if source is None:
        return ""
    others = [state.name for state, version in named if version not in ("", source[1])]
    return f"paceline env sync -H {','.join(others)} --from {source[0].name}" if others else ""
