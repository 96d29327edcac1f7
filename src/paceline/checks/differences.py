"""What differs between hosts. Pure: patients in; a row of the table is a verdict that knows each host's value.

What stops a run because of versions and GPUs is decided in launch/compare.py, for `paceline run` and for this table.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from paceline.checks.findings import Finding, Status, check
from paceline.checks.identities import check_one_machine_each
from paceline.checks.patients import Patient
from paceline.checks.verdicts import Verdict, as_findings, collect
from paceline.launch.compare import Difference, compare_facts
from paceline.units import format_bytes

# Within it, lines of several hosts' logs can still be told in order, and make-like tools see no file of the future.
CLOCK_LIMIT_S = 1.0
# Must be the same on all hosts, or NCCL sends what the other side doesn't expect.
_MUST_AGREE = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "TORCH_DISTRIBUTED_DEBUG")
# May differ: names of interfaces and folders are each host's own, and so is what it shows.
_OWN = ("IFNAME", "_PATH", "_HOME", "_DEBUG", "_FILE", "_DIR", "VISIBLE_DEVICES", "_HCA", "_HOSTID", "_CACHE")

# Of a module that can be imported, but whose package isn't known by its name.
_THERE = "there"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Verdict):
    """One line of the table. Its status is the mark: a failure stops the run, a warning is worth a look."""

    what: str
    values: tuple[str, ...]
    """One per host, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came of comparing."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]


def compare_hosts(patients: Sequence[Patient], *, needs_torch: bool = True) -> Comparison:
    """All rows and all findings. One host alone is compared as well: it may lack something by itself."""
    rows: list[Row] = []
    findings: list[Finding] = []
    stops = _find_stops(patients, needs_torch=needs_torch)
    found = [(function, collect(function, patients, stops)) for function in STOPPING_CHECKS]
    found += [(function, collect(function, patients)) for function in OTHER_CHECKS]
    for function, verdicts in found:
        rows += [verdict for verdict in verdicts if isinstance(verdict, Row)]
        findings += as_findings(function, "", verdicts)
    return Comparison(rows=tuple(rows), findings=tuple(findings))


def _find_stops(patients: Sequence[Patient], *, needs_torch: bool) -> dict[str, Difference]:
    found = compare_facts(
        [patient.name for patient in patients],
        [patient.facts for patient in patients],
        [patient.slots for patient in patients],
        num_gpus=[patient.num_gpus for patient in patients],
        needs_torch=needs_torch,
    )
    return {difference.what: difference for difference in found}


@check("same-python")
def check_same_python(patients: Sequence[Patient], stops: dict[str, Difference]) -> Iterator[Verdict]:
    """The same Python on all hosts.

    What it looks at
        The version of each host's interpreter; 3.11.4 and 3.11.7 are the same.

    Why it matters
        Objects that ranks send each other, and checkpoints with pickled parts, are not read by another Python.

    How to mend it
        Name the right interpreter: `--python PATH`, or `python=PATH` in the hostfile.
    """
    yield _row("Python", patients, [patient.facts.python_version for patient in patients], stop=stops.get("Python"))
    yield _row("environment", patients, [patient.vitals.environment for patient in patients])


@check("same-torch")
def check_same_torch(patients: Sequence[Patient], stops: dict[str, Difference]) -> Iterator[Verdict]:
    """The same PyTorch on all hosts.

    What it looks at
        Whether there is a PyTorch, its version, and the CUDA that it was built for.

    Why it matters
        Ranks of different versions wait for each other at the start, or send what the other doesn't understand.

    How to mend it
        Install on one host what the other has; the line names the command that does it.
    """
    versions = [patient.facts.torch_version or "none" for patient in patients]
    stop = stops.get("torch")
    if stop is not None and (sync := _sync_command(patients, versions)):
        stop = dataclasses.replace(stop, hint=sync)
    yield _row("torch", patients, versions, stop=stop)
    with_gpu = [patient.vitals.torch_cuda or "none" if patient.num_gpus else "" for patient in patients]
    yield _row("CUDA", patients, with_gpu, status="warning", remedy=_sync_command(patients, with_gpu))


@check("same-gpus")
def check_same_gpus(patients: Sequence[Patient], stops: dict[str, Difference]) -> Iterator[Verdict]:
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
            yield _row(what, patients, stops[what].values, stop=stops[what])
    models = [_models(patient.facts.gpus) for patient in patients]
    if "GPUs" not in stops:
        kinds = [", ".join(sorted(set(patient.facts.gpus))) for patient in patients]
        slower = "leave the slower host out, or give it a smaller batch"
        yield _row("GPU models", patients, models, keys=kinds, status="warning", remedy=slower)
    yield _row("driver", patients, [patient.vitals.gpu["driver"] or "" for patient in patients])


def _models(gpus: Sequence[str]) -> str:
    return ", ".join(f"{count} × {model}" for model, count in Counter(gpus).items()) or "none"


@check("same-packages")
def check_same_packages(patients: Sequence[Patient]) -> Iterator[Verdict]:
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
        found = [_wheel_version(patient, prefix) if patient.num_gpus else "" for patient in patients]
        yield _row(what, patients, found, status=mark, remedy=_sync_command(patients, found))
    for name in sorted({name for patient in patients for name in patient.vitals.imports} | {"numpy"}):
        if name == "torch":
            continue
        versions = [_import_version(patient, name) for patient in patients]
        lacking = "none" in versions and any(name in patient.vitals.imports for patient in patients)
        if set(versions) == {"none"}:
            python = patients[0].facts.python_path
            if lacking:
                remedy = f"{python} -m pip install {name}   (on each host)"
                text = f"the script imports {name}, which no host has"
                yield Row(what=name, values=tuple(versions), status="failure", text=text, remedy=remedy)
            continue
        keys = ["" if version == _THERE else version for version in versions]
        if "none" in versions:
            keys = ["none" if version == "none" else "there" for version in versions]
        status: Status = "failure" if lacking else "warning"
        yield _row(name, patients, versions, keys=keys, status=status, remedy=_sync_command(patients, versions))


def _wheel_version(patient: Patient, prefix: str) -> str:
    return next((version for name, version in patient.vitals.packages.items() if name.startswith(prefix)), "")


def _import_version(patient: Patient, name: str) -> str:
    found = patient.vitals.imports.get(name)
    if found is None:
        return patient.vitals.packages.get(name, "none")
    return found["version"] or _THERE if found["found"] else "none"


@check("same-settings")
def check_same_settings(patients: Sequence[Patient]) -> Iterator[Verdict]:
    """The same settings of NCCL, Gloo and PyTorch on all hosts.

    What it looks at
        Variables NCCL_*, GLOO_*, TORCH_* and PYTORCH_* as the hosts themselves have them, and NCCL's own files; not
        those which name interfaces or folders.

    Why it matters
        With another algorithm or protocol on one host, NCCL hangs or reports a truncated message.

    How to mend it
        Give all ranks the same value with `--env NAME=VALUE`, or remove it where it is set.
    """
    settings = [{**_without_paths(patient.vitals.nccl_conf), **patient.vitals.variables} for patient in patients]
    names = sorted({name for of_host in settings for name in of_host if _is_shared(name)})
    for name in names:
        values = [of_host.get(name, "not set") for of_host in settings]
        status: Status = "failure" if name in _MUST_AGREE else "warning"
        value = next(value for value in values if value != "not set")
        yield _row(name, patients, values, status=status, remedy=f"paceline run --env {name}={value} ...")
    if not names:
        yield Verdict(status="ok", text="no host has settings of its own")


def _without_paths(settings: dict[str, str]) -> dict[str, str]:
    return {name: raw.partition(" (/")[0] for name, raw in settings.items()}


def _is_shared(name: str) -> bool:
    if name in _MUST_AGREE:
        return True
    return name.startswith(("NCCL_", "GLOO_", "TORCH_", "PYTORCH_")) and not any(part in name for part in _OWN)


@check("clocks")
def check_clocks(patients: Sequence[Patient]) -> Iterator[Verdict]:
    """Clocks that agree.

    What it looks at
        Each host's wall clock against this machine's, with the time that the question took as its uncertainty.

    Why it matters
        Logs of several hosts can't be put in order, checkpoints of the future confuse whatever compares dates, and
        certificates are refused.

    How to mend it
        Let all hosts follow a time server.
    """
    ahead = [patient.clock_ahead_s for patient in patients]
    off = [index for index, (low, high) in enumerate(ahead) if low > CLOCK_LIMIT_S or high < -CLOCK_LIMIT_S]
    values = tuple(_describe_clock(low, high) for low, high in ahead)
    zones = [patient.vitals.time_zone for patient in patients]
    if off:
        told = ", ".join(f"{patients[index].name} is {values[index]}" for index in off)
        names = ", ".join(patients[index].name for index in off)
        remedy = f"On {names}:  timedatectl set-ntp true   (or: chronyc makestep)"
        yield Row(what="clock", values=values, status="warning", text=f"clocks differ: {told}", remedy=remedy)
    else:
        yield Row(what="clock", values=values, status="ok", text="clocks agree to within a second")
    yield _row("time zone", patients, zones)


def _describe_clock(low_s: float, high_s: float) -> str:
    middle_s, error_s = (low_s + high_s) / 2, (high_s - low_s) / 2
    if abs(middle_s) <= max(error_s, 0.1):
        return "0.0 s off"
    side = "ahead" if middle_s > 0 else "behind"
    return f"{abs(middle_s):.1f} s {side} (± {error_s:.1f} s)"


@check("same-data")
def check_same_data(patients: Sequence[Patient]) -> Iterator[Verdict]:
    """The same data on all hosts.

    What it looks at
        The number of files and bytes below the data folder that was named, as far as two seconds of counting reach.

    Why it matters
        Ranks with more batches wait for ever for those that have fewer; with other files they train on other data.

    How to mend it
        Copy the folder anew, for instance with `rsync -a`.
    """
    counts = [patient.vitals.data for patient in patients]
    known = [count for count in counts if count is not None]
    if len(known) < len(patients) or not known:
        return  # none was named
    if not all(count["is_complete"] for count in known):
        yield Verdict(status="skipped", text="the data folder has more files than could be counted in two seconds")
        return
    values = [f"{count['files']} files, {format_bytes(count['bytes'])}" for count in known]
    keys = [f"{count['files']} {count['bytes']}" for count in known]
    path, best = known[0]["path"], max(range(len(known)), key=lambda index: known[index]["bytes"])
    others = [patients[index].name for index in range(len(known)) if keys[index] != keys[best]]
    remedy = f"On {patients[best].name}:  rsync -a {path}/ {others[0]}:{path}/" if others else ""
    yield _row("data", patients, values, keys=keys, status="warning", remedy=remedy)


STOPPING_CHECKS = (check_same_python, check_same_torch, check_same_gpus)
"""They are told, too, what stops a run."""
OTHER_CHECKS = (check_same_packages, check_same_settings, check_clocks, check_one_machine_each, check_same_data)


def _row(
    what: str,
    patients: Sequence[Patient],
    values: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    stop: Difference | None = None,
    status: Status = "ok",
    remedy: str = "",
) -> Row:
    """A row that has this status where the values differ. `keys`: what to compare instead of the values; an empty one
    is a host to which it doesn't apply. `stop`: what the launcher says of it."""
    text = _tell(what, patients, values)
    if stop is not None:
        return Row(what=what, values=tuple(values), status="failure", text=text, remedy=stop.hint)
    differ = len({key for key in keys or values if key}) > 1
    mark: Status = status if differ else "ok"
    return Row(what=what, values=tuple(values), status=mark, text=text, remedy=remedy if differ else "")


def _tell(what: str, patients: Sequence[Patient], values: Sequence[str]) -> str:
    """`torch 2.13.0 on alice and carol, none on bob`; `no torch on bob`."""
    groups: dict[str, list[str]] = {}
    for patient, value in zip(patients, values, strict=True):
        groups.setdefault(value or "none", []).append(patient.name)
    lacking = groups.pop("none", [])
    told = [f"{value} on {_join(names)}" for value, names in groups.items()]
    if not told:
        return f"no {what} on {_join(lacking)}"
    return f"{what} {', '.join([*told, *([f'none on {_join(lacking)}'] if lacking else [])])}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sync_command(patients: Sequence[Patient], versions: Iterable[str]) -> str:
    """The command that gives the others what the first host with a version has; empty where no host has one."""
    named = list(zip(patients, versions, strict=True))
    source = next(((patient, version) for patient, version in named if version not in ("", "none")), None)
    if source is None:
        return ""
    others = [patient.name for patient, version in named if version not in ("", source[1])]
    return f"paceline env sync -H {','.join(others)} --from {source[0].name}" if others else ""
